"""Paged generation on a GPU: equal tokens, and decode steps that replay one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fusion.integrations.transformers import PagedKVCache, generate
from tests import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NEW = 12


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def paged(name: str) -> Any:
    model = models.build(name, layers=2, device="cuda")
    model.set_attn_implementation("fusion_paged")
    if model.config._attn_implementation != "fusion_paged":
        pytest.skip(f"this transformers' {name} has no exchangeable attention function")
    return model


@pytest.mark.parametrize("name", models.NAMES)
def test_eager_tokens_equal(name: str) -> None:
    model = paged(name)
    prompts = models.prompts()
    cache = PagedKVCache.for_model(model, 32, 16)
    assert generate(model, prompts, NEW, cache) == models.eager_greedy(model, prompts, NEW)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "lfm2"])
def test_compiled_tokens_equal(name: str, mode: str) -> None:
    model = paged(name)
    cache = PagedKVCache.for_model(model, 32, 16)
    options = {"backend": "fusion", "mode": mode}
    # The second batch meets captured graphs with other slots, lengths and tables.
    for seed in (0, 1):
        prompts = models.prompts(seed=seed)
        want = models.eager_greedy(model, prompts, NEW)
        assert generate(model, prompts, NEW, cache, options) == want
    if mode == "reduce-overhead":
        counters = torch._dynamo.utils.counters["inductor"]
        assert counters["cudagraph_skips"] == 0
