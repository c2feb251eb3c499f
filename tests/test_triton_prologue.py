"""The Triton prologue: numbers under the interpreter (own process), gate, tiles, lazy import."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.backends.triton import kernels, prologue, prologue_plan
from fusion.backends.triton import prologue_tiles as tiles
from fusion.backends.triton.sizes import next_power_of_2
from fusion.kernel import Kernel, KernelCall
from fusion.ops import describe_call
from fusion.target import Target
from tests.prologue_cases import Case, build

ROOT = Path(__file__).resolve().parents[1]
SM90 = Target.parse("sm_90", triton="3.6.0")
OPS = ("qk_norm_rope_kv_cache", "rope_kv_cache", "qk_norm_rope", "kv_cache_write")


def interpreted(examples: int, *arguments: str) -> None:
    """Runs tests/prologue_interpreted.py in a process with the interpreter on."""
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PROLOGUE_EXAMPLES": str(examples)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p",
               "no:xdist", "tests/prologue_interpreted.py", *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_numbers_under_the_interpreter():
    interpreted(16)


@pytest.mark.slow
def test_numbers_under_the_interpreter_deep():
    interpreted(1500, "-k", "whole_attribute_space")


def test_import_does_not_import_triton():
    code = (
        "import sys, fusion, fusion.selection as s\n"
        "assert len([k for k in s.kernels() if k.name == 'triton']) >= 4, s.broken_backends()\n"
        "assert 'triton' not in sys.modules and 'torch._inductor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def kernel(op: str) -> Kernel:
    return next(k for k in kernels() if k.op == op)


def described(case: Case, target: Target = SM90, **changes) -> KernelCall:
    args, _ = build(case)
    return describe_call(case.op, args | changes, target=target)


def codes(call: KernelCall) -> list[str]:
    return sorted({reason.code for reason in kernel(call.op).requires.unmet(call)})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1201"])
def test_gate_accepts(op, arch):
    for change in ({}, {"dim": 80, "dim_v": 48}, {"cache": "fnuz", "scales": (0.5, 2.0)},
                   {"layout": "shuffle"}, {"qkv": "strided"}, {"block": 1}):  # fmt: skip
        case = dataclasses.replace(Case(op=op), **change)
        assert codes(described(case, Target.parse(arch, triton="3.6.0"))) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": Target.parse("cpu", triton="3.6.0")}, "gate.arch"),
        ({"target": Target.parse("sm_75", triton="3.6.0")}, "gate.arch"),
        ({"target": Target.parse("sm_90", triton="3.2.0")}, "gate.backend-unavailable"),
        ({"target": Target.parse("sm_90")}, "gate.backend-unavailable"),
        ({"query": torch.zeros(5, 8, 64, dtype=torch.float64)}, "gate.dtype"),
        ({"query": torch.zeros(5, 8, 64, dtype=torch.float16)}, "gate.dtype"),
        ({"rope_dtype": torch.float64}, "gate.dtype"),
        ({"rotary_dim": 66}, "gate.rotary"),
        ({"rope_style": "mirrored"}, "gate.rotary"),
        ({"cos": torch.zeros(40, 32, dtype=torch.float64)}, "gate.dtype"),
        ({"q_weight": torch.ones(8, 64, dtype=torch.bfloat16)}, "gate.argument"),
        ({"k_scale": torch.ones(4)}, "gate.scale-location"),
        ({"k_scale": torch.ones((), device="meta")}, "gate.scale-location"),
        ({"slot_mapping": torch.zeros(5, device="meta", dtype=torch.int64)}, "gate.device"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int16)}, "gate.dtype"),
        ({"key_cache": torch.zeros(8, 16, 4, 64, dtype=torch.float8_e5m2)}, "gate.cache-dtype"),
        ({"key_cache": torch.zeros(8, 16, 4, 128).bfloat16()[..., ::2]}, "gate.cache-stride"),
        ({"kv_layout": "OTHER"}, "gate.kv-layout"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)  # fmt: skip
def test_gate_refuses(changes, code):
    changes = dict(changes)
    target = changes.pop("target", SM90)
    assert code in codes(described(Case(), target, **changes))


def test_gate_refuses_large_heads():
    assert codes(described(Case(dim=576, rotary_dim=64))) == ["gate.head-dim"]


def test_epsilon_on_the_host_is_read_there():
    """A 0-dim epsilon tensor on the CPU needs no wait for the device and is no refusal."""
    call = described(Case(), q_eps_tensor=torch.tensor(1e-5, dtype=torch.float64))
    assert codes(call) == []
    assert prologue._host_eps(1.0, torch.tensor(0.25)) == (0.25, None)


heads = st.tuples(st.sampled_from([0, 1, 4, 8, 12, 16, 32, 64, 96]), st.integers(1, 16))


@given(heads, st.integers(1, 512), st.integers(0, 1 << 22), st.booleans())
def test_a_tile_is_one_of_the_warmed_ones(heads, dim, tokens, hints):
    tile = tiles.choose(*heads, dim, tokens, hints=hints)
    assert tile in tiles.choices(*heads, dim, hints=hints)
    assert len(tiles.choices(*heads, dim, hints=hints)) <= 3
    assert tile.heads & (tile.heads - 1) == 0
    assert tile.tokens & (tile.tokens - 1) == 0
    assert tile.heads * tile.tokens * next_power_of_2(dim) <= 4096
    assert hints or not tile.stream


@given(heads, st.integers(1, 300), st.sampled_from(tiles.choices(32, 8, 128)))
def test_programs_cover_every_row(heads, tokens, tile):
    q_heads, kv_heads = heads
    constant = {"HQ": q_heads, "HK": kv_heads, "WRITE": 1}
    groups = -(-q_heads // tile.heads) + 2 * -(-kv_heads // tile.heads)
    assert prologue_plan.programs(constant, tile, tokens) == groups * -(-tokens // tile.tokens)
    assert prologue_plan.programs(constant, tile, 0) == 0


def test_hints_by_class_of_the_call():
    def stream(heads, tokens):
        return tiles.choose(*heads, 128, tokens).stream

    many, few = (32, 8), (8, 1)
    assert [stream(many, t) for t in (1, 16, 128, 1024, 8192)] == [0, 0, 2, 3, 3]
    assert [stream(few, t) for t in (1, 128, 512, 1024, 2048, 8192)] == [0, 0, 2, 2, 3, 3]
    assert stream(few, None) == 3


def test_description_names_the_tile_and_its_rule():
    text = kernel("qk_norm_rope_kv_cache").describe(described(Case(q_heads=32, kv_heads=8)))
    assert "1 tokens x 8 heads" in text["tile"]
    assert "many heads" in text["tile"]
    assert text["launches"] == 1
