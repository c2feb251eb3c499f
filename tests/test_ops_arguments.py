"""Arguments that must be refused by name, and odd ones that are legal: what no kernel may see."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion.ops as ops
from fusion.layout import KVCacheLayout, empty_kv_cache, split_kv_cache
from fusion.ops.overlap import repeats_itself, share_bytes
from fusion.ops.schema import MUTATED, REQUIRED, SCHEMAS
from tests.ops_cases import BLOCK, DV, HK, D, arguments, filled_cache

OPS = list(ops.OPERATIONS)
WRITERS = [op for op in OPS if "kv_cache" in op]
WRITTEN = ("key_cache", "value_cache")
NORMS = [op for op in OPS if "norm" in op]


def call(op: str, a: dict[str, Any], **more: Any) -> Any:
    return getattr(ops, op)(**{**a, **more})


# --- what is missing -------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_required_tensor_is_asked_for_by_name(op: str) -> None:
    required = [a.name for a in ops.OVERLOADS[op]._schema.arguments if str(a.type) == "Tensor"]
    assert list(REQUIRED[op]) == required
    for name in required:
        a = {**arguments(op), name: None}
        with pytest.raises(TypeError, match=rf"{op}: {name} is None, but it must be a tensor"):
            call(op, a)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match=name):
            call(op, a)


def test_something_that_is_no_tensor_is_named() -> None:
    for bad in ([1.0], 5, "key"):
        with pytest.raises(RuntimeError, match="'key'"):
            call("kv_cache_write", arguments("kv_cache_write"), key=bad)


# --- sizes and numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("op", [*WRITERS, "paged_attention"])
@pytest.mark.parametrize("blocks", [0, 3])
def test_a_block_of_no_tokens_is_refused(op: str, blocks: int) -> None:
    a = arguments(op)
    a["key_cache"], a["value_cache"] = torch.empty(blocks, 0, HK, D), torch.empty(blocks, 0, HK, DV)
    with pytest.raises(ValueError, match=r"block size of key_cache .* is 0, but .* at least 1"):
        call(op, a)
    a["key_cache"] = torch.empty(blocks, HK, D // 4, 0, 4)
    a["value_cache"] = torch.empty(blocks, HK, 0, DV, 4)
    with pytest.raises(ValueError, match=r"block size of key_cache"):
        call(op, a, kv_layout="SHUFFLE")


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("name", ["q_eps", "k_eps"])
@pytest.mark.parametrize("eps", [-1e-6, float("nan")])
def test_an_epsilon_below_zero_is_refused(op: str, name: str, eps: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {eps}, but it must be at least 0"):
        call(op, arguments(op), **{name: eps})
    call(op, arguments(op), **{name: 0.0})


def test_a_soft_cap_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="softcap is nan"):
        call("paged_attention", arguments("paged_attention"), softcap=float("nan"))


@pytest.mark.parametrize("layout", [x for x in KVCacheLayout if not x.equal_head_dims])
@pytest.mark.parametrize("op", WRITERS)
def test_a_cache_without_blocks_takes_padding_and_nothing_else(
    op: str, layout: KVCacheLayout
) -> None:
    a = arguments(op)
    made = empty_kv_cache(layout, 0, BLOCK, HK, D, DV, torch.float32)
    a["key_cache"], a["value_cache"] = split_kv_cache(made, layout, D, DV)
    a["slot_mapping"] = torch.full((5,), -1)
    whole = call(op, arguments(op), **{k: v for k, v in a.items() if k not in WRITTEN})
    got = call(op, a, kv_layout=layout.op_layout)
    if op != "kv_cache_write":
        assert torch.equal(got[0], whole[0])
    a["slot_mapping"][3] = 0
    with pytest.raises(IndexError, match=f"fusion.ops.{op}: slot_mapping .* has no block"):
        call(op, a, kv_layout=layout.op_layout)


@pytest.mark.parametrize("layout", [x for x in KVCacheLayout if not x.equal_head_dims])
@pytest.mark.parametrize("op", WRITERS)
def test_a_slot_outside_the_cache_is_an_error_that_names_it(op: str, layout: KVCacheLayout) -> None:
    a = arguments(op)
    blocks = a["key_cache"].shape[0]
    made = empty_kv_cache(layout, blocks, BLOCK, HK, D, DV, torch.float32)
    a["key_cache"], a["value_cache"] = split_kv_cache(made, layout, D, DV)
    end = blocks * BLOCK
    a["slot_mapping"] = torch.tensor([-(10**6), 0, end - 1, -1, 1])
    call(op, a, kv_layout=layout.op_layout)
    a["slot_mapping"][3] = end + 7
    said = (
        rf"fusion.ops.{op}: slot_mapping holds {end + 7}, but it must be below {end}: .* of {BLOCK}"
    )
    with pytest.raises(IndexError, match=said):
        call(op, a, kv_layout=layout.op_layout)


@pytest.mark.parametrize("block", [10**6, -(10**6)])
def test_a_block_outside_the_cache_is_an_error_that_names_it(block: int) -> None:
    a = arguments("paged_attention")
    blocks, page = a["key_cache"].shape[0], a["key_cache"].shape[1]
    unread = torch.full((a["block_table"].shape[0], 1), 777, dtype=a["block_table"].dtype)
    a["block_table"] = torch.cat([a["block_table"], unread], 1)
    assert int(a["seq_lens"].max()) <= page * (a["block_table"].shape[1] - 1)
    call("paged_attention", a)
    a["block_table"][-1, 0] = block
    said = f"paged_attention: block_table holds {block}, but it must be from 0 to {blocks - 1}: "
    with pytest.raises(IndexError, match=said):
        call("paged_attention", a)


def test_a_cache_without_blocks_compiles() -> None:
    a = arguments("kv_cache_write")
    a["key_cache"], a["value_cache"] = a["key_cache"][:0], a["value_cache"][:0]
    a["slot_mapping"] = torch.full((5,), -1)

    def write(**kw: Tensor) -> Tensor:
        ops.kv_cache_write(**kw)
        return kw["key"] + 1

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(write, backend=backend)(**a), a["key"] + 1)


# --- memory that must not be shared ----------------------------------------------------------


@pytest.mark.parametrize("op", WRITERS)
def test_key_and_value_cache_in_the_same_memory_are_refused(op: str) -> None:
    a = arguments(op, dv=D)
    a["value"] = a["key"]
    for value_cache in (
        a["key_cache"],
        a["key_cache"].as_strided(a["key_cache"].shape, a["key_cache"].stride(), 1),
    ):
        with pytest.raises(ValueError, match="value_cache is in memory that key_cache has a part"):
            call(op, a, value_cache=value_cache)


@pytest.mark.parametrize("op", WRITERS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_read_may_lie_in_the_cache_and_is_read_first(op: str, name: str) -> None:
    """As if it had been copied beforehand: a context shift reads rows that it overwrites."""
    a = arguments(op, tokens=2)
    if name not in a:
        name = "key"
    which = "value_cache" if name == "value" else "key_cache"
    heads, dim = a[name].shape[1:]
    rows = (2, heads, dim), (heads * dim, dim, 1)
    cache = torch.randn(a[which].shape)
    a["slot_mapping"] = torch.tensor([1, 0])  # the rows overwrite one another's sources
    want = {n: v.clone() if isinstance(v, Tensor) else v for n, v in a.items()}
    want[which], a[which] = cache.clone(), cache.clone()
    want[name] = cache.as_strided(*rows).clone()
    a[name] = a[which].as_strided(*rows)
    expected, result = call(op, want), call(op, a)
    for one, other in zip(expected or (), result or (), strict=True):
        assert torch.equal(one, other)
    for n in WRITTEN:
        assert torch.equal(a[n], want[n])
    with FakeTensorMode() as mode:
        call(op, {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in a.items()})


def test_a_call_that_was_fine_does_not_excuse_one_that_overlaps() -> None:
    """Same shapes, strides and offsets; only the storage is another."""
    a = arguments("kv_cache_write", layout=KVCacheLayout.NHD, dv=D)
    a["value"] = a["key"].clone()
    assert a["key_cache"].stride() == a["value_cache"].stride()
    call("kv_cache_write", a)
    with pytest.raises(ValueError, match="value_cache is in memory"):
        call("kv_cache_write", a, value_cache=a["key_cache"])
    call("kv_cache_write", a)


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_views_of_one_buffer_that_interleave_are_legal(
    layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    dv = D if layout.equal_head_dims else DV
    a = arguments("kv_cache_write")
    a["value"] = torch.randn(5, HK, dv)
    shapes = empty_kv_cache(layout, 3, 16, HK, D, dv, dtype)
    if not isinstance(shapes, Tensor):  # both halves of a pair cut out of one pool
        sizes = [t.numel() for t in shapes]
        pool = torch.empty(sum(sizes), dtype=dtype)
        shapes = [p.view(t.shape) for p, t in zip(pool.split(sizes), shapes, strict=True)]
    a["key_cache"], a["value_cache"] = split_kv_cache(shapes, layout, D, dv)
    homes = {a[n].untyped_storage().data_ptr() for n in WRITTEN}
    assert len(homes) == 1
    call("kv_cache_write", a, kv_layout=layout.op_layout)


def test_layers_of_a_stack_and_the_activations_of_one_arena_are_legal() -> None:
    """Everything out of one allocation, as engines with a memory pool of their own have it."""
    a = arguments("qk_norm_rope_kv_cache")
    names = [n for n, v in a.items() if isinstance(v, Tensor) and v.dtype == torch.float32]
    pool = torch.empty(sum(a[n].numel() for n in names))
    at = 0
    for n in names:
        size = a[n].numel()
        a[n] = pool[at : at + size].view(a[n].shape).copy_(a[n])
        at += size
    call("qk_norm_rope_kv_cache", a)


def test_a_cache_that_overlaps_itself_is_refused() -> None:
    a = arguments("kv_cache_write")
    memory = torch.zeros(4096)
    rolled = memory.as_strided((3, BLOCK, HK, D), (HK * D, HK * D, D, 1))
    with pytest.raises(ValueError, match="key_cache is overlapping itself"):
        call("kv_cache_write", a, key_cache=rolled)


# --- the arithmetic behind it ----------------------------------------------------------------

SMALL = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=4)


def addresses(dims: list[tuple[int, int]], offset: int) -> list[int]:
    steps = [range(0, n * s, s) if s else [0] * n for n, s in dims]
    return [offset + sum(index) for index in itertools.product(*steps)]


@given(SMALL, SMALL, st.integers(0, 20), st.integers(0, 20))
def test_overlap_is_that_of_the_sets_of_addresses(one, two, start, other):  # type: ignore[no-untyped-def]
    memory = torch.zeros(256, dtype=torch.int16)
    a, b = (
        memory.as_strided([n for n, _ in dims], [s for _, s in dims], offset)
        for dims, offset in ((one, start), (two, other))
    )
    mine, theirs = addresses(one, start), addresses(two, other)
    assert share_bytes(a, b) == share_bytes(b, a) == bool({*mine} & {*theirs})
    assert repeats_itself(a) == (len(set(mine)) < len(mine))


@given(SMALL, SMALL, st.integers(0, 20), st.integers(0, 20))
def test_overlap_of_views_of_different_element_sizes(one, two, start, other):  # type: ignore[no-untyped-def]
    memory = torch.zeros(512, dtype=torch.uint8)
    a = memory.view(torch.int32).as_strided([n for n, _ in one], [s for _, s in one], start)
    b = memory.as_strided([n for n, _ in two], [s for _, s in two], other)
    mine = {4 * x + byte for x in addresses(one, start) for byte in range(4)}
    assert share_bytes(a, b) == share_bytes(b, a) == bool(mine & {*addresses(two, other)})


def test_contrived_strides_end_in_a_bounded_time() -> None:
    """Many dimensions of nearly equal strides: cannot be told, so it is not refused."""
    sizes = [50] * 8
    strides = [2 * p for p in (101, 103, 107, 109, 113, 127, 131, 137)]
    with FakeTensorMode():
        memory = torch.empty(10**6, dtype=torch.uint8)
        a, b = memory.as_strided(sizes, strides, 0), memory.as_strided(sizes, strides, 1)
        assert share_bytes(a, b) is False


def test_schemas_name_what_is_written() -> None:
    for op in WRITERS:
        assert ops.SIGNATURES[op].mutated == MUTATED[op] == WRITTEN
        assert SCHEMAS[op].count("!") == 2


def test_filled_caches_of_the_tests_are_themselves_legal() -> None:
    for layout in KVCacheLayout:
        _, key, value = filled_cache(layout, dv=D)
        assert not repeats_itself(key) and not repeats_itself(value)
