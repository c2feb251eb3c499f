"""Rotated keys that no slot write consumes: a dynamic cache, no cache, a graph break.

They are looked for where keys are used: behind every attention call, and behind the outputs of
the graph (where a graph break cuts the prologue from its cache). A key of an attention call that
is nearly a rope is told as a near miss: its layer would not be in the report otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.fx import Graph, Node

from fusion.graph.elements import Unreadable
from fusion.graph.moves import is_move
from fusion.graph.values import behind
from fusion.match.attention import Attention, find_attention
from fusion.match.facts import CacheWrite, Miss, Rope, TokenView
from fusion.match.rope import read_rope
from fusion.match.views import dim_view
from fusion.passes.prologue.chain import Chain

_REACH = 12
"""Data-movement nodes that are looked through between a use of the key and its rope."""
_NEAR = 4
"""Depth from which a rope's refusal says that a rotation was there."""
_AFTER = 3
"""Operators after a rope through which a near miss is the same key as that rope."""
_WRITTEN = {
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.copy.default,
}
"""Writes into a cache that was made inside the graph, which no slot write describes."""
_ORDERS = {4: ((0, 2, 1, 3), (0, 1, 2, 3)), 3: ((0, 1, 2), (1, 0, 2))}


Sites: TypeAlias = "list[tuple[CacheWrite | None, Chain | Miss]]"


def find_loose_keys(
    graph: Graph, taken: frozenset[Node], writes: Sequence[CacheWrite]
) -> list[Rope | Miss]:
    """Rotated keys outside every chain in ``taken``, one per use, keys before queries.

    ``writes`` are cache writes whose own reading missed: something stands between their rope
    and the write, so rope is looked for behind that. Last come the keys of attention calls that
    are nearly ropes, as misses whose only fact is the key's view.
    """
    found: dict[Node, Rope] = {}
    near: dict[Node, Miss] = {}
    (output,) = [n for n in graph.nodes if n.op == "output"]
    keys = dict.fromkeys(_attention_keys(graph))
    uses = [(w.key.node, False) for w in writes]
    uses += [(n, True) for n in (*keys, *output.all_input_nodes)]
    for use, moves_only in uses:
        rope = _rope_behind(use, taken, moves_only)
        if isinstance(rope, Rope):
            found.setdefault(rope.out.node, rope)
        elif rope is not None and use in keys:
            near.setdefault(near_key(rope).node, rope)
    # q and k of a pair may both be found (graph outputs): the one with fewer heads is the key.
    return [*sorted(found.values(), key=lambda r: r.out.heads), *near.values()]


def near_key(miss: Miss) -> TokenView:
    """The key that a near miss of :func:`find_loose_keys` is about."""
    (view,) = miss.facts
    assert isinstance(view, TokenView)
    return view


def is_told(key: Node, ends: frozenset[Node]) -> bool:
    """Whether a nearly rotated key is, or comes within a few operators from, one of ``ends``."""
    level = {key}
    for _ in range(_AFTER):
        if level & ends:
            return True
        level = {n for node in level for n in node.all_input_nodes}
    return bool(level & ends)


def _attention_keys(graph: Graph) -> Iterator[Node]:
    for call in find_attention(graph):
        key = call.arguments.get("key") if isinstance(call, Attention) else None
        if isinstance(key, Node):
            yield key


def merge_loose(sites: Sites, key: Rope, loose: Chain | Miss) -> None:
    """Add a loose prologue, as a part of the missed write that it leads to if there is one.

    Norm and rope are then the smaller fusion of that write's ladder, and the write's own miss
    says why the larger one was not possible.
    """
    ends = {key.out.node}
    if isinstance(loose, Chain):
        ends |= {loose.k_rope.out.node, loose.q_rope.out.node}
    for i, (write, miss) in enumerate(sites):
        if write is None or not isinstance(miss, Miss):
            continue
        if ends.isdisjoint(behind([write.key.node], most=_REACH)):
            continue
        if isinstance(loose, Chain):
            sites[i] = (write, replace(loose, misses=(miss, *loose.misses[1:])))
        return
    sites.append((None, loose))


def _rope_behind(use: Node, taken: frozenset[Node], moves_only: bool) -> Rope | Miss | None:
    """The nearest rope that a value comes from, if it belongs to no other chain.

    Without one, the nearest miss of a rope, told at the farthest value that has it.
    """

    def follow(node: Node) -> bool:
        return is_move(node) or node.target in _WRITTEN or not moves_only

    near: Miss | None = None
    for node in behind([use], follow=follow, most=_REACH):
        if node in taken:
            return None
        rope = _rope_at(node)
        if isinstance(rope, Rope):
            return None if rope.out.node in taken else rope
        if rope is not None and (near is None or rope.depth >= near.depth):
            near = rope
    return near


def _rope_at(node: Node) -> Rope | Miss | None:
    """The rope that a node holds, in any order of its dimensions, or the nearest miss of one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    if node.op != "call_function":
        return None
    near: Miss | None = None
    for order in _ORDERS.get(value.dim(), ()):
        try:
            view = dim_view(node, order)
            rope = read_rope(view)
        except Unreadable:
            continue
        if isinstance(rope, Rope):
            return rope
        if rope.depth < (_NEAR if near is None else near.depth + 1):
            continue
        if rope.reason.code.startswith("match.rope-"):
            near = replace(rope, facts=(view,))
    return near
