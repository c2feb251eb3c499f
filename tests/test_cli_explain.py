"""``fusion explain``: text, exit statuses, files, expectations and baselines."""

from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import torch

import fusion
from fusion.report import GraphReport
from fusion.tools.baseline import changes
from fusion.tools.baseline import to_text as changes_text
from fusion.tools.console import said_by
from fusion.tools.explain import parse_expectation
from tests.cli import MODELS, golden, run
from tests.cli_models import exported

PASS = "qk_norm_rope_kv_cache"
GOOD, MIXED = f"{MODELS}:good", f"{MODELS}:mixed"


def schema() -> dict:
    text = resources.files("fusion").joinpath("schema/report.schema.json").read_text("utf-8")
    return json.loads(text)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("explain-good", [GOOD]),
        ("explain-mixed", [MIXED, "--pass", PASS]),
        ("explain-gfx942", [GOOD, "--target", "gfx942,aiter=0.1.20,rocm=7.1,triton=3.9.0"]),
        ("explain-all", [MIXED, "--all", "--pass", PASS]),
        ("explain-site", [MIXED, "--site", "layers.1", "--pass", PASS]),
        ("explain-help", ["--help"]),
    ],
)
def test_text(capsys, monkeypatch, name, arguments):
    monkeypatch.setenv("COLUMNS", "100")
    ran = run(capsys, "explain", *arguments)
    assert (ran.status, ran.err) == (0, "")
    golden(name, ran.out)


def test_a_miss_names_reason_node_line_facts_and_remedy(capsys):
    out = run(capsys, "explain", MIXED, "--pass", PASS).out
    assert "match.rope-sign" in out
    assert "second half: -sin, needs +sin" in out
    assert "| return torch.cat((a * cos - b * sin, b * cos - a * sin), -1)  # second sign" in out
    assert "remedy: check the sign of rotate_half" in out
    assert "read: write:" in out
    assert "at mean_5 tests/mutations.py:" in out
    assert "v = n.pow(2).mean(-2, keepdim=True)  # mean over heads" in out
    assert "tests/mutations.py:" in out


@pytest.mark.parametrize(
    ("expectation", "status"),
    [
        (f"{PASS}>=1", 0),
        (f"{PASS}=3", 1),
        ("qk_norm_rope_kv_cahce=1", 2),
        (f"{PASS}=some", 2),
        (PASS, 2),
    ],
)
def test_expectations(capsys, expectation, status):
    ran = run(capsys, "explain", GOOD, "--expect", expectation)
    assert ran.status == status
    if status == 0:
        assert ran.err == ""
    elif status == 1:
        assert "expected" in ran.err and "found 2 of 2" in ran.err
    else:
        assert ran.out == ""
        assert ("did you mean" in ran.err) == expectation.startswith("qk_norm_rope_kv_cahce")
        assert ("? Passes: " in ran.err) == ("did you mean" in ran.err)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("p=2", ("p", 2)),
        ("p=>=1", ("p", ">=1")),
        ("p>=1", ("p", ">=1")),
        (" my.pass-1 = all ", ("my.pass-1", "all")),
    ],
)
def test_spellings_of_an_expectation(text, parsed):
    assert parse_expectation(text) == parsed


def test_a_missed_expectation_shows_the_near_misses(capsys):
    ran = run(capsys, "explain", MIXED, "--expect", f"{PASS}=all")
    assert ran.status == 1
    assert "near misses, nearest first" in ran.err
    assert "match.rope-sign" in ran.err


def test_json_on_stdout_is_a_report_and_nothing_else(capsys):
    ran = run(capsys, "explain", MIXED, "--json", "-")
    data = json.loads(ran.out)
    jsonschema.validate(data, schema())
    assert fusion.Report.from_dict(data).count(PASS) == 1


def test_files_are_written_once(capsys, tmp_path):
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    wanted = ["explain", GOOD, "--json", str(report), "--html", str(page)]
    assert run(capsys, *wanted).status == 0
    jsonschema.validate(json.loads(report.read_text()), schema())
    before = page.read_bytes()
    refused = run(capsys, *wanted)
    assert refused.status == 2
    assert "exists; pass --overwrite" in refused.err
    assert refused.out == ""  # refused before any work
    assert page.read_bytes() == before
    assert run(capsys, *wanted, "--overwrite").status == 0


@pytest.mark.parametrize(
    ("place", "message"), [("", "is a folder"), ("none/r.json", "does not exist")]
)
def test_places_that_cannot_be_written(capsys, tmp_path, place, message):
    ran = run(capsys, "explain", GOOD, "--json", str(tmp_path / place))
    assert ran.status == 2
    assert message in ran.err


def test_the_baseline_tells_what_changed(capsys, tmp_path):
    good, mixed = tmp_path / "good.json", tmp_path / "mixed.json"
    assert run(capsys, "explain", f"{MODELS}:mixed", "--json", str(mixed)).status == 0
    data = json.loads(mixed.read_text())
    for site in data["graphs"][0]["sites"]:
        if site["pass"] == PASS and site["status"] != "fused":
            site.update(status="fused", reasons=[], kernel="reference", operation=PASS)
    good.write_text(json.dumps(data))
    same = run(capsys, "explain", MIXED, "--baseline", str(mixed), "--pass", PASS)
    assert same.status == 0
    assert f"nothing changed since {mixed}" in same.out
    worse = run(capsys, "explain", MIXED, "--baseline", str(good), "--pass", PASS)
    assert worse.status == 1
    golden("explain-baseline", worse.out.replace(str(good), "good.json"))
    better = run(capsys, "explain", GOOD, "--baseline", str(good))
    assert better.status == 1  # a layer is gone
    assert "gone: layers.2" in better.out


def test_baselines_that_are_none(capsys, tmp_path):
    bad = tmp_path / "b.json"
    bad.write_text('{"schema": 7}')
    ran = run(capsys, "explain", GOOD, "--baseline", str(bad))
    assert (ran.status, ran.out) == (2, "")
    assert f"{bad} is no fusion report: report schema 7" in ran.err
    none = tmp_path / "none.json"
    ran = run(capsys, "explain", GOOD, "--baseline", str(none))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"error: --baseline: there is no file {none}\n"
    ran = run(capsys, "explain", GOOD, "--baseline", str(tmp_path))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"error: {tmp_path} cannot be read: Is a directory\n"


@pytest.mark.parametrize(
    ("layer", "source", "shown"),
    [
        ("layers.1", "net.py:7", "layers.1"),
        (None, "net.py:7", "net.py:7"),
        (None, None, "node copy_"),
    ],
)
def test_a_change_names_its_place(layer, source, shown):
    old = fusion.Site(PASS, "fused", layer=layer, source="net.py:3", nodes=({"name": "copy_"},))
    new = replace(old, status="missed", source=source)
    reports = [fusion.Report((GraphReport("0", (s,)),)) for s in (old, new)]
    assert f"  worse: {shown}: {PASS}\n" in changes_text(changes(*reports), "last.json")
    twice = [fusion.Report((GraphReport("0", (s, s)),)) for s in (old, new)]
    text = changes_text(changes(*twice), "last.json")
    assert f"  worse: 2 sites: {PASS}\n" in text and f"    at   {shown}\n" in text
    other = [replace(s, layer="layers.2") for s in (old, new)]
    pairs = [fusion.Report((GraphReport("0", p),)) for p in zip((old, new), other, strict=True)]
    noun = "layers" if layer else "sites"
    text = changes_text(changes(*pairs), "last.json")
    assert f"  worse: 2 {noun}: {PASS}\n" in text and f"    at   {shown}, layers.2\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "is no SOURCE"),
        (["Qwen/Qwen3-8B"], "Names on a model hub are not looked up"),
        (["none/config.json"], "there is no file"),
        (["none.pt2"], "there is no file"),
        (["no_such_module:build"], "could not be imported"),
        ([f"{MODELS}:nobody"], "has no 'nobody'"),
        ([f"{MODELS}:raising"], "RuntimeError: no such checkpoint"),
        ([f"{MODELS}:shapeless"], "must return (model, args, kwargs)"),
        ([f"{MODELS}:NOTHING"], "not callable"),
        ([GOOD, "--target", "gfx9x"], "is no chip that fusion knows"),
        ([GOOD, "--target", "gfx942,aiter"], "is not PACKAGE=VERSION"),
        ([GOOD, "--target", "gfx942,aiter=banana"], "'banana' in 'aiter=banana' is no version"),
        ([GOOD, "--option", "numerics"], "is not KEY=VALUE"),
        ([GOOD, "--option", "numeric=exact"], "did you mean 'numerics'"),
        ([GOOD, "--pass", "qk"], "no pass is called 'qk'. Passes: "),
        ([GOOD, "--site", "encoder"], "no site matches 'encoder'"),
        ([GOOD, "--json", "-", "--html", "-"], "cannot both go to stdout"),
        ([GOOD, "--dtype", "bf17"], "is no dtype"),
        ([GOOD, "--phase", "both"], "prefill"),
        ([GOOD, "--nonsense"], "No such option"),
        ([], "SOURCE"),
    ],
)
def test_usage_errors_are_status_2_and_say_what_is_wrong(capsys, arguments, message):
    ran = run(capsys, "explain", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_file_may_import_its_neighbours_and_the_import_path_is_put_back(
    capsys, tmp_path, monkeypatch
):
    """As ``python file.py`` may, at once and when the model is called."""
    (tmp_path / "work").mkdir()
    (tmp_path / "neighbour_now.py").write_text("def model():\n    import neighbour_later as n\n\n"
                                               "    return n.call\n")  # fmt: skip
    (tmp_path / "neighbour_later.py").write_text(
        "def call(x):\n    import neighbour_last\n\n    return neighbour_last.ONE + x\n"
    )
    (tmp_path / "neighbour_last.py").write_text("ONE = 1\n")
    (tmp_path / "main_of_neighbours.py").write_text(
        "import torch\nfrom neighbour_now import model\n\n\n"
        "def build():\n    return model(), (torch.ones(2),), {}\n"
    )
    monkeypatch.chdir(tmp_path / "work")
    path = list(sys.path)
    ran = run(capsys, "explain", "../main_of_neighbours.py:build")
    assert ran.status == 0, ran.err
    assert "no KV-cache write" in ran.out
    assert sys.path == path
    run(capsys, "explain", "../main_of_neighbours.py:nobody")
    assert sys.path == path
    for name in ("neighbour_now", "neighbour_later", "neighbour_last", "main_of_neighbours"):
        file = sys.modules.pop(name).__file__
        assert Path(file).resolve() == (tmp_path / f"{name}.py").resolve()


def test_a_model_that_cannot_be_traced_is_told_of_in_a_few_lines(capsys, monkeypatch):
    ran = run(capsys, "explain", f"{MODELS}:misfit")
    assert (ran.status, ran.out) == (2, "")
    error = ran.err[ran.err.index("error: the model could not be traced") :].splitlines()
    assert error[0].endswith("traced: RuntimeError: a and b must have same reduction dim, but got "
                             "[2, 2] X [3, 5].")  # fmt: skip
    assert error[1].startswith("  at ") and "cli_models.py:" in error[1]
    assert error[2] == "  | return x @ torch.ones(3, 5)"
    assert len(error) == 4
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    assert "from user code" in run(capsys, "explain", f"{MODELS}:misfit").err


def test_what_libraries_wrap_around_a_complaint_is_not_shown():
    class Checked(ValueError):
        def errors(self):
            return [
                {"loc": ("rope", "theta"), "msg": "Value error, must be positive"},
                {"loc": ("heads",), "msg": "Input should be a valid integer"},
            ]

    class Odd(ValueError):
        def errors(self, severe):
            return severe

    assert said_by(Checked("2 validation errors for Config")) == (
        "rope.theta: must be positive; heads: Input should be a valid integer"
    )
    assert said_by(Odd("as\n  it is")) == "as it is"
    strict = "Class validation error for validator 'check':\n    ValueError: no such\n  layer"
    assert said_by(RuntimeError(strict)) == "no such layer"
    field = "Validation error for field 'heads':\n    ValueError: must be: "
    assert said_by(ValueError(f"{field}one: of 1, 2")) == "heads: must be: one: of 1, 2"
    assert said_by(ValueError(f"{field}that of 'heads'")) == "must be: that of 'heads'"

    class Empty(ValueError):
        def errors(self):
            return []

    assert said_by(Empty("nothing")) == "nothing"
    assert said_by(ValueError("Value error, too small")) == "too small"
    assert said_by(KeyError("nope")) == "KeyError: 'nope'"


def test_options_reach_the_pipeline(capsys):
    out = run(capsys, "explain", GOOD, "-o", f"{PASS}=off").out
    assert "off: config.off" in out
    out = run(capsys, "explain", GOOD, "-o", PASS + '={"max_tokens": 3}').out
    assert "profit.token-range" in out
    out = run(capsys, "explain", GOOD, "--kernels", "triton", "--target", "cpu").out
    assert "runs on nvidia and amd only" in out and "reference" not in out
    misspelt = run(capsys, "explain", GOOD, "--kernels", "tritn,reference")
    assert misspelt.status == 2
    assert "unknown kernel 'tritn'" in misspelt.err and "triton" in misspelt.err


def test_no_colour_without_a_terminal_or_with_no_color(capsys, monkeypatch):
    assert "\x1b" not in run(capsys, "explain", MIXED).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run(capsys, "explain", MIXED).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(capsys, "explain", MIXED).out


def test_exported_programs(capsys, tmp_path):
    file = tmp_path / "net.pt2"
    torch.export.save(exported(), file)
    ran = run(capsys, "explain", str(file), "--expect", f"{PASS}=1")
    assert ran.status == 0, ran.err
    assert "(export)" in ran.out


def test_an_exported_program_with_pickled_objects_is_not_loaded(capsys, tmp_path):
    file = tmp_path / "bad.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("bad/data/constants/opaque_obj_0", b"cos\nsystem\n(S'exit 1'\ntR.")
    ran = run(capsys, "explain", str(file))
    assert ran.status == 2
    assert "would run code" in ran.err
    other = tmp_path / "text.pt2"
    other.write_text("no archive")
    assert "is no .pt2 archive" in run(capsys, "explain", str(other)).err
