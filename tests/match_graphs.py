"""Small functional ATen graphs of attention prologues, for the tests of the recognisers.

Every graph can be run with its own inputs, so a test can hold a fact against the numbers: the
canonical formula, on the values of the very nodes that the fact names, must give the values of
the node that it claims to describe, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.match.facts import RMSNorm, Rope, RopeTable, TokenView
from fusion.match.views import dim_view


@dataclass
class Traced:
    """A graph, and the value of each of its nodes for the inputs it was made with."""

    graph: Graph
    values: dict[Node, Any]

    def result(self, which: int = 0) -> Node:
        """One output of the graph."""
        (values,) = next(n for n in self.graph.nodes if n.op == "output").args
        node = values[which] if isinstance(values, (tuple, list)) else values
        assert isinstance(node, Node)
        return node

    def view(self, dims: str, which: int = 0) -> TokenView:
        """An output as a token view, from a word: ``bshd`` has the head in dimension 2."""
        return view_of(self.result(which), dims)

    def named(self, part: str) -> list[Node]:
        """The nodes whose target's name contains a word."""
        return [n for n in self.graph.nodes if part in str(n.target)]


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def _run(graph: Graph, args: tuple[Any, ...]) -> Traced:
    recorder = _Recorder(GraphModule({}, graph))
    nodes = {n.name: n for n in graph.nodes}
    recorder.run(*args)
    return Traced(graph, {nodes[n.name]: v for n, v in recorder.env.items() if n.name in nodes})


def trace(fn: Callable[..., Any], *args: torch.Tensor, plain: bool = False) -> Traced:
    """The functional ATen graph, with Inductor's decompositions unless ``plain``."""
    from torch._inductor.decomposition import select_decomp_table

    def call(*tensors: torch.Tensor) -> Any:
        return fn(*tensors)

    table = {} if plain else select_decomp_table()
    with torch.no_grad():
        traced = make_fx(
            torch.func.functionalize(call), decomposition_table=table, tracing_mode="fake"
        )(*args)
        graph = traced.graph
        graph.eliminate_dead_code()
        return _run(graph, args)


def compiled(fn: Callable[..., Any], *args: torch.Tensor, **how: Any) -> Traced:
    """The graph behind Dynamo and AOTAutograd, Inductor's decompositions and joint passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    seen: list[Traced] = []

    def compiler(module: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        module = joint_graph_passes(module)

        def run(*inputs: Any) -> Any:
            flat = list(inputs[0]) if inputs and isinstance(inputs[0], list) else list(inputs)
            seen.append(_run(module.graph, tuple(flat)))
            (results,) = next(n for n in module.graph.nodes if n.op == "output").args
            return [seen[-1].values.get(n, n) for n in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler, inference_compiler=compiler, decompositions=select_decomp_table()
    )
    with torch.no_grad():
        torch.compile(fn, backend=backend, **how)(*args)
    return seen[-1]


def view_of(node: Node, dims: str) -> TokenView:
    """A token view from a word: ``bshd`` has the head in dimension 2, ``bhsd`` in 1."""
    tokens = [i for i, c in enumerate(dims) if c not in "hd"]
    order = (*tokens, *([dims.index("h")] if "h" in dims else []), dims.index("d"))
    return dim_view(node, order, "h" in dims)


# --- the canonical formulas, on the values of a fact's nodes --------------------------------------


def operand(traced: Traced, view: TokenView) -> torch.Tensor:
    """``[tokens, heads, dim]`` as the fact's view says."""
    value = traced.values[view.node]
    return value.permute(view.order).reshape(-1, view.heads, view.dim)


def table(traced: Traced, rope: Rope, table: RopeTable) -> torch.Tensor:
    """``[tokens, rotary_dim]`` of cos or sin in its own dtype."""
    value = traced.values[table.node]
    if table.part is not None:
        value = getattr(value, table.part)
    if table.positions is not None:
        rows = traced.values[table.positions].reshape(-1)
        value = value[rows]
    else:
        sizes = [traced.values[rope.x.node].shape[d] for d in rope.x.order]
        tokens = sizes[: rope.x.token_dims]
        dim = table.roles.index("dim")
        roles = [r for r in table.roles if isinstance(r, int)]
        kept = [i for i, r in enumerate(table.roles) if isinstance(r, int)]
        value = value.permute(
            *kept, *(i for i, r in enumerate(table.roles) if r is None), dim
        ).reshape(*(value.shape[i] for i in kept), value.shape[dim])
        where = [1] * len(tokens)
        for role, i in zip(roles, range(len(roles)), strict=True):
            where[role] = value.shape[i]
        order = sorted(range(len(roles)), key=lambda i: roles[i])
        value = value.permute(*order, len(roles)).reshape(*where, value.shape[-1])
        value = value.expand(*tokens, value.shape[-1]).reshape(-1, value.shape[-1])
    value = value[:, table.columns[0] : table.columns[1]]
    if table.full:
        return value
    return value.repeat(1, 2) if rope.style == "half" else value.repeat_interleave(2, 1)


def canonical_rope(traced: Traced, rope: Rope) -> torch.Tensor:
    """The rotated ``[tokens, heads, dim]`` that the fact promises."""
    x = operand(traced, rope.x)
    width = rope.rotary_dim
    y = x[..., :width].to(rope.rope_dtype)
    cos, sin = (table(traced, rope, t)[:, None].to(rope.rope_dtype) for t in (rope.cos, rope.sin))
    if rope.style == "half":
        first, second = y.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    else:
        other = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    rotated = (y * cos + other * sin).to(rope.out_dtype)
    return torch.cat([rotated, x[..., width:].to(rope.out_dtype)], -1)


def canonical_norm(traced: Traced, norm: RMSNorm) -> torch.Tensor:
    """The normed ``[tokens, heads, dim]`` that the fact promises."""
    x = operand(traced, norm.x)
    n = x if x.dtype == torch.float64 else x.float()
    eps = traced.values[norm.eps] if isinstance(norm.eps, Node) else norm.eps
    v = n.pow(2).mean(-1, True) + eps
    n = {
        "rsqrt": lambda: n * torch.rsqrt(v),
        "pow": lambda: n * torch.pow(v, -0.5),
        "div": lambda: n / torch.sqrt(v),
        "recip": lambda: n * (1 / torch.sqrt(v)),
    }[norm.inv_rms]()
    if norm.weight is None:
        return n.to(x.dtype) if norm.cast != "none" else n
    w = traced.values[norm.weight]
    if norm.cast == "late":
        return (1 + w if norm.weight_mode == "1+w" else w) * n.to(x.dtype)
    w = w.to(n.dtype)
    y = n * (1 + w if norm.weight_mode == "1+w" else w)
    return y.to(x.dtype) if norm.cast == "early" else y


def assert_rope_holds(traced: Traced, rope: Rope) -> None:
    """The fact's formula gives the values of its output node, bit for bit."""
    want, have = operand(traced, rope.out), canonical_rope(traced, rope)
    assert have.dtype == want.dtype == rope.out_dtype
    assert torch.equal(have, want)
    assert rope.out.node in rope.nodes
    assert rope.x.node not in rope.nodes


def assert_norm_holds(traced: Traced, norm: RMSNorm, view: TokenView) -> None:
    """The fact's formula gives the values of the viewed node, bit for bit."""
    want, have = operand(traced, view), canonical_norm(traced, norm)
    assert have.dtype == want.dtype == norm.out_dtype
    assert torch.equal(have, want)
    assert view.node in norm.nodes or norm.x.node is view.node
    assert norm.x.node not in norm.nodes
