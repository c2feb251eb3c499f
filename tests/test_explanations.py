"""Mutation test of the explanations: one change, and the report's first reason must name it."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion
from fusion.report import Report, Site
from tests.mutations import MUTATIONS, Mutation, inputs, line_of, mutated
from tests.prologue_block import same_bits

PASS = "qk_norm_rope_kv_cache"
NEEDED = 0.9


def run(name: str, validate: bool = True) -> Report:
    """Run eagerly and fused, require equal bits, and return what the report says."""
    function = mutated(name)
    x, y = inputs(), copy.deepcopy(inputs())
    expected = function(x)
    torch._dynamo.reset()
    before = len(fusion.reports())
    options = {"inner": "aot_eager_decomp", "validate": validate}
    found = torch.compile(function, backend="fusion", options=options)(y)
    for a, b in zip(expected, found, strict=True):
        assert same_bits(a, b), name
    assert same_bits(x.cache, y.cache), name
    return fusion.Report.merge(fusion.reports()[before:])


def site_of(report: Report) -> Site:
    """The site that speaks of the prologue: the write where there is one, else the nearest."""
    sites = [s for s in report.sites if s.pass_name == PASS]
    assert sites, "the prologue is in no report"
    return next((s for s in sites if "write" in s.facts), sites[0])


def named(mutation: Mutation, report: Report) -> tuple[bool, str]:
    """Whether the first reason names the mutated line or has a code that says just this."""
    site = site_of(report)
    if site.status == "fused" or not site.reasons:
        return False, f"{site.status}"
    reason = site.reasons[0]
    line = line_of(mutation.name)
    by_line = line is not None and (reason.source or "").endswith(f"mutations.py:{line}")
    by_code = reason.code in mutation.codes
    told = f"{site.status}: {reason} at {reason.source}"
    return by_line or by_code, told


def test_the_unmutated_prologue_fuses():
    site = site_of(run(""))
    assert (site.status, site.operation, site.reasons) == ("fused", PASS, ())


def test_every_mutation_is_explained_and_none_gives_a_wrong_number(capsys):
    assert len(MUTATIONS) >= 25
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    results = [(m, *named(m, run(m.name))) for m in MUTATIONS]
    right = sum(ok for _, ok, _ in results)
    score = right / len(results)
    with capsys.disabled():
        print(f"\nexplanations: {right} of {len(results)} mutations named ({score:.0%})")
        for m, ok, told in results:
            if not ok:
                print(f"  not named: {m.name} ({m.about}): {told}")
    assert score >= NEEDED


@pytest.mark.parametrize("name", ["both signs", "first sign", "halves swapped", "scaled mean"])
def test_patterns_alone_do_not_fuse_a_mutation(name):
    """Without the check of the numbers, the recognisers by themselves must refuse."""
    site = site_of(run(name, validate=False))
    assert site.status != "fused"
