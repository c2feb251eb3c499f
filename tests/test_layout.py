"""Layouts: where K and V are cut, allocation, slot arithmetic."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusion.layout import (
    KVCacheLayout,
    cache_shapes,
    empty_kv_cache,
    make_slot_mapping,
    slot_to_block_offset,
    split_kv_cache,
)

DENSE = [x for x in KVCacheLayout if x is not KVCacheLayout.SHUFFLE]
B, N, H, D = 2, 4, 2, 8  # two blocks and two heads: shapes alone cannot tell the layouts apart


def tagged(layout: KVCacheLayout, dv: int) -> list[Tensor]:
    """Caches whose elements say who they are: ((((kv*B + b)*N + n)*H + h)*100 + d)."""

    def nhd(kv: int, dim: int) -> Tensor:
        out = torch.empty(B, N, H, dim)
        for b in range(B):
            for n in range(N):
                for h in range(H):
                    out[b, n, h] = (((kv * B + b) * N + n) * H + h) * 100 + torch.arange(dim)
        return out

    k, v = nhd(0, D), nhd(1, dv)
    if layout is KVCacheLayout.NHD:
        return [k, v]
    if layout in (KVCacheLayout.HND, KVCacheLayout.HF_STATIC):
        return [k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()]
    if layout is KVCacheLayout.PACKED:
        return [torch.cat([k, v], -1).transpose(1, 2).contiguous()]
    return [torch.stack([k, v], 0 if layout is KVCacheLayout.KV_FIRST else 1)]


@pytest.mark.parametrize("layout", DENSE)
def test_split_cuts_by_layout_and_never_by_shape(layout: KVCacheLayout) -> None:
    dv = D if layout.equal_head_dims else 6
    parts = tagged(layout, dv)
    want_k, want_v = tagged(KVCacheLayout.NHD, dv)
    key, value = split_kv_cache(parts if layout.is_pair else parts[0], layout, D, dv)
    assert torch.equal(key, want_k)
    assert torch.equal(value, want_v)
    assert key.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
    assert value.untyped_storage().data_ptr() == parts[-1].untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", DENSE)
def test_allocation_and_split_agree(layout: KVCacheLayout) -> None:
    dv = D if layout.equal_head_dims else 6
    made = empty_kv_cache(layout.name.lower(), 5, 4, 3, D, dv, torch.float16)
    key, value = split_kv_cache(made, layout.name.lower().replace("_", "-"), D, dv)
    assert key.shape == (5, 4, 3, D)
    assert value.shape == (5, 4, 3, dv)
    assert key.dtype == torch.float16
    assert layout.op_layout == "NHD"


@pytest.mark.parametrize("layout", DENSE)
def test_sizes_past_256_are_compared_by_value(layout: KVCacheLayout) -> None:
    made = empty_kv_cache(layout, 1, 300, 1, 320, 320)
    key, value = split_kv_cache(made, layout, 320, 320)
    assert key.shape == value.shape == (1, 300, 1, 320)


def test_foreign_strides_and_storage_offset_are_kept() -> None:
    store = torch.arange(4000.0)
    packed = store.as_strided((3, 2, 4, 16), (500, 200, 16, 1), 7)  # gaps between heads and blocks
    key, value = split_kv_cache(packed, "PACKED", 10, 6)
    assert key.stride() == value.stride() == (500, 16, 200, 1)
    assert (key.storage_offset(), value.storage_offset()) == (7, 17)
    assert value[2, 3, 1, 5] == 7 + 10 + 2 * 500 + 3 * 16 + 200 + 5


def test_shuffled_passes_through_checked() -> None:
    made = empty_kv_cache("shuffle", 3, 16, 2, 64, 48, torch.bfloat16)
    assert cache_shapes("shuffle", 3, 16, 2, 64, 48, torch.bfloat16) == (
        (3, 2, 8, 16, 8),
        (3, 2, 2, 48, 8),
    )
    key, value = split_kv_cache(made, "shuffle", 64, 48)
    assert key is made[0]
    assert value is made[1]
    assert KVCacheLayout.SHUFFLE.op_layout == "SHUFFLE"
    with pytest.raises(ValueError, match="multiples of 16"):
        empty_kv_cache("shuffle", 3, 8, 2, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"key cache has shape.* 2 and 4 must be 16 and 8"):
        split_kv_cache(made, "shuffle", 128, 48)
    with pytest.raises(ValueError, match=r"dimensions 2 and 4 must be 12\.5 and 8"):
        split_kv_cache(made, "shuffle", 100, 48)
    with pytest.raises(ValueError, match="value cache has shape"):
        split_kv_cache(made, "shuffle", 64, 64)
    with pytest.raises(ValueError, match="differ"):
        split_kv_cache((made[0], made[1][:2]), "shuffle", 64, 48)


PAIR = (torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8))
REFUSED = [
    (ValueError, "packd", PAIR, 8, None, "'packd' is not a KV-cache layout; .*PACKED"),
    (TypeError, "NHD", PAIR[0], 8, None, "pair.*one tensor of shape"),
    (TypeError, "NHD", (*PAIR, PAIR[0]), 8, None, "3 items"),
    (TypeError, "PACKED", PAIR, 8, None, "kv_cache is a tuple"),
    (ValueError, "KV_FIRST", PAIR[0], 8, None, "4 dimensions.*must have 5"),
    (ValueError, "KV_FIRST", torch.zeros(3, 2, 4, 2, 8), 8, None, "dimension 0 is 3.*must be 2"),
    (ValueError, "BLOCK_FIRST", torch.zeros(2, 3, 4, 2, 8), 8, None, "dimension 1 is 3"),
    (ValueError, "KV_FIRST", torch.zeros(2, 2, 4, 2, 8), 8, 4, "one head dim"),
    (ValueError, "PACKED", PAIR[0], 8, None, r"last dimension is 8.*8 \+ 8 = 16"),
    (ValueError, "HND", PAIR, 16, 8, "key half has head dim 8, it must be 16"),
    (ValueError, "NHD", PAIR, 8, 16, "value half has head dim 8, it must be 16"),
    (ValueError, "NHD", (PAIR[0], torch.zeros(2, 4, 8, 2).mT), 8, None, "last stride is 2"),
    (ValueError, "NHD", (PAIR[0], torch.zeros(2, 5, 2, 8)), 8, None, "equal blocks"),
]


@pytest.mark.parametrize(("error", "layout", "cache", "d", "dv", "words"), REFUSED)
def test_refusals_say_what_is_and_what_must_be(  # type: ignore[no-untyped-def]
    error, layout, cache, d, dv, words
) -> None:
    with pytest.raises(error, match=words):
        split_kv_cache(cache, layout, d, dv)


def test_the_last_stride_counts_where_a_head_has_two_elements_or_more() -> None:
    one, two = torch.zeros(2, 4, 3, 5)[..., :1], torch.zeros(2, 4, 3, 4)[..., ::2]
    assert one.as_strided(one.shape, (60, 15, 5, 7)).stride(3) == 7
    key, _ = split_kv_cache((one.as_strided(one.shape, (60, 15, 5, 7)), one), "NHD", 1)
    assert key.stride(3) == 7
    for heads in (slice(None), slice(0, 1)):
        pair = two[:, :, heads], two[:, :, heads]
        with pytest.raises(ValueError, match="last stride is 2, it must be 1"):
            split_kv_cache(pair, "NHD", 2)


def test_the_least_sizes_are_allowed_and_one_less_is_not() -> None:
    assert cache_shapes("NHD", 0, 1, 1, 1, 1) == ((0, 1, 1, 1), (0, 1, 1, 1))
    names = ("num_blocks", "block_size", "num_heads", "head_dim", "head_dim_v")
    for i, name in enumerate(names):
        sizes = [0, 1, 1, 1, 1]
        sizes[i] -= 1
        with pytest.raises(ValueError, match=f"^{name} is {sizes[i]}, it must be at least"):
            cache_shapes("NHD", *sizes)


def test_allocation_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        empty_kv_cache("NHD", 1, 0, 1, 8)
    with pytest.raises(ValueError, match="equal head dims"):
        empty_kv_cache("BLOCK_FIRST", 1, 4, 1, 8, 16)


def test_every_layout_is_described() -> None:
    for layout in KVCacheLayout:
        assert re.search(r"\[.*\]", layout.describe())
        assert layout.name in (KVCacheLayout.__doc__ or "")


# --- slots ---------------------------------------------------------------------------------


def test_slots_are_64_bit_and_padding_stays_padding() -> None:
    slots = torch.tensor([0, 15, 16, -1, -17, 2**31 - 1], dtype=torch.int32)
    block, offset = slot_to_block_offset(slots, 16)
    assert block.dtype == offset.dtype == torch.int64
    assert block.tolist() == [0, 0, 1, -1, -1, 2**27 - 1]
    assert offset.tolist() == [0, 15, 0, -1, -1, 15]
    table = torch.tensor([[2**31 - 2]], dtype=torch.int32)
    assert make_slot_mapping(table, torch.tensor([5], dtype=torch.int32), 128).tolist() == [
        (2**31 - 2) * 128 + 5
    ]


def test_a_block_holds_a_token_at_least() -> None:
    slots = torch.tensor([0, 1])
    for size in (0, -4):
        with pytest.raises(ValueError, match=f"block_size is {size}, it must be at least 1"):
            slot_to_block_offset(slots, size)
        with pytest.raises(ValueError, match=f"block_size is {size}, it must be at least 1"):
            make_slot_mapping(slots[None], slots[None], size)
    assert [x.tolist() for x in slot_to_block_offset(slots, 1)] == [[0, 1], [0, 0]]
    assert make_slot_mapping(slots[None], slots[None], 1).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"slots is torch\.float32, it must be torch\.int32"):
        slot_to_block_offset(slots.float(), 4)
    with pytest.raises(ValueError, match=r"positions is torch\.int16"):
        make_slot_mapping(slots[None], slots[None].short(), 4)


def test_slot_mapping_in_its_three_shapes() -> None:
    table = torch.tensor([[7, 3, -1], [5, 0, 9]], dtype=torch.int32)
    one = make_slot_mapping(table, torch.tensor([4, 11]), 4)
    assert one.tolist() == [12, 39]
    two = make_slot_mapping(table, torch.tensor([[3, 4], [-1, 0]]), 4)
    assert two.tolist() == [31, 12, -1, 20]
    ragged = make_slot_mapping(
        table, torch.tensor([8, 5, 12, 99, 0]), 4, torch.tensor([0, 0, 1, 1, 1])
    )
    # A page that is not allocated, then positions past the table: nothing is written.
    assert ragged.tolist() == [-1, 13, -1, -1, 20]
    assert make_slot_mapping(table[:, :0], torch.tensor([0, 1]), 4).tolist() == [-1, -1]
    assert make_slot_mapping(table[:0], torch.zeros(0, dtype=torch.int64), 4).shape == (0,)


@given(
    st.integers(1, 7),
    st.lists(st.integers(-4, 30), min_size=1, max_size=6),
    st.lists(st.integers(-1, 40), min_size=4, max_size=4),
)
def test_slot_mapping_against_arithmetic(block: int, positions: list[int], row: list[int]) -> None:
    table = torch.tensor([row])
    got = make_slot_mapping(table, torch.tensor([positions]), block)
    for slot, p in zip(got.tolist(), positions, strict=True):
        known = 0 <= p < 4 * block and row[p // block] >= 0
        assert slot == (row[p // block] * block + p % block if known else -1)
    blocks, offsets = slot_to_block_offset(got, block)
    back = torch.where(got < 0, -1, blocks * block + offsets)
    assert torch.equal(back, got)


@pytest.mark.parametrize(
    ("table", "positions", "sequences", "words"),
    [
        (torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), None, "block_table is torch.float"),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int64),
            None,
            "sequences, b",
        ),
        (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), None, "3 tokens"),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros(3, 1, dtype=torch.int64),
            None,
            "3 rows",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
            "must be equal",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2, 3, dtype=torch.int64),
            r"sequences only goes with positions of shape \[T\], not \[B, S\]",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2),
            "sequences is torch.float32",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros((), dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
            r"\[T\] or \[B, S\]",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int32),
            torch.zeros(1, 1, 2, dtype=torch.int64),
            None,
            r"\[T\] or \[B, S\]",
        ),
    ],
)
def test_slot_mapping_refuses_plainly(  # type: ignore[no-untyped-def]
    table, positions, sequences, words
) -> None:
    with pytest.raises(ValueError, match=words):
        make_slot_mapping(table, positions, 4, sequences)
