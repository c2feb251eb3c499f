"""Real transformers decoders through backend="fusion": what is fused, and that nothing changes.

"Unfused" is the same model, compiled the same way with every pass off. Inner compiler is
`aot_eager`, so that equal means equal to the bit: logits of every step and every byte of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import fusion
from fusion.discovery import discover
from fusion.integrations.transformers import PagedKVCache, generate, pack_qkv
from tests import models

PASS = "qk_norm_rope_kv_cache"
OFF = {known.name: "off" for known in discover().passes}
# Per attention layer: status, operation, reason codes.
WHOLE, ROPE = ("fused", "qk_norm_rope_kv_cache", []), ("fused", "rope_kv_cache", [])
EXPECTED: dict[str, tuple[str, str | None, list[str]]] = {
    "qwen3": WHOLE,
    "qwen3_moe": WHOLE,
    "lfm2": WHOLE,
    "glm4_moe": WHOLE,
    "gemma3": WHOLE,
    "gemma2": ROPE,
    "llama": ROPE,
    "qwen2": ROPE,
    "mistral": ROPE,
    "phi3": ROPE,
    "gptj": ROPE,
    "gpt_oss": ROPE,
    "olmo2": ("partial", "rope_kv_cache", ["match.norm-over-heads"]),
    "hunyuan": ("missed", None, ["match.norm-order"]),
}
# Models with two kinds of layers: windows, experts, convolutions.
TWO_KINDS = ("gemma2", "gemma3", "glm4_moe", "gpt_oss", "lfm2")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def paged(name: str, dtype: torch.dtype, layers: int) -> Any:
    model = models.build(name, dtype, layers=layers)
    model.set_attn_implementation("fusion_paged")
    if model.config._attn_implementation != "fusion_paged":
        pytest.skip(f"this transformers' {name} has no exchangeable attention function")
    return model


def run(
    model: Any, prompts: list[list[int]], new: int, options: dict[str, Any]
) -> tuple[list[list[int]], torch.Tensor, list[torch.Tensor], list[Any]]:
    """Tokens, logits `[step, B, V]`, cache tensors, and the sites of what was compiled."""
    cache = PagedKVCache.for_model(model, 40, 8)
    logits: list[torch.Tensor] = []
    known = len(fusion.reports())
    tokens = generate(
        model,
        prompts,
        new,
        cache,
        {"backend": "fusion", "options": {"inner": "aot_eager", **options}},
        on_logits=lambda _, x: logits.append(x.clone()),
    )
    sites = [s for r in fusion.reports()[known:] for g in r.graphs for s in g.sites]
    kept = [kv for kv in cache.kv if kv is not None]
    return tokens, torch.stack(logits), kept, sites


def assert_same_bits(fused: Any, unfused: Any) -> None:
    assert fused[0] == unfused[0]
    assert torch.equal(fused[1], unfused[1])
    for mine, other in zip(fused[2], unfused[2], strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_qwen3_four_layers_four_ragged_prompts(dtype: torch.dtype) -> None:
    model = paged("qwen3", dtype, layers=4)
    prompts = models.prompts()
    fused = run(model, prompts, 32, {PASS: "required"})
    sites = [s for s in fused[3] if s.pass_name == PASS]
    assert [s.status for s in sites] == ["fused"] * 8, "prefill and decode, four layers each"
    assert {s.layer for s in sites} == {f"model.layers.{i}.self_attn" for i in range(4)}
    assert all(s.source and "modeling_qwen3.py:" in s.source for s in sites)
    assert_same_bits(fused, run(model, prompts, 32, OFF))
    if dtype is torch.float32:
        assert fused[0] == models.eager_greedy(model, prompts, 32)


@pytest.mark.parametrize("name", models.NAMES)
def test_status_of_every_layer(name: str) -> None:
    # bf16 has the most casts.
    layers = 2 if name in TWO_KINDS else 1
    model = paged(name, torch.bfloat16, layers)
    prompts = models.prompts((5, 14, 2))
    fused = run(model, prompts, 3, {})
    sites = [s for s in fused[3] if s.pass_name == PASS and "conv" not in (s.layer or "")]
    attention = 1 if name == "lfm2" else layers
    assert len(sites) == 2 * attention, "a line for every layer, in prefill and in decode"
    for site in sites:
        seen = (site.status, site.operation, [r.code for r in site.reasons])
        assert seen == EXPECTED[name], site
        assert site.layer is not None
        assert site.layer.endswith(("self_attn", "attn"))
        assert site.source is not None
        assert "/modeling_" in site.source
    assert_same_bits(fused, run(model, prompts, 3, OFF))


@pytest.mark.parametrize("name", ["qwen3", "gptj"])
def test_packed_qkv_is_fused_and_reported(name: str) -> None:
    model = paged(name, torch.float32, layers=1)
    prompts = models.prompts((5, 14, 2))
    want = models.eager_greedy(model, prompts, 4)
    pack_qkv(model)
    fused = run(model, prompts, 4, {})
    assert fused[0] == want
    merged = [s for s in fused[3] if s.pass_name == "merge_linears"]
    assert [s.facts["linears"] for s in merged] == [3, 3]
    sites = [s for s in fused[3] if s.pass_name == PASS]
    seen = [(s.status, s.facts["qkv"], s.reasons) for s in sites]
    assert seen == [("fused", "packed", ())] * 2
    assert_same_bits(fused, run(model, prompts, 4, OFF | {"merge_linears": "auto"}))


@pytest.mark.parametrize("layout", ["NHD", "HND", "KV_FIRST", "BLOCK_FIRST"])
def test_every_dense_layout_is_fused(layout: str) -> None:
    model = paged("qwen3", torch.float32, layers=1)
    prompts = models.prompts((5, 14, 2))
    cache = PagedKVCache.for_model(model, 16, 8, layout=layout)
    options = {"backend": "fusion", "options": {"inner": "aot_eager", PASS: "required"}}
    want = models.eager_greedy(model, prompts, 3)
    assert generate(model, prompts, 3, cache, options) == want
