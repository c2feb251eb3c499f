"""One write by slots: which dimension of the written view means what.

The canonical form is rows ``[tokens, heads, dim]`` written to an NHD plane
``[num_blocks, block_size, heads, dim]`` at slots. This module reads that form off
``index_put``, ``index_copy``, ``scatter`` and ranges on a view of any shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion.graph.shapes import pinned
from fusion.graph.structure import structure
from fusion.match import cache_view as cv
from fusion.match.cache_trace import RawWrite, Trace
from fusion.match.cache_value import source_of
from fusion.match.cache_view import Region, Size
from fusion.match.facts import Slots, TokenView
from fusion.reason import Reason


@dataclass(frozen=True)
class RangeSlots(Slots):
    """A contiguous range of positions, ``start`` to ``start + length``, in each block.

    There is no slot tensor in the graph: ``node`` is the write itself, kind is ``range``.
    ``start`` is a number, a SymInt or the node of one; it is not negative.
    """

    start: Size | Node = 0
    length: Size = 0


@dataclass(frozen=True)
class Rows:
    """One tensor's rows and where they go.

    ``key`` compares the slots of two writes, ``indices`` are the nodes that it was made from.
    """

    write: RawWrite
    view: TokenView
    plane: Region
    slots: Slots
    scale: Node | None
    nodes: tuple[Node, ...]
    key: tuple[Any, ...]
    indices: tuple[Node, ...] = ()

    def pairs_with(self, other: Rows) -> bool:
        """Whether the other write fills the same slots of another plane of the same geometry.

        Equal slots mean equally many rows, even where the symbols of the two counts differ.
        """
        if self.key != other.key or not self.key:
            return False
        if self.view.heads != other.view.heads or self.write.dtype != other.write.dtype:
            return False
        if not cv.all_equal(self.plane.size[:3], other.plane.size[:3]):
            return False
        same = self.write.base is other.write.base
        return not same or self.write.region.disjoint(other.write.region)


def product(sizes: Any) -> Size:
    """The product of sizes, an int or a SymInt."""
    return math.prod(sizes, start=1)


def tokens_of(node: Any) -> TokenView | Reason:
    """A ``[T, H, D]`` operand of a registered op as a token view."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return Reason(
            "match.value", "the written rows are not [tokens, heads, dim]", node=str(node)
        )
    return _view(node, (0, 1, 2), 1)


def _view(node: Node, order: tuple[int, ...], token_dims: int) -> TokenView | Reason:
    shape = tuple(node.meta["val"].shape)
    sizes = tuple(shape[d] for d in order[:token_dims])
    spelled = shape[order[token_dims]] if len(order) == token_dims + 2 else 1
    heads, dim = pinned(spelled), pinned(shape[order[-1]])
    if heads is None or dim is None:
        return Reason(
            "match.value", "the number of heads and the head size are not constants",
            have=f"{spelled} heads of {shape[order[-1]]}", node=node.name,
        )  # fmt: skip
    return TokenView(node, order, token_dims, sizes, product(sizes), heads, dim)


def read_rows(trace: Trace, write: RawWrite) -> Rows | Reason | None:
    """Read one raw write. None where it is no business of ours (a counter, a mask)."""
    region, dtype = write.region, write.dtype
    if not (dtype.is_floating_point or dtype.itemsize == 1) or dtype == torch.bool:
        return None
    if len(region.size) < 2:
        return None
    name = cv.op_name(write.node)
    a = cv.arguments(write.node)
    if name in ("aten::index_put", "aten::_unsafe_index_put"):
        if a["accumulate"]:
            return _no(write, "index_put adds to the cache (accumulate=True)")
        return _index_put(trace, write, list(a["indices"]), a["values"])
    if name == "aten::index_copy":
        indices: list[Any] = [None] * (a["dim"] % len(region.size)) + [a["index"]]
        return _index_put(trace, write, indices, a["source"])
    if name == "aten::scatter":
        return _scatter(trace, write, a)
    if name == "aten::slice_scatter":
        return _slice(trace, write, a)
    return _no(write, f"{name} into a cache is not read as a slot write")


def _scatter(trace: Trace, write: RawWrite, a: dict[str, Any]) -> Rows | Reason | None:
    """``scatter(dim, index, src)`` with a slot vector expanded over all other dimensions."""
    d = a["dim"] % len(write.region.size)
    source = a.get("src")
    if not isinstance(source, Node) or a.get("reduce") is not None:
        return _no(write, "scatter of a constant, or with a reduction")
    vector = _expanded_along(a["index"], d)
    if vector is None:
        return _no(write, "the scatter index differs between heads or elements")
    shape = tuple(a["index"].meta["val"].shape)
    others = [i for i in range(len(shape)) if i != d]
    whole = all(cv.equal(shape[i], write.region.size[i]) for i in others)
    if not whole or not cv.all_equal(shape, tuple(source.meta["val"].shape)):
        return _no(write, "the scatter does not write whole rows")
    return _index_put(trace, write, [None] * d + [vector], source)


def _expanded_along(index: Any, dim: int) -> Node | None:
    """The 1-D node that an index repeats in every dimension but ``dim``."""
    node, axis = index, dim
    while isinstance(node, Node) and node.op == "call_function":
        if node.meta["val"].dim() == 1:
            break
        name, source = cv.op_name(node), node.args[0]
        if not isinstance(source, Node):
            return None
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if name == "aten::expand":
            length = after[axis]
            axis -= len(after) - len(before)
            if axis < 0 or not cv.equal(before[axis], length):
                return None
        elif name == "aten::clone":
            pass
        elif name == "aten::unsqueeze":
            added = int(node.args[1]) % len(after)  # type: ignore[arg-type]
            if added == axis:
                return None
            axis -= added < axis
        elif name in ("aten::view", "aten::reshape"):
            wide = [i for i, n in enumerate(before) if not cv.equal(n, 1)]
            if len(wide) != 1 or not cv.equal(before[wide[0]], after[axis]):
                return None
            axis = wide[0]
        else:
            return None
        node = source
    if not isinstance(node, Node) or node.meta["val"].dim() != 1:
        return None
    return node


def _slice(trace: Trace, write: RawWrite, a: dict[str, Any]) -> Rows | Reason | None:
    """``view[..., start : start + T, ...] = values`` with numbers for start and T."""
    region = write.region
    d = a["dim"] % len(region.size)
    values = _uncopied(a["src"])
    if a["step"] != 1:
        return _no(write, "the written positions have a step")
    length = values.meta["val"].shape[d]
    start = 0 if a["start"] is None else a["start"]
    number = cv.number(start)
    if cv.known(number < 0):
        start = number = number + region.size[d]
    if not cv.known(number >= 0):
        return _no(write, "the first written position may be negative")
    rest = [i for i in range(len(region.size)) if i != d]
    layout = [("t", 0) if i == d else ("r", i) for i in range(len(region.size))]
    expected = [length if i == d else n for i, n in enumerate(region.size)]
    slots = RangeSlots(write.node, "range", None, None, start, length)
    return finish(trace, write, values, layout, expected, rest, [d], slots)


def _uncopied(values: Node) -> Node:
    """``aten.copy(old, new)`` is the new value, where it only converts nothing."""
    while cv.op_name(values) == "aten::copy":
        source = values.args[1]
        assert isinstance(source, Node)
        old, new = values.meta["val"], source.meta["val"]
        if old.dtype != new.dtype or not cv.all_equal(tuple(old.shape), tuple(new.shape)):
            break
        values = source
    return values


def _no(write: RawWrite, message: str) -> Reason:
    return Reason("match.cache-write", message, node=write.node.name)


def _index_put(
    trace: Trace, write: RawWrite, indices: list[Any], values: Node
) -> Rows | Reason | None:
    region = write.region
    ndim = len(region.size)
    at = [i for i, x in enumerate(indices) if x is not None]
    tensors = [indices[i].meta["val"] for i in at]
    if any(t.dtype not in (torch.int64, torch.int32) for t in tensors):
        return _no(write, "the cache is written through a mask, not by slots")
    shape = _broadcast([tuple(t.shape) for t in tensors])
    if shape is None or len(shape) == 0:
        return _no(write, "the indices do not name one slot per token")
    rest = [i for i in range(ndim) if i not in at]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    before = [i for i in rest if i < at[0]] if adjacent else []
    after = [i for i in rest if i not in before]
    # Dimensions of the values, by what they follow: ("r", region dim) or ("t", index dim).
    layout = [("r", i) for i in before] + [("t", i) for i in range(len(shape))]
    layout += [("r", i) for i in after]
    expected = [shape[i] if kind == "t" else region.size[i] for kind, i in layout]
    if len(at) > 2:
        return _no(write, "more than a block and an offset index the cache")
    nodes = [indices[i] for i in at]
    if len(at) == 2:
        slots = Slots(nodes[0], "block_offset", nodes[1])
    else:
        slots = Slots(nodes[0], "index")
    return finish(trace, write, values, layout, expected, rest, at, slots)


def finish(
    trace: Trace,
    write: RawWrite,
    values: Node,
    layout: list[tuple[str, int]],
    expected: list[Size],
    rest: list[int],
    at: list[int],
    slots: Slots,
) -> Rows | Reason | None:
    """Name the axes: ``rest`` region dimensions are (batch,) heads and dim, ``at`` are slots."""
    region = write.region
    got = tuple(values.meta["val"].shape)
    # Leading dimensions of size one may be missing: broadcasting adds them.
    while len(expected) > len(got) and cv.equal(expected[0], 1):
        layout, expected = layout[1:], expected[1:]
    if len(got) != len(expected) or not all(map(_fills, got, expected)):
        return Reason(
            "match.value", "the written value is broadcast, or not one row per slot",
            have=str(list(got)), need=str(expected), node=values.name,
        )  # fmt: skip
    # torch itself drops leading dimensions of size one from what is assigned: one head of one
    # token is a vector.
    lost = [i for i in rest[-2:] if ("r", i) not in layout]
    if not rest or len(rest) > 3 or rest[-1] in lost:
        return _no(write, "the written view has no head and dim axes")
    dim_axis = rest[-1]
    head_axis = rest[-2] if len(rest) >= 2 else None
    batch_axis = rest[-3] if len(rest) == 3 else None
    if not cv.equal(region.stride[dim_axis], 1):
        return Reason(
            "match.cache-view", "the head dimension of the cache is not contiguous",
            have=f"stride {region.stride[dim_axis]}", need="stride 1", node=write.node.name,
        )  # fmt: skip
    if batch_axis is not None:
        vector = slots.kind == "range" or slots.node.meta["val"].dim() == 1
        if len(at) != 1 or not vector:
            return _no(write, "batched positions differ by sequence")
        slots = replace(slots, batch=region.size[batch_axis])
    where: dict[tuple[str, int | None], int] = {entry: i for i, entry in enumerate(layout)}
    tokens = [where["r", batch_axis]] if ("r", batch_axis) in where else []
    tokens += [i for i, (kind, _) in enumerate(layout) if kind == "t"]
    order = list(tokens)
    if head_axis is not None and head_axis not in lost:
        order.append(where["r", head_axis])
    order.append(where["r", dim_axis])
    source = source_of(values, write.dtype)
    if isinstance(source, Reason):
        return source
    view = _view(source.node, tuple(order), len(tokens))
    if isinstance(view, Reason):
        return view
    inner = source.inner
    if head_axis is None:
        split = _unmerged(view)
        if split is not None:
            view, inner = split, (*inner, source.node)
    # Heads that are merged with the head dimension lie one after the other.
    head = (view.heads, view.dim if head_axis is None else region.stride[head_axis])
    if batch_axis is not None:
        blocks = (region.size[batch_axis], region.stride[batch_axis])
        pages = (region.size[at[0]], region.stride[at[0]])
    elif len(at) == 2:
        blocks = (region.size[at[0]], region.stride[at[0]])
        pages = (region.size[at[1]], region.stride[at[1]])
    else:
        blocks, pages = paged(trace, write, region.size[at[0]], region.stride[at[0]])
    plane = Region(
        (blocks[0], pages[0], head[0], view.dim),
        (blocks[1], pages[1], head[1], 1),
        region.offset,
    )
    key: tuple[Any, ...] = (slots.kind, structure(slots.offset), str(slots.batch))
    if isinstance(slots, RangeSlots):
        key += (structure(slots.start), str(slots.length))
    else:
        key += (structure(slots.node),)
    indices = tuple(n for n in (slots.node, slots.offset) if n is not None)
    if slots.kind == "range":
        indices = ()
    return Rows(write, view, plane, slots, source.scale, inner, key, indices)


def _unmerged(view: TokenView) -> TokenView | None:
    """The same rows before ``[tokens, heads, dim]`` was flattened to ``[tokens, heads * dim]``."""
    node = view.node
    if cv.op_name(node) not in ("aten::view", "aten::reshape", "aten::_unsafe_view"):
        return None
    source = node.args[0]
    if not isinstance(source, Node) or view.order != tuple(range(view.token_dims + 1)):
        return None
    shape = tuple(source.meta["val"].shape)
    if len(shape) != view.token_dims + 2 or not cv.all_equal(shape[:-2], view.token_sizes):
        return None
    split = _view(source, tuple(range(len(shape))), view.token_dims)
    return split if isinstance(split, TokenView) else None


def _fills(have: Size, need: Size) -> bool:
    """Whether a dimension of the values has one entry per entry of the written region.

    A size that is known not to be one cannot be broadcast: then torch itself demands equality.
    """
    return cv.equal(have, need) or (not isinstance(need, int) and cv.known(have != 1))


def paged(
    trace: Trace, write: RawWrite, size: Size, stride: Size
) -> tuple[tuple[Size, Size], tuple[Size, Size]]:
    """Blocks and block size behind a flat slot dimension, from the base where it shows them."""
    base = trace.whole(write.base)
    for outer in range(len(base.size)):
        for inner in range(len(base.size)):
            n, m = base.size[outer], base.size[inner]
            if outer == inner or not cv.equal(base.stride[inner], stride):
                continue
            if cv.equal(n * m, size) and cv.equal(base.stride[outer], m * stride):
                return (n, base.stride[outer]), (m, stride)
    return (size, stride), (1, stride)


def _broadcast(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...] | None:
    """The broadcast of index shapes, where it is known."""
    ndim = max(len(s) for s in shapes)
    out: list[Size] = [1] * ndim
    for shape in shapes:
        for i, n in enumerate(shape, start=ndim - len(shape)):
            if cv.equal(out[i], n) or cv.equal(n, 1):
                continue
            if not cv.equal(out[i], 1):
                return None
            out[i] = n
    return tuple(out)
