"""Index maps of scatters and strided windows (see :mod:`fusion.graph.moves`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from fusion.graph.elements import (
    Array,
    Ref,
    Unreadable,
    collapse,
    dtype_of,
    number,
    operand,
    partition,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.reshaping import axis_of, bounds, fixed, reshape_index


def slice_scatter(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    if not fixed(a.get("start"), a.get("step")):
        return None
    dim = axis_of(a.get("dim", 0), len(ref.index))
    start, length, stride = bounds(a, shape_of(ref.node)[dim])
    at = ref.index[dim] - start
    inside = (at >= 0) & (at < length * stride) & (at % stride == 0)
    result = []
    for labels, k in partition(ref.labels, inside.astype(np.int64)):
        piece = ref.only(labels)
        if not k:
            result.append(piece.at(a["self"], piece.index, ref.part))
            continue
        moved = (piece.index[dim] - start) // stride
        index = (*piece.index[:dim], moved, *piece.index[dim + 1 :])
        result.append(piece.at(a["src"], index, ref.part))
    return result


def select_scatter(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    if not fixed(a["index"]):
        return None
    dim = axis_of(a["dim"], len(ref.index))
    at = axis_of(a["index"], shape_of(ref.node)[dim])
    result = []
    for labels, k in partition(ref.labels, (ref.index[dim] == at).astype(np.int64)):
        piece = ref.only(labels)
        index = piece.index[:dim] + piece.index[dim + 1 :] if k else piece.index
        result.append(piece.at(a["src"] if k else a["self"], index, ref.part))
    return result


def copy(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    """``copy(self, src)``: the source, broadcast to ``self``."""
    if dtype_of(a["src"]) != dtype_of(ref.node):
        raise Unreadable(f"{ref.node} copies across dtypes", ref.node)
    return [operand(ref, a["src"])]


def as_strided(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    """A strided window, where the source is contiguous from the start of its storage."""
    source = a["self"]
    shape, value = shape_of(source), value_of(source)
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides = [number(s) for s in value.stride()]
    if any(s != d for s, d, n in zip(strides, dense, shape, strict=True) if n != 1):
        return None
    offset = a.get("storage_offset")
    base = number(value.storage_offset())
    linear = zero(len(ref.labels)) + ((base if offset is None else number(offset)) - base)
    for x, stride in zip(ref.index, a["stride"], strict=True):
        linear = linear + x * number(stride)
    linear = collapse(linear)
    if linear.min() < 0 or linear.max() >= math.prod(shape):
        return None
    whole = math.prod(shape)
    index = reshape_index((linear,), (whole,), shape, len(ref.labels))
    return [ref.at(source, index, ref.part)]


def as_strided_scatter(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    """A strided window written into a dense tensor (torch refuses one that meets itself)."""
    shape, value = shape_of(ref.node), value_of(a["self"])
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    offset, base = a.get("storage_offset"), number(value.storage_offset())
    sizes, strides = [number(s) for s in a["size"]], [number(s) for s in a["stride"]]
    left = zero(len(ref.labels)) + (base - (base if offset is None else number(offset)))
    for x, stride in zip(ref.index, dense, strict=True):
        left = left + x * stride
    inside = left >= 0
    window: list[Array] = [zero(len(ref.labels))] * len(sizes)
    for d in sorted(range(len(sizes)), key=lambda d: (-strides[d], sizes[d])):
        if sizes[d] > 1:
            at = np.clip(left // strides[d], 0, sizes[d] - 1)
            window[d], left = at, left - at * strides[d]
    inside = inside & (left == 0)
    result = []
    for labels, k in partition(ref.labels, inside.astype(np.int64)):
        piece = ref.only(labels)
        if k:
            moved = ref.at(a["src"], tuple(window), ref.part).only(labels)
            result.append(replace(moved, index=tuple(collapse(i) for i in moved.index)))
        else:
            result.append(piece.at(a["self"], piece.index, ref.part))
    return result
