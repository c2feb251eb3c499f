"""Plug-ins that are not as they should be, the machine that is probed, and lazy public names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import fusion
from fusion import discovery, target
from fusion.build import make_config, make_manager
from fusion.config import ConfigError
from fusion.pipeline import FusionRequiredError
from fusion.reason import Reason
from fusion.report import GraphReport, PassStatus, Report, Site
from fusion.target import Target
from tests.test_pipeline import FakeEntry, fresh_discovery, with_entries  # noqa: F401
from tests.toy_passes import SinToCos, use_passes

CPU = Target.parse("cpu")


def status(made: Any, name: str) -> PassStatus:
    return next(s for s in made.statuses() if s.name == name)


@pytest.mark.usefixtures("fresh_discovery")
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": "kernels"}, "'kernels' is the name of an option"),
        ({"name": "mine", "order": "first"}, "order of Odd is 'first', not a number"),
        ({"name": "mine", "order": True}, "not a number"),
        ({"name": "mine", "order": float("nan")}, "not a number"),
    ],
)
def test_a_class_that_cannot_be_a_pass_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], why: str
) -> None:
    odd = type("Odd", (), {**fields, "run": lambda self, graph, context: []})
    with_entries(monkeypatch, FakeEntry("odd", "odd:P", "odd", lambda: odd))
    (broken,) = discovery.discover().broken
    assert broken.reasons[0].code == "plugin.broken"
    assert why in broken.reasons[0].message


class Bare:
    """No dataclass: it has no options."""

    name: ClassVar[str] = "bare"

    def run(self, graph: Any, context: Any) -> list[Site]:
        return []


def test_a_pass_without_fields_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    use_passes(monkeypatch, Bare)
    assert discovery.pass_names() == {"bare": ()}
    (made,) = make_manager(make_config(None), CPU).passes
    assert isinstance(made, Bare)
    with pytest.raises(ConfigError, match="bare"):
        make_config({"bare": {"depth": 1}})


def test_a_plugin_that_cannot_be_built_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody gave it an option that it does not take: that is an error of theirs."""

    @dataclass(frozen=True)
    class Needy(Bare):
        size: int = 0

        def __post_init__(self) -> None:
            if self.size <= 0:
                raise ValueError(f"size is {self.size}")

    use_passes(monkeypatch, Needy)
    reason = status(make_manager(make_config(None), CPU), "bare").reasons[0]
    assert reason.code == "plugin.broken"
    assert "bare could not be built: tests: ValueError: size is 0" in reason.message
    assert make_manager(make_config({"bare": {"size": 3}}), CPU).passes == (Needy(3),)
    with pytest.raises(ConfigError, match="options of pass bare: size is -1"):
        make_manager(make_config({"bare": {"size": -1}}), CPU)
    with pytest.raises(ConfigError, match="size is '3', not int"):
        make_manager(make_config({"bare": {"size": "3"}}), CPU)


def test_annotations_that_cannot_be_read_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Untold(Bare):
        size: NotImported = 0  # type: ignore[name-defined] # noqa: F821

    use_passes(monkeypatch, Untold)
    made = make_manager(make_config({"bare": {"size": "any"}}), CPU)
    assert made.passes == (Untold("any"),)


@pytest.mark.usefixtures("fresh_discovery")
@pytest.mark.parametrize("load", [lambda: 1 / 0, lambda: int], ids=["raises", "no pass"])
@pytest.mark.parametrize("given", ["auto", "off", {"tile": 64}, {"mode": "off", "tile": [1]}])
def test_options_of_a_pass_that_does_not_load_are_no_error(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], given: Any
) -> None:
    """They were right before the plug-in broke; nobody can say that they are not now."""
    with_entries(monkeypatch, FakeEntry("mine", "mine:P", "mine", load))
    config = make_config({"mine": given})
    config.check(discovery.pass_names())  # a Config handed in ready-made
    broken = status(make_manager(config, CPU), "mine")
    assert (broken.status, broken.reasons[0].code) == ("not-built", "plugin.broken")
    with pytest.raises(ConfigError, match="unknown mode of mine"):
        make_config({"mine": "sometimes"})
    with pytest.raises(FusionRequiredError, match="mine is required, but was not built"):
        make_manager(make_config({"mine": {"mode": "required", "tile": 64}}), CPU)
    with pytest.raises(ConfigError, match="unknown option 'mines'"):
        make_config({"mines": given})


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: ["not here"], "TypeError: `unavailable` gave 'not here', not a Reason"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_pass_that_cannot_say_whether_it_is_available(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any], why: str
) -> None:
    @dataclass(frozen=True)
    class Unsure(Bare):
        def unavailable(self, config: Any, target: Any) -> Any:
            return answer()

    use_passes(monkeypatch, Unsure)
    reason = status(make_manager(make_config(None), CPU), "bare").reasons[0]
    assert reason.code == "internal.error"
    assert why in reason.message


# --- expect ----------------------------------------------------------------------------------


def site(layer: int) -> Site:
    return Site("sin_to_cos", "refused", layer=f"layers.{layer}", hint=f"hint {layer}",
                reasons=(Reason("gate.head-dim", "head size"),))  # fmt: skip


def test_expect_tells_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no = Reason("gate.arch", "only there", have="cpu", need="gfx942")
    lost = Reason("plugin.broken", "pass other could not be loaded")
    use_passes(monkeypatch, SinToCos, broken=(PassStatus("other", "not-built", (lost,)),))
    report = Report(graphs=(), passes=(PassStatus("sin_to_cos", "not-built", (no,)),))
    with pytest.raises(AssertionError) as error:
        fusion.expect(report, sin_to_cos=1)
    for part in ("the pass was not built", "only there", "no site of this pass in 0 graph(s)",
                 "pass other is broken", "pass other could not be loaded"):  # fmt: skip
        assert part in str(error.value)


def test_expect_lists_the_nearest_misses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    use_passes(monkeypatch, SinToCos)
    graph = GraphReport("a", tuple(site(i) for i in range(13)))
    with pytest.raises(AssertionError) as error:
        fusion.expect(Report(graphs=(graph,), passes=()), sin_to_cos=13)
    text = str(error.value)
    assert "nearest change: hint 9" in text
    assert "layers.10" not in text
    assert "... and 3 more" in text


def test_expect_of_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    use_passes(monkeypatch, SinToCos)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 2

    compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})
    with pytest.raises(AssertionError, match="nothing of this model was compiled"):
        fusion.expect(compiled, sin_to_cos=1)
    x = torch.randn(3)
    assert torch.equal(compiled(x), x.cos() + 2)
    report = fusion.expect(compiled, sin_to_cos=1)
    assert [s.status for g in report.graphs for s in g.sites] == ["fused"]
    assert fusion.expect(function, sin_to_cos=1).graphs == report.graphs


# --- the machine -----------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Target]:
    """Probe a machine whose torch says this of itself."""

    def probe(*, hip: Any = None, cuda: Any = None, gpu: Any = None) -> Target:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)

        def asked(_: int) -> Any:
            if isinstance(gpu, Exception):
                raise gpu
            return gpu

        monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
        monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
        return target._probe.__wrapped__()

    return probe


def test_probed_machines(machine: Callable[..., Target]) -> None:
    here = machine()
    assert (here.vendor, here.arch, here.origin) == ("cpu", "cpu", "probed")
    h200 = machine(cuda="12.8", gpu=(9, 0))
    assert (str(h200), h200.capability) == ("sm_90 (nvidia)", 90)
    assert h200.version_text("cuda") == "12.8"
    mi300 = machine(hip="7.1.0", gpu=SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"))
    assert (mi300.vendor, mi300.arch) == ("amd", "gfx942")
    assert str(mi300.version("rocm")) == "7.1.0"
    assert mi300.fp8_dtype == torch.float8_e4m3fnuz
    assert machine(cuda="12.8").vendor == "cpu"  # a build for CUDA on a machine without a GPU


def test_driver_trouble_is_told_and_leaves_a_cpu(machine: Callable[..., Target]) -> None:
    found = machine(cuda="12.8", gpu=RuntimeError("no driver"))
    assert (found.vendor, found.arch) == ("cpu", "cpu")
    assert found.version_text("probe-error") == "RuntimeError: no driver"


# --- public names ----------------------------------------------------------------------------


def test_public_names_are_loaded_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("layout", "ops", "verify"):
        monkeypatch.delattr(fusion, name, raising=False)
    assert set(fusion.__all__) <= set(dir(fusion))
    assert fusion.layout.__name__ == "fusion.layout"
    assert fusion.ops.__name__ == "fusion.ops"
    from fusion.verifying import verify

    assert fusion.verify is verify
    with pytest.raises(AttributeError, match="no attribute 'verifi'"):
        fusion.verifi  # noqa: B018


# --- reports beside the compile cache ----------------------------------------------------------


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """(key of a module's graph, the folder of reports)"""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusion import store

    monkeypatch.setattr(store.compat, "inductor_cache_dir", lambda: str(tmp_path))

    def key(width: int = 3, extra: int = 0, layers: tuple[str, ...] = ("a",)) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(extra + 1):
                x = x.sin()
            return x

        gm = make_fx(function)(torch.ones(3))
        gm.register_buffer("table", torch.ones(width))
        gm.add_module("plain", torch.nn.Linear(1, 1))
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        for node, layer in zip(calls, layers, strict=False):
            node.meta["nn_module_stack"] = {"x": (layer, torch.nn.Module)}
        return store.Key(gm, [torch.ones(3)])

    return SimpleNamespace(key=key, root=tmp_path / store.FOLDER, store=store)


def report(layer: str) -> GraphReport:
    return GraphReport("a", (Site("sin_to_cos", "fused", layer=layer),))


def test_a_report_is_found_again_with_this_compiles_layers(stored: Any) -> None:
    stored.store.save(stored.key(layers=("L.0",)), [report("L.0")])
    (found,) = stored.store.load(stored.key(layers=("L.1",)))
    assert found.sites[0].layer == "L.1"
    assert stored.store.load(stored.key(width=4)) is None  # a table of another size
    assert stored.store.load(stored.key(extra=1)) is None


def test_a_report_of_another_number_of_nodes_keeps_its_layers(stored: Any) -> None:
    """A file that somebody changed: nothing is carried over by position."""
    import json

    key = stored.key(layers=("L.0",))
    stored.store.save(key, [report("L.0")])
    (path,) = stored.root.glob("*/*.json")
    data = json.loads(path.read_text())
    data["places"]["layer"].append("L.9")
    path.write_text(json.dumps(data))
    (found,) = stored.store.load(stored.key(layers=("L.1",)))
    assert found.sites[0].layer == "L.0"
    path.write_text("{")
    assert stored.store.load(key) is None


def test_without_a_folder_nothing_is_kept_and_nothing_fails(
    stored: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> str:
        raise OSError("read-only")

    monkeypatch.setattr(stored.store.compat, "inductor_cache_dir", nowhere)
    with caplog.at_level(logging.DEBUG, "fusion"):
        stored.store.save(stored.key(), [report("a")])
        assert stored.store.load(stored.key()) is None
    assert caplog.text.count("no compile-cache folder") == 2
    assert not stored.root.exists()


def test_a_table_without_strides_has_a_text(stored: Any) -> None:
    csr = torch.eye(3).to_sparse_csr()
    assert "sparse_csr" in stored.store.tensor_text(csr)
    assert stored.store.tensor_text(csr) != stored.store.tensor_text(torch.eye(4).to_sparse_csr())
