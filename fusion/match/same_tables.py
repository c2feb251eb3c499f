"""Whether two ropes turn every token by the same entries of the same tables."""

from __future__ import annotations

import numpy as np
from torch.fx import Node

from fusion.graph.elements import Array, Labels, Ref, along, same_size, sample, shape_of, zero
from fusion.graph.shapes import hint
from fusion.match.facts import Rope, RopeTable
from fusion.match.table import entries, same_elements


def same_tables(a: Rope, b: Rope) -> bool:
    """Whether two ropes rotate every token by the same entries of the same cos and sin."""
    if (a.style, a.rotary_dim) != (b.style, b.rotary_dim):
        return False
    if not same_size(a.out.tokens, b.out.tokens):
        return False
    return all(_same_table(a, x, b, y) for x, y in ((a.cos, b.cos), (a.sin, b.sin)))


def _same_table(a: Rope, x: RopeTable, b: Rope, y: RopeTable) -> bool:
    if (x.positions is None) != (y.positions is None) or x.part != y.part:
        return False
    count = 1
    for size in a.out.token_sizes:
        count *= hint(size)
    tokens = sample(count)
    if x.positions is not None and y.positions is not None:
        if x.node is not y.node or (x.columns, x.full) != (y.columns, y.full):
            return False
        rows = [_flat(p, tokens) for p in (x.positions, y.positions)]
        return same_elements(rows[0], rows[1])
    labels = (tokens, np.arange(a.rotary_dim))
    return same_elements(_entries(a, x, labels), _entries(b, y, labels))


def _flat(node: Node, tokens: Array) -> Ref:
    """Elements of a node in row-major order."""
    index: list[Array] = []
    left = along(tokens, 0, 1)
    for size in reversed(shape_of(node)):
        index.append(left % size)
        left = left // size
    return Ref(node, tuple(reversed(index)), (tokens,))


def _entries(rope: Rope, table: RopeTable, labels: Labels) -> Ref:
    """The entry of a per-token table for (flat token, rotated element)."""
    left = along(labels[0], 0, 2)
    positions: list[Array] = []
    for size in reversed(rope.x.token_sizes):
        positions.append(left % hint(size))
        left = left // hint(size)
    positions.reverse()
    column = table.columns[0] + entries(rope.style, rope.rotary_dim, table.full)
    index = tuple(
        positions[role]
        if isinstance(role, int)
        else along(column, 1, 2)
        if role == "dim"
        else zero(2)
        for role in table.roles
    )
    return Ref(table.node, index, labels, table.part)
