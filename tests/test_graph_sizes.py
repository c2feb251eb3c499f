"""Symbolic sizes as arguments: the nodes that are built compute them, for other sizes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph.sizes import NoSuchSize, Sizes


def built(expression: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """(a graph of ``x [s, t]`` that returns the size, the argument that was made for it)."""
    gm = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5, 7))
    graph = gm.graph
    placeholder = [n for n in graph.nodes if n.op == "placeholder"][-1]
    size = expression(*placeholder.meta["val"].shape)
    guards = len(placeholder.meta["val"].shape[0].node.shape_env.guards)
    before = placeholder.next

    def emit(target: Any, args: tuple[Any, ...], value: Any) -> Node:
        with graph.inserting_before(before):
            node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    argument = Sizes(graph).argument(size, emit)
    assert len(placeholder.meta["val"].shape[0].node.shape_env.guards) == guards
    if isinstance(argument, Node):
        assert str(argument.meta["val"]) == str(size)
    graph.output_node().args = (argument,)
    gm.recompile()
    return gm, argument


@pytest.mark.parametrize(
    "expression",
    [
        lambda s, t: s,
        lambda s, t: s + t,
        lambda s, t: 2 * s + t - 3,
        lambda s, t: s * t,
        lambda s, t: s * s * s,
        lambda s, t: s * t * 4,
        lambda s, t: (s * t) // 2,
        lambda s, t: s % 3,
        lambda s, t: (s + 15) // 16 * 16,
    ],
)
def test_the_size_is_computed_for_any_input(expression: Callable[[Any, Any], Any]) -> None:
    gm, argument = built(expression)
    assert isinstance(argument, Node)
    for shape in ((5, 7), (9, 3), (32, 33)):
        assert gm(torch.ones(shape)) == expression(*shape)


def test_a_size_that_is_an_input_needs_no_node() -> None:
    """Dynamo hands symbolic sizes over as inputs of their own, before the tensors."""
    gm = make_fx(lambda s, x: x.view(s, -1) + 1, tracing_mode="symbolic")(5, torch.ones(35))
    first = next(iter(gm.graph.nodes))
    sizes = Sizes(gm.graph)
    assert sizes.argument(first.meta["val"], None) is first  # type: ignore[arg-type]


def test_a_number_needs_no_node() -> None:
    assert built(lambda s, t: 12)[1] == 12
    assert built(lambda s, t: s - s + 4)[1] == 4  # symbolic by type only


def test_a_node_is_a_size_already() -> None:
    gm, argument = built(lambda s, t: s + t)
    assert Sizes(gm.graph).argument(argument, None) is argument  # type: ignore[arg-type]


def test_a_size_that_nothing_gives_is_refused() -> None:
    with pytest.raises(NoSuchSize, match="no node gives the size"):
        built(lambda s, t: torch.sym_max(s, t))


def test_an_input_that_is_no_tensor_gives_no_size() -> None:
    """None for an argument that was left out, as in exported programs."""
    gm = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5, 7))
    first = next(iter(gm.graph.nodes))
    size = first.meta["val"].shape[1]
    with gm.graph.inserting_before(first):
        gm.graph.placeholder("absent").meta["val"] = None
    made = []
    Sizes(gm.graph).argument(size, lambda *call: made.append(call))  # type: ignore[arg-type, func-returns-value]
    assert made == [(torch.ops.aten.sym_size.int, (first, 1), size)]
