"""What the report says of a site: facts of q and k, nodes, the listing of what was found."""

from __future__ import annotations

from typing import Any

import fusion
from fusion.reason import Reason
from fusion.report import Site
from tests.prologue_block import functional, inputs, variant

PASS = "qk_norm_rope_kv_cache"


def site_of(options: dict[str, Any] | None = None, **block: Any) -> Site:
    """The site of one block, nothing compiled."""
    made = variant(**block)
    report = fusion.explain(functional(made), inputs(made), options=options or {})
    (site,) = [s for s in report.sites if s.pass_name == PASS]
    return site


def facts_of(site: Site) -> set[str]:
    """The facts that nodes belong to."""
    return {str(n["fact"]) for n in site.nodes}


def test_q_and_k_are_told_apart_where_they_differ() -> None:
    alike = site_of()
    assert {"rope", "norm"} <= alike.facts.keys()
    other = site_of(q_eps=1e-3)
    assert other.status == "fused" and "rope" in other.facts and "norm" not in other.facts
    assert (other.facts["q norm"]["eps"], other.facts["k norm"]["eps"]) == (1e-3, 1e-6)
    assert facts_of(other) == {"q norm", "k norm", "q rope", "k rope", "cache write"}


def test_ropes_of_other_widths_are_both_shown() -> None:
    """The nearest miss is named with both ropes that were read."""

    def other(stage: str, q: Any, k: Any) -> tuple[Any, Any]:
        if stage != "norm":
            return q, k
        return q.float(), k

    site = site_of(hook=other)
    assert site.status in ("missed", "partial"), site
    assert site.reasons[0].code == "match.q-k-differ"


def test_sizes_are_numbers_and_targets_are_names() -> None:
    site = site_of(write="slots", layout=fusion.layout.KVCacheLayout.NHD, padding=False)
    cache = site.facts["write"]["key_cache"]
    assert cache.split(" ", 1)[1] == "[8, 16, 4, 32]"
    targets = {str(n["target"]) for n in site.nodes}
    assert "aten.index_put.default" in targets
    assert not any("<" in t or "built-in" in t for t in targets)
    split = site_of(norm="F.rms_norm", rope="rotate_half")
    assert not any("<" in str(n["target"]) for n in split.nodes)


def test_sites_that_were_left_alone_list_what_was_found() -> None:
    """A refused chain and a near miss show their nodes as they stand; nothing stands after."""
    refused = site_of({"validation_seconds": 0.0})
    assert refused.status == "refused" and refused.before and not refused.after
    missed = site_of(
        hook=lambda stage, q, k: (q, k.clamp(-1, 1)) if stage == "rope" else (q, k), norm="none"
    )
    assert missed.status == "missed" and not missed.after
    text = "\n".join(missed.before)
    assert len(missed.before) == len(set(missed.before))
    assert "kv_cache_write" in text or "auto_functionalized" in text


def test_reasons_say_only_what_they_know() -> None:
    def text(**known: str) -> str:
        return str(Reason("gate.arch", "the kernel does not run on this chip", **known))

    assert text() == "gate.arch: the kernel does not run on this chip"
    assert text(have="sm_70").endswith("(have sm_70)")
    assert text(need="sm_80").endswith("(need sm_80)")
    assert text(have="sm_70", need="sm_80", node="add").endswith("(have sm_70, need sm_80) [add]")
