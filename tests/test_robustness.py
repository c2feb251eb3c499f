"""Never fatal: broken passes, broken plug-ins, duplicate names, wrong options.

Where each kind of trouble is tested (deliverable 4 of the issue on living with the compiler):

==============================================  ==================================================
passes raising on purpose                       here, ``test_an_error_at_any_step...``; undoing to
                                                the letter in ``test_pipeline.py``
broken plug-ins                                 here, ``test_broken_plug_ins...`` (installed, in
                                                a process of its own), ``test_a_backend_that_...``
duplicate names                                 here, ``test_two_owners...``
wrong options                                   ``test_robustness_options.py``
training graphs                                 ``test_robustness_compile.py``, ``test_backend.py``
graph breaks between rope and write             ``test_robustness_compile.py``, and for the write as
                                                an op ``test_pass_qk_norm_rope_kv_cache.py``
unsupported devices                             ``test_robustness_compile.py``
zero tokens                                     ``test_robustness_compile.py`` (Inductor), per op
                                                ``test_ops_compile.py``, per pass
                                                ``test_pass_qk_norm_rope_kv_cache.py``
concurrent compiles in threads                  ``test_robustness_process.py`` (models),
                                                ``test_backend.py`` (configurations)
recompiles                                      ``test_robustness_compile.py``
two configurations in one process               ``test_robustness_process.py``
existing custom passes                          ``test_robustness_process.py``, ``test_backend.py``
inference_mode, no_grad, enabled grad           ``test_robustness_compile.py``
CUDA-graph trees                                ``test_robustness_process.py`` (marker gpu), on the
                                                CPU a no-op
fullgraph=True                                  ``test_robustness_compile.py``
torch.export, AOTInductor                       ``test_robustness_export.py``
==============================================  ==================================================
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fusion
from fusion import discovery, selection
from fusion.config import Config
from fusion.kernel import Kernel
from fusion.passes import qk_norm_rope_kv_cache as the_pass
from fusion.pipeline import FusionRequiredError
from fusion.requires import Requires
from fusion.target import Target
from tests.ops_cases import arguments
from tests.prologue_block import run, variant
from tests.toy_passes import SinToCos, use_passes

ROOT = Path(__file__).resolve().parent.parent
FUSED = "qk_norm_rope_kv_cache"
CPU = Target.parse("cpu")


# --- passes raising on purpose ---------------------------------------------------------------

STEPS = (
    "read_sites",
    "find_cache_writes",
    "operation_of",
    "kernel_call",
    "select",
    "check",
    "emit",
)
ERRORS = (
    RuntimeError("on purpose"),
    AssertionError(),
    KeyError("x"),
    RecursionError("too deep"),
    SystemExit(3),
)


@pytest.mark.parametrize(
    ("step", "error"),
    [*((s, ERRORS[0]) for s in STEPS), *(("check", e) for e in ERRORS[1:]), ("emit", ERRORS[-1])],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_at_any_step_leaves_the_site_and_says_so(
    step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(the_pass, step, fail)
    outcome = run(variant())
    outcome.assert_equal()
    assert outcome.site.status == "refused"
    (reason,) = outcome.site.reasons
    assert reason.code == "internal.error"
    assert type(error).__name__ in reason.message
    assert outcome.site.kernel is None


def test_an_error_in_the_middle_of_an_emission_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call is in the graph already when it happens; the graph is as it was afterwards."""
    from fusion.graph import surgery

    assert surgery.__name__ == "fusion.graph.surgery"
    honest = the_pass.emit

    def half(graph: Any, *args: Any, **kwargs: Any) -> Any:
        honest(graph, *args, **kwargs)
        raise RuntimeError("after the rewrite")

    monkeypatch.setattr(the_pass, "emit", half)
    outcome = run(variant())
    outcome.assert_equal()
    assert {s.status for s in outcome.report.sites if s.applicable} == {"refused"}


def test_required_is_loud_about_an_error() -> None:
    @dataclasses.dataclass(frozen=True)
    class Explodes(SinToCos):
        def run(self, graph: Any, context: Any) -> list[Any]:
            raise SystemExit("no")

    manager = fusion.PassManager((Explodes(),), Config(passes=(("sin_to_cos", "required"),)), CPU)
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(FusionRequiredError, match=r"internal\.error.*SystemExit: no"):
        manager.run(make_fx(lambda x: x.sin())(torch.ones(2)).graph)


@pytest.mark.parametrize(
    "answer", [None, 5, ["fused"], [None], "sites"], ids=["none", "number", "text", "holes", "word"]
)
def test_a_pass_that_answers_with_rubbish_is_undone(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Rubbish(SinToCos):
        def run(self, graph: Any, context: Any) -> Any:
            super().run(graph, context)
            return answer

    use_passes(monkeypatch, Rubbish)
    x = torch.randn(3)
    options = {"inner": "aot_eager"}
    y = torch.compile(lambda x: x.sin() * 2, backend="fusion", options=options)(x)
    assert torch.equal(y, x.sin() * 2)
    (site,) = fusion.reports()[-1].sites
    assert (site.status, site.reasons[0].code) == ("refused", "internal.error")


# --- broken plug-ins -------------------------------------------------------------------------

MODULES = {
    "plug_raises": "raise ImportError('no such GPU')",
    "plug_exits": "import sys; sys.exit(3)",
    "plug_number": "KERNELS = 5\nPASS = 5",
    "plug_strings": "KERNELS = ('triton',)\nPASS = 'triton'",
    "plug_nothing": "",
    "plug_kernels": "def kernels(): raise OSError('library not found')",
    "plug_auto": """
from fusion.kernel import Kernel
from fusion.requires import Requires
KERNELS = (Kernel("auto", "kv_cache_write", print, Requires()),)
""",
    "plug_condition": """
from fusion.kernel import Kernel
from fusion.requires import Check, Requires
def look(call): raise ZeroDivisionError("in a condition")
def write(*args, **kwargs): raise AssertionError("it must not be called")
KERNELS = tuple(
    Kernel("odd", op, write, Requires((Check("odd", "even", "gate.argument", look),)))
    for op in ("qk_norm_rope_kv_cache", "kv_cache_write")
)
""",
    "plug_passes": """
from dataclasses import dataclass
from typing import ClassVar
def pass_class(title, **members):
    return type(title, (), {"name": title, "run": lambda self, g, c: [], **members})
Shadow = pass_class("validate")
Disorder = pass_class("disorder", order="first")
def broken(self): raise OSError("cannot be built")
Unbuildable = pass_class("unbuildable", __init__=broken)
Rubbish = pass_class("rubbish", run=lambda self, g, c: ["fused"])
def leave(self, g, c): raise SystemExit(5)
Leaves = pass_class("leaves", run=leave)
Picky = pass_class("picky", unavailable=lambda self, c, t: ["no"])
Nameless = type("Nameless", (), {"run": None})
Fine = pass_class("fine")
""",
}
BACKENDS = ("raises", "exits", "number", "strings", "nothing", "kernels", "auto", "condition")
PASSES = {
    "raises": "plug_raises:PASS",
    "number": "plug_number:PASS",
    "strings": "plug_strings:PASS",
    "missing": "plug_missing:PASS",
    "shadow": "plug_passes:Shadow",
    "disorder": "plug_passes:Disorder",
    "unbuildable": "plug_passes:Unbuildable",
    "rubbish": "plug_passes:Rubbish",
    "leaves": "plug_passes:Leaves",
    "picky": "plug_passes:Picky",
    "nameless": "plug_passes:Nameless",
    "fine": "plug_passes:Fine",
}
CHILD = """
import json, torch, fusion
from fusion.selection import broken_backends
from tests.prologue_block import run, variant
torch.set_grad_enabled(False)
outcome = run(variant(), options={"kernels": ["odd", "raises", "of-a-broken-plug-in", "reference"]})
outcome.assert_equal()
report = outcome.report.to_dict()
report["broken"] = {name: reason.message for name, reason in broken_backends()}
print(json.dumps(report))
"""


def test_broken_plug_ins_are_reasons_and_nothing_else(tmp_path: Path) -> None:
    """Everything that an installed package can do wrong, in one process, beside a real fusion."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    lines = ["[fusion.backends]", *(f"{name} = plug_{name}" for name in BACKENDS)]
    lines += ["missing = plug_missing", "[fusion.passes]"]
    lines += [f"{name} = {value}" for name, value in PASSES.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    broken = report["broken"]
    assert set(broken) == {*BACKENDS, "missing"} - {"condition"}
    for name, text in {
        "raises": "no such GPU",
        "exits": "SystemExit: 3",
        "number": "TypeError",
        "strings": "'triton', which is not a Kernel",
        "nothing": "KERNELS",
        "kernels": "library not found",
        "auto": "cannot be the name of a kernel",
        "missing": "plug_missing",
    }.items():
        assert text in broken[name], broken[name]
    # The site is fused by the kernel that works, and says what became of the others.
    (site,) = [s for s in report["graphs"][0]["sites"] if s["pass"] == FUSED]
    assert (site["status"], site["kernel"]) == ("fused", "reference")
    refused = {c["kernel"]: c["reasons"][0] for c in site["candidates"] if not c["accepted"]}
    assert {name: r["code"] for name, r in refused.items()} == {
        "odd": "internal.error",
        "raises": "plugin.broken",
        "of-a-broken-plug-in": "gate.backend-unavailable",
    }
    assert "in a condition" in refused["odd"]["message"]
    # Passes: those that could not be had are listed; those that fail are undone.
    lost = {p["name"]: p["reasons"][0] for p in report["passes"] if p["status"] == "not-built"}
    assert {name: r["code"] for name, r in lost.items()} == {
        **dict.fromkeys(("raises", "number", "strings", "missing"), "plugin.broken"),
        **dict.fromkeys(("shadow", "disorder", "unbuildable", "nameless"), "plugin.broken"),
        "picky": "internal.error",
    }
    assert "is the name of an option" in lost["shadow"]["message"]
    assert "not a number" in lost["disorder"]["message"]
    assert "cannot be built" in lost["unbuildable"]["message"]
    sites = report["graphs"][0]["sites"]
    failed = {s["pass"]: s["reasons"][0]["code"] for s in sites if s["status"] == "refused"}
    assert failed["rubbish"] == failed["leaves"] == "internal.error"
    assert "fine" in {p["name"] for p in report["passes"] if p["status"] == "built"}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a module stand in as a further backend."""

    def install(name: str, **members: Any) -> None:
        module = types.ModuleType(f"standin_{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(selection.BUILTIN, name, module.__name__)
        selection._load.cache_clear()

    yield install
    monkeypatch.undo()
    selection._load.cache_clear()


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"KERNELS": (Kernel("a", "kv_cache_write", print, None),)}, "with its Requires"),  # type: ignore[arg-type]
        ({"KERNELS": (Kernel("a", "kv_cache_write", None, Requires()),)}, "has the function None"),  # type: ignore[arg-type]
        ({"KERNELS": (Kernel("", "kv_cache_write", print, Requires()),)}, "cannot be the name"),
        ({"kernels": lambda: None}, "TypeError"),
        ({"kernels": lambda: [object()]}, "not a Kernel"),
    ],
)
def test_a_backend_that_offers_rubbish_is_broken_as_a_whole(
    offered: Any, members: dict[str, Any], text: str
) -> None:
    offered("odd", **members)
    ((name, reason),) = selection.broken_backends()
    assert (name, reason.code) == ("odd", "plugin.broken")
    assert text in reason.message
    assert {k.backend for k in selection.kernels()} == {"aiter", "triton", "reference"}


# --- duplicate names -------------------------------------------------------------------------


def test_two_owners_of_a_kernel_are_an_error_at_every_door(offered: Any) -> None:
    """Named with both owners; not a quiet choice of one, and not a reason deep in a report."""
    offered("one", KERNELS=(Kernel("same", "kv_cache_write", print, Requires()),))
    offered("two", KERNELS=(Kernel("same", "kv_cache_write", print, Requires()),))
    text = "'same' for kv_cache_write is offered by both standin_one and standin_two"
    doors: list[Any] = [
        lambda: run(variant()),
        lambda: fusion.explain(lambda x: x.sin(), torch.ones(2)),
        fusion.inductor_passes,
        lambda: fusion.ops.kv_cache_write(**arguments("kv_cache_write")),
    ]
    for door in doors:
        with pytest.raises(Exception, match=text):
            door()


def test_two_owners_of_a_pass_are_an_error_at_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other:
        name: ClassVar[str] = FUSED

        def run(self, graph: Any, context: Any) -> list[Any]:
            return []

    entry = types.SimpleNamespace(
        name="p", value="theirs:P", load=lambda: Other, dist=types.SimpleNamespace(name="theirs")
    )
    honest = importlib.metadata.entry_points

    def entry_points(**wanted: Any) -> Any:
        return (entry,) if wanted == {"group": discovery.ENTRY_POINT_GROUP} else honest(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    discovery.discover.cache_clear()
    try:
        doors: list[Any] = [
            lambda: run(variant()),
            lambda: fusion.explain(lambda x: x.sin(), torch.ones(2)),
            fusion.inductor_passes,
        ]
        for door in doors:
            with pytest.raises(Exception, match=r"(?s)offered by both .*fusion.*theirs:P"):
                door()
    finally:
        monkeypatch.undo()
        discovery.discover.cache_clear()
