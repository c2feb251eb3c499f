"""Running the command line in this process, and comparing its text with a golden file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.tools.main import main

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).parent / "data" / "configs"
MODELS = "tests.cli_models"

# What differs between machines, releases and runs, and says nothing about the command.
_VARYING = (
    (r"(?m)(fusion report: target \S+ \(\w+\)); .*$", r"\1; VERSIONS"),
    (r"explain/\d+", "explain/N"),
    (r"export/\d+", "export/N"),
    (r"\.py:\d+", ".py:LINE"),
    (r"seconds [\d.e-]+", "seconds S"),
    (r"reused (True|False)", "reused R"),
    (r"\S*/tests/", "tests/"),
)


@dataclass(frozen=True)
class Ran:
    """Exit status, stdout and stderr of one command."""

    status: int
    out: str
    err: str


def run(capsys: Any, *arguments: str) -> Ran:
    """Run ``fusion <arguments>``."""
    capsys.readouterr()
    status = main(arguments)
    out, err = capsys.readouterr()
    return Ran(status, out, err)


def normal(text: str) -> str:
    """The text without what varies."""
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def golden(name: str, text: str) -> None:
    """Compare with ``tests/golden/<name>.txt``; ``UPDATE_GOLDEN=1`` writes it instead."""
    file, found = GOLDEN / f"{name}.txt", normal(text)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text("utf-8"), f"{file} differs; UPDATE_GOLDEN=1 rewrites it"
