"""Find KV-cache writes: which rows go to which slots of which cache, in any spelling.

:func:`find_cache_writes` reads a functional graph (AOTAutograd's, Inductor's or an exported one)
and answers with one :class:`~fusion.match.facts.CacheWrite` per layer, or a
:class:`~fusion.match.facts.Miss` that says why a write was not understood. It never changes the
graph, and its cost is linear in the graph.

What is read: registered custom ops (``fusion::kv_cache_write`` and those added by
:func:`register_cache_write`) inside ``auto_functionalized`` v1 or v2 with every encoding of
views; ``index_put`` by slots, by block and offset, or by position in a static cache, on any
strided view of a base and through any chain of scatters back into it; ``index_copy``;
``scatter`` with an expanded index; a range of positions (``slice_scatter``). Two writes are one
site when they go to the same slots of two planes of one geometry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node

from fusion.graph import functional
from fusion.match import cache_view as cv
from fusion.match.cache_packed import split_packed
from fusion.match.cache_roles import key_and_value
from fusion.match.cache_rows import Rows, read_rows, tokens_of
from fusion.match.cache_trace import RawWrite, Trace
from fusion.match.cache_view import Region
from fusion.match.facts import CachePlane, CacheWrite, Miss, Slots
from fusion.reason import Reason


@dataclass(frozen=True)
class ViewedCacheWrite(CacheWrite):
    """A :class:`CacheWrite` some of whose results show only a part of a base.

    ``views`` maps such a node to (index into ``bases``, region of the base's storage).
    ``final`` maps an index into ``bases`` to the one result that later writes start from.
    ``twins`` maps V's index nodes to K's equal ones where the graph computes them twice.
    """

    views: Mapping[Node, tuple[int, Region]] = field(repr=False, hash=False, default_factory=dict)
    final: Mapping[int, Node] = field(repr=False, hash=False, default_factory=dict)
    twins: Mapping[Node, Node] = field(repr=False, hash=False, default_factory=dict)


@dataclass(frozen=True)
class OpRoles:
    """Which argument of a cache-writing custom op is which, by argument name.

    ``k_scale`` and ``v_scale`` name optional tensors that divide (as in ``kv_cache_write``).
    ``layout`` names a string argument with the KV layout, if the op has one. ``caches`` must be
    NHD views ``[num_blocks, block_size, heads, dim]`` and negative slots must write nothing.
    """

    key: str = "key"
    value: str = "value"
    key_cache: str = "key_cache"
    value_cache: str = "value_cache"
    slots: str = "slot_mapping"
    k_scale: str | None = "k_scale"
    v_scale: str | None = "v_scale"
    layout: str | None = "kv_layout"


_OPS: dict[str, OpRoles] = {"fusion::kv_cache_write": OpRoles()}


def registered() -> tuple[tuple[str, str], ...]:
    """What :func:`register_cache_write` was told, sorted: it decides what is rewritten."""
    return tuple(sorted((name, repr(roles)) for name, roles in _OPS.items()))


def register_cache_write(name: str, roles: OpRoles) -> None:
    """Teach fusion a foreign op (``"namespace::name"``) that means what ``kv_cache_write`` means.

    Registering the same roles twice is harmless; other roles for a known name raise
    ``ValueError``.
    """
    if _OPS.setdefault(name, roles) != roles:
        raise ValueError(f"{name} is already registered with {_OPS[name]}")


def roles_of(op: Any) -> OpRoles | None:
    """Which argument of a registered op is which; None for an op that nobody registered."""
    return _OPS.get(op._schema.name if hasattr(op, "_schema") else str(op))


def find_cache_writes(graph: Graph) -> list[CacheWrite | Miss]:
    """All KV-cache writes of a graph in graph order, each a fact or a reason why not."""
    trace = Trace.of(graph, frozenset(_OPS))
    found: list[tuple[int, CacheWrite | Miss]] = []
    rows: list[Rows] = []
    ops: dict[Node, dict[str, RawWrite]] = {}
    for write in trace.writes:
        if write.kind in ("rows", "range"):
            got = read_rows(trace, write)
            if isinstance(got, Rows):
                rows.append(got)
            elif got is not None:
                found.append((trace.position[write.node], Miss(got, write.node, 1)))
        elif write.argument:
            ops.setdefault(write.node, {})[write.argument] = write
    for node, arguments in ops.items():
        fact = _read_op(trace, node, arguments)
        if fact is not None:
            found.append((trace.position[node], fact))
    for first, second in _pairs(trace, rows):
        if second is None:
            reason = Reason(
                "match.cache-pair",
                "one tensor is written by slots, and no second one in the same way",
                have="one write",
                need="a K and a V write with the same slots",
                node=first.write.node.name,
            )
            found.append((trace.position[first.write.node], Miss(reason, first.write.node, 1)))
        else:
            key, value = key_and_value(first, second)
            position = trace.position[second.write.node]
            found.append((position, _join(trace, key, value, "rows")))
    found += _misses_of_epilogue(trace)
    for node in trace.in_place:
        given = node.all_input_nodes[0].meta.get("val") if node.args else None
        if given is None or given.dim() >= 3:
            found.append((trace.position[node], _not_functional(node)))
    return [fact for _, fact in sorted(found, key=lambda item: item[0])]


def _pairs(trace: Trace, rows: list[Rows]) -> list[tuple[Rows, Rows | None]]:
    """K and V writes of the same slots and geometry, in graph order; leftovers with None."""
    waiting: list[Rows] = []
    pairs: list[tuple[Rows, Rows | None]] = []
    for row in rows:
        for other in reversed(waiting):
            if row.pairs_with(other):
                waiting.remove(other)
                pairs.append((other, row))
                break
        else:
            waiting.append(row)
    for row in waiting:
        halves = split_packed(trace, row)
        pairs.append(halves if halves is not None else (row, None))
    return pairs


def swapped(write: CacheWrite) -> CacheWrite:
    """The same write with the names K and V exchanged (two ``index_put`` carry no names)."""
    return replace(
        write,
        key=write.value,
        value=write.key,
        key_plane=write.value_plane,
        value_plane=write.key_plane,
        k_scale=write.v_scale,
        v_scale=write.k_scale,
    )


def _read_op(trace: Trace, node: Node, writes: dict[str, RawWrite]) -> CacheWrite | Miss | None:
    op = functional.mutable_op(node)
    name = op._schema.name if hasattr(op, "_schema") else str(op)
    roles = roles_of(op)
    if roles is None:
        # A fused operation of ours is no site any more: the pass may run twice.
        if name.startswith("fusion::") or not any(_like_cache(w) for w in writes.values()):
            return None
        reason = Reason(
            "match.cache-write", f"{name} changes a buffer in a way nobody registered",
            have=name, need="fusion.match.cache_write.register_cache_write", node=node.name,
        )  # fmt: skip
        return Miss(reason, node)
    key_write, value_write = writes.get(roles.key_cache), writes.get(roles.value_cache)
    if key_write is None or value_write is None:
        return Miss(
            Reason("match.cache-write", f"{name} is called without a cache", node=node.name), node
        )
    for write in (key_write, value_write):
        if write.kind == "opaque":
            reason = Reason(
                "match.cache-view",
                f"the cache written by {name} is not a plain strided view of its base",
                node=write.base.name,
            )
            return Miss(reason, node, 1)
    kwargs = functional.plain_kwargs(node)
    views = []
    for role in (roles.key, roles.value):
        view = tokens_of(kwargs[role])
        if isinstance(view, Reason):
            return Miss(view, node, 1)
        views.append(view)
    slots = Slots(kwargs[roles.slots], "slots")
    scales = [kwargs.get(r) if r else None for r in (roles.k_scale, roles.v_scale)]
    layout = kwargs.get(roles.layout, "NHD") if roles.layout else "NHD"
    key = Rows(key_write, views[0], key_write.region, slots, scales[0], (), ())
    value = Rows(value_write, views[1], value_write.region, slots, scales[1], (), ())
    return _join(trace, key, value, "op", layout)


def _like_cache(write: RawWrite) -> bool:
    """Whether an unknown write goes to something that could be a KV cache."""
    floating = write.dtype.is_floating_point or write.dtype.itemsize == 1
    return floating and len(write.region.size) >= 3 and write.base.op in ("placeholder", "get_attr")


def _join(
    trace: Trace, key: Rows, value: Rows, spelling: str, layout: str = "NHD"
) -> CacheWrite | Miss:
    """One fact from the two writes, after looking at everybody else who reads the caches."""
    anchor = max(key.write.node, value.write.node, key=lambda n: trace.position[n])
    writes = {key.write.index, value.write.index}
    before: dict[Node, frozenset[int]] = {}
    for row in sorted((key, value), key=lambda r: trace.position[r.write.node]):
        start = row.write.before - writes
        if before.setdefault(row.write.base, start) != start:
            return _between(row.write.node, "another write stands between those of K and V")
    for row in (key, value):
        whole_dtype = row.write.base.meta["val"].dtype
        if row.write.dtype != whole_dtype or not row.write.dtype.is_floating_point:
            text = "the cache is bytes that are written as another dtype"
            need = "an input of the stored dtype: view the bytes before the compiled function"
            if whole_dtype.is_floating_point:  # stored in its own dtype, as bytes
                text = f"the cache is written through a view as {row.write.dtype}"
                need = "write with fusion.ops.kv_cache_write"
            node = row.write.base
            reason = Reason("match.cache-view", text, str(whole_dtype), need, node.name)
            return Miss(reason, row.write.node, 1)
    roots: dict[Node, Node] = {}
    for base, version in before.items():
        root = trace.root(base, version)
        if root is None:
            reason = Reason(
                "match.cache-view",
                "the written view was cut from a value that is not the whole cache",
                node=anchor.name,
            )
            return Miss(reason, anchor, 1)
        roots[base] = root
    bases = tuple(roots.values())
    results: dict[Node, int] = {}
    views: dict[Node, tuple[int, Region]] = {}
    final: dict[int, Node] = {}
    replaced: set[Node] = {key.write.node, value.write.node, *key.nodes, *value.nodes}
    for index, base in enumerate(before):
        mine = frozenset({w.index for w in (key.write, value.write) if w.base is base})
        blocked = _blocked(trace, base, mine, anchor)
        if blocked is not None:
            return blocked
        last = trace.root(base, before[base] | mine)
        if last is not None:
            final[index] = last
        level = _Level(trace, base, before[base], mine)
        for node, region in level.values():
            if region.same(trace.whole(base)):
                results[node] = index
                replaced.add(node)
            elif node in level.entries:
                replaced.add(node)
                if any(level.alive(u) for u in node.users):
                    views[node] = (index, region)
            elif not level.alive(node):
                replaced.add(node)
    planes = [
        CachePlane(roots[r.write.base], r.plane.size, r.plane.stride, r.plane.offset, r.write.dtype)
        for r in (key, value)
    ]
    return ViewedCacheWrite(
        spelling=spelling,
        key=key.view,
        value=value.view,
        key_plane=planes[0],
        value_plane=planes[1],
        slots=key.slots,
        k_scale=key.scale,
        v_scale=value.scale,
        kv_layout=layout,
        bases=bases,
        results=results,
        nodes=frozenset(replaced),
        anchor=anchor,
        views=views,
        final=final,
        twins={v: k for k, v in zip(key.indices, value.indices, strict=True) if k is not v},
    )


class _Level:
    """The values of one base that hold this site's writes and no later ones."""

    def __init__(
        self, trace: Trace, base: Node, before: frozenset[int], mine: frozenset[int]
    ) -> None:
        self._trace = trace
        self._base = base
        self._alive: dict[Node, bool] = {}
        parts = {frozenset({i}) for i in mine} | {mine}
        nodes = [n for part in parts for n in trace.showing(base, before | part)]
        nodes.sort(key=trace.position.__getitem__)
        self._values = [(n, trace.states[n].region) for n in nodes]
        self._members = {n for n, _ in self._values}
        self.entries = {n for n in self._members if not cv.is_view(n) and not self._piece(n)}

    def _piece(self, node: Node) -> bool:
        """Whether a getitem cuts a piece of a value (not an output of a write)."""
        source = node.args[0] if cv.is_getitem(node) else None
        return isinstance(source, Node) and cv.is_split(source)

    def values(self) -> list[tuple[Node, Region]]:
        """(node, region), in graph order."""
        return self._values

    def alive(self, node: Node) -> bool:
        """Whether a user of these values still wants one after the rewrite."""
        if node in self.entries:
            return False
        if node in self._members or (
            cv.is_split(node) and node.all_input_nodes[0] in self._members
        ):
            state = self._trace.states.get(node)
            if state is not None and state.region.same(self._trace.whole(self._base)):
                return False
            if node not in self._alive:
                self._alive[node] = any(self.alive(u) for u in node.users)
            return self._alive[node]
        return True


def _blocked(trace: Trace, base: Node, mine: frozenset[int], anchor: Node) -> Miss | None:
    """A reader that would see another content after K and V are written at once."""
    end = trace.position[anchor]
    for node, state in trace.readers.get(base, ()):
        seen = mine & state.version
        if seen == mine:
            continue
        if not seen:
            if trace.position[node] > end:
                return _between(node, "the content before the write is read after it")
            continue
        missing = [trace.writes[i] for i in mine - seen]
        if not all(w.region.disjoint(state.region) for w in missing):
            return _between(node, "the cache is read between the writes of K and V")
    return None


def _between(node: Node, message: str) -> Miss:
    return Miss(Reason("safety.cache-read-between", message, node=node.name), node, 2)


def _not_functional(node: Node) -> Miss:
    reason = Reason(
        "match.cache-write", f"{cv.op_name(node)} writes in place: the graph is not functional",
        need="a graph after AOTAutograd's functionalisation", node=node.name,
    )  # fmt: skip
    return Miss(reason, node)


def _misses_of_epilogue(trace: Trace) -> list[tuple[int, Miss]]:
    """Buffers that look like caches and get a new content that is no slot write."""
    misses: list[tuple[int, Miss]] = []
    for base, (copy, source) in trace.commits.items():
        value = base.meta["val"]
        if value.dim() < 4 or not (value.dtype.is_floating_point or value.dtype.itemsize == 1):
            continue
        state = trace.states.get(source)
        if state is not None and state.base is base:
            continue
        if source in trace.lost and trace.lost[source][0] is base:
            where = trace.lost[source][1]
            reason = Reason(
                "match.cache-view",
                "the cache is written through a view that is not a plain strided one",
                node=where.name,
            )
            misses.append((trace.position[where], Miss(reason, where)))
            continue
        reason = Reason(
            "match.cache-write",
            "a buffer gets a new content that is not a slot write",
            have=cv.op_name(source),
            node=source.name,
        )
        misses.append((trace.position[copy], Miss(reason, source)))
    return misses
