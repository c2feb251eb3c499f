"""``torch.compile(backend="fusion")``: what runs, what is reported, what the caches keep apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fusion
from fusion import registry, store
from fusion.graph import compat
from fusion.registry import REGISTRY
from tests.toy_passes import Broken, Model, SinToCos, inputs, use_passes

ROOT = Path(__file__).resolve().parent.parent
EAGER = {"inner": "aot_eager"}


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_passes(monkeypatch, SinToCos)
    REGISTRY.clear()
    yield
    REGISTRY.clear()


def compiled(model, **options):
    more = {k: options.pop(k) for k in ("dynamic", "mode", "fullgraph") if k in options}
    return torch.compile(model, backend="fusion", options={**EAGER, **options}, **more)


def sites(report):
    return [(s.layer, s.status) for s in report.sites]


def test_the_graph_that_is_reported_is_the_one_that_runs():
    model, (x, slots) = Model(), inputs()
    y = compiled(model)(x, slots)
    torch.testing.assert_close(y, model.expected(x))
    torch.testing.assert_close(model.seen[:3], y / 2)
    (report,) = fusion.reports()
    assert sites(report) == [("layers.0", "fused"), ("layers.1", "fused")]
    assert report.graphs[0].phase == "aot_eager"
    assert report.sites[0].source.endswith(f"toy_passes.py:{source_line()}")
    assert report.target["arch"] and report.versions["torch"] == torch.__version__
    assert report.times["compile"] > 0


def source_line() -> int:
    lines = Path(ROOT / "tests/toy_passes.py").read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if "super().forward(x).sin()" in line)


def test_off_leaves_the_graph_and_says_so():
    model, (x, slots) = Model(), inputs()
    y = compiled(model, sin_to_cos="off")(x, slots)
    torch.testing.assert_close(y, model.expected(x, fused=False))
    assert sites(fusion.reports()[0]) == [("layers.0", "off"), ("layers.1", "off")]


def test_each_compiled_graph_is_one_entry():
    model = Model()
    run = compiled(model)
    run(*inputs(3))
    run(*inputs(3))
    assert len(fusion.reports()) == 1
    run(*inputs(5))  # a recompile, now with a dynamic size
    run(*inputs(7))
    reports = fusion.reports()
    assert len({r.graphs[0].id for r in reports}) == len(reports) == 2
    torch._dynamo.reset()  # Dynamo counts from 0/0 again
    run(*inputs(3))
    ids = [r.graphs[0].id for r in fusion.reports()]
    assert len(set(ids)) == 3
    assert fusion.reports(clear=True)
    assert fusion.reports() == []


def test_a_restart_of_the_analysis_is_not_counted_twice():
    seen = []

    class Context:
        compile_id, attempt = "0/0", 0

    context = Context()
    for attempt in (0, 1):
        context.attempt = attempt
        entry = REGISTRY.begin(context, registry.Report(), ())
        entry.seconds = attempt
        REGISTRY.commit(entry)
        seen.append(entry)
    assert REGISTRY.entries() == [seen[1]]


def test_a_dynamic_float_restarts_dynamo_once_and_is_reported_once():
    def function(x, scale):
        return x.sin() * scale

    run = compiled(function, dynamic=True)
    x = torch.randn(4)
    torch.testing.assert_close(run(x, 1.5), x.cos() * 1.5)
    assert len(fusion.reports()) == 1


def test_a_failed_compile_is_not_listed(monkeypatch):
    monkeypatch.setattr("fusion.backend._aot_eager", lambda *a: 1 / 0)
    with pytest.raises(Exception, match="division"):
        compiled(Model())(*inputs())
    assert fusion.reports() == []


def test_graph_breaks_give_several_graphs():
    def function(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.sin()

    x = torch.randn(3)
    torch.testing.assert_close(compiled(function)(x), x.cos().cos())
    assert [sites(r) for r in fusion.reports()] == [[(None, "fused")], [(None, "fused")]]
    fusion.expect(function, sin_to_cos=2)


def test_nested_graphs_are_looked_at():
    def function(flag, x):
        return torch.cond(flag, lambda x: x.sin() + 1, lambda x: x - 1, (x,))

    x = torch.randn(3)
    y = compiled(function)(torch.tensor(True), x)
    torch.testing.assert_close(y, x.cos() + 1)
    (report,) = fusion.reports()
    assert [s.status for s in report.sites] == ["fused"]


def test_required_fails_the_compile_with_the_table():
    model = Model()
    run = compiled(model, sin_to_cos={"mode": "required", "skip": "layers.1"})
    with pytest.raises(Exception, match="sin_to_cos is required") as error:
        run(*inputs())
    for part in ("layers.1", "match.rope-form", "this layer is skipped", "remedy"):
        assert part in str(error.value)
    assert "layers.0" not in str(error.value)
    compiled(model, sin_to_cos="required")(*inputs())


def test_required_is_loud_through_inductor_too():
    run = torch.compile(
        lambda x: x.sin() + 1,
        backend="fusion",
        options={"sin_to_cos": {"mode": "required", "skip": ""}},
    )
    with pytest.raises(Exception, match="sin_to_cos is required") as error:
        run(torch.randn(3))
    assert type(error.value).__name__ == "BackendCompilerFailed"


def test_a_pass_that_fails_does_not_fail_the_compile(monkeypatch, caplog):
    use_passes(monkeypatch, Broken, SinToCos)
    model, (x, slots) = Model(), inputs()
    torch.testing.assert_close(compiled(model)(x, slots), model.expected(x))
    statuses = [s.status for s in fusion.reports()[0].sites]
    assert statuses == ["refused", "fused", "fused"]


def test_training_graphs_are_left_alone():
    model, (x, _) = Model(1), inputs()
    with torch.enable_grad():
        run = compiled(lambda x: model.layers[0](x))
        y = run(x)
        y.sum().backward()
    torch.testing.assert_close(y * 2, model.expected(x, fused=False))
    assert model.layers[0].weight.grad is not None
    assert [s.status for s in fusion.reports()[0].sites] == ["off"]


def test_unknown_options_and_modes_name_the_valid_ones():
    for options, text in (
        ({"sin_to_coss": "auto"}, "did you mean 'sin_to_cos'"),
        ({"inner": "outer"}, "inductor, aot_eager"),
        ({"sin_to_cos": "always"}, "off, auto, required"),
        ({"inductor": {"max_autotuned": True}}, "max_autotune"),
    ):
        with pytest.raises(Exception, match=text):
            compiled(Model(), **options)(*inputs())
    run = torch.compile(Model(), backend="fusion", mode="fastest")
    with pytest.raises(Exception, match="reduce-overhead"):
        run(*inputs())


def test_modes_and_patches_are_inductors_own():
    from torch._inductor import list_mode_options

    assert compat.inductor_patches("reduce-overhead", {}) == list_mode_options("reduce-overhead")
    both = compat.inductor_patches("max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    assert both["max_autotune"] is True
    assert both["epilogue_fusion"] is False
    assert compat.inductor_patches(None, {}) == {}


def test_several_configurations_in_several_threads():
    model, (x, slots) = Model(3), inputs()
    want = {
        "never": [True, True, True],
        "layers.1": [True, False, True],
        "layers.2": [True, True, False],
    }
    results, errors = {}, []

    def work(skip):
        try:
            with torch.no_grad():
                run = compiled(model.forward, sin_to_cos={"skip": skip})
                results[skip] = [run(x, slots) for _ in range(2)][-1]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(skip,)) for skip in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for skip, fused in want.items():
        y = x
        for layer, cos in zip(model.layers, fused, strict=True):
            y = torch.nn.functional.linear(y, layer.weight, layer.bias)
            y = y.cos() if cos else y.sin()
        torch.testing.assert_close(results[skip], y * 2)
    found = sorted([s.status == "fused" for s in r.sites] for r in fusion.reports())
    assert found == sorted(want.values())


def test_expect_reads_a_compiled_model():
    model = Model(3)
    run = compiled(model, sin_to_cos={"skip": "layers.1"})
    with pytest.raises(AssertionError, match="nothing of this model was compiled"):
        fusion.expect(run, sin_to_cos=2)
    run(*inputs(3))
    run(*inputs(5))  # two graphs, but each place counts once
    fusion.expect(run, sin_to_cos=2)
    fusion.expect(model, sin_to_cos=">=1")
    with pytest.raises(AssertionError, match=r"(?s)found 2 of 3.*layers\.1.*match\.rope-form"):
        fusion.expect(model, sin_to_cos="all")
    other = Model()
    with pytest.raises(AssertionError, match="nothing of this model"):
        fusion.expect(other, sin_to_cos=2)


# --- Inductor: other people's passes, and compile caches ---------------------------------------


class TanToSin:
    """Another library's pass (without a cache key)."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph):
        self.runs += 1
        for node in graph.nodes:
            if node.target is torch.ops.aten.tan.default:
                node.target = torch.ops.aten.sin.default


def test_an_installed_pass_is_kept_and_runs_first():
    from torch._inductor import config

    other = TanToSin()
    x = torch.randn(3)
    with config.patch(post_grad_custom_pre_pass=other):
        run = torch.compile(lambda x: x.tan() + 1, backend="fusion")
        torch.testing.assert_close(run(x), x.cos() + 1)
        assert config.post_grad_custom_pre_pass is other
    assert other.runs == 1
    assert config.post_grad_custom_pre_pass is None
    assert [s.status for s in fusion.reports()[0].sites] == ["fused"]


def test_passes_for_somebody_elses_compile():
    from torch._inductor import config

    other = TanToSin()
    patches = fusion.inductor_passes(existing=other)
    assert config.post_grad_custom_pre_pass is None
    x = torch.randn(3)
    run = torch.compile(lambda x: x.tan() - 1, options=patches)
    torch.testing.assert_close(run(x), x.cos() - 1)
    assert other.runs == 1
    (report,) = fusion.reports()
    assert [s.status for s in report.sites] == ["fused"]
    # Chaining onto a chain replaces fusion's own member and keeps the others.
    again = compat.chain(patches["post_grad_custom_pre_pass"], fusion.PassManager(()))
    assert [type(p) for p in again.passes] == [TanToSin, fusion.PassManager]


def test_a_chain_has_a_key_only_if_every_member_has_one():
    manager = fusion.PassManager(()).for_inductor()
    assert compat.chain(None, manager) is manager
    assert compat.is_graph_pass(manager)
    assert compat.chain(TanToSin(), manager).uuid() is None

    class Keyed(TanToSin):
        def uuid(self):
            return "keyed"

    compat.register_graph_pass(Keyed)
    assert compat.chain([Keyed()], manager).uuid() == ("keyed", manager.uuid())


CHILD = """
import json, os, sys, torch, fusion, fusion.pipeline
from torch._dynamo.utils import counters
from fusion import discovery
from tests.toy_passes import DropBias
fusion.pipeline.package_sources = lambda: "the tree may change while the test runs"
fusion.pipeline.module_source = fusion.pipeline.function_source = lambda _: "frozen"
info = discovery.PassInfo("drop_bias", DropBias, "tests")
discovery.discover = lambda: discovery.Discovered((info,), ())
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(3, 4)
found = []
for options, env in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    fusion.reports(clear=True)
    os.environ.update(env)
    with torch.no_grad():
        y = torch.compile(model, backend="fusion", options=options)(x)
    (report,) = fusion.reports()
    fused = report.sites[0].status == "fused"
    torch.testing.assert_close(y, x @ model[0].weight.T + (0 if fused else model[0].bias))
    hit = counters["aot_autograd"]["autograd_cache_hit"] > 0
    site = [report.sites[0].layer, report.sites[0].source, fused]
    found.append([hit, report.graphs[0].cached, site])
print(json.dumps(found))
"""


def child(folder: Path, *compiles: tuple[dict, dict]) -> list:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(compiles)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_compile_caches_keep_everything_apart(tmp_path):
    """Miss and hit sequence over two processes with one cache folder."""
    on, off = ({}, {}), ({"drop_bias": "off"}, {})
    cold = child(tmp_path, on, off)
    fused, plain = cold[0][2], cold[1][2]
    assert (fused[0], fused[2], plain[2]) == ("0", True, False)
    assert [c[:2] for c in cold] == [[False, False], [False, False]]
    option = ({"drop_bias": {"unused": "other"}}, {})
    switch = ({}, {"FUSION_AITER": "0"})
    assert child(tmp_path, on, off, option, switch) == [
        [True, True, fused],
        [True, True, plain],
        [False, False, fused],
        [False, False, fused],
    ]


def test_a_hit_without_a_stored_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "inductor_cache_dir", lambda: str(tmp_path))
    model, (x, slots) = Model(), inputs()
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    key = store.Key(gm, (x,), "salt")
    assert store.load(key) is None
    from fusion.backend import _from_store

    (graph,) = _from_store(key)
    assert [r.code for r in graph.reasons] == ["cache.no-report"]
    compiled(model)(x, slots)
    saved = REGISTRY.entries()[0].graphs
    store.save(key, saved)
    assert store.load(key) == saved
    # Other example sizes of the same graph: the newest report serves them.
    assert store.load(store.Key(gm, (torch.randn(9, 4),), "salt")) == saved
    assert store.load(store.Key(gm, (x,), "other salt")) is None
    next(tmp_path.rglob("*.json")).write_text("{broken")
    assert store.load(key) is None


def test_a_read_only_folder_loses_the_report_not_the_compile(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(compat, "inductor_cache_dir", lambda: str(blocked))
    key = store.Key(torch.fx.symbolic_trace(lambda x: x.sin()), ())
    store.save(key, [])
    assert store.load(key) is None


def test_stored_reports_take_on_the_layers_of_the_graph_that_hits(tmp_path, monkeypatch):
    """Regional compilation: layer 1 hits the entry that layer 0 made."""
    monkeypatch.setattr(compat, "inductor_cache_dir", lambda: str(tmp_path))
    compiled(Model())(*inputs())
    graphs = REGISTRY.entries()[0].graphs

    def key(layers):
        gm = torch.fx.symbolic_trace(lambda x: x.sin().sin())
        for node, layer in zip(gm.graph.nodes, [None, *layers, None], strict=True):
            if layer:
                node.meta["nn_module_stack"] = {"": (f"L['self'].{layer}", torch.nn.Linear)}
        return store.Key(gm, ())

    store.save(key(["layers.0", "layers.1"]), graphs)
    (graph,) = store.load(key(["layers.7", "layers.8"]))
    assert [s.layer for s in graph.sites] == ["layers.7", "layers.8"]


def test_the_report_is_in_the_structured_trace(monkeypatch):
    seen = []
    monkeypatch.setattr(
        compat, "trace_artifact", lambda name, payload: seen.append((name, payload()))
    )
    compiled(Model())(*inputs())
    ((name, text),) = seen
    assert name == "fusion_report"
    assert json.loads(text)["graphs"][0]["sites"][0]["status"] == "fused"


def test_import_is_light_and_works_without_the_optional_packages():
    code = (
        "import sys, time\n"
        "for name in ('triton', 'aiter', 'transformers', 'jinja2', 'rich', 'typer'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "start = time.perf_counter()\n"
        "import fusion\n"
        "fusion.Report, fusion.Target, fusion.reports, fusion.Config, fusion.PassManager\n"
        "print(time.perf_counter() - start)\n"
        "assert 'torch._inductor' not in sys.modules and 'torch._dynamo' not in sys.modules\n"
        "assert fusion.Target.current().vendor\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.0  # 0.3 s on an idle machine; this one may be busy
