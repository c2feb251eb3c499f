"""The check of a rewrite: what it keeps, and what bounds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusion
from fusion.build import make_config, make_manager
from fusion.layout import KVCacheLayout
from fusion.passes import qk_norm_rope_kv_cache as the_pass
from fusion.passes.prologue.check import Checked
from fusion.report import Site
from tests import prologue_block
from tests.prologue_block import functional, inputs, run, variant

PASS = "qk_norm_rope_kv_cache"


def explained(options: dict[str, Any], **block: Any) -> Site:
    """The site of one block, nothing compiled."""
    made = variant(**block)
    report = fusion.explain(functional(made), inputs(made), options=options)
    (site,) = [s for s in report.sites if s.pass_name == PASS]
    return site


def test_operands_of_the_new_call_are_checked_within_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emitted nodes run small too: they have the time and memory that the check has."""
    monkeypatch.setattr(the_pass, "check", lambda *_: Checked("passed"))
    assert explained({"validation_seconds": 20.0}).status == "fused"
    for bound in ({"validation_seconds": 0.0}, {"validation_mb": -1.0}):
        config = make_config({})
        object.__setattr__(config, *next(iter(bound.items())))
        made = variant()
        (graph,) = fusion.capture(functional(made), inputs(made))
        before = str(graph.graph)
        report = make_manager(config, phase="explain").run(graph.graph)
        (site,) = [s for s in report.sites if s.pass_name == PASS]
        assert (site.status, site.reasons[0].code) == ("refused", "match.validation-bound"), bound
        assert str(graph.graph) == before


def test_equal_sites_share_a_check_and_other_ones_do_not() -> None:
    """One entry for each kind of site, whatever the number of graphs."""
    made = [variant(), variant(), variant(q_eps=1e-3), variant()]
    manager = make_manager(make_config({}), phase="explain")
    store: dict[Any, Any] = {}
    manager.share_validations(store, manager._lock)
    sizes, reused = [], []
    for block in made:
        (graph,) = fusion.capture(functional(block), inputs(block))
        (site,) = [s for s in manager.run(graph.graph).sites if s.pass_name == PASS]
        assert site.validation is not None and site.status == "fused"
        sizes.append(len(store))
        reused.append(site.validation["reused"])
    assert sizes == [1, 1, 2, 2]
    assert reused == [False, True, False, True]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "spelling"),
    [((0, 4), "op"), ((0,), "rows")],
    ids=["no blocks", "no rows"],
)
def test_a_cache_without_a_slot_is_a_reason(
    shape: tuple[int, ...], spelling: str, dynamic: bool
) -> None:
    """Every row is padding: there is nothing to compare, and nothing to divide by."""

    def write(k: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, slots: torch.Tensor) -> None:
        if spelling == "op":
            fusion.ops.kv_cache_write(k, k * 2, kc, vc, slots)
        else:
            kc[slots], vc[slots] = k, k * 2

    def fn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any):  # type: ignore[no-untyped-def]
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        write(k, *more)
        return q

    def args() -> list[torch.Tensor]:
        torch.manual_seed(0)
        tokens = 0 if spelling == "rows" else 6  # an index_put has no padding rows
        rows = [torch.randn(tokens, heads, 16) for heads in (4, 2)]
        tables = [torch.randn(tokens, 1, 8) for _ in range(2)]
        caches = [torch.randn(*shape, 2, 16) for _ in range(2)]
        slots = torch.full((tokens,), -1)
        if dynamic:
            for t in (*rows, *tables, slots):
                torch._dynamo.maybe_mark_dynamic(t, 0)
        return [*rows, *tables, *caches, slots]

    torch._dynamo.reset()
    with torch.no_grad():
        done = torch.compile(fn, backend="fusion", fullgraph=True, options={"inner": "aot_eager"})
        assert torch.equal(done(*args()), fn(*args()))
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == PASS]
    codes = [r.code for r in site.reasons]
    if spelling == "rows":
        assert codes == ["scope.no-tokens"]
    else:
        assert (site.status, codes) == ("refused", ["match.validation-bound"])
        assert "without a single slot" in site.reasons[0].message


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def test_tables_that_are_computed_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal by how they are spelled: the check gives both the same values."""
    half = prologue_block.ROPES["chunk"]

    def other_way(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, d: int) -> torch.Tensor:
        return half(x, cos, -sin, d)

    def first_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, d: int) -> torch.Tensor:
        return half(x, cos[:, : d // 2], sin[:, : d // 2], d)

    monkeypatch.setitem(prologue_block.ROPES, "other way", other_way)
    monkeypatch.setitem(prologue_block.ROPES, "first half", first_half)
    outcome = run(variant(rope="other way"))
    outcome.assert_equal()
    assert outcome.site.status == "fused", outcome.site.reasons

    block = variant(rope="first half", rotary=16, tokens=7, heads=6, kv_heads=3)
    eager, fused = inputs(block), inputs(block)
    for tensor in (fused.qkv, fused.positions, fused.slots, fused.readable):
        assert tensor is not None
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.reset()
    compiled = torch.compile(functional(block), backend="fusion", options={"inner": "aot_eager"})
    for got, want in zip(compiled(fused), functional(block)(eager), strict=True):
        assert prologue_block.same_bits(got, want)
    assert prologue_block.same_bits(fused.cache, eager.cache)
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == PASS]
    assert site.status == "fused", site.reasons


def test_tables_that_only_look_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    half = prologue_block.ROPES["chunk"]

    def by_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, d: int) -> torch.Tensor:
        return half(x, cos, -sin if x.shape[1] == 8 else -sin.abs(), d)

    monkeypatch.setitem(prologue_block.ROPES, "by heads", by_heads)
    outcome = run(variant(rope="by heads"))
    outcome.assert_equal()
    found = [s for s in outcome.report.sites if s.pass_name == PASS]
    assert found
    assert "fused" not in {site.status for site in found}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("slot", [-128, -1, 127, -129, 128, -(10**6)])
def test_indices_are_counted_from_the_end_as_far_as_there_are_any(slot: int, inner: str) -> None:
    """Farther, torch raises, and so does the fused graph on a CPU."""
    block = variant(write="slots", layout=KVCacheLayout.NHD)
    eager, fused = inputs(block), inputs(block)
    for x in (eager, fused):
        x.slots[2] = slot
    torch._dynamo.reset()
    compiled = torch.compile(functional(block), backend="fusion", options={"inner": inner})
    if -128 <= slot < 128:
        functional(block)(eager)
        compiled(fused)
        pairs = zip(prologue_block.caches(fused), prologue_block.caches(eager), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    else:
        with pytest.raises(IndexError):
            functional(block)(eager)
        said = r"out of (bounds|range)|must be below"
        with pytest.raises((IndexError, RuntimeError), match=said):
            compiled(fused)  # Inductor has a check of its own, a RuntimeError
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == PASS]
    assert site.status == "fused"


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_a_cast_of_the_query_alone_is_no_part_of_it(
    given: torch.dtype, dtype: torch.dtype, turned: bool
) -> None:
    """As attention in float32 begins: ``q.float() @ k.float()``."""

    def hook(name: str, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if name != "rope":
            return q, k
        return (q.transpose(0, 1) if turned else q).to(dtype), k

    outcome = run(variant(dtype=given, hook=hook))
    outcome.assert_equal()
    assert outcome.site.status == "fused", outcome.site.reasons
