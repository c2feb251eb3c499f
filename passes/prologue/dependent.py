"""Operands that depend on each other: the check cannot give each a random value of its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from fusion.graph.provenance import source_of
from fusion.graph.structure import structure
from fusion.graph.values import behind
from fusion.passes.prologue.chain import Chain
from fusion.reason import Reason


def half_a_table(chain: Chain) -> Reason | None:
    """Where one of cos and sin could be followed to where it comes from and the other only to the
    complex table that both make up (its width is symbolic): no random values serve both."""
    cos, sin = chain.k_rope.cos, chain.k_rope.sin
    if (cos.part is None) == (sin.part is None):
        return None
    whole, part = (cos, sin) if cos.part is None else (sin, cos)
    if whole.node not in behind([part.node]):
        return None  # a tensor of its own
    return Reason(
        "match.rope-table",
        "cos and sin make up a complex table, and only one of them can be read out of it",
        have=f"{whole.node.name} and {part.part} of {part.node.name}",
        need="both parts of one table, or each a tensor of its own",
        node=part.node.name,
        source=source_of(part.node),
    )


def made_inside(chain: Chain, roles: Mapping[Node, str]) -> set[Node]:
    """The value's node where it lies on the way to the written key (V is K, or K before its rope):
    the check must compute it, since a random one would be written as K too."""
    if chain.write is None or roles[chain.write.value.node] != "value":
        return set()  # nothing written, or V is what K is made from: one input for both
    value = chain.write.value.node
    others = roles.keys() - {value}
    return {value}.intersection(behind([chain.k_rope.out.node, chain.write.key.node], stop=others))


def equal_tables(chain: Chain) -> dict[Node, Node]:
    """The nodes of the query's tables by the key's, where the graph computes equal ones twice
    (``-sin`` or ``cos[:, :rotary]`` at each use): both must get the same values."""
    twins: dict[Node, Node] = {}
    for q, k in (
        (chain.q_rope.cos, chain.k_rope.cos),
        (chain.q_rope.sin, chain.k_rope.sin),
    ):
        for mine, other in ((q.node, k.node), (q.positions, k.positions)):
            if mine is None or other is None or mine is other or mine in twins:
                continue
            if structure(mine) == structure(other):
                twins[mine] = other
    return twins
