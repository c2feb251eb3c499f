"""One trial of a chain: small random inputs, the replaced nodes run on them, the reference too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.backends import reference
from fusion.graph.shapes import NoHintError, hint, hints
from fusion.match.facts import CachePlane, RopeTable, Slots, TokenView
from fusion.match.region import Dims, Input, Region, RegionError, dims_of, small_shape
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.dependent import equal_tables
from fusion.passes.prologue.operation import Operation
from fusion.passes.prologue.small_cache import SmallCache

#: Token counts up to which a graph may be checked at its own sizes.
MAX_TOKENS = 64


class Trial:
    """One set of small random inputs.

    ``constant`` are expands whose sizes are no token counts, although they equal one.
    Raises :class:`RegionError` where the inputs cannot be made small (without ``shrink``:
    where the graph itself is too large).
    """

    def __init__(
        self,
        chain: Chain,
        operation: Operation,
        roles: Mapping[Node, str],
        sequences: int,
        tokens: int,
        seed: int,
        *,
        shrink: bool = True,
        constant: frozenset[Node] = frozenset(),
    ) -> None:
        self.chain, self.operation, self.roles = chain, operation, roles
        self.generator = torch.Generator().manual_seed(1234 + seed)
        self.awkward = seed == 1
        self.small = small_sizes(operation, sequences, tokens) if shrink else {}
        self._constant, self._counts = constant, token_counts(operation)
        if not shrink and hint(chain.key.tokens) > MAX_TOKENS:
            raise RegionError("too many tokens to check at full size", chain.k_rope.out.node)
        self.inputs: dict[Node, Input] = {}
        self.cache = SmallCache(chain.write, self.small, self.generator) if chain.write else None
        for name, operand in operation.tensors.items():
            self._add(name, operand)
        for twin, same in equal_tables(chain).items():
            if twin in roles and same in self.inputs:
                self.inputs.setdefault(twin, self.inputs[same])

    def compare(
        self, region: Region, outputs: Mapping[Node, str], tick: Any
    ) -> tuple[str | None, float]:
        """Run both sides; returns the first difference in words and its size."""
        special = self.cache.special if self.cache is not None else None
        for node, given in self.inputs.items():
            if type(given.value) is not Tensor or given.value.device.type != "cpu":
                raise RegionError("the check was not run on real tensors", node)
        values, _ = region.run(self.inputs, special, self.small, tick, self.constant)
        for node in self.inputs.keys() & set(region.nodes):  # an operand that the chain computes
            self.inputs[node] = replace(self.inputs[node], value=values[node])
        bases = self.cache.copies() if self.cache is not None else {}
        query, key = self._reference(bases)
        expected = {"query": query, "key": key}
        for node, what in outputs.items():
            have = values[node]
            if what == "cache":
                assert self.chain.write is not None
                index = self.chain.write.results[node]
                want = bases[self.chain.write.bases[index]]
            else:
                rope = self.chain.q_rope if what == "query" else self.chain.k_rope
                have = _rows(have, rope.out)
                want = expected[what]
            if have.shape != want.shape or have.dtype != want.dtype:
                return (
                    f"{what} is {have.dtype}{list(have.shape)} in the graph and "
                    f"{want.dtype}{list(want.shape)} in the operation"
                ), math.inf
            if not same_bits(have, want):
                error = (have.double() - want.double()).abs().nan_to_num(math.inf).max().item()
                return f"{what} differs between the graph and {self.operation.name}", error
        return None, 0.0

    def constant(self, node: Node, size: Any) -> bool:
        """Whether a size that an expand makes is no token count in this trial."""
        return node in self._constant or no_count(self._counts, size)

    def _reference(self, bases: Mapping[Node, Tensor]) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(self.operation.attributes)
        for name, operand in self.operation.tensors.items():
            arguments[name] = self.argument(operand, bases)
            if name == "positions" and isinstance(operand, Node):
                arguments[name] = self.positions(operand)
        function = getattr(reference, self.operation.name)
        if self.chain.write is not None:
            # Always ask for k: whether the graph needs it changes nothing about its value.
            arguments["return_key"] = True
        result: tuple[Tensor, Tensor] = function(**arguments)
        return result

    def operand(self, name: str, operand: Any) -> Tensor:
        """What an emitted node has to compute for an operand of the call.

        Counts in the rows of the graph's own table and cache, as emitted nodes do.
        """
        if name == "positions":
            return self.positions(operand, full_size=True)
        if isinstance(operand, Slots):
            assert self.cache is not None
            return self.cache.slot_mapping(operand, self.inputs, full_size=True)
        value = self.argument(operand, {})
        assert value is not None
        return value

    def positions(self, node: Node, *, full_size: bool = False) -> Tensor:
        """Positions as the operation takes them: counted from the front of the table.

        ``full_size`` counts in the rows of the graph's table, as emitted nodes do.
        """
        table = self.chain.k_rope.cos.node
        rows = _shape(table)[0] if full_size else self.inputs[table].value.shape[0]
        value = self.inputs[node].value.to(torch.int64).reshape(-1)
        return torch.where(value < 0, value + rows, value)

    def argument(self, operand: Any, bases: Mapping[Node, Tensor]) -> Tensor | None:
        if operand is None:
            return None
        if isinstance(operand, TokenView):
            return _rows(self.inputs[operand.node].value, operand)
        if isinstance(operand, RopeTable):
            return self._table(operand)
        if isinstance(operand, CachePlane):
            assert self.cache is not None
            return self.cache.view(operand, bases[operand.base])
        if isinstance(operand, Slots):
            assert self.cache is not None
            return self.cache.slot_mapping(operand, self.inputs)
        value = self.inputs[operand].value
        if value.dtype.is_floating_point or value.ndim == 1:
            return value
        return value.reshape(-1)

    def _table(self, table: RopeTable) -> Tensor:
        value = self.inputs[table.node].value
        if table.part is not None:
            value = value.real if table.part == "real" else value.imag
        start, stop = table.columns
        if table.positions is not None:
            return value[:, start:stop]
        tokens = self.chain.k_rope.x
        dims = [i for i, role in enumerate(table.roles) if isinstance(role, int)]
        axis = table.roles.index("dim")
        value = value.permute(*_first(value.ndim, [*dims, axis]))
        value = value.reshape(*(value.shape[: len(dims) + 1]))[..., start:stop]
        sizes = [self._token_size(s) for s in tokens.token_sizes]
        present = [table.roles[i] for i in dims]
        for role in range(len(sizes)):
            if role not in present:
                value = value.unsqueeze(role)
        return value.expand(*sizes, stop - start).reshape(-1, stop - start)

    def _token_size(self, size: Any) -> int:
        return self.small.get(hint(size), hint(size))

    def _add(self, name: str, operand: Any) -> None:
        if isinstance(operand, TokenView):
            dims = {d: self._token_size(s) for d, s in _token_dims(operand)}
            if operand.merged_heads:
                self._put(operand.node, name, _merged(operand, self.small))
            else:
                self._put(operand.node, name, dims_of(_shape(operand.node), dims))
        elif isinstance(operand, RopeTable):
            self._add_table(name, operand)
        elif isinstance(operand, (CachePlane, Slots)):
            assert self.cache is not None
            for node, value in self.cache.inputs(operand).items():
                self.inputs.setdefault(node, value)
        elif isinstance(operand, Node) and operand not in self.inputs:
            if name == "positions":
                self._put(operand, name, self._by_size(operand))
            else:
                self._put(operand, name, dims_of(_shape(operand)))

    def _add_table(self, name: str, table: RopeTable) -> None:
        shape = _shape(table.node)
        if table.positions is not None:
            rows = min(shape[0], 7)
            self._put(table.node, name, dims_of(shape, {0: rows}))
            if table.positions in self.inputs:  # cos and sin share them
                return
            dims = self._by_size(table.positions)
            self._put(table.positions, "positions", dims, high=rows)
            if any(u.target is torch.ops.aten.index.Tensor for u in table.positions.users):
                # Indexing counts a negative position from the end; other gathers refuse it.
                self.inputs[table.positions].value.view(-1)[:1] -= rows
            return
        sizes = self.chain.k_rope.x.token_sizes
        small = {
            i: self._token_size(sizes[role])
            for i, role in enumerate(table.roles)
            if isinstance(role, int)
        }
        self._put(table.node, name, dims_of(shape, small))
        width = table.columns[1] - table.columns[0]
        axis = table.roles.index("dim")
        shared = self.chain.k_rope.cos.node is self.chain.k_rope.sin.node
        if not table.full and not shared and shape[axis] == 2 * width:
            # The recogniser proved both halves equal; the check must not break that.
            entry = self.inputs[table.node]
            half = entry.value.narrow(axis, table.columns[0], width)
            if self.chain.k_rope.style == "half":
                entry.value.copy_(torch.cat([half, half], axis))
            else:
                entry.value.copy_(half.repeat_interleave(2, axis))

    def _by_size(self, node: Node) -> Dims:
        """Factors of a tensor whose dimensions are token dimensions."""
        shape = _shape(node)
        return dims_of(shape, {i: self.small[s] for i, s in enumerate(shape) if s in self.small})

    def _put(self, node: Node, name: str, dims: Dims, high: int = 1) -> None:
        if node in self.inputs:
            return
        dtype = node.meta["val"].dtype
        shape = small_shape(dims)
        if dtype.is_complex:
            value = torch.randn((*shape, 2), generator=self.generator, dtype=torch.float64)
            value = torch.view_as_complex(value).to(dtype)
        elif dtype.is_floating_point:
            value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            if name.endswith("eps_tensor"):
                value = value.abs() * 1e-5 + 1e-6
            elif name.endswith("_scale"):
                value = value.abs() + 0.25
            elif self.awkward and value.ndim >= 2:
                value = _make_awkward(value)
            value = value.to(dtype)
        else:
            value = torch.randint(0, max(high, 1), shape, generator=self.generator).to(dtype)
        self.inputs[node] = Input(dims, value)


def _make_awkward(value: Tensor) -> Tensor:
    """Outlier channels, exact zeros, tiny numbers and mixed magnitudes."""
    flat = value.reshape(-1)
    flat[::7] *= 1e3
    flat[3::11] = 0.0
    flat[5::13] *= 1e-4
    return value


def small_sizes(operation: Operation, sequences: int, tokens: int) -> dict[int, int]:
    """Small values for the token sizes of the graph (size 1 stays 1)."""
    small: dict[int, int] = {}
    views = [o for o in operation.tensors.values() if isinstance(o, TokenView)]
    # Sequences first: where another operand has their tokens in one dimension, it is their product.
    for operand in sorted(views, key=lambda o: -len(o.token_sizes)):
        sizes = [hint(s) for s in operand.token_sizes]
        wanted = [sequences] * (len(sizes) - 1) + [tokens]
        if operand.merged_heads:
            wanted = [w * operand.heads for w in wanted[-1:]]
        for size, value in zip(sizes, wanted, strict=False):
            if size > 1:
                small.setdefault(size, value)
        total = hint(operand.tokens)
        if total > 1:
            small.setdefault(total, math.prod(small.get(s, s) for s in sizes))
    return small


def token_counts(operation: Operation) -> frozenset[int]:
    """The token counts that are plain numbers in the graph."""
    views = [o for o in operation.tensors.values() if isinstance(o, TokenView)]
    sizes = [s for view in views for s in (*view.token_sizes, view.tokens)]
    return frozenset(s for s in sizes if isinstance(s, int))


def no_count(counts: frozenset[int], size: Any) -> bool:
    """Whether a size is surely no token count: a number, where all counts are symbols."""
    return isinstance(size, int) and size not in counts


def _shape(node: Node) -> tuple[int, ...]:
    try:
        return hints(node.meta["val"].shape)
    except NoHintError as error:
        raise RegionError(str(error), node) from error


def _token_dims(view: TokenView) -> list[tuple[int, Any]]:
    return list(zip(view.order[: view.token_dims], view.token_sizes, strict=False))


def _merged(view: TokenView, small: Mapping[int, int]) -> Dims:
    total = hint(view.tokens)
    dims = list(dims_of(_shape(view.node)))
    dims[view.order[0]] = ((total, small.get(total, total)), (view.heads, view.heads))
    return tuple(dims)


def _first(ndim: int, lead: list[int]) -> list[int]:
    return [*lead, *(d for d in range(ndim) if d not in lead)]


def _rows(value: Tensor, view: TokenView) -> Tensor:
    """``[tokens, heads, dim]`` of a small value."""
    return value.permute(view.order).reshape(-1, view.heads, view.dim)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit (any two NaNs count as equal: their payload is no result)."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    same = a.contiguous().view(width) == b.contiguous().view(width)
    if a.dtype.is_floating_point and a.dtype.itemsize > 1:
        same = same | (a.isnan() & b.isnan())
    return bool(same.all())
