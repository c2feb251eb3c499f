"""Own and partner terms of a rope's elements, and the tables that they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fusion.graph.elements import Array, Labels, same_size
from fusion.graph.foreign import is_inner
from fusion.match.facts import RopeTable, TokenView
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.signs import Factor, Pair, Side, sides, wrong_sign
from fusion.match.table import gathered, halved, read_table
from fusion.match.trail import assemble, common
from fusion.match.views import Frame


def along_dim(values: Array, frame: Frame) -> Array:
    """One value for each dim, laid along the grid's dim axis."""
    return values.reshape((1,) * frame.dim_axis + (-1,))


def find_tables(
    frame: Frame, labels: Labels, pairs: list[Pair], style: str, rotary: int
) -> tuple[RopeTable, RopeTable]:
    """cos (from the own terms) and sin (from the partners'). Raises :class:`No`.

    Both are given per token, or both as a table with the same positions.
    """
    rotated = (*labels[:-1], np.arange(rotary))
    found = [
        list(_candidates(frame, rotated, pairs, style, partner=partner))
        for partner in (False, True)
    ]
    by_position = [[t for t in tables if t.positions is not None] for tables in found]
    for cos in by_position[0]:
        for sin in by_position[1]:
            if cos.positions is sin.positions:
                return cos, sin
    per_token = [
        [t for t in tables if not is_inner(t.node) and t.positions is None] for tables in found
    ]
    for tables, partner in zip(per_token, (False, True), strict=True):
        if not tables:
            factors = [p.partner if partner else p.own for p in pairs]
            raise _no_table("sin" if partner else "cos", factors)
    return per_token[0][0], per_token[1][0]


def _candidates(
    frame: Frame, labels: Labels, pairs: list[Pair], style: str, *, partner: bool
) -> Iterator[RopeTable]:
    """Nodes that are the table, from the farthest to the first that the graph holds itself.

    A gather's result follows its table.
    """
    factors = [p.partner if partner else p.own for p in pairs]
    wrong: list[Side] = []  # as seen from the nearest table
    found = False
    for node in reversed(common([f.table for f in factors], inner=True)):
        hops = [h for f in factors if (h := f.table.at(node)) is not None]
        parts = {h.ref.part for h in hops}
        boxes = [(p.labels, h.ref.index) for p, h in zip(pairs, hops, strict=True)]
        index = assemble(boxes, labels)
        if index is None or len(parts) != 1:
            continue
        table = read_table(frame, node, index, labels, style, parts.pop())
        if table is None:
            continue
        signed = sides(frame, pairs, hops, style, len(labels[-1]), partner)
        if any(s.wrong for s in signed):
            wrong = signed
            continue
        found = True
        table = halved(table, frame, style)
        by_position = gathered(table, frame)
        if by_position.positions is not None:
            yield by_position
        yield table
        if not is_inner(node):
            return
    if wrong and not found:
        raise wrong_sign(wrong, style, partner=partner, depth=6)


def _no_table(name: str, factors: list[Factor]) -> No:
    ends = [f.table.end.ref.node for f in factors]
    op = next((o for n in ends if (o := opaque_node(n))), None)
    if op is not None and len(set(ends)) > 1:
        return opaque(op, 5)
    node = factors[0].table.hops[0].ref.node
    return No("match.rope-table", f"{name} does not follow one token and one dim each", node, 5)


def by_tokens_of(x: TokenView, out: TokenView, table: RopeTable) -> RopeTable:
    """A table whose roles index the token dimensions of ``out``, for those of ``x``.

    The two may differ in dimensions of size 1. Raises :class:`No` where they split the tokens
    differently.
    """
    have, want = ([*view.token_sizes] for view in (out, x))
    same = len(have) == len(want) and all(map(same_size, have, want))
    if table.positions is not None or same:
        return table
    big = [
        [i for i, n in enumerate(s) if not (isinstance(n, int) and n == 1)] for s in (have, want)
    ]
    pairs = list(zip(*big, strict=False))
    if len(big[0]) != len(big[1]) or not all(same_size(have[i], want[j]) for i, j in pairs):
        raise No(
            "match.token-order",
            "the rope's input and result split their tokens differently",
            x.node,
            5,
            have=str(want),
            need=str(have),
        )
    to = dict(pairs)
    roles = tuple(to[r] if isinstance(r, int) else r for r in table.roles)
    return replace(table, roles=roles)
