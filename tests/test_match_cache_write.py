"""Recognition of KV-cache writes: what the facts say, and why a write is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.match.cache_trace import Trace
from fusion.match.cache_view import Region
from fusion.match.cache_write import (
    OpRoles,
    find_cache_writes,
    register_cache_write,
    swapped,
)
from fusion.match.facts import CacheWrite, Miss
from tests import cache_cases as cases
from tests.cache_cases import BLOCKS, HK, PAGE, SMAX, Case, D, T, graph_of


def _found(case: Case) -> list[CacheWrite | Miss]:
    return find_cache_writes(graph_of(case.fn, case.make()).graph)


def _one(fn: object) -> CacheWrite:
    case = next(c for c in cases.GOOD if c.fn is fn)
    (fact,) = _found(case)
    assert isinstance(fact, CacheWrite)
    return fact


@pytest.mark.parametrize("case", cases.GOOD, ids=lambda c: c.name)
def test_every_spelling_is_one_fact_a_layer(case: Case) -> None:
    facts = _found(case)
    assert [type(f).__name__ for f in facts] == ["ViewedCacheWrite"] * case.writes, facts
    for fact in facts:
        assert isinstance(fact, CacheWrite)
        assert fact.key.node is not fact.value.node
        assert fact.anchor in fact.nodes
        assert set(fact.results) <= fact.nodes
        assert set(fact.results.values()) == set(range(len(fact.bases)))


@pytest.mark.parametrize("case", cases.BAD, ids=lambda c: c.name)
def test_what_is_not_a_slot_write_is_refused_with_its_node(case: Case) -> None:
    facts = _found(case)
    assert facts and all(isinstance(f, Miss) for f in facts), facts
    codes = {f.reason.code for f in facts if isinstance(f, Miss)}
    assert case.code in codes, facts
    assert all(f.reason.node for f in facts if isinstance(f, Miss))


def test_the_reader_in_the_way_is_named() -> None:
    (fact,) = _found(next(c for c in cases.BAD if c.fn is cases.bad_read_between))
    assert isinstance(fact, Miss) and fact.node is not None
    assert "sum" in str(fact.node.target)


def test_geometry_of_transposed_split_views() -> None:
    for fn in (cases.op_split, cases.rows_block_offset):
        fact = _one(fn)
        assert fact.key_plane.size == (BLOCKS, PAGE, HK, D)
        strides = (HK * PAGE * 2 * D, 2 * D, PAGE * 2 * D, 1)
        assert fact.key_plane.stride == fact.value_plane.stride == strides
        assert (fact.key_plane.storage_offset, fact.value_plane.storage_offset) == (0, D)
        assert fact.key_plane.base is fact.value_plane.base is fact.bases[0]
        assert fact.bases[0].op == "placeholder"


def test_pages_behind_a_flat_slot_axis_are_found() -> None:
    fact = _one(cases.rows_view)
    assert fact.key_plane.size == (BLOCKS, PAGE, HK, D)
    assert fact.value_plane.storage_offset == BLOCKS * PAGE * HK * D
    assert _one(cases.rows_flat).key_plane.size == (BLOCKS * PAGE, 1, HK, D)


def test_a_static_cache_is_a_block_a_sequence() -> None:
    for fn in (cases.static_positions, cases.static_scatter, cases.static_range):
        fact = _one(fn)
        assert fact.key_plane.size == (cases.BATCH, SMAX, HK, D)
        assert fact.key_plane.stride == (HK * SMAX * D, D, SMAX * D, 1)
        assert fact.slots.batch == cases.BATCH
        assert fact.key.order == (0, 2, 1, 3) and fact.key.token_dims == 2
        assert fact.key.token_sizes == (cases.BATCH, T) and fact.key.tokens == cases.BATCH * T
        assert len(fact.bases) == 2


def test_heads_are_told_apart_again_where_rows_were_flattened() -> None:
    fact = _one(cases.rows_merged_heads)
    assert (fact.key.heads, fact.key.dim) == (HK, D)
    assert fact.key_plane.size[2:] == (HK, D) and fact.key_plane.stride[2:] == (D, 1)


def test_slots_that_are_computed_twice_are_one() -> None:
    fact = _one(cases.rows_split_twice)
    assert set(fact.twins.values()) == {fact.slots.node, fact.slots.offset}  # type: ignore[attr-defined]
    assert not set(fact.twins) & {fact.slots.node, fact.slots.offset}  # type: ignore[attr-defined]


def test_kinds_of_slots() -> None:
    kinds = {
        cases.op_pair: "slots",
        cases.rows_flat: "index",
        cases.rows_block_offset: "block_offset",
        cases.rows_head_major: "block_offset",
        cases.static_range: "range",
    }
    assert {fn: _one(fn).slots.kind for fn in kinds} == kinds
    ranged = _one(cases.static_range).slots
    assert (ranged.start, ranged.length) == (3, T)  # type: ignore[attr-defined]


def test_a_chain_of_layers_starts_where_the_layer_before_ended() -> None:
    for fn in (cases.op_stack, cases.rows_stack):
        case = next(c for c in cases.GOOD if c.fn is fn)
        facts = [f for f in _found(case) if isinstance(f, CacheWrite)]
        assert facts[0].bases[0].op == "placeholder"
        for before, after in itertools.pairwise(facts):
            assert after.bases[0] in before.results
        offsets = [f.key_plane.storage_offset for f in facts]
        layer = 2 * BLOCKS * PAGE * HK * D
        assert offsets == [0, layer, 2 * layer]


def test_the_rotated_side_is_the_key_whatever_the_order() -> None:
    fact = _one(cases.rows_value_first)
    assert fact.value.node.op == "placeholder"
    assert fact.key.node.op == "call_function"
    computed = _one(cases.rows_value_computed)
    assert computed.key.node.name.startswith("add")
    back = swapped(fact)
    assert back.key == fact.value and back.value_plane == fact.key_plane


def test_fp8_rows_and_scales_are_those_before_the_conversion() -> None:
    fact = _one(cases.fp8_scaled)
    assert fact.key.node.meta["val"].dtype == torch.bfloat16
    assert fact.k_scale is not None and fact.v_scale is not None
    assert fact.k_scale is not fact.v_scale
    assert fact.key_plane.dtype == torch.float8_e4m3fn


def test_each_scale_of_an_operation_keeps_its_side() -> None:
    def fn(k: Any, v: Any, c: Any, s: Any, ks: Any, vs: Any) -> Any:
        cases.write(k, v, c[0], c[1], s, ks, vs)
        return c[0].float().sum()

    gm = graph_of(fn, cases._fp8())
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert (fact.k_scale, fact.v_scale) == (inputs[4], inputs[5])


def test_first_wrapper_version() -> None:
    from torch._inductor import config

    for fn in (cases.op_pair, cases.op_unbind):
        case = next(c for c in cases.GOOD if c.fn is fn)
        with config.patch(enable_auto_functionalized_v2=False):
            graph = graph_of(case.fn, case.make()).graph
        assert any("auto_functionalized" in n.name for n in graph.nodes)
        assert not any("auto_functionalized_v2" in str(n.target) for n in graph.nodes)
        (fact,) = find_cache_writes(graph)
        assert isinstance(fact, CacheWrite), fact
        assert fact.key_plane.size == (BLOCKS, PAGE, HK, D)


def test_a_graph_that_writes_in_place_is_told_so() -> None:
    graph = torch.fx.Graph()
    names = ("k", "v", "kc", "vc", "s")
    args = tuple(graph.placeholder(n) for n in names)
    for node, value in zip(args, next(c for c in cases.GOOD).make(), strict=True):
        node.meta["val"] = value
    graph.call_function(cases.write, args)
    graph.output(())
    (miss,) = find_cache_writes(graph)
    assert isinstance(miss, Miss) and miss.reason.code == "match.cache-write"
    assert "in place" in miss.reason.message


def test_a_fused_operation_is_no_site_any_more() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor, cos: Tensor) -> Tensor:
        q, _ = torch.ops.fusion.rope_kv_cache(
            k, k, v, cos, cos, None, kc, vc, s,
            rotary_dim=D, rope_dtype=torch.float32, out_dtype=torch.float32,
        )  # fmt: skip
        return q

    args = (*next(c for c in cases.GOOD).make(), cases.ints(T, D))
    assert find_cache_writes(graph_of(fn, args).graph) == []


def test_a_counter_and_a_mask_are_no_cache() -> None:
    def fn(x: Tensor, counter: Tensor, mask: Tensor, where: Tensor) -> Tensor:
        counter.add_(1)
        mask[where] = True
        return x + counter

    args = (cases.ints(3), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.bool))
    assert find_cache_writes(graph_of(fn, (*args, torch.tensor([1]))).graph) == []


def _shape_env(graph: torch.fx.Graph) -> Any:
    values = (n.meta.get("val") for n in graph.nodes)
    return next(v.node.shape_env for v in values if isinstance(v, torch.SymInt))


def test_a_symbolic_number_of_blocks_is_read_without_guards() -> None:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        cases.write(k, v, *c.unbind(1), s)
        return c.sum()

    args = (*cases.rows(), cases.old(BLOCKS, 2, PAGE, HK, D), cases.slots())
    for tensor in args:
        torch._dynamo.mark_dynamic(tensor, 0)
    graph = graph_of(fn, args).graph
    before = len(_shape_env(graph).guards)
    (fact,) = find_cache_writes(graph)
    assert isinstance(fact, CacheWrite), fact
    assert len(_shape_env(graph).guards) == before
    assert isinstance(fact.key.tokens, torch.SymInt)
    assert isinstance(fact.key_plane.size[0], torch.SymInt)
    assert fact.key_plane.size[1:] == (PAGE, HK, D)
    assert fact.value_plane.storage_offset == PAGE * HK * D


@pytest.mark.parametrize("case", cases.GOOD, ids=lambda c: c.name)
def test_a_symbolic_number_of_tokens_is_read_without_guards(case: Case) -> None:
    args = case.make()
    for index, dim in case.tokens:
        torch._dynamo.mark_dynamic(args[index], dim)
    graph = graph_of(case.fn, args).graph
    before = len(_shape_env(graph).guards)
    facts = find_cache_writes(graph)
    assert len(_shape_env(graph).guards) == before
    assert len(facts) == case.writes
    for fact in facts:
        assert isinstance(fact, CacheWrite), fact
        assert isinstance(fact.key.tokens, torch.SymInt)


def test_cost_is_linear_in_the_layers() -> None:
    import time

    def model(layers: int) -> float:
        def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
            for i in range(layers):
                c[i, 0].view(-1, HK, D)[s] = k + i
                c[i, 1].view(-1, HK, D)[s] = v
                k = k + c[i, 0, 0, 0]
            return k

        graph = graph_of(
            fn, (*cases.rows(), cases.old(layers, 2, 2, PAGE, HK, D), cases.slots(3, 4, 5, 6, 7))
        ).graph
        best = float("inf")
        for _ in range(7):
            start = time.thread_time()  # other processes must not count
            assert len(find_cache_writes(graph)) == layers
            best = min(best, time.thread_time() - start)
        return best

    assert model(32) < 4 * model(16)


def test_registering_a_foreign_op_twice_with_other_roles_is_an_error() -> None:
    roles = OpRoles(key="k", value="v")
    register_cache_write("test_write::twice", roles)
    register_cache_write("test_write::twice", roles)
    with pytest.raises(ValueError, match="already registered"):
        register_cache_write("test_write::twice", OpRoles())


@pytest.mark.parametrize(
    ("region", "shape", "expected"),
    [
        (Region((4, 6), (6, 1), 2), (24,), (1,)),
        (Region((4, 6), (12, 1), 2), (24,), None),
        (Region((4, 6), (12, 1), 2), (2, 2, 3, 2), (24, 12, 2, 1)),
        (Region((4, 6), (1, 4), 0), (24,), None),
        (Region((2, 3, 4), (12, 4, 1), 0), (6, 4), (4, 1)),
        (Region((2, 3, 4), (12, 4, 1), 0), (4, 6), (6, 1)),
        (Region((2, 1, 4), (4, 99, 1), 0), (8, 1), (1, 1)),
        (Region((6,), (2,), 1), (2, 3), (6, 2)),
    ],
)
def test_regrouping_follows_torch_view(
    region: Region, shape: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    got = region.regroup(shape)
    assert (None if got is None else got.stride) == expected
    real = torch.empty_strided(region.size, region.stride)
    try:
        strides: tuple[int, ...] | None = real.view(shape).stride()
    except RuntimeError:
        strides = None
    assert (got is None) == (strides is None)
    if got is not None and strides is not None:
        assert all(n == 1 or a == b for n, a, b in zip(shape, got.stride, strides, strict=True))


def test_disjoint_regions() -> None:
    packed = Region((8, 4, 4, 16), (256, 64, 16, 1), 0)
    k, v = packed.narrow(3, 0, 8), packed.narrow(3, 8, 8)
    assert k.disjoint(v) and v.disjoint(k)
    assert not k.disjoint(packed) and not k.disjoint(k)
    assert not packed.narrow(3, 0, 9).disjoint(v)
    stacked = Region((2, 8, 4), (32, 4, 1), 0)
    first, second = stacked.select(0, 0), stacked.select(0, 1)
    assert first is not None and second is not None and first.disjoint(second)


_VIEWS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda x, r: x.permute(r.sample(range(x.dim()), x.dim())),
    lambda x, r: x.select(d := r.randrange(x.dim()), r.randrange(x.shape[d])),
    lambda x, r: x.narrow(
        d := r.randrange(x.dim()), b := r.randrange(x.shape[d]), r.randint(1, x.shape[d] - b)
    ),
    lambda x, r: x[(slice(None),) * r.randrange(x.dim()) + (slice(r.randrange(2), None, 2),)],
    lambda x, r: x.unsqueeze(r.randint(0, x.dim())),
    lambda x, r: x.flatten(d := r.randrange(x.dim()), r.randrange(d, x.dim())),
    lambda x, r: x.unflatten(d := r.randrange(x.dim()), (2, -1) if x.shape[d] % 2 == 0 else (-1,)),
    lambda x, r: r.choice(x.split(r.randint(1, 3), r.randrange(x.dim()))),
    lambda x, r: r.choice(x.unbind(r.randrange(x.dim()))),
    lambda x, r: x.transpose(r.randrange(x.dim()), r.randrange(x.dim())),
    lambda x, r: x.squeeze(),
)


@pytest.mark.parametrize("seed", range(60))
def test_random_views_have_the_region_that_torch_gives_them(seed: int) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def fn(x: Tensor) -> Tensor:
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 6)):
            if x.dim() < 2 or 0 in x.shape:
                break
            x = rng.choice(_VIEWS)(x, rng)
        return x

    base = torch.empty_strided((4, 6, 4, 8), (400, 1, 48, 6))
    graph = make_fx(fn, tracing_mode="fake")(base).graph
    node = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    value = fn(base)
    trace = Trace.of(graph)
    if value.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        assert node in trace.lost or node not in trace.states
        return
    region = trace.states[node].region
    assert region.offset == value.storage_offset()
    assert region.same(Region.of(value)) or value.numel() == 0
