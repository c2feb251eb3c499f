"""The report: data in and out, grouping, text, HTML, and the shipped JSON Schema."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from importlib import resources

import jsonschema
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.graph.provenance import frames_of, layer_of, short_path, source_of
from fusion.pipeline import required_text
from fusion.reason import Reason
from fusion.render import fact_text, summary, to_text
from fusion.report import (
    Candidate,
    GraphReport,
    PassStatus,
    Report,
    Site,
    group,
    plain,
)

GATE = Reason("gate.head-dim", "head size", have="96", need="64, 128", node="mul_3")
ORDER = Reason("match.norm-order", "rope stands before the norm", node="add_7")


def site(layer: int, **changes: object) -> Site:
    fused = Site(
        "qk_norm_rope_kv_cache",
        "fused",
        "qk_norm_rope_kv_cache",
        "reference",
        f"model.layers.{layer}.self_attn",
        "transformers/models/qwen3/modeling_qwen3.py:250",
        facts={"rotary_dim": 64, "eps": 1e-6},
        nodes=({"name": "mul", "target": "aten.mul.Tensor", "fact": "norm", "source": None},),
        validation={"status": "equal", "max_abs_error": 0.0},
    )
    return replace(fused, **changes)


def report() -> Report:
    sites = (
        site(0),
        site(1),
        site(2),
        site(3, status="missed", kernel=None, reasons=(ORDER,), depth=4, hint="swap them"),
        site(
            4,
            status="refused",
            kernel=None,
            reasons=(GATE,),
            candidates=(Candidate("aiter", False, (GATE,)), Candidate("triton", True)),
        ),
        Site(
            "non_causal_attention",
            "missed",
            layer="model.layers.0.self_attn",
            reasons=(Reason("match.attention-op", "the call is causal"),),
            applicable=False,
        ),
    )
    broken = Reason("plugin.broken", "no module named extra")
    return Report(
        (GraphReport("0/0", sites, phase="post_grad", times={"total": 0.5}, nodes=(90, 60)),),
        (
            PassStatus("qk_norm_rope_kv_cache", "built", options={"max_tokens": None}),
            PassStatus("extra", "not-built", (broken,), origin="extra (extra:Pass)"),
        ),
        {"vendor": "cpu", "arch": "cpu", "origin": "probed"},
        {"fusion": "0.1.0", "torch": "2.13.0", "triton": None, "aiter": None},
        {"inner": "inductor"},
        {"compile": 1.5},
    )


def schema() -> dict:
    text = resources.files("fusion").joinpath("schema/report.schema.json").read_text("utf-8")
    return json.loads(text)


def test_json_round_trip_and_schema():
    first = report()
    data = json.loads(first.to_json())
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(data, schema())
    again = Report.from_json(first.to_json())
    assert again.to_dict() == first.to_dict()
    assert again.to_text() == to_text(first)  # which has no line of code
    assert again.graphs[0].sites[4].candidates[0].reasons == (GATE,)


def test_the_schema_is_not_empty_words():
    data = report().to_dict()
    data["graphs"][0]["sites"][0]["status"] = "done"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())
    data = report().to_dict()
    del data["graphs"][0]["sites"][0]["reasons"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())


def test_another_schema_number_is_an_error():
    data = {**report().to_dict(), "schema": 2}
    with pytest.raises(ValueError, match="schema 2"):
        Report.from_dict(data)


def test_identical_outcomes_are_grouped():
    groups = group(report().sites)
    assert [len(g.sites) for g in groups] == [3, 1, 1, 1]
    text = report().to_text()
    assert "3 layers" in text
    assert "fused, reference" in text
    assert "graph 0/0 (post_grad): 3 fused, 1 missed, 1 refused, 1 left alone" in text


def test_text_explains_misses_and_only_those():
    text = report().to_text()
    for part in (
        "match.norm-order: rope stands before the norm",
        "have 96, need 64, 128",
        "at mul_3",
        "remedy: ",
        "nearest change: swap them",
        "kernel aiter refused",
        "read: eps: 1e-06",
        "pass extra: not-built (plugin.broken: no module named extra)",
        "left alone: the call is causal",
    ):
        assert part in text
    assert "model.layers.3.self_attn" in text
    assert "model.layers.1.self_attn" not in text  # grouped
    assert "model.layers.1.self_attn" in report().to_text(all_sites=True)
    assert "triton refused" not in text


def test_facts_are_words():
    assert fact_text({"layout": "NHD", "rows": [5, None], "inner": {"a": True}}) == (
        "layout NHD, rows [5, none], inner a True"
    )


def test_text_says_why_a_preferred_kernel_was_passed_over():
    chosen = site(
        0,
        kernel="triton",
        candidates=(Candidate("aiter", False, (GATE,)), Candidate("triton", True)),
    )
    text = Report((GraphReport("0/0", (chosen,)),)).to_text()
    assert "triton, because aiter was refused" in text
    assert "gate.head-dim: head size" in text
    # What stands behind the chosen one in the order of preference is of no interest.
    behind = replace(chosen, candidates=tuple(reversed(chosen.candidates)))
    assert "refused" not in Report((GraphReport("0/0", (behind,)),)).to_text()


ARCH = Reason("gate.arch", "is not built for sm_90", have="sm_90", need="gfx942")
NO_PACKAGE = Reason("gate.backend-unavailable", "AITER is not installed", need="amd-aiter")


def test_a_kernel_for_other_chips_is_told_of_once_and_is_all_there_in_json_and_detail():
    foreign = (Candidate("aiter", False, (ARCH.at("mul_3"), NO_PACKAGE)), Candidate("triton", True))
    missed = {"status": "missed", "kernel": None, "reasons": (ORDER,), "candidates": foreign}
    sites = (
        site(0, kernel="triton", candidates=foreign),
        site(1, kernel="triton", candidates=foreign, operation="rope_kv_cache"),
        site(2, **missed),
    )
    found = Report((GraphReport("prefill", sites), GraphReport("decode", sites)))
    text = found.to_text()
    line = (
        "kernel aiter refused on this target: gate.arch: is not built for sm_90 "
        "(have sm_90, need gfx942)"
    )
    assert text.splitlines()[1] == line
    assert text.count("is not built for") == 1
    assert "gate.backend-unavailable" not in text
    # A site where nothing was done says so again, shortly; the chosen kernel needs no excuse.
    assert text.count("kernel aiter refused: gate.arch, see above") == 2
    assert "because aiter" not in text
    full = to_text(found, details=True)
    assert full.count("gate.arch: is not built for sm_90") == 6
    assert full.count("gate.backend-unavailable: AITER is not installed") == 6
    assert "see above" not in full
    assert found.to_json(None).count("gate.backend-unavailable") == 6
    # On its own vendor's chips a kernel that is missing is told of at each group.
    missing = (Candidate("aiter", False, (NO_PACKAGE,)), Candidate("triton", True))
    sites = tuple(replace(s, candidates=missing) for s in sites[:2])
    text = Report((GraphReport("decode", sites),)).to_text()
    assert text.count("because aiter was refused") == 2
    # What stands behind the chosen kernel was not wanted, on whatever chip.
    behind = site(0, kernel="triton", candidates=tuple(reversed(foreign)))
    assert "aiter" not in Report((GraphReport("decode", (behind,)),)).to_text()


def test_reasons_of_a_kernel_that_say_the_same_are_one_with_all_needs():
    code, said = "gate.backend-unavailable", "AITER is not installed on this target"
    needs = ("aiter >=0.1.12", "aiter >=0.1.19", "aiter >=0.1.12")
    reasons = [Reason(code, said, have="nothing", need=need) for need in needs]
    reasons.insert(1, Reason("gate.head-dim", "head size is 32", have="32", need="64"))
    aiter = Candidate("aiter", False, tuple(reasons))
    taken = site(1, candidates=(aiter, Candidate("triton", True)), kernel="triton")
    missed = site(2, status="refused", reasons=(), candidates=(aiter,))
    for one in (taken, missed):
        whole = replace(report(), graphs=(GraphReport("0", (one,)),))
        for text in (whole.to_text(), whole.to_html()):
            assert text.count(said) == 1
            assert text.count("aiter &gt;=0.1.12 and aiter &gt;=0.1.19") == ("<html" in text)
            assert text.count("aiter >=0.1.12 and aiter >=0.1.19\n") == ("<html" not in text)
        assert len(json.loads(whole.to_json())["graphs"][0]["sites"][0]["candidates"][0]["reasons"]
                   ) == 4  # fmt: skip
        text = whole.to_text()
        assert text.index(said) < text.index("head size is 32")


@pytest.mark.parametrize(
    ("known", "place", "line"),
    [
        ({"layer": "a.b", "source": "net.py:14"}, "a.b at net.py:14", "missed: a.b at net.py:14"),
        ({"layer": None, "source": "net.py:14"}, "net.py:14", "missed: net.py:14"),
        ({"layer": "a.b", "source": None}, "a.b", "missed: a.b"),
        ({"layer": None, "source": None}, "node copy_", "missed: node copy_"),
        ({"layer": None, "source": None, "nodes": ()}, "node sin_1", "missed: node sin_1"),
        ({"layer": None, "source": None, "nodes": (), "reasons": ()}, "-", "missed: -"),
    ],
)
def test_a_place_is_said_once(known, place, line):
    reasons = (Reason("match.rope-sign", "no", node="sin_1"),)
    base = {"status": "missed", "reasons": reasons, "nodes": ({"name": "copy_"},)}
    one = replace(site(1), **{**base, **known})
    assert one.place() == place
    whole = replace(report(), graphs=(GraphReport("0", (one,)),))
    assert f"  {line}" in whole.to_text().splitlines()
    with pytest.raises(AssertionError, match=rf"(?m)^    {place}: missed$"):
        fusion.expect(whole, **{one.pass_name: 1})
    required = required_text([one])
    assert f"\n  {place}: missed\n" in required and "?" not in required


def test_what_a_refused_site_says_is_not_said_again_by_its_kernel():
    place = "modeling.py:5"
    here = replace(GATE, node=None, source=place)
    candidates = (Candidate("aiter", False, (GATE,)), Candidate("triton", False, (ORDER, GATE)))
    refused = site(0, status="refused", source=place, reasons=(here,), candidates=candidates)
    found = Report((GraphReport("0/0", (refused,)),))
    text = to_text(found, code=lambda _: "key = rope(key)")
    assert "    kernel aiter refused: gate.head-dim, see above\n" in text
    assert "    kernel triton refused\n      match.norm-order:" in text
    assert text.count(place) == 1 and text.count("| key = rope(key)") == 1


@pytest.mark.parametrize(
    ("layers", "noun"),
    [
        (["model.layers.0.attn", "model.layers.1.attn"], "layers"),
        (["encoder.layers.0.attn", "decoder.layers.0.attn"], "layers"),
        (["3.attn", "4.attn"], "layers"),
        (["0", "1"], "layers"),
        (["layers.0.attn", "layers.0.cross"], "sites"),
        (["layers.0.experts.0", "layers.0.experts.1"], "sites"),
        (["layers.0.attn", "layers.0.attn"], "sites"),
        (["cross", "self_attn"], "sites"),
        (["conv1d.a", "conv2d.a"], "sites"),
        (["layers.0.attn", None], "sites"),
    ],
)
def test_only_numbered_layers_are_called_layers(layers, noun):
    sites = tuple(replace(site(0), layer=layer) for layer in layers)
    assert f"  2 {noun}  " in Report((GraphReport("0/0", sites),)).to_text()


def test_lines_of_code_are_shown_unless_the_report_was_stored():
    """A file may have changed since a report was written; its line numbers may mean others."""
    line = inspect.currentframe().f_lineno  # the line that the report shows
    place = f"{__file__}:{line}"
    wrong = replace(ORDER, source=place)
    sites = (site(0, status="missed", kernel=None, source="elsewhere.py:3", reasons=(wrong,)),)
    found = Report((GraphReport("0/0", sites),))
    shown = "| line = inspect.currentframe().f_lineno  # the line that the report shows\n"
    assert found.to_text().count(shown) == 1
    assert shown[2:-1] in found.to_html()
    again = Report.from_json(found.to_json())
    assert again == found
    both = Report.merge([again, replace(found, graphs=(replace(found.graphs[0], id="1/0"),))])
    assert shown not in again.to_text() and shown[2:-1] not in again.to_html()
    assert both.to_text().count(shown) == 1
    assert place in again.to_text()


def test_a_site_left_alone_is_no_near_miss():
    sites = report().sites
    assert [s.near_miss for s in sites] == [False, False, False, True, True, False]
    assert summary(sites[-1]) == "left alone: the call is causal"


def test_partial_names_the_smaller_operation_and_why():
    partial = site(0, status="partial", operation="rope_kv_cache", reasons=(ORDER,))
    assert summary(partial) == "partial as rope_kv_cache, reference: match.norm-order"


def test_html_is_self_contained_and_escapes():
    evil = replace(
        site(9), layer="<script>alert(1)</script>", facts={"x": '"><img src=x onerror=y>'}
    )
    page = replace(report(), graphs=(GraphReport("<b>", (evil,)),)).to_html()
    assert "<script>alert" not in page
    assert page.count("<script") == 1  # the search box
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page
    assert "match.norm-order" in report().to_html()


def test_merge_keeps_graphs_passes_and_adds_times():
    one = report()
    both = Report.merge([one, replace(one, passes=(PassStatus("other", "built"),))])
    assert len(both.graphs) == 2
    assert [p.name for p in both.passes] == ["qk_norm_rope_kv_cache", "extra", "other"]
    assert both.times == {"compile": 3.0}
    assert both.count("qk_norm_rope_kv_cache") == 6
    assert Report.merge([]) == Report()


def test_an_unknown_status_is_an_error():
    with pytest.raises(ValueError, match="none of fused"):
        Site("p", "done")


def test_plain_makes_json_of_anything():
    value = {"a": float("nan"), 1: (torch.float32, {3, 1}), "c": [float("-inf"), 0.5, None, True]}
    made = plain(value)
    assert json.loads(json.dumps(made, allow_nan=False)) == {
        "a": "nan",
        "1": ["torch.float32", [1, 3]],
        "c": ["-inf", 0.5, None, True],
    }


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("L['self'].model.layers.0.self_attn", "model.layers.0.self_attn"),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("L['model'].layers[2].attn", "layers.2.attn"),
        ("getattr(L['self'].model.layers, '0').attn", "model.layers.0.attn"),
        ("getattr(getattr(L['self'].model, 'layers'), '0')", "model.layers.0"),
        ("L['self'].__dict__['_modules']['layers']._modules['1']", "layers.1"),
        ("L['args'][0].model.layers[0].attn", "model.layers.0.attn"),
        ("L['layers'][3].attn", "3.attn"),
        ("L['self']", None),
        ("", None),
        ("model.layers.0", "model.layers.0"),
    ],
)
def test_layer_paths(path: str, layer: str | None):
    gm = make_fx(lambda x: x.sin())(torch.ones(2))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta["nn_module_stack"] = {"k": (path, torch.nn.Linear)}
    assert layer_of(node) == layer


def test_source_is_the_model_file_and_never_torch():
    gm = make_fx(lambda x: x.sin())(torch.ones(2))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta.pop("stack_trace", None)
    assert source_of(node) is None
    torch_file = torch.nn.modules.linear.__file__
    node.meta["stack_trace"] = (
        f'  File "{__file__}", line 7, in forward\n    a\n'
        f'  File "{torch_file}", line 9, in forward\n    b\n'
        '  File "<string>", line 3, in f\n'
    )
    assert frames_of(node) == ((__file__, 7),)
    assert source_of(node).endswith("test_report.py:7")
    # A helper outside the file of the layer's class is not where the layer is.
    node.meta["stack_trace"] += '  File "/elsewhere/helper.py", line 5, in f\n'
    assert source_of(node) == "/elsewhere/helper.py:5"
    node.meta["nn_module_stack"] = {"k": ("L['self'].a", f"{__name__}.Layer")}
    assert source_of(node).endswith("test_report.py:7")


def test_paths_below_site_packages_are_short():
    assert short_path("/x/lib/site-packages/transformers/a.py") == "transformers/a.py"
