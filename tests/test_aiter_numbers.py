"""AITER's adapters, end to end on the strict stand-in, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fusion.backends import reference
from fusion.backends.aiter import operands, scales
from fusion.config import Config
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build, check_prologue, described, refusals, standin
from tests.prologue_cases import Case

PTS = "qk_norm_rope_kv_cache"
VARIANTS: dict[str, dict[str, Any]] = {
    "G0": {},
    "one token": {"tokens": 1},
    "many tokens": {"tokens": 70},
    "per-token cos and sin": {"positions": None},
    "int32 positions and slots": {"positions": "int32", "slots": "int32"},
    "fewer slots than tokens": {"fewer_slots": 3},
    "no weights": {"weight": None},
    "one plus w, added in bf16": {"weight_mode": "1+w"},
    "early cast": {"norm_cast": "early"},
    "partial rotary": {"rotary_dim": 64},
    "interleaved": {"rope_style": "interleaved"},
    "interleaved, partial, per token": {
        "rope_style": "interleaved", "rotary_dim": 32, "positions": None
    },
    "float32 tables": {"table": "f32", "rope_dtype": "f32"},
    "D 64": {"dim": 64},
    "D 256": {"dim": 256},
    "float32 model": {
        "dtype": "f32", "weight": "f32", "table": "f32", "rope_dtype": "f32", "out_dtype": "f32",
        "cache": "f32", "norm_cast": "none",
    },
    "float16 model": {
        "dtype": "f16", "weight": "f16", "table": "f16", "rope_dtype": "f16", "out_dtype": "f16",
        "cache": "f16",
    },
    "one KV head": {"kv_heads": 1},
    "NHD": {"layout": "nhd"},
    "HND": {"layout": "hnd"},
    "K and V planes": {"layout": "kv_first"},
    "K and V in a block": {"layout": "block_first"},
    "static cache": {"layout": "static", "block": 64},
    "page of one": {"block": 1},
    "padded pages": {"layout": "padded"},
    "outliers": {"outliers": True, "norm_cast": "early", "table": "f32", "rope_dtype": "f32"},
    "not packed after all": {"qkv": "separate"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_prologue(name: str) -> None:
    case = dataclasses.replace(G0, **VARIANTS[name])
    with standin():
        args, _ = build(case)
        if name != "not packed after all":  # the adapter packs what a compiler moved apart
            assert refusals(PTS, args) == []
        check_prologue(case)


@pytest.mark.parametrize("scale", [None, (0.25, 3.0), (3.0, 0.25)])
@pytest.mark.parametrize(("arch", "cache"), [("gfx942", "fnuz"), ("gfx950", "fn")])
@pytest.mark.parametrize("version", ["0.1.16", "0.1.20"])
def test_prologue_fp8(scale: Any, arch: str, cache: str, version: str) -> None:
    case = dataclasses.replace(
        G0, cache=cache, scales=scale, layout="block_first", outliers=True, tokens=40
    )
    args, _ = build(case)
    assert refusals(PTS, args, arch=arch, version=version) == []
    with standin(version, arch):
        check_prologue(case)


def test_the_right_scale_goes_to_the_right_cache() -> None:
    """K's scale used for V, or a scale the wrong way round, would be off by 12 or more."""
    case = dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0), padding=False)
    with standin():
        args, _ = build(case)
        KERNELS[PTS].fn(**args)
    slots = args["slot_mapping"]
    stored = args["value_cache"][slots // 16, slots % 16].float() * 3.0
    torch.testing.assert_close(stored, args["value"].float(), rtol=0.07, atol=0.02)


def test_no_tokens_never_calls_aiter() -> None:
    with standin() as state:
        for case in (G0, Case(**{**dataclasses.asdict(G0), "op": "rope_kv_cache"})):
            args, storage = build(dataclasses.replace(case, tokens=0))
            before = storage.clone()
            q, k = KERNELS[case.op].fn(**args)
            assert q.shape == (0, 8, 128)
            assert k.shape == (0, 4, 128)
            assert torch.equal(storage, before)
        args, _ = prologue_cases.build(dataclasses.replace(G0, op="kv_cache_write", tokens=0))
        KERNELS["kv_cache_write"].fn(**args)
        assert state.calls == []


ROPE: dict[str, dict[str, Any]] = {
    "table": {}, "per token": {"positions": None}, "full width": {"full_width": True},
    "interleaved": {"rope_style": "interleaved"},
    "interleaved, full width, per token": {
        "rope_style": "interleaved", "full_width": True, "positions": None
    },
    "float32 rope": {"rope_dtype": "f32"},
    "float32 rope and tables": {"rope_dtype": "f32", "table": "f32"},
    "float32 tables": {"table": "f32"}, "fewer slots": {"fewer_slots": 2},
    "transposed": {"qkv": "transposed"}, "strided": {"qkv": "strided"}, "NHD": {"layout": "nhd"},
    "int32": {"dim": 64, "slots": "int32", "positions": "int32"}, "padded": {"layout": "padded"},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPE)
def test_rope(name: str) -> None:
    case = dataclasses.replace(G0, op="rope_kv_cache", **ROPE[name])
    with standin():
        args, _ = build(case)
        assert refusals("rope_kv_cache", args) == []
        check_prologue(case)
        # Nothing is rounded elsewhere: equal bits.
        q, _ = KERNELS["rope_kv_cache"].fn(**build(case)[0])
    assert torch.equal(q, reference.rope_kv_cache(**build(case)[0])[0])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("layout", ["nhd", "kv_first", "block_first"])
def test_write(dtype: str, layout: str) -> None:
    case = Case(
        op="kv_cache_write", dim=80, dtype=dtype, cache=dtype, layout=layout, block=24,
        fewer_slots=1, slots="int32",
    )  # fmt: skip
    with standin("0.1.12"):
        args, _ = prologue_cases.build(case)
        assert refusals(case.op, args, version="0.1.12") == []
        prologue_cases.check(case, KERNELS[case.op].fn)


def attention_args(
    seed: int = 0,
    *,
    lens: tuple[int, ...] = (37, 5, 0, 80),
    rows: tuple[int, ...] = (3, 3, 3, 3),
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None,
    page: int = 16,
    dim: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    tail: int = 0,
    window: tuple[int, int] = (-1, -1),
    device: str = "cpu",
    **more: Any,
) -> dict[str, Any]:
    """A paged call; slots that hold no key are NaN, pages left of the window are out of range."""
    g = torch.Generator().manual_seed(seed)
    width = -(-max(lens) // page) + 1
    blocks = len(lens) * width + 1
    kv = torch.full((blocks, kv_heads, page, 2 * dim), float("nan")).transpose(1, 2)
    table = torch.randperm(blocks, generator=g)[: len(lens) * width].view(len(lens), width)
    table = table.to(torch.int32)
    for b, length in enumerate(lens):
        for j in range(length):
            kv[table[b, j // page], j % page] = torch.randn(kv_heads, 2 * dim, generator=g)
        table[b, -(-length // page) :] = 10**6  # pages that are not there
        if window[0] >= 0:
            gone = max(0, length - rows[b] - window[0]) // page
            table[b, :gone] = -(10**6)  # pages that were freed
    if cache in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        limit = torch.finfo(cache).max
        kv = (kv * 4).clamp(-limit, limit)
    kv = kv.to(cache or dtype).to(device)
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + tail
    args = {
        "query": torch.randn(tokens, heads, dim, generator=g).to(dtype),
        "key_cache": kv[..., :dim], "value_cache": kv[..., dim:], "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32), "query_start_loc": starts,
        "max_query_len": max(rows), "max_seq_len": max(lens), "scale": dim**-0.5,
        "causal": True, "window_left": window[0], "window_right": window[1], **more,
    }  # fmt: skip
    return {
        n: v.to(device) if isinstance(v, torch.Tensor) and "cache" not in n else v
        for n, v in args.items()
    }


def check_attention(args: dict[str, Any], **how: Any) -> None:
    assert refusals("paged_attention", args, **how) == []
    got = KERNELS["paged_attention"].fn(**args)
    want = reference.paged_attention(**args)
    assert got.dtype == want.dtype
    bound = (
        4
        * torch.finfo(args["query"].dtype).eps
        * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    )
    assert ((got.float() - want.float()).abs() <= bound).all()


CAUSAL: dict[str, dict[str, Any]] = {
    "ragged": {"rows": (3, 5, 0, 1)},
    "decode with idle sequences": {"rows": (1, 0, 0, 1)},
    "rows of no sequence": {"rows": (2, 1, 0, 3), "tail": 2},
    "window": {"window": (20, -1), "rows": (3, 5, 0, 1)},
    "window (w - 1, 0)": {"window": (7, 0), "rows": (3, 5, 0, 1)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 8), "rows": (3, 2, 0, 4)},
    "fp8": {"cache": torch.float8_e4m3fnuz, "k_scale": torch.tensor(0.25),
            "v_scale": torch.tensor([3.0])},
    "fp8, V's scale only": {"cache": torch.float8_e4m3fnuz, "v_scale": torch.tensor(3.0)},
    "fp16": {"dtype": torch.float16}, "page 32": {"page": 32}, "page 128": {"page": 128},
    "page 1": {"page": 1, "lens": (9, 5, 0, 3)},
    "head size 80": {"dim": 80}, "head size 256": {"dim": 256},
    "long": {"lens": (700, 5, 0, 80)},
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_attention(name: str) -> None:
    change = dict(CAUSAL[name])
    if "rows" not in change:
        change["rows"] = (3, 3, 0, 3)
    with standin():
        check_attention(attention_args(**change))


NON_CAUSAL: dict[str, dict[str, Any]] = {
    "block": {}, "one row": {"rows": (1, 1, 1, 1)},
    "fp16, head size 96": {"dtype": torch.float16, "dim": 96},
    "window left": {"window": (20, -1)}, "window both": {"window": (20, 4)},
    "window right": {"window": (-1, 1)}, "window (w - 1, 0)": {"window": (7, 0)},
    "page 64": {"page": 64}, "page 24": {"page": 24}, "one KV head": {"kv_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", NON_CAUSAL)
def test_non_causal_attention(name: str) -> None:
    with standin():
        check_attention(attention_args(causal=False, **NON_CAUSAL[name]))


@pytest.mark.parametrize("window", [(-1, -1), (9, 2)])
def test_ragged_rows_that_look_uniform_are_right(window: tuple[int, int]) -> None:
    """Three sequences of up to 4 rows in 12 tokens, but 4, 1 and 3 rows, and 4 rows of none."""
    args = attention_args(lens=(37, 5, 20), rows=(4, 1, 3), tail=4, causal=False, window=window)
    with standin():
        check_attention(args)


def test_pages_left_of_a_window_are_left_out() -> None:
    """Three pages of a window of 9 are gone; the key of the window's edge stays where it was."""
    args = attention_args(lens=(70, 20), rows=(2, 2), window=(9, -1))
    table, lengths = operands.live_pages(
        args["block_table"], args["seq_lens"], torch.tensor([2, 2]), 9, 16
    )
    assert lengths.tolist() == [70 - 48, 20]
    assert table[0, :2].tolist() == args["block_table"][0, 3:5].tolist()
    assert (args["block_table"][0, :3] < 0).all()
    assert (table[:, 0] >= 0).all()


def test_non_causal_is_really_non_causal() -> None:
    """Were AITER's default (causal) or a window of (w - 1, 0) used, the first row would differ."""
    args = attention_args(causal=False, lens=(8,), rows=(8,))
    with standin():
        got = KERNELS["paged_attention"].fn(**args)
        causal = KERNELS["paged_attention"].fn(**{**args, "causal": True})
    assert (got[0].float() - causal[0].float()).abs().max() > 0.1


def test_a_joined_table_is_used_as_it_is() -> None:
    """A table that the graph builds once a step is shared by all layers, never copied."""
    table = torch.randn(7, 64)
    got, at = operands.joined_table(table[:, :32], table[:, 32:], None, torch.float32)
    assert got.data_ptr() == table.data_ptr()
    assert torch.equal(got, table)
    assert at.tolist() == list(range(7))
    other, _ = operands.joined_table(table[:, :32], table[:, 32:], None, torch.bfloat16)
    assert other.dtype == torch.bfloat16
    # Half a vector behind the table may be read by the interleaved kernel: then there is a copy.
    spare, _ = operands.joined_table(table[:, :32], table[:, 32:], None, torch.float32, slack=4)
    assert spare.data_ptr() != table.data_ptr()
    assert spare.untyped_storage().nbytes() >= (7 * 64 + 4) * 4


def test_every_launch_is_named_for_the_report() -> None:
    for op, args in ((PTS, build(G0)[0]), ("paged_attention", attention_args())):
        call = described(op, args)
        found = KERNELS[op].describe(call)  # type: ignore[misc]
        assert found["function"].startswith(("fused_qk_norm", "unified"))
        assert found["rounding"]
    exact = Config(numerics="exact")
    reasons = refusals(PTS, build(G0)[0], config=exact)
    assert [r.code for r in reasons] == ["gate.rounding"]
    early = dataclasses.replace(G0, norm_cast="early", rope_dtype="f32")
    assert refusals(PTS, build(early)[0], config=exact) == []


def test_scale_copies_are_the_ones_handed_over() -> None:
    """The stand-in takes the caller's scales for device memory and accepts host copies only."""
    case = dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0))
    args, _ = build(case)
    host = scales.HostScales(on_host=lambda t: False)
    with standin() as state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales, "HOST", host)
        state.device_pointers |= {args[n].data_ptr() for n in ("k_scale", "v_scale")}
        KERNELS[PTS].fn(**args)
        handed = state.calls[-1][1][16:18]
    assert [float(t) for t in handed] == [0.25, 3.0]
