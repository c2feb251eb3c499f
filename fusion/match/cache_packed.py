"""K and V written by one row write: ``cache[slots] = cat((k, v), -1)`` or ``stack((k, v))``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from fusion.graph.shapes import pinned
from fusion.match import cache_view as cv
from fusion.match.cache_rows import Rows, paged, product
from fusion.match.cache_trace import Trace
from fusion.match.cache_view import Region
from fusion.match.facts import Rope, TokenView
from fusion.match.rotation import read_rope


def split_packed(trace: Trace, rows: Rows) -> tuple[Rows, Rows] | None:
    """The K and the V half of one write, if its rows are put together from two.

    Tried only on a write that found no partner. A rotated key is a ``cat`` of two halves too:
    where V is not written beside it, it is a key without a partner and no packed row.
    """
    if rows.scale is not None or rows.nodes:
        return None
    node = rows.view.node
    found = _put_together(node)
    if found is None:
        return None
    if isinstance(read_rope(rows.view), Rope):
        return None
    parts, axis, stacked = found
    if axis == rows.view.order[-1] and not stacked:
        return _halves(rows, parts, node)
    if rows.slots.batch is not None and cv.equal(rows.slots.batch, 2):
        return _planes(trace, rows, parts, node, axis, stacked)
    return None


def _put_together(node: Node) -> tuple[list[Node], int, bool] | None:
    """Two parts, the dimension they follow each other in, and whether it is a new one."""
    shape = tuple(node.meta["val"].shape)
    stacked = cv.op_name(node) == "aten::stack"
    if cv.op_name(node) in ("aten::view", "aten::reshape") and node.args:
        # A stack along the first dimension is decomposed to a cat and a view.
        source = node.args[0]
        if not (isinstance(source, Node) and cv.op_name(source) == "aten::cat"):
            return None
        node, stacked = source, True
    elif cv.op_name(node) not in ("aten::cat", "aten::stack"):
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or not all(isinstance(p, Node) for p in parts):
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    axis = dim % (node.meta["val"].dim() + (cv.op_name(node) == "aten::stack"))
    if stacked and cv.op_name(node) == "aten::cat":
        whole = all(cv.all_equal(shape, (2, *p.meta["val"].shape)) for p in parts)
        if axis != 0 or not whole:
            return None
    return list(parts), axis, stacked


def _halves(rows: Rows, parts: list[Node], node: Node) -> tuple[Rows, Rows] | None:
    """Side by side in each row: the planes share strides, V starts behind K."""
    out: list[Rows] = []
    start: Any = 0
    for part in parts:
        width = pinned(part.meta["val"].shape[rows.view.order[-1]])
        if width is None:
            return None
        view = replace(rows.view, node=part, dim=width)
        size = (*rows.plane.size[:3], width)
        plane = Region(size, rows.plane.stride, rows.plane.offset + start)
        out.append(replace(rows, view=view, plane=plane, nodes=(node,)))
        start += width
    return out[0], out[1]


def _planes(
    trace: Trace, rows: Rows, parts: list[Node], node: Node, axis: int, stacked: bool
) -> tuple[Rows, Rows] | None:
    """One above the other: what looked like two sequences are K and V."""
    if rows.view.order[0] != axis or rows.view.token_dims < 2:
        return None
    out: list[Rows] = []
    blocks, pages, *rest = zip(rows.plane.size, rows.plane.stride, strict=True)
    for index, part in enumerate(parts):
        shape = part.meta["val"].shape
        if not stacked and not cv.equal(shape[axis], 1):
            return None
        order = rows.view.order
        token_dims, sizes = rows.view.token_dims, rows.view.token_sizes
        if stacked:
            order = tuple(d - (d > axis) for d in order if d != axis)
            token_dims, sizes = token_dims - 1, sizes[1:]
        else:
            sizes = (1, *sizes[1:])
        view = TokenView(
            part, order, token_dims, sizes, product(sizes), rows.view.heads, rows.view.dim
        )
        dims = [*paged(trace, rows.write, *pages), *rest]
        plane = Region(
            tuple(n for n, _ in dims),
            tuple(s for _, s in dims),
            rows.plane.offset + index * blocks[1],
        )
        slots = replace(rows.slots, batch=None)
        out.append(replace(rows, view=view, plane=plane, slots=slots, nodes=(node,)))
    return out[0], out[1]
