"""The check of a rewrite: what it keeps, and what bounds it."""

from __future__ import annotations

from typing import Any

import pytest

import fusion
from fusion.build import make_config, make_manager
from fusion.passes import qk_norm_rope_kv_cache as the_pass
from fusion.passes.prologue.check import Checked
from fusion.report import Site
from tests.prologue_block import functional, inputs, variant

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
