"""Rotary embedding, read from the elements of its result.

Every rotated element must be a sum of exactly two signed products ``x[t,h,d'] * table[t,e]``.
The term with ``d' = d`` gives cos, the other one sin and the partner of ``d``; the partners of
all elements decide between half-split and interleaved, the signs decide the direction, and
elements without arithmetic are the tail that a partial rope leaves alone. Nothing depends on how
the graph spells it: rotate_half, chunks, strided slices, stacks, complex products.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch.fx import Node

from fusion.graph.elements import (
    Index,
    Labels,
    Ref,
    Unreadable,
    collapse,
    depends,
    dtype_of,
    equal,
    exact_cast,
    op_name,
    shape_of,
)
from fusion.graph.foreign import is_inner, owner
from fusion.match.cuts import moved_or_cut
from fusion.match.facts import Miss, Rope, TokenView
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.near import not_a_rope
from fusion.match.pairs import along_dim, by_tokens_of, find_tables
from fusion.match.products import REAL, Piece, Term, pieces_of
from fusion.match.signs import Factor, Pair
from fusion.match.trail import Trail, assemble, between, common, holders, trails
from fusion.match.views import Frame, frame_of, view_at
from fusion.reason import Reason

_ROPE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Split: TypeAlias = tuple[Trail, Trail]
"""A product's factors told apart: x, then the table."""


def read_rope(view: TokenView, *, complex_tables: bool = False) -> Rope | Miss:
    """The rope whose result is ``view`` (through any views that only move it), or a Miss.

    ``Rope.out`` is the node nearest to the arithmetic that still holds exactly the value in its
    final dtype, so its token dimensions are those of the computation; integer ``roles`` of the
    tables index them. What stands before the rope is :func:`fusion.match.norm.read_norm`'s job.

    ``complex_tables`` also accepts cos and sin that exist only as the parts of one complex node
    (``RopeTable.part``); without it they are refused, because no fused operation takes them.
    """
    try:
        rope = read_rope_or_raise(view)
        for table in (rope.cos, rope.sin):
            if table.part is not None and not complex_tables:
                message = f"cos and sin exist only as the parts of the complex {table.node.name}"
                raise No("match.rope-table", message, table.node, 6, have=f"{table.part} part")
        return rope
    except No as no:
        return no.miss
    except Unreadable as error:
        node = owner(error.node or view.node)
        return Miss(Reason("match.rope-form", str(error), node=node.name), node, 0)


def read_rope_or_raise(view: TokenView, *, explain: bool = True) -> Rope:
    """:func:`read_rope`, raising :class:`No` or :class:`Unreadable` instead of a Miss.

    Where nothing is rotated, ``explain`` looks for a rope further back.
    """
    seen: set[Node] = set()
    out = settle(view, seen)
    frame, ref = frame_of(out)
    pieces = pieces_of(ref, seen)
    if not any(p.is_rotated for p in pieces):
        if not explain:
            raise No("match.no-rope", "nothing is rotated", out.node, 0)
        further_back = partial(read_rope_or_raise, explain=False)
        raise not_a_rope(out, [p.head for p in pieces], further_back)
    return _Reading(frame, ref.labels, pieces).rope(out, seen)


def settle(view: TokenView, seen: set[Node]) -> TokenView:
    """The farthest node that holds exactly the viewed value in its final dtype."""
    frame, ref = frame_of(view)
    found = trails(ref, seen, negate=False, exact=False)
    best = view
    for node in common(found):
        parts = [(t.labels, hop.ref.index) for t in found if (hop := t.at(node)) is not None]
        index = assemble(parts, ref.labels)
        candidate = None if index is None else view_at(frame, node, index, ref.labels)
        if candidate is not None and dtype_of(node) == dtype_of(view.node):
            best = candidate
    return best


class _Reading:
    """One rope's pieces, on their way to a fact."""

    def __init__(self, frame: Frame, labels: Labels, pieces: list[Piece]) -> None:
        self.frame, self.labels, self.pieces = frame, labels, pieces
        self.rotated = [p for p in pieces if p.is_rotated]
        self.rest = [p for p in pieces if not p.is_rotated]

    def rope(self, out: TokenView, seen: set[Node]) -> Rope:
        """The fact. Raises :class:`No` with the reason of the attempt that got farthest."""
        failure: No | None = None
        for told in self._told_apart():
            sources = common([x for pair in told for x, _ in pair] + [p.head for p in self.rest])
            for merged in (False, True):
                for x_node in sources:
                    try:
                        return self._with(out, told, x_node, seen, merged)
                    except No as no:
                        if failure is None or no.miss.depth > failure.miss.depth:
                            failure = no
        raise failure or self._no_source()

    def _no_source(self) -> No:
        """Why the rotated elements have no common source."""
        ends = [f.end.ref.node for p in self.rotated for t in p.terms for f in t.factors]
        ends += [p.head.end.ref.node for p in self.rest]
        for node in ends:
            op = opaque_node(node)
            if op is not None:
                return opaque(op, 2)
        if self.rest:
            node = self.rest[0].head.end.ref.node
            return No(
                "match.rope-form",
                f"some elements come from {node.name}, not from the rope",
                node,
                2,
            )
        node = self.rotated[0].terms[0].node
        return No("match.rope-form", "the rotated elements have no common source", node, 2)

    def _complex(self) -> bool:
        return any(dtype_of(t.node).is_complex for p in self.rotated for t in p.terms)

    # --- which factor is x ----------------------------------------------------------------------

    def _told_apart(self) -> list[list[tuple[_Split, _Split]]]:
        """For each piece, (x, table) of its two terms. The table never varies with the head."""
        axis = self.frame.head_axis
        if all(len(p.labels[axis]) > 1 for p in self.rotated):
            return [[(self._by_head(p.terms[0]), self._by_head(p.terms[1])) for p in self.rotated]]
        # One head (or one at a time): nothing varies with it. x is a source of every term.
        options: list[tuple[tuple[int, int], int, list[tuple[_Split, _Split]]]] = []
        for first in self.rotated[0].terms[0].factors:
            for node in first.nodes():
                pairs = [[self._by_node(t, node) for t in p.terms] for p in self.rotated]
                chosen = [(a, b) for a, b in pairs if a is not None and b is not None]
                if len(chosen) == len(pairs):
                    options.append((_tableness(chosen[0][0][0]), len(options), chosen))
                    break
        return [chosen for _, _, chosen in sorted(options, key=lambda o: o[:2])]

    def _by_head(self, term: Term) -> _Split:
        axis = self.frame.head_axis
        a, b = term.factors
        # A table may be expanded over the heads on its way; x never is.
        varies = [all(_varies(hop.ref.only(f.labels), axis) for hop in f.hops) for f in (a, b)]
        if varies == [True, False]:
            return a, b
        if varies == [False, True]:
            return b, a
        message = "cos and sin differ from head to head"
        if not any(varies):
            message = "neither factor of the product differs from head to head"
        raise No("match.rope-table", message, term.node, 2)

    @staticmethod
    def _by_node(term: Term, node: Node) -> _Split | None:
        a, b = term.factors
        if a.at(node) is not None:
            return a, b
        return (b, a) if b.at(node) is not None else None

    # --- with x chosen --------------------------------------------------------------------------

    def _with(
        self,
        out: TokenView,
        told: list[tuple[_Split, _Split]],
        x_node: Node,
        seen: set[Node],
        merged: bool,
    ) -> Rope:
        pairs = [self._pair(p, s, x_node) for p, s in zip(self.rotated, told, strict=True)]
        parts = [(p.labels, p.own.x.ref.index) for p in pairs]
        for piece in self.rest:
            hop = piece.head.at(x_node)
            assert hop is not None  # x_node is common to all trails
            parts.append((piece.labels, hop.ref.index))
        index = assemble(parts, self.labels)
        x = index and view_at(self.frame, x_node, index, self.labels, merged=merged)
        if not x:
            moved = moved_or_cut(self.frame, self.labels, [p.head for p in self.pieces])
            if moved is not None:
                raise moved
            raise No(
                "match.rope-form",
                f"the rotated value is not [tokens, {self.frame.heads}, {self.frame.dim}] "
                f"of {x_node.name}",
                x_node,
                3,
            )
        style, rotary = self._style(pairs, x)
        x = _slide(x, told[0][0][0], self.frame)
        rope_dtype = self._dtypes(out, x, told)
        cos, sin = find_tables(self.frame, self.labels, pairs, style, rotary)
        cos, sin = (by_tokens_of(x, out, table) for table in (cos, sin))
        boundary = [x.node]
        for table in (cos, sin):
            boundary += [table.node] if table.positions is None else [table.node, table.positions]
        return Rope(
            x=x,
            out=out,
            cos=cos,
            sin=sin,
            style=style,
            rotary_dim=rotary,
            rope_dtype=rope_dtype,
            out_dtype=dtype_of(out.node),
            product="complex" if self._complex() else "separate",
            nodes=between(out.node, boundary, seen),
        )

    def _pair(self, piece: Piece, splits: tuple[_Split, _Split], x_node: Node) -> Pair:
        """The piece's terms, the one that reads its own position first."""
        factors: list[Factor] = []
        own: list[bool] = []
        size = shape_of(x_node)
        frame = self.frame
        for term, (x, table) in zip(piece.terms, splits, strict=True):
            hop = x.at(x_node)
            assert hop is not None  # x_node is common to all trails
            factors.append(Factor(hop, x, table, term))
            dims = piece.labels[frame.dim_axis]
            own.append(
                any(
                    n % frame.dim == 0
                    and not (depends(a) & set(range(frame.head_axis)))
                    and bool((a % frame.dim == along_dim(dims, frame)).all())
                    for n, a in zip(size, map(collapse, hop.ref.index), strict=True)
                    if n > 1
                )
            )
        if own.count(True) != 1:
            message = "no term reads the element's own position"
            if all(own):
                message = "both terms read the element's own position"
            raise No("match.rope-style", message, piece.terms[0].node, 3)
        if own[1]:
            factors.reverse()
        return Pair(piece.labels, factors[0], factors[1], piece.head)

    def _style(self, pairs: list[Pair], x: TokenView) -> tuple[str, int]:
        """Half-split or interleaved, and how many elements rotate."""
        frame = self.frame
        at = x.order[-1]
        shifts: list[tuple[Labels, Index]] = []
        node = pairs[0].partner.x.ref.node
        for pair in pairs:
            own, other = pair.own.x.ref.index, pair.partner.x.ref.index
            for d, (a, b) in enumerate(zip(own, other, strict=True)):
                if d != at and not equal(a, b):
                    raise No("match.rope-style", "an element's partner is elsewhere", node, 4)
            # Shifted by dim so that "missing" (negative) stays recognisable.
            shifts.append((pair.labels, (collapse(other[at] - own[at] + 2 * frame.dim),)))
        dims = np.unique(np.concatenate([p.labels[frame.dim_axis] for p in pairs]))
        joined = assemble(shifts, (*self.labels[:-1], dims))
        if joined is None or depends(joined[0]) - {frame.dim_axis}:
            raise No("match.rope-style", "heads or tokens are rotated differently", node, 4)
        rotary = len(dims)
        partner = np.broadcast_to(joined[0].reshape(-1) - 2 * frame.dim, (rotary,)) + dims
        if not np.array_equal(dims, np.arange(rotary)) or rotary % 2:
            raise No(
                "match.head-dim",
                f"{rotary} elements from {int(dims[0])} on rotate",
                node,
                4,
                have=f"{rotary} from {int(dims[0])}",
                need="an even number from 0",
            )
        if np.array_equal(partner, (dims + rotary // 2) % rotary):
            return "half", rotary
        if np.array_equal(partner, dims ^ 1):
            return "interleaved", rotary
        first = ", ".join(str(int(p)) for p in partner[:4])
        raise No("match.rope-style", f"elements 0, 1, 2, 3 pair with {first}", node, 4)

    def _dtypes(
        self, out: TokenView, x: TokenView, told: list[tuple[_Split, _Split]]
    ) -> torch.dtype:
        """The dtype of all products and sums. Raises where another rounding stands between."""
        node = self.rotated[0].terms[0].node
        dtypes = frozenset[torch.dtype]().union(*(p.rounded for p in self.rotated))
        if len(dtypes) != 1:
            names = " and ".join(sorted(str(d) for d in dtypes))
            raise No("match.dtype", "products and sums round differently", node, 5, have=names)
        (rope_dtype,) = dtypes
        fused = next((p.fused for p in self.rotated if p.fused is not None), None)
        if fused is not None:
            message = f"{op_name(fused)} rounds a product and a sum at once"
            raise No("match.rope-form", message, fused, 5)
        if rope_dtype not in _ROPE_DTYPES:
            raise No("match.dtype", "the rope's dtype", node, 5, have=str(rope_dtype))
        for trail in (f for pair in told for split in pair for f in split):
            first = trail.hops[0].ref.node
            have = dtype_of(first)
            if not exact_cast(REAL.get(have, have), rope_dtype):
                raise No("match.dtype", "a factor is rounded in the product", first, 5)
        for piece in self.pieces:
            path = [REAL.get(d, d) for d in (dtype_of(h.ref.node) for h in piece.head.hops)]
            if not piece.is_rotated:
                passed = [h.ref.node for h in piece.head.hops]
                path = path[: passed.index(x.node) + 1] if x.node in passed else path
            start = rope_dtype if piece.is_rotated else path[-1]
            while len(path) > 1 and path[0] == dtype_of(out.node):
                path.pop(0)
            if not all(exact_cast(start, d) for d in path[:-1]):
                raise No("match.dtype", "the result is rounded twice", out.node, 5)
        return rope_dtype


def _varies(ref: Ref, axis: int) -> bool:
    return any(axis in depends(collapse(i)) for i in ref.index)


def _tableness(x: Trail) -> tuple[int, int]:
    """Smaller where x looks less like a table (with one head the product commutes).

    Tables are cosines, sines or gathered; where that does not tell, tables enter more products,
    because other ropes use them too.
    """
    node = x.end.ref.node
    names = [op_name(node), *(op_name(n) for n in node.all_input_nodes)]
    gathers = ("aten.index.", "aten.index_select.", "aten.embedding.", "aten.gather.")
    looks = names[0].startswith(gathers)
    looks = looks or any(n.startswith(("aten.cos.", "aten.sin.")) for n in names)
    held = holders(frozenset({node}))
    products = {u for n in held for u in n.users if op_name(u) == "aten.mul.Tensor"}
    return int(looks), len(products)


def _slide(x: TokenView, trail: Trail, frame: Frame) -> TokenView:
    """Move x past copies and casts that keep every value (the op does such casts itself)."""
    hops = list(trail.hops)
    start = next(i for i, hop in enumerate(hops) if hop.ref.node is x.node)
    best = x
    for hop in hops[start + 1 :]:
        node = hop.ref.node
        if hop.sign != hops[start].sign or is_inner(node) or shape_of(node) != shape_of(x.node):
            break
        if not all(a is b for a, b in zip(hop.ref.index, hops[start].ref.index, strict=True)):
            break
        best = TokenView(
            node, x.order, x.token_dims, x.token_sizes, x.tokens, x.heads, x.dim, x.merged_heads
        )
    return best
