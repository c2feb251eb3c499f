"""What the pass manager refuses of a pass that changed a graph, whatever the graph returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.config import Config
from fusion.graph.snapshot import Snapshot
from fusion.pipeline import PassManager
from fusion.report import Site
from fusion.target import Target
from tests.test_pipeline import letters

aten = torch.ops.aten


@dataclass(frozen=True)
class Edit:
    """A pass that does to a graph what it was given."""

    edit: Callable[[Graph], None]

    name: ClassVar[str] = "edit"

    def run(self, graph: Graph, context: Any) -> list[Site]:
        self.edit(graph)
        return [Site("edit", "fused")]


def outcome(gm: GraphModule, edit: Callable[[Graph], None]) -> str:
    """ "fused", or why the pass was undone (to the letter)."""
    before = letters(gm)
    report = PassManager((Edit(edit),), Config(), Target.parse("cpu")).run(gm.graph)
    (site,) = report.sites
    if site.status == "fused":
        gm.graph.lint()
        return "fused"
    assert letters(gm) == before
    return site.reasons[0].message


def graph(function: Any = None) -> GraphModule:
    def plain(x: torch.Tensor) -> Any:
        return (x + 1).sin(), x * 2

    return make_fx(function or plain, tracing_mode="fake")(torch.ones(3))


def another_input(g: Graph) -> None:
    with g.inserting_before(next(iter(g.nodes))):
        g.placeholder("extra")


def fewer_outputs(g: Graph) -> None:
    output = g.output_node()
    output.args = (output.args[0][:1],)


def no_output(g: Graph) -> None:
    g.erase_node(g.output_node())


def output_becomes_a_number(g: Graph) -> None:
    output = g.output_node()
    output.args = ((output.args[0][0], 3),)


def sin_to(target: Any) -> Callable[[Graph], None]:
    def edit(g: Graph) -> None:
        for node in g.nodes:
            if node.target is aten.sin.default:
                node.target = target

    return edit


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (another_input, "graph inputs changed from"),
        (fewer_outputs, "2 graph outputs became 1"),
        (no_output, "2 graph outputs became 0"),
        (output_becomes_a_number, "graph output 1 was ('tensor'"),
    ],
)
def test_the_outside_of_a_graph_stays(edit: Callable[[Graph], None], why: str) -> None:
    assert why in outcome(graph(), edit)


def test_outputs_that_are_no_dense_tensors() -> None:
    """A mapping, a size, a constant and a sparse tensor go through a rewrite unchanged."""

    def function(x: torch.Tensor, s: torch.Tensor) -> Any:
        return {"a": x.sin(), "b": s.neg()}, x.shape[0], 3

    gm = make_fx(function, tracing_mode="symbolic")(torch.ones(5, 2), torch.ones(4))
    sparse = next(n for n in gm.graph.nodes if n.target is aten.neg.default)
    sparse.meta["val"] = torch.eye(4).to_sparse_csr()
    mapping, size, number = gm.graph.output_node().args[0]
    assert outcome(gm, sin_to(aten.cos.default)) == "fused"
    assert [n.target for n in gm.graph.nodes].count(aten.cos.default) == 1

    def swap(g: Graph) -> None:
        g.output_node().args = ((mapping, number, size),)

    assert "output 2 was ('value', 'SymInt') and became ('constant', '3')" in outcome(gm, swap)


def constant_edit(place: int, value: Any) -> Callable[[Graph], None]:
    def edit(g: Graph) -> None:
        node = next(n for n in g.nodes if n.target is aten.full.default)
        if place < 0:
            node.kwargs = {**node.kwargs, **value}
        else:
            node.args = tuple(value if i == place else a for i, a in enumerate(node.args))

    return edit


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (constant_edit(1, 2), True),  # 2.0 before
        (constant_edit(1, 2.0), False),
        (constant_edit(0, [3]), False),
        (constant_edit(0, (3,)), True),  # a list before
        (constant_edit(0, [3, 1]), True),
        (constant_edit(-1, {"dtype": torch.float64}), True),
        (constant_edit(-1, {"layout": torch.strided}), True),  # not given before
    ],
)
def test_a_changed_constant_is_a_changed_graph(
    edit: Callable[[Graph], None], changed: bool
) -> None:
    gm = graph(lambda x: x + torch.full([3], 2.0, dtype=torch.float32))
    node = next(n for n in gm.graph.nodes if n.target is aten.full.default)
    node.kwargs = {"dtype": torch.float32}
    snapshot = Snapshot(gm.graph)
    edit(gm.graph)
    assert snapshot.changed() is changed
