"""Is a rewritten graph still well formed, and does it still look the same from outside?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.graph.snapshot import Snapshot


class BrokenGraph(RuntimeError):
    """A pass left a graph that must not be compiled; the message names the node."""


@dataclass(frozen=True)
class Interface:
    """Placeholders and outputs of a graph, as a caller sees them."""

    inputs: tuple[str, ...]
    outputs: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, graph: Graph) -> Interface:
        """Read it off; sizes are compared as text, so that no guard is added."""
        inputs = tuple(n.name for n in graph.nodes if n.op == "placeholder")
        return cls(inputs, _outputs(graph))

    def check(self, graph: Graph, before: Snapshot) -> None:
        """Raise :class:`BrokenGraph` where the graph is malformed or its outside changed."""
        try:
            graph.lint()
        except Exception as error:
            raise BrokenGraph(f"lint: {error}") from error
        now = Interface.of(graph)
        if now.inputs != self.inputs:
            raise BrokenGraph(f"graph inputs changed from {self.inputs} to {now.inputs}")
        if len(now.outputs) != len(self.outputs):
            raise BrokenGraph(f"{len(self.outputs)} graph outputs became {len(now.outputs)}")
        for index, (old, new) in enumerate(zip(self.outputs, now.outputs, strict=True)):
            if old != new:
                raise BrokenGraph(f"graph output {index} was {old} and became {new}")
        known = before.names()
        for node in graph.nodes:
            if node.op == "call_function" and node.name not in known and "val" not in node.meta:
                raise BrokenGraph(f"new node {node.name} has no metadata")


def _outputs(graph: Graph) -> tuple[tuple[Any, ...], ...]:
    output = next((n for n in reversed(graph.nodes) if n.op == "output"), None)
    if output is None:
        return ()
    values: list[tuple[Any, ...]] = []

    def visit(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        else:
            values.append(_describe(value))

    visit(output.args)
    return tuple(values)


def _describe(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Node):
        return ("constant", str(value))
    meta = value.meta.get("val")
    if isinstance(meta, torch.Tensor):
        try:
            stride = str(tuple(meta.stride()))
        except RuntimeError:  # sparse and other layouts have none
            stride = str(meta.layout)
        return ("tensor", str(meta.dtype), str(tuple(meta.shape)), stride, str(meta.device))
    return ("value", type(meta).__name__)
