"""Make new nodes with metadata, and the operand views that a canonical operation wants.

Every new node gets ``meta["val"]`` (computed on fake tensors) and the provenance of an anchor.
Views that several sites want, such as cos and sin flattened to ``[T, R]``, are made once a
graph, right behind their source, so that every later site can read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.graph.operands import PlaneLike, SlotsLike, TableLike, TokenViewLike
from fusion.graph.sizes import Sizes
from fusion.graph.transaction import Transaction
from fusion.graph.values import known
from fusion.reason import Reason

aten = torch.ops.aten
prims = torch.ops.prims
_PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack", "fwd_source_fn_stack")


class EmitError(ValueError):
    """An operand cannot be brought into the form that the operation wants."""


class SurgeryError(Exception):
    """A rewrite was refused or failed; the graph is as it was. ``reason`` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def latest(nodes: Iterable[Node]) -> Node:
    """The last of some nodes in graph order."""
    return max(nodes)


class Emitter:
    """Makes nodes inside one transaction."""

    def __init__(
        self,
        transaction: Transaction,
        sizes: Sizes,
        shared: dict[Any, Node],
        fake_mode: Any,
        anchor: Node | None,
    ) -> None:
        self.transaction = transaction
        self.graph: Graph = transaction.graph
        self._sizes = sizes
        self._shared = shared
        self._fake_mode = fake_mode
        self._meta = {k: anchor.meta[k] for k in _PROVENANCE if anchor and k in anchor.meta}
        self.fresh: list[Any] = []

    def fake(self) -> AbstractContextManager[Any]:
        """Within it, calls on metadata compute metadata."""
        return self._fake_mode if self._fake_mode is not None else nullcontext()

    def evaluate(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives on the metadata of its arguments."""

        def value(arg: Any) -> Any:
            return arg.meta["val"] if isinstance(arg, Node) else arg

        args = torch.fx.node.map_aggregate(args, value)
        kwargs = torch.fx.node.map_aggregate(kwargs, value)
        with self.fake(), torch.no_grad():
            return target(*args, **kwargs)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        before: Node,
        value: Any = None,
    ) -> Node:
        """A new node before another; ``value`` is its metadata where it is known already."""
        kwargs = kwargs or {}
        if value is None:
            value = self.evaluate(target, args, kwargs)
        node = self.transaction.create(target, args, kwargs, before)
        node.meta.update(self._meta)
        node.meta["val"] = value
        return node

    def _behind(self, *sources: Node) -> Node:
        """The node before which something that reads the sources may be put first."""
        last = latest(sources)
        following = last.next
        while following.op == "placeholder":
            following = following.next
        return following

    def size(self, size: Any, before: Node) -> Any:
        """A size as an argument: an ``int``, or a node right before ``before``."""
        return self._sizes.argument(
            size, lambda target, args, value: self.call(target, args, before=before, value=value)
        )

    def shape(self, sizes: Iterable[Any], before: Node) -> list[Any]:
        """A shape argument; one symbolic size is spelled ``-1``, more become nodes."""
        given = list(sizes)
        symbolic = [i for i, s in enumerate(given) if not isinstance(s, int)]
        if len(symbolic) == 1:
            given[symbolic[0]] = -1
            return given
        return [self.size(s, before) for s in given]

    def once(self, key: Any, build: Any) -> Node:
        """A shared node: built at its first use, taken back with the transaction."""
        node = self._shared.get(key)
        if node is None or node._erased:
            node = build()
            self._shared[key] = node
            self.fresh.append(key)
        return node

    def forget(self) -> None:
        """Drop the shared nodes of a transaction that was taken back."""
        for key in self.fresh:
            self._shared.pop(key, None)
        self.fresh = []

    # Operands, each returning a node (or None).

    def tokens(self, view: TokenViewLike) -> Node:
        """``[tokens, heads, dim]`` of a token view."""
        known_by = (view.order, view.token_dims, view.heads, view.dim, view.merged_heads)
        key = ("tokens", view.node, *known_by)
        return self.once(key, lambda: self._tokens(view))

    def _tokens(self, view: TokenViewLike) -> Node:
        node, before = view.node, self._behind(view.node)
        if view.order != tuple(range(len(view.order))):
            node = self.call(aten.permute.default, (node, list(view.order)), before=before)
        if len(view.order) != 3 or view.token_dims != 1 or view.merged_heads:
            rows = view.tokens if isinstance(view.tokens, int) else -1
            shape = [rows, view.heads, view.dim]
            node = self.call(aten.reshape.default, (node, shape), before=before)
        return node

    def untoken(self, node: Node, view: TokenViewLike, before: Node) -> Node:
        """The inverse: a ``[tokens, heads, dim]`` result in the shape that the view's node has."""
        heads = [view.heads] if len(view.order) == view.token_dims + 2 else []
        if len(view.order) != 3 or view.token_dims != 1 or view.merged_heads:
            shape = self.shape([*view.token_sizes, *heads, view.dim], before)
            node = self.call(aten.reshape.default, (node, shape), before=before)
        if view.order != tuple(range(len(view.order))):
            inverse = [view.order.index(d) for d in range(len(view.order))]
            node = self.call(aten.permute.default, (node, inverse), before=before)
        return node

    def table(self, table: TableLike, tokens: TokenViewLike | None) -> Node:
        """cos or sin as ``[tokens, width]``, or the table itself where positions index it."""
        sizes = () if tokens is None or table.positions is not None else tokens.token_sizes
        known_by = (table.node, table.roles, table.columns, table.part, table.positions)
        key = ("table", *known_by, tuple(map(str, sizes)))
        return self.once(key, lambda: self._table(table, tuple(sizes)))

    def _table(self, table: TableLike, sizes: tuple[Any, ...]) -> Node:
        node, before = table.node, self._behind(table.node)
        value = node.meta["val"]
        roles = table.roles if table.positions is None else (0, "dim")
        axis = roles.index("dim")
        start, end = table.columns
        if table.part is not None:  # cos and sin are the components of one complex table
            pairs = self.call(aten.view_as_real.default, (node,), before=before)
            part = ("real", "imag").index(table.part)
            node = self.call(aten.select.int, (pairs, -1, part), before=before)
        if not (start == 0 and known(value.shape[axis] == end)):
            node = self.call(aten.slice.Tensor, (node, axis, start, end), before=before)
        elif not isinstance(value.shape[axis], int) and table.positions is None:
            # Known to be this number, but spelled otherwise (and so are the strides): a reshape
            # would want a guard. The copy is of a few numbers a token, and Inductor fuses it.
            shape = [end if i == axis else -1 for i in range(value.dim())]
            node = self.call(aten.expand.default, (node, shape), before=before)
            if len(sizes) != 1:
                dense = {"memory_format": torch.contiguous_format}
                node = self.call(aten.clone.default, (node,), dense, before=before)
        if table.positions is not None:
            return node
        present = sorted(r for r in roles if isinstance(r, int))
        ones = [i for i, r in enumerate(roles) if r is None]
        order = [*ones, *(roles.index(r) for r in present), axis]
        if order != list(range(len(order))):
            node = self.call(aten.permute.default, (node, order), before=before)
        missing = [i for i in range(len(sizes)) if i not in present]
        # Every token dimension gets an axis: drop the ones, add those that are broadcast.
        if ones:
            node = self.call(aten.squeeze.dims, (node, list(range(len(ones)))), before=before)
        for i in missing:
            node = self.call(aten.unsqueeze.default, (node, i), before=before)
        if not all(known(sizes[i] == 1) for i in missing):
            shape = [self.size(s, before) for s in sizes] + [end - start]
            node = self.call(aten.expand.default, (node, shape), before=before)
        if len(sizes) != 1:
            rows = _product(sizes)
            shape = [rows if isinstance(rows, int) else -1, end - start]
            node = self.call(aten.reshape.default, (node, shape), before=before)
        return node

    def positions(self, node: Node, rows: Any) -> Node:
        """Integer positions, one per token in their order, into a table of ``rows`` rows: ``[T]``.

        A negative one counts from the end, as in torch's own indexing; the canonical operation
        would clamp it.
        """
        return self.once(("positions", node, str(rows)), lambda: self._positions(node, rows))

    def _positions(self, node: Node, rows: Any) -> Node:
        value, before = node.meta["val"], self._behind(node)
        if value.dim() != 1:
            node = self.call(aten.reshape.default, (node, [-1]), before=before)
        return self._wrapped(node, rows, before)

    def slots(self, slots: SlotsLike, plane: PlaneLike) -> Node:
        """The canonical slot of every row, int64 (or as it is for a slot mapping), ``[N]``."""
        blocks, page = plane.size[:2]
        what: tuple[Any, ...] = (slots.node, slots.offset)
        if slots.kind == "range":
            start: Any = getattr(slots, "start", 0)
            what = (start if isinstance(start, Node) else str(start), str(slots.length))  # type: ignore[attr-defined]
        key = ("slots", *what, slots.kind, str(slots.batch), str((blocks, page)))
        return self.once(key, lambda: self._slots(slots, blocks, page))

    def _slots(self, slots: SlotsLike, blocks: Any, page: Any) -> Node:
        node = slots.node
        if slots.kind == "range":
            return self._range(slots, blocks, page)
        before = self._behind(node, *([slots.offset] if slots.offset is not None else []))
        if slots.kind == "slots":
            pass
        elif slots.kind == "index" and slots.batch is None:
            node = self._wrapped(node, blocks * page, before)
        elif slots.kind == "index":
            node = self._batched(self._wrapped(node, page, before), slots.batch, page, before)
        else:  # block_offset
            assert slots.offset is not None
            block = self._wrapped(node, blocks, before)
            offset = self._wrapped(slots.offset, page, before)
            start = self.call(aten.mul.Tensor, (block, self.size(page, before)), before=before)
            node = self.call(aten.add.Tensor, (start, offset), before=before)
        if node.meta["val"].dim() != 1:
            node = self.call(aten.reshape.default, (node, [-1]), before=before)
        return node

    def _range(self, slots: Any, blocks: Any, page: Any) -> Node:
        """Slots ``start`` to ``start + length``, in every sequence where the write has a batch."""
        device = slots.node.meta["val"].device
        if isinstance(slots.start, Node):
            before = self._behind(slots.start)
        else:
            before = self._behind(next(iter(self.graph.nodes)))
        steps = self._iota(slots.length, device, before)
        if not (isinstance(slots.start, int) and slots.start == 0):
            start = self.size(slots.start, before)
            steps = self.call(aten.add.Tensor, (steps, start), before=before)
        if slots.batch is not None and not known(blocks == 1):
            steps = self._batched(steps, blocks, page, before)
            steps = self.call(aten.reshape.default, (steps, [-1]), before=before)
        return steps

    def _iota(self, length: Any, device: torch.device, before: Node) -> Node:
        options = {"start": 0, "step": 1, "dtype": torch.int64, "device": device}
        options["requires_grad"] = False
        return self.call(prims.iota.default, (self.size(length, before),), options, before=before)

    def _batched(self, node: Node, batch: Any, page: Any, before: Node) -> Node:
        """``b * page + position`` for every sequence, ``[batch, positions]``."""
        if known(batch == 1):
            return node
        block = self._iota(batch, node.meta["val"].device, before)
        start = self.call(aten.mul.Tensor, (block, self.size(page, before)), before=before)
        start = self.call(aten.unsqueeze.default, (start, 1), before=before)
        return self.call(aten.add.Tensor, (start, node), before=before)

    def _wrapped(self, node: Node, length: Any, before: Node) -> Node:
        """An index as int64, counted from the front where it counts from the end."""
        if node.meta["val"].dtype != torch.int64:
            node = self.call(prims.convert_element_type.default, (node, torch.int64), before=before)
        if non_negative(node):
            return node
        low = self.call(aten.lt.Scalar, (node, 0), before=before)
        up = self.call(aten.add.Tensor, (node, self.size(length, before)), before=before)
        if node.meta["val"].device.type == "cpu" and isinstance(length, int):
            # Too far below is an error for torch and padding for the operation. Here kernels find
            # what is too large; a GPU would be asked for an address.
            far = self.call(aten.lt.Scalar, (up, 0), before=before)
            options = {"dtype": torch.int64, "device": torch.device("cpu"), "pin_memory": False}
            outside = self.call(aten.full.default, ([], length), options, before=before)
            up = self.call(aten.where.self, (far, outside, up), before=before)
        return self.call(aten.where.self, (low, up, node), before=before)


def _product(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


_MOVES = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.expand.default,
    aten.clone.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    prims.convert_element_type.default, aten._to_copy.default,
}  # fmt: skip


def non_negative(node: Any, depth: int = 12) -> bool:
    """Whether an integer tensor (or number) is known to have no negative entry."""
    if isinstance(node, (int, float)):
        return node >= 0
    if not isinstance(node, Node) or depth == 0:
        return False
    target: Any = node.target
    if target in _MOVES:
        # A cast to a narrower integer could wrap around.
        wide = _is_integer(node.args[0]) and _width(node) >= _width(node.args[0])
        return wide and non_negative(node.args[0], depth - 1)
    if target is prims.iota.default:
        return non_negative(node.kwargs.get("start", -1)) and non_negative(
            node.kwargs.get("step", -1)
        )
    if target in (aten.remainder.Scalar, aten.remainder.Tensor):
        divisor = node.args[1]
        return isinstance(divisor, int) and divisor > 0
    if target in (aten.add.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.mul.Scalar):
        plain = len(node.args) == 2 and not node.kwargs
        return plain and all(non_negative(a, depth - 1) for a in node.args)
    if target is aten.clamp_min.default or target is aten.clamp.default:
        return len(node.args) > 1 and non_negative(node.args[1], depth - 1)
    return target is aten.where.self and all(non_negative(a, depth - 1) for a in node.args[1:])


def _width(node: Any) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _is_integer(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
