"""The numeric tests of the adapters on the real AITER (``make test-rocm``).

The very cases of tests/test_aiter_numbers.py, without the stand-in. They have never been run: no
AMD GPU was at hand.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusion.target import Target
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build, check_prologue, refusals
from tests.prologue_cases import Case
from tests.test_aiter_numbers import CAUSAL, NON_CAUSAL, ROPE, VARIANTS, attention_args
from tests.test_aiter_numbers import check_attention as check_on_this_machine

pytestmark = [
    pytest.mark.rocm,
    pytest.mark.skipif(
        not (torch.version.hip and torch.cuda.is_available()), reason="needs an AMD GPU"
    ),
]


def _here() -> dict[str, str | None]:
    target = Target.current()
    return {"arch": target.arch, "version": target.version_text("aiter")}


def _need(op: str, args: dict[str, object]) -> None:
    """Skip what this chip or release may not run, with the gate's own words."""
    reasons = refusals(op, args, **_here())
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


@pytest.mark.parametrize("name", VARIANTS)
def test_prologue(name: str) -> None:
    case = dataclasses.replace(G0, **VARIANTS[name])
    if name != "not packed after all":
        _need(case.op, build(case, "cuda")[0])
    check_prologue(case, "cuda")


@pytest.mark.parametrize("scale", [None, (0.25, 3.0), (3.0, 0.25)])
def test_prologue_fp8(scale: tuple[float, float] | None) -> None:
    cache = "fnuz" if Target.current().fp8_dtype == torch.float8_e4m3fnuz else "fn"
    case = dataclasses.replace(
        G0, cache=cache, scales=scale, layout="block_first", outliers=True, tokens=40
    )
    _need(case.op, build(case, "cuda")[0])
    check_prologue(case, "cuda")


@pytest.mark.parametrize("name", ROPE)
def test_rope(name: str) -> None:
    case = dataclasses.replace(G0, op="rope_kv_cache", **ROPE[name])
    _need(case.op, build(case, "cuda")[0])
    check_prologue(case, "cuda")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("layout", ["nhd", "kv_first", "block_first"])
def test_write(dtype: str, layout: str) -> None:
    case = Case(
        op="kv_cache_write", dim=80, dtype=dtype, cache=dtype, layout=layout, block=24,
        fewer_slots=1, slots="int32",
    )  # fmt: skip
    _need(case.op, prologue_cases.build(case, "cuda")[0])
    prologue_cases.check(case, KERNELS[case.op].fn, "cuda")


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str) -> None:
    change = {"rows": (3, 3, 0, 3), **CAUSAL[name]}
    if "fp8" in name:
        change["cache"] = Target.current().fp8_dtype
    args = attention_args(device="cuda", **change)
    _need("paged_attention", args)
    check_on_this_machine(args, **_here())


@pytest.mark.parametrize("name", NON_CAUSAL)
def test_non_causal(name: str) -> None:
    args = attention_args(device="cuda", causal=False, **NON_CAUSAL[name])
    _need("paged_attention", args)
    check_on_this_machine(args, **_here())
