"""Put the canonical call where the chain was, in one transaction."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from fusion import ops
from fusion.graph.surgery import rewrite
from fusion.match.facts import TokenView
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.operation import Operation


def emit(graph: Graph, chain: Chain, operation: Operation, kernel: str) -> list[str]:
    """Rewrite the graph; returns the new nodes as text.

    Raises :class:`~fusion.graph.surgery.SurgeryError`; then the graph is as it was.
    """
    assert ops  # importing it registers the operations
    operands: dict[str, Any] = {**operation.tensors, **operation.attributes, "kernel": kernel}
    outputs: dict[int, list[TokenView]] = {0: [chain.q_rope.out]}
    if chain.write is None or operation.attributes.get("return_key"):
        outputs[1] = [chain.k_rope.out]
    op = getattr(torch.ops.fusion, operation.name).default
    done = rewrite(
        graph,
        op,
        operands,
        write=chain.write,
        outputs=outputs,
        tokens=chain.key,
        anchor=chain.k_rope.out.node,
    )
    return [n.format_node() or n.name for n in done.nodes if not n._erased]
