"""The layout properties through the Triton kernels under the interpreter; run by
``test_interpreted.py`` in a process of its own (``tests.triton_interpreter`` must be imported
before triton)."""

from __future__ import annotations

import os

import tests.triton_interpreter  # isort: skip  # noqa: F401  (sets TRITON_INTERPRET)

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusion.backends.triton import cache_write, paged_attention, prologue
from fusion.layout import KVCacheLayout
from tests.layout.checks import (
    REFERENCE,
    Kernels,
    attend,
    check_prologue,
    check_write,
    integers,
    written,
)
from tests.layout.strategies import DTYPES, Geometry, Slots, build, geometries, rows, slots
from tests.layout.test_properties import EDGE, ROWS, SCALES, other

EXAMPLES = int(os.environ.get("LAYOUT_EXAMPLES", "18"))
SMALL = 1 << 14
TRITON = Kernels(
    cache_write.kv_cache_write, prologue.rope_kv_cache, paged_attention.paged_attention, 16
)


@given(st.data(), geometries(most=SMALL), SCALES, ROWS)
@settings(max_examples=EXAMPLES)
def test_split_then_write_then_read_is_the_identity(data, g, scales, dtype) -> None:  # type: ignore[no-untyped-def]
    check_write(g, data.draw(slots(g)), scales, dtype, TRITON)


def test_each_layout_with_each_dtype() -> None:
    for layout in KVCacheLayout:
        for dtype in ("bf16", "e4m3fn", "uint8 as e4m3fnuz"):
            dv = 48 if layout.equal_head_dims else 32
            g = Geometry(layout, 3, 16, 3, 48, dv, dtype, 2, 1)
            mapping = Slots(7, (0, -1, 47, 15, -1, 16), torch.int32)
            check_write(g, mapping, (0.25, 3.0), torch.bfloat16, TRITON)


@given(st.data(), geometries(most=SMALL), SCALES)
@settings(max_examples=max(EXAMPLES // 3, 5))
def test_the_fused_prologue_writes_what_rope_and_write_would(data, g, scales) -> None:  # type: ignore[no-untyped-def]
    check_prologue(data, g, scales, TRITON)


@given(st.data(), geometries(most=SMALL // 4))
@settings(max_examples=max(EXAMPLES // 3, 5))
def test_equal_content_gives_equal_results_in_any_two_layouts(data, first) -> None:  # type: ignore[no-untyped-def]
    assume(min(first.dim, first.dim_v) >= TRITON.least_dim)
    second = data.draw(other(first))
    seed, scales = data.draw(st.integers(0, 99)), data.draw(SCALES)
    results = []
    for g in (first, second):
        memory = build(g, seed + 1)
        key, value = rows(g, g.slots, seed, torch.bfloat16)
        written(memory, key, value, torch.arange(g.slots), scales, REFERENCE)
        results.append(attend(memory, seed, scales, TRITON))
    assert torch.equal(*(integers(r) for r in results))


def test_only_fp8_caches_are_scaled() -> None:
    """The Triton attention once multiplied K and V of a bf16 cache by the scales, too."""
    for dtype, same in (("bf16", True), ("e4m3fn", False)):
        g = Geometry(KVCacheLayout.PACKED, 2, 8, 2, 32, 32, dtype)
        memory = build(g)
        written(memory, *rows(g, 16, 0, torch.bfloat16), torch.arange(16), None, REFERENCE)
        plain, scaled = (attend(memory, 1, s, TRITON) for s in (None, (0.25, 3.0)))
        assert torch.equal(plain, scaled) is same
        assert torch.allclose(scaled, attend(memory, 1, (0.25, 3.0), REFERENCE), rtol=0.02)


@given(st.integers(0, 2), EDGE, st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=10)
def test_writes_and_reads_past_32_bits(where, edge, dtype) -> None:  # type: ignore[no-untyped-def]
    steps = [256, 64, 32, 1]
    steps[where] = edge
    pool = torch.empty(sum(steps) + 512, dtype=torch.uint8)
    view = pool.view(DTYPES["e4m3fn"]).as_strided((2, 2, 2, 32), steps, 8)
    caches = view[..., :16], view[..., 16:]
    key = torch.arange(1.0, 33.0).view(1, 2, 16).to(DTYPES["e4m3fn"]).float()
    TRITON.kv_cache_write(key, -key, *caches, torch.tensor([3], dtype=dtype))
    for h in range(2):
        at = 8 + steps[0] + steps[1] + h * steps[2]
        got = pool[at : at + 32].view(DTYPES["e4m3fn"]).float()
        assert got.tolist() == [*key[0, h].tolist(), *(-key[0, h]).tolist()]
    out = TRITON.paged_attention(
        torch.ones(1, 2, 16), *caches, torch.tensor([[0, 1]], dtype=dtype),
        torch.tensor([4], dtype=dtype), torch.tensor([0, 1], dtype=dtype), 1, 4, 1.0, True,
        window_left=0,
    )  # fmt: skip
    assert torch.equal(out, -key)
