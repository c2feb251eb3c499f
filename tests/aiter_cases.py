"""AITER's stand-in, and calls of the operations as its gate and its adapters see them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from fusion.backends import aiter, reference
from fusion.backends.aiter import probe, runtime
from fusion.config import Config
from fusion.kernel import Kernel, KernelCall
from fusion.ops.dispatch import describe_call
from fusion.reason import Reason
from fusion.target import Target
from tests import prologue_cases
from tests.prologue_cases import Case

HERE = Path(__file__).parent
STANDIN = HERE / "standin_aiter"
CONTRACT: dict[str, Any] = json.loads((HERE / "data" / "aiter_contract.json").read_text())
TAGS = [tag for tag in CONTRACT["tags"] if Version(tag) >= Version("0.1.10")]
KERNELS: dict[str, Kernel] = {k.op: k for k in aiter.kernels()}


def forget_aiter() -> None:
    """Drop every loaded module of a package called aiter, and what the probe remembers."""
    for name in [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]:
        del sys.modules[name]
    probe.reset()


@contextlib.contextmanager
def standin(version: str = "0.1.20", arch: str = "gfx942") -> Iterator[Any]:
    """The stand-in as the AITER of this process; yields its state."""
    forget_aiter()
    sys.path.insert(0, str(STANDIN))
    try:
        state = importlib.import_module("aiter._strict").STATE
        state.version, state.arch = Version(version), arch
        with runtime.assume(Target.parse(arch, aiter=version)):
            yield state
    finally:
        sys.path.remove(str(STANDIN))
        forget_aiter()


def described(
    op: str,
    args: dict[str, Any],
    *,
    arch: str = "gfx942",
    version: str | None = "0.1.20",
    config: Config | None = None,
    **attributes: Any,
) -> KernelCall:
    """The call for the gate, with the storage of every tensor known."""
    versions = {} if version is None else {"aiter": version}
    target = Target.parse(arch, **versions)
    call = describe_call(op, args, target=target, config=config)
    tensors = {
        n: s
        if s is None or not isinstance(args[n], Tensor)
        else dataclasses.replace(s, base=args[n].untyped_storage()._cdata)
        for n, s in call.tensors.items()
    }
    return dataclasses.replace(call, tensors=tensors, attributes={**call.attributes, **attributes})


def refusals(op: str, args: dict[str, Any], **how: Any) -> list[Reason]:
    """The unmet conditions of AITER's kernel for a call."""
    return KERNELS[op].requires.unmet(described(op, args, **how))


def codes(op: str, args: dict[str, Any], **how: Any) -> set[str]:
    """The reason codes of :func:`refusals`."""
    return {r.code for r in refusals(op, args, **how)}


G0 = Case(
    tokens=5, q_heads=8, kv_heads=4, dim=128, dtype="bf16", weight="bf16", table="bf16",
    rope_dtype="bf16", out_dtype="bf16", cache="bf16", layout="packed", block=16, blocks=8,
)  # fmt: skip
"""The reference block of open_cases.md: Qwen3-like, packed qkv, packed cache."""


def build(case: Case, device: str = "cpu") -> tuple[dict[str, Any], Tensor]:
    """Arguments of a prologue case with one epsilon for q and k, and its cache's storage."""
    args, storage = prologue_cases.build(case, device)
    if "norm" in case.op:
        args["k_eps"] = args["q_eps"]
    assert storage is not None
    return args, storage


def rows_with_slot(args: dict[str, Any]) -> Tensor:
    """``[T]`` bool: which rows are written."""
    tokens = args["key"].shape[0]
    keep = torch.zeros(tokens, dtype=torch.bool, device=args["key"].device)
    keep[: args["slot_mapping"].shape[0]] = args["slot_mapping"] >= 0
    return keep


def check_prologue(case: Case, device: str = "cpu") -> None:
    """Run AITER's adapter on a case and compare q, k and the whole cache with the reference.

    AITER rounds once where the graph may round twice, so q and k may differ by a few units of
    their dtype. The cache must hold exactly the bytes of a reference write of AITER's own k.
    """
    args, storage = build(case, device)
    want_args, want_storage = build(case, device)
    want_args["return_key"] = args["return_key"] = True
    run = KERNELS[case.op].fn
    fp8 = case.cache in ("fn", "fnuz")
    if fp8:
        args["return_key"] = False
    q, k = run(**args)
    q_want, k_want = getattr(reference, case.op)(**want_args)
    scale = q_want.double().abs().amax(-1, keepdim=True).clamp(min=1.0) * 2
    prologue_cases.close("q", q, q_want, 3, scale)
    rows = rows_with_slot(args)
    if fp8:
        check_fp8_cache(args, storage, want_args, want_storage)
        return
    scale = k_want.double().abs().amax(-1, keepdim=True).clamp(min=1.0) * 2
    prologue_cases.close("k", k[rows], k_want[rows], 3, scale[rows])
    assert not k[~rows].any(), "rows without a slot must be defined, as zeros"
    expected_args, expected = build(case, device)
    write = ("value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
    reference.kv_cache_write(k, **{n: expected_args[n] for n in write})
    assert torch.equal(storage, expected), f"{int((storage != expected).sum())} cache bytes differ"
    again, storage_again = build(case, device)
    q_again, none = run(**{**again, "return_key": False})
    assert none.shape[0] == 0
    assert torch.equal(q, q_again)
    assert torch.equal(storage, storage_again), "the same call gives other bits"


def check_fp8_cache(
    args: dict[str, Any], storage: Tensor, want: dict[str, Any], expected: Tensor
) -> None:
    """Each half within one fp8 step of the right one, everything else equal to the bit.

    K's input to the cast may differ by a few units of the 16-bit dtype at the size of the head; V's
    is the same, so that V differs by multiplying with 1 / scale instead of dividing at most.
    """
    for half, scale in (("key_cache", args["k_scale"]), ("value_cache", args["v_scale"])):
        got, right = args[half], want[half]
        limit = torch.finfo(got.dtype).max
        a, b = got.float(), right.float()
        assert a.abs().max() <= limit
        size = b.abs().amax(-1, keepdim=True)
        slack = 6 * 2**-8 * size if half == "key_cache" else 0.0
        step = 2**-3 * torch.maximum(a.abs(), b.abs()) + torch.finfo(got.dtype).smallest_normal / 8
        assert ((a - b).abs() <= step + slack).all(), f"{half} with scale {scale}"
        if half == "value_cache" and scale is None:
            assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))
        got.view(torch.uint8).copy_(right.view(torch.uint8))
    assert torch.equal(storage, expected), "bytes outside the written halves differ"
