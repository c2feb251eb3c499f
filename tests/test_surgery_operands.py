"""Surgery at the edges: sizes and ranges that are symbols, refusals, checks of the result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph.emit import non_negative
from fusion.graph.surgery import SurgeryError, rewrite
from fusion.match.cache_write import find_cache_writes
from fusion.match.facts import CacheWrite, TokenView
from tests import cache_cases as cases
from tests.cache_cases import BATCH, HK, SMAX, D, T, compile_with, graph_of
from tests.test_surgery import _letter, _operands, _replace_writes, _same

aten = torch.ops.aten

_library = torch.library.Library("test_surgery_operands", "DEF")  # type: ignore[no-untyped-call]
_library.define("scaled(Tensor query, Tensor key, *, SymInt rows) -> (Tensor, Tensor)")
_library.define("guarded(Tensor query, Tensor key, *, SymInt rows) -> (Tensor, Tensor)")
for _name in ("scaled", "guarded"):
    _library.impl(_name, lambda q, k, *, rows: (q * rows, k * rows), "CompositeExplicitAutograd")


def _scaled_fake(q: Tensor, k: Tensor, *, rows: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _guarded_fake(q: Tensor, k: Tensor, *, rows: Any) -> tuple[Tensor, Tensor]:
    if q.shape[0] > 3:  # a library's careless check, which adds a guard
        return _scaled_fake(q, k, rows=rows)
    return q.new_empty(0), k.new_empty(0)


torch.library.register_fake("test_surgery_operands::scaled", _scaled_fake, lib=_library)
torch.library.register_fake("test_surgery_operands::guarded", _guarded_fake, lib=_library)
scaled = torch.ops.test_surgery_operands.scaled.default
guarded = torch.ops.test_surgery_operands.guarded.default


def times_rows(q: Tensor, k: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q * q.shape[0], k * q.shape[0], last + 1


def products(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.target is aten.mul.Tensor]


def view(node: Node) -> TokenView:
    """A ``[T, HK, D]`` node as it is."""
    value = node.meta["val"]
    return TokenView(node, (0, 1, 2), 1, (value.shape[0],), value.shape[0], HK, D)


def symbolic() -> GraphModule:
    args = (cases.ints(T, HK, D), cases.ints(T, HK, D, seed=1), cases.ints(3))
    return make_fx(times_rows, tracing_mode="symbolic")(*args)


def replace_products(gm: GraphModule, op: Any, **changes: Any) -> Any:
    q, k = products(gm.graph)
    source_q, source_k = q.args[0], k.args[0]
    assert isinstance(source_q, Node) and isinstance(source_k, Node)
    operands: dict[str, Any] = {
        "query": view(source_q), "key": view(source_k), "rows": source_q.meta["val"].shape[0],
    } | changes  # fmt: skip
    operands = {n: x for n, x in operands.items() if x is not ...}
    return rewrite(gm.graph, op, operands, outputs={0: [view(q)], 1: [view(k)]})


def test_a_symbolic_size_is_an_attribute() -> None:
    """The call reads graph inputs only, and still stands behind all of them."""
    gm = symbolic()
    replace_products(gm, scaled)
    gm.graph.lint()
    gm.recompile()
    assert not products(gm.graph)
    for rows in (2, T, 11):
        args = (cases.ints(rows, HK, D), cases.ints(rows, HK, D, seed=1), cases.ints(3))
        assert _same(gm(*args), times_rows(*args))


def refused(gm: GraphModule, act: Callable[[], Any], code: str, text: str) -> None:
    before = _letter(gm.graph)
    with pytest.raises(SurgeryError, match=text) as caught:
        act()
    assert caught.value.reason.code == code
    assert _letter(gm.graph) == before


def test_a_rewrite_that_would_add_a_guard_is_refused() -> None:
    gm = symbolic()
    refused(gm, lambda: replace_products(gm, guarded), "internal.error", "would add a guard")


def test_a_missing_argument_is_refused() -> None:
    gm = symbolic()
    refused(gm, lambda: replace_products(gm, scaled, rows=...), "match.value", "needs rows")


def test_a_result_of_another_dtype_is_refused() -> None:
    """The old value is f16; the operation gives what its query has."""

    def fn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.half(), k * 5

    gm = make_fx(fn, tracing_mode="fake")(cases.ints(T, HK, D), cases.ints(T, HK, D, seed=1))
    q, k = (n for n in gm.graph.nodes if n.op == "placeholder")
    half = next(n for n in gm.graph.nodes if n.meta["val"].dtype == torch.float16)
    outputs = {0: [view(half)], 1: [view(products(gm.graph)[0])]}
    operands = {"query": view(q), "key": view(k), "rows": T}
    refused(
        gm,
        lambda: rewrite(gm.graph, scaled, operands, outputs=outputs),
        "internal.error",
        "does not look like the value it replaces",
    )


def test_old_strides_are_kept() -> None:
    """A value that lies head by head is viewed later; the new result lies token by token."""

    def fn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.transpose(0, 1) * T, k.transpose(0, 1) * T
        return q.transpose(0, 1).view(-1), k.clone(memory_format=torch.preserve_format)

    args = (cases.ints(HK, T, D), cases.ints(HK, T, D, seed=1))
    gm = make_fx(fn, tracing_mode="fake")(*args)
    expected = fn(*args)
    q, k = products(gm.graph)
    operands = {"query": view(q.args[0]), "key": view(k.args[0]), "rows": T}  # type: ignore[arg-type]
    rewrite(gm.graph, scaled, operands, outputs={0: [view(q)], 1: [view(k)]})
    gm.graph.lint()
    gm.recompile()
    got = gm(*args)
    assert _same(got, expected)
    assert [x.stride() for x in got] == [x.stride() for x in expected]


def paired() -> tuple[GraphModule, CacheWrite]:
    case = next(c for c in cases.GOOD if c.fn is cases.rows_flat)
    gm = graph_of(case.fn, case.make())
    (fact,) = find_cache_writes(gm.graph)
    assert isinstance(fact, CacheWrite)
    return gm, fact


def test_a_cache_written_as_another_dtype_than_its_buffer_is_refused() -> None:
    gm, fact = paired()
    operands = _operands(fact) | {"key_cache": replace(fact.key_plane, dtype=torch.float8_e4m3fn)}
    refused(
        gm,
        lambda: rewrite(gm.graph, cases.write, operands, write=fact),
        "match.cache-view",
        "as another dtype than its buffer",
    )


def test_an_operation_that_writes_needs_a_cache_to_write() -> None:
    """Given as plain nodes, nothing says which buffer's content the call replaces."""
    gm, fact = paired()
    nodes = {n: getattr(fact, p).base for n, p in (("key_cache", "key_plane"),
                                                   ("value_cache", "value_plane"))}  # fmt: skip
    nodes["slot_mapping"] = fact.slots.node
    refused(
        gm,
        lambda: rewrite(gm.graph, cases.write, _operands(fact) | nodes),
        "match.value",
        "writes an argument that is not a cache",
    )


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda call, old: call.meta.pop("val"), "has no metadata"),
        (lambda call, old: call.all_input_nodes[-1].prepend(call), "stands before its input"),
        (lambda call, old: call.append(call.graph.create_node("call_function", aten.neg.default,
                                                              (old,))), "still reads"),
    ],
    ids=["metadata", "order", "reader"],
)  # fmt: skip
def test_the_result_is_checked_before_anything_is_erased(harm: Any, text: str) -> None:
    """Whatever goes wrong between the steps is found, not compiled."""
    gm = make_fx(lambda q, k: (q.neg() * T, k.neg() * T), tracing_mode="fake")(
        cases.ints(T, HK, D), cases.ints(T, HK, D, seed=1)
    )
    q, k = products(gm.graph)
    done = []

    def watch(step: str) -> None:
        call = next((n for n in gm.graph.nodes if n.target is scaled), None)
        if step.startswith("redirect") and call is not None and not done:
            done.append(step)
            harm(call, q)

    operands = {"query": view(q.args[0]), "key": view(k.args[0]), "rows": T}  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match=text):
        rewrite(gm.graph, scaled, operands, outputs={0: [view(q)], 1: [view(k)]}, watch=watch)
    assert done


# Ranges of positions, whose slots the rewrite computes.


def from_the_front(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
    n = k.shape[2]
    kc[:, :, :n] = k
    vc[:, :, :n] = v
    return kc.sum() + vc.sum()


def behind_the_past(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, past: Tensor) -> Tensor:
    start, n = past.shape[0], k.shape[2]
    kc[:, :, start : start + n] = k
    vc[:, :, start : start + n] = v
    return kc.sum() * past.sum() + vc.sum()


def range_inputs(batch: int) -> tuple[Tensor, ...]:
    caches = (cases.old(batch, HK, SMAX, D) for _ in range(2))
    return cases.ints(batch, HK, T, D), cases.ints(batch, HK, T, D, seed=1), *caches


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("fn", [from_the_front, behind_the_past])
def test_a_range_of_positions(fn: Callable[..., Tensor], batch: int) -> None:
    """The first written position may be a symbol: the length of what is there already."""

    def inputs() -> tuple[Tensor, ...]:
        made = range_inputs(batch)
        if fn is behind_the_past:
            past = cases.ints(7, seed=5)
            torch._dynamo.mark_dynamic(past, 0)
            made = (*made, past)
        return made

    want_args, args = inputs(), inputs()
    want = fn(*want_args)
    counts: list[int] = []
    got = compile_with(fn, lambda gm: counts.append(len(_replace_writes(gm.graph))), args)
    assert counts == [1]
    assert _same(got, want)
    assert _same(args, want_args)


def test_an_index_of_32_bits_becomes_a_slot_mapping() -> None:
    def make() -> tuple[Tensor, ...]:
        caches = cases.old(32, HK, D), cases.old(32, HK, D)
        return (*cases.rows(), *caches, cases.slots(3, -4, 0, 31, 9).int())

    want_args, args = make(), make()
    want = cases.rows_flat(*want_args)
    got = compile_with(cases.rows_flat, lambda gm: _replace_writes(gm.graph), args)
    assert _same(got, want)
    assert _same(args, want_args)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: x % 7, True),
        (lambda x, y: x % -7, False),
        (lambda x, y: torch.remainder(x, y), False),
        (lambda x, y: x.clamp(min=0), True),
        (lambda x, y: x.clamp(min=-1), False),
        (lambda x, y: x.clamp(max=9), False),
        (lambda x, y: aten.clamp_min(x, 2), True),
        (lambda x, y: torch.arange(5) * 2 + 1, True),
        (lambda x, y: torch.arange(-1, 4), False),
        (lambda x, y: torch.arange(4, -1, -1), False),
        (lambda x, y: torch.arange(5) - 1, False),
        (lambda x, y: torch.where(x < 0, x % 5, 3), False),  # 3 is a tensor of its own
        (lambda x, y: torch.where(x < 0, x % 5, y % 5), True),
        (lambda x, y: (x % 300).view(5, 1).to(torch.int8), False),  # may wrap around
        (lambda x, y: (x % 300).view(5, 1)[1:], True),
        (lambda x, y: (x % 7).int().long(), False),
        (lambda x, y: (x % 7) + y, False),
        (lambda x, y: functools.reduce(lambda a, _: a + 1, range(9), x % 7), True),
        (lambda x, y: functools.reduce(lambda a, _: a + 1, range(14), x % 7), False),  # too far
        (lambda x, y: x.float().abs().long(), False),
    ],
)  # fmt: skip
def test_what_is_known_to_have_no_negative_entry(fn: Callable[..., Tensor], expected: bool) -> None:
    from torch._inductor.decomposition import select_decomp_table

    x, y = torch.tensor([-9, 3, 250, -200, 0]), torch.tensor([-2, 5, 3, -1, 7])
    gm = make_fx(fn, select_decomp_table(), tracing_mode="fake")(x, y)
    (result,) = gm.graph.output_node().args
    assert non_negative(result) is expected
    assert not expected or bool((gm(x, y) >= 0).all())
