"""The Triton prologue on a real GPU: the sections of benchmarks/prologue_gpu.py that only check.

Timing (sections ``table``, ``hints``, ``sweep``) is left to the script.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none"),
]
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "prologue_gpu.py"


def section(name: str):
    spec = importlib.util.spec_from_file_location("prologue_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls_equal_the_reference(seed):
    assert section("_case")(seed) == ""


@pytest.mark.parametrize("name", ["oracle", "repeat", "fp8", "huge", "capture", "compiled"])
def test_section(name, tmp_path):
    section(name)(tmp_path)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="not installed")
def test_sanitizer(tmp_path):
    section("sanitizer")(tmp_path)
