"""Whether two strided views share bytes, from their metadata alone.

K and V of one buffer interleave without sharing a byte (packed heads, ``[B, 2, N, ...]``), so a
comparison of address ranges is not enough. Whether two strided views meet is a bounded linear
Diophantine equation: with strides s of one and t of the other, in bytes, is there an index i of
the one and j of the other with ``sum(i*s) - sum(j*t) = start of the other - start of the one``?
Dimensions of equal stride merge, and with the strides sorted from the largest down each leaves
few candidates for its index, because the smaller ones reach only so far. In a cache, whose
strides are nested, that is one or two; a bound on the steps stops anything contrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_STEPS = 2000

# (stride in bytes, smallest multiple, largest multiple), largest stride first
_Dims = Sequence[tuple[int, int, int]]


def share_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two views *of one storage* certainly have a byte in common.

    False where a size, stride or offset is symbolic, and where it cannot be told in a bounded
    number of steps.
    """
    numbers = (*a.shape, *a.stride(), a.storage_offset(), *b.shape, *b.stride(), b.storage_offset())
    if any(type(n) is not int for n in numbers) or 0 in a.shape or 0 in b.shape:
        return False
    spans: dict[int, list[int]] = {}
    for tensor, sign in ((a, 1), (b, -1)):
        size = tensor.element_size()
        steps = [(n, t * size) for n, t in zip(tensor.shape, tensor.stride(), strict=True)]
        for count, stride in (*steps, (size, 1)):  # the bytes of an element are a dimension too
            low_high = spans.setdefault(stride, [0, 0])
            low_high[sign > 0] += sign * (count - 1)
    distance = b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
    return _reachable(int(distance), _sorted(spans), [_STEPS])


def repeats_itself(tensor: Tensor) -> bool:
    """Whether two elements of one view certainly lie at the same address (0 strides included)."""
    numbers = (*tensor.shape, *tensor.stride())
    if any(type(n) is not int for n in numbers) or 0 in tensor.shape:
        return False
    spans: dict[int, list[int]] = {}
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if count > 1:
            if stride == 0 or stride in spans:
                return True
            spans[stride] = [1 - count, count - 1]
    dims, steps = _sorted(spans), [_STEPS]
    for at, (stride, _, most) in enumerate(dims):
        rest = dims[at + 1 :]
        reach = sum(s * high for s, _, high in rest)
        for index in range(1, min(most, reach // stride) + 1):
            if _reachable(-index * stride, rest, steps):
                return True
            if steps[0] <= 0:
                return False
    return False


def _sorted(spans: dict[int, list[int]]) -> _Dims:
    return [(s, low, high) for s, (low, high) in sorted(spans.items(), reverse=True) if s > 0]


def _reachable(distance: int, dims: _Dims, steps: list[int]) -> bool:
    """Whether multiples of the strides, each within its bounds, add up to ``distance``."""
    if not dims:
        return distance == 0
    (stride, low, high), rest = dims[0], dims[1:]
    least = sum(s * lo for s, lo, _ in rest)
    most = sum(s * hi for s, _, hi in rest)
    first = max(low, -((most - distance) // stride))
    last = min(high, (distance - least) // stride)
    for index in range(first, last + 1):
        steps[0] -= 1
        if steps[0] <= 0:
            return False
        if _reachable(distance - index * stride, rest, steps):
            return True
    return False
