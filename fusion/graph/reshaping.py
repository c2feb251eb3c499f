"""Dimension numbers, slice bounds and the index map of a reshape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from fusion.graph.elements import (
    Array,
    Index,
    Unreadable,
    collapse,
    number,
    same_size,
    value_of,
    zero,
)
from fusion.graph.shapes import pinned

_END = 2**62


def axis_of(dim: Any, ndim: int) -> int:
    """A dimension number counted from the front."""
    value = number(dim)
    return value + ndim if value < 0 else value


def bounds(a: dict[str, Any], size: int) -> tuple[int, int, int]:
    """Start, length and step of a slice (negative and missing ends resolved)."""
    start = 0 if a.get("start") is None else number(a["start"])
    end = _END if a.get("end") is None else number(a["end"])
    stride = number(a.get("step", 1))
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, -(-(end - start) // stride), stride


def fixed(*values: Any) -> bool:
    """Whether offsets are the same in every run: another one is no fixed place in the input."""
    plain = (value_of(v) if isinstance(v, Node) else v for v in values)
    return all(value is None or pinned(value) is not None for value in plain)


def reshape_index(index: Index, out_shape: Sequence[Any], shape: Sequence[Any], rank: int) -> Index:
    """Positions in ``shape`` of elements of its row-major reshape to ``out_shape``.

    Dimensions are matched in groups of equal product. With symbolic sizes the products must be
    equal as expressions: two sizes that only happen to have one example value stay apart.
    """
    out, source = [number(n) for n in out_shape], [number(n) for n in shape]
    result: list[Array] = []
    i = j = 0
    while i < len(out) or j < len(source):
        if i < len(out) and j < len(source) and same_size(out_shape[i], shape[j]):
            result.append(index[i])
            i, j = i + 1, j + 1
            continue
        first, start = i, j
        left, right = 1, 1
        left_size: Any = 1
        right_size: Any = 1
        if i < len(out):
            left, left_size, i = out[i], out_shape[i], i + 1
        if j < len(source):
            right, right_size, j = source[j], shape[j], j + 1
        while left != right or not same_size(left_size, right_size):
            if i < len(out) and (left <= right or j == len(source)):
                left, left_size, i = left * out[i], left_size * out_shape[i], i + 1
            elif j < len(source):
                right, right_size, j = right * source[j], right_size * shape[j], j + 1
            else:
                break
        if left != right:
            raise Unreadable(f"cannot view {tuple(shape)} as {tuple(out_shape)}")
        linear = zero(rank)
        for dim in range(first, i):
            linear = linear * out[dim] + index[dim]
        pieces: list[Array] = []
        for dim in reversed(range(start, j)):
            pieces.append(collapse(linear % source[dim]) if source[dim] > 1 else zero(rank))
            linear = linear // source[dim]
        result += reversed(pieces)
    return tuple(result)
