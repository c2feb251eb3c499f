"""Small functional ATen graphs of attention prologues, for the tests of the recognisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph.elements import value_of
from fusion.match.facts import TokenView
from fusion.match.views import dim_view


def eager_graph(fn: Callable[..., Any], *args: torch.Tensor) -> Graph:
    """The functional ATen graph without decompositions (composite operators opened only)."""

    def call(*tensors: torch.Tensor) -> Any:
        return fn(*tensors)

    traced = make_fx(torch.func.functionalize(call), tracing_mode="fake")(*args)
    return traced.graph


def compiled_graph(fn: Callable[..., Any], *args: torch.Tensor, **how: Any) -> Graph:
    """The graph that Inductor's ``post_grad_custom_pre_pass`` sees (joint passes included)."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    graphs: list[Graph] = []

    class Seen(Exception):
        pass

    def capture(graph: Graph) -> None:
        graphs.append(graph)
        raise Seen

    torch._dynamo.reset()
    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=capture):
        try:
            torch.compile(fn, backend=lambda g, a: compile_fx(g, a), **how)(*args)
        except Exception as error:
            if not graphs:
                raise error
    return graphs[0]


def result(graph: Graph, which: int = 0) -> Node:
    """One output of a graph."""
    (values,) = next(n for n in graph.nodes if n.op == "output").args
    node = values[which] if isinstance(values, (tuple, list)) else values
    assert isinstance(node, Node)
    return node


def view_of(node: Node, dims: str) -> TokenView:
    """A token view from a word: ``bshd`` has the head in dimension 2, ``bhsd`` in 1."""
    tokens = [i for i, c in enumerate(dims) if c not in "hd"]
    order = (*tokens, *([dims.index("h")] if "h" in dims else []), dims.index("d"))
    assert isinstance(value_of(node), torch.Tensor)
    return dim_view(node, order, "h" in dims)
