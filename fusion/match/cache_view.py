"""Views of a cache as strided regions of its base, and the arithmetic on them.

A :class:`Region` says which elements of a base's storage a value's elements are. It is derived
by applying view ops to the *base's* strides, never read off an intermediate value: functional
graphs give intermediates strides of their own, which say nothing about the cache.

Sizes are ints or SymInts. Two of them are compared only by what is statically known, so that
reading a graph never adds a guard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

Size = Any


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds for certain; adds no guard."""
    if isinstance(condition, bool):
        return condition
    # Imported late: it costs a quarter of a second and only symbolic graphs need it.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return known(a == b)


def all_equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two size tuples are known to be equal, element by element."""
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def number(arg: Any) -> Any:
    """A size argument of a node: a number as it is, a node by its traced value."""
    return arg.meta.get("val") if isinstance(arg, Node) else arg


def numbers(args: Any) -> tuple[Any, ...]:
    """:func:`number` over a list argument."""
    return tuple(number(a) for a in args)


@dataclass(frozen=True)
class Region:
    """Elements ``offset + sum(i[k] * stride[k])`` of a base's storage, ``0 <= i[k] < size[k]``."""

    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """The region that a (fake) tensor itself covers."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())

    def same(self, other: Region) -> bool:
        """Same elements in the same order (strides of dimensions of size one do not count)."""
        if not (all_equal(self.size, other.size) and equal(self.offset, other.offset)):
            return False
        return all(
            equal(a, b) or equal(n, 1)
            for n, a, b in zip(self.size, self.stride, other.stride, strict=True)
        )

    def permute(self, dims: Sequence[int]) -> Region:
        """Reorder dimensions."""
        n = len(self.size)
        order = [d % n for d in dims]
        return Region(
            tuple(self.size[d] for d in order), tuple(self.stride[d] for d in order), self.offset
        )

    def select(self, dim: int, index: Size) -> Region | None:
        """Drop a dimension at ``index`` (None if it may be out of range or of unknown sign)."""
        d = dim % len(self.size)
        if known(index < 0):
            index = index + self.size[d]
        if not known(index >= 0):
            return None
        return Region(
            self.size[:d] + self.size[d + 1 :],
            self.stride[:d] + self.stride[d + 1 :],
            self.offset + index * self.stride[d],
        )

    def narrow(self, dim: int, start: Size, length: Size, step: int = 1) -> Region:
        """Keep ``length`` entries of a dimension from ``start`` (in range) on."""
        d = dim % len(self.size)
        size, stride = list(self.size), list(self.stride)
        size[d], stride[d] = length, stride[d] * step
        return Region(tuple(size), tuple(stride), self.offset + start * self.stride[d])

    def slice(self, dim: int, start: Any, end: Any, step: Any, length: Size) -> Region | None:
        """``x[start:end:step]`` along ``dim``; ``length`` is the resulting size."""
        d = dim % len(self.size)
        if not isinstance(step, int) or step < 1:
            return None
        start = 0 if start is None else start
        if known(start < 0):
            start = start + self.size[d]
        if equal(length, self.size[d]) and step == 1:
            return self
        if not known(start >= 0):
            return None
        return self.narrow(d, start, length, step)

    def regroup(self, shape: Sequence[Size]) -> Region | None:
        """``view(shape)``: None when no strides express it (or it is not known to).

        The rule of ``torch.Tensor.view``: walk both shapes from the last dimension; old
        dimensions whose strides continue each other form a run, and new ones must fill runs.
        """
        stride: list[Size] = [0] * len(shape)
        position = len(shape) - 1
        old = [(n, s) for n, s in zip(self.size, self.stride, strict=True) if not equal(n, 1)]
        step: Size = old[-1][1] if old else 1
        run: Size = 1
        filled: Size = 1
        for index in range(len(old) - 1, -1, -1):
            run = run * old[index][0]
            if index > 0 and equal(old[index - 1][1], run * step):
                continue
            while position >= 0 and (not equal(filled, run) or equal(shape[position], 1)):
                stride[position] = filled * step
                filled = filled * shape[position]
                position -= 1
            if not equal(filled, run):
                return None
            if index > 0:
                step, run, filled = old[index - 1][1], 1, 1
        if any(not equal(n, 1) for n in shape[: position + 1]):
            return None
        return Region(tuple(shape), tuple(stride), self.offset)

    @property
    def last(self) -> Size:
        """The largest storage index in the region (strides are non-negative, sizes positive)."""
        total = self.offset
        for n, s in zip(self.size, self.stride, strict=True):
            total = total + (n - 1) * s
        return total

    def disjoint(self, other: Region) -> bool:
        """Whether two regions are known to share no element.

        Dimensions with the same size and stride in both are peeled off, outermost first, while
        what is left of both fits into one stride; then the two remaining ranges must not meet.
        """
        a, b = self, other
        while True:
            if known(a.last < b.offset) or known(b.last < a.offset):
                return True
            found = None
            for i, (n, s) in enumerate(zip(a.size, a.stride, strict=True)):
                for j, (m, t) in enumerate(zip(b.size, b.stride, strict=True)):
                    if equal(n, m) and equal(s, t) and (found is None or known(s > found[2])):
                        found = (i, j, s)
            if found is None:
                return False
            i, j, s = found
            a = Region(a.size[:i] + a.size[i + 1 :], a.stride[:i] + a.stride[i + 1 :], a.offset)
            b = Region(b.size[:j] + b.size[j + 1 :], b.stride[:j] + b.stride[j + 1 :], b.offset)
            if not (known(a.last - b.offset < s) and known(b.last - a.offset < s)):
                return False


def _name(node: Node) -> str:
    """``aten::permute`` for an ATen overload, the bare name for anything else."""
    target = node.target
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else getattr(target, "__name__", str(target))


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of an op call by schema name, defaults filled in."""
    out: dict[str, Any] = {}
    for i, a in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if i < len(node.args):
            out[a.name] = node.args[i]
        elif a.name in node.kwargs:
            out[a.name] = node.kwargs[a.name]
        elif a.has_default_value():
            out[a.name] = a.default_value
    return out


def _same(region: Region, node: Node) -> Region | None:
    del node
    return region


def _copying(region: Region, node: Node) -> Region | None:
    """A copy that keeps the values: same dtype, same shape."""
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return region if before.dtype == after.dtype else None


def _permute(region: Region, node: Node) -> Region | None:
    return region.permute(numbers(node.args[1]))


def _transpose(region: Region, node: Node) -> Region | None:
    n = len(region.size)
    a, b = (int(d) % n for d in node.args[1:3])  # type: ignore[arg-type]
    dims = list(range(n))
    dims[a], dims[b] = dims[b], dims[a]
    return region.permute(dims)


def _t(region: Region, node: Node) -> Region | None:
    del node
    return region.permute(range(len(region.size))[::-1])


def _select(region: Region, node: Node) -> Region | None:
    a = arguments(node)
    return region.select(a["dim"], number(a["index"]))


def _slice(region: Region, node: Node) -> Region | None:
    a = arguments(node)
    length = node.meta["val"].shape[a["dim"]]
    return region.slice(a["dim"], number(a["start"]), number(a["end"]), number(a["step"]), length)


def _narrow(region: Region, node: Node) -> Region | None:
    a = arguments(node)
    start = number(a["start"])
    return region.slice(a["dim"], start, None, 1, number(a["length"]))


def _unsqueeze(region: Region, node: Node) -> Region | None:
    n = len(region.size) + 1
    d = int(node.args[1]) % n  # type: ignore[arg-type]
    size, stride = list(region.size), list(region.stride)
    size.insert(d, 1)
    stride.insert(d, 0)
    return Region(tuple(size), tuple(stride), region.offset)


def _squeeze(region: Region, node: Node) -> Region | None:
    n = len(region.size)
    if len(node.args) > 1:
        dims: Any = node.args[1]
        wanted = {int(d) % n for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    else:
        wanted = set(range(n))
    keep = [i for i in range(n) if not (i in wanted and equal(region.size[i], 1))]
    if len(keep) != len(node.meta["val"].shape):
        return None
    return region.permute(keep)


def _expand(region: Region, node: Node) -> Region | None:
    shape = tuple(node.meta["val"].shape)
    lead = len(shape) - len(region.size)
    stride: list[Size] = [0] * lead
    for n, m, s in zip(region.size, shape[lead:], region.stride, strict=True):
        if equal(n, m):
            stride.append(s)
        elif equal(n, 1):
            stride.append(0)
        else:
            return None
    return Region(shape, tuple(stride), region.offset)


def _regroup(region: Region, node: Node) -> Region | None:
    value = node.meta["val"]
    return region.regroup(tuple(value.shape))


def _view(region: Region, node: Node) -> Region | None:
    if _overload(node) == "dtype":
        before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return region if before.dtype.itemsize == after.dtype.itemsize else None
    return _regroup(region, node)


def _overload(node: Node) -> str:
    return str(getattr(node.target, "_overloadname", ""))


_VIEWS: dict[str, Callable[[Region, Node], Region | None]] = {
    "aten::alias": _same,
    "aten::detach": _same,
    "aten::lift_fresh_copy": _same,
    "aten::clone": _same,
    "aten::contiguous": _same,
    "aten::_to_copy": _copying,
    "prims::convert_element_type": _copying,
    "aten::permute": _permute,
    "aten::transpose": _transpose,
    "aten::t": _t,
    "aten::select": _select,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze": _squeeze,
    "aten::expand": _expand,
    "aten::view": _view,
    "aten::_unsafe_view": _regroup,
    "aten::reshape": _regroup,
    "aten::flatten": _regroup,
    "aten::unflatten": _regroup,
}


def is_view(node: Node) -> bool:
    """Whether :func:`derive` has a rule for the node (a value-preserving re-indexing)."""
    return node.op == "call_function" and _name(node) in _VIEWS


def derive(region: Region, node: Node) -> Region | None:
    """The region of a view's output (see :func:`is_view`), whose first argument covers ``region``.

    None where no strides express it.
    """
    return _VIEWS[_name(node)](region, node)


def pieces(region: Region, node: Node) -> list[Region | None]:
    """Regions of the outputs of ``split``, ``split_with_sizes``, ``chunk`` or ``unbind``."""
    name = _name(node)
    a = arguments(node)
    d = int(a["dim"]) % len(region.size)
    values = node.meta["val"]
    out: list[Region | None] = []
    if name == "aten::unbind":
        return [region.select(d, i) for i in range(len(values))]
    start: Size = 0
    for value in values:
        length = value.shape[d]
        out.append(region.narrow(d, start, length))
        start = start + length
    return out


COPIES = {"aten::clone", "aten::contiguous", "aten::_to_copy", "prims::convert_element_type"}
_SPLITS = {"aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind"}
_SCATTERS = {"aten::slice_scatter", "aten::select_scatter", "aten::as_strided_scatter"}


def is_split(node: Node) -> bool:
    """Whether the node's outputs are pieces of its input."""
    return node.op == "call_function" and _name(node) in _SPLITS


def is_scatter(node: Node) -> bool:
    """Whether the node puts a value back into a view of its first argument."""
    return node.op == "call_function" and _name(node) in _SCATTERS


def scattered(region: Region, node: Node) -> Region | None:
    """The part of ``region`` that a ``*_scatter`` node replaces by its second argument."""
    a = arguments(node)
    name = _name(node)
    if name == "aten::select_scatter":
        return region.select(a["dim"], number(a["index"]))
    src = a["src"].meta["val"]
    if name == "aten::slice_scatter":
        length = src.shape[a["dim"]]
        start, end, step = (number(a[k]) for k in ("start", "end", "step"))
        return region.slice(a["dim"], start, end, step, length)
    offset = region.offset if a["storage_offset"] is None else number(a["storage_offset"])
    return Region(numbers(a["size"]), numbers(a["stride"]), offset)


def is_getitem(node: Node) -> bool:
    """Whether the node picks one output of a multi-output node."""
    return node.op == "call_function" and node.target is operator.getitem


op_name = _name
overload_name = _overload
