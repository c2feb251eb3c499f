"""Follow the contents of every buffer through a functional graph.

A functional graph has no cache that changes: it has a chain of values, each of which is "the
cache with some more writes in it". The trace gives every such value a :class:`State`: which
buffer it belongs to, which writes its content includes, and which region of the buffer's
storage it shows. Reading a value is then reading that region at that point of the history, in
whatever spelling (slice, permute, scatter back, custom op) the value was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.graph import functional
from fusion.match import cache_view as cv
from fusion.match.cache_view import Region

Version = frozenset[int]
"""The writes (indices into :attr:`Trace.writes`) that a content includes."""

_META_ONLY = {"aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"}
_IN_PLACE = {"aten::index_put_", "aten::index_copy_", "aten::scatter_"}
_ROW_OPS = {"aten::index_put", "aten::_unsafe_index_put", "aten::index_copy", "aten::scatter"}


@dataclass(frozen=True)
class State:
    """What a value shows of a buffer: ``region`` of ``base`` after the writes in ``version``.

    ``above`` are regions known to contain this one (the views that it was cut from). ``strided``
    says that the value really has the region's strides, so that an ``as_strided`` of it can be
    read as one of the base.
    """

    base: Node
    version: Version
    region: Region
    above: tuple[Region, ...] = ()
    strided: bool = True


@dataclass(frozen=True)
class RawWrite:
    """One write to one region, as the graph spells it.

    ``kind``: ``op`` (a registered op, ``argument`` names the cache argument), ``rows``
    (index_put and its kin), ``range`` (slice_scatter, select_scatter of new values) or
    ``opaque`` (an op that changes the buffer in a way nobody registered).
    """

    index: int
    kind: str
    node: Node
    base: Node
    before: Version
    region: Region
    dtype: torch.dtype
    above: tuple[Region, ...]
    argument: str | None = None


@dataclass
class Trace:
    """States of all values of a graph, the writes in graph order, and who reads what."""

    graph: Graph
    states: dict[Node, State] = field(default_factory=dict)
    writes: list[RawWrite] = field(default_factory=list)
    readers: dict[Node, list[tuple[Node, State]]] = field(default_factory=dict)
    """Per base: nodes that read values (not sizes), with the state that they read."""
    chain: dict[Node, set[Node]] = field(default_factory=dict)
    """Per base: nodes that build a new content (writes, scatters, wrappers)."""
    lost: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    """Values cut from a buffer in a way no strides express: (base, node where it was lost)."""
    commits: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    """Base to its ``copy_`` epilogue and the value copied."""
    in_place: list[Node] = field(default_factory=list)
    """Calls that write rows without functionalisation, which fusion does not read."""
    position: dict[Node, int] = field(default_factory=dict)
    _parts: dict[Node, list[State | None]] = field(default_factory=dict)
    _showing: dict[tuple[Node, Version], list[Node]] = field(default_factory=dict)
    _roots: dict[tuple[Node, Version], Node] = field(default_factory=dict)

    ops: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph, ops: frozenset[str] = frozenset()) -> Trace:
        """Trace a graph, one pass over its nodes; ``ops`` are names of registered writing ops."""
        trace = cls(graph, ops=ops)
        for i, node in enumerate(graph.nodes):
            trace.position[node] = i
            trace._visit(node)
        return trace

    def whole(self, base: Node) -> Region:
        """The region that a base itself covers."""
        return Region.of(base.meta["val"])

    def root(self, base: Node, version: Version) -> Node | None:
        """The first value that is the whole base with exactly these writes, as the base lays it."""
        return self._roots.get((base, version))

    def showing(self, base: Node, version: Version) -> list[Node]:
        """Values that show some of a base with exactly these writes, in graph order."""
        return self._showing.get((base, version), [])

    def _set(self, node: Node, state: State | None) -> None:
        if state is None:
            return
        whole = state.region.same(self.whole(state.base))
        if whole and not state.strided:
            # A new buffer with the base's own strides is laid out as the base is.
            state = replace(state, strided=Region.of(node.meta["val"]).same(state.region))
        self.states[node] = state
        self._showing.setdefault((state.base, state.version), []).append(node)
        if whole:
            self._roots.setdefault((state.base, state.version), node)

    def _visit(self, node: Node) -> None:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            if isinstance(value, torch.Tensor) and value.dim() >= 1:
                self._set(node, _fresh(node))
            return
        if node.op != "call_function":
            self._read(node, node.all_input_nodes)
            return
        if functional.is_auto_functionalized(node):
            self._functionalized(node)
            return
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        name = cv.op_name(node)
        if cv.is_getitem(node) and first in self._parts:
            self._set(node, self._parts[first][int(node.args[1])])  # type: ignore[arg-type]
            return
        state = self.states.get(first) if first is not None else None
        if name == "aten::copy" and _replaces(node):
            # The value of `copy(old, new)` is `new`; what it overwrites is not read.
            first = node.args[1]  # type: ignore[assignment]
            state = self.states.get(first) if first is not None else None
        if name in self.ops or (state is not None and name in _IN_PLACE):
            self.in_place.append(node)
        if first is not None and first in self.lost and _passes_on(node, name):
            self.lost[node] = self.lost[first]
            return
        if name == "aten::copy_" and first is not None:
            self._copy_back(node, first)
        elif state is None:
            self._read(node, node.all_input_nodes)
        elif name in _META_ONLY:
            return
        elif name == "aten::copy" and _replaces(node):
            self._set(node, replace(state, strided=False))
        elif cv.is_view(node):
            self._view(node, state)
        elif name == "aten::as_strided":
            self._as_strided(node, state)
        elif cv.is_split(node):
            self._split(node, state)
        elif name in _ROW_OPS:
            assert first is not None
            self._read(node, [n for n in node.all_input_nodes if n is not first])
            self._set(node, self._write(node, state, "rows"))
        elif cv.is_scatter(node):
            self._scatter(node, state)
        else:
            self._read(node, node.all_input_nodes)

    def _read(self, node: Node, inputs: list[Node]) -> None:
        for source in inputs:
            state = self.states.get(source)
            if state is not None:
                self.readers.setdefault(state.base, []).append((node, state))
            elif source in self._parts:
                for part in self._parts[source]:
                    if part is not None:
                        self.readers.setdefault(part.base, []).append((node, part))

    def _view(self, node: Node, state: State) -> None:
        region = cv.derive(state.region, node)
        if region is None:
            self._lose(node, state)
            return
        copied = cv.op_name(node) in cv.COPIES
        strided = state.strided and not copied and Region.of(node.meta["val"]).same(region)
        above = state.above if region.same(state.region) else (state.region, *state.above)
        self._set(node, State(state.base, state.version, region, above, strided))

    def _as_strided(self, node: Node, state: State) -> None:
        if not state.strided:
            self._lose(node, state)
            return
        a = cv.arguments(node)
        offset = a.get("storage_offset")
        region = Region(
            cv.numbers(a["size"]),
            cv.numbers(a["stride"]),
            state.region.offset if offset is None else cv.number(offset),
        )
        whole = self.whole(state.base)
        self._set(node, State(state.base, state.version, region, (whole,)))

    def _lose(self, node: Node, state: State) -> None:
        self.lost[node] = (state.base, node)
        self.readers.setdefault(state.base, []).append((node, state))

    def _split(self, node: Node, state: State) -> None:
        regions = cv.pieces(state.region, node)
        above = (state.region, *state.above)
        self._parts[node] = [
            None if r is None else State(state.base, state.version, r, above, state.strided)
            for r in regions
        ]

    def _write(
        self,
        node: Node,
        state: State,
        kind: str,
        argument: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        write = RawWrite(
            len(self.writes),
            kind,
            node,
            state.base,
            state.version,
            state.region,
            node.meta["val"].dtype if dtype is None else dtype,
            (state.region, *state.above),
            argument,
        )
        self.writes.append(write)
        self.chain.setdefault(state.base, set()).add(node)
        return replace(state, version=state.version | {write.index}, strided=False)

    def _scatter(self, node: Node, state: State) -> None:
        source = cv.arguments(node)["src"]
        assert isinstance(source, Node)
        part = cv.scattered(state.region, node)
        # The numbers of an as_strided_scatter mean a value that is laid out as the base is.
        foreign = cv.op_name(node) == "aten::as_strided_scatter" and not state.strided
        if part is None or foreign:
            self._lose(node, state)
            return
        back = self.states.get(source)
        if back is not None and back.base is state.base and back.version != state.version:
            merged = self._merge(state, back, part)
            if merged is None:
                self._lose(node, state)
                return
            self.chain.setdefault(state.base, set()).add(node)
            self._set(node, replace(state, version=merged, strided=False))
            return
        if source in self.lost:
            self.lost[node] = self.lost[source]
            return
        self._read(node, [source])
        self._set(node, self._write(node, state, "range"))

    def _merge(self, into: State, back: State, part: Region) -> Version | None:
        """The content of ``into`` with ``part`` taken from ``back``, if it has a name."""
        if not part.same(back.region):
            return None
        for index in back.version - into.version:
            if not any(r.same(part) for r in self.writes[index].above):
                return None
        for index in into.version - back.version:
            if not self.writes[index].region.disjoint(part):
                return None
        return into.version | back.version

    def _copy_back(self, node: Node, target: Node) -> None:
        source = node.args[1]
        state = self.states.get(target)
        if target.op in ("placeholder", "get_attr") and isinstance(source, Node):
            self.commits[target] = (node, source)
            got = self.states.get(source)
            if got is not None and got.base is target:
                return
            if source in self.lost and self.lost[source][0] is target:
                return
            self._read(node, [source])
            return
        if state is not None:
            self.in_place.append(node)
            self._write(node, state, "opaque", "", _dtype(state.base))
        self._read(node, [n for n in node.all_input_nodes if n is not target])

    def _functionalized(self, node: Node) -> None:
        op = functional.mutable_op(node)
        names = functional.mutated_names(op)
        views: dict[str, functional.ArgView | None]
        if node.target is functional.AUTO_FUNCTIONALIZED_V2:
            bases: list[Any] = list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
            views = functional.arg_views(node)
        else:
            bases = [node.kwargs[n] for n in names]
            views = {n: functional.ArgView(i, "base") for i, n in enumerate(names)}
        used = [n for n in node.all_input_nodes if n not in bases]
        self._read(node, used)
        out: list[State | None] = [None] * functional.returns_count(op)
        current: list[State | None] = []
        for base in bases:
            state = self.states.get(base) if isinstance(base, Node) else None
            known = state is not None or not isinstance(base, Node) or base in self.lost
            if not known and isinstance(base.meta.get("val"), torch.Tensor):
                state = _fresh(base)
                self._set(base, state)
            current.append(state)
        fresh = list(current)
        for name in names:
            view = views.get(name)
            state = current[view.base_index] if view is not None else None
            if view is None or state is None:
                continue
            region = _argument_region(state, view)
            kind = "opaque" if region is None else "op"
            seen = replace(
                state,
                region=state.region if region is None else region,
                above=(state.region, *state.above),
            )
            write = self._write(node, seen, kind, name, _dtype(bases[view.base_index]))
            old = fresh[view.base_index]
            assert old is not None
            version = old.version | write.version
            fresh[view.base_index] = replace(old, version=version, strided=False)
        self._parts[node] = out + fresh


def _replaces(node: Node) -> bool:
    """Whether ``copy(old, new)`` only takes over ``new``: no conversion, no broadcasting."""
    old, new = node.args[0], node.args[1]
    assert isinstance(old, Node) and isinstance(new, Node)
    a, b = old.meta["val"], new.meta["val"]
    return a.dtype == b.dtype and cv.all_equal(tuple(a.shape), tuple(b.shape))


def _passes_on(node: Node, name: str) -> bool:
    """Whether a value cut from a buffer in an unknown way lives on in the node."""
    rewriting = cv.is_scatter(node) or name in _ROW_OPS or name == "aten::copy"
    return rewriting or cv.is_view(node) or cv.is_getitem(node) or cv.is_split(node)


def _fresh(node: Node) -> State:
    return State(node, frozenset(), Region.of(node.meta["val"]))


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _argument_region(state: State, view: functional.ArgView) -> Region | None:
    """The region that one mutated argument covers, given the state of its base."""
    if view.kind in ("base", "alias"):
        return state.region
    if view.kind == "slice":
        start, end = cv.number(view.start), cv.number(view.end)
        return state.region.slice(view.dim, start, end, 1, end - start)
    if not state.strided:
        return None
    return Region(cv.numbers(view.size), cv.numbers(view.stride), cv.number(view.storage_offset))
