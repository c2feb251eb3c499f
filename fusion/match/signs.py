"""Signs of a rotation: whether each term has the one of a turn in the usual direction.

A sign that is wrong is traced to the node that gives it: the subtraction or negation that the
wrong elements pass and the right ones do not, the addition that joins their pair, or the
concatenation whose halves should differ in sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from fusion.graph.elements import Array, Labels
from fusion.match.miss import No
from fusion.match.products import Term
from fusion.match.trail import Hop, Trail
from fusion.match.views import Frame

_NAMES = {"half": ("first half", "second half"), "interleaved": ("even elements", "odd elements")}


@dataclass(frozen=True, eq=False)
class Factor:
    """One term of a rotated piece: x at the chosen node, the trails of x and table, the term."""

    x: Hop
    x_trail: Trail
    table: Trail
    term: Term


@dataclass(frozen=True, eq=False)
class Pair:
    """A rotated piece as its own-position term and its partner term; ``head`` ends in the sum."""

    labels: Labels
    own: Factor
    partner: Factor
    head: Trail


@dataclass(frozen=True, eq=False)
class Side:
    """One term of a pair, as seen from a table: the elements, their sign and the one needed."""

    dims: Array
    sign: int
    want: Array
    low: npt.NDArray[np.bool_]
    flips: tuple[Node, ...]
    path: tuple[Node, ...]
    total: Node

    @property
    def wrong(self) -> bool:
        """Whether an element has the other sign."""
        return bool((self.want != self.sign).any())


def sides(
    frame: Frame, pairs: Sequence[Pair], hops: Sequence[Hop], style: str, rotary: int, partner: bool
) -> list[Side]:
    """The own or partner terms with their signs, where ``hops`` are the table's."""
    found = []
    for pair, hop in zip(pairs, hops, strict=True):
        factor = pair.partner if partner else pair.own
        dims = pair.labels[frame.dim_axis]
        low = (dims < rotary // 2) if style == "half" else dims % 2 == 0
        flips = (
            *factor.term.flips,
            *_flips(factor.x_trail, factor.x.ref.node),
            *_flips(factor.table, hop.ref.node),
        )
        found.append(
            Side(
                dims=dims,
                sign=factor.term.sign * factor.x.sign * hop.sign,
                want=np.where(low & partner, -1, 1),
                low=low,
                flips=flips,
                path=tuple(_until(factor.x_trail, factor.x.ref.node)),
                total=pair.head.end.ref.node,
            )
        )
    return found


def wrong_sign(found: Sequence[Side], style: str, *, partner: bool, depth: int) -> No:
    """The refusal of terms of which at least one has a wrong sign."""
    name = "sin" if partner else "cos"
    wrong = sorted((s for s in found if s.wrong), key=lambda s: int(s.dims.min()))
    right = [s for s in found if not s.wrong]
    texts = []
    for low, where in zip((True, False), _NAMES[style], strict=True):
        bad = [s for s in wrong if (s.low == low)[s.want != s.sign].any()]
        if bad:
            texts.append(
                f"{where}: {_signed(bad[0].sign, name)}, needs {_signed(-bad[0].sign, name)}"
            )
    message = "; ".join(texts)
    if partner and len(texts) == 2 and not right:
        message = f"rotates the other way: {message}"
    return No("match.rope-sign", message, _culprit(wrong, right), depth)


def _culprit(wrong: Sequence[Side], right: Sequence[Side]) -> Node:
    first = wrong[0]
    innocent = {n for s in right for n in s.flips}
    guilty = [n for n in first.flips if n not in innocent]
    if not right:  # a flip of one half alone is what a rotation has
        guilty = [n for n in guilty if all(n in s.flips for s in wrong)]
    others = [s for s in (*wrong, *right) if s is not first]
    if guilty:
        return guilty[0]
    if all(s.total is not first.total for s in others):
        return first.total  # this pair's own sum
    if not right:
        return next((n for s in wrong for n in s.flips), first.total)
    # One sum for all elements: what joins the elements of right and wrong signs.
    shared = (n for n in first.path if all(n in s.path for s in right if s.total is first.total))
    return next(reversed(list(shared)), first.total)


def _signed(sign: int, name: str) -> str:
    return f"{'-' if sign < 0 else '+'}{name}"


def _until(trail: Trail, node: Node) -> Iterator[Node]:
    for hop in trail.hops:
        if hop.ref.node is node:
            return
        yield hop.ref.node


def _flips(trail: Trail, until: Node) -> list[Node]:
    """The nodes of a trail, before ``until``, that change the sign."""
    nodes = set(_until(trail, until))
    return [
        a.ref.node
        for a, b in zip(trail.hops, trail.hops[1:], strict=False)
        if a.sign != b.sign and a.ref.node in nodes
    ]
