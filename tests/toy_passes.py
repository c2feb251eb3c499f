"""A pass that is easy to see through, for tests of the machinery around passes.

``sin`` becomes ``cos``: numerically a visible change, so that a test sees which graph really ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import Graph

from fusion import discovery
from fusion.graph.provenance import describe
from fusion.pipeline import Context
from fusion.reason import Reason
from fusion.report import PassStatus, Site

aten = torch.ops.aten


@dataclass(frozen=True)
class SinToCos:
    """Replaces every ``sin`` by ``cos``, but not in layers whose path ends in ``skip``."""

    skip: str = "never"

    name: ClassVar[str] = "sin_to_cos"

    def run(self, graph: Graph, context: Context) -> list[Site]:
        sites = []
        for node in list(graph.nodes):
            if node.target is not aten.sin.default:
                continue
            found = describe([node], "sin")
            site = context.site("off", node, operation="cos", nodes=found)
            if not context.rewrite:
                sites.append(site)
                continue
            if (site.layer or "").endswith(self.skip):
                reason = Reason("match.rope-form", "this layer is skipped", node=node.name)
                sites.append(context.site("missed", node, reasons=[reason], depth=3))
                continue
            with graph.inserting_before(node):
                new = graph.call_function(aten.cos.default, node.args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            sites.append(
                context.site("fused", new, operation="cos", kernel="reference", nodes=found)
            )
        return sites


@dataclass(frozen=True)
class DropBias:
    """Replaces ``addmm`` by ``mm``: a visible change that Inductor compiles without C++."""

    unused: str = ""

    name: ClassVar[str] = "drop_bias"

    def run(self, graph: Graph, context: Context) -> list[Site]:
        sites = []
        for node in list(graph.nodes):
            if node.target is aten.addmm.default:
                if context.rewrite:
                    node.target, node.args = aten.mm.default, node.args[1:]
                sites.append(context.site("fused" if context.rewrite else "off", node))
        return sites


@dataclass(frozen=True)
class Broken:
    """Does something that must be undone: ``how`` says what."""

    how: str = "raise"

    name: ClassVar[str] = "broken"

    def run(self, graph: Graph, context: Context) -> list[Site]:
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        node = nodes[len(nodes) // 2]
        if self.how == "raise":
            with graph.inserting_before(node):
                new = graph.call_function(aten.neg.default, (node.args[0],))
            node.replace_all_uses_with(new)
            node.meta["val"] = None
            graph.erase_node(node)
            new.name = "renamed"
            raise ValueError("half way through")
        if self.how == "output":
            output = next(n for n in reversed(graph.nodes) if n.op == "output")
            first = next(n for n in graph.nodes if n.op == "placeholder")
            with graph.inserting_before(output):
                new = graph.call_function(aten.sum.default, (first,))
            new.meta["val"] = first.meta["val"].sum()
            output.args = ((new,),)
        if self.how == "meta":
            with graph.inserting_before(node):
                new = graph.call_function(aten.neg.default, (node.args[0],))
            node.args = (new, *node.args[1:])
        if self.how == "order":
            nodes[0].prepend(nodes[-1])
        return []


def use_passes(
    monkeypatch: pytest.MonkeyPatch, *classes: Any, broken: tuple[PassStatus, ...] = ()
) -> None:
    """Let these be all the passes that there are."""
    infos = tuple(discovery.PassInfo(c.name, c, "tests") for c in classes)
    found = discovery.Discovered(infos, broken)
    monkeypatch.setattr(discovery, "discover", lambda: found)


class Layer(torch.nn.Linear):
    """A linear followed by ``sin``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


class Model(torch.nn.Module):
    """Some layers, and a buffer that every call adds to."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(4, 4) for _ in range(layers))
        self.register_buffer("seen", torch.zeros(32, 4))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.seen.index_copy_(0, slots, x)
        return x * 2

    def expected(self, x: torch.Tensor, fused: bool = True) -> torch.Tensor:
        """What the model returns when every ``sin`` was replaced by ``cos`` (or none)."""
        for layer in self.layers:
            y = torch.nn.functional.linear(x, layer.weight, layer.bias)
            x = y.cos() if fused else y.sin()
        return x * 2


def inputs(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments of :class:`Model`."""
    return torch.randn(tokens, 4), torch.arange(tokens)
