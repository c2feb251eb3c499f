"""Every reason code is emitted somewhere and named by a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion import ops, selection
from fusion.reason import BUILTIN
from fusion.target import Target

ROOT = Path(__file__).resolve().parents[1]


def texts(*folders: str) -> str:
    """All Python sources below some folders, this file and the table itself left out."""
    skip = {Path(__file__).resolve(), ROOT / "fusion" / "reason.py"}
    files = {p.resolve() for f in folders for p in (ROOT / f).rglob("*.py")} - skip
    return "\n".join(p.read_text() for p in sorted(files))


SOURCES = texts("fusion", "passes", "backends", "tools")
TESTS = texts("tests")
OWN = {"gate.token-range"}
"""Reached by the tests of this file."""


@pytest.mark.parametrize("code", sorted(BUILTIN))
def test_the_code_is_emitted_and_tested(code):
    assert f'"{code}"' in SOURCES
    assert code in TESTS or code in OWN


def test_more_lanes_than_32_bits_number_are_refused():
    """Shapes alone: nothing of this size is allocated."""
    tokens = 2**31 // (32 * 48) + 1

    def heads(count: int) -> torch.Tensor:
        return torch.empty(tokens, count, 128, dtype=torch.bfloat16, device="meta")

    arguments = {"query": heads(32), "key": heads(8), "value": heads(8)}
    call = ops.describe_call(
        "qk_norm_rope_kv_cache", arguments, target=Target.parse("gfx942", aiter="0.1.20")
    )
    codes = {r.code for r in selection.find(call.op, "aiter").requires.unmet(call)}
    assert "gate.token-range" in codes
