"""The layout properties with the Triton kernels, in a process that has Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def interpreted(examples: int) -> None:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LAYOUT_EXAMPLES": str(examples)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p",
               "no:xdist", "tests/layout/interpreted.py"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_layouts_under_the_interpreter() -> None:
    interpreted(18)


@pytest.mark.slow
def test_layouts_under_the_interpreter_deep() -> None:
    interpreted(600)
