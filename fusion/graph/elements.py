"""Reading a graph element by element.

A :class:`Ref` is a set of sampled elements of one node's output, as integer multi-indices. The
samples form a *grid*: one axis for each thing that a reader wants to vary (token dimensions,
head, dim), each with a short list of labels. An index is kept as one small array per dimension
of the node that broadcasts over the grid, so the cost depends on heads and head size at most,
never on the token count or the size of a cache.

:func:`step` pulls a reference back through one data-movement operation to the node that it
copies from; where a ``cat`` or a scatter divides the samples, it answers with several
references that share them out. :func:`operand` goes from a pointwise node to the elements of one
operand. Sizes are read through their hints: no guard is added.

Runs on torch 2.13.0; the operators it names exist in 2.11 to 2.15.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Node

from fusion.graph.shapes import NoHintError, hint

Array: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = tuple[Array, ...]
"""The sampled values of each grid axis, in increasing order."""
Index: TypeAlias = tuple[Array, ...]
"""One array per node dimension; each has as many axes as the grid, of extent 1 or full."""


class Unreadable(Exception):
    """A node's elements cannot be followed; ``node`` is where and the text says why."""

    def __init__(self, message: str, node: Node | None = None) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, eq=False)
class Ref:
    """Sampled elements of ``node``'s output: ``index[i]`` is their position in dimension ``i``.

    ``part`` picks the ``real`` or ``imag`` component where the node is complex.
    """

    node: Node
    index: Index
    labels: Labels
    part: str | None = None

    def at(self, node: Node, index: Index, part: str | None = None) -> Ref:
        """The same samples, read from another node."""
        return Ref(node, index, self.labels, part)

    def only(self, labels: Labels) -> Ref:
        """The samples whose labels are among ``labels`` (a subset per axis)."""
        if labels is self.labels:
            return self
        index = self.index
        for axis, (have, want) in enumerate(zip(self.labels, labels, strict=True)):
            if have is not want and len(have) != len(want):
                keep = np.searchsorted(have, want)
                index = tuple(a.take(keep, axis) if a.shape[axis] > 1 else a for a in index)
        return Ref(self.node, index, labels, self.part)


def sample(size: int) -> Array:
    """Positions that stand for all of a long dimension: ends, their neighbours, two inside."""
    if size <= 8:
        return np.arange(size)
    return np.unique(np.array([0, 1, 2, size // 3, size // 2, size - 2, size - 1]))


def along(values: Sequence[int] | Array, axis: int, rank: int) -> Array:
    """A 1-D array laid along one grid axis."""
    shape = [1] * rank
    shape[axis] = -1
    return np.asarray(values, dtype=np.int64).reshape(shape)


def zero(rank: int) -> Array:
    """Position 0 for every sample."""
    return np.zeros((1,) * rank, dtype=np.int64)


def collapse(array: Array) -> Array:
    """The same array with extent 1 along every axis on which it does not depend."""
    for axis, extent in enumerate(array.shape):
        if extent > 1:
            first = array.take([0], axis)
            if bool((array == first).all()):
                array = first
    return array


def depends(array: Array) -> frozenset[int]:
    """The grid axes along which a (collapsed) array varies."""
    return frozenset(axis for axis, extent in enumerate(array.shape) if extent > 1)


def equal(a: Array, b: Array) -> bool:
    """Whether two arrays agree at every sample (after broadcasting)."""
    return bool((a == b).all())


def partition(labels: Labels, key: Array) -> list[tuple[Labels, int]]:
    """Cut the grid into boxes on which ``key`` is constant: ``[(labels, value)]``."""
    key = collapse(key)
    axis = next((a for a, extent in enumerate(key.shape) if extent > 1), None)
    if axis is None:
        return [(labels, int(key.reshape(-1)[0]))]
    rows = np.moveaxis(key, axis, 0).reshape(key.shape[axis], -1)
    _, kinds = np.unique(rows, axis=0, return_inverse=True)
    boxes: list[tuple[Labels, int]] = []
    for kind in range(int(kinds.max()) + 1):
        keep = np.flatnonzero(kinds.reshape(-1) == kind)
        inner = (*labels[:axis], labels[axis][keep], *labels[axis + 1 :])
        boxes += partition(inner, key.take(keep[:1], axis))
    return boxes


def intersect(a: Labels, b: Labels) -> Labels | None:
    """The samples that two boxes of one grid share, or None."""
    if a is b:
        return a
    both = tuple(
        x if x is y else np.intersect1d(x, y, assume_unique=True) for x, y in zip(a, b, strict=True)
    )
    return both if all(len(x) for x in both) else None


# --- metadata -----------------------------------------------------------------------------------

_SHAPES: weakref.WeakKeyDictionary[Node, tuple[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def value_of(node: Node) -> Any:
    """A node's fake value (``meta['val']``)."""
    return node.meta.get("val", node.meta.get("example_value"))


def shape_of(node: Node) -> tuple[int, ...]:
    """The sizes of a node's output, symbolic ones by their hints.

    Raises :class:`Unreadable` where the node is not one tensor or has no usable sizes.
    """
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise Unreadable(f"{node} is not a tensor", node)
    known = _SHAPES.get(node)
    if known is not None and known[0] is value:
        return known[1]
    try:
        shape = tuple(hint(size) for size in value.shape)
    except NoHintError as error:
        raise Unreadable(f"{node}: {error}", node) from error
    if 0 in shape:
        raise Unreadable(f"{node} is empty", node)
    _SHAPES[node] = (value, shape)
    return shape


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of a node's output. Raises :class:`Unreadable` where it is not one tensor."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise Unreadable(f"{node} is not a tensor", node)
    return value.dtype


def number(argument: Any) -> int:
    """An integer argument: an int, a SymInt, or a node that computes one."""
    if isinstance(argument, Node):
        argument = value_of(argument)
    try:
        return hint(argument)
    except NoHintError as error:
        raise Unreadable(str(error)) from error


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same for every value of their symbols (adds no guard)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int) or isinstance(b, int):
        other = b if isinstance(a, int) else a
        expr = other.node.shape_env.replace(other.node.expr)
        return bool(expr == (a if isinstance(a, int) else b))
    env = a.node.shape_env
    return bool(env.replace(a.node.expr) == env.replace(b.node.expr))


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name, defaults included (names and positions carry no meaning).

    The answer is shared: do not change it.
    """
    known = _ARGUMENTS.get(node)
    if known is None or known[0] is not node.args or known[1] != node.kwargs:
        known = _ARGUMENTS[node] = (node.args, dict(node.kwargs), _bind(node))
    return known[2]


_ARGUMENTS: weakref.WeakKeyDictionary[Node, tuple[Any, dict[str, Any], dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


def _bind(node: Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(i): a for i, a in enumerate(node.args)}, **node.kwargs}
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


_NAMES: dict[Any, str] = {}


def op_name(node: Node) -> str:
    """``aten.mul.Tensor`` and the like; an empty string for what is not an operator call."""
    if node.op != "call_function":
        return ""
    target = node.target
    if target is operator.getitem:
        return "getitem"
    name = _NAMES.get(target)
    if name is None:
        name = _NAMES[target] = str(target)
    return name


_EXACT = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


def exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` has the same value in ``target``."""
    return source == target or target in _EXACT.get(source, ())


CASTS = {"prims.convert_element_type.default", "aten._to_copy.default", "aten.to.dtype"}


def cast_source(node: Node) -> Node | None:
    """The operand of a dtype cast, or None where the node is not one (or changes nothing)."""
    if op_name(node) in CASTS and isinstance(node.args[0], Node):
        source = node.args[0]
        if dtype_of(source) != dtype_of(node):
            return source
    return None


def operand(ref: Ref, argument: Node) -> Ref:
    """The elements of one operand of a pointwise node (broadcasting undone)."""
    shape, out = shape_of(argument), shape_of(ref.node)
    lead = len(out) - len(shape)
    rank = len(ref.labels)
    index = tuple(
        zero(rank) if size == 1 and out[lead + i] != 1 else ref.index[lead + i]
        for i, size in enumerate(shape)
    )
    return ref.at(argument, index, ref.part if dtype_of(argument).is_complex else None)
