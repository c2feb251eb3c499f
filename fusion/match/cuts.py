"""Why the written rows are not the rotated ones: some were cut off, or all moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch.fx import Node

from fusion.graph.elements import Index, Labels, along, depends, shape_of, zero
from fusion.match.miss import No
from fusion.match.trail import Trail, assemble, common
from fusion.match.views import Frame, view_at

_NOT_ROWS = {
    "heads": "rotated heads",
    "some": "a part of the rotated value",
}


def moved_or_cut(frame: Frame, labels: Labels, heads: Sequence[Trail]) -> No | None:
    """The reason, if tokens and heads stop standing in the result's own order on the way back.

    ``heads`` are the trails from the result, ``[tokens, heads, dim]``, to its arithmetic.
    """
    mover: Node | None = None
    for node in common(heads):
        parts = [(t.labels, hop.ref.index) for t in heads if (hop := t.at(node)) is not None]
        index = assemble(parts, labels)
        if index is None or view_at(frame, node, index, labels) is None:
            return None if mover is None else _reason(frame, labels, mover, node, index)
        mover = node
    return None if mover is None else _reason(frame, labels, mover, mover, None)


def _reason(frame: Frame, labels: Labels, mover: Node, source: Node, index: Index | None) -> No:
    cut = index and _cut(frame, labels, shape_of(source), index)
    if not cut:
        message = f"{mover.name} puts the rotated rows into another order"
        return No("match.token-order", message, mover, 3)
    if cut in _NOT_ROWS:
        message = f"{mover.name} cuts {_NOT_ROWS[cut]} off before they are used"
        have = f"{frame.heads} heads of {frame.dim}"
        return No("match.value", message, mover, 3, have=have, need="all that was rotated")
    rows = math.prod(shape_of(source)) // (frame.heads * frame.dim)
    remedy = "kv_cache_write takes fewer slots than rows"
    if cut == "rows":
        remedy = "give the rows that are not wanted slot -1"
    return No(
        "match.value", f"{mover.name} cuts rotated rows off before they are used", mover, 3,
        have=f"{math.prod(frame.extents)} rows", need=f"{rows} rows: {remedy}",
    )  # fmt: skip


def _cut(frame: Frame, labels: Labels, shape: tuple[int, ...], index: Index) -> str | None:
    """What of a node of ``shape`` the samples leave out.

    "last rows", "rows" (not only the last ones), "heads" or "some" of it; None where
    nothing is missing, or where rows change their order as well.
    """
    tokens = set(range(frame.head_axis))
    want = frame.token_number(labels)
    flat = zero(frame.rank)
    missing, merged = False, False
    for size, at in zip(shape, index, strict=True):
        axes = depends(at)
        if not axes and size > 1:  # one element: of the axis that has no other
            single = [n for n, d in enumerate((*frame.extents, frame.heads)) if d == 1]
            axes = frozenset(single)
            if axes & tokens and frame.head_axis in axes:
                return "some"
        # Heads and dims are all sampled; of tokens both ends and their neighbours are.
        if axes & tokens:
            flat = flat * size + at
            missing = missing or int(at.max()) != size - 1 or int(at.min()) != 0
            merged = merged or frame.head_axis in axes
        elif len(np.unique(at)) != size:
            return "heads" if frame.head_axis in axes else "some"
    if merged:
        want = want * frame.heads + along(labels[frame.head_axis], frame.head_axis, frame.rank)
    flat, want = np.broadcast_arrays(flat, want)
    if np.array_equal(flat, want):
        return "last rows" if missing else None
    return "rows" if bool((np.diff(flat.ravel()) > 0).all()) else None
