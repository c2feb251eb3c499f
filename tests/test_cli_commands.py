"""The other commands: kernels, doctor, passes, diff, bench, and the command line itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

import fusion
from fusion.selection import kernels as offered
from tests.cli import MODELS, golden, run

PASS = "qk_norm_rope_kv_cache"


def test_help_of_every_command_has_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    whole = run(capsys, "--help")
    assert whole.status == 0
    golden("help", whole.out)
    for name in ("explain", "diff", "kernels", "verify", "bench", "doctor", "passes"):
        assert name in whole.out
        ran = run(capsys, name, "--help")
        assert ran.status == 0
        assert "Examples:" in ran.out
        assert f"fusion {name}" in ran.out


def test_version_and_wrong_commands(capsys):
    assert run(capsys, "--version").out == f"fusion {fusion.__version__}\n"
    ran = run(capsys, "explian")
    assert ran.status == 2
    assert "No such command" in ran.err


def test_completion_is_offered(capsys):
    assert "--install-completion" in run(capsys, "--help").out


def test_the_command_line_starts_without_torch():
    code = "import sys, fusion.tools.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90", "gfx942,aiter=0.1.20,rocm=7.1"])
def test_every_kernel_is_shown_with_every_condition(capsys, target):
    ran = run(capsys, "kernels", "--target", target, "--json", "-")
    assert ran.status == 0, ran.err
    data = json.loads(ran.out)
    assert {e["op"] for e in data["ops"]} == {k.op for k in offered()}
    for entry in data["ops"]:
        shown = [k["kernel"] for k in entry["kernels"]] + entry["not_asked"]
        assert sorted(shown) == sorted(k.name for k in offered(entry["op"]))
        for kernel in entry["kernels"]:
            assert kernel["conditions"]
            assert kernel["accepted"] == all(c["ok"] for c in kernel["conditions"])
            assert all(c["origin"] for c in kernel["conditions"])


def test_the_gate_answers_for_a_call(capsys):
    ask = ["kernels", "--op", PASS, "--target"]
    amd = [*ask, "gfx942,aiter=0.1.20,rocm=7.1", "--option", "numerics=tolerant"]
    assert f"{PASS}: aiter would run" in run(capsys, *amd, "--packed-qkv").out
    refused = run(capsys, *amd).out
    assert f"{PASS}: triton would run" in refused
    assert "views of one packed" in refused
    assert f"{PASS}: triton would run" in run(capsys, *ask, "sm_90").out
    assert f"{PASS}: reference would run" in run(capsys, *ask, "cpu").out
    fp8 = run(capsys, *ask, "sm_90", "--cache-dtype", "fp8", "--layout", "hnd").out
    assert "float8_e4m3fn[64, 16, 8, 128]" in fp8


def test_text_of_the_gate(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(capsys, "kernels", "--target", "cpu", "--op", "qk_norm_rope")
    assert ran.status == 0
    golden("kernels", ran.out)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_gate_fits_the_terminal_and_leaves_nothing_out(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    ask = ["kernels", "--target", "sm_90", "--op", PASS]
    text = run(capsys, *ask).out
    assert max(map(len, text.splitlines())) < columns
    said = " ".join(text.split())
    (entry,) = json.loads(run(capsys, *ask, "--json", "-").out)["ops"]
    for kernel in entry["kernels"]:
        for c in kernel["conditions"]:
            assert c.keys() == {"name", "ok", "have", "need", "origin"}
            unasked = c["have"] == "not looked at" or c["name"] == "arch (amd)"
            unasked |= c["have"].startswith("absent") and "absent" not in c["need"]
            mark = "NO" if not c["ok"] else "--" if unasked else "ok"
            line = f"{mark} {c['name']}: have {c['have']}; need {c['need']}; from {c['origin']}"
            assert " ".join(line.split()) in said
    # What a kernel is refused for is read first, and counted.
    (refused,) = [k for k in entry["kernels"] if not k["accepted"]]
    unmet = sum(not c["ok"] for c in refused["conditions"])
    total = len(refused["conditions"])
    head, rest = text.split(f"aiter: refused, {unmet} of {total} conditions not met\n")
    assert "  NO  " not in head
    marks = [line[4:6] for line in rest.splitlines() if line[4:6] in ("ok", "NO", "--")]
    assert marks[:unmet] == ["NO"] * unmet and "NO" not in marks[unmet:]


def test_a_condition_that_is_not_of_this_call_is_not_called_ok(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    nvidia = run(capsys, "kernels", "--target", "sm_90").out
    amd = run(capsys, "kernels", "--target", "gfx942,aiter=0.1.20,rocm=7.1").out
    assert "    --  arch (amd): have sm_90;" in nvidia and "ok  arch (amd)" not in nvidia
    assert "    ok  arch (amd): have gfx942;" in amd and "--  arch" not in amd
    assert "    ok  compute capability: have sm_90;" in nvidia
    assert "    --  compute capability: have gfx942;" in amd and "ok  compute" not in amd
    attention = nvidia[nvidia.index("\npaged_attention: ") : nvidia.index("\nkv_cache_write: ")]
    said = "    --  of calls that are causal: not looked at; from arguments\n"
    assert attention.count(said) == 1 and "(causal):" not in attention
    for text in (nvidia, amd):
        assert "    --  dtype of q_eps_tensor, k_eps_tensor: have absent;" in text
        assert "    ok  q_eps_tensor: have absent; need absent;" in text
        assert "    --  fp8 scales: have absent; need one float on the device;" in text
        assert not [s for s in text.splitlines() if "not looked at" in s and s[4:6] != "--"]
        assert "have ;" not in text


def test_words_are_packed_into_lines():
    from fusion.tools.console import packed

    assert packed(["one two", "three"], "> ", ". ", 9) == ["> one two", ". three"]
    assert packed(["one", "two three four"], "> ", ". ", 9) == [
        "> one",
        ". two",
        ". three",
        ". four",
    ]
    assert packed(["unbreakable"], "> ", ". ", 5) == ["> unbreakable"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "qk"], "no operation is called 'qk'"),
        (["--heads", "32/8"], "is not Q/KV/DIM"),
        (["--heads", "32/5/128"], "no such shape"),
        (["--layout", "weird"], "not a KV-cache layout"),
    ],
)
def test_usage_errors_of_kernels(capsys, arguments, message):
    ran = run(capsys, "kernels", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


# --- doctor and passes -----------------------------------------------------------------------


def test_doctor(capsys, monkeypatch):
    monkeypatch.setenv("FUSION_AITER", "0")
    data = json.loads(run(capsys, "doctor", "--json", "-").out)
    assert data["versions"]["fusion"] == fusion.__version__
    assert data["switches"]["FUSION_AITER"] == "0"
    assert PASS in data["passes"]
    assert "reference" in data["kernels"][PASS]
    text = run(capsys, "doctor").out
    for heading in ("versions", "machine", "switches", "passes", "kernels", "plug-ins"):
        assert f"\n{heading}\n" in f"\n{text}"


def test_doctor_shows_a_misspelt_switch_and_a_broken_backend(capsys, monkeypatch):
    import fusion.selection as selection
    from fusion.reason import Reason

    monkeypatch.setenv("FUSION_AITER", "maybe")
    broken = (("extra", Reason("plugin.broken", "backend extra: ImportError: nope")),)
    monkeypatch.setattr(selection, "broken_backends", lambda: broken)
    out = run(capsys, "doctor").out
    assert "FUSION_AITER='maybe' is neither" in out
    assert "backend extra: plugin.broken: backend extra: ImportError: nope" in out


def test_passes(capsys):
    ran = run(capsys, "passes", "-o", PASS + '={"mode": "required", "max_tokens": 8}')
    assert f"{PASS}: built, required" in ran.out
    assert "option max_tokens: int | None = 8" in ran.out
    data = json.loads(run(capsys, "passes", "--json", "-").out)
    assert [p["name"] for p in data] == list(dict.fromkeys(p["name"] for p in data))
    assert all(p["origin"] for p in data)
    about = {p["name"]: p["about"] for p in data}
    assert all(about.values()) and len({*about.values()}) == len(about)
    assert about["merge_linears"].startswith("Merge linears that are computed more than once")
    assert not [text for text in about.values() if "`" in text or "The pass" in text]


def test_what_a_pass_does_is_told_in_plain_words():
    from fusion.tools.passes import about

    @dataclass(frozen=True)
    class Told:
        """Does :class:`~a.B` and ``c``,
        `d`_ too.

        Not this.
        """

    @dataclass(frozen=True)
    class Named:
        """The pass. It has no options."""

    @dataclass(frozen=True)
    class WithOptions:
        """The pass. ``n``: how many."""

        n: int = 1

    @dataclass(frozen=True)
    class Untold:
        n: int = 1

    module = (
        "The other commands: kernels, doctor, passes, diff, bench, and the command line itself."
    )
    assert about(Told) == "Does a.B and c, d too."
    assert about(Named) == module
    assert about(WithOptions) == f"{module} n: how many."
    assert about(Untold) == module


# --- diff ------------------------------------------------------------------------------------


def test_diff_shows_what_changed_and_only_that(capsys):
    ran = run(capsys, "diff", f"{MODELS}:good", "--pass", PASS, "--context", "0")
    assert ran.status == 0
    removed = [line for line in ran.out.splitlines() if line.startswith("-")]
    added = [line for line in ran.out.splitlines() if line.startswith("+")]
    assert any("rsqrt" in line for line in removed)
    assert sum("fusion.qk_norm_rope_kv_cache" in line for line in added) == 2
    assert not [line for line in ran.out.splitlines() if line.startswith(" ")]


def test_diff_of_one_site(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(capsys, "diff", f"{MODELS}:mixed", "--site", "layers.0", "--pass", PASS)
    assert ran.status == 0
    before, new, after = ran.out.partition("@@ new\n")
    assert new and len([line for line in after.splitlines() if "fusion." in line]) == 1
    said = " ".join(after.replace("\n+", "\n").split())
    assert f"= fusion.{PASS}(query=view, key=view_1, value=view_2," in said
    assert {line[0] for line in after.splitlines()} == {"+"}
    # How operands are prepared is the rewrite's own business; the nodes that go are the model's.
    golden("diff-site", re.sub(r"(tests/mutations.py):[\d, -]+", r"\1:LINES", before))
    missed = run(capsys, "diff", f"{MODELS}:mixed", "--site", "layers.1", "--pass", PASS)
    assert missed.status == 0


def test_diff_says_of_which_layer_and_what_a_node_was_read_as(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "diff", f"{MODELS}:mixed", "--pass", PASS).out
    assert max(map(len, out.splitlines())) < 80
    assert re.search(r"(?m)^@@ -\d+,\d+ \+\d+,\d+ @@ layers\.0$", out)
    assert re.search(r"(?m)^@@ -\d+,\d+ \+\d+,\d+ @@ layers\.2$", out)
    assert re.search(r"(?m)^-rsqrt = aten\.rsqrt\(add\)  # q norm$", out)
    assert re.search(r"(?m)^-cat_1 = aten\.cat\(\[sub_1, add_3\], -1\)  # k rope$", out)
    for noise in ("num_users", "OpOverload", "_base_index", "%", "call_function"):
        assert noise not in out


def test_diff_without_a_change(capsys):
    ran = run(capsys, "diff", f"{MODELS}:good", "-o", f"{PASS}=off", "--pass", PASS)
    assert (ran.status, ran.out) == (0, "")
    assert "nothing changed" in ran.err


# --- bench -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [PASS, "kv_cache_write"])
def test_bench_measures_and_checks(capsys, op):
    ran = run(capsys, "bench", "--op", op, "--heads", "4/2/32", "--tokens", "3", "--tokens", "5")
    assert ran.status == 0, ran.err
    head, *rows = ran.out.splitlines()
    assert head.split()[:3] == ["op", "shape", "kernel"]
    assert len(rows) == 2
    assert all(" ok" in row and op in row for row in rows)


def test_bench_tells_a_wrong_result(capsys, monkeypatch):
    from fusion.backends.triton.bench import prologue

    monkeypatch.setattr(prologue, "verify", lambda *_: "q: 3 wrong")
    ran = run(capsys, "bench", "--heads", "4/2/32", "--tokens", "3", "--no-unfused")
    assert ran.status == 1
    assert "q: 3 wrong" in ran.out


def test_bench_warms_up_before_it_measures():
    from fusion.tools.bench import _microseconds

    calls = 0

    def slow_at_first():
        nonlocal calls
        calls += 1
        if calls <= 15:
            time.sleep(0.002)

    assert _microseconds(slow_at_first) < 1000
    calls = 0

    def slow():
        nonlocal calls
        calls += 1
        time.sleep(0.1)

    assert _microseconds(slow) > 90_000
    assert calls == 6


def test_bench_on_the_cpu_uses_one_thread_and_gives_the_others_back(capsys, monkeypatch):
    import torch

    from fusion.tools import bench

    used = []
    monkeypatch.setattr(
        bench, "_microseconds", lambda function: used.append(torch.get_num_threads()) or 12.0
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ran = run(capsys, "bench", "--op", "kv_cache_write", "--heads", "4/2/32", "--tokens", "3")
        assert ran.status == 0
        assert used == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_bench_of_an_unknown_operation(capsys):
    ran = run(capsys, "bench", "--op", "matmul")
    assert ran.status == 2
    assert "is not measured" in ran.err


# --- golden texts of what depends on the machine ---------------------------------------------


def test_text_of_bench(capsys, monkeypatch):
    from fusion.tools import bench

    monkeypatch.setattr(bench, "_microseconds", lambda function: 12.0)
    ran = run(capsys, "bench", "--heads", "4/2/32", "--tokens", "3", "--tokens", "64")
    golden("bench", ran.out)


def test_text_of_doctor():
    from fusion.tools.doctor import to_text

    reason = {"code": "plugin.broken", "message": "backend extra: ImportError: nope"}
    found = {
        "versions": {"fusion": "0.1.0", "python": "3.12.1", "torch": "2.13.0"},
        "platform": "linux x86_64",
        "target": {"vendor": "nvidia", "arch": "sm_90", "origin": "probed"},
        "devices": ["cuda:0 NVIDIA H200, 139 GiB"],
        "aiter": "not installed (FUSION_AITER unset)",
        "switches": {"FUSION_AITER": None, "FUSION_DUMP": "dumps"},
        "passes": {PASS: "fusion (fusion.passes.qk_norm_rope_kv_cache)"},
        "kernels": {PASS: ["aiter", "triton", "reference"]},
        "broken": [{"kind": "backend", "name": "extra", **reason}],
        "cache": {"folder": "cache/fusion_reports", "reports": 3},
    }
    golden("doctor", to_text(found))


def test_text_of_passes(monkeypatch):
    from fusion import discovery
    from fusion.reason import Reason
    from fusion.report import PassStatus
    from fusion.tools.passes import describe, to_text

    known = discovery.discover()
    mine = tuple(p for p in known.passes if p.name == PASS)
    broken = PassStatus(
        "extra", "not-built", (Reason("plugin.broken", "no module named extra"),), origin="extra"
    )
    found = discovery.Discovered(mine, (broken,))
    monkeypatch.setattr(discovery, "discover", lambda: found)
    golden("passes", to_text(describe(None, None, [PASS + '={"max_tokens": 8}'])))
