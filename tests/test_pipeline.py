"""The pass manager: verification, undoing, modes, cache key; and finding passes."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fusion import discovery
from fusion.build import make_config, make_manager
from fusion.config import Config, ConfigError
from fusion.graph.snapshot import Snapshot
from fusion.pipeline import FusionRequiredError, PassManager
from fusion.reason import Reason
from fusion.target import Target
from tests.toy_passes import Broken, SinToCos, use_passes

CPU = Target.parse("cpu")


def graph_of(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def chain():
    return graph_of(
        lambda x, y: (((x + y).sin() * 2).exp() + x).sin(), torch.ones(3), torch.ones(3)
    )


def letters(gm) -> tuple:
    """Everything about a graph that a reader could see."""
    return (
        str(gm.graph),
        [(n.name, n.op, str(n.target), n.meta.get("val") is not None) for n in gm.graph.nodes],
        [[u.name for u in n.users] for n in gm.graph.nodes],
    )


def manager(*passes, config: Config | None = None, **more) -> PassManager:
    return PassManager(passes, config or Config(), CPU, **more)


def test_a_pass_rewrites_and_reports():
    gm = chain()
    seen = []
    report = manager(SinToCos(), observer=seen.append).run(gm.graph)
    assert [s.status for s in report.sites] == ["fused", "fused"]
    assert report.nodes == (9, 9)
    assert set(report.times) == {"sin_to_cos", "total"}
    gm.recompile()
    x = torch.randn(3)
    assert torch.equal(gm(x, x), (((x + x).cos() * 2).exp() + x).cos())
    (event,) = seen
    assert event.changed
    assert event.pass_name == "sin_to_cos"
    assert "sin" in event.before.listing()


@pytest.mark.parametrize("how", ["raise", "output", "meta", "order"])
def test_a_broken_pass_is_undone_to_the_letter(how, caplog):
    gm = chain()
    before = letters(gm)
    with caplog.at_level(logging.WARNING, "fusion"):
        report = manager(Broken(how), SinToCos()).run(gm.graph)
    assert report.sites[0].reasons[0].code == "internal.error"
    assert report.sites[0].status == "refused"
    assert "was undone" in caplog.text
    # ... and the next pass ran on the graph as it was.
    assert [s.status for s in report.sites[1:]] == ["fused", "fused"]
    gm = chain()
    manager(Broken(how)).run(gm.graph)
    assert letters(gm) == before
    gm.graph.lint()


@dataclass(frozen=True)
class TwoSites(SinToCos):
    """Rewrites both sines, and then ``how`` says what goes wrong."""

    how: str = "raise"

    def run(self, graph, context):
        sites = super().run(graph, context)
        reason = Reason("match.rope-form", "never wanted")
        sites.append(context.site("missed", None, layer="third", reasons=[reason]))
        if not context.rewrite and self.how != "always":
            return sites
        if self.how == "output":
            output = next(n for n in graph.nodes if n.op == "output")
            output.args = ((next(n for n in graph.nodes if n.op == "placeholder"),) * 2,)
            return sites
        raise ValueError("at the very end")


@pytest.mark.parametrize("how", ["raise", "output", "always"])
def test_sites_of_a_pass_that_was_undone_are_listed_with_the_error(how):
    """One bad site undoes all of them; none may vanish from the report."""
    gm = chain()
    before = letters(gm)
    seen = []
    report = manager(TwoSites(how=how), observer=seen.append).run(gm.graph)
    assert letters(gm) == before
    assert seen[0].sites == report.sites and not seen[0].changed
    found = [(s.status, s.reasons[0].code) for s in report.sites]
    if how == "always":  # it cannot even list them
        assert found == [("refused", "internal.error")]
        return
    undone = ("refused", "internal.error")
    assert found == [undone, undone, ("missed", "match.rope-form")]
    assert [s.operation for s in report.sites] == ["cos", "cos", None]
    assert all(s.nodes for s in report.sites[:2])
    config = Config(passes=(("sin_to_cos", "required"),))
    with pytest.raises(FusionRequiredError, match=r"3 site\(s\) are not fused"):
        manager(TwoSites(how=how), config=config).run(gm.graph)


def test_an_error_of_a_pass_without_sites_is_not_silent():
    @dataclass(frozen=True)
    class Late(TwoSites):
        def run(self, graph, context):
            sites = super().run(graph, context)  # raises where it rewrites
            return [s for s in sites if s.status == "missed"]

    first, second = manager(Late()).run(chain().graph).sites
    assert (first.status, first.reasons[0].code) == ("refused", "internal.error")
    assert (second.status, second.layer) == ("missed", "third")


def test_a_pass_that_rewrites_when_it_should_only_list_is_undone_again():
    @dataclass(frozen=True)
    class Stubborn(TwoSites):
        def run(self, graph, context):
            for node in list(graph.nodes):
                if node.target is torch.ops.aten.sin.default:
                    node.target = torch.ops.aten.cos.default
            if context.rewrite:
                raise ValueError("half way")
            return []

    gm = chain()
    before = letters(gm)
    (site,) = manager(Stubborn()).run(gm.graph).sites
    assert site.reasons[0].message == "ValueError: half way"
    assert letters(gm) == before


@given(st.integers(0, 10**6))
def test_restoring_undoes_any_edit(seed):
    gm = chain()
    before = letters(gm)
    snapshot = Snapshot(gm.graph)
    assert not snapshot.changed()
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 6)):
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        node = rng.choice(calls)
        edit = rng.randrange(4)
        if edit == 0:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(torch.ops.aten.neg.default, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda u, new=new: u is not new)
        elif edit == 1 and len(calls) > 1:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif edit == 2:
            node.target = torch.ops.aten.tanh.default
            node.args = node.args[:1]
        else:
            node.meta = {}
            node.name = f"other_{rng.randrange(99)}"
    snapshot.restore()
    assert letters(gm) == before
    assert not snapshot.changed()
    gm.graph.lint()


def test_an_observer_that_fails_is_ignored(caplog):
    def observer(event):
        raise OSError("read-only folder")

    report = manager(SinToCos(), observer=observer).run(chain().graph)
    assert report.sites[0].status == "fused"
    assert "observer failed" in caplog.text


@pytest.mark.parametrize("training", [False, True])
def test_off_and_training_list_but_do_not_rewrite(training):
    gm = chain()
    before = letters(gm)
    config = Config(passes=() if training else (("sin_to_cos", "off"),))
    report = manager(SinToCos(), config=config).run(gm.graph, training=training)
    assert [s.status for s in report.sites] == ["off", "off"]
    assert letters(gm) == before


def test_a_pass_that_rewrites_though_off_is_undone():
    @dataclass(frozen=True)
    class Disobedient(SinToCos):
        def run(self, graph, context):
            context.mode = "auto"
            sites = super().run(graph, context)
            context.mode = "off"
            return sites

    gm = chain()
    before = letters(gm)
    config = Config(passes=(("sin_to_cos", "off"),))
    report = manager(Disobedient(), config=config).run(gm.graph)
    assert report.sites[0].reasons[0].code == "internal.error"
    assert letters(gm) == before


def test_required_raises_with_the_table():
    config = Config(passes=(("sin_to_cos", "required"),))
    manager(SinToCos(), config=config).run(chain().graph)

    @dataclass(frozen=True)
    class Refusing:
        name: ClassVar[str] = "sin_to_cos"

        def run(self, graph, context):
            reason = Reason("gate.head-dim", "head size", have="96", need="64")
            context.report_site("refused", None, layer="model.layers.7", reasons=[reason])
            return []

    with pytest.raises(FusionRequiredError) as error:
        manager(Refusing(), config=config).run(chain().graph)
    for part in ("sin_to_cos is required", "model.layers.7", "have 96, need 64", "remedy"):
        assert part in str(error.value)
    # An internal error of a required pass is loud, too.
    config = Config(passes=(("broken", "required"),))
    with pytest.raises(FusionRequiredError, match="half way through"):
        manager(Broken(), config=config).run(chain().graph)


def test_running_twice_changes_nothing_more():
    gm = chain()
    runner = manager(SinToCos())
    runner.run(gm.graph)
    once = letters(gm)
    assert runner.run(gm.graph).sites == ()
    assert letters(gm) == once


def test_the_key_tells_apart_what_must_be(monkeypatch):
    def key(*passes, config=None, target=CPU, **more):
        return PassManager(passes, config or Config(), target, **more).uuid()

    base = key(SinToCos())
    assert base == key(SinToCos())
    keys = {
        base,
        key(),
        key(SinToCos("other")),
        key(SinToCos(), config=Config(passes=(("sin_to_cos", "off"),))),
        key(SinToCos(), config=Config(kernels=("triton",))),
        key(SinToCos(), config=Config(validate=False)),
        key(SinToCos(), target=Target.parse("gfx942")),
        key(SinToCos(), target=CPU.with_versions(aiter="0.1.20")),
        key(SinToCos(), fingerprint=lambda: "other kernels"),
        key(SinToCos(), phase="joint"),
    }
    assert len(keys) == 10
    monkeypatch.setenv("FUSION_AITER", "1")
    keys.add(key(SinToCos()))
    monkeypatch.setenv("FUSION_AITER", "0")
    keys.add(key(SinToCos()))
    assert len(keys) == 12
    monkeypatch.setattr("fusion.pipeline.package_sources", lambda: "other sources")
    assert key(SinToCos()) not in keys
    # Addresses of functions inside (kernel conditions) must not reach the key.
    assert key(fingerprint=lambda: [lambda: 1]) == key(fingerprint=lambda: [lambda: 1])


def test_the_key_is_the_same_in_another_process():
    code = (
        "from fusion.build import make_config, make_manager\n"
        "print(make_manager(make_config(None)).uuid())"
    )
    # Two fresh processes: other tests of this one may have registered operators.
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("7", "8")
    }
    assert len(keys) == 1
    assert len(keys.pop()) == 64


def test_sources_are_in_the_key():
    from fusion.fingerprint import hash_files, package_sources

    assert len(package_sources()) == 64
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "a.py").write_text("BLOCK = 64\n")
        one = hash_files([root / "a.py"], root)
        (root / "a.py").write_text("BLOCK = 128\n")
        assert hash_files([root / "a.py"], root) != one


# --- dumps ---------------------------------------------------------------------------------


def test_dumps_hold_what_changed_and_an_index(tmp_path, monkeypatch):
    folder = tmp_path / "a folder with spaces"
    monkeypatch.setenv("FUSION_DUMP", str(folder))
    monkeypatch.setenv("RANK", "3")
    use_passes(monkeypatch, SinToCos, Broken)
    make_manager(make_config(None), CPU).run(chain().graph)
    (home,) = folder.iterdir()
    assert home.name.startswith("rank3-")
    diffs = list(home.glob("*.diff"))
    assert len(diffs) == 1  # the pass that was undone changed nothing
    text = diffs[0].read_text()
    assert "-sin = aten.sin.default(add,)" in text
    assert "+cos_default = aten.cos.default(add,)" in text
    assert not any(line.startswith(("+add ", "-add ")) for line in text.splitlines())
    lines = (home / "index.txt").read_text().splitlines()
    assert [line.split("\t")[1] for line in lines] == ["sin_to_cos", "broken"]
    assert lines[0].endswith(diffs[0].name)
    assert lines[1].endswith("unchanged")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path / "file"))
    use_passes(monkeypatch, SinToCos)
    report = make_manager(make_config(None), CPU).run(chain().graph)
    assert report.sites[0].status == "fused"
    assert caplog.text.count("nothing is dumped") == 1


def test_a_misspelt_switch_is_an_error(monkeypatch):
    monkeypatch.setenv("FUSION_AITER", "yse")
    with pytest.raises(ConfigError, match="FUSION_AITER='yse'"):
        make_manager(make_config(None), CPU)


# --- discovery -----------------------------------------------------------------------------


class FakeEntry:
    def __init__(self, name, value, owner, load):
        self.name, self.value, self.load = name, value, load
        self.dist = type("Dist", (), {"name": owner})()


def with_entries(monkeypatch, *entries):
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group=None: entries if group == discovery.ENTRY_POINT_GROUP else (),
    )
    discovery.discover.cache_clear()


@pytest.fixture
def fresh_discovery():
    yield
    discovery.discover.cache_clear()


def test_a_plugin_is_found_configured_and_reported(monkeypatch, fresh_discovery):
    with_entries(monkeypatch, FakeEntry("s", "extra:P", "extra", lambda: SinToCos))
    config = make_config({"sin_to_cos": {"mode": "required", "skip": "x"}})
    made = make_manager(config)
    assert SinToCos("x") in made.passes
    status = next(s for s in made.statuses() if s.name == "sin_to_cos")
    assert status.origin == "extra (extra:P)"
    assert status.mode == "required"
    assert dict(status.options) == {"skip": "x"}


@pytest.mark.parametrize("error", [ImportError("no gpu"), SystemExit(1), AssertionError()])
def test_a_broken_plugin_is_a_reason(monkeypatch, fresh_discovery, error):
    def load():
        raise error

    with_entries(monkeypatch, FakeEntry("bad", "bad:P", "badly", load))
    made = make_manager(make_config({"bad": "auto"}))
    status = next(s for s in made.statuses() if s.name == "bad")
    assert status.status == "not-built"
    assert status.reasons[0].code == "plugin.broken"
    assert type(error).__name__ in status.reasons[0].message
    assert "badly" in status.reasons[0].message
    with pytest.raises(FusionRequiredError, match="bad is required, but was not built"):
        make_manager(make_config({"bad": "required"}))


def test_something_that_is_no_pass_is_a_reason(monkeypatch, fresh_discovery):
    with_entries(monkeypatch, FakeEntry("odd", "odd:P", "odd", lambda: object()))
    status = discovery.discover().broken[0]
    assert "not a pass class" in status.reasons[0].message


def test_two_owners_of_a_name_are_an_error(monkeypatch, fresh_discovery):
    @dataclass(frozen=True)
    class Other(SinToCos):
        pass

    with_entries(
        monkeypatch,
        FakeEntry("a", "one:P", "one", lambda: SinToCos),
        FakeEntry("b", "two:P", "two", lambda: Other),
    )
    with pytest.raises(discovery.DuplicatePassError, match=r"one \(one:P\).*two \(two:P\)"):
        discovery.discover()


def test_a_pass_says_itself_that_it_cannot_be_built(monkeypatch):
    @dataclass(frozen=True)
    class Picky(SinToCos):
        def unavailable(self, config, target):
            return (Reason("gate.arch", "only there", have=target.arch, need="gfx942"),)

    use_passes(monkeypatch, Picky)
    made = make_manager(make_config(None), CPU)
    assert made.passes == ()
    assert made.statuses()[0].reasons[0].need == "gfx942"


def test_options_are_checked(monkeypatch):
    use_passes(monkeypatch, SinToCos)
    with pytest.raises(ConfigError, match="did you mean 'sin_to_cos'"):
        make_config({"sin_to_coss": "auto"})
    with pytest.raises(ConfigError, match="Valid: mode, skip"):
        make_config({"sin_to_cos": {"skips": 1}})
    with pytest.raises(ConfigError, match="Valid: off, auto, required"):
        make_config({"sin_to_cos": "always"})


def test_the_built_in_passes_are_all_sound():
    found = discovery.discover()
    assert found.broken == ()
    assert "qk_norm_rope_kv_cache" in [p.name for p in found.passes]
    for info in found.passes:
        assert info.cls() == info.cls()
        assert hash(info.cls()) == hash(info.cls())


def test_a_graph_that_cannot_be_remembered_is_left_alone(monkeypatch):
    """A pass that could not be undone does not run, and the compile goes on."""
    from fusion import pipeline

    def broken(graph):
        raise AttributeError("no such node")

    monkeypatch.setattr(pipeline, "Snapshot", broken)
    gm = chain()
    before = letters(gm)
    report = manager(SinToCos()).run(gm.graph)
    assert letters(gm) == before
    (site,) = report.sites
    assert (site.status, site.reasons[0].code) == ("refused", "internal.error")
    assert "no such node" in site.reasons[0].message


def test_results_of_checks_are_bounded(monkeypatch):
    """The oldest go; a result that is known already pushes nothing out."""
    from fusion import pipeline

    monkeypatch.setattr(pipeline, "MOST_VALIDATIONS", 3)
    context = pipeline.Context(Config(), CPU, "auto", "post_grad", chain().graph)
    for key in (*range(5), 4, 3):
        context.remember(key, f"result {key}")
    assert context.validations == {2: "result 2", 3: "result 3", 4: "result 4"}
