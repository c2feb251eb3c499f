"""A cache of a few blocks with the geometry of the real one, for translation validation."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.backends import reference
from fusion.graph import functional
from fusion.graph.shapes import hint, hints
from fusion.match.cache_rows import RangeSlots
from fusion.match.cache_write import OpRoles, roles_of
from fusion.match.facts import CachePlane, CacheWrite, Slots
from fusion.match.region import Dims, Factor, Input, RegionError, small_shape

aten = torch.ops.aten
_RANGED = {aten.slice.Tensor, aten.slice_scatter.default}
_WRAPPING = {aten.index_put.default, aten._unsafe_index_put.default}


class SmallCache:
    """Small stand-ins for the bases of one write, their K and V views, and slots into them.

    Raises :class:`RegionError` for a cache that has no small form, or no slot at all.
    """

    def __init__(
        self, write: CacheWrite, small: Mapping[int, int], generator: torch.Generator
    ) -> None:
        self.write, self.generator = write, generator
        self.tokens = _small_tokens(write, small)
        self.small = small
        plane = write.key_plane
        blocks, block_size = hint(plane.size[0]), hint(plane.size[1])
        if blocks == 0 or block_size == 0:
            raise RegionError("a cache without a single slot", plane.base)
        batch = write.slots.batch
        self.sequences = 1 if batch is None else small.get(hint(batch), hint(batch))
        self.rows = self.tokens // max(1, self.sequences)
        if write.slots.kind == "range" and batch is not None:
            self.blocks = self.sequences
            self.block_size = min(block_size, self.rows + 3)
        elif write.slots.batch is not None:  # a block is a sequence
            self.blocks = small.get(blocks, blocks)
            self.block_size = min(block_size, self.tokens + 2)
        else:
            self.block_size = min(block_size, 4 if block_size <= 832 else self.tokens + 2)
            self.blocks = min(blocks, math.ceil((self.tokens + 3) / self.block_size) + 1)
            if self.blocks * self.block_size < self.tokens:  # few large blocks
                self.block_size = min(block_size, math.ceil(self.tokens / self.blocks))
            if blocks > 1:  # a trial may have more tokens than a graph that fills its cache
                self.blocks = max(self.blocks, math.ceil(self.tokens / self.block_size))
        self.bases: dict[Node, Input] = {}
        self.strides: dict[Node, tuple[int, ...]] = {}
        for base in write.bases:
            self._make_base(base)
        self.slot_inputs = self._make_slots()

    def inputs(self, operand: CachePlane | Slots) -> dict[Node, Input]:
        """The region inputs that an operand stands for."""
        if isinstance(operand, CachePlane):
            return {operand.base: self.bases[operand.base]}
        return self.slot_inputs

    def copies(self) -> dict[Node, Tensor]:
        """Fresh copies of the bases, for the reference to write into."""
        return {n: _clone(i.value) for n, i in self.bases.items()}

    def view(self, plane: CachePlane, base: Tensor) -> Tensor:
        """The NHD view of a plane on a small base."""
        size = (self.blocks, self.block_size, hint(plane.size[2]), hint(plane.size[3]))
        base_strides = hints(plane.base.meta["val"].stride())
        base_sizes = hints(plane.base.meta["val"].shape)
        small = self.strides[plane.base]

        def translate(elements: int) -> int:
            found = _locate(elements, base_sizes, base_strides, plane.base)
            return sum(count * small[dim] for dim, count in found.items())

        strides = [translate(hint(s)) for s in plane.stride[2:]]
        steps = [0, 0]

        def walked(dim: int) -> int | None:  # the stride of a dimension of one element is anything
            if hint(plane.size[dim]) == 1:
                return None
            return _single(hint(plane.stride[dim]), base_sizes, base_strides, plane.base)

        block_dim, inner_dim = walked(0), walked(1)
        if self.block_size > 1 or block_dim is None:
            steps[1] = 0 if inner_dim is None else small[inner_dim]
        if self.blocks > 1 and block_dim is not None:
            merged = block_dim == inner_dim and hint(plane.size[1]) > 1
            steps[0] = small[block_dim] * (self.block_size if merged else 1)
        base_offset = plane.base.meta["val"].storage_offset()
        offset = translate(hint(plane.storage_offset) - hint(base_offset))
        typed = base if base.dtype == plane.dtype else base.view(plane.dtype)
        return torch.as_strided(typed, size, (*steps, *strides), offset)

    def slot_mapping(
        self, slots: Slots, inputs: Mapping[Node, Input], *, full_size: bool = False
    ) -> Tensor:
        """The canonical slot of every token, in the token order of the key.

        ``full_size`` counts in the blocks and pages of the graph's cache, as emitted nodes do.
        """
        blocks, page = self.blocks, self.block_size
        if full_size:
            blocks, page = (hint(size) for size in self.write.key_plane.size[:2])
        if isinstance(slots, RangeSlots):
            start, rows, count = self.range_start, self.rows, self.sequences
            if full_size:
                given = slots.start
                start = hint(given.meta["val"] if isinstance(given, Node) else given)
                rows = hint(slots.length)
                count = 1 if slots.batch is None else hint(slots.batch)
            first = torch.arange(count)[:, None] * page
            return (first + start + torch.arange(rows)[None]).reshape(-1)
        index = inputs[slots.node].value.to(torch.int64).reshape(-1)
        if slots.kind == "block_offset":
            assert slots.offset is not None
            offset = inputs[slots.offset].value.to(torch.int64).reshape(-1)
            block = torch.where(index < 0, index + blocks, index)
            return block * page + torch.where(offset < 0, offset + page, offset)
        if slots.kind == "slots":
            return index
        if slots.batch is not None:
            index = torch.where(index < 0, index + page, index)
            sequences = torch.arange(blocks)[:, None] * page
            return (sequences + index[None]).reshape(-1)
        return torch.where(index < 0, index + blocks * page, index)

    def special(self, node: Node, values: dict[Node, Any], dims: dict[Node, Dims]) -> Any:
        """Run a functionalised ``kv_cache_write``, whose arguments bake the cache's sizes."""
        made = node.args[0] if node.target is operator.getitem else None
        if isinstance(made, Node) and functional.is_auto_functionalized(made):
            index: Any = node.args[1]
            if index > 0:  # the new content of a base has the factors of the base
                dims[node] = self.bases[_written(made)[index - 1]].dims
            return values[made][index]
        if node.target in _RANGED and self.write.slots.kind == "range":
            return self._ranged(node, values, dims)
        if not functional.is_auto_functionalized(node):
            return NotImplemented
        write = self.write
        copies = {b: _clone(values[b]) for b in write.bases}
        given = functional.plain_kwargs(node)
        roles = roles_of(functional.mutable_op(node)) or OpRoles()
        names = {
            "key": roles.key, "value": roles.value, "slot_mapping": roles.slots,
            "k_scale": roles.k_scale, "v_scale": roles.v_scale,
        }  # fmt: skip
        arguments: dict[str, Any] = {
            name: values[given[own]] if own and isinstance(given.get(own), Node) else None
            for name, own in names.items()
        }
        for name, own, fact in (
            ("key_cache", roles.key_cache, write.key_plane),
            ("value_cache", roles.value_cache, write.value_plane),
        ):
            plane = _plane_of(node, own, fact)
            arguments[name] = self.view(plane, copies[plane.base])
        reference.kv_cache_write(**arguments, kv_layout=write.kv_layout)
        return (None, *(copies[b] for b in _written(node)))

    @property
    def range_start(self) -> int:
        """The first written position of a range, in the small cache."""
        page = (
            self.block_size if self.write.slots.batch is not None else self.blocks * self.block_size
        )
        return int(page > self.rows)

    def _ranged(self, node: Node, values: dict[Node, Any], dims: dict[Node, Dims]) -> Any:
        """Run a slice or slice_scatter along the positions: its bounds are of the real cache."""
        into = node.args[0]
        assert isinstance(into, Node)
        writes = node.target is aten.slice_scatter.default
        given = node.args[2:] if writes else node.args[1:]
        dim: Any = given[0] if given else 0
        if not any(big != little for big, little in dims[into][dim]):
            return NotImplemented  # cuts K or V out of a packed cache
        self._compare_range(node, dim, given[1:])
        bounds = (dim, self.range_start, self.range_start + self.rows)
        if writes:
            rows: Any = node.args[1]
            dims[node] = dims[into]
            return aten.slice_scatter.default(values[into], values[rows], *bounds)
        factors = list(dims[into])
        factors[dim] = ((hints(node.meta["val"].shape)[dim], self.rows),)
        dims[node] = tuple(factors)
        return aten.slice.Tensor(values[into], *bounds)

    def _compare_range(self, node: Node, dim: int, given: Sequence[Any]) -> None:
        """The graph's own bounds against the fact, since the small run replaces both."""
        slots = self.write.slots
        assert isinstance(slots, RangeSlots)

        def number(value: Any, default: int) -> int:
            value = value.meta["val"] if isinstance(value, Node) else value
            return default if value is None else hint(value)

        into: Any = node.args[0]
        size = hints(into.meta["val"].shape)[dim]
        start = number(given[0] if given else None, 0)
        stop = min(number(given[1] if len(given) > 1 else None, size), size)
        start, stop = (n + size if n < 0 else n for n in (start, stop))
        if (start, stop - start) != (number(slots.start, 0), hint(slots.length)):
            text = "depends on another range of positions than was read"
            raise RegionError(text, node, "match.validation")

    def _make_base(self, base: Node) -> None:
        value = base.meta["val"]
        sizes, strides = hints(value.shape), hints(value.stride())
        factors: list[tuple[Factor, ...]] = [((s, s),) if s != 1 else () for s in sizes]
        for plane in (self.write.key_plane, self.write.value_plane):
            if plane.base is not base:
                continue
            blocks, block_size = hint(plane.size[0]), hint(plane.size[1])
            outer = _single(hint(plane.stride[0]), sizes, strides, base) if blocks > 1 else None
            inner = _single(hint(plane.stride[1]), sizes, strides, base) if block_size > 1 else None
            block_factor, inner_factor = (blocks, self.blocks), (block_size, self.block_size)
            if outer is not None and outer == inner:
                factors[outer] = (block_factor, inner_factor)
            else:
                if outer is not None:
                    factors[outer] = (block_factor,)
                if inner is not None:
                    factors[inner] = (inner_factor,)
        for dim, parts in enumerate(factors):
            if math.prod(b for b, _ in parts) != sizes[dim]:
                raise RegionError("a cache whose blocks do not fill a dimension", base)
        shape = small_shape(tuple(factors))
        order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
        dense = torch.empty([shape[d] for d in order], dtype=value.dtype)
        back = [order.index(d) for d in range(len(order))]
        small = dense.permute(back)
        small.copy_(_random(shape, value.dtype, self.generator))
        self.bases[base] = Input(tuple(factors), small)
        self.strides[base] = small.stride()

    def _make_slots(self) -> dict[Node, Input]:
        slots = self.write.slots
        if slots.kind == "range":
            return {}
        # index_put counts a negative index from the end; index_copy and scatter refuse it.
        wraps = any(n.target in _WRAPPING for n in self.write.nodes)
        total = self.blocks * self.block_size
        shape = hints(slots.node.meta["val"].shape)
        count = math.prod(shape)
        if slots.batch is not None:
            rows = self.small.get(count, count)
            picked = torch.randperm(self.block_size, generator=self.generator)[:rows]
        else:
            rows = self.small.get(count, min(count, self.tokens))
            picked = torch.randperm(total, generator=self.generator)[:rows]
        if len(picked) < rows:
            raise RegionError("more tokens than the cache has slots", slots.node)
        dims = _slot_dims(shape, self.small, rows)
        out: dict[Node, Input] = {}

        def put(node: Node, value: Tensor) -> None:
            dtype = node.meta["val"].dtype
            out[node] = Input(dims, value.to(dtype).reshape(small_shape(dims)))
            # V's slots may be computed by nodes of their own that are proved equal to K's.
            for twin, same in getattr(self.write, "twins", {}).items():
                if same is node:
                    out[twin] = out[node]

        if slots.kind == "block_offset":
            assert slots.offset is not None
            block, offset = picked // self.block_size, picked % self.block_size
            if wraps:
                block[:1] -= self.blocks
            put(slots.node, block)
            put(slots.offset, offset)
        else:
            if slots.kind == "slots" and rows > 2:
                picked[1] = -1  # a padding row
            elif slots.kind == "index" and wraps:
                picked[:1] -= total if slots.batch is None else self.block_size
            put(slots.node, picked)
        return out


def _plane_of(node: Node, name: str, fact: CachePlane) -> CachePlane:
    """What a functional wrapper itself says about a cache argument.

    Not what the facts say: then the check would compare them with themselves.
    """
    if "_all_bases" not in node.kwargs:  # the first version of the wrapper takes views as nodes
        return fact
    names = functional.mutated_names(functional.mutable_op(node))
    view = functional.arg_views(node).get(name) if name in names else None
    if view is None:
        return fact
    bases: Any = node.kwargs["_all_bases"]
    base: Node = bases[view.base_index]
    value = base.meta["val"]
    offset = hint(value.storage_offset())
    seen = torch.empty_strided(hints(value.shape), hints(value.stride()), device="meta")

    def number(given: Any) -> int:
        return hint(given.meta["val"] if isinstance(given, Node) else given)

    if view.kind == "strided":
        size, stride = ([number(n) for n in part] for part in (view.size, view.stride))
        return CachePlane(base, tuple(size), tuple(stride), number(view.storage_offset), fact.dtype)
    if view.kind == "slice":
        bounds = (number(view.dim), number(view.start), number(view.end))
        seen = aten.slice.Tensor(seen, *bounds)
    where = offset + int(seen.storage_offset())
    return CachePlane(base, tuple(seen.shape), seen.stride(), where, fact.dtype)


def _written(node: Node) -> list[Node]:
    """The bases whose new content a functional wrapper returns, in order."""
    bases: Any = node.kwargs.get("_all_bases")
    if bases is not None:
        return list(bases)
    # The first version of the wrapper returns the written arguments themselves.
    return [node.kwargs[n] for n in functional.mutated_names(functional.mutable_op(node))]  # type: ignore[misc]


def _slot_dims(shape: Sequence[int], small: Mapping[int, int], rows: int) -> Dims:
    if sum(s != 1 for s in shape) <= 1:
        return tuple(((s, rows),) if s != 1 else () for s in shape)
    return tuple(((s, small.get(s, s)),) if s != 1 else () for s in shape)


def _small_tokens(write: CacheWrite, small: Mapping[int, int]) -> int:
    tokens = hint(write.key.tokens)
    return small.get(tokens, tokens)


def _locate(
    elements: int, sizes: Sequence[int], strides: Sequence[int], base: Node
) -> dict[int, int]:
    """Write a number of elements as a multi-index of a base."""
    found: dict[int, int] = {}
    for dim in sorted(range(len(sizes)), key=lambda d: -strides[d]):
        if sizes[dim] == 1 or strides[dim] == 0:
            continue
        count, elements = divmod(elements, strides[dim])
        if count:
            found[dim] = count
    if elements:
        raise RegionError("a cache view that is no view of its base's dimensions", base)
    return found


def _single(elements: int, sizes: Sequence[int], strides: Sequence[int], base: Node) -> int | None:
    """The one dimension of the base that a stride walks along (None for stride 0)."""
    found = _locate(elements, sizes, strides, base)
    if len(found) > 1:
        raise RegionError("a cache view that walks along two dimensions at once", base)
    return next(iter(found), None)


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    if dtype == torch.uint8:
        return torch.randint(0, 120, tuple(shape), generator=generator).to(dtype)
    raise RegionError(f"a cache of dtype {dtype}")


def _clone(value: Tensor) -> Tensor:
    out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    out.copy_(value)
    return out
