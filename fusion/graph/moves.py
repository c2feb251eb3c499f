"""Data-movement operators as index maps: which element of which input is this output element?

Every entry of the table takes a reference to elements of a node's output and answers with
references to elements of its inputs, together covering the same samples. Operators whose result
depends on values (gathers by a computed index, arithmetic) are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.fx import Node

from fusion.graph import scatter_moves as scatters
from fusion.graph.constants import constant
from fusion.graph.elements import (
    CASTS,
    Array,
    Index,
    Ref,
    arguments,
    collapse,
    dtype_of,
    number,
    op_name,
    partition,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.foreign import expansion
from fusion.graph.reshaping import axis_of, bounds, fixed, reshape_index
from fusion.graph.shapes import pinned


def step(ref: Ref) -> list[Ref] | None:
    """Pull a reference back through one data movement.

    Returns one reference for an ordinary move, several where the samples part (``cat``,
    ``stack``, scatters), or None where the node computes something (or is an input). A call
    with a registered decomposition is entered (:mod:`fusion.graph.foreign`).
    """
    node = ref.node
    if node.op == "placeholder":
        outer = node.meta.get("fusion_outer")
        return None if outer is None else [ref.at(outer, ref.index, ref.part)]
    name = op_name(node)
    if name == "getitem":
        return _getitem(ref)
    move = _MOVES.get(name)
    if move is not None:
        return move(ref, arguments(node))
    if name in CASTS:
        source = node.args[0]
        if isinstance(source, Node) and dtype_of(source) == dtype_of(node):
            return [ref.at(source, ref.index, ref.part)]
        return None
    inner = expansion(node)
    if inner is not None and len(inner) == 1 and inner[0] is not None:
        return [ref.at(inner[0], ref.index, ref.part)]
    return None


def _one(ref: Ref, source: Node, index: Index) -> list[Ref]:
    return [ref.at(source, index, ref.part)]


def _same(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    return _one(ref, next(iter(a.values())), ref.index)


def _view(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    source = next(iter(a.values()))
    shape_of(ref.node), shape_of(source)  # raises where sizes are unknown or zero
    out, inner = value_of(ref.node).shape, value_of(source).shape
    return _one(ref, source, reshape_index(ref.index, out, inner, len(ref.labels)))


def _permute(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    ndim = len(ref.index)
    index: list[Array] = [zero(0)] * ndim
    for out, dim in enumerate(a["dims"]):
        index[axis_of(dim, ndim)] = ref.index[out]
    return _one(ref, a["self"], tuple(index))


def _transpose(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    index = list(ref.index)
    x, y = axis_of(a.get("dim0", 0), len(index)), axis_of(a.get("dim1", 1), len(index))
    index[x], index[y] = index[y], index[x]
    return _one(ref, a["self"], tuple(index))


def _t(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    return _one(ref, a["self"], tuple(reversed(ref.index)))


def _unsqueeze(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    dim = axis_of(a["dim"], len(ref.index))
    return _one(ref, a["self"], ref.index[:dim] + ref.index[dim + 1 :])


def _squeeze(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    shape, rank = shape_of(a["self"]), len(ref.labels)
    dims = a.get("dim", list(range(len(shape))))
    chosen = {axis_of(d, len(shape)) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    left = iter(ref.index)
    index = tuple(
        zero(rank) if size == 1 and i in chosen else next(left) for i, size in enumerate(shape)
    )
    return _one(ref, a["self"], index)


def _expand(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    shape, rank = shape_of(a["self"]), len(ref.labels)
    lead = len(ref.index) - len(shape)
    index = tuple(zero(rank) if n == 1 else ref.index[lead + i] for i, n in enumerate(shape))
    return _one(ref, a["self"], index)


def _repeat(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    shape = shape_of(a["self"])
    lead = len(ref.index) - len(shape)
    index = tuple(collapse(ref.index[lead + i] % n) for i, n in enumerate(shape))
    return _one(ref, a["self"], index)


def _slice(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    if not fixed(a.get("start"), a.get("step")):
        return None
    dim = axis_of(a.get("dim", 0), len(ref.index))
    start, _, stride = bounds(a, shape_of(a["self"])[dim])
    moved = ref.index[dim] * stride + start
    return _one(ref, a["self"], (*ref.index[:dim], moved, *ref.index[dim + 1 :]))


def _narrow(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    return _slice(ref, {"self": a["self"], "dim": a["dim"], "start": a["start"]})


def _select(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    if not fixed(a["index"]):
        return None
    shape = shape_of(a["self"])
    dim, rank = axis_of(a["dim"], len(shape)), len(ref.labels)
    at = axis_of(a["index"], shape[dim])
    return _one(ref, a["self"], (*ref.index[:dim], zero(rank) + at, *ref.index[dim:]))


def _flip(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    source, turned = list(a.values())[:2]
    shape = shape_of(source)
    dims = {axis_of(d, len(shape)) for d in turned}
    index = tuple(shape[i] - 1 - x if i in dims else x for i, x in enumerate(ref.index))
    return _one(ref, source, index)


def _roll(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    source = a["self"]
    shape = shape_of(source)
    if not a.get("dims"):  # of the flattened tensor
        return None
    index = list(ref.index)
    for shift, dim in zip(a["shifts"], a["dims"], strict=True):
        at = axis_of(dim, len(shape))
        index[at] = (index[at] - number(shift)) % shape[at]
    return _one(ref, source, tuple(index))


def _index(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    """A gather along one dimension by positions that the graph computes from nothing."""
    at = [i for i, index in enumerate(a["indices"]) if index is not None]
    positions = constant(a["indices"][at[0]]) if len(at) == 1 else None
    return None if positions is None else _gathered(ref, a["self"], at[0], positions)


def _index_select(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    positions = constant(a["index"])
    dim = axis_of(a["dim"], len(ref.index))
    return None if positions is None else _gathered(ref, a["self"], dim, positions)


def _gathered(ref: Ref, source: Node, dim: int, positions: Array) -> list[Ref] | None:
    size = pinned(value_of(source).shape[dim])
    if positions.ndim != 1 or size is None:
        return None
    moved = (positions % size)[ref.index[dim]]
    return _one(ref, source, (*ref.index[:dim], moved, *ref.index[dim + 1 :]))


def _cat(ref: Ref, a: dict[str, Any]) -> list[Ref] | None:
    parts = [n for n in a["tensors"] if shape_or_empty(n) != (0,)]
    dim = axis_of(a.get("dim", 0), len(ref.index))
    if not fixed(*(value_of(n).shape[dim] for n in parts[:-1])):
        return None
    edges = np.cumsum([0] + [shape_of(n)[dim] for n in parts])
    which = np.searchsorted(edges, ref.index[dim], side="right") - 1
    result = []
    for labels, k in partition(ref.labels, which):
        piece = ref.only(labels)
        moved = piece.index[dim] - int(edges[k])
        index = (*piece.index[:dim], moved, *piece.index[dim + 1 :])
        result.append(piece.at(parts[k], index, ref.part))
    return result


def shape_or_empty(node: Node) -> tuple[int, ...]:
    """The shape, where a tensor of no elements answers ``(0,)`` (it adds nothing to a cat)."""
    value = value_of(node)
    if any(isinstance(size, int) and size == 0 for size in getattr(value, "shape", ())):
        return (0,)
    return shape_of(node)


def _stack(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    dim = axis_of(a.get("dim", 0), len(ref.index))
    result = []
    for labels, k in partition(ref.labels, ref.index[dim]):
        piece = ref.only(labels)
        index = piece.index[:dim] + piece.index[dim + 1 :]
        result.append(piece.at(a["tensors"][k], index, ref.part))
    return result


def _getitem(ref: Ref) -> list[Ref] | None:
    """One result of a split, an unbind, or of an operator with a registered decomposition."""
    source, which = ref.node.args
    if not isinstance(source, Node) or not isinstance(which, int):
        return None
    name, a = op_name(source), arguments(source)
    if name in _SPLITS:
        whole = a["self"]
        shape = shape_of(whole)
        dim = axis_of(a.get("dim", 0), len(shape))
        which = which % max(len(value_of(source)), 1)
        if name == "aten.unbind.int":
            rank = len(ref.labels)
            index = (*ref.index[:dim], zero(rank) + which, *ref.index[dim:])
            return _one(ref, whole, index)
        before = [t.shape[dim] for t in value_of(source)[:which]]
        if not fixed(*before):
            return None
        start = sum(map(number, before))
        moved = ref.index[dim] + start
        return _one(ref, whole, (*ref.index[:dim], moved, *ref.index[dim + 1 :]))
    inner = expansion(source)
    result = None if inner is None or not 0 <= which < len(inner) else inner[which]
    return None if result is None else _one(ref, result, ref.index)


def _view_as_real(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    result = []
    for labels, k in partition(ref.labels, ref.index[-1]):
        piece = ref.only(labels)
        result.append(piece.at(a["self"], piece.index[:-1], ("real", "imag")[k]))
    return result


def _view_as_complex(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    which = zero(len(ref.labels)) + (1 if ref.part == "imag" else 0)
    return [ref.at(a["self"], (*ref.index, which))]


def _complex(ref: Ref, a: dict[str, Any]) -> list[Ref]:
    return _expand(
        ref.at(ref.node, ref.index), {"self": a["imag" if ref.part == "imag" else "real"]}
    )


def _component(part: str) -> Callable[[Ref, dict[str, Any]], list[Ref]]:
    def move(ref: Ref, a: dict[str, Any]) -> list[Ref]:
        source = next(iter(a.values()))
        return [ref.at(source, ref.index, part if dtype_of(source).is_complex else None)]

    return move


_SPLITS = {"aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int",
           "aten.chunk.default", "aten.split.sizes", "aten.split_with_sizes_copy.default",
           "aten.split_copy.Tensor", "aten.unbind_copy.int"}  # fmt: skip

_MOVES: dict[str, Callable[[Ref, dict[str, Any]], list[Ref] | None]] = {
    **dict.fromkeys(
        ("aten.clone.default", "aten.contiguous.default", "aten.alias.default",
         "aten.detach.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default",
         "aten.alias_copy.default", "aten.detach_copy.default", "aten.lift.default"), _same),
    **dict.fromkeys(
        ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
         "aten.flatten.using_ints", "aten.unflatten.int", "aten._reshape_copy.default",
         "aten.view_copy.default", "prims.view_of.default"), _view),
    **dict.fromkeys(("aten.permute.default", "aten.permute_copy.default"), _permute),
    **dict.fromkeys(("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default",
                     "aten.swapdims.default"), _transpose),
    **dict.fromkeys(("aten.t.default", "aten.t_copy.default"), _t),
    **dict.fromkeys(("aten.unsqueeze.default", "aten.unsqueeze_copy.default"), _unsqueeze),
    **dict.fromkeys(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
                     "aten.squeeze_copy.dim", "aten.squeeze_copy.dims"), _squeeze),
    **dict.fromkeys(("aten.expand.default", "aten.expand_copy.default",
                     "aten.expand_as.default"), _expand),
    "aten.repeat.default": _repeat,
    **dict.fromkeys(("aten.slice.Tensor", "aten.slice_copy.Tensor"), _slice),
    "aten.narrow.default": _narrow,
    **dict.fromkeys(("aten.select.int", "aten.select_copy.int"), _select),
    "aten.flip.default": _flip,
    "prims.rev.default": _flip,
    "aten.roll.default": _roll,
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.stack.default": _stack,
    "aten.slice_scatter.default": scatters.slice_scatter,
    "aten.select_scatter.default": scatters.select_scatter,
    "aten.copy.default": scatters.copy,
    "aten.as_strided.default": scatters.as_strided,
    "aten.as_strided_scatter.default": scatters.as_strided_scatter,
    "aten.view_as_real.default": _view_as_real,
    "aten.view_as_complex.default": _view_as_complex,
    "aten.complex.default": _complex,
    "aten.real.default": _component("real"),
    "aten.imag.default": _component("imag"),
}  # fmt: skip


def movement(node: Node) -> Sequence[Node]:
    """The nodes that :func:`step` passes over together with ``node`` (a split's parent)."""
    if op_name(node) == "getitem" and isinstance(node.args[0], Node):
        return (node, node.args[0])
    return (node,)


def is_move(node: Node) -> bool:
    """Whether a node only moves elements (a split and its results included)."""
    name = op_name(node)
    if name == "getitem":
        return isinstance(node.args[0], Node) and op_name(node.args[0]) in _SPLITS
    if name in CASTS:
        source = node.args[0]
        return isinstance(source, Node) and dtype_of(source) == dtype_of(node)
    if name in ("aten.index.Tensor", "aten.index_select.default"):
        return all(constant(n) is not None for n in node.all_input_nodes[1:])
    return name in _MOVES or name in _SPLITS
