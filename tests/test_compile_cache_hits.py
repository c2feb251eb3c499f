"""What is reported when a compile cache answers and no pass runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion import registry
from fusion.graph import compat
from tests.test_compile_cache import ROOT
from tests.toy_passes import DropBias, SinToCos, use_passes

# --- what a hit says -------------------------------------------------------------------------

CHILD = textwrap.dedent(
    """
    import hashlib, json, sys, torch, fusion
    import fusion.fingerprint, fusion.pipeline, fusion.ops.dispatch
    from torch._dynamo.utils import counters
    import fusion.backends.reference as reference
    from dataclasses import replace
    from tests.ops_cases import arguments
    from tests.prologue_block import NORMS, ROPES

    # The tree may change while the test runs; and nothing of this graph needs a C++ compiler if
    # the fused operation stays a call.
    frozen = lambda: "frozen"
    fusion.pipeline.package_sources = fusion.ops.dispatch.package_sources = frozen
    reference.KERNELS = tuple(replace(k, lowering=None) for k in reference.KERNELS)

    def attend(query, key, value, q_weight, k_weight, cos, sin, key_cache, value_cache, slots):
        q, k = NORMS["late"](query, q_weight, 1e-6), NORMS["late"](key, k_weight, 1e-6)
        q, k = (ROPES["chunk"](t, cos, sin, 16) for t in (q, k))
        fusion.ops.kv_cache_write(k, value, key_cache, value_cache, slots)
        return q

    def digest(*tensors):
        return [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors]

    found = []
    for how in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        counters.clear()
        fusion.reports(clear=True)
        torch.manual_seed(0)
        a = arguments("qk_norm_rope_kv_cache")
        names = ("query", "key", "value", "q_weight", "k_weight", "cos", "sin", "key_cache")
        x = [a[n] for n in (*names, "value_cache", "slot_mapping")]
        with torch.no_grad():
            if how == "backend":
                run = torch.compile(attend, backend="fusion")
            else:
                run = torch.compile(attend, options=fusion.inductor_passes())
            q = run(*x)
            out = digest(q, x[7]._base)
        report = fusion.Report.merge(fusion.reports())
        (graph,) = report.graphs
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        hits += counters["inductor"]["fxgraph_cache_hit"]
        found.append({
            "out": out, "hit": hits > 0, "cached": graph.cached, "entries": len(fusion.reports()),
            "sites": [s.to_dict() for s in graph.sites],
            "codes": [r.code for r in graph.reasons],
            "text": report.to_text(),
            "passes": [p.to_dict() for p in report.passes],
        })
    print(json.dumps(found))
    """
)


def child(folder: Path, *how: str) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(how)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def test_a_warm_cache_gives_the_same_results_and_the_same_report(tmp_path: Path) -> None:
    """Two processes, one cache folder: outputs, cache bytes and sites are those of the first."""
    (cold,) = child(tmp_path, "backend")
    assert (cold["hit"], cold["cached"], cold["entries"]) == (False, False, 1)
    assert [s["status"] for s in cold["sites"] if s["applicable"]] == ["fused"]
    assert "from the compile cache" not in cold["text"]
    warm, patched = child(tmp_path, "backend", "patches")
    assert (warm["hit"], warm["cached"], warm["entries"]) == (True, True, 1)
    assert warm["out"] == cold["out"]
    assert warm["sites"] == cold["sites"]
    assert warm["passes"] == cold["passes"]
    assert warm["codes"] == []
    assert "from the compile cache" in warm["text"]
    # Inside somebody else's compile fusion sees of a hit only that it was asked for its key.
    assert (patched["hit"], patched["cached"], patched["entries"]) == (True, True, 1)
    assert patched["out"] == cold["out"]
    assert patched["codes"] == ["cache.no-report"]
    assert "cache.no-report" in patched["text"]


@pytest.mark.parametrize("aot_cache", [True, False])
def test_a_hit_of_either_cache_has_the_sites(
    aot_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd's cache stands before Inductor's; each alone may answer."""
    from torch._dynamo.utils import counters
    from torch._functorch import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    use_passes(monkeypatch, DropBias)
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    found = []
    with config.patch(enable_autograd_cache=aot_cache):
        for options in ({}, {}, {"drop_bias": {"unused": "other"}}, {"drop_bias": "off"}, {}):
            torch._dynamo.reset()
            counters.clear()
            registry.REGISTRY.clear()
            y = torch.compile(model, backend="fusion", options=options)(x)
            (report,) = fusion.reports()
            (site,) = report.sites
            want = x @ model.weight.T + (0 if site.status == "fused" else model.bias)
            torch.testing.assert_close(y, want)
            hits = [
                counters["aot_autograd"]["autograd_cache_hit"],
                counters["inductor"]["fxgraph_cache_hit"],
            ]
            found.append((hits[0] > 0, sum(hits) > 0, report.graphs[0].cached, site.status))
    miss, hit = (False, False, False), (aot_cache, True, True)
    assert found == [
        (*miss, "fused"),
        (*hit, "fused"),
        (*miss, "fused"),
        (*miss, "off"),
        (*hit, "fused"),
    ]


class Compile:
    """Dynamo's compile context, as far as the registry looks at it."""

    compile_id, attempt = "0/0", 0


def test_somebody_elses_compile_is_listed_once_whatever_the_cache_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_passes(monkeypatch, SinToCos)
    registry.REGISTRY.clear()
    manager = fusion.inductor_passes()["post_grad_custom_pre_pass"]
    manager.uuid()  # out of curiosity, outside any compile
    assert fusion.reports() == []
    contexts = [Compile(), Compile(), Compile()]
    for number, context in enumerate(contexts):
        context.compile_id = f"{number}/0"
        monkeypatch.setattr(compat, "compile_context", lambda context=context: context)
        manager.uuid()
        if number != 1:  # a miss: the pass runs; both caches may ask, before and after
            manager(make_fx(lambda x: x.sin(), tracing_mode="fake")(torch.ones(3)).graph, True)
            manager.uuid()
    reports = fusion.reports(clear=True)
    assert [r.graphs[0].cached for r in reports] == [False, True, False]
    assert [[s.status for s in r.sites] for r in reports] == [["fused"], [], ["fused"]]
    assert [r.code for r in reports[1].graphs[0].reasons] == ["cache.no-report"]


def test_a_compile_that_fails_before_the_pass_is_not_called_a_hit() -> None:
    """The cache asked and no pass ran: that is all that is known, and all that is said."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Failing(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            raise RuntimeError("their pass fails")

        def uuid(self) -> str:
            return "failing"

    registry.REGISTRY.clear()
    torch._dynamo.reset()
    patches = {**fusion.inductor_passes(existing=Failing()), "fx_graph_cache": True}
    with pytest.raises(Exception, match="their pass fails"), torch.no_grad():
        torch.compile(lambda x: x.sin() + 1, options=patches)(torch.ones(3))
    (report,) = fusion.reports(clear=True)
    (reason,) = report.graphs[0].reasons
    assert reason.code == "cache.no-report"
    assert "a hit, a failed compile, or nothing to compile" in reason.message
    assert "from the compile cache" not in report.to_text()
