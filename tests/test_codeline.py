"""The line of model code beside a site: of the right file, as it is now, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion import codeline
from fusion.codeline import code_line
from fusion.graph.provenance import short_path


@pytest.fixture(autouse=True)
def nothing_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codeline, "_FILES", {})


def model(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "net.py"
    file.write_text(f"first = 1\n{text}\n")
    return file


def test_the_work_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model(tmp_path / "a", "key = rope(key)")
    model(tmp_path / "b", "launch()")
    monkeypatch.chdir(tmp_path / "a")
    source = f"{short_path(str(ours))}:2"
    assert source == "net.py:2"
    monkeypatch.chdir(tmp_path / "b")
    assert code_line(source) == "key = rope(key)"
    ours.write_text("first = 1\nkey = norm(rope(key))\n")
    assert code_line(source) == "key = norm(rope(key))"


def test_a_name_of_two_files_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        file = model(tmp_path / folder, f"x = '{folder}'")
        monkeypatch.chdir(tmp_path / folder)
        assert short_path(str(file)) == "net.py"
    assert code_line("net.py:2") is None


def test_a_file_of_another_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "package", "y = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert code_line("package/net.py:2") == "y = 2"
    assert code_line("package/net.py:99") is None
    assert code_line("package/none.py:2") is None
    assert code_line("package/net.py") is None
