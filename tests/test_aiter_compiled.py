"""Compiled graphs that name AITER, run on the stand-in: what a gfx942 machine would execute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import ops
from fusion.ops import dispatch
from fusion.target import Target
from tests import prologue_cases
from tests.aiter_cases import check_fp8_cache, standin

T, HQ, HK, D, BLOCK, BLOCKS = 5, 8, 4, 128, 16, 8
WIDTH = (HQ + 2 * HK) * D
TARGET = Target.parse("gfx942", aiter="0.1.20")


@pytest.fixture
def on_gfx942(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are asked about as if they lay on an MI300X."""
    real = dispatch.describe_call

    def describe(op: str, arguments: Any, **how: Any) -> Any:
        return real(op, arguments, **{**how, "target": TARGET})

    monkeypatch.setattr(dispatch, "describe_call", describe)


def inputs(dtype: torch.dtype, cache: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    table = torch.randn(40, D, generator=g).to(dtype)
    return {
        "x": torch.randn(T, 64, generator=g).to(dtype),
        "w": (torch.randn(64, WIDTH, generator=g) / 8).to(dtype),
        "norm": (1 + 0.1 * torch.randn(2, D, generator=g)).to(dtype),
        "table": table,
        "positions": torch.randint(0, 40, (T,), generator=g),
        "cache": torch.randint(0, 100, (BLOCKS, HK, BLOCK, 2 * D), generator=g).to(cache),
        "slots": torch.tensor([0, -1, 5, 77, -1]),
        "scales": torch.tensor([0.25, 3.0]),
    }


def block(a: dict[str, Tensor], kernel: str) -> tuple[Tensor, Tensor]:
    """G0: projection, per-head norm, rope, write into a packed cache; returns q and k."""
    q, k, v = (a["x"] @ a["w"]).split((HQ * D, HK * D, HK * D), dim=-1)
    halves = a["cache"].transpose(1, 2)
    scaled = a["cache"].dtype == torch.float8_e4m3fnuz
    k_scale, v_scale = (a["scales"][0], a["scales"][1]) if scaled else (None, None)
    return ops.qk_norm_rope_kv_cache(
        q.unflatten(1, (HQ, D)), k.unflatten(1, (HK, D)), v.unflatten(1, (HK, D)),
        a["norm"][0], a["norm"][1], a["table"][:, : D // 2], a["table"][:, D // 2 :],
        a["positions"], halves[..., :D], halves[..., D:], a["slots"], k_scale, v_scale,
        q_eps=1e-6, k_eps=1e-6, rope_style="half", rotary_dim=D, rope_dtype=a["x"].dtype,
        out_dtype=a["x"].dtype,
        return_key=not scaled, kernel=kernel,
    )  # fmt: skip


@pytest.mark.usefixtures("on_gfx942")
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", ["aiter", "auto"])
def test_a_compiled_block_runs_on_the_stand_in(
    backend: str, cache: torch.dtype, kernel: str
) -> None:
    want, have = inputs(torch.bfloat16, cache), inputs(torch.bfloat16, cache)
    q_want, k_want = block(want, "reference")
    with standin() as state:
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        q, k = compiled(have, kernel)
        launches = [c for c in state.calls if c[0] == "pts"]
    assert len(launches) == 1
    qkv, table = launches[0][1][0], launches[0][1][3]
    assert qkv.untyped_storage().nbytes() == T * WIDTH * 2, "qkv was copied together"
    assert table.data_ptr() == have["table"].data_ptr(), "the table was copied"
    _close("q", q, q_want)
    before = inputs(torch.bfloat16, cache)["cache"]
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[have["slots"][have["slots"] >= 0]] = False
    assert torch.equal(_slots(have["cache"])[untouched], _slots(before)[untouched])
    if cache == torch.bfloat16:
        rows = have["slots"] >= 0
        _close("k", k[rows], k_want[rows])
        _close("cache", have["cache"], want["cache"])
    else:
        mine, right = _halves(have), _halves(want)
        check_fp8_cache(
            mine, have["cache"].view(torch.uint8), right, want["cache"].view(torch.uint8)
        )


def _halves(a: dict[str, Tensor]) -> dict[str, Tensor]:
    nhd, scales = a["cache"].transpose(1, 2), a["scales"]
    return {"key_cache": nhd[..., :D], "value_cache": nhd[..., D:], "k_scale": scales[0],
            "v_scale": scales[1]}  # fmt: skip


def _close(name: str, got: Tensor, want: Tensor) -> None:
    """Rounded at other points: a few units of the last place at the size of the head."""
    size = want.double().abs().amax(-1, keepdim=True).clamp(min=1.0) * 2
    prologue_cases.close(name, got, want, 3, size)


def _slots(cache: Tensor) -> Tensor:
    """K and V as bytes, one row for each slot."""
    return cache.transpose(1, 2).contiguous().view(torch.uint8).flatten(0, 1).flatten(1)


@pytest.mark.usefixtures("on_gfx942")
def test_a_call_that_aiter_may_not_run_names_why() -> None:
    a = inputs(torch.bfloat16, torch.bfloat16)
    a["table"] = a["table"].to(torch.float64)
    with standin(), pytest.raises(Exception, match=r"gate\.table"):
        block(a, "aiter")
