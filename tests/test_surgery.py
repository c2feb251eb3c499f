"""Surgery on graphs: equal results and cache bytes, no copies, and rollback to the letter."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fusion.graph.surgery import Rewritten, SurgeryError, decompose_mutations, rewrite
from fusion.match.cache_write import find_cache_writes
from fusion.match.facts import CacheWrite, Miss, RopeTable, TokenView
from tests import cache_cases as cases
from tests.cache_cases import BATCH, BLOCKS, HK, PAGE, SMAX, Case, D, T, compile_with, graph_of

HOP = torch.ops.higher_order.auto_functionalized_v2

# An operation with two returns and two caches: q + t, (k + t) written and returned, v written.
_library = torch.library.Library("test_surgery", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "probe(Tensor query, Tensor key, Tensor value, Tensor table, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping, *, float bias=0.0) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.define("pure(Tensor query, Tensor key, *, float bias) -> (Tensor, Tensor)")


def _probe(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, key_cache: Tensor,
    value_cache: Tensor, slot_mapping: Tensor, *, bias: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert query.dim() == key.dim() == value.dim() == 3 and table.dim() == 2
    q, k = query + table[:, None] + bias, key + table[:, None] + bias
    cases.write(k, value, key_cache, value_cache, slot_mapping)
    return q.contiguous(), k.contiguous()


_library.impl("probe", _probe, "CompositeExplicitAutograd")
_library.impl("pure", lambda q, k, *, bias: (q + bias, k - bias), "CompositeExplicitAutograd")
torch.library.register_fake(
    "test_surgery::probe",
    lambda q, k, *_, **__: (q.new_empty(q.shape), k.new_empty(k.shape)),
    lib=_library,
)
torch.library.register_fake(
    "test_surgery::pure", lambda q, k, **_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    lib=_library,
)  # fmt: skip
probe = torch.ops.test_surgery.probe.default


def _operands(write: CacheWrite) -> dict[str, Any]:
    return {
        "key": write.key,
        "value": write.value,
        "key_cache": write.key_plane,
        "value_cache": write.value_plane,
        "slot_mapping": write.slots,
        "k_scale": write.k_scale,
        "v_scale": write.v_scale,
        "kernel": "reference",
    }


def _replace_writes(graph: Graph) -> list[Rewritten]:
    facts = find_cache_writes(graph)
    assert not any(isinstance(f, Miss) for f in facts), facts
    return [
        rewrite(graph, cases.write, _operands(f), write=f)
        for f in facts
        if isinstance(f, CacheWrite)
    ]


def _marked(case: Case) -> tuple[Any, ...]:
    args = case.make()
    for index, dim in case.tokens:
        torch._dynamo.mark_dynamic(args[index], dim)
    return args


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _check(case: Case, make: Callable[[Case], tuple[Any, ...]]) -> GraphModule:
    """Run eager and rewritten; outputs and every argument (the caches) must be the same bits."""
    eager_args, args = case.make(), make(case)
    expected = case.fn(*eager_args)
    seen: list[GraphModule] = []

    def rewriter(gm: GraphModule) -> None:
        guards = _guards(gm.graph)
        done = _replace_writes(gm.graph)
        assert len(done) == case.writes
        assert _guards(gm.graph) == guards
        _assert_clean(gm.graph, case.writes)
        seen.append(copy.deepcopy(gm))
        assert decompose_mutations(gm.graph) == case.writes
        _assert_no_cache_copies(gm.graph)

    got = compile_with(case.fn, rewriter, args)
    assert _same(got, expected)
    assert _same(args, eager_args)
    return seen[0]


def _guards(graph: Graph) -> int:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return len(value.node.shape_env.guards)
    return 0


def _assert_clean(graph: Graph, writes: int) -> None:
    """Only the new calls write; every new content is read, no old one behind a call."""
    calls = [n for n in graph.nodes if n.target is HOP]
    assert len(calls) == writes
    assert not [n for n in graph.nodes if "index_put" in n.name or "scatter" in n.name]
    for node in graph.nodes:
        assert "val" in node.meta or node.op == "output", node
        assert node.users or node.op in ("placeholder", "output") or "copy_" in node.name, node
    for call in calls:
        for base in call.kwargs["_all_bases"]:  # type: ignore[union-attr]
            late = [u for u in base.users if call < u]
            assert all(u.target is torch.ops.aten.copy_.default for u in late), late
    for epilogue in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        assert epilogue.args[1].target.__name__ == "getitem"  # type: ignore[union-attr]


def _assert_no_cache_copies(graph: Graph) -> None:
    """No node makes a tensor of a cache's size (views of the inputs aside)."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    sizes = [v.numel() for v in values if isinstance(v, Tensor) and v.dim() >= 3]
    smallest = min(n for n in sizes if n > 2 * BATCH * T * HK * D)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and _owner(node).op == "call_function":
            assert value.numel() < smallest, f"{node.format_node()}"


def _owner(node: Node) -> Node:
    """The node whose storage a value lives in."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        view = schema is not None and schema.arguments and schema.arguments[0].alias_info
        if not view and getattr(node.target, "__name__", "") != "getitem":
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


@pytest.mark.parametrize("case", cases.GOOD, ids=lambda c: c.name)
def test_the_same_bits_and_no_copy_static(case: Case) -> None:
    _check(case, lambda c: c.make())


@pytest.mark.parametrize("case", cases.GOOD, ids=lambda c: c.name)
def test_the_same_bits_and_no_copy_dynamic_tokens(case: Case) -> None:
    gm = _check(case, _marked)
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in gm.graph.nodes)


@pytest.mark.parametrize("case", cases.GOOD[:6], ids=lambda c: c.name)
def test_the_first_wrapper_version_is_replaced_too(case: Case) -> None:
    from torch._inductor import config

    with config.patch(enable_auto_functionalized_v2=False):
        _check(case, lambda c: c.make())


def test_a_cache_that_is_itself_a_slice_of_a_larger_buffer() -> None:
    """The graph input then has a storage offset of its own."""
    case = next(c for c in cases.GOOD if c.fn is cases.rows_view)
    whole, again = cases.old(3, BLOCKS, PAGE, HK, D), cases.old(3, BLOCKS, PAGE, HK, D)
    k, v, _, s = case.make()
    expected = case.fn(k, v, whole[1:], s)

    def rewriter(gm: GraphModule) -> None:
        _replace_writes(gm.graph)
        decompose_mutations(gm.graph)

    got = compile_with(case.fn, rewriter, (k, v, again[1:], s))
    assert _same(got, expected) and _same(again, whole)


def test_an_exported_program() -> None:
    """No epilogue there: the new contents are graph outputs."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", cases.old(2, BLOCKS, PAGE, HK, D))

        def forward(self, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
            cases.write(k, v, *self.cache.unbind(0), s)  # type: ignore[operator]
            return self.cache.sum()  # type: ignore[operator]

    args = (*cases.rows(), cases.slots())
    eager = Block()
    expected = eager(*args)
    program = torch.export.export(Block(), args).run_decompositions({})
    done = _replace_writes(program.graph_module.graph)
    assert len(done) == 1
    program.graph_module.recompile()
    outputs = program.graph_module(Block().cache, *args)
    assert _same(tuple(outputs), (eager.cache, expected))


def test_a_module_buffer_and_a_symbolic_number_of_blocks() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", cases.old(BLOCKS, 2, PAGE, HK, D))

        def forward(self, k: Tensor, v: Tensor, extra: Tensor, s: Tensor) -> Tensor:
            cases.write(k, v, *self.cache.unbind(1), s)  # type: ignore[operator]
            cases.write(k, v, *extra.unbind(1), s)
            return self.cache.sum() + extra.sum()  # type: ignore[operator]

    def make() -> tuple[Tensor, ...]:
        return (*cases.rows(), cases.old(BLOCKS, 2, PAGE, HK, D), cases.slots())

    eager, fused = Block(), Block()
    expected_args, args = make(), make()
    for tensor in args:
        torch._dynamo.mark_dynamic(tensor, 0)
    expected = eager(*expected_args)
    counts: list[int] = []

    def rewriter(gm: GraphModule) -> None:
        guards = _guards(gm.graph)
        counts.append(len(_replace_writes(gm.graph)))
        assert _guards(gm.graph) == guards
        decompose_mutations(gm.graph)

    got = compile_with(fused, rewriter, args)
    assert counts == [2]
    assert _same(got, expected) and _same(args, expected_args)
    assert _same(fused.cache, eager.cache)


# The probe: returns, readers before the write, shared operands.


def _layer(
    q: Tensor, k: Tensor, v: Tensor, t: Tensor, kc: Tensor, vc: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """``[B, H, S, D]`` rows; q is used before the write and after it."""
    q, k = q + t[None, None], k + t[None, None]
    early = q.abs().reshape(-1).sum()
    kc.index_copy_(2, s, k)
    vc.index_copy_(2, s, v)
    return q * kc.sum() + early, k


def _model(q: Tensor, k: Tensor, v: Tensor, t: Tensor, s: Tensor, *caches: Tensor) -> Any:
    outs = []
    for i in range(0, len(caches), 2):
        q, k2 = _layer(q, k + i, v, t, caches[i], caches[i + 1], s)
        outs.append(k2 * 2)
    return q, outs


def _inputs(layers: int = 2, transposed: bool = False) -> tuple[Tensor, ...]:
    q = cases.ints(BATCH, 2 * HK, T, D, seed=3)
    k, v = cases.batched()
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    made = [cases.old(BATCH, HK, SMAX, D) for _ in range(2 * layers)]
    return q, k, v, cases.ints(T, D), cases.slots(4, 5, 6, 7, 8), *made


def _probe_site(graph: Graph, write: CacheWrite, watch: Any = None) -> Rewritten:
    """Replace one layer of `_model` by the probe."""
    key_sum = write.key.node
    x, table = key_sum.args[0], key_sum.args[1]
    assert isinstance(x, Node) and isinstance(table, Node)
    table_in = table.all_input_nodes[0] if table.op == "call_function" else table
    while table_in.op == "call_function":
        table_in = table_in.all_input_nodes[0]
    query_sum = next(
        n
        for n in graph.nodes
        if n.target is torch.ops.aten.add.Tensor
        and n.meta["val"].shape[1:2] == (2 * HK,)
        and isinstance(n.args[1], Node)
        and n.args[1].meta["val"].dim() == 4
        and not n.meta.get("taken")
    )
    query_sum.meta["taken"] = True
    source = query_sum.args[0]
    assert isinstance(source, Node)
    q_out = TokenView(query_sum, (0, 2, 1, 3), 2, (BATCH, T), BATCH * T, 2 * HK, D)
    operands: dict[str, Any] = {
        "query": replace(q_out, node=source),
        "key": replace(write.key, node=x),
        "value": write.value,
        "table": RopeTable(table_in, (1, "dim"), (0, D), True),
        "key_cache": write.key_plane,
        "value_cache": write.value_plane,
        "slot_mapping": write.slots,
    }
    outputs = {0: [q_out], 1: [write.key]}
    try:
        return rewrite(graph, probe, operands, write=write, outputs=outputs, watch=watch)
    finally:
        query_sum.meta.pop("taken", None)


@pytest.mark.parametrize("transposed", [False, True])
def test_results_replace_old_values_and_early_readers_move(transposed: bool) -> None:
    eager_args, args = _inputs(2, transposed), _inputs(2, transposed)
    expected = _model(*eager_args)
    graphs: list[GraphModule] = []

    def rewriter(gm: GraphModule) -> None:
        for fact in find_cache_writes(gm.graph):
            assert isinstance(fact, CacheWrite)
            _probe_site(gm.graph, fact)
        graphs.append(copy.deepcopy(gm))
        decompose_mutations(gm.graph)
        _assert_no_cache_copies(gm.graph)

    got = compile_with(_model, rewriter, args)
    assert _same(got, expected) and _same(args, eager_args)
    nodes = list(graphs[0].graph.nodes)
    calls = [n for n in nodes if n.target is HOP]
    assert [c.args[0] for c in calls] == [probe, probe]
    # cos and sin (here: the table) and the slots are brought into form once, not once a layer.
    assert calls[0].kwargs["table"] is calls[1].kwargs["table"]
    assert calls[0].kwargs["slot_mapping"] is calls[1].kwargs["slot_mapping"]
    # Returns come first in the wrapper, then the bases.
    indices = {n.args[1] for n in nodes if n.target.__class__ is not str and calls[0] in n.args}
    assert indices == {0, 1, 2, 3}
    # An output that was contiguous [B, H, S, D] stays so: a copy only where strides differ.
    clones = [n for n in nodes if n.name.startswith("clone_default")]
    assert bool(clones) != transposed


def test_new_nodes_say_where_they_come_from() -> None:
    gm = graph_of(_model, _inputs(1))
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite) and fact.anchor is not None
    fact.anchor.meta["nn_module_stack"] = {"x": ("model.layers.0", object)}
    done = _probe_site(gm.graph, fact)
    for node in done.nodes:
        assert node.meta["nn_module_stack"] == {"x": ("model.layers.0", object)}
        assert "val" in node.meta
    assert len(done.call.meta["val"]) == 4
    assert done.erased and all("index_put" not in n.name for n in gm.graph.nodes)


def test_a_pure_operation_replaces_two_values() -> None:
    def fn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q + 2.0).view(-1), (k - 2.0) * 3

    args = (cases.ints(BATCH, HK, T, D), cases.ints(BATCH, HK, T, D, seed=2))

    def view(node: Node) -> TokenView:
        return TokenView(node, (0, 2, 1, 3), 2, (BATCH, T), BATCH * T, HK, D)

    def rewriter(gm: GraphModule) -> None:
        add, sub = (
            next(n for n in gm.graph.nodes if n.target is t)
            for t in (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
        )
        rewrite(
            gm.graph,
            torch.ops.test_surgery.pure.default,
            {"query": view(add.args[0]), "key": view(sub.args[0]), "bias": 2.0},
            outputs={0: [view(add)], 1: [view(sub)]},
        )
        assert not [n for n in gm.graph.nodes if n in (add, sub)]

    assert _same(compile_with(fn, rewriter, args), fn(*args))


# Refusals and rollback.


def _letter(graph: Graph) -> list[Any]:
    """Everything that a graph says, down to the names that it would hand out next."""
    names = graph._graph_namespace
    nodes = [
        (
            n, n.name, n.op, n.target, n.args, dict(n.kwargs), list(n.users),
            id(n.meta), {k: id(v) for k, v in n.meta.items()},
        )
        for n in graph.nodes
    ]  # fmt: skip
    found = [n.name for n in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)]
    handed_out = sorted(names._used_names), dict(names._base_count), len(names._obj_to_name)
    return [nodes, found, handed_out, len(graph.nodes), graph.python_code("self").src]


class _Stop(RuntimeError):
    pass


def test_a_failure_at_any_step_leaves_the_graph_to_the_letter() -> None:
    steps: list[str] = []
    gm = graph_of(_model, _inputs(1))
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    _probe_site(gm.graph, fact, steps.append)
    kinds = {s.split()[0] for s in steps}
    assert {"create", "set", "redirect", "move", "commit"} <= kinds, kinds

    gm = graph_of(_model, _inputs(1))
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    before = _letter(gm.graph)
    for failing in range(len(steps)):
        left = iter(range(len(steps)))

        def watch(step: str, left: Any = left, failing: int = failing) -> None:
            if next(left) == failing:
                raise _Stop(step)

        with pytest.raises(SurgeryError) as caught:
            _probe_site(gm.graph, fact, watch)
        assert caught.value.reason.code == "internal.error"
        assert "_Stop" in caught.value.reason.message
        assert _letter(gm.graph) == before, steps[failing]
    gm.graph.lint()
    _probe_site(gm.graph, fact)  # and it still works


def test_an_operand_that_depends_on_the_result_is_refused() -> None:
    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
        kc[s] = k
        vc[s] = v + kc.sum()
        return vc.sum()

    gm = graph_of(fn, next(c for c in cases.GOOD if c.fn is cases.rows_flat).make())
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    before = _letter(gm.graph)
    with pytest.raises(SurgeryError) as caught:
        rewrite(gm.graph, cases.write, _operands(fact), write=fact)
    assert caught.value.reason.code == "safety.cycle"
    assert _letter(gm.graph) == before


def test_a_reader_of_the_old_content_behind_the_call_is_refused() -> None:
    """The recogniser lets it pass (it stands before the write); the query comes too late."""

    def fn(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Any:
        old = kc.sum()
        kc[s] = k
        vc[s] = v
        late = q * 2
        return late + old, kc.sum() + vc.sum()

    args = (cases.ints(T, HK, D), *next(c for c in cases.GOOD if c.fn is cases.rows_flat).make())
    gm = graph_of(fn, args)
    graph = gm.graph
    (fact,) = find_cache_writes(graph)
    assert isinstance(fact, CacheWrite)
    query = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    reader = next(n for n in graph.nodes if n.target is torch.ops.aten.sum.default)
    query.append(reader)
    graph.lint()
    view = TokenView(query, (0, 1, 2), 1, (T,), T, HK, D)
    table = fact.key.node
    before = _letter(graph)
    with pytest.raises(SurgeryError) as caught:
        rewrite(
            graph,
            probe,
            {**_probe_operands(fact), "query": view, "table": table},
            write=fact,
        )
    assert caught.value.reason.code == "safety.cache-read-between"
    assert caught.value.reason.node == reader.name
    assert _letter(graph) == before


def _probe_operands(write: CacheWrite) -> dict[str, Any]:
    found = _operands(write)
    return {k: v for k, v in found.items() if k not in ("k_scale", "v_scale", "kernel")}


def test_an_operand_that_is_a_view_of_the_written_cache_is_refused() -> None:
    """Rows copied from slots to slots: in place the call would read what it writes."""

    def fn(k: Tensor, c: Tensor, s: Tensor) -> Tensor:
        flat = c.view(2, -1, HK, D)
        flat[0][s] = flat[0, 3 : 3 + T]
        flat[1][s] = k
        return c.sum()

    args = (cases.ints(T, HK, D), cases.old(2, BLOCKS, PAGE, HK, D), cases.slots())
    gm = graph_of(fn, args)
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite), fact
    before = _letter(gm.graph)
    with pytest.raises(SurgeryError) as caught:
        rewrite(gm.graph, cases.write, _operands(fact), write=fact)
    assert caught.value.reason.code == "safety.aliased-input"
    assert _letter(gm.graph) == before


def _functional(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Written by hand in functional style: values that show a part of the new content."""
    first = torch.ops.aten.index_put(c[0].reshape(-1, HK, D), [s], k)
    c1 = torch.select_scatter(c, first.view(BLOCKS, PAGE, HK, D), 0, 0)
    second = torch.ops.aten.index_put(c1[1].reshape(-1, HK, D), [s], v)
    c2 = torch.select_scatter(c1, second.view(BLOCKS, PAGE, HK, D), 0, 1)
    return first.sum(0), second[3:5] * 2, c2


def test_values_that_show_a_part_of_the_new_content_are_cut_from_it() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    args = (*cases.rows(), cases.old(2, BLOCKS, PAGE, HK, D), cases.slots())
    gm = make_fx(_functional, tracing_mode="fake")(*args)
    expected = _functional(*args)
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite), fact
    assert len(fact.views) == 2  # type: ignore[attr-defined]
    rewrite(gm.graph, cases.write, _operands(fact), write=fact)
    gm.graph.lint()
    gm.recompile()
    assert not [n for n in gm.graph.nodes if "index_put" in n.name or "scatter" in n.name]
    assert _same(gm(*args), expected)


def test_a_permuted_whole_is_as_good_as_the_whole() -> None:
    """No value has the base's own layout between the writes, and none at the end."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        t = c.permute(0, 2, 1, 3)
        first = torch.ops.aten.index_put(t[..., :D], [s // PAGE, s % PAGE], k)
        t = torch.slice_scatter(t, first, 3, 0, D)
        second = torch.ops.aten.index_put(t[..., D:], [s // PAGE, s % PAGE], v)
        return torch.slice_scatter(t, second, 3, D, 2 * D) * 3

    args = (*cases.rows(), cases.old(BLOCKS, HK, PAGE, 2 * D), cases.slots())
    gm = make_fx(fn, tracing_mode="fake")(*args)
    expected = fn(*args)
    _replace_writes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert _same(gm(*args), expected)


def test_a_result_of_another_dtype_is_refused() -> None:
    gm = graph_of(_model, _inputs(1))
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    before = _letter(gm.graph)
    half = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.meta["val"].dim() == 1)
    wrong = TokenView(half, (0,), 1, (T,), T, 1, 1)
    with pytest.raises(SurgeryError):
        rewrite(
            gm.graph,
            probe,
            {**_probe_operands(fact), "query": fact.key, "table": half},
            write=fact,
            outputs={0: [wrong]},
        )
    assert _letter(gm.graph) == before


def test_an_unknown_argument_is_refused() -> None:
    gm = graph_of(cases.rows_flat, cases.GOOD[6].make())
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    with pytest.raises(SurgeryError, match="colour"):
        rewrite(gm.graph, cases.write, {**_operands(fact), "colour": 1}, write=fact)


def test_an_old_content_that_is_still_wanted_is_cloned_not_overwritten() -> None:
    """decompose_mutations clones where somebody reads the old value: slower, never wrong."""

    def fn(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        before = kc * 1
        cases.write(k, v, kc, vc, s)
        return before + kc.sum(), vc.sum()

    make = next(c for c in cases.GOOD if c.fn is cases.op_pair).make
    expected_args, args = make(), make()
    expected = fn(*expected_args)

    def rewriter(gm: GraphModule) -> None:
        mul = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
        last = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.sum.default)
        last.append(mul)  # legal in a functional graph, and fatal if the write is in place
        assert decompose_mutations(gm.graph) == 1

    got = compile_with(fn, rewriter, args)
    assert _same(got, expected) and _same(args, expected_args)


# With Inductor.


def _inductor(
    fn: Any, args: tuple[Any, ...], hook: str = "post_grad_custom_pre_pass"
) -> tuple[Any, str, list[int]]:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.utils import run_and_get_code

    counts: list[int] = []

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            counts.append(len(_replace_writes(graph)))
            graph.lint()

        def uuid(self) -> Any:
            return None

    torch._dynamo.reset()
    options = {hook: Pass(), "fx_graph_cache": False}
    with torch.no_grad(), config.patch(options):
        out, (code, *_) = run_and_get_code(torch.compile(fn), *args)
    return out, code, counts


def _buffers(code: str) -> list[int]:
    sizes = re.findall(r"= empty_strided\w*\(\((.*?)\)", code)
    return [int(torch.tensor([int(n) for n in s.split(",") if n.strip()]).prod()) for s in sizes]


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("rows_block_offset", "post_grad_custom_pre_pass"),
        ("static_positions", "joint_custom_pre_pass"),
        ("op_stack", "post_grad_custom_post_pass"),
    ],
)
def test_inductor_updates_the_cache_in_place(name: str, hook: str) -> None:
    case = next(c for c in cases.GOOD if c.name == name)
    eager_args, args = case.make(), case.make()
    expected = case.fn(*eager_args)
    got, code, counts = _inductor(case.fn, args, hook)
    assert counts == [case.writes]
    assert _same(got, expected) and _same(args, eager_args)
    cache = min(
        a.numel() for a in args if isinstance(a, Tensor) and a.numel() > 2 * BATCH * T * HK * D
    )
    assert all(size < cache for size in _buffers(code)), _buffers(code)


def test_a_buffer_that_changes_between_moved_values_is_refused() -> None:
    from fusion.graph.refusals import refuse_side_effects

    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.neg.default, (x,))
    changed = graph.call_function(torch.ops.aten.mul_.Tensor, (x, 2))
    last = graph.call_function(torch.ops.aten.neg.default, (first,))
    graph.output(last)
    with pytest.raises(SurgeryError) as caught:
        refuse_side_effects([first], last)
    assert (caught.value.reason.code, caught.value.reason.node) == ("safety.mutation", changed.name)
    refuse_side_effects([last], last)
