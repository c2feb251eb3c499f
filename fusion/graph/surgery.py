"""Put one call of a canonical operation where a chain of nodes was, or leave the graph alone.

:func:`rewrite` is a transaction: it builds operand views, the call (inside
``auto_functionalized_v2`` for an operation that writes a cache, so that Inductor can update the
cache in place), moves every later reader to the new values, puts the nodes in order, verifies,
and only then erases what became dead. Anything that stands in the way raises
:class:`SurgeryError` with a reason and leaves the graph as it was to the letter.

The nodes that stand for "the cache after this write" keep their identity (they become the
outputs of the new call), so facts about later writes to the same buffer stay valid.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.graph.call import Caller
from fusion.graph.emit import EmitError, Emitter, SurgeryError, latest
from fusion.graph.inplace import decompose_mutations
from fusion.graph.operands import (
    PlaneLike,
    SlotsLike,
    TableLike,
    TokenViewLike,
    WriteLike,
    kind_of,
)
from fusion.graph.refusals import (
    refuse_aliases,
    refuse_cycle,
    refuse_old_readers,
    refuse_side_effects,
)
from fusion.graph.shared import shared_of
from fusion.graph.sizes import NoSuchSize
from fusion.graph.strides import reaches_output, restride
from fusion.graph.transaction import Transaction
from fusion.graph.values import (
    all_equal,
    is_view,
    plain,
    same_geometry,
    same_strides,
)
from fusion.reason import Reason

__all__ = ["Rewritten", "SurgeryError", "decompose_mutations", "rewrite"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Rewritten:
    """What a rewrite did: the call, all new nodes, and the names of the erased ones."""

    call: Node
    nodes: tuple[Node, ...]
    erased: tuple[str, ...]


def rewrite(
    graph: Graph,
    op: Any,
    operands: Mapping[str, Any],
    *,
    write: WriteLike | None = None,
    outputs: Mapping[int, Sequence[TokenViewLike]] | None = None,
    tokens: TokenViewLike | None = None,
    anchor: Node | None = None,
    watch: Callable[[str], None] | None = None,
    verify: Callable[[Node], None] | None = None,
) -> Rewritten:
    """Replace a write and/or some values by one call of ``op``.

    ``operands`` maps every argument name of ``op`` to a fact (token view, rope table, cache
    plane, slots), a node, a SymInt or a constant; those left out keep the schema's default.
    ``write`` is the cache write that the call takes over. ``outputs[i]`` are old values, seen
    as ``[tokens, heads, dim]``, that the call's ``i``-th return replaces. ``tokens`` is the
    view whose token dimensions rope tables and positions are expanded to (default: the operand
    called ``key``). New nodes inherit ``anchor``'s provenance (default: the write's).

    Raises :class:`SurgeryError`; then the graph is unchanged. ``watch`` is called with a text
    before every change, for tests that inject failures. ``verify`` is given the new call before
    anything is final; what it raises undoes the rewrite.
    """
    site = shared_of(graph)
    if anchor is None and write is not None:
        anchor = write.anchor
    transaction = Transaction(graph, watch)
    emitter = Emitter(transaction, site.sizes, site.shared, site.fake_mode, anchor)
    guards = _guards(site.shape_env)
    try:
        surgeon = _Surgeon(emitter, op, operands, write, dict(outputs or {}), tokens, anchor)
        call = surgeon.operate()
        if _guards(site.shape_env) != guards:
            raise SurgeryError(Reason("internal.error", "the rewrite would add a guard"))
        if verify is not None:
            verify(call)
        new = tuple(transaction.created)
        erased = transaction.commit(surgeon.dead())
        return Rewritten(call, new, erased)
    except BaseException as error:
        transaction.rollback()
        emitter.forget()
        if isinstance(error, SurgeryError) or not isinstance(error, Exception):
            raise
        if isinstance(error, (EmitError, NoSuchSize)):
            raise SurgeryError(Reason("match.value", str(error))) from error
        text = f"{type(error).__name__}: {error}"
        raise SurgeryError(Reason("internal.error", text)) from error


def _guards(shape_env: Any) -> int:
    return len(shape_env.guards) if shape_env is not None else 0


class _Surgeon:
    """One rewrite."""

    def __init__(
        self,
        emitter: Emitter,
        op: Any,
        operands: Mapping[str, Any],
        write: WriteLike | None,
        outputs: dict[int, Sequence[TokenViewLike]],
        tokens: TokenViewLike | None,
        anchor: Node | None,
    ) -> None:
        self.emit = emitter
        self.change = emitter.transaction
        self.graph = emitter.graph
        self.op = op
        self.operands = operands
        self.write = write
        self.outputs = outputs
        key = operands.get("key")
        self.tokens = tokens if tokens is not None else key
        self.anchor = anchor
        self._main: dict[int, Node] = {}
        self._orphans: list[Node] = []
        self._values: dict[Node, Any] = {}
        self.replaced: list[Node] = [v.node for views in outputs.values() for v in views]
        if write is not None:
            self.replaced += [*write.results, *getattr(write, "views", {})]

    def dead(self) -> list[Node]:
        """Where erasing starts."""
        written = self.write.nodes if self.write is not None else ()
        return [*self.replaced, *written, *self._orphans]

    def operate(self) -> Node:
        """Everything up to, and not including, erasing; returns the new call."""
        self._values = {node: node.meta.get("val") for node in self.replaced}
        sources = self._sources()
        refuse_cycle(sources, self.replaced)
        values = {
            name: self._operand(name, given)
            for name, given in self.operands.items()
            if kind_of(given) is not PlaneLike  # reaches the call as a view of its base
        }
        inputs = [v for v in values.values() if isinstance(v, Node)]
        if self.write is not None:
            refuse_aliases(inputs, self.write.bases)
        behind = [*inputs, *sources]
        if self.write is not None:
            behind += [n for n in (self.write.anchor, *self.write.bases) if n is not None]
        before = latest(behind).next
        while before.op == "placeholder":
            before = before.next
        refuse_side_effects(self.replaced, before)
        planes = {n: g for n, g in self.operands.items() if kind_of(g) is PlaneLike}
        bases = self.write.bases if self.write is not None else None
        call, returns, contents = Caller(self.emit, self.op, bases).call(values, planes, before)
        keep: dict[Node, Node] = {}
        for index, views in self.outputs.items():
            got = (
                self._item(call, index, before) if returns != 1 or self.write is not None else call
            )
            for view in views:
                new = self._shaped(got, view, before)
                keep[view.node] = new
        if self.write is not None:
            keep |= self._contents(call, returns, contents, before)
        for old, new in keep.items():
            if old is not new:
                self.change.replace_uses(old, new, keep=self._dying)
        self._order(call)
        self._refresh(keep)
        self._verify(call, keep)
        return call

    # Operands

    def _sources(self) -> list[Node]:
        """Every node that the call reads, before views are made of them."""
        found: list[Node] = []
        for given in self.operands.values():
            kind = kind_of(given)
            if isinstance(given, Node):
                found.append(given)
            elif kind is PlaneLike:
                found.append(given.base)
            elif kind is not None:
                wanted = [
                    given.node,
                    getattr(given, "offset", None),
                    getattr(given, "positions", None),
                ]
                if getattr(given, "kind", None) == "range":
                    wanted[0] = getattr(given, "start", None)
                found += [n for n in wanted if isinstance(n, Node)]
        return found

    def _operand(self, name: str, given: Any) -> Any:
        kind = kind_of(given)
        if kind is TokenViewLike:
            return self.emit.tokens(given)
        if kind is TableLike:
            return self.emit.table(given, self.tokens)
        if kind is SlotsLike:
            assert self.write is not None
            return self.emit.slots(given, self.write.key_plane)
        if name == "positions" and isinstance(given, Node):
            table = self.operands["cos"].node.meta["val"]
            return self.emit.positions(given, table.shape[0])
        return given

    def _item(self, call: Node, index: int, before: Node) -> Node:
        value = call.meta["val"][index]
        return self.emit.call(operator.getitem, (call, index), before=before, value=value)

    # Results

    def _shaped(self, got: Node, view: TokenViewLike, before: Node) -> Node:
        """A return in the shape, dtype and strides of the value that it replaces."""
        new = self.emit.untoken(got, view, before)
        old, value = view.node.meta["val"], new.meta["val"]
        if old.dtype != value.dtype or not all_equal(old.shape, value.shape):
            raise SurgeryError(
                Reason(
                    "internal.error", "the result does not look like the value it replaces",
                    have=f"{value.dtype}{list(value.shape)}",
                    need=f"{old.dtype}{list(old.shape)}", node=view.node.name,
                )
            )  # fmt: skip
        if not same_strides(old, value):
            seen = reaches_output(view.node)
            new = restride(new, old, functools.partial(self.emit.call, before=before), gaps=seen)
            if seen and not same_strides(old, new.meta["val"]):
                raise SurgeryError(
                    Reason(
                        "safety.output-strides",
                        "a graph output has strides that the operation's result cannot be given",
                        have=str(tuple(new.meta["val"].stride())),
                        need=str(tuple(old.stride())), node=view.node.name,
                    )
                )  # fmt: skip
        if same_strides(old, new.meta["val"]):
            # The old metadata keeps telling which later values are views of this one.
            new.meta["val"] = old
        return new

    def _contents(
        self, call: Node, returns: int, contents: tuple[torch.Tensor, ...], before: Node
    ) -> dict[Node, Node]:
        """Old results -> new ones. The last full content of each base becomes the output itself."""
        write = self.write
        assert write is not None
        keep: dict[Node, Node] = {}
        main = {index: node for node, index in write.results.items()}
        main.update(getattr(write, "final", {}))
        for index, node in main.items():
            self._orphans += node.all_input_nodes
            self.change.set_call(node, operator.getitem, (call, returns + index), "getitem")
            if not same_geometry(node.meta["val"], contents[index]):
                self.change.set_meta(node, {**node.meta, "val": contents[index]})
            keep[node] = node
        for node, index in write.results.items():
            if node is not main[index]:
                keep[node] = main[index]
        for node, (index, region) in getattr(write, "views", {}).items():
            keep[node] = self._strided(main, index, region, call, returns, before, contents)
        self._main = main
        return keep

    def _strided(
        self,
        main: dict[int, Node],
        index: int,
        region: Any,
        call: Node,
        returns: int,
        before: Node,
        contents: tuple[torch.Tensor, ...],
    ) -> Node:
        """A part of a new content, for readers of a value that showed only that part."""
        if index not in main:
            main[index] = self._item(call, returns + index, before)
        size, stride = (
            [self.emit.size(s, before) for s in part] for part in (region.size, region.stride)
        )
        offset = self.emit.size(region.offset, before)
        # Made behind the content node, which is put in its place by `_order`.
        with self.emit.fake(), torch.no_grad():
            value = torch.as_strided(
                contents[index], plain(region.size), plain(region.stride), region.offset
            )
        args = (main[index], size, stride, offset)
        return self.emit.call(aten.as_strided.default, args, before=before, value=value)

    # Order and verification

    @property
    def _dying(self) -> frozenset[Node]:
        if self.write is None:
            return frozenset()
        return self.write.nodes - set(self._main.values())

    def _order(self, call: Node) -> None:
        """Move what depends on the new values behind them, keeping its order."""
        last = call
        for node in self._main.values():
            self.change.move(node, last)
            last = node
        created = set(self.change.created)
        late = {n for n in created if not n < call} | set(self._main.values())
        users = [u for n in late for u in n.users if u < call]
        moving: list[Node] = []
        node = min(users, default=call)
        while node is not call:
            if node not in created and any(i in late for i in node.all_input_nodes):
                late.add(node)
                moving.append(node)
            node = node.next
        last = latest([call, *created, *self._main.values()])
        for node in moving:
            self.change.move(node, last)
            last = node

    def _refresh(self, keep: dict[Node, Node]) -> None:
        """Views of exchanged values get metadata of the new storage and strides.

        Passes that look for aliases (Inductor's re-inplacing) go by the storage in metadata.
        A value that took over the old metadata needs nothing.
        """
        dying, created = self._dying, set(self.change.created)
        work = [new for old, new in keep.items() if self._values[old] is not new.meta["val"]]
        while work:
            for user in work.pop().users:
                if user in created or user in dying or not is_view(user):
                    continue
                value = self.emit.evaluate(user.target, user.args, dict(user.kwargs))
                self.change.set_meta(user, {**user.meta, "val": value})
                work.append(user)

    def _verify(self, call: Node, keep: dict[Node, Node]) -> None:
        """What must hold before anything is erased."""
        dying = self._dying
        for node in [*self.change.created, *keep.values(), *self._main.values()]:
            if "val" not in node.meta:
                raise RuntimeError(f"new node {node.name} has no metadata")
            for source in node.all_input_nodes:
                if not source < node:
                    raise RuntimeError(f"{node.name} stands before its input {source.name}")
            for user in node.users:
                if not node < user and user not in dying:
                    raise RuntimeError(f"{user.name} stands before its input {node.name}")
        for old, new in keep.items():
            left = [u for u in old.users if old is not new and u not in dying]
            if left:
                raise RuntimeError(f"{left[0].name} still reads {old.name}")
        if self.write is not None:
            refuse_old_readers(call, self.write.bases, dying)
