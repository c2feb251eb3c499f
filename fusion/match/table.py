"""The cos or sin operand of a rope: a node whose dimensions follow tokens and the rotated dim."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.fx import Node

from fusion.graph.elements import (
    Array,
    Index,
    Labels,
    Ref,
    along,
    arguments,
    collapse,
    depends,
    dtype_of,
    equal,
    op_name,
    operand,
    same_size,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.foreign import is_inner, outer
from fusion.graph.reshaping import axis_of
from fusion.graph.shapes import pinned
from fusion.match.facts import RopeTable, Size
from fusion.match.trail import Trail, common, meet, same_index, trails
from fusion.match.views import Frame

_POINTWISE = (
    *("cos", "sin", "mul", "add", "sub", "div", "neg", "exp", "pow", "reciprocal", "sqrt"),
    *("rsqrt", "where", "abs", "_to_copy", "convert_element_type"),
)
_MAX_DEPTH = 16


def entries(style: str, rotary: int, full: bool) -> Array:
    """The table column that element ``d`` of the rotated part reads."""
    d = np.arange(rotary)
    if full:
        return d
    return d % (rotary // 2) if style == "half" else d // 2


def read_table(
    frame: Frame, node: Node, index: Index, labels: Labels, style: str, part: str | None
) -> RopeTable | None:
    """The table that ``node`` is, where its element at ``index`` is the entry of each sample.

    ``labels`` hold the rotated dims only. None where the node's dimensions do not each follow
    one token dimension, the rotated dim or nothing.
    """
    shape, value = shape_of(node), value_of(node)
    rotary = len(labels[-1])
    roles: list[int | str | None] = []
    columns: tuple[int, int] | None = None
    full = True
    for d, array in enumerate(index):
        axes = depends(array)
        if not axes:
            if shape[d] != 1 or pinned(value.shape[d]) is None:
                return None
            roles.append(None)
        elif axes == {frame.dim_axis} and columns is None:
            flat = array.reshape(-1)
            fits = [
                wide
                for wide in (False, True)
                if np.array_equal(flat - flat[0], entries(style, rotary, wide))
            ]
            if not fits:
                return None
            full = fits[0]
            start = int(flat[0])
            columns = (start, start + (rotary if full else rotary // 2))
            if not _can_cut(value.shape[d], columns):
                return None
            roles.append("dim")
        elif len(axes) == 1 and (axis := next(iter(axes))) < frame.head_axis:
            whole = np.array_equal(array.reshape(-1), labels[axis]) and axis not in roles
            if not whole or not same_size(value.shape[d], frame.sizes[axis]):
                return None
            roles.append(axis)
        else:
            return None
    if columns is None:
        if rotary != 2 or not roles or shape[-1] != 1 or roles[-1] is not None:
            return None
        # One entry per head pair: the dim axis has size 1.
        columns, full, roles[-1] = (0, 1), False, "dim"
    return RopeTable(node, tuple(roles), columns, full, part=part)


def _can_cut(size: Size, columns: tuple[int, int]) -> bool:
    """Whether columns of a dimension of this size can be cut out without a new guard."""
    return isinstance(size, int) or (columns[0] == 0 and pinned(size) == columns[1])


def halved(table: RopeTable, frame: Frame, style: str) -> RopeTable:
    """A full-width half-split table as its first half, where both halves are proved equal."""
    width = table.columns[1] - table.columns[0]
    if not table.full or style != "half" or width % 2:
        return table
    labels = (*frame.labels()[:-1], np.arange(width // 2))
    first = table_ref(table, frame, labels, table.columns[0] + np.arange(width // 2))
    second = table_ref(table, frame, labels, table.columns[0] + width // 2 + np.arange(width // 2))
    if not same_elements(first, second):
        return table
    columns = (table.columns[0], table.columns[0] + width // 2)
    if not _can_cut(value_of(table.node).shape[table.roles.index("dim")], columns):
        return table
    return RopeTable(table.node, table.roles, columns, False, table.positions, table.part)


def table_ref(table: RopeTable, frame: Frame, labels: Labels, columns: Array) -> Ref:
    """Samples of a per-token table: ``columns[i]`` for the i-th dim label."""
    index: list[Array] = []
    for role in table.roles:
        if role == "dim":
            index.append(along(columns, frame.dim_axis, frame.rank))
        elif isinstance(role, int):
            index.append(along(labels[role], role, frame.rank))
        else:
            index.append(zero(frame.rank))
    return Ref(table.node, tuple(index), labels, table.part)


def gathered(table: RopeTable, frame: Frame) -> RopeTable:
    """``table[positions]`` instead of its result, where a per-token table is a clean gather."""
    width = table.columns[1] - table.columns[0]
    labels = (*frame.labels()[:-1], np.arange(width))
    columns = table.columns[0] + np.arange(width)
    found = trails(table_ref(table, frame, labels, columns), set(), negate=False, exact=False)
    if len(found) != 1 or table.part is not None:
        return table
    parts = gather_parts(found[0].end.ref)
    if parts is None:
        return table
    source, row, column = parts
    flat = collapse(column).reshape(-1)
    if depends(collapse(column)) - {frame.dim_axis} or not np.array_equal(
        flat, flat[0] + np.arange(width)
    ):
        return table
    positions = _positions(row, frame)
    source = outer(source)
    if positions is None or is_inner(source):
        return table
    start = int(flat[0])
    if not _can_cut(value_of(source).shape[1], (start, start + width)):
        return table
    return RopeTable(source, (None, "dim"), (start, start + width), table.full, positions)


def gather_parts(ref: Ref) -> tuple[Node, Ref, Array] | None:
    """``(table, elements of the positions, column)`` of a row gather from a 2-D table."""
    node, name = ref.node, op_name(ref.node)
    a = arguments(node)
    if name == "aten.embedding.default":
        source, rows, lead = a["weight"], a["indices"], len(shape_of(a["indices"]))
        return source, ref.at(rows, ref.index[:lead]), ref.index[lead]
    if name == "aten.index_select.default" and axis_of(a["dim"], 2) == 0:
        if len(shape_of(a["self"])) != 2:
            return None
        return a["self"], ref.at(a["index"], ref.index[:1]), ref.index[1]
    if name == "aten.index.Tensor" and len(shape_of(a["self"])) == 2:
        indices = [i for i in a["indices"] if i is not None]
        if len(indices) != 1 or a["indices"][0] is None or dtype_of(indices[0]) == torch.bool:
            return None
        lead = len(shape_of(indices[0]))
        return a["self"], ref.at(indices[0], ref.index[:lead]), ref.index[lead]
    if name == "aten.gather.default" and axis_of(a["dim"], len(ref.index)) == 0:
        if len(shape_of(a["self"])) != 2:
            return None
        rows = ref.at(a["index"], ref.index)
        return a["self"], rows, ref.index[1]
    return None


def _positions(row: Ref, frame: Frame) -> Node | None:
    """The farthest node that holds one position per token, in the tokens' order."""
    want = collapse(frame.token_number(row.labels))
    best: Node | None = None
    found = trails(row, set(), negate=False, exact=False)
    if len(found) != 1:
        return None
    for hop in found[0].hops:
        if is_inner(hop.ref.node):
            continue
        shape, value = shape_of(hop.ref.node), value_of(hop.ref.node)
        flat = zero(frame.rank)
        for size, array in zip(shape, hop.ref.index, strict=True):
            flat = flat * size + array
        count = 1
        for size in value.shape:
            count = count * size
        if not same_size(count, frame.tokens):
            continue
        if equal(flat, want):
            best = hop.ref.node
    return best


def same_elements(a: Ref, b: Ref, depth: int = 0) -> bool:
    """Whether two references hold equal values at every sample, for any content of the inputs.

    Looks through data movement and through pointwise operators that are the same on both sides.
    """
    if a.node is b.node and same_index(a.index, b.index) and a.part == b.part:
        return True
    if depth > _MAX_DEPTH:
        return False
    for x, y in meet(
        trails(a, set(), negate=False, exact=False), trails(b, set(), negate=False, exact=False)
    ):
        if not _same_trail(x, y, depth):
            return False
    return True


def _same_trail(x: Trail, y: Trail, depth: int) -> bool:
    for node in common([x, y]):
        left, right = x.at(node), y.at(node)
        if left is None or right is None or left.ref.part != right.ref.part:
            continue
        if same_index(left.ref.index, right.ref.index):
            return True
    a, b = x.end.ref, y.end.ref
    if op_name(a.node) != op_name(b.node) or not op_name(a.node):
        return False
    if dtype_of(a.node) != dtype_of(b.node):
        return False
    one, two = gather_parts(a), gather_parts(b)
    if one is not None and two is not None:
        (table, rows, column), (other, others, second) = one, two
        columns = equal(column, second)
        return table is other and columns and same_elements(rows, others, depth + 1)
    if op_name(a.node).split(".")[1] not in _POINTWISE:
        return False
    return all(
        same_elements(p, q, depth + 1) if isinstance(p, Ref) and isinstance(q, Ref) else p == q
        for p, q in zip(_operands(a), _operands(b), strict=True)
    )


def _operands(ref: Ref) -> Iterator[object]:
    for argument in arguments(ref.node).values():
        tensor = isinstance(argument, Node) and isinstance(value_of(argument), torch.Tensor)
        yield operand(ref, argument) if tensor else argument
