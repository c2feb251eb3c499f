"""The reference cache write: whole buffers compared bit by bit, padding, fp8, every layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion.backends import reference
from fusion.backends.reference.cache import gather, stored
from fusion.layout import KVCacheLayout, cache_shapes, empty_kv_cache, split_kv_cache

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
LAYOUTS = list(KVCacheLayout)


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x.view(torch.int16)


def noise_(x: Tensor, seed: int = 0) -> Tensor:
    """Random bits, NaNs included."""
    g = torch.Generator().manual_seed(seed)
    raw(x).copy_(torch.randint(0, 256, raw(x).shape, generator=g).to(raw(x).dtype))
    return x


def oracle(
    cache: Tensor, x: Tensor, slots: Tensor, scale: float, key: bool, shuffled: bool
) -> None:
    """One row, one head at a time, by plain indexing; ``cache`` an NHD view, or shuffled."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for head in range(x.shape[1]):
            value = x[row, head].float()
            if cache.dtype in FP8:
                top = torch.finfo(cache.dtype).max
                value = (value / scale).clamp(-top, top)
            value = value.to(cache.dtype)
            if not shuffled:
                n = cache.shape[1]
                raw(cache)[slot // n, slot % n, head] = raw(value)
                continue
            for d in range(x.shape[2]):
                w = cache.shape[4]
                if key:
                    n = cache.shape[3]
                    raw(cache)[slot // n, head, d // w, slot % n, d % w] = raw(value)[d]
                else:
                    n = cache.shape[2] * w
                    raw(cache)[slot // n, head, slot % n // w, d, slot % w] = raw(value)[d]


def buffers(layout: KVCacheLayout, blocks: int, n: int, h: int, d: int, dv: int, dtype):  # type: ignore[no-untyped-def]
    made = empty_kv_cache(layout, blocks, n, h, d, dv, dtype)
    parts = [made] if isinstance(made, Tensor) else list(made)
    for i, part in enumerate(parts):
        noise_(part, i)
    return made, parts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
@pytest.mark.parametrize("heads", [3, 4])
def test_whole_buffer_in_every_layout(
    layout: KVCacheLayout, dtype: torch.dtype, heads: int
) -> None:
    d = 64
    dv = d if layout.equal_head_dims else 32
    cache, parts = buffers(layout, 3, 16, heads, d, dv, dtype)
    want = [p.clone() for p in parts]
    key = torch.randn(5, heads, d) * 40
    value = torch.randn(5, heads, dv) * 900
    slots = torch.tensor([17, -1, 0, 47, -1])
    ks, vs = torch.tensor(0.25), torch.tensor(3.0)
    kc, vc = split_kv_cache(cache, layout, d, dv)
    reference.kv_cache_write(key, value, kc, vc, slots, ks, vs, kv_layout=layout.op_layout)
    shuffled = layout is KVCacheLayout.SHUFFLE
    wk, wv = split_kv_cache(want if layout.is_pair else want[0], layout, d, dv)
    oracle(wk, key, slots, 0.25, True, shuffled)
    oracle(wv, value, slots, 3.0, False, shuffled)
    for got, expected in zip(parts, want, strict=True):
        assert torch.equal(raw(got), raw(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_reads_what_write_wrote(layout: KVCacheLayout) -> None:
    dtype = torch.bfloat16
    cache, _ = buffers(layout, 4, 8, 3, 32, 32, dtype)
    kc, vc = split_kv_cache(cache, layout, 32)
    k, v = torch.randn(9, 3, 32).to(dtype), torch.randn(9, 3, 32).to(dtype)
    slots = torch.randperm(32)[:9]
    lay = layout.op_layout
    reference.kv_cache_write(k, v, kc, vc, slots, kv_layout=lay)
    for which, cache_half, rows in (("key", kc, k), ("value", vc, v)):
        got = gather(cache_half, slots, lay, which=which, dtype=torch.float32, scale=None)
        assert torch.equal(got, rows.float())


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "slots", [[-1], [-1, -1, -1, -1, -1], [0, -1, 5, -1, -1], [-1, 0, -3, 7], [-1, -1, 3], []]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_padding_changes_no_bit(slots: list[int], slot_dtype, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    kc, vc = (
        noise_(torch.empty(2, 4, 3, 8, dtype=dtype)),
        noise_(torch.empty(2, 4, 3, 8, dtype=dtype)),
    )
    before = [kc.clone(), vc.clone()]
    x = torch.randn(5, 3, 8)
    mapping = torch.tensor(slots, dtype=slot_dtype)
    reference.kv_cache_write(x, -x, kc, vc, mapping)
    named = [s for s in slots if s >= 0]
    others = [s for s in range(8) if s not in named]
    for now, was, rows in zip((kc, vc), before, (x, -x), strict=True):
        flat, old = raw(now).flatten(0, 1), raw(was).flatten(0, 1)
        assert torch.equal(flat[others], old[others])
        for row, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(
                    now.flatten(0, 1)[slot].float(), stored(rows[row], dtype, None).float()
                )


def test_rows_past_the_mapping_are_not_written_and_t_zero_is_nothing() -> None:
    kc = torch.zeros(1, 8, 4, 2)
    x = torch.ones(5, 4, 2)
    reference.kv_cache_write(x, x, kc, kc.clone(), torch.tensor([6]))
    assert kc.sum() == 8
    assert kc[0, 6].sum() == 8
    none = torch.empty(0, 4, 2)
    reference.kv_cache_write(none, none, kc, kc, torch.empty(0, dtype=torch.int64))
    assert kc.sum() == 8


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_divides_and_keeps_nan(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([1e9, -1e9, top, top * 1.04, float("inf"), float("-inf"), 1.0, -0.0])
    assert stored(x, dtype, None).float().tolist() == [top, -top, top, top, top, -top, 1.0, 0.0]
    assert stored(torch.tensor([1.0]), dtype, torch.tensor([4.0])).float().item() == 0.25
    assert stored(torch.tensor([float("nan")]), dtype, None).float().isnan().all()
    assert torch.equal(stored(x, torch.float32, torch.tensor(4.0)), x)  # no scale for other dtypes


def test_strided_neighbours_are_untouched() -> None:
    # Block stride larger than dense, K and V halves of one packed buffer, storage offset.
    store = noise_(torch.empty(4096, dtype=torch.bfloat16))
    was = store.clone()
    kc = store.as_strided((3, 4, 3, 8), (400, 16, 64, 1), 5)
    vc = store.as_strided((3, 4, 3, 8), (400, 16, 64, 1), 13)
    x = torch.randn(2, 3, 8).bfloat16()
    reference.kv_cache_write(x, x, kc, vc, torch.tensor([11, 2]))
    oracle(was.as_strided(kc.shape, kc.stride(), 5), x, torch.tensor([11, 2]), 1.0, True, False)
    oracle(was.as_strided(kc.shape, kc.stride(), 13), x, torch.tensor([11, 2]), 1.0, True, False)
    assert torch.equal(raw(store), raw(was))


def test_offsets_beyond_32_bits() -> None:
    # A block stride of 2**33 elements over storage that is never touched but where it is written.
    try:
        store = torch.empty(2**34 + 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    except RuntimeError:
        pytest.skip("this machine does not overcommit 16 GiB of address space")
    kc = store.as_strided((3, 2, 2, 8), (2**33, 16, 8, 1))
    vc = store.as_strided((3, 2, 2, 8), (2**33, 16, 8, 1), 32)
    x = torch.arange(16.0).view(1, 2, 8)
    reference.kv_cache_write(x, -x, kc, vc, torch.tensor([5], dtype=torch.int32))
    assert torch.equal(store[2**34 + 16 : 2**34 + 32].float(), x.flatten())
    assert torch.equal(store[2**34 + 48 : 2**34 + 64].float(), -x.flatten())


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.integers(-3, 11), max_size=9).filter(
        lambda s: len({x for x in s if x >= 0}) == len([x for x in s if x >= 0])
    ),
    extra=st.integers(0, 2),
)
def test_any_mix_of_padding(slots: list[int], extra: int) -> None:
    kc = noise_(torch.empty(3, 4, 3, 2, dtype=torch.bfloat16))
    vc = noise_(torch.empty(3, 4, 3, 2, dtype=torch.bfloat16), 1)
    wk, wv = kc.clone(), vc.clone()
    x = torch.randn(len(slots) + extra, 3, 2).bfloat16()
    mapping = torch.tensor(slots, dtype=torch.int64)
    reference.kv_cache_write(x, -x, kc, vc, mapping)
    oracle(wk, x, mapping, 1.0, True, False)
    oracle(wv, -x, mapping, 1.0, False, False)
    assert torch.equal(raw(kc), raw(wk))
    assert torch.equal(raw(vc), raw(wv))


def test_shapes_and_allocation_agree() -> None:
    for layout, dtype in itertools.product(LAYOUTS, [torch.float32, torch.bfloat16]):
        made = empty_kv_cache(layout, 2, 8, 3, 16, dtype=dtype)
        parts = (made,) if isinstance(made, Tensor) else made
        shapes = cache_shapes(layout, 2, 8, 3, 16, dtype=dtype)
        assert tuple(tuple(p.shape) for p in parts) == shapes
