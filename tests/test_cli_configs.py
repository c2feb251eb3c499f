"""Published configurations: explained without weights, one layer for all of its kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers", reason="configurations are built by transformers")

from fusion import Report
from tests.cli import CONFIGS, run

PASS = "qk_norm_rope_kv_cache"

#: Layers, what the prologue becomes, and the status of its sites.
EXPECTED = {
    "Qwen3-0.6B": (28, "qk_norm_rope_kv_cache", "fused"),
    "Qwen3-8B": (36, "qk_norm_rope_kv_cache", "fused"),
    "Qwen3-235B-A22B": (94, "qk_norm_rope_kv_cache", "fused"),
    "Llama-3.1-8B": (32, "rope_kv_cache", "fused"),
    "Gemma-3-12B": (48, "qk_norm_rope_kv_cache", "fused"),
    # The norm runs over all heads together, so only rope and write are taken.
    "OLMo-2-7B": (32, "rope_kv_cache", "partial"),
}
KERNELS = {"cpu": "reference", "sm_90": "triton", "gfx942": "triton", "gfx950": "triton"}

# One capture costs about two seconds: every model once by default, the rest in the slow run.
DEFAULT = {
    "Qwen3-0.6B": ("cpu",),
    "Qwen3-8B": ("sm_90",),
    "Qwen3-235B-A22B": ("gfx942",),
    "Llama-3.1-8B": ("gfx950",),
    "Gemma-3-12B": ("gfx942",),
    "OLMo-2-7B": ("cpu", "gfx942"),
}
CASES = [
    pytest.param(name, target, marks=() if target in DEFAULT[name] else pytest.mark.slow)
    for name in sorted(EXPECTED)
    for target in KERNELS
]


def report_of(capsys, *arguments: str) -> Report:
    ran = run(capsys, "explain", *arguments, "--json", "-")
    assert ran.status == 0, ran.err
    return Report.from_json(ran.out)


def outcomes(report: Report) -> dict:
    """What matters of every site, by pass and layer."""
    return {
        (s.pass_name, s.layer): (
            s.status, s.applicable, s.operation, s.kernel, tuple(r.code for r in s.reasons),
            s.source,
        )
        for s in report.sites
    }  # fmt: skip


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_published_config_is_right(capsys, name, target):
    layers, operation, status = EXPECTED[name]
    report = report_of(capsys, str(CONFIGS / f"{name}.json"), "--target", target)
    sites = [s for s in report.sites if s.pass_name == PASS]
    assert [s.layer for s in sites] == [f"model.layers.{i}.self_attn" for i in range(layers)]
    assert {(s.status, s.operation, s.kernel) for s in sites} == {
        (status, operation, KERNELS[target])
    }
    codes = {r.code for s in sites for r in s.reasons}
    assert codes == ({"match.norm-over-heads"} if status == "partial" else set())
    assert all(s.source and s.source.startswith("transformers/models/") for s in sites)
    calls = [s for s in report.sites if s.pass_name == "non_causal_attention"]
    assert len(calls) == layers
    assert not any(s.near_miss for s in calls)  # causal calls are left alone


def test_the_two_kinds_of_gemma_layers_are_both_captured(capsys):
    ran = run(capsys, "explain", str(CONFIGS / "Gemma-3-12B.json"))
    assert "2 layers stand for 48" in ran.err
    assert "its text decoder is explained" in ran.err


TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
    ],
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    """A folder with the configuration of a small model whose layers are of two kinds."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        ["--phase", "prefill", "--pack-qkv", "--target", "gfx942,aiter=0.1.20,rocm=7.1"],
        pytest.param(["--cache", "static"], marks=pytest.mark.slow),
    ],
)
def test_one_layer_of_each_kind_agrees_with_all_layers(capsys, tiny, how):
    some = report_of(capsys, tiny, *how)
    every = report_of(capsys, tiny, *how, "--all-layers")
    assert outcomes(some) == outcomes(every)
    assert len(some.sites) == len(every.sites)
    assert [g.id for g in some.graphs] == [g.id for g in every.graphs] == [some.graphs[0].id]
    assert len({s.layer for s in some.sites if s.pass_name == PASS}) == 4
    copies = {s.layer: s.facts["captured_as"] for s in some.sites if "captured_as" in s.facts}
    assert copies["model.layers.3.self_attn"] == "model.layers.0.self_attn"
    assert "model.layers.1.self_attn" not in copies


def test_phase_batch_dtype_and_cache_reach_the_graph(capsys, tiny):
    def facts(*how):
        report = report_of(capsys, tiny, *how)
        return next(s for s in report.sites if s.pass_name == PASS).facts, report.graphs[0].id

    prefill, name = facts("--phase", "prefill", "--batch", "2", "--tokens", "6", "--dtype", "fp32")
    assert (prefill["tokens"], prefill["rope"]["dtype"], name) == ("12", "float32", "prefill")
    decode, name = facts("--batch", "3", "--cache-dtype", "fp8", "--layout", "hnd")
    assert (decode["tokens"], decode["write"]["scaled"], name) == ("3", True, "decode")


def test_a_small_config_is_verified_with_random_weights(capsys, tmp_path):
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **kinds}))
    ran = run(capsys, "verify", str(tmp_path), "--phase", "prefill", "--dtype", "fp32")
    assert ran.status == 0, ran.out
    assert "equal, bit by bit" in ran.out
    assert "1 fused site\n" in ran.out


# --- files of strangers ----------------------------------------------------------------------


def test_a_model_folder_never_runs_code(capsys, tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w').write('x')\n")
    (tmp_path / "configuration_evil.py").write_text(f"open({str(marker)!r}, 'w').write('x')\n")
    auto = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    ran = run(capsys, "explain", str(tmp_path))
    assert ran.status == 2
    assert "trust_remote_code is off" in ran.err and "module:function" in ran.err
    assert not marker.exists()
    # A known type that brings code along is built by transformers' own classes.
    file.write_text(json.dumps({**TINY, "auto_map": auto, "quantization_config": {"bits": 4}}))
    ran = run(capsys, "explain", str(tmp_path))
    assert ran.status == 0
    assert "not run, transformers' is used" in ran.err
    assert "explained as if it were not" in ran.err
    assert not marker.exists()


def test_a_config_cannot_ask_for_kernels_of_a_hub(capsys, tmp_path, monkeypatch):
    import transformers.integrations.hub_kernels as hub

    def fail(*args, **kwargs):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(hub, "load_and_register_attn_kernel", fail, raising=False)
    config = {**TINY, "_attn_implementation": "somebody/kernel", "attn_implementation": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(capsys, "explain", str(tmp_path)).status == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "has no model_type"),
        ('{"model_type": "nobody_knows"}', "the installed transformers does not know it"),
        ('{"model_type": "t5"}', "cannot be built"),
        (
            '{"model_type": "qwen3", "hidden_size": "many"}',
            "config.json: Field 'hidden_size' expected int, got str (value: 'many')\n",
        ),
    ],
)
def test_configs_that_cannot_be_explained(capsys, tmp_path, text, message):
    file = tmp_path / "config.json"
    file.write_text(text)
    ran = run(capsys, "explain", str(file))
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_what_a_file_names_is_escaped_in_the_page(capsys, tmp_path):
    folder = tmp_path / "<script>alert(1)</script>"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    page = tmp_path / "page.html"
    assert run(capsys, "explain", str(folder), "--html", str(page)).status == 0
    assert "<script>alert" not in page.read_text()


# --- cost ------------------------------------------------------------------------------------

_MEASURE = """
import resource, sys
from fusion.tools.main import main
status = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(f"{used.ru_utime + used.ru_stime:.1f} {used.ru_maxrss / 2**20:.2f}", file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "limit"),
    [*((name, [], 15) for name in sorted(EXPECTED)), ("Qwen3-8B", ["--all-layers"], 60)],
)
def test_time_and_memory(name, more, limit):
    """CPU seconds and GiB of one command in a fresh process (the machine may be shared)."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", _MEASURE, "explain", str(CONFIGS / f"{name}.json"), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    seconds, memory = map(float, ran.stderr.split()[-2:])
    print(f"{name} {more}: {seconds} s CPU, {memory} GiB, {time.perf_counter() - begun:.1f} s")
    assert seconds < limit
    assert memory < 3
