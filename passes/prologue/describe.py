"""Sites for the report: what was read, what was done, and the listing of the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion.graph.elements import cast_source
from fusion.graph.moves import is_move
from fusion.graph.provenance import describe as describe_nodes
from fusion.graph.provenance import source_of
from fusion.graph.storage import root_of
from fusion.match.facts import CachePlane, CacheWrite, Miss, RMSNorm, Rope, TokenView
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.check import Checked
from fusion.passes.prologue.operation import Operation
from fusion.pipeline import Context
from fusion.reason import Reason
from fusion.report import Site
from fusion.selection import Selection

#: Status of a site whose reading ended in a miss, by the prefix of the reason's code.
_STATUS = {"safety": "refused", "gate": "refused", "profit": "refused"}


def missed(context: Context, miss: Miss, write: CacheWrite | None = None) -> Site:
    """A site where the reading ended early."""
    if not context.rewrite:
        return context.site("off", miss.node, reasons=_off_reasons(context))
    found = (*miss.facts, *((write,) if write is not None and write not in miss.facts else ()))
    facts, nodes = _found(found)
    if miss.node is not None and miss.node.op == "call_function":  # what the reason names is drawn
        nodes.setdefault(miss.node, "")
    views = (f.node for f in miss.facts if isinstance(f, TokenView))
    anchor = write.anchor or write.key.node if write is not None else next(views, miss.node)
    if _no_tokens(write, miss):
        return context.site(
            "missed",
            anchor,
            reasons=(Reason("scope.no-tokens", "the graph computes no token"),),
            facts=facts,
            nodes=_listed(nodes),
            before=_lines(nodes),
            applicable=False,
        )
    status = _STATUS.get(miss.reason.code.split(".")[0], "missed")
    reason = miss.reason
    if miss.node is not None:
        reason = reason.at(reason.node or miss.node.name, source_of(miss.node))
    return context.site(
        status,
        anchor,
        reasons=(reason,),
        facts=facts,
        nodes=_listed(nodes),
        before=_lines(nodes),
        depth=miss.depth,
        # A mutated buffer that gets no slots (a convolution's state, say) is listed, but nothing
        # was to be fused there; a rotated key that ends in no slot write has its own site.
        applicable=reason.code != "match.cache-write",
    )


def _no_tokens(write: CacheWrite | None, miss: Miss) -> bool:
    """Whether the rows that were to be written are none (a graph made for zero tokens)."""
    if write is not None:
        return isinstance(write.key.tokens, int) and write.key.tokens == 0
    value = miss.node.meta.get("val") if miss.node is not None else None
    return isinstance(value, torch.Tensor) and any(
        isinstance(s, int) and s == 0 for s in value.shape
    )


def off(context: Context, chain: Chain) -> Site:
    """A site that was recognised while the pass may not rewrite."""
    return context.site(
        "off", anchor_of(chain), operation=chain.operation, reasons=_off_reasons(context)
    )


def _off_reasons(context: Context) -> tuple[Reason, ...]:
    if context.training:
        return (Reason("config.training", "the graph computes gradients"),)
    return (Reason("config.off", "the pass is off"),)


def refused(
    context: Context,
    chain: Chain,
    operation: Operation,
    reasons: Sequence[Reason],
    selection: Selection | None = None,
    checked: Checked | None = None,
) -> Site:
    """A site that was understood and left alone."""
    anchor = anchor_of(chain)
    reasons = tuple(r if r.source else r.at(r.node, source_of(anchor)) for r in reasons)
    return context.site(
        "refused",
        anchor,
        operation=operation.name,
        reasons=(*reasons, *_ladder_reasons(chain)),
        candidates=selection.candidates if selection is not None else (),
        facts=_facts(chain),
        nodes=_chain_nodes(chain),
        validation=checked.to_dict() if checked is not None else None,
        depth=10,
        before=tuple(listing(chain)),
    )


def done(
    context: Context,
    chain: Chain,
    operation: Operation,
    selection: Selection,
    checked: Checked,
    before: Sequence[str],
    after: Sequence[str],
) -> Site:
    """A site that was rewritten."""
    facts = _facts(chain)
    kernel = selection.kernel
    assert kernel is not None
    return context.site(
        "fused" if chain.whole else "partial",
        anchor_of(chain),
        operation=operation.name,
        kernel=kernel.name,
        reasons=_ladder_reasons(chain),
        candidates=selection.candidates,
        facts=facts,
        nodes=_chain_nodes(chain),
        validation=checked.to_dict(),
        depth=10,
        before=tuple(before),
        after=tuple(after),
    )


def anchor_of(chain: Chain) -> Node:
    """The node whose layer and source line stand for the site."""
    return chain.k_rope.out.node


def chain_nodes(chain: Chain) -> frozenset[Node]:
    """Every node of the chain, from its inputs (excluded) to its results."""
    nodes = chain.q_rope.nodes | chain.k_rope.nodes
    for norm in (chain.q_norm, chain.k_norm):
        if norm is not None:
            nodes |= norm.nodes
    return nodes | chain.write.nodes if chain.write is not None else nodes


def key_is_read(chain: Chain) -> bool:
    """Whether the graph reads the rotated key apart from writing it to the cache."""
    inside = chain_nodes(chain)
    results = chain.write.results if chain.write is not None else {}
    seen: set[Node] = set()
    stack = [chain.k_rope.out.node]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user in results:
                continue
            if user not in inside and not _only_moves_inside(user, inside):
                return True
            stack.append(user)
    return False


def _only_moves_inside(node: Node, inside: frozenset[Node]) -> bool:
    """A view or a cast between the rope and the write, which belongs to neither fact."""
    todo, seen = [node], {node}
    while todo:
        at = todo.pop()
        if not at.users or not (is_move(at) or cast_source(at) is not None):
            return False
        fresh = [user for user in at.users if user not in inside and user not in seen]
        seen.update(fresh)
        todo += fresh
    return True


def listing(chain: Chain) -> list[str]:
    """The nodes of a chain as text, in graph order."""
    return list(_lines(dict.fromkeys(chain_nodes(chain), "")))


def _lines(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(n.format_node() or n.name for n in sorted(nodes))


def _ladder_reasons(chain: Chain) -> tuple[Reason, ...]:
    return tuple(
        m.reason.at(m.reason.node, source_of(m.node)) if m.node is not None else m.reason
        for m in chain.misses
    )


def _facts(chain: Chain) -> dict[str, Any]:
    facts: dict[str, Any] = _of_both("rope", _rope(chain.q_rope), _rope(chain.k_rope))
    if chain.q_norm is not None and chain.k_norm is not None:
        facts |= _of_both("norm", _norm(chain.q_norm), _norm(chain.k_norm))
    if chain.write is not None:
        facts["write"] = _write(chain.write)
    facts["heads"] = {"query": chain.query.heads, "key": chain.key.heads, "dim": chain.key.dim}
    facts["tokens"] = str(chain.key.tokens)
    facts["qkv"] = "packed" if _packed(chain) else "separate"
    return facts


def _of_both(name: str, q: dict[str, Any], k: dict[str, Any]) -> dict[str, Any]:
    """One entry where q and k are alike, else one for each."""
    return {name: k} if q == k else {f"q {name}": q, f"k {name}": k}


def _found(found: Sequence[object]) -> tuple[dict[str, Any], dict[Node, str]]:
    """What a reading that ended early did find, and the fact that each node belongs to.

    Of two ropes or norms the query's comes first.
    """
    facts: dict[str, Any] = {}
    nodes: dict[Node, str] = {}
    for kind, name in ((Rope, "rope"), (RMSNorm, "norm")):
        # Told apart by where they stand: symbolic sizes have no hash.
        alike = list({f.x.node: f for f in found if isinstance(f, kind)}.values())
        texts = [_rope(f) if isinstance(f, Rope) else _norm(f) for f in alike]
        names = [f"q {name}", f"k {name}"] if len(alike) == 2 else [name] * len(alike)
        if len(alike) == 2:
            facts |= _of_both(name, *texts)
        elif alike:
            facts[name] = texts[0]
        for fact, label in zip(alike, names, strict=True):
            nodes |= dict.fromkeys(fact.nodes - nodes.keys(), label)
    for write in found:
        if isinstance(write, CacheWrite):
            facts["write"] = _write(write)
            nodes |= dict.fromkeys(write.nodes - nodes.keys(), "cache write")
    return facts, nodes


def _packed(chain: Chain) -> bool:
    if chain.write is None:
        return root_of(chain.query.node).node is root_of(chain.key.node).node
    roots = {root_of(v.node).node for v in (chain.query, chain.key, chain.write.value)}
    return len(roots) == 1


def _rope(rope: Rope) -> dict[str, Any]:
    return {
        "style": rope.style,
        "rotary_dim": rope.rotary_dim,
        "dtype": str(rope.rope_dtype).removeprefix("torch."),
        "tables": "by position" if rope.cos.positions is not None else "per token",
        "width": "full" if rope.cos.full else "half",
        **({"product": rope.product} if rope.product != "separate" else {}),
    }


def _norm(norm: RMSNorm) -> dict[str, Any]:
    return {
        "weight": norm.weight_mode if norm.weight is not None else "absent",
        "cast": norm.cast,
        "eps": norm.eps.name if isinstance(norm.eps, Node) else norm.eps,
        "inverse_root": norm.inv_rms,
    }


def _write(write: CacheWrite) -> dict[str, Any]:
    def plane(p: CachePlane) -> str:
        return f"{p.base.name} [{', '.join(map(str, p.size))}]"

    return {
        "spelling": write.spelling,
        "slots": write.slots.kind,
        "layout": write.kv_layout,
        "key_cache": plane(write.key_plane),
        "value_cache": plane(write.value_plane),
        "scaled": write.k_scale is not None or write.v_scale is not None,
        "rows": _shape(write.key),
    }


def _shape(view: TokenView) -> str:
    return f"[{view.tokens}, {view.heads}, {view.dim}]"


def _chain_nodes(chain: Chain) -> tuple[Mapping[str, Any], ...]:
    nodes: dict[Node, str] = {}
    parts: list[tuple[str, frozenset[Node]]] = []
    for norm, name in ((chain.q_norm, "q norm"), (chain.k_norm, "k norm")):
        if norm is not None:
            parts.append((name, norm.nodes))
    parts += [("q rope", chain.q_rope.nodes), ("k rope", chain.k_rope.nodes)]
    if chain.write is not None:
        parts.append(("cache write", chain.write.nodes))
    for name, some in parts:
        nodes |= dict.fromkeys(sorted(some - nodes.keys()), name)
    return _listed(nodes)


def _listed(nodes: Mapping[Node, str]) -> tuple[Mapping[str, Any], ...]:
    """Nodes as the report lists them, fact by fact, each in graph order."""
    facts = dict.fromkeys(nodes.values())
    return tuple(
        entry
        for fact in facts
        for entry in describe_nodes(sorted(n for n, f in nodes.items() if f == fact), fact or None)
    )
