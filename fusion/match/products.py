"""A value as sums of signed products, element by element.

``sum_of_products`` opens additions, subtractions, sign flips, ``addcmul`` and complex products
until it meets a multiplication; the two factors are followed back by their trails. Anything else
is left as a term with a single factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fusion.graph.elements import (
    Labels,
    Ref,
    Unreadable,
    arguments,
    cast_source,
    dtype_of,
    intersect,
    op_name,
    operand,
)
from fusion.graph.foreign import owner
from fusion.graph.moves import movement, step
from fusion.match.trail import Trail, meet, negated, trails

_MAX_DEPTH = 3
"""Nested sums that are opened; a rope needs one (two where products are complex)."""

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_FUSED = ("aten.addcmul.default", "prims.fma.default")
_SUMS = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1, "aten.rsub.Tensor": -1}


@dataclass(frozen=True, eq=False)
class Term:
    """``sign`` times the product of one or two factors, at the samples of the factors.

    ``flips`` are the sums and negations that flipped the sign, innermost first.
    """

    sign: int
    factors: tuple[Trail, ...]
    node: Node
    flips: tuple[Node, ...] = ()

    def only(self, labels: Labels) -> Term:
        """The same term for fewer samples."""
        return replace(self, factors=tuple(f.only(labels) for f in self.factors))


@dataclass(frozen=True, eq=False)
class Piece:
    """Some samples of a value, as a sum of terms that is the same for all of them.

    ``head`` is the trail from the value to the outermost sum, ``dtypes`` those of the nodes on
    it (casts included), nearest first; ``rounded`` are the dtypes in which products and sums are
    computed, ``fused`` a node that rounds a product and a sum at once, if there is one.
    """

    labels: Labels
    head: Trail
    terms: tuple[Term, ...]
    rounded: frozenset[torch.dtype]
    fused: Node | None = None

    @property
    def is_rotated(self) -> bool:
        """Whether this is a sum of exactly two products of two factors."""
        return len(self.terms) == 2 and all(len(t.factors) == 2 for t in self.terms)


@dataclass(frozen=True, eq=False)
class _Sum:
    labels: Labels
    terms: tuple[Term, ...]
    rounded: frozenset[torch.dtype]
    fused: Node | None = None


def pieces_of(ref: Ref, seen: set[Node]) -> list[Piece]:
    """Read every sample of ``ref`` as a sum of products.

    Raises :class:`Unreadable` where a node's elements cannot be followed.
    """
    result = []
    for head in trails(ref, seen, lossy=True, negate=False):
        for part in _sums(head.end.ref, 0, seen):
            labels = intersect(head.labels, part.labels)
            if labels is not None:
                terms = tuple(t.only(labels) for t in part.terms)
                result.append(Piece(labels, head.only(labels), terms, part.rounded, part.fused))
    return result


def _sums(ref: Ref, depth: int, seen: set[Node]) -> list[_Sum]:
    """The terms of the elements, one entry for each box on which they have one form."""
    node, name = ref.node, op_name(ref.node)
    seen.update(owner(n) for n in movement(node))
    real = REAL.get(dtype_of(node), dtype_of(node))
    if depth < _MAX_DEPTH:
        flipped = negated(ref)
        if flipped is not None:
            return [_scaled(s, flipped[1], node) for s in _sums(flipped[0], depth, seen)]
        if name in _SUMS:
            return _added(ref, depth, seen, real)
        if name in _FUSED:
            return _fused(ref, depth, seen, real)
        if name == "aten.mul.Tensor" and all(isinstance(a, Node) for a in node.args[:2]):
            return _product(ref, node.args[0], node.args[1], seen, real)  # type: ignore[arg-type]
        if depth:
            # Between a product and the sum: casts, and stacked, sliced or viewed products.
            source = cast_source(node)
            if source is not None:
                inner = _sums(ref.at(source, ref.index, ref.part), depth, seen)
                return [replace(s, rounded=s.rounded | {real}) for s in inner]
            moved = step(ref)
            if moved:
                return [s for piece in moved for s in _sums(piece, depth, seen)]
    return _leaf(ref, seen)


def _leaf(ref: Ref, seen: set[Node]) -> list[_Sum]:
    """The elements as one term of one factor."""
    return [_Sum(t.labels, (Term(1, (t,), ref.node),), frozenset()) for t in trails(ref, seen)]


def _scaled(part: _Sum, sign: int, node: Node) -> _Sum:
    if sign == 1:
        return part
    terms = (replace(t, sign=t.sign * sign, flips=(*t.flips, node)) for t in part.terms)
    return replace(part, terms=tuple(terms))


def _added(ref: Ref, depth: int, seen: set[Node], real: torch.dtype) -> list[_Sum]:
    a = arguments(ref.node)
    left, right, alpha = a["self"], a["other"], a.get("alpha", 1)
    if op_name(ref.node) == "aten.rsub.Tensor":
        left, right = right, left
    if not (isinstance(left, Node) and isinstance(right, Node)) or alpha not in (1, -1):
        return _leaf(ref, seen)
    sign = alpha * (1 if op_name(ref.node) == "aten.add.Tensor" else -1)
    return _joined(
        _sums(operand(ref, left), depth + 1, seen),
        [_scaled(s, sign, ref.node) for s in _sums(operand(ref, right), depth + 1, seen)],
        real,
    )


def _fused(ref: Ref, depth: int, seen: set[Node], real: torch.dtype) -> list[_Sum]:
    """``addcmul(c, a, b)`` and ``fma(a, b, c)``: a product and a sum, rounded once."""
    a = list(arguments(ref.node).values())
    value = arguments(ref.node).get("value", 1)
    added, x, y = a[:3] if op_name(ref.node).startswith("aten") else (a[2], a[0], a[1])
    if value not in (1, -1):
        return _leaf(ref, seen)
    product = _product(ref, x, y, seen, real)
    joined = _joined(
        _sums(operand(ref, added), depth + 1, seen),
        [_scaled(s, value, ref.node) for s in product],
        real,
    )
    return [replace(s, fused=ref.node) for s in joined]


def _joined(left: list[_Sum], right: list[_Sum], real: torch.dtype) -> list[_Sum]:
    joined = []
    for x in left:
        for y in right:
            labels = intersect(x.labels, y.labels)
            if labels is not None:
                terms = tuple(t.only(labels) for t in (*x.terms, *y.terms))
                rounded = x.rounded | y.rounded | {real}
                joined.append(_Sum(labels, terms, rounded, x.fused or y.fused))
    return joined


def _product(ref: Ref, a: Node, b: Node, seen: set[Node], real: torch.dtype) -> list[_Sum]:
    if not dtype_of(ref.node).is_complex:
        return _pairs(ref.node, operand(ref, a), operand(ref, b), 1, seen, real)
    both = [dtype_of(n).is_complex for n in (a, b)]
    if not all(both):
        raise Unreadable(f"{ref.node} multiplies a complex and a real value", ref.node)
    x, y = operand(ref, a), operand(ref, b)

    def of(part: Ref, name: str) -> Ref:
        return replace(part, part=name)

    if ref.part == "imag":
        one = _pairs(ref.node, of(x, "real"), of(y, "imag"), 1, seen, real)
        two = _pairs(ref.node, of(x, "imag"), of(y, "real"), 1, seen, real)
    else:
        one = _pairs(ref.node, of(x, "real"), of(y, "real"), 1, seen, real)
        two = _pairs(ref.node, of(x, "imag"), of(y, "imag"), -1, seen, real)
    return _joined(one, two, real)


def _pairs(node: Node, a: Ref, b: Ref, sign: int, seen: set[Node], real: torch.dtype) -> list[_Sum]:
    return [
        _Sum(x.labels, (Term(sign, (x, y), node),), frozenset({real}))
        for x, y in meet(trails(a, seen), trails(b, seen))
    ]
