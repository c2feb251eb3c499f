"""Trails: the nodes that hold the same elements on the way back to where they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from fusion.graph.elements import (
    Array,
    Index,
    Labels,
    Ref,
    cast_source,
    collapse,
    dtype_of,
    exact_cast,
    intersect,
    op_name,
    operand,
)
from fusion.graph.foreign import is_inner, owner
from fusion.graph.moves import is_move, movement, step


@dataclass(frozen=True, eq=False)
class Hop:
    """One node of a trail: the samples as its elements, times ``sign`` the value asked for."""

    ref: Ref
    sign: int


@dataclass(frozen=True, eq=False)
class Trail:
    """From the element asked for (first hop) to the node that computes it (last hop)."""

    labels: Labels
    hops: tuple[Hop, ...]

    @property
    def end(self) -> Hop:
        """The node that computes the elements (or an input)."""
        last = self.hops[-1]
        return Hop(last.ref.only(self.labels), last.sign)

    def nodes(self) -> Iterator[Node]:
        """The nodes from near to far; those inside a decomposition are left out."""
        return (hop.ref.node for hop in self.hops if not is_inner(hop.ref.node))

    def at(self, node: Node) -> Hop | None:
        """The samples as elements of ``node``, where the trail passes it."""
        for hop in self.hops:
            if hop.ref.node is node:
                return Hop(hop.ref.only(self.labels), hop.sign)
        return None

    def only(self, labels: Labels) -> Trail:
        """The same trail for fewer samples."""
        return self if labels is self.labels else Trail(labels, self.hops)


def trails(
    ref: Ref, seen: set[Node], *, lossy: bool = False, negate: bool = True, exact: bool = True
) -> list[Trail]:
    """Follow elements back through data movement, one trail for each part of the samples.

    Also passes sign flips (``negate``) and casts that keep every value (``exact``), or any cast
    (``lossy``). Every node passed is added to ``seen``.
    """
    found: list[Trail] = []
    _follow(ref, 1, (), found, seen, (lossy, negate, exact))
    return found


def _follow(
    ref: Ref,
    sign: int,
    hops: tuple[Hop, ...],
    found: list[Trail],
    seen: set[Node],
    how: tuple[bool, bool, bool],
) -> None:
    path = list(hops)
    lossy, negate, exact = how
    while True:
        path.append(Hop(ref, sign))
        node = ref.node
        seen.update(owner(n) for n in movement(node))
        source = cast_source(node)
        if source is not None:
            if not (lossy or (exact and exact_cast(dtype_of(source), dtype_of(node)))):
                break
            ref = ref.at(source, ref.index, ref.part)
            continue
        if negate:
            flipped = negated(ref)
            if flipped is not None:
                ref, sign = flipped[0], sign * flipped[1]
                continue
        pieces = step(ref)
        if not pieces:
            break
        if len(pieces) > 1:
            for piece in pieces:
                _follow(piece, sign, tuple(path), found, seen, how)
            return
        ref = pieces[0]
    found.append(Trail(ref.labels, tuple(path)))


def negated(ref: Ref) -> tuple[Ref, int] | None:
    """``(operand, sign)`` of a node that only changes signs: neg, ``* -1``, conj."""
    node, name = ref.node, op_name(ref.node)
    if name == "aten.neg.default":
        return operand(ref, node.args[0]), -1  # type: ignore[arg-type]
    if name in ("aten.mul.Tensor", "aten.mul.Scalar") and node.args[1] in (-1, -1.0):
        return operand(ref, node.args[0]), -1  # type: ignore[arg-type]
    if name in ("aten._conj.default", "aten.conj_physical.default", "aten.resolve_conj.default"):
        flip = name != "aten.resolve_conj.default" and ref.part == "imag"
        return operand(ref, node.args[0]), -1 if flip else 1  # type: ignore[arg-type]
    return None


def common(all_trails: Iterable[Trail], *, inner: bool = False) -> list[Node]:
    """The nodes that every trail passes, from near to far on the first one.

    Nodes inside a decomposition count only with ``inner``.
    """
    first, *others = (
        [h.ref.node for h in t.hops] if inner else list(t.nodes()) for t in all_trails
    )
    sets = [set(nodes) for nodes in others]
    return list(dict.fromkeys(n for n in first if all(n in s for s in sets)))


def assemble(parts: list[tuple[Labels, Index]], labels: Labels) -> Index | None:
    """Join the indices of disjoint boxes into one over ``labels``; None where some are missing."""
    if len(parts) == 1 and all(len(a) == len(b) for a, b in zip(parts[0][0], labels, strict=True)):
        return tuple(collapse(a) for a in parts[0][1])
    rank = len(labels)
    cut = [any(len(box[axis]) != len(labels[axis]) for box, _ in parts) for axis in range(rank)]
    joined: list[Array] = []
    for d in range(len(parts[0][1])):
        shape = tuple(
            len(labels[axis]) if cut[axis] or any(i[d].shape[axis] > 1 for _, i in parts) else 1
            for axis in range(rank)
        )
        whole = np.full(shape, -1, dtype=np.int64)
        for box, index in parts:
            where = tuple(
                np.searchsorted(labels[axis], box[axis]) if cut[axis] else np.arange(shape[axis])
                for axis in range(rank)
            )
            target = np.ix_(*where)
            whole[target] = np.broadcast_to(index[d], whole[target].shape)
        if (whole < 0).any():
            return None
        joined.append(collapse(whole))
    return tuple(joined)


def meet(a: list[Trail], b: list[Trail]) -> Iterator[tuple[Trail, Trail]]:
    """Pairs of trails of two values, cut to the samples that they share."""
    for x in a:
        for y in b:
            shared = intersect(x.labels, y.labels)
            if shared is not None:
                yield x.only(shared), y.only(shared)


def same_index(a: Index, b: Index) -> bool:
    """Whether two indices name the same elements at every sample."""
    return all(np.array_equal(collapse(x), collapse(y)) for x, y in zip(a, b, strict=True))


def between(out: Node, boundary: Iterable[Node], seen: set[Node]) -> frozenset[Node]:
    """The nodes of ``seen`` from ``out`` (included) back to the boundary (excluded)."""
    stop = set(boundary)
    inside: set[Node] = set()
    todo = [out]
    while todo:
        node = todo.pop()
        if node in inside or node in stop:
            continue
        inside.add(node)
        todo += [n for n in node.all_input_nodes if n in seen]
    return frozenset(inside)


def keeps_elements(node: Node) -> bool:
    """Whether a node only flips signs or casts without loss."""
    if op_name(node) == "aten.neg.default":
        return True
    source = cast_source(node)
    return source is not None and exact_cast(dtype_of(source), dtype_of(node))


def holders(ends: frozenset[Node]) -> set[Node]:
    """All nodes that hold the elements of ``ends``, moved, negated or cast up."""
    held = set(ends)
    todo = list(ends)
    while todo:
        for user in todo.pop().users:
            if user not in held and (is_move(user) or keeps_elements(user)):
                held.add(user)
                todo.append(user)
    return held
