"""One node away: every small change of a prologue is either refused or still read rightly.

Each graph is changed in one place (another operator, operand, dimension, offset or constant) and
run. Whatever the recognisers then say about it must hold bit for bit; saying no is always allowed.
No validation is involved.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from fusion.match.facts import Miss, RMSNorm, Rope
from fusion.match.norm import read_norm
from fusion.match.rope import find_query_ropes, read_rope
from tests.match_graphs import Traced, canonical_norm, canonical_rope, operand, trace, view_of
from tests.rope_spellings import (
    by_chunks,
    complex_product,
    gptj,
    head_of,
    into_a_buffer,
    strided,
    with_rotate_half,
)

aten = torch.ops.aten
B, S, HQ, HK, D = 2, 3, 4, 2, 8
bf16 = torch.bfloat16
EPS = 1e-2


def late(x: Any, w: Any) -> Any:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def early(x: Any, w: Any) -> Any:
    n = x.float()
    return (n * torch.rsqrt((n * n).mean(-1, keepdim=True) + EPS) * (1 + w.float())).to(x.dtype)


def over_sum(x: Any, w: Any) -> Any:
    n = x.float()
    return (n / torch.sqrt(n.square().sum(-1, keepdim=True) / D + EPS) * w).to(x.dtype)


def prologue(norm: Any, rope: Any, rotary: int, turn_first: bool) -> Callable[..., Any]:
    def fn(x: Any, wq: Any, wk: Any, c: Any, s: Any) -> Any:
        q, k, _ = x.view(B, S, HQ + 2 * HK, D).split([HQ, HK, HK], 2)
        if turn_first:
            q, k = norm(q.transpose(1, 2), wq), norm(k.transpose(1, 2), wk)
        else:
            q, k = norm(q, wq).transpose(1, 2), norm(k, wk).transpose(1, 2)
        q, k = head_of(q, rope, rotary, c, s), head_of(k, rope, rotary, c, s)
        return q, k

    return fn


CASES = {
    "late rotate_half": (late, with_rotate_half, D, False, bf16),
    "early chunks partial": (early, by_chunks, 4, True, bf16),
    "sum strided f32": (over_sum, strided, D, False, torch.float32),
    "late gptj partial": (late, gptj, 4, True, bf16),
    "early buffer": (early, into_a_buffer, D, True, torch.float32),
    "late complex": (late, complex_product, D, False, bf16),
}

BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]
UNARY = [aten.neg.default, aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default,
         aten.abs.default, aten.clone.default, aten.square.default]  # fmt: skip


def changes(graph: Graph) -> Iterator[tuple[str, Callable[[dict[str, Node]], None]]]:
    """Named single changes; each is applied to a fresh copy of the graph, found by name."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    for node in nodes:
        name, target = node.name, node.target
        for other in BINARY if target in BINARY else UNARY if target in UNARY else []:
            if other is not target:
                yield f"{name}: {other}", lambda m, a=name, b=other: _retarget(m[a], b)
        if target is aten.mean.dim:
            for other in (aten.sum.dim_IntList, aten.amax.default):
                yield f"{name}: {other}", lambda m, a=name, b=other: _retarget(m[a], b)
        if target is aten.sum.dim_IntList:
            yield f"{name}: mean", lambda m, a=name: _retarget(m[a], aten.mean.dim)
        if target is operator.getitem:
            for to in range(3):
                if to != node.args[1]:
                    yield f"{name}: [{to}]", lambda m, a=name, b=to: _argument(m[a], (1,), b)
            continue
        for path, value in _leaves(node.args):
            if isinstance(value, bool):
                continue
            if isinstance(value, int):
                for to in {value + 1, value - 1, -value, 0, 2 * value} - {value}:
                    yield (
                        f"{name}{path}: {to}",
                        lambda m, a=name, p=path, b=to: _argument(m[a], p, b),
                    )
            elif isinstance(value, float):
                for to in (2 * value, -value, value + 1):
                    yield (
                        f"{name}{path}: {to}",
                        lambda m, a=name, p=path, b=to: _argument(m[a], p, b),
                    )
            elif isinstance(value, Node) and value in tensors:
                shape = value.meta["val"].shape
                before = itertools.takewhile(lambda n, a=node: n is not a, tensors)
                alike = [n for n in before if n is not value and n.meta["val"].shape == shape]
                for source in alike:
                    yield (
                        f"{name}{path}: {source.name}",
                        lambda m, a=name, p=path, b=source.name: _argument(m[a], p, m[b]),
                    )
        pairs = [a for a in node.args if isinstance(a, Node)]
        if len(pairs) == 2 and len(node.args) == 2:
            yield f"{name}: swapped", lambda m, a=name: setattr(m[a], "args", m[a].args[::-1])
        if isinstance(node.args[0], (list, tuple)) and len(node.args[0]) > 1:
            yield (
                f"{name}: reversed",
                lambda m, a=name: setattr(m[a], "args", (list(m[a].args[0])[::-1], *m[a].args[1:])),
            )
        for arg in dict.fromkeys(pairs):
            for scale in (1.25, -1.0):
                yield (
                    f"{name}: {scale} * {arg.name}",
                    lambda m, a=name, b=arg.name, f=scale: _scaled(m[a], m[b], f),
                )


def _retarget(node: Node, target: Any) -> None:
    node.target = target


def _leaves(args: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    for i, value in enumerate(args):
        if isinstance(value, (list, tuple)):
            yield from _leaves(value, (*path, i))
        else:
            yield (*path, i), value


def _argument(node: Node, path: tuple[int, ...], value: Any) -> None:
    def put(args: Any, path: tuple[int, ...]) -> Any:
        new = list(args)
        new[path[0]] = value if len(path) == 1 else put(args[path[0]], path[1:])
        return new

    node.args = tuple(put(node.args, path))


def _scaled(node: Node, source: Node, factor: float) -> None:
    with node.graph.inserting_before(node):
        scaled = node.graph.call_function(aten.mul.Tensor, (source, factor))
    node.replace_input_with(source, scaled)


def rerun(graph: Graph, args: tuple[Any, ...]) -> Traced | None:
    """The changed graph with new values and metadata, or None where it cannot run."""
    interpreter = torch.fx.Interpreter(GraphModule({}, graph), garbage_collect_values=False)
    try:
        with torch.no_grad():
            interpreter.run(*args)
    except Exception:
        return None
    # GraphModule copies the graph.
    own = {n.name: n for n in graph.nodes}
    values = {own[n.name]: v for n, v in interpreter.env.items() if n.name in own}
    for node, value in values.items():
        node.meta["val"] = value
    return Traced(graph, values)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def check(traced: Traced) -> set[str]:
    """Hold every fact about a graph against its values; what was read, for statistics."""
    outcome: set[str] = set()
    key = traced.result(1)
    if key.meta["val"].shape != (B, HK, S, D):
        return outcome
    k = read_rope(view_of(key, "bhsd"))
    if isinstance(k, Miss):
        return {k.reason.code}
    found = [k, *(q for q in find_query_ropes(traced.graph, k) if isinstance(q, Rope))]
    for rope in found:
        outcome.add("rope")
        assert same(canonical_rope(traced, rope), operand(traced, rope.out)), rope
        norm = read_norm(rope.x)
        if isinstance(norm, RMSNorm):
            outcome.add("norm")
            assert same(canonical_norm(traced, norm), operand(traced, rope.x)), norm
        else:
            outcome.add(norm.reason.code)
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_every_fifth_change(case: str) -> None:
    _change_all(case, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_single_change(case: str) -> None:
    _change_all(case, every=1)


def _change_all(case: str, every: int) -> None:
    norm, rope, rotary, turn_first, dtype = CASES[case]
    torch.manual_seed(1)
    args = (
        torch.randn(B, S, (HQ + 2 * HK) * D).to(dtype),
        torch.randn(D).to(dtype), torch.randn(D).to(dtype),
        torch.randn(S, rotary // 2).to(dtype), torch.randn(S, rotary // 2).to(dtype),
    )  # fmt: skip
    traced = trace(prologue(norm, rope, rotary, turn_first), *args)
    assert {"rope", "norm"} <= check(traced)
    ran = refused = 0
    codes: set[str] = set()
    for name, change in itertools.islice(changes(traced.graph), 0, None, every):
        copy = Graph()
        output = copy.graph_copy(traced.graph, mapping := {})
        copy.output(output)
        change({n.name: m for n, m in mapping.items()})
        mutant = rerun(copy, args)
        if mutant is None:
            continue
        ran += 1
        try:
            outcome = check(mutant)
        except AssertionError as error:
            raise AssertionError(f"wrong fact after {name}\n{copy}") from error
        refused += not {"rope", "norm"} <= outcome
        codes |= outcome
    assert ran * every > 200
    assert refused * every > 10
    assert len(codes) > 5
