"""What holds for every cache layout, in any memory, at any size.

Writes and reads go through the public operations with the reference kernel here, and through the
Triton kernels under the interpreter in ``interpreted.py``.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion import ops
from fusion.backends.reference import rope
from fusion.layout import KVCacheLayout, empty_kv_cache, make_slot_mapping, split_kv_cache
from tests.layout.checks import (
    REFERENCE,
    attend,
    check_prologue,
    check_write,
    halves,
    integers,
    read,
    stored,
    written,
)
from tests.layout.strategies import (
    DTYPES,
    Geometry,
    Slots,
    address,
    build,
    geometries,
    owned,
    positions,
    rows,
    slots,
)

L = KVCacheLayout
DENSE = [x for x in L if x is not L.SHUFFLE]
LARGEST = Geometry(L.PACKED, 1, 832, 9, 256, 256, "bf16")
ODD = Geometry(
    L.BLOCK_FIRST, 2, 17, 7, 9, 9, "uint8 as e4m3fnuz", 3, 1, (2, 0, 4, 1, 3, 5), (1,) * 7, 5
)
"""Heads outside blocks outside layers, gaps everywhere."""


# --- the address map -----------------------------------------------------------------------


@given(geometries())
@settings(max_examples=100)
@example(LARGEST)
@example(ODD)
def test_the_address_map_is_a_bijection_onto_what_the_cache_owns(g: Geometry) -> None:
    memory = build(g)
    every = torch.arange(g.slots)
    key, value = address(memory, 0, every), address(memory, 1, every)
    # The documented map hits every element that the tensors own exactly once ...
    assert torch.equal(
        torch.cat([key.reshape(-1), value.reshape(-1)]).sort().values, owned(memory).sort().values
    )
    assert len(torch.unique(key)) + len(torch.unique(value)) == key.numel() + value.numel()
    # ... and the views that `split_kv_cache` cuts are that map, element by element.
    for half, want in zip(halves(memory), (key, value), strict=True):
        if g.layout is L.SHUFFLE:
            assert half is memory.tensors[0 if want is key else 1]
            continue
        at = torch.full((), half.storage_offset(), dtype=torch.int64)
        for size, stride in zip(half.shape, half.stride(), strict=True):
            at = at[..., None] + torch.arange(size) * stride
        assert torch.equal(at.flatten(0, 1), want)


@given(geometries())
@settings(max_examples=60)
def test_key_and_value_never_overlap(g: Geometry) -> None:
    memory = build(g)
    every = torch.arange(g.slots)
    key, value = address(memory, 0, every).reshape(-1), address(memory, 1, every).reshape(-1)
    assert not torch.isin(key, value).any()
    # The views, not the documentation: what is put into one half cannot be seen in the other.
    k, v = halves(memory)
    before = integers(v).clone()
    integers(k).fill_(3)
    assert torch.equal(integers(v), before)
    assert (integers(k) == 3).all()


@given(geometries(dtypes=[n for n in DTYPES if "uint8" in n]))
@settings(max_examples=50)
def test_bytes_are_cut_like_the_dtype_that_they_hold(g: Geometry) -> None:
    """An engine that keeps fp8 as uint8 may view before the cut or behind it."""
    memory = build(g)
    as_bytes = [t.view(torch.uint8) for t in memory.tensors]
    cut = split_kv_cache(as_bytes if g.layout.is_pair else as_bytes[0], g.layout, g.dim, g.dim_v)
    for mine, other in zip(cut, halves(memory), strict=True):
        assert mine.view(g.torch_dtype).stride() == other.stride()
        assert mine.data_ptr() == other.data_ptr()
        assert mine.shape == other.shape


# --- write and read ------------------------------------------------------------------------

SCALES = st.sampled_from([None, (0.25, 3.0), (0.01, 17.0)])
ROWS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(st.data(), geometries(), SCALES, ROWS)
@settings(max_examples=150)
def test_split_then_write_then_read_is_the_identity(data, g, scales, dtype) -> None:  # type: ignore[no-untyped-def]
    """And every other byte of the pool keeps its bits, NaNs included."""
    check_write(g, data.draw(slots(g)), scales, dtype, REFERENCE)


@pytest.mark.parametrize("layout", list(L))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_layout_with_each_dtype(layout: KVCacheLayout, dtype: str) -> None:
    """Hypothesis may leave a pair out; this does not. Hk 3, D 48, block 16: nothing is equal."""
    g = Geometry(layout, 3, 16, 3, 48, 48 if layout.equal_head_dims else 32, dtype, 2, 1)
    wanted = (0, -1, 47, 15, -1, 16)
    check_write(g, Slots(7, wanted, torch.int64), (0.25, 3.0), torch.bfloat16, REFERENCE)


@given(st.data(), geometries(), SCALES)
@settings(max_examples=80)
def test_the_fused_prologue_writes_what_rope_and_write_would(data, g, scales) -> None:  # type: ignore[no-untyped-def]
    check_prologue(data, g, scales, REFERENCE)


@given(st.data(), geometries(most=1 << 16))
@settings(max_examples=100)
def test_equal_content_gives_equal_results_in_any_two_layouts(data, first) -> None:  # type: ignore[no-untyped-def]
    second = data.draw(other(first))
    seed, kv_scales = data.draw(st.integers(0, 99)), data.draw(SCALES)
    results = []
    for g in (first, second):
        memory = build(g, seed + 1)
        key, value = rows(g, g.slots, seed, torch.bfloat16)
        written(memory, key, value, torch.arange(g.slots), kv_scales, REFERENCE)
        results.append((attend(memory, seed, kv_scales, REFERENCE), *read(memory)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(integers(a), integers(b))


def other(g: Geometry) -> st.SearchStrategy[Geometry]:
    """The same logical cache in another layout and another memory."""
    fit = [
        x for x in L
        if not (x.equal_head_dims and g.dim != g.dim_v)
        and not (x is L.SHUFFLE and (g.dim % g.width or g.block % g.width))
    ]  # fmt: skip
    same = [n for n, d in DTYPES.items() if d == g.torch_dtype]
    return geometries(fit, same, logical=g)


@given(st.data(), st.integers(1, 40), st.integers(1, 832), st.integers(0, 6))
def test_positions_become_slots_by_the_block_table(data, blocks, block, tokens) -> None:  # type: ignore[no-untyped-def]
    """``table[pos // block] * block + pos % block``; padding and missing pages are -1."""
    page = st.one_of(st.just(-1), st.integers(0, 2**40))
    table = data.draw(st.lists(page, min_size=blocks, max_size=blocks))
    at = data.draw(positions(tokens, blocks * block, range(0, tokens, 3)))
    got = make_slot_mapping(torch.tensor([table]), at[None], block)
    want = [
        table[p // block] * block + p % block
        if 0 <= p < blocks * block and table[p // block] >= 0
        else -1
        for p in at.tolist()
    ]
    assert got.tolist() == want


# --- never from a shape --------------------------------------------------------------------


def test_the_layout_is_an_argument_without_default() -> None:
    assert inspect.signature(split_kv_cache).parameters["layout"].default is inspect.Parameter.empty
    assert inspect.signature(empty_kv_cache).parameters["layout"].default is inspect.Parameter.empty


@given(st.integers(1, 40), st.integers(1, 9), st.integers(8, 64))
def test_k_first_and_block_first_are_told_apart_only_by_name(n: int, h: int, d: int) -> None:
    """``[2, 2, N, H, D]`` is both; so is ``[2, 2, N, N, D]`` and whatever else one may draw."""
    cache = torch.arange(4 * n * h * d, dtype=torch.float64).view(2, 2, n, h, d)
    key, value = split_kv_cache(cache, "KV_FIRST", d)
    assert torch.equal(key, cache[0]) and torch.equal(value, cache[1])
    key, value = split_kv_cache(cache, "BLOCK_FIRST", d)
    assert torch.equal(key, cache[:, 0]) and torch.equal(value, cache[:, 1])


@given(st.integers(1, 5), st.integers(1, 9), st.integers(8, 64))
def test_heads_and_block_are_told_apart_only_by_name(b: int, h: int, d: int) -> None:
    """As many tokens in a block as heads: NHD and HND have one shape."""
    pair = tuple(torch.arange(b * h * h * d, dtype=torch.float64).view(b, h, h, d) for _ in "kv")
    key, _ = split_kv_cache(pair, "NHD", d)
    assert torch.equal(key, pair[0])
    for name in ("HND", "HF_STATIC"):
        key, value = split_kv_cache(pair, name, d)
        assert torch.equal(key, pair[0].transpose(1, 2))
        assert torch.equal(value, pair[1].transpose(1, 2))


@given(st.integers(8, 128), st.integers(8, 128))
def test_where_a_packed_row_is_cut_is_told_by_the_head_dims(d: int, dv: int) -> None:
    """A last dimension of 96 may be 48 + 48 or 64 + 32; a wrong sum is an error, not a guess."""
    cache = torch.arange(2 * 3 * 4 * (d + dv), dtype=torch.float64).view(2, 3, 4, d + dv)
    key, value = split_kv_cache(cache, "PACKED", d, dv)
    assert torch.equal(key, cache[..., :d].transpose(1, 2))
    assert torch.equal(value, cache[..., d:].transpose(1, 2))
    with pytest.raises(ValueError, match="last dimension"):
        split_kv_cache(cache, "PACKED", d, dv + 1)
    if d != dv:
        with pytest.raises(ValueError, match="last dimension"):
            split_kv_cache(cache, "PACKED", d)


# --- 64 bits -------------------------------------------------------------------------------

EDGE = st.sampled_from([2**31, 2**32, 2**33]).flatmap(lambda e: st.integers(e - 3, e + 3))


@given(st.sampled_from(DENSE), st.integers(1, 9), st.integers(8, 64), st.integers(2**30, 2**40))
def test_views_of_huge_caches_are_exact_without_memory(layout, h, d, step) -> None:  # type: ignore[no-untyped-def]
    """Strides far past 32 bits, on the meta device: no address is lost or rounded."""
    blocks, block = 7, 5
    g = Geometry(layout, blocks, block, h, d, d)
    tensors = []
    for shape in g.shapes():
        stride, at = [0] * len(shape), step
        for axis in range(len(shape) - 2, -1, -1):
            stride[axis], at = at, at + 1 + step // 3
        stride[-1] = 1
        tensors.append(torch.empty_strided(shape, stride, dtype=torch.int8, device="meta"))
    halves = split_kv_cache(tensors if layout.is_pair else tensors[0], layout, d)
    for kv, half in enumerate(halves):
        t = tensors[kv if layout.is_pair else 0]
        s = t.stride()
        last = {
            L.NHD: (s[0], s[1], s[2], 0), L.HND: (s[0], s[2], s[1], 0),
            L.HF_STATIC: (s[0], s[2], s[1], 0), L.PACKED: (s[0], s[2], s[1], kv * d),
            L.KV_FIRST: (s[1], s[2], s[3], kv * s[0]), L.BLOCK_FIRST: (s[0], s[2], s[3], kv * s[1]),
        }[layout]  # fmt: skip
        assert half.stride() == (*last[:3], 1)
        assert half.storage_offset() == last[3]


@given(st.integers(0, 3), EDGE, EDGE, st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=30)
def test_writes_and_reads_past_32_bits(where, edge, offset, dtype) -> None:  # type: ignore[no-untyped-def]
    """The block, the token, the head or the offset of the view needs 33 bits and more.

    The pool is address space: only the pages that are written ever exist.
    """
    steps = [128, 32, 16, 1]
    start = 8
    if where < 3:
        steps[where] = edge
    else:
        start = offset
    extent = start + sum((2 - 1) * s for s in steps[:3]) + 128
    try:
        pool = torch.empty(extent + 64, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("this machine does not overcommit 16 GiB of address space")
    view = pool.view(torch.float8_e4m3fn).as_strided((2, 2, 2, 16), steps, start)
    key, value = torch.arange(1.0, 17.0).view(1, 2, 8), -torch.arange(1.0, 17.0).view(1, 2, 8)
    slot = torch.tensor([3], dtype=dtype)
    ops.kv_cache_write(key, value, view[..., :8], view[..., 8:], slot, kernel="reference")
    for h in range(2):
        at = start + steps[0] + steps[1] + h * steps[2]
        got = pool[at : at + 16].view(torch.float8_e4m3fn).float()
        assert got.tolist() == [*key[0, h].tolist(), *value[0, h].tolist()]
    out = ops.paged_attention(
        torch.ones(1, 2, 8), view[..., :8], view[..., 8:], torch.tensor([[0, 1]]),
        torch.tensor([4]), torch.tensor([0, 1]), 1, 4, 1.0, True, window_left=0, kernel="reference",
    )  # fmt: skip
    assert torch.equal(out, value)


@given(st.integers(0, 60))
@settings(max_examples=5)
def test_slots_past_32_bits(past) -> None:  # type: ignore[no-untyped-def]
    """A cache of more than 2**31 slots of one byte: the slot itself needs the 64 bits."""
    slots_ = 2**31 + 64
    try:
        pools = [torch.empty(slots_, dtype=torch.uint8) for _ in "kv"]
    except RuntimeError:
        pytest.skip("this machine does not overcommit 4 GiB of address space")
    key, value = (p.view(torch.float8_e4m3fn).view(slots_ // 2, 2, 1, 1) for p in pools)
    slot = 2**31 + past
    rows_ = torch.tensor([3.0, 7.0]).view(2, 1, 1)
    ops.kv_cache_write(rows_, -rows_, key, value, torch.tensor([slot, -1]), kernel="reference")
    assert pools[0][slot : slot + 1].view(torch.float8_e4m3fn).float().item() == 3.0
    assert pools[1][slot : slot + 1].view(torch.float8_e4m3fn).float().item() == -3.0


def test_rope_is_independent_of_where_the_cache_lies() -> None:
    """A canary for the helpers themselves: they would be useless if they always agreed."""
    g = Geometry(L.PACKED, 2, 4, 3, 16, 16, "f32")
    a, b = build(g, 0), build(g, 1)
    assert not torch.equal(a.flat(), b.flat())
    key, value = rows(g, 3, 0, torch.float32)
    want = a.flat().clone()
    written(a, key, value, torch.tensor([0, 1, 2]), None, REFERENCE)
    assert not torch.equal(a.flat(), want)
    turned = rope(
        key, torch.ones(3, 8), torch.ones(3, 8), rope_style="half", rotary_dim=16,
        rope_dtype=torch.float32, out_dtype=torch.float32,
    )  # fmt: skip
    assert not torch.equal(stored(turned, torch.float32, None), stored(key, torch.float32, None))
