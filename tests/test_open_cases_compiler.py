"""Faults that other engines had in public: gates, attention, living in a compiler.

The second half of ``test_open_cases.py``, where the table is.
"""

from __future__ import annotations

import time

import pytest
import torch

import fusion
from tests.prologue_block import inputs, same_bits, variant
from tests.test_open_cases import FUSED, compiled, equal, parts, tables, turn, write
from tests.test_pass_non_causal_attention import paged
from tests.test_pass_qk_norm_rope_kv_cache import prologue

# --- gates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "status"), [(5, "fused"), (64, "refused")])
def test_a_token_limit_looks_at_the_size_that_was_compiled_for(tokens, status):
    """A dynamic range spans the threshold: the size that is traced decides, and it is told."""
    x = inputs(variant(tokens=tokens, blocks=16))
    for t in (x.qkv, x.positions, x.slots):
        torch._dynamo.mark_dynamic(t, 0)
    compiled(prologue, **{FUSED: {"max_tokens": 8}})(x)
    (site,) = fusion.reports()[-1].sites
    assert site.status == status
    if status == "refused":
        assert (site.reasons[0].code, site.reasons[0].have) == ("profit.token-range", "64")


# --- non-causal attention --------------------------------------------------------------------


def test_target_and_drafter_in_one_process():
    """The drafter's calls are bound, the target's causal ones are not, whatever the order."""

    def model(causal):
        def attend(*args):
            return (fusion.ops.paged_attention(*args, causal),)

        return attend

    want = {True: "missed", False: "fused"}
    for causal in (True, False, True):
        torch._dynamo.reset()
        args = paged()
        (got,) = compiled(model(causal))(*args)
        assert same_bits(got, fusion.ops.paged_attention(*args, causal))
        (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == "non_causal_attention"]
        assert site.status == want[causal]


@pytest.mark.parametrize("query", ["none", "one dummy head"])
def test_a_drafter_without_a_real_query(query):
    g0 = variant(heads=1, kv_heads=4)

    def block(x):
        q, k, v = parts(x, h=1)
        cos, sin = tables(x)
        k = turn(k, x.k_weight, cos, sin)
        if query == "none":
            return (write(x, k, v),)
        return turn(q, x.q_weight, cos, sin), write(x, k, v)

    (site,) = equal(block, lambda: inputs(g0))
    if query == "none":
        assert site.status in ("missed", "refused", "partial")
        assert site.reasons[0].node
    else:
        assert site.status == "fused", site.reasons


# --- living in a compiler --------------------------------------------------------------------


def test_operations_take_tensors_and_numbers_and_no_names_of_layers():
    """A layer's name in a call would make a graph for each layer. Strings choose, from a list."""
    allowed = {"kv_layout", "kernel", "weight_mode", "norm_cast", "inv_rms", "rope_style"}
    for name in fusion.ops.OPERATIONS:
        schema = getattr(torch.ops.fusion, name).default._schema
        assert {a.name for a in schema.arguments if str(a.type) == "str"} <= allowed


@pytest.mark.parametrize("layers", [2, 32])
def test_layers_share_one_graph(layers):
    g0 = variant(dim=16)
    before = len(fusion.reports())
    layer = compiled(lambda x: g0(x))
    for seed in range(layers):
        layer(inputs(g0, seed))
    assert len(fusion.reports()) - before == 1


@pytest.mark.parametrize("hook", ["post_grad_custom_post_pass", "post_grad_custom_pre_pass"])
def test_the_pass_works_in_front_of_and_behind_the_clean_up(hook):
    from torch._inductor import config

    g0 = variant(dtype=torch.float32)
    own = fusion.inductor_passes()["post_grad_custom_pre_pass"]
    x, y = inputs(g0), inputs(g0)
    with config.patch({hook: own, "force_disable_caches": True}):
        for a, b in zip(torch.compile(g0)(x), g0(y), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.cache, y.cache, rtol=1e-5, atol=1e-5)
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == FUSED]
    assert site.status == "fused", site.reasons


def test_a_second_run_changes_nothing():
    """The whole pipeline twice over one graph: no site, no node more."""
    seen = []

    class Twice:
        def __init__(self, manager):
            self.manager = manager

        def __call__(self, graph):
            self.manager(graph)
            once = str(graph)
            self.manager(graph)
            seen.append((once, str(graph)))

    from torch._inductor import config

    g0 = variant(dtype=torch.float32)
    own = fusion.inductor_passes()["post_grad_custom_pre_pass"]
    with config.patch(post_grad_custom_pre_pass=Twice(own), force_disable_caches=True):
        torch.compile(g0)(inputs(g0))
    ((once, twice),) = seen
    assert once == twice
    assert once.count("kernel = 'reference'") + once.count("kernel: reference") == 1


@pytest.mark.parametrize("entry", ["compile", "fullgraph", "module", "dynamic"])
def test_what_runs_is_what_was_fused(entry):
    """Calls are counted when they run, not nodes of a graph."""
    g0 = variant()
    how = {"fullgraph": True} if entry == "fullgraph" else {}
    how = {"dynamic": True} if entry == "dynamic" else how
    target = prologue
    if entry == "module":

        class Layer(torch.nn.Module):
            def forward(self, x):
                return prologue(x)

        target = Layer()
    fn = torch.compile(target, backend="fusion", options={"inner": "aot_eager"}, **how)
    fn(inputs(g0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn(inputs(g0))
    calls = {e.key: e.count for e in profile.key_averages() if e.key.startswith("fusion::")}
    assert calls == {"fusion::qk_norm_rope_kv_cache": 1}


@pytest.mark.parametrize("many", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_many_blocks_in_one_graph(many):
    """Reading, checking and rewriting take time in proportion to the blocks."""
    g0 = variant(dim=16)
    spent = {}
    for blocks in (4, many):

        def model(*xs):
            return [g0(x) for x in xs]

        start = time.process_time()
        report = fusion.explain(model, *(inputs(g0, seed) for seed in range(blocks)))
        spent[blocks] = time.process_time() - start
        assert [s.status for s in report.sites] == ["fused"] * blocks
    assert spent[many] < 2 * spent[4] * many / 4


def test_a_misspelt_pass_is_an_error_and_not_a_zero():
    x = inputs(variant())
    report = fusion.explain(prologue, x)
    fusion.expect(report, qk_norm_rope_kv_cache=1)
    with pytest.raises(ValueError, match="did you mean 'qk_norm_rope_kv_cache'"):
        fusion.expect(report, qk_norm_rope_kv_cahce=1)
    with pytest.raises(Exception, match="unknown option 'qk_norm_rope_kv_cahce'; did you mean"):
        compiled(prologue, qk_norm_rope_kv_cahce="required")(x)
    # No attention in the graph: that pass was not applicable, which is no miss.
    assert [s for s in report.sites if s.pass_name == "non_causal_attention"] == []
    fusion.expect(report, non_causal_attention=0)
