"""The two transformers examples run, and say what they promise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generate_paged_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--inner aot_eager --layers 1 --max-new-tokens 4 --device cpu --pack-qkv"
    fusion.reports(clear=True)  # of other tests in this process
    assert load("generate_paged").main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "tokens equal to transformers' eager generation" in out
    assert out.count("fused") >= 2
    assert "pack_qkv: 1 layers packed, skipped: none" in out
    # Each report says which step it is of, and one blank line is enough.
    prefill, decode = fusion.reports()
    headings = [line for line in out.splitlines() if line.startswith("--- ")]
    assert headings == ["--- prefill ---", "--- decode ---"]
    assert "\n\n\n" not in out
    assert f"--- prefill ---\n\n{prefill}" in out and f"--- decode ---\n\n{decode}" in out
    tokens = [s.facts["tokens"] for r in (prefill, decode) for s in r.sites if "tokens" in s.facts]
    assert tokens == ["53", "4"]  # of the prompts, and one of each


def test_generate_paged_from_a_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests import models

    models.config("gemma3", 4).save_pretrained(tmp_path)
    arguments = ["--config", str(tmp_path / "config.json"), "--layers", "2", "--no-compile"]
    arguments += ["--max-new-tokens", "3", "--device", "cpu", "--layout", "nhd"]
    assert load("generate_paged").main(arguments) == 0
    out = capsys.readouterr().out
    assert "Gemma3ForCausalLM: 2 layers, 8 query and 4 KV heads, float32, cpu" in out
    assert "tokens equal" in out


def test_generate_paged_says_when_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("generate_paged")
    right = example.transformers_eager

    def wrong(*args: Any) -> list[list[int]]:
        rows: list[list[int]] = right(*args)
        rows[1][2] += 1
        return rows

    monkeypatch.setattr(example, "transformers_eager", wrong)
    arguments = "--no-compile --layers 1 --max-new-tokens 4 --device cpu"
    assert example.main(arguments.split()) == 1
    out = capsys.readouterr().out
    assert "differs from token 2 on" in out
    assert "tokens not equal" in out
    assert example.main([*arguments.split(), "--dtype", "bfloat16"]) == 0


def test_static_cache(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--inner aot_eager --layers 1 --max-new-tokens 4 --device cpu"
    fusion.reports(clear=True)  # of other tests in this process
    assert load("static_cache").main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "tokens equal to the uncompiled model's" in out
    # Prefill and decode, one layer each.
    assert out.count("1 fused") == 2
    assert "\n\n\n" not in out
