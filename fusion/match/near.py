"""Why a value is not a rope: what stands in its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from fusion.graph.elements import Ref, Unreadable, op_name, operand, shape_of, value_of
from fusion.graph.foreign import is_inner
from fusion.match.facts import Rope, TokenView
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.norm import read_norm_or_raise
from fusion.match.trail import Trail, trails
from fusion.match.views import Frame, frame_of, view_at

_FAR = 24
"""How many values behind the operators after a rope are looked at to find it."""
_NORM_LIKE = 3
"""Depth from which a norm's refusal says that an inverse root mean square was there."""


def not_a_rope(out: TokenView, heads: Sequence[Trail], read: Callable[[TokenView], Rope]) -> No:
    """The reason for a value without any rotated element.

    ``read`` reads a rope further back and raises where there is none, without asking this function
    why: it makes the difference between "something stands after the rope" and "there is no rope".
    """
    node = heads[0].end.ref.node
    for trail in heads:
        op = opaque_node(trail.end.ref.node)
        if op is not None:
            return opaque(op, 1)
    is_norm = False
    try:
        norm = read_norm_or_raise(out)
    except No as no:  # a norm whose operand is put together from parts, as ropes are
        is_norm = no.miss.depth >= _NORM_LIKE
    except Unreadable:
        pass
    else:
        if _reads(norm.x, read) or _rotated(norm.x, read) is not None:
            return No("match.norm-order", "the norm runs after the rope", out.node, 4)
        return No("match.no-rope", "the value is a norm without a rope", out.node, 1)
    found = _rotated(out, read)
    if found is not None and is_norm:
        return No("match.norm-order", "the norm runs after the rope", out.node, 4)
    if found is not None:
        return No("match.rope-form", f"{found.name} stands after the rope", found, 4)
    return No("match.no-rope", f"{node.name} is not a rotation", node, 0)


def _rotated(view: TokenView, read: Callable[[TokenView], Rope]) -> Node | None:
    """The pointwise node nearest to the value, if a rope is found behind it through such nodes.

    A node that is used more than once is looked at once: a chain costs as much as it is long.
    """
    first: Node | None = None
    todo, seen = deque([view]), {view.node}
    while todo:
        frame, ref = frame_of(todo.popleft())
        found = trails(ref, set(), lossy=True)
        if len(found) != 1:
            continue
        end = found[0].end.ref
        first = first or end.node
        for before in _operand_views(frame, end):
            if before.node in seen or len(seen) > _FAR:
                continue
            seen.add(before.node)
            if _reads(before, read):
                return first
            todo.append(before)
    return None


def _reads(view: TokenView, read: Callable[[TokenView], Rope]) -> bool:
    """Whether the value is a rope, or nearly one."""
    try:
        read(view)
    except No as no:
        return no.miss.depth >= 4 and no.miss.reason.code.startswith("match.rope")
    except Unreadable:
        return False
    return True


def _operand_views(frame: Frame, ref: Ref) -> list[TokenView]:
    """The operands of a pointwise node that are themselves ``[tokens, heads, dim]`` values."""
    node = ref.node
    tags = getattr(node.target, "tags", ())
    if not op_name(node) or torch.Tag.pointwise not in tags or is_inner(node):
        return []
    views = []
    for argument in node.all_input_nodes:
        if not isinstance(value_of(argument), torch.Tensor):
            continue
        if shape_of(argument) != shape_of(node):
            continue
        there = operand(ref, argument)
        view = view_at(frame, argument, there.index, there.labels)
        if view is not None:
            views.append(view)
    return views
