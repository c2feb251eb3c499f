"""Operators of other libraries, read through a registered decomposition.

``register_op(op, decomposition)`` says what a custom operator computes, in plain torch. Readers
then look inside its calls as if the plain form stood there; the graph itself is not changed.
Calls of operators that nobody registered are opaque, and readers refuse them by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion.graph.shapes import hint

_REGISTRY: dict[Any, Callable[..., Any]] = {}
_EXPANDED: weakref.WeakKeyDictionary[Node, tuple[Any, GraphModule | None]] = (
    weakref.WeakKeyDictionary()
)


def register_op(op: Any, decomposition: Callable[..., Any]) -> None:
    """Let readers look through calls of ``op``.

    ``op`` is an ``OpOverload`` (``torch.ops.ns.name.default``) or an ``OpOverloadPacket``.
    ``decomposition`` takes the op's arguments and returns what the op returns, computed with
    plain torch operations that mutate nothing. Registering again replaces the decomposition.
    """
    overloads = (
        [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
        if isinstance(op, torch._ops.OpOverloadPacket)
        else [op]
    )
    for overload in overloads:
        _REGISTRY[overload] = decomposition
    _EXPANDED.clear()


def is_registered(op: Any) -> bool:
    """Whether somebody said what ``op`` computes."""
    return op in _REGISTRY


def owner(node: Node) -> Node:
    """The node of the compiled graph that a node stands in (itself, unless inside a call)."""
    outer = node.meta.get("fusion_owner")
    return node if outer is None else owner(outer)


def is_inner(node: Node) -> bool:
    """Whether a node exists only inside a decomposition."""
    return "fusion_owner" in node.meta


def expansion(node: Node) -> list[Node] | None:
    """The inner nodes that compute a registered call's results, or None.

    Inner placeholders carry ``meta['fusion_outer']``, the argument's node outside.
    """
    if node.op != "call_function" or node.target not in _REGISTRY:
        return None
    known = _EXPANDED.get(node)
    signature = (node.args, tuple(sorted(node.kwargs.items(), key=lambda kv: kv[0])))
    if known is None or known[0] != signature:
        known = (signature, _trace(node, _REGISTRY[node.target]))
        _EXPANDED[node] = known
    if known[1] is None:
        return None
    (results,) = next(n for n in known[1].graph.nodes if n.op == "output").args
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _trace(node: Node, decomposition: Callable[..., Any]) -> GraphModule | None:
    """The decomposition's graph on fake tensors of the hinted sizes; None where it fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors: list[Node] = []

    def visit(argument: Node) -> Any:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            tensors.append(argument)
            return _Slot(len(tensors) - 1)
        return hint(value)

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), visit)

    def call(*values: torch.Tensor) -> Any:
        from torch.utils._pytree import tree_map

        def fill(a: Any) -> Any:
            return values[a.position] if isinstance(a, _Slot) else a

        return decomposition(*tree_map(fill, args), **tree_map(fill, kwargs))

    try:
        with FakeTensorMode():
            fakes = [
                torch.empty_strided(
                    [hint(s) for s in n.meta["val"].shape],
                    [hint(s) for s in n.meta["val"].stride()],
                    dtype=n.meta["val"].dtype,
                    device=n.meta["val"].device,
                )
                for n in tensors
            ]
        with torch.no_grad():
            traced = make_fx(torch.func.functionalize(call))(*fakes)
    except Exception:  # a decomposition is foreign code: whatever it raises, the op stays opaque
        return None
    placeholders = iter(tensors)
    for inner in traced.graph.nodes:
        inner.meta["fusion_owner"] = node
        if inner.op == "placeholder":
            inner.meta["fusion_outer"] = next(placeholders)
    return traced


class _Slot:
    """The position of a tensor argument among the traced inputs."""

    def __init__(self, position: int) -> None:
        self.position = position
