"""``fusion verify``: equal, not equal, the first bad site, and the script that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import fusion.selection as selection
from tests.cli import MODELS, golden, run

PASS = "qk_norm_rope_kv_cache"


@pytest.fixture
def wrong_kernel(monkeypatch):
    """The reference kernel of the prologue gives a wrong q."""
    known = selection._load()

    def spoil(kernel):
        if (kernel.op, kernel.name) != (PASS, "reference"):
            return kernel

        def fn(*args, **kwargs):
            q, k = kernel.fn(*args, **kwargs)
            return q * 1.25, k

        return replace(kernel, fn=fn)

    spoilt = replace(known, kernels=tuple(map(spoil, known.kernels)))
    monkeypatch.setattr(selection, "_load", lambda: spoilt)


def test_equal(capsys, tmp_path):
    file = tmp_path / "result.json"
    ran = run(capsys, "verify", f"{MODELS}:good", "--json", str(file))
    assert (ran.status, ran.err) == (0, "")
    golden("verify-equal", ran.out)
    data = json.loads(file.read_text())
    assert data["equal"] is True
    assert len(data["sites"]) == 2


def test_a_wrong_kernel_is_found_with_its_site_and_a_script(capsys, tmp_path, wrong_kernel):
    script = tmp_path / "repro.py"
    ran = run(capsys, "verify", f"{MODELS}:mixed", "-o", "validate=false", "--repro", str(script))
    assert ran.status == 1
    assert "NOT equal" in ran.out
    assert "first site that differs: layers.0" in ran.out
    assert f"wrote {script}" in ran.err
    names = {"__name__": "repro"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    capsys.readouterr()
    assert names["main"]() == 1
    assert "elements differ, at most by" in capsys.readouterr().out
    # By itself, with the kernel as it is, the script finds nothing.
    alone = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone.stderr
    assert "0 elements differ" in alone.stdout


def test_random_numbers_are_the_same_in_every_run(capsys):
    ran = run(capsys, "verify", f"{MODELS}:noisy")
    assert ran.status == 0, ran.out
    assert "equal, bit by bit" in ran.out and ", 1 fused site\n" in ran.out


def test_a_difference_without_a_rewrite_is_not_blamed_on_fusion(capsys):
    ran = run(capsys, "verify", f"{MODELS}:counting")
    assert ran.status == 1
    assert ran.out.count("nothing was fused") == 1
    assert "nothing was fused, so fusion cannot be the cause" in ran.out
    assert "look at the sites" not in ran.out and "--repro" not in ran.err


def test_a_wrong_kernel_within_the_tolerance_and_without_a_script(capsys, wrong_kernel):
    command = ["verify", f"{MODELS}:one", "-o", "validate=false", "--tolerance"]
    ran = run(capsys, *command, "100")
    assert ran.status == 0
    assert "equal within 100" in ran.out
    ran = run(capsys, *command, "0.001")
    assert ran.status == 1
    assert "pass --repro FILE" in ran.err


def test_a_kernel_that_was_asked_for_and_not_used_is_warned_of(capsys):
    """Equal says nothing about a kernel that never ran."""
    warning = "warning: kernel triton was asked for and bound at no site"
    ran = run(capsys, "verify", f"{MODELS}:one", "--kernels", "triton")
    assert ran.status == 0
    assert ran.err.count(warning) == 1
    assert "0 fused sites: nothing was fused, so nothing of fusion was tested" in ran.out
    ran = run(capsys, "verify", f"{MODELS}:one", "--kernels", "triton,reference", "--json", "-")
    assert ran.status == 0 and json.loads(ran.out)["equal"] is True
    assert warning in ran.err and "kernel reference was" not in ran.err
    # A second choice that was not needed is no news.
    ran = run(capsys, "verify", f"{MODELS}:one", "-o", 'kernels=["reference", "triton"]')
    assert (ran.status, ran.err) == (0, "")
    assert "1 fused site\n" in ran.out
