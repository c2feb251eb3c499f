"""Cache writes at the edge that are read right: ranges, strides, copies, merged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.match.cache_trace import Trace
from fusion.match.cache_write import find_cache_writes
from fusion.match.facts import CacheWrite, Miss
from tests import cache_cases as cases
from tests.cache_cases import (
    BATCH,
    BLOCKS,
    HK,
    PAGE,
    SMAX,
    D,
    T,
    graph_of,
    ints,
    old,
    rows,
    slots,
    write,
)

_flat, _static = cases._flat, cases._static


def _facts(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[CacheWrite | Miss]:
    return find_cache_writes(graph_of(fn, args).graph)


def _fact(fn: Callable[..., Any], args: tuple[Any, ...]) -> CacheWrite:
    (fact,) = _facts(fn, args)
    assert isinstance(fact, CacheWrite), fact
    return fact


def _plane_pair() -> tuple[Any, ...]:
    return (*rows(), old(2, 32, HK, D), slots())


def test_a_flat_buffer_of_numbers_is_no_cache() -> None:
    def fn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c[s] = x
        return c.sum()

    assert _facts(fn, (ints(T), old(32), slots())) == []


def test_the_last_positions_are_counted_from_the_front() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc[:, :, -T:] = k
        vc[:, :, SMAX - T :] = v
        return kc.sum() + s.sum()

    ranged = _fact(fn, _static()).slots
    assert (ranged.start, ranged.length) == (SMAX - T, T)  # type: ignore[attr-defined]


def _item(low: int | None, length: int) -> Callable[..., Tensor]:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        at = int(s[0].item())
        if low is not None:
            torch._check(at >= low)  # type: ignore[no-untyped-call]
            torch._check(at <= SMAX - length)  # type: ignore[no-untyped-call]
        kc[:, :, at : at + length] = k
        vc[:, :, at : at + length] = v
        return kc.sum()

    return fn


def test_a_position_that_is_read_from_a_tensor() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fact = _fact(_item(0, T), _static())
        assert fact.slots.kind == "range" and fact.slots.length == T  # type: ignore[attr-defined]
        start = fact.slots.start  # type: ignore[attr-defined]
        assert isinstance(start.meta["val"], torch.SymInt)
        # Nothing says that this one is not negative: it would count from the end.
        graphs = fusion.capture(_item(None, T), *_static())
    facts = [f for graph in graphs for f in find_cache_writes(graph.gm.graph)]
    targets = [str(n.target) for graph in graphs for n in graph.gm.graph.nodes]
    if not any("scatter" in target for target in targets):
        # torch 2.11 ends the graph before such a slice: there is no write to be read.
        assert facts == [] and any("_local_scalar_dense" in target for target in targets)
        return
    assert [f.reason.code for f in facts if isinstance(f, Miss)] == ["match.cache-view"] * 2
    assert {f.reason.node for f in facts if isinstance(f, Miss)} == {
        "slice_scatter", "slice_scatter_1",
    }  # fmt: skip


def test_a_whole_range_whose_start_may_be_negative() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        at = int(s[0].item())
        kc[:, :, 0:T] = k + at
        vc[:, :, 0:T] = v
        return kc.sum()

    k, v, *_, s = _static()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(fn, (k, v, old(BATCH, HK, T, D), old(BATCH, HK, T, D), s)).graph
    scatters = [n for n in graph.nodes if "slice_scatter" in str(n.target)]
    assert scatters == []  # a whole range is a copy: put the ranges in by hand
    at = next(n for n in graph.nodes if "_local_scalar_dense" in n.name)
    base, copied = next(n.args for n in graph.nodes if n.name == "copy_")
    with graph.inserting_after(copied):
        put = graph.call_function(
            torch.ops.aten.slice_scatter.default, (base, copied, 2, at, 2**63 - 1)
        )
    put.meta["val"] = copied.meta["val"]
    next(n for n in graph.nodes if n.name == "copy_").update_arg(1, put)
    reasons = [f.reason for f in find_cache_writes(graph) if isinstance(f, Miss)]
    assert [(r.code, r.node) for r in reasons if "may be negative" in r.message] == [
        ("match.cache-write", put.name)
    ]


def test_rows_copied_into_a_range_are_the_rows() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc[:, :, 3 : 3 + T].copy_(k)
        vc[:, :, 3 : 3 + T].copy_(v)
        return kc.sum() + s.sum()

    assert _fact(fn, _static()).key.node.op == "placeholder"
    k, v, kc, vc, s = _static()
    fact = _fact(fn, (k, v, kc.bfloat16(), vc.bfloat16(), s))
    assert "copy" in fact.key.node.name  # it converts: the rounding stays in the chain
    assert fact.key.node.meta["val"].dtype == torch.bfloat16


def test_a_scatter_whose_index_was_expanded_step_by_step() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        index = s.unsqueeze(0).unsqueeze(0).unsqueeze(-1).expand_as(k).contiguous()
        kc.scatter_(2, index, k)
        vc.scatter_(2, s.reshape(1, -1, 1).expand(HK, T, D).expand_as(v), v)
        return kc.sum()

    fact = _fact(fn, _static())
    assert fact.slots.kind == "index" and fact.slots.node.op == "placeholder"
    assert fact.slots.batch == BATCH and not fact.twins  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(1, T, HK, D), (T, HK, 2, D // 2), (2 * T, HK // 2, D)])
def test_merged_rows_that_cannot_be_told_apart_are_one_head(shape: tuple[int, ...]) -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc.view(-1, HK * D)[s] = k.view(-1, HK * D)
        vc.view(-1, HK * D)[s] = v.view(-1, HK * D)
        return kc.sum()

    args = (ints(*shape), ints(*shape, seed=1), old(32, HK, D), old(32, HK, D), slots())
    fact = _fact(fn, args)
    assert (fact.key.heads, fact.key.dim, fact.key.tokens) == (1, HK * D, T)
    assert fact.key_plane.size[2:] == (1, HK * D)


def test_merged_rows_that_are_computed_or_transposed_are_one_head() -> None:
    def computed(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc.view(-1, HK * D)[s] = k.flatten(1) + 1
        vc.view(-1, HK * D)[s] = v.flatten(1) * 2
        return kc.sum()

    def transposed(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc.view(-1, HK * D).t()[:, s] = k.view(HK * D, T)
        vc.view(-1, HK * D).t()[:, s] = v.view(HK * D, T)
        return kc.sum()

    fact = _fact(computed, _flat())
    assert (fact.key.order, fact.key.heads, fact.key.dim) == ((0, 1), 1, HK * D)
    args = (ints(HK, D, T), ints(HK, D, T, seed=1), old(32, HK, D), old(32, HK, D), slots())
    fact = _fact(transposed, args)
    assert (fact.key.order, fact.key.heads, fact.key.dim) == ((1, 0), 1, HK * D)
    assert fact.key_plane.size == (32, 1, 1, HK * D)


def test_a_cache_that_the_graph_makes_itself() -> None:
    def fn(k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        kc, vc = torch.zeros(BLOCKS, PAGE, HK, D), torch.zeros(BLOCKS, PAGE, HK, D)
        write(k, v, kc, vc, s)
        return kc, vc

    fact = _fact(fn, (*rows(), slots()))
    assert [b.name.split("_")[0] for b in fact.bases] == ["full", "full"]
    assert fact.key_plane.size == (BLOCKS, PAGE, HK, D)


_STRIDES = (HK * D, D, 1)


@pytest.mark.parametrize("shape", [(2 * 32 * HK * D,), (2, 32, HK, D)])
def test_planes_cut_out_by_strides(shape: tuple[int, ...]) -> None:
    """The first has no offset of its own, which means that of the buffer."""

    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c.as_strided((32, HK, D), _STRIDES)[s] = k
        c.as_strided((32, HK, D), _STRIDES, 32 * HK * D)[s] = v
        return c.sum()

    fact = _fact(fn, (*rows(), old(*shape), slots()))
    assert fact.key_plane.size == (32, 1, HK, D)
    offsets = fact.key_plane.storage_offset, fact.value_plane.storage_offset
    assert offsets == (0, 32 * HK * D)
    assert fact.bases[0].op == "placeholder" and len(fact.bases) == 1


def test_reads_through_strides_see_the_plane_that_they_name() -> None:
    def of(offset: int) -> Callable[..., Tensor]:
        def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
            c[0][s] = k
            seen = c.as_strided((32, HK, D), _STRIDES, offset).sum()
            c[1][s] = v
            return c.sum() + seen

        return fn

    assert _fact(of(0), _plane_pair()).key_plane.storage_offset == 0
    (miss,) = _facts(of(32 * HK * D), _plane_pair())
    assert isinstance(miss, Miss) and miss.reason.code == "safety.cache-read-between"
    assert miss.node is not None and "sum" in str(miss.node.target)


def test_strides_of_a_copy_say_nothing_about_the_cache() -> None:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c[0][s] = k
        copied = c.permute(2, 0, 1, 3).contiguous()
        seen = copied.as_strided((32, HK, D), _STRIDES, 0).sum()
        c[1][s] = v
        return c.sum() + seen

    (miss,) = _facts(fn, _plane_pair())
    assert isinstance(miss, Miss) and miss.reason.code == "safety.cache-read-between"
    assert miss.node is not None and "as_strided" in str(miss.node.target)


def _module(graph: torch.fx.Graph) -> tuple[torch.fx.Node, ...]:
    """Inputs k, v, cache [2, 32, HK, D] and slots of a graph that is made by hand."""
    nodes = tuple(graph.placeholder(n) for n in ("k", "v", "c", "s"))
    for node, value in zip(nodes, _plane_pair(), strict=True):
        node.meta["val"] = value
    return nodes


def _call(graph: torch.fx.Graph, op: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(op, args)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = op(*values)
    return node


aten = torch.ops.aten


def _written(graph: torch.fx.Graph, between: Callable[..., Any]) -> list[CacheWrite | Miss]:
    """K and V are written to the two planes of ``c``, and ``between`` stands between."""
    k, v, c, s = _module(graph)
    rows = _call(graph, aten.index_put.default, _call(graph, aten.select.int, c, 0, 0), [s], k)
    first = _call(graph, aten.select_scatter.default, c, rows, 0, 0)
    extra = between(c, first)
    rows = _call(graph, aten.index_put.default, _call(graph, aten.select.int, first, 0, 1), [s], v)
    last = _call(graph, aten.select_scatter.default, first, rows, 0, 1)
    graph.call_function(aten.copy_.default, (c, last))
    graph.output((extra,))
    return find_cache_writes(graph)


def test_a_module_called_between_the_writes_reads_the_cache() -> None:
    graph = torch.fx.Graph()
    (miss,) = _written(graph, lambda _, first: graph.call_module("attention", (first,)))
    assert isinstance(miss, Miss) and miss.reason.code == "safety.cache-read-between"
    assert miss.node is not None and miss.node.op == "call_module"


def test_pieces_of_the_old_content_that_are_returned_read_it() -> None:
    graph = torch.fx.Graph()
    (miss,) = _written(graph, lambda c, _: _call(graph, aten.split.Tensor, c, 16, 1))
    assert isinstance(miss, Miss) and miss.reason.code == "safety.cache-read-between"
    assert miss.node is not None and miss.node.op == "output"


def test_strides_put_back_into_a_copy_are_not_those_of_the_cache() -> None:
    graph = torch.fx.Graph()
    k, _, c, s = _module(graph)
    plane = _call(graph, aten.as_strided.default, c, [32, HK, D], list(_STRIDES), 0)
    rows = _call(graph, aten.index_put.default, plane, [s], k)
    turned = _call(graph, aten.permute.default, c, [2, 0, 1, 3])
    copied = _call(graph, aten.clone.default, turned)
    copied.meta["val"] = copied.meta["val"].contiguous()
    back = _call(
        graph, aten.as_strided_scatter.default, copied, rows, [32, HK, D], list(_STRIDES), 0
    )
    last = _call(graph, aten.permute.default, back, [1, 2, 0, 3])
    graph.call_function(aten.copy_.default, (c, last))
    graph.output(())
    facts = find_cache_writes(graph)
    codes = {f.reason.code: f.reason.node for f in facts if isinstance(f, Miss)}
    assert len(codes) == len(facts) == 2, facts
    assert codes["match.cache-view"] == back.name


def test_narrow_as_an_exported_graph_may_keep_it() -> None:
    graph = torch.fx.Graph()
    _, _, c, _ = _module(graph)
    planes = [_call(graph, aten.narrow.default, c, 0, i, 1) for i in range(2)]
    trace = Trace.of(graph)
    assert [trace.states[p].region.offset for p in planes] == [0, 32 * HK * D]
    assert all(trace.states[p].region.size == (1, 32, HK, D) for p in planes)


def test_views_that_count_from_the_end_or_by_an_unknown_number() -> None:
    graph = torch.fx.Graph()
    _, _, c, _ = _module(graph)
    last = _call(graph, aten.select.int, c, 0, -1)
    step = graph.placeholder("n")
    step.meta["val"] = 2
    by_step = graph.call_function(aten.slice.Tensor, (c, 1, 0, 2**63 - 1, step))
    by_step.meta["val"] = c.meta["val"][:, ::2]
    trace = Trace.of(graph)
    assert trace.states[last].region.offset == 32 * HK * D
    assert trace.states[by_step].region.stride == (32 * HK * D, 2 * HK * D, D, 1)


def test_a_position_of_unknown_sign_is_no_plain_view() -> None:
    def fn(c: Tensor, s: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        at = int(s[0].item())
        return c.select(1, at) + 1, c[:, :: n.shape[0]] + 1

    n = ints(3)
    torch._dynamo.mark_dynamic(n, 0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(fn, (old(2, 32, HK, D), slots(), n)).graph
    trace = Trace.of(graph)
    for name in ("aten.select.int", "aten.slice.Tensor"):
        views = [u for u in graph.nodes if str(u.target) == name and len(u.meta["val"].shape) > 2]
        assert views and all(u in trace.lost and u not in trace.states for u in views)


def test_a_copy_into_a_view_is_told_to_be_in_place() -> None:
    graph = torch.fx.Graph()
    k, _, c, s = _module(graph)
    part = _call(graph, aten.slice.Tensor, _call(graph, aten.select.int, c, 0, 0), 0, 3, 3 + T)
    copied = graph.call_function(aten.copy_.default, (part, k))
    graph.output((s,))
    (miss,) = find_cache_writes(graph)
    assert isinstance(miss, Miss) and miss.reason.code == "match.cache-write"
    assert miss.reason.node == copied.name and "in place" in miss.reason.message
