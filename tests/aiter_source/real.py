"""Makes a source tree of the real AITER importable on a machine without a GPU.

Only its Triton operations, and only under Triton's interpreter. Nothing is installed and nothing of
AITER is copied: the tree is named by ``AITER_SRC``. See docs/aiter.md for how to get one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SOURCE = os.environ.get("AITER_SRC", "").strip()
WHY_NOT = "" if SOURCE else "AITER_SRC is not set: no source tree of AITER to run against"
if not WHY_NOT and not (Path(SOURCE) / "aiter" / "ops" / "triton").is_dir():
    WHY_NOT = f"AITER_SRC={SOURCE} holds no aiter/ops/triton"
if not WHY_NOT and importlib.util.find_spec("triton") is None:
    WHY_NOT = "Triton is not installed"

ARCH = "gfx942"


class _Anything(types.ModuleType):
    """A module that has every name; the stand-in for kernels that cannot be built here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def _driver() -> Any:
    """A Triton driver that describes an MI300X and can do nothing with it."""
    import torch
    from triton.backends.compiler import GPUTarget

    driver = mock.MagicMock(name="driver")
    driver.get_current_target.return_value = GPUTarget("hip", ARCH, 64)
    driver.get_active_torch_device.return_value = torch.device("cpu")
    driver.get_current_device.return_value = 0
    driver.get_current_stream.return_value = 0
    driver.get_device_interface.return_value = mock.MagicMock(name="device")
    driver.get_benchmarker.return_value = lambda fn, **_: fn()
    return driver


def _reset() -> None:
    import triton

    with contextlib.suppress(RuntimeError):  # a machine without a GPU has no driver to go back to
        triton.runtime.driver.reset_active()


@contextlib.contextmanager
def tree() -> Iterator[None]:
    """The tree on ``sys.path``, with environment and driver set; restored afterwards."""
    environment = {"TRITON_INTERPRET": "1", "AITER_TRITON_ONLY": "1", "CU_NUM": "304",
                   "AITER_LOG_LEVEL": "ERROR"}  # fmt: skip
    with mock.patch.dict(os.environ, environment), contextlib.ExitStack() as stack:
        import torch
        import triton

        properties = types.SimpleNamespace(multi_processor_count=304, gcnArchName=ARCH)
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
        )
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        triton.runtime.driver.set_active(_driver())
        stack.callback(_reset)
        backward = "aiter.ops.triton._triton_kernels.flash_attn_triton_amd.bwd"
        stack.enter_context(mock.patch.dict(sys.modules, {backward: _Anything(backward)}))
        sys.path.insert(0, SOURCE)
        stack.callback(sys.path.remove, SOURCE)
        yield


def release() -> str:
    """The release of the tree: ``AITER_VERSION``, else its newest changes are assumed."""
    return os.environ.get("AITER_VERSION", "0.1.20.post1")
