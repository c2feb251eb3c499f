"""Token views: which dimension of a node means token, head and dim.

A :class:`Frame` is the grid over which a chain is read: one axis per token dimension of the
value, then the head, then the dim. :func:`view_at` says how some node on the way holds the same
``[tokens, heads, dim]`` value, if it does: from the *positions* of the samples, never from sizes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from fusion.graph.elements import (
    Array,
    Index,
    Labels,
    Ref,
    Unreadable,
    along,
    collapse,
    depends,
    equal,
    number,
    same_size,
    sample,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.shapes import pinned
from fusion.match.facts import Size, TokenView


@dataclass(frozen=True, eq=False)
class Frame:
    """Token axes (sizes as in the graph, and as integers), heads and dim of one value."""

    sizes: tuple[Size, ...]
    extents: tuple[int, ...]
    heads: int
    dim: int

    @property
    def rank(self) -> int:
        """Number of grid axes."""
        return len(self.sizes) + 2

    @property
    def head_axis(self) -> int:
        """Grid axis of the head."""
        return len(self.sizes)

    @property
    def dim_axis(self) -> int:
        """Grid axis of the position within the head."""
        return len(self.sizes) + 1

    @property
    def tokens(self) -> Size:
        """Number of tokens, as in the graph."""
        return product(self.sizes)

    def labels(self) -> Labels:
        """Sampled tokens, all heads, all dims."""
        return (*(sample(n) for n in self.extents), np.arange(self.heads), np.arange(self.dim))

    def token_number(self, labels: Labels) -> Array:
        """The flat token number of every sample."""
        flat = zero(self.rank)
        for axis, extent in enumerate(self.extents):
            flat = flat * extent + along(labels[axis], axis, self.rank)
        return flat


def product(sizes: tuple[Size, ...]) -> Size:
    """Product of sizes, 1 for none; symbolic sizes stay symbolic."""
    result: Size = 1
    for size in sizes:
        result = size if isinstance(result, int) and result == 1 else result * size
    return result


def frame_of(view: TokenView) -> tuple[Frame, Ref]:
    """The grid of a token view, and its samples as elements of the view's node.

    Raises :class:`Unreadable` where the view does not describe the node or there is no token.
    """
    shape = shape_of(view.node)
    tokens = view.order[: view.token_dims]
    sizes: list[Size] = [value_of(view.node).shape[d] for d in tokens]
    extents = [shape[d] for d in tokens]
    if view.merged_heads:
        extents[-1] //= view.heads
        sizes[-1] = sizes[-1] // view.heads
    frame = Frame(tuple(sizes), tuple(extents), view.heads, view.dim)
    if math.prod(shape) != math.prod(extents) * view.heads * view.dim:
        raise Unreadable(f"{view.node} is not [tokens, {view.heads}, {view.dim}]", view.node)
    fixed = [value_of(view.node).shape[d] for d in view.order[view.token_dims :]]
    if any(pinned(size) is None for size in (view.heads, view.dim, *fixed)):
        raise Unreadable(f"{view.node} has a symbolic number of heads or dims", view.node)
    labels = frame.labels()
    head = along(labels[-2], frame.head_axis, frame.rank)
    dim = along(labels[-1], frame.dim_axis, frame.rank)
    index: list[Array] = [zero(frame.rank)] * len(shape)
    for axis, d in enumerate(tokens):
        index[d] = along(labels[axis], axis, frame.rank)
    if view.merged_heads:
        index[tokens[-1]] = index[tokens[-1]] * view.heads + head
    rest = view.order[view.token_dims :]
    if len(rest) == 2:
        index[rest[0]], index[rest[1]] = head, dim
    elif len(rest) == 1:
        merged = shape[rest[0]] != view.dim
        index[rest[0]] = head * view.dim + dim if merged else dim
    else:
        raise Unreadable(f"{view.node} has no dim axis", view.node)
    return frame, Ref(view.node, tuple(index), labels)


def view_at(
    frame: Frame, node: Node, index: Index, labels: Labels, *, merged: bool = False
) -> TokenView | None:
    """The token view of ``node`` whose element at ``index`` is the frame's sample, or None.

    None where the node holds other elements as well, or holds them in an order that no
    permutation of its dimensions turns into ``[tokens, heads, dim]``. ``merged`` also allows a
    dimension that merges tokens and heads, or heads and dim.
    """
    shape = shape_of(node)
    if math.prod(shape) != math.prod(frame.extents) * frame.heads * frame.dim:
        return None
    head_axis, dim_axis = frame.head_axis, frame.dim_axis
    groups: dict[str, list[int]] = {"t": [], "th": [], "h": [], "hd": [], "d": []}
    for d, array in enumerate(index):
        axes = depends(array)
        if not axes and shape[d] != 1:
            return None
        kind = "t" if not axes or axes & set(range(head_axis)) else ""
        kind += "h" * (head_axis in axes) + "d" * (dim_axis in axes)
        if kind not in groups:
            return None
        groups[kind].append(d)
    if (groups["th"] or groups["hd"]) and not merged:
        return None
    head = along(labels[head_axis], head_axis, frame.rank)
    dim = along(labels[dim_axis], dim_axis, frame.rank)
    token = frame.token_number(labels)
    lead, middle, last = groups["t"] + groups["th"], groups["h"], groups["hd"] + groups["d"]
    if frame.heads == 1 and not middle and not groups["th"] and len(lead) > len(frame.sizes):
        # One head: a dimension of size 1 that the tokens do not need is the head's.
        spare = [d for d in lead if not depends(index[d]) and shape[d] == 1]
        middle = spare[-1:]
        lead = [d for d in lead if d not in middle]
    if len(groups["th"]) > 1 or (groups["th"] and (middle or groups["hd"])):
        return None
    if len(middle) > 1 or len(last) != 1 or (groups["hd"] and middle):
        return None
    tokens_want = token * frame.heads + head if groups["th"] else token
    last_want = head * frame.dim + dim if groups["hd"] else dim
    if middle and not np.array_equal(index[middle[0]], collapse(head)):
        return None
    if not np.array_equal(index[last[0]], collapse(last_want)):
        return None
    if not middle and not groups["th"] and not groups["hd"] and frame.heads > 1:
        return None
    order = _token_order(lead, shape, index, collapse(tokens_want))
    if order is None:
        return None
    value = value_of(node)
    if any(pinned(value.shape[d]) is None for d in (*middle, *last)):
        return None  # a symbolic number of heads only happens to be this one
    sizes = tuple(value.shape[d] for d in order)
    want = frame.tokens * frame.heads if groups["th"] else frame.tokens
    if not same_size(product(sizes), want):
        return None
    return TokenView(
        node=node,
        order=(*order, *middle, *last),
        token_dims=len(order),
        token_sizes=sizes,
        tokens=frame.tokens,
        heads=frame.heads,
        dim=frame.dim,
        merged_heads=bool(groups["th"]),
    )


def _token_order(
    dims: list[int], shape: tuple[int, ...], index: Index, want: Array
) -> tuple[int, ...] | None:
    """The order of token dimensions whose row-major flattening gives ``want``."""
    moving = [d for d in dims if depends(index[d])]
    still = [d for d in dims if d not in moving]
    for order in itertools.permutations(moving):
        flat = np.zeros_like(want[(slice(0, 1),) * want.ndim])
        for d in order:
            flat = flat * shape[d] + index[d]
        if equal(flat, want):
            # Size-1 dimensions may stand anywhere; keep the node's own order among equals.
            return _merge(order, still)
    return None


def _merge(order: tuple[int, ...], still: list[int]) -> tuple[int, ...]:
    result = list(order)
    for d in still:
        at = next((i for i, other in enumerate(result) if other > d), len(result))
        result.insert(at, d)
    return tuple(result)


def dim_view(node: Node, order: tuple[int, ...], heads: bool = True) -> TokenView:
    """A token view of a node whose dimensions, in ``order``, are tokens..., [head,] dim."""
    shape, value = shape_of(node), value_of(node)
    split = len(order) - (2 if heads else 1)
    sizes = tuple(value.shape[d] for d in order[:split])
    return TokenView(
        node=node,
        order=order,
        token_dims=split,
        token_sizes=sizes,
        tokens=product(sizes),
        heads=number(shape[order[split]]) if heads else 1,
        dim=shape[order[-1]],
    )
