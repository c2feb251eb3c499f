"""Sizes in a small run: every dimension as a product of factors, followed through operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fusion.graph.shapes import hints

Factor: TypeAlias = tuple[int, int]
"""``(size in the graph, size in the check)`` of one indivisible part of a dimension."""
Dims: TypeAlias = tuple[tuple[Factor, ...], ...]
"""One tuple of factors per dimension (empty for size 1)."""

aten = torch.ops.aten
_REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.var.correction}
_GATHERS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default}


class RegionError(Exception):
    """The region cannot be run small; ``node`` is where it stopped, ``code`` what that means."""

    def __init__(
        self, message: str, node: Node | None = None, code: str = "match.validation-bound"
    ) -> None:
        super().__init__(message)
        self.node = node
        self.code = code


def dims_of(shape: Sequence[int], small: Mapping[int, int] | None = None) -> Dims:
    """Factors of a shape, with the sizes of some dimensions replaced for the check."""
    replaced = small or {}
    return tuple(
        ((int(size), int(replaced.get(i, size))),) if size != 1 or i in replaced else ()
        for i, size in enumerate(shape)
    )


def small_shape(dims: Dims) -> tuple[int, ...]:
    """The shape in the check."""
    return tuple(math.prod(s for _, s in factors) for factors in dims)


def changed(factors: tuple[Factor, ...]) -> bool:
    """Whether a dimension has another size in the check than in the graph."""
    return any(big != small for big, small in factors)


def infer_dims(node: Node, done: torch.Tensor, dims: dict[Node, Dims]) -> Dims:
    """Factors of any other node: by what its operands say about each dimension."""
    shape = hints(node.meta["val"].shape)
    small = tuple(done.shape)
    if len(shape) != len(small):
        raise RegionError("a dimension that is only dropped at the graph's size", node)
    tensors = [n for n in node.all_input_nodes if n in dims]
    if node.target is aten.stack.default:
        count = len(node.args[0])  # type: ignore[arg-type]
        at = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)  # type: ignore[arg-type]
        d = dims[tensors[0]]
        return (*d[:at], ((count, count),) if count != 1 else (), *d[at:])
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    target = node.target
    if source is not None and source in dims:
        d = dims[source]
        if target in _GATHERS:
            return _gathered(node, dims)
        if target is aten.permute.default:
            return tuple(d[i] for i in node.args[1])  # type: ignore[union-attr,index]
        if target is aten.transpose.int:
            order = list(range(len(d)))
            a, b = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
            order[a], order[b] = order[b], order[a]
            return tuple(d[i] for i in order)
        if target is aten.unsqueeze.default:
            at = int(node.args[1]) % (len(d) + 1)  # type: ignore[arg-type]
            return (*d[:at], (), *d[at:])
        if target is aten.view_as_real.default:
            return (*d, ((2, 2),))
        if target is aten.view_as_complex.default:
            return d[:-1]
        if target is aten.select.int:
            at = int(node.args[1]) % len(d)  # type: ignore[arg-type]
            return (*d[:at], *d[at + 1 :])
        if target in _REDUCTIONS and len(shape) < len(d):
            given: Any = node.args[1] if len(node.args) > 1 else None
            gone = {int(i) % len(d) for i in given or range(len(d))}
            return tuple(f for i, f in enumerate(d) if i not in gone)
        if target in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
            kept = iter([f for f in d if f])
            ones = (size == little == 1 for size, little in zip(shape, small, strict=True))
            return tuple(() if one else next(kept) for one in ones)
    # Pointwise, reductions, cat: dimensions correspond from the right, or by position.
    out: list[tuple[Factor, ...]] = []
    for i, (size, little) in enumerate(zip(shape, small, strict=True)):
        found: tuple[Factor, ...] | None = None
        for n in tensors:
            j = i - (len(shape) - len(dims[n]))
            if j < 0:
                continue
            factors = dims[n][j]
            if math.prod(b for b, _ in factors) == size and (
                math.prod(s for _, s in factors) == little
            ):
                found = factors
                if changed(factors):
                    break
        if found is None:
            if size != little:
                raise RegionError(f"size {size} became {little} for no known reason", node)
            found = ((size, size),) if size != 1 else ()
        out.append(found)
    return tuple(out)


def _gathered(node: Node, dims: dict[Node, Dims]) -> Dims:
    """Factors after a gather: those of the index stand where the indexed dimensions stood."""
    table, index = node.args[0], node.args[-1]
    assert isinstance(table, Node)
    source = dims[table]
    if node.target is aten.embedding.default:
        assert isinstance(node.args[1], Node)
        return (*dims[node.args[1]], *source[1:])
    if node.target is aten.index_select.default:
        assert isinstance(index, Node)
        at = int(node.args[1]) % len(source)  # type: ignore[arg-type]
        return (*source[:at], *dims[index], *source[at + 1 :])
    given = list(node.args[1])  # type: ignore[arg-type]
    used = [i for i, n in enumerate(given) if n is not None]
    if used != list(range(used[0], used[-1] + 1)):
        raise RegionError("an index whose dimensions stand apart", node)
    shapes = [dims[given[i]] for i in used]
    longest = max(shapes, key=len)
    if any(len(s) != len(longest) for s in shapes):
        raise RegionError("indices of unequal rank", node)
    parts = [
        max(col, key=lambda f: math.prod(b for b, _ in f)) for col in zip(*shapes, strict=True)
    ]
    return (*source[: used[0]], *parts, *source[used[-1] + 1 :])
