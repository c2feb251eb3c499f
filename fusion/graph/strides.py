"""Give a new value the strides of the value that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion.graph.shapes import example, pinned
from fusion.graph.values import is_view, known

__all__ = ["reaches_output", "restride"]

aten = torch.ops.aten
Call = Callable[..., Node]


def reaches_output(node: Node) -> bool:
    """Whether the graph returns the value, or a view of it: its strides are seen from outside."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and is_view(user):
                seen.add(user)
                stack.append(user)
    return False


def restride(node: Node, old: torch.Tensor, call: Call, *, gaps: bool) -> Node:
    """A copy of ``node`` with the order of strides of ``old`` (same shape), as a graph's nodes.

    ``call(target, args, kwargs)`` makes a node. With ``gaps`` the copy also has the room between
    rows that ``old`` has (a part of a larger tensor), where that can be had: the innermost
    stride is one, and each stride a multiple of the next. The caller compares the strides.
    """
    rank = old.dim()
    steps = [example(s) for s in old.stride()]
    order = list(range(rank))
    if all(s is not None for s in steps):
        # A dimension of one element has no stride to speak of: it goes to the front.
        order.sort(key=lambda d: (not known(old.shape[d] == 1), -(steps[d] or 0), d))
    moved = order != list(range(rank))
    if moved:
        node = call(aten.permute.default, (node, order))
    node = call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    if gaps:
        node = _spread(node, [old.stride()[d] for d in order], call)
    if moved:
        node = call(aten.permute.default, (node, [order.index(d) for d in range(rank)]))
    return node


def _spread(node: Node, strides: Sequence[Any], call: Call) -> Node:
    """Cut the dense value out of a larger dense one that has ``strides``, or return it as it is."""
    sizes = node.meta["val"].shape
    padded: dict[int, int] = {}
    for dim in range(len(sizes) - 1, 0, -1):
        outer, inner, size = strides[dim - 1], strides[dim], sizes[dim]
        if known(sizes[dim - 1] == 1) or known(outer == inner * size):
            continue
        numbers = pinned(outer), pinned(inner), pinned(size)
        if any(n is None for n in numbers):
            return node
        room, step, count = (int(n or 0) for n in numbers)
        if step == 0 or room % step or room // step < count:
            return node
        padded[dim] = room // step - count
    if not padded:
        return node
    ends = [n for dim in range(len(sizes) - 1, 0, -1) for n in (0, padded.get(dim, 0))]
    node = call(aten.constant_pad_nd.default, (node, ends))
    for dim in sorted(padded):
        node = call(aten.slice.Tensor, (node, dim, 0, sizes[dim]))
    return node
