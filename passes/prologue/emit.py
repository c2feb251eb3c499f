"""Put the canonical call where the chain was, in one transaction."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fusion import ops
from fusion.config import Config
from fusion.graph import functional
from fusion.graph.surgery import SurgeryError, rewrite
from fusion.match.facts import TokenView
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.check import check_operands
from fusion.passes.prologue.operation import Operation


def emit(
    graph: Graph, chain: Chain, operation: Operation, kernel: str, config: Config
) -> list[str]:
    """Rewrite the graph; returns the new nodes as text.

    With ``config.validate`` the operands of the new call are computed small by the emitted
    nodes and compared with what the operation was checked with, before the rewrite is final.

    Raises :class:`~fusion.graph.surgery.SurgeryError`; then the graph is as it was.
    """
    assert ops  # importing it registers the operations
    operands: dict[str, Any] = {**operation.tensors, **operation.attributes, "kernel": kernel}
    outputs: dict[int, list[TokenView]] = {0: [chain.q_rope.out]}
    if chain.write is None or operation.attributes.get("return_key"):
        outputs[1] = [chain.k_rope.out]
    op = getattr(torch.ops.fusion, operation.name).default

    def verify(call: Node) -> None:
        reason = check_operands(chain, operation, call_arguments(call), config)
        if reason is not None:
            raise SurgeryError(reason)

    done = rewrite(
        graph,
        op,
        operands,
        write=chain.write,
        outputs=outputs,
        tokens=chain.k_rope.x,  # roles of the tables are its dimensions; the norm may have others
        anchor=chain.k_rope.out.node,
        verify=verify if config.validate else None,
    )
    return [n.format_node() or n.name for n in done.nodes if not n._erased]


def call_arguments(call: Node) -> dict[str, Any]:
    """The arguments of the emitted call by name, whatever it is wrapped in."""
    if functional.is_auto_functionalized(call):
        return functional.plain_kwargs(call)
    target: Any = call.target
    names = [a.name for a in target._schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}
