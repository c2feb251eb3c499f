"""``fusion.explain``, ``capture`` and ``verify``: no kernel runs, nothing changes, all is seen."""

from __future__ import annotations

import copy
import itertools
import json
import random

import jsonschema
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusion
from fusion.explaining import CaptureError
from fusion.verifying import VerifyError, compare
from tests.test_report import schema
from tests.toy_passes import Broken, Model, SinToCos, inputs, use_passes

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_passes(monkeypatch, SinToCos)


RAN: list[str] = []


@torch.library.custom_op("fusion_test::count", mutates_args=("seen",))
def count(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """An operator that notices when its kernel runs."""
    RAN.append("count")
    seen.add_(1)
    return x.clone()


@count.register_fake
def _(x, seen):
    return torch.empty_like(x)


class Counting(Model):
    """A model whose kernels would be noticed, and whose Python state would be, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last = torch.zeros(1)

    def forward(self, x, slots):
        self.calls += 1
        self.last = self.last + x.sum()
        x = torch.ops.fusion_test.count(x, self.seen)
        return super().forward(x, slots)


def statuses(report):
    return [(s.layer, s.status) for s in report.sites]


FUSED = [("layers.0", "fused"), ("layers.1", "fused")]


def test_nothing_runs_and_nothing_changes():
    RAN.clear()
    model, (x, slots) = Counting(), inputs()
    before = copy.deepcopy(model.state_dict())
    report = fusion.explain(model, x, slots)
    assert statuses(report) == FUSED
    assert report.graphs[0].phase == "explain"
    assert RAN == []
    assert model.calls == 0
    assert type(model.last) is torch.Tensor
    assert torch.equal(model.last, torch.zeros(1))
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name])
    model(x, slots)
    assert RAN == ["count"]  # the operator would have been noticed


def test_explaining_leaves_no_trace_in_dynamo():
    model = Model()
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    for tokens in range(2, 12):  # more often than Dynamo's recompile limit, other sizes each time
        assert statuses(fusion.explain(model, *inputs(tokens))) == FUSED
    assert entries(Model.forward.__code__) == []
    seen = []

    def backend(gm, args):
        seen.append([tuple(a.shape) for a in args if isinstance(a, torch.Tensor)])
        return gm.forward

    torch.compile(model, backend=backend)(*inputs(20))
    assert any((20, 4) in shapes for shapes in seen)  # still static: no size was seen before


def test_fake_and_meta_models_need_no_memory():
    size = 1 << 17  # a weight of 64 GiB

    class Huge(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(size, size, bias=False)
            self.register_buffer("cache", torch.zeros(size, size))

        def forward(self, x, slots):
            y = self.proj(x).sin()
            self.cache.index_copy_(0, slots, y)
            return y

    with torch.device("meta"):
        model = Huge()
        args = (torch.randn(3, size), torch.arange(3))
    report = fusion.explain(model, *args)
    assert [s.status for s in report.sites] == ["fused"]
    (graph,) = fusion.capture(model, *args)
    devices = {n.meta["val"].device.type for n in graph.graph.nodes if n.op == "placeholder"}
    assert devices == {"cpu"}
    assert model.cache.device.type == "meta"
    with FakeTensorMode():
        fake = Huge()
        args = (torch.empty(3, size), torch.empty(3, dtype=torch.int64))
    assert [s.status for s in fusion.explain(fake, *args).sites] == ["fused"]


def test_a_fake_model_is_followed_through_graph_breaks():
    class Breaking(Model):
        def forward(self, x, slots):
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[1](x + self.seen[slots])

    mode = FakeTensorMode()
    with mode:
        model, args = Breaking(), inputs()
    report = fusion.explain(model, *args)
    assert [[s.status for s in g.sites] for g in report.graphs] == [["fused"], ["fused"]]
    assert all(g.reasons == () for g in report.graphs)
    assert mode.allow_non_fake_inputs is False


def test_views_of_one_meta_storage_still_share_it():
    both = torch.empty(8, 2, 4, device="meta")
    seen = []

    def function(k, v, slots, x):
        seen.append(k.untyped_storage()._cdata == v.untyped_storage()._cdata)
        k.index_copy_(0, slots, x)
        return v + 1

    def eager(*args):
        torch._dynamo.graph_break()
        return function(*args)

    x = torch.empty(3, 4, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    fusion.capture(eager, both[:, 0], both[:, 1], slots, x)
    assert seen and all(seen)


def test_gradients_are_off():
    with torch.enable_grad():
        assert statuses(fusion.explain(Model(), *inputs())) == FUSED


def test_graph_breaks_give_several_graphs_and_the_source_line():
    def function(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.sin() + 1

    report = fusion.explain(function, torch.randn(3))
    assert [[s.status for s in g.sites] for g in report.graphs] == [["fused"], ["fused"]]
    assert [s.layer for s in report.sites] == [None, None]
    assert all("test_explain.py:" in s.source for s in report.sites)
    assert report.sites[0].source != report.sites[1].source


def test_data_dependent_python_stops_with_a_reason():
    def function(x):
        y = x.sin()
        if y.sum() > 0:  # a graph break that needs the number
            return y.sin()
        return y

    report = fusion.explain(function, torch.randn(3))
    assert [s.status for s in report.graphs[0].sites] == ["fused"]
    assert [r.code for r in report.graphs[-1].reasons] == ["match.capture"]


def test_what_cannot_be_traced_at_all_is_an_error():
    def function(x):
        raise KeyError("nothing here")

    with pytest.raises(CaptureError, match="nothing here"):
        fusion.explain(function, torch.randn(3))
    with pytest.raises(CaptureError, match="int is not something that can be called"):
        fusion.explain(3)


def test_dynamic_sizes_stay_symbolic():
    (graph,) = fusion.capture(Model(), *inputs(5), dynamic=True)
    shapes = [n.meta["val"].shape for n in graph.graph.nodes if n.target is aten.sin.default]
    assert all(isinstance(s[0], torch.SymInt) for s in shapes)
    assert statuses(fusion.explain(Model(), *inputs(5), dynamic=True)) == FUSED


def test_compiled_models_and_bound_methods_are_unwrapped():
    model, args = Model(), inputs()
    assert statuses(fusion.explain(torch.compile(model), *args)) == FUSED
    assert statuses(fusion.explain(model.forward, *args)) == FUSED
    assert statuses(fusion.explain(torch.compile(model.forward), *args)) == FUSED
    model.register_forward_hook(lambda module, args, out: out + 1)
    assert statuses(fusion.explain(model, *args)) == FUSED


def test_exported_programs():
    model, args = Model(), inputs()
    program = torch.export.export(model, args)
    report = fusion.explain(program)
    assert statuses(report) == FUSED
    assert report.graphs[0].phase == "export"
    (graph,) = fusion.capture(program)
    writes = [n for n in graph.graph.nodes if n.target is aten.copy_.default]
    assert len(writes) == 1  # the mutated buffer is written back, as in other captures
    assert writes[0].args[0].op == "placeholder"


def test_a_target_that_is_not_here():
    model, args = Model(), inputs()
    report = fusion.explain(model, *args, target="gfx942")
    assert report.target["vendor"] == "amd"
    assert report.target["origin"] == "parsed"
    described = fusion.Target.parse("gfx942", aiter="0.1.20")
    report = fusion.explain(model, *args, target=described)
    assert report.target["versions"] == {"aiter": "0.1.20"}
    (graph,) = fusion.capture(model, *args, device="cuda")
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    assert {v.device.type for v in values} == {"cuda"}
    assert all(isinstance(v, FakeTensor) for v in values)


def test_options_and_required_are_reported_not_raised():
    model, args = Model(), inputs()
    options = {"sin_to_cos": {"mode": "required", "skip": "layers.1"}}
    report = fusion.explain(model, *args, options=options)
    assert statuses(report) == [("layers.0", "fused"), ("layers.1", "missed")]
    assert report.passes[0].mode == "required"
    off = fusion.explain(model, *args, options={"sin_to_cos": "off"})
    assert [s.status for s in off.sites] == ["off", "off"]


def test_reports_fit_the_schema():
    report = fusion.explain(
        Model(), *inputs(), target="sm_90", options={"sin_to_cos": {"skip": ""}}
    )
    jsonschema.validate(json.loads(report.to_json()), schema())
    assert fusion.Report.from_json(report.to_json()).to_dict() == report.to_dict()


def test_an_observer_sees_each_pass():
    seen = []
    fusion.explain(Model(), *inputs(), observer=seen.append)
    assert [e.pass_name for e in seen] == ["sin_to_cos"]
    assert seen[0].changed


# --- expect ----------------------------------------------------------------------------------


def test_expect():
    report = fusion.explain(Model(3), *inputs(), options={"sin_to_cos": {"skip": "layers.2"}})
    assert fusion.expect(report, sin_to_cos=2) is report
    fusion.expect(report, sin_to_cos=">=2")
    fusion.expect([report], sin_to_cos="2")
    with pytest.raises(AssertionError) as error:
        fusion.expect(report, sin_to_cos="all")
    for part in ("found 2 of 3", "layers.2", "match.rope-form: this layer is skipped"):
        assert part in str(error.value)
    assert "layers.1" not in str(error.value)
    with pytest.raises(AssertionError, match="expected at least 3"):
        fusion.expect(report, sin_to_cos=">= 3")
    with pytest.raises(ValueError, match=r"did you mean 'sin_to_cos'.*Passes: sin_to_cos"):
        fusion.expect(report, sin_to_soc=2)
    for wrong in ("2+", -1, True, 1.0):
        with pytest.raises(ValueError, match="a number, '>=N' or 'all'"):
            fusion.expect(report, sin_to_cos=wrong)
    with pytest.raises(TypeError, match="a report or a compiled model"):
        fusion.expect(3, sin_to_cos=2)


def test_expect_all_wants_at_least_one():
    report = fusion.explain(lambda x: x + 1, torch.randn(3))
    with pytest.raises(AssertionError, match="no site of this pass"):
        fusion.expect(report, sin_to_cos="all")
    fusion.expect(report, sin_to_cos=0)


# --- verify ----------------------------------------------------------------------------------


def test_verify_finds_the_difference_the_bytes_and_the_site():
    model, (x, slots) = Model(), inputs()
    before = model.seen.clone()
    result = fusion.verify(model, x, slots, options={"sin_to_cos": {"skip": "layers.0"}})
    assert not result.equal
    want = (model.expected(x, fused=False) * 0).shape
    assert result.outputs[0].shape == tuple(want)
    assert [d.name for d in result.mutated if not d.equal] == ["buffer seen"]
    assert result.first_bad_site.layer == "layers.1"
    assert result.max_abs_error > 0.01
    site = next(s for s in result.report.sites if s.status == "fused")
    assert site.validation["verify"]["equal"] is False
    assert "NOT equal" in result.to_text()
    assert "layers.1" in result.to_text()
    json.dumps(result.to_dict(), allow_nan=False)
    assert torch.equal(model.seen, before)


def test_verify_of_an_honest_pipeline_is_equal(monkeypatch):
    use_passes(monkeypatch, Broken)  # undone, so nothing changed
    result = fusion.verify(Model(), *inputs())
    assert result.equal
    assert result.max_abs_error == 0.0
    assert result.first_bad_site is None


def test_verify_gives_every_run_the_same_random_numbers_and_takes_none():
    def model(x):
        return torch.rand_like(x) * random.random() + torch.nn.functional.dropout(x)

    before = torch.get_rng_state(), random.getstate()
    result = fusion.verify(model, torch.ones(64))
    assert result.equal, result
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    with pytest.raises(Exception, match="inside the model"):
        fusion.verify(_raising, torch.ones(64))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_verify_keeps_the_random_numbers_of_every_device(monkeypatch):
    """Of all that are in use, and starts none (devices that this machine may not have)."""
    from fusion.verifying import _same_chance

    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({device: state})
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with _same_chance():
        states.update({0: "used", 1: "used"})
    assert states == {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with _same_chance():
        states.update({0: "used", 1: "used"})
    assert states == {0: "used", 1: "used"}


@pytest.mark.gpu
def test_verify_gives_every_run_the_same_random_numbers_of_the_gpu():
    x = torch.ones(64, device="cuda")
    before = torch.cuda.get_rng_state()
    assert fusion.verify(lambda x: torch.rand_like(x) + torch.nn.functional.dropout(x), x).equal
    assert torch.equal(torch.cuda.get_rng_state(), before)


def _raising(x):
    torch.rand(3)
    torch._dynamo.graph_break()
    raise RuntimeError("inside the model")


def test_verify_of_a_model_that_differs_by_itself_does_not_blame_fusion():
    counter = itertools.count()

    def model(x):
        torch._dynamo.graph_break()
        return x + next(counter)

    result = fusion.verify(torch.compiler.disable(model), torch.ones(3))
    assert not result.equal and result.innocent
    assert "nothing was fused, so fusion cannot be the cause" in result.to_text()
    model, (x, slots) = Model(), inputs()
    fused = fusion.verify(model, x, slots, options={"sin_to_cos": {"skip": "layers.0"}})
    assert not fused.equal and not fused.innocent
    assert "cannot be the cause" not in fused.to_text()


def test_verify_needs_a_model_that_can_be_copied():
    class Stuck(Model):
        def __deepcopy__(self, memo):
            raise RuntimeError("not this one")

    with pytest.raises(VerifyError, match="not this one"):
        fusion.verify(Stuck(), *inputs())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_compare_looks_at_bytes(dtype):
    a = torch.tensor([0.0, 1.0, 0.0, 1.0]).to(dtype)
    b = a.clone()
    assert compare("x", a, b).equal
    b[1] = torch.zeros((), dtype=dtype)
    found = compare("x", a, b)
    assert (found.equal, found.mismatched, found.max_abs_error) == (False, 1, 1.0)
    assert not compare("x", a, a[:2]).equal
    assert not compare("x", a, a.to(torch.float64)).equal


def test_compare_tells_zeros_and_nans_apart():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compare("x", nan, nan.clone()).equal
    assert not compare("x", zero, -zero).equal
    assert compare("x", nan, zero).max_abs_error == 0.0  # no finite difference, yet not equal
    assert not compare("x", nan, zero).equal
