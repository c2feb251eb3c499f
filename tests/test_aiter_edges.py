"""AITER's gate where sizes are unknown or large, and packages that cannot even be looked at."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusion.backends.aiter import contract, probe
from fusion.config import Config
from fusion.kernel import KernelCall
from fusion.reason import Reason
from tests.aiter_cases import G0, KERNELS, build, described, forget_aiter
from tests.test_aiter_probe import package

ROPE = KERNELS["rope_kv_cache"]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    forget_aiter()
    yield
    forget_aiter()


def rope_call(**how: Any) -> KernelCall:
    return described("rope_kv_cache", build(dataclasses.replace(G0, op="rope_kv_cache"))[0], **how)


def with_rows(call: KernelCall, rows: int | None) -> KernelCall:
    """The call with another token count (None: a symbol)."""
    tensors = dict(call.tensors)
    for name in ("query", "key", "value", "slot_mapping"):
        spec = tensors[name]
        assert spec is not None
        tensors[name] = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]))
    return dataclasses.replace(call, tensors=tensors)


def test_offsets_of_tokens_fit_32_bits() -> None:
    call = rope_call()
    query = call.need("query")
    assert query.stride[0] is not None
    most = (2**31 - 1) // query.stride[0]
    assert ROPE.requires.unmet(with_rows(call, most)) == []
    (reason,) = ROPE.requires.unmet(with_rows(call, most + 1))
    assert (reason.code, reason.have) == (
        "gate.token-range", f"{(most + 1) * query.stride[0]} elements"
    )  # fmt: skip
    assert ROPE.requires.unmet(with_rows(call, None)) == []  # a symbol is not refused for it


def test_the_rope_kernel_says_what_comes_back() -> None:
    plain = ROPE.describe(rope_call())  # type: ignore[misc]
    assert plain["function"] == contract.ROPE.name
    assert "returned k" not in plain
    tolerant = rope_call(config=Config(numerics="tolerant"), return_key=True)
    assert ROPE.requires.unmet(tolerant) == []
    assert ROPE.describe(tolerant)["returned k"] == "rows without a slot are zeros"  # type: ignore[misc]
    (reason,) = ROPE.requires.unmet(rope_call(config=Config(numerics="exact"), return_key=True))
    assert reason.code == "gate.argument"


@pytest.mark.parametrize("error", [OSError("stale handle"), SystemExit(3)])
def test_looking_for_the_package_may_fail(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "aiter":
                raise error

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    reason = probe.function(contract.PTS)
    assert isinstance(reason, Reason)
    assert reason.code == "gate.aiter-probe"
    assert f"looking for aiter raised {type(error).__name__}: {error}" in reason.message


def test_a_signature_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""
        class Odd:
            __signature__ = 3
            def __call__(self): ...
        {contract.PTS.name} = Odd()
    """
    monkeypatch.syspath_prepend(str(package(tmp_path, body)))
    reason = probe.function(contract.PTS)
    assert isinstance(reason, Reason)
    assert reason.code == "gate.aiter-callable"
    assert "cannot be read" in reason.message
