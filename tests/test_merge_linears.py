"""The pass that merges equal linears, on small graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.config import Config
from fusion.passes.merge_linears import PRODUCTS, MergeLinears, find, merge_linears
from fusion.pipeline import PassManager

X, W, V, B = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(12)


def trace(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The ATen graph of `function`, with metadata, without functionalisation."""
    gm: GraphModule = make_fx(function, tracing_mode="fake")(*args)
    return gm


def products(gm: GraphModule) -> int:
    return sum(node.target in PRODUCTS for node in gm.graph.nodes)


def check(function: Callable[..., Any], *args: Tensor, left: int) -> GraphModule:
    """Merge, and compare results (inputs included, since they may be written) to the bit."""
    gm = trace(function, *args)
    before, after = [a.clone() for a in args], [a.clone() for a in args]
    want = gm(*before)
    merge_linears(gm.graph)
    gm.graph.lint()
    gm.recompile()
    got = gm(*after)
    for a, b in zip((*before, *flat(want)), (*after, *flat(got)), strict=True):
        assert torch.equal(a, b)
    assert products(gm) == left
    assert merge_linears(gm.graph) == 0, "twice is once"
    return gm


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_slices_of_equal_linears_come_from_one() -> None:
    def qkv(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.mm(x.view(3, 8), w.t()) for _ in range(3)]
        return parts[0][:, :4] * 2, parts[1][:, 4:8] * 2, parts[2][:, 8:] * 2

    gm = check(qkv, X, W, left=1)
    # The views that led to the removed products are gone with them.
    assert sum(node.target is torch.ops.aten.t.default for node in gm.graph.nodes) == 1


def test_bias_and_batched_products() -> None:
    check(
        lambda x, w, b: torch.addmm(b, x, w.t()).sin() + torch.addmm(b, x, w.t()), X, W, B, left=1
    )
    a = torch.randn(2, 3, 8)
    c = torch.randn(2, 8, 4)
    check(lambda a, c: torch.bmm(a, c).sin() + torch.bmm(a, c), a, c, left=1)


def test_what_only_looks_alike_stays() -> None:
    check(lambda x, w, v: torch.mm(x, w.t()).sin() + torch.mm(x, v.t()), X, W, V, left=2)
    check(lambda x, w: torch.mm(x, w.t()).sin() + torch.mm(x * 2, w.t()), X, W, left=2)
    square = torch.randn(8, 8)
    check(lambda x, w: torch.mm(x, w.t()).sin() + torch.mm(x, w), X, square, left=2)
    check(
        lambda x, w, b: torch.addmm(b, x, w.t()).sin() + torch.addmm(b, x, w.t(), beta=2),
        X,
        W,
        B,
        left=2,
    )

    def halves(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w[:6].t()).sin() + torch.mm(x, w[6:].t())

    check(halves, X, W, left=2)


def test_a_write_between_keeps_both() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        first = torch.mm(x, w.t())
        w.mul_(2)
        return first.sin() + torch.mm(x, w.t())

    check(function, X, W, left=2)


def test_a_view_made_before_a_write_is_read_after_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        view = w.t()
        first = torch.mm(x, view)
        w.mul_(2)
        return first.sin() + torch.mm(x, view)

    check(function, X, W, left=2)


def test_two_products_after_the_write_are_merged() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        w.mul_(2)
        return torch.mm(x, w.t()).sin() + torch.mm(x, w.t())

    check(function, X, W, left=1)


@pytest.mark.parametrize("second", [False, True])
def test_a_product_that_is_written_keeps_its_own_memory(second: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = torch.mm(x, w.t()), torch.mm(x, w.t())
        (b if second else a)[:, :2].zero_()
        return a.sin() + b.cos()

    check(function, X, W, left=2)


def test_two_outputs_do_not_share_memory() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(x, w.t())[:, :6], torch.mm(x, w.t())[:, 6:]

    check(function, X, W, left=2)

    def through_select(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(x, w.t()).select(0, 1), torch.mm(x, w.t()).sin()

    check(through_select, X, W, left=2)


def test_dynamic_sizes_merge_without_guards() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.view(-1, 8), w.t()).sin() + torch.mm(x.view(-1, 8), w.t())

    graphs: list[GraphModule] = []

    def compiler(gm: GraphModule, inputs: Any) -> Any:
        env = next(
            s.node.shape_env
            for n in gm.graph.nodes
            if isinstance(n.meta.get("val"), Tensor)
            for s in n.meta["val"].shape
            if isinstance(s, torch.SymInt)
        )
        guards = len(env.guards)
        assert merge_linears(gm.graph) == 1
        assert len(env.guards) == guards
        gm.recompile()
        graphs.append(gm)
        return gm

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=aot_autograd(fw_compiler=compiler), dynamic=True, fullgraph=True
    )
    with torch.no_grad():
        for size in (3, 5):
            x = torch.randn(size, 8)
            assert torch.equal(compiled(x, W), function(x, W))
    assert len(graphs) == 1


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_pass_reports_every_group(mode: str) -> None:
    gm = trace(lambda x, w: torch.mm(x, w.t()).sin() + torch.mm(x, w.t()) * 2, X, W)
    config = Config.from_options({"merge_linears": mode}, {"merge_linears": ()})
    report = PassManager([MergeLinears()], config).run(gm.graph)
    (site,) = report.sites
    assert site.facts["linears"] == 2
    assert site.status == ("fused" if mode == "auto" else "off")
    assert [r.code for r in site.reasons] == ([] if mode == "auto" else ["config.off"])
    assert products(gm) == (1 if mode == "auto" else 2)


def test_nothing_to_merge_is_no_site_and_no_change() -> None:
    gm = trace(lambda x, w: torch.mm(x, w.t()), X, W)
    before = str(gm.graph)
    assert find(gm.graph) == []
    assert PassManager([MergeLinears()]).run(gm.graph).sites == ()
    assert str(gm.graph) == before
