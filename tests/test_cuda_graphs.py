"""Graphs that a CUDA build of torch traced fuse as those of the CPU do.

The listings under `tests/data/cuda_graphs` were written on a machine with an NVIDIA H200 by
`python -m tests.cuda_graphs` (torch 2.11). What differs from a CPU's graph: another SDPA
operation, and device guards; norm, rope and cache write are decomposed alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fusion.ops  # noqa: F401  (listings declare operators that nobody has registered yet)
from fusion.build import make_config, make_manager
from fusion.report import Site
from fusion.target import Target
from tests.listing import load

DATA = Path(__file__).parent / "data" / "cuda_graphs"
WHOLE = ("fused", "qk_norm_rope_kv_cache", "triton")
ROPE = ("fused", "rope_kv_cache", "triton")
EXPECTED = {
    "qwen3-paged": [WHOLE] * 2,
    "llama-paged": [ROPE] * 2,
    "gemma3-paged": [WHOLE] * 2,
    "qwen3-static": [WHOLE] * 2,
    "rms-norm-block": [WHOLE],
}
ATTENTION = {
    "qwen3-paged": "scope.causal",
    "llama-paged": "scope.causal",
    "gemma3-paged": "scope.causal",
    "qwen3-static": "scope.not-paged",
    "rms-norm-block": "scope.not-paged",
}
H200 = Target.parse("sm_90", torch="2.11.0", triton="3.6.0")


def listing(name: str) -> Any:
    (graph,) = json.loads((DATA / f"{name}.json").read_text())["graphs"]
    return graph


def sites(gm: Any, **options: Any) -> list[Site]:
    manager = make_manager(make_config(options), H200)
    return list(manager.run(gm.graph).sites)


def test_every_listing_is_expected() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_prologues_fuse(name: str) -> None:
    gm = load(listing(name))
    found = [s for s in sites(gm) if s.pass_name == "qk_norm_rope_kv_cache"]
    assert [(s.status, s.operation, s.kernel) for s in found] == EXPECTED[name]
    gm.graph.lint()
    left = [str(n.target) for n in gm.graph.nodes]
    before = [str(n.target) for n in load(listing(name)).graph.nodes]
    # A layer has two norms of heads (Llama none), and no other of its norms is touched.
    normed = 2 * sum(operation == WHOLE[1] for _, operation, _ in EXPECTED[name])
    assert sum("rsqrt" in t for t in left) == sum("rsqrt" in t for t in before) - normed
    assert not any("rotate" in t or "index_put" in t or "index_copy" in t for t in left)


@pytest.mark.parametrize("name", EXPECTED)
def test_attention_is_left_for_a_reason(name: str) -> None:
    found = [s for s in sites(load(listing(name))) if s.pass_name == "non_causal_attention"]
    assert found and all(s.status == "missed" for s in found)
    assert {r.code for s in found for r in s.reasons} == {ATTENTION[name]}


FLIPPED = {"op:aten.sub.Tensor": "op:aten.add.Tensor", "op:aten.neg.default": "op:aten.abs.default"}


@pytest.mark.parametrize("name", ["qwen3-paged", "rms-norm-block"])
def test_a_changed_sign_is_refused(name: str) -> None:
    """The listing is read, not recognised by name: one sign less and that site does not fuse."""
    data = listing(name)
    flipped = next(n for n in data["nodes"] if n["target"] in FLIPPED)
    flipped["target"] = FLIPPED[flipped["target"]]
    first, *others = [s for s in sites(load(data)) if s.pass_name == "qk_norm_rope_kv_cache"]
    assert (first.status, first.operation) != ("fused", "qk_norm_rope_kv_cache")
    assert first.reasons
    assert [s.status for s in others] == ["fused"] * (len(EXPECTED[name]) - 1)
