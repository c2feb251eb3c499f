"""Compose facts into a prologue: a cache write, the rope and norm of its key, and the q beside.

Composition only reads. Everything that stands in the way is kept as a :class:`Miss`, nearest
first, because a report must say what was found as well as what was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from fusion.graph.elements import cast_source, dtype_of
from fusion.graph.storage import root_of
from fusion.match.cache_value import before_cast
from fusion.match.facts import CacheWrite, Miss, RMSNorm, Rope, TokenView
from fusion.match.forms import forms_behind
from fusion.match.norm import read_norm
from fusion.match.rope import RopeFinder, read_rope
from fusion.match.same_tables import same_tables
from fusion.reason import Reason

NO_NORM = "match.no-norm"


@dataclass(frozen=True)
class Chain:
    """One prologue. ``norms`` is None where rope is the first link that was taken.

    ``whole`` says whether everything that is there was taken; if not, ``misses`` says why the
    larger fusion was not possible.
    """

    write: CacheWrite | None
    q_rope: Rope
    k_rope: Rope
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    misses: tuple[Miss, ...] = ()

    @property
    def normed(self) -> bool:
        """Whether the norms are part of the fusion."""
        return self.q_norm is not None and self.k_norm is not None

    @property
    def whole(self) -> bool:
        """Whether the whole chain that is there was taken."""
        return not self.misses and self.write is not None

    @property
    def query(self) -> TokenView:
        """What the fused operation reads as q, ``[T, Hq, D]``."""
        return self.q_norm.x if self.q_norm and self.k_norm else self.q_rope.x

    @property
    def key(self) -> TokenView:
        """What the fused operation reads as k, ``[T, Hk, D]``."""
        return self.k_norm.x if self.q_norm and self.k_norm else self.k_rope.x

    @property
    def operation(self) -> str:
        """Name of the canonical operation that computes this chain."""
        if self.write is None:
            return "qk_norm_rope"
        return "qk_norm_rope_kv_cache" if self.normed else "rope_kv_cache"

    def without_norm(self, miss: Miss) -> Chain:
        """The next step down the ladder: rope and write only."""
        return replace(self, q_norm=None, k_norm=None, misses=(*self.misses, miss))


def read_chain(
    write: CacheWrite, finder: RopeFinder, taken: frozenset[Node] = frozenset()
) -> Chain | Miss:
    """The prologue that ends in ``write``, or the miss that ended the reading.

    ``finder`` searches the write's graph for ropes; ``taken`` holds values that are not this
    write's query: rope outputs that belong to other layers, and what other writes write.
    """
    found = _read(write, finder, taken)
    key = None
    if isinstance(found, Miss):
        key = before_cast(write.key, write.key_plane.dtype)
    if isinstance(found, Chain) or key is None:
        return found
    # The cast to the cache's dtype is the write's own: q has no such cast.
    value = before_cast(write.value, write.value_plane.dtype) or write.value
    wider = _read(replace(write, key=key, value=value), finder, taken)
    return wider if isinstance(wider, Chain) or wider.depth > found.depth else found


def _read(write: CacheWrite, finder: RopeFinder, taken: frozenset[Node]) -> Chain | Miss:
    k_rope = read_rope(write.key, complex_tables=True)
    if isinstance(k_rope, Miss):
        return replace(_broken(k_rope, write.key), facts=(*k_rope.facts, write))
    q_rope = find_query(k_rope, finder, taken)
    if isinstance(q_rope, Miss):
        return replace(q_rope, facts=(*q_rope.facts, k_rope, write))
    return with_norms(Chain(write, q_rope, k_rope, None, None))


def written_key(write: CacheWrite) -> frozenset[Node]:
    """The nodes that are the written key in another form: what was only moved or cast."""
    return forms_behind(write.key.node)


def read_loose(k_rope: Rope, finder: RopeFinder, taken: frozenset[Node]) -> Chain | Miss:
    """The prologue around a rotated key that no slot write consumes: norm and rope."""
    node = k_rope.out.node
    reason = Reason("match.no-cache-write", "no slot write consumes this key", node=node.name)
    miss = Miss(reason, node, depth=4, facts=(k_rope,))
    q_rope = find_query(k_rope, finder, taken | {node})
    if isinstance(q_rope, Miss):
        beside = [f for f in q_rope.facts if isinstance(f, Rope) and f.out.node is not node]
        return replace(miss, facts=(*beside[:1], k_rope))
    chain = with_norms(Chain(None, q_rope, k_rope, None, None))
    if not chain.normed:  # rope alone is what Inductor fuses by itself
        return replace(miss, facts=(q_rope, k_rope))
    return replace(chain, misses=(miss, *chain.misses))


def _broken(miss: Miss, key: TokenView) -> Miss:
    """Name the graph break where the written key comes from outside the graph."""
    root = root_of(key.node).node
    if miss.reason.code != "match.no-rope" or root.op != "placeholder":
        return miss
    reason = Reason(
        "match.graph-break",
        "the written key is an input of this graph: its rope, if any, is in another one",
        have=f"input {root.name}",
        need="rope and write in one graph",
        node=root.name,
    )
    return replace(miss, reason=reason, node=root, depth=2)


def find_query(k_rope: Rope, finder: RopeFinder, taken: frozenset[Node]) -> Rope | Miss:
    """The rotated query that belongs to a rotated key: the nearest one not yet taken."""
    found = finder.siblings(k_rope, taken)
    ropes = [_without_cast(r, k_rope) for r in found if isinstance(r, Rope)]
    differing = [_differ(r, k_rope) for r in ropes]
    for rope, miss in zip(ropes, differing, strict=True):
        if miss is None:
            return rope
    misses = [m for m in (*differing, *found) if isinstance(m, Miss)]
    if misses:
        return max(misses, key=lambda m: m.depth)
    node = k_rope.out.node
    reason = Reason(
        "match.no-query", "no other rope uses the cos and sin of this key", node=node.name
    )
    return Miss(reason, node, depth=3)


def _without_cast(q: Rope, k: Rope) -> Rope:
    """The rotated query before a cast of its own (``q.float() @ ...``), which is no part of the
    operation, where it has the key's dtype there."""
    source = cast_source(q.out.node)
    if q.out_dtype == k.out_dtype or source is None or dtype_of(source) != k.out_dtype:
        return q
    rope = read_rope(replace(q.out, node=source))
    return rope if isinstance(rope, Rope) and same_tables(rope, k) else q


def with_norms(chain: Chain) -> Chain:
    """Add the norms before the ropes, or say why they stay outside."""
    q, k = read_norm(chain.q_rope.x), read_norm(chain.k_rope.x)
    if isinstance(q, RMSNorm) and isinstance(k, RMSNorm):
        differ = _first_difference(
            (
                ("weight mode", lambda n: n.weight_mode if n.weight is not None else None),
                ("cast", lambda n: n.cast),
                ("inverse root", lambda n: n.inv_rms),
            ),
            q,
            k,
            q.x.node,
        )
        if differ is not None:
            return chain.without_norm(differ)
        return replace(chain, q_norm=q, k_norm=k)
    misses = [m for m in (k, q) if isinstance(m, Miss)]
    if all(m.reason.code == NO_NORM for m in misses) and len(misses) == 2:
        return chain  # a model without QK norm: rope is the first link there is
    if len(misses) == 1:
        which = "query" if misses[0] is q else "key"
        reason = Reason(
            "match.q-k-differ",
            f"only one of q and k is normed: {which}: {misses[0].reason.message}",
            have="one norm",
            need="a norm on both",
            node=misses[0].reason.node,
        )
        return chain.without_norm(replace(misses[0], reason=reason))
    named = [m for m in misses if m.reason.code != NO_NORM]
    return chain.without_norm(named[0])


def _differ(q: Rope, k: Rope) -> Miss | None:
    """Whether two ropes differ in something that the operation shares between q and k.

    That their tables hold the same entries for every token is the finder's business.
    """
    return _first_difference(
        (
            ("rope style", lambda r: r.style),
            ("rotary width", lambda r: r.rotary_dim),
            ("rope dtype", lambda r: r.rope_dtype),
            ("result dtype", lambda r: r.out_dtype),
            ("head size", lambda r: r.x.dim),
        ),
        q,
        k,
        q.out.node,
    )


def _first_difference(
    fields: Sequence[tuple[str, Callable[[Any], object]]],
    q: object,
    k: object,
    node: Node,
) -> Miss | None:
    for name, get in fields:
        q_has, k_has = get(q), get(k)
        # A weight mode says nothing where one side has no weight at all.
        if q_has == k_has or (name == "weight mode" and None in (q_has, k_has)):
            continue
        reason = Reason(
            "match.q-k-differ",
            f"q and k differ in their {name}",
            have=f"q {q_has}, k {k_has}",
            need="the same for both",
            node=node.name,
        )
        return Miss(reason, node, depth=4, facts=(q, k))
    return None
