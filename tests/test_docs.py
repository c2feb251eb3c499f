"""Generated pages are current, and what the pages show is what happens."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fusion.reason import BUILTIN, CODES
from fusion.tools import docs
from tests.cli import normal, run

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, what follows it, and text of every code block of a page."""
    text = (DOCS / page).read_text("utf-8")
    return [(m[1], m[2] or "", m[3]) for m in _BLOCK.finditer(text)]


@pytest.fixture(scope="module")
def pages():
    return docs.pages()


def test_generated_pages_are_current(pages):
    for name, generated in pages.items():
        text = (DOCS / name).read_text("utf-8")
        message = f"docs/{name} is not current: run python -m fusion.tools.docs"
        assert text == docs.whole(name, generated), message


def test_every_reason_is_in_the_reference(pages):
    for code, info in ((c, CODES[c]) for c in BUILTIN):
        assert f"| `{code}` | {info.meaning} |" in pages["reasons.md"].replace("\\|", "|")


def test_check_tells_a_stale_page(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "pages", lambda: pages)
    said: list[str] = []
    assert docs.main([str(tmp_path)]) == 0
    assert docs.main(["--check", str(tmp_path)], said.append) == 0
    file = tmp_path / "reasons.md"
    file.write_text(file.read_text().replace("Reasons", "Raisins"))
    assert docs.main(["--check", str(tmp_path)], said.append) == 1
    assert said == [f"{file} is not current: run python -m fusion.tools.docs"]


def test_the_support_matrix_says_what_the_gate_says(pages):
    rows = {
        line.split(" | ")[0].strip("| `"): line.split(" | ")[1:]
        for line in pages["support.md"].splitlines()
        if line.startswith("| `")
    }
    assert set(rows) >= {"qk_norm_rope_kv_cache", "paged_attention"}
    first = next(
        line for line in pages["support.md"].splitlines() if line.startswith("| `qk_norm_rope_kv")
    )
    assert first.startswith("| `qk_norm_rope_kv_cache` | reference | triton | triton |")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A work folder; modules that a page makes are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def shown(expected: str, found: str) -> None:
    """Every line of a page stands in the output, in order; ``...`` stands for any lines."""
    lines, strict, at = found.splitlines(), True, 0
    for line in expected.splitlines():
        if line == "...":
            strict = False
        elif strict:
            assert at < len(lines) and lines[at] == line, f"{line!r} is not line {at}:\n{found}"
            at += 1
        else:
            assert line in lines[at:], f"{line!r} is not in what follows line {at}:\n{found}"
            at, strict = lines.index(line, at) + 1, True
    assert not strict or at == len(lines), f"more was printed:\n{found}"


def test_the_tutorial_runs_as_it_reads(folder, capsys):
    commands = 0
    for language, info, text in blocks("tutorial.md"):
        if info.startswith("file="):
            (folder / info.removeprefix("file=")).write_text(text)
        elif language == "console":
            first, _, expected = text.partition("\n")
            arguments = shlex.split(first.removeprefix("$ fusion "))
            torch._dynamo.reset()
            ran = run(capsys, *arguments)
            assert ran.status == 0, ran.err
            numbered = re.sub(r"\.py:\d+", ".py:LINE", expected)
            shown(numbered, normal(ran.out).rstrip("\n"))
            commands += 1
        else:
            exec(compile(text, "tutorial.md", "exec"), {})
    assert commands == 5


def test_the_workflow_uses_options_that_exist(folder, capsys):
    """The commands of the sample workflow run, with models of this test in their places."""
    tutorial = {i.removeprefix("file="): t for _, i, t in blocks("tutorial.md") if "file=" in i}
    for place in ("serving", "ci", "models"):
        (folder / place).mkdir()
    for name, text in tutorial.items():
        (folder / name).write_text(text)
    (folder / "serving" / "attention.py").write_text("from net3 import build\n")
    workflow = next(t for language, _, t in blocks("ci.md") if language == "yaml")
    joined = re.sub(r"\\\n\s+", "", workflow)
    commands = re.findall(r"^\s+fusion (explain .*)$", joined, re.M)
    assert len(commands) == 2
    assert "--expect" in commands[0] and "--baseline" in commands[1]
    write = next(t for language, _, t in blocks("ci.md") if language == "console")
    first = write.splitlines()[0].removeprefix("$ fusion ")
    torch._dynamo.reset()
    assert run(capsys, *shlex.split(first)).status == 0
    stand_in = commands[0].replace("models/config.json", "serving/attention.py:build")
    for command in (stand_in, commands[1]):
        torch._dynamo.reset()
        ran = run(capsys, *shlex.split(command))
        assert ran.status == 0, ran.err
    misspelt = commands[0].replace("qk_norm", "qk_nrom")
    assert run(capsys, *shlex.split(misspelt)).status == 2
