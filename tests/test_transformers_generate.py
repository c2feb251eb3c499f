"""Generation in compiled form: one graph each, no recompiles between steps, equal tokens."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from fusion.integrations.transformers import OutOfBlocks, PagedKVCache, generate
from tests import models

NEW = 6


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def paged(name: str, layers: int = 1) -> Any:
    model = models.build(name, layers=layers)
    model.set_attn_implementation("fusion_paged")
    if model.config._attn_implementation != "fusion_paged":
        pytest.skip(f"this transformers' {name} has no exchangeable attention function")
    return model


# Models whose layers are not all alike need two; AOTAutograd is run on one of each kind.
TWO_LAYERS = ("gemma2", "gemma3", "glm4_moe", "gpt_oss", "lfm2")
WITH_AOT = ("gemma3", "gpt_oss", "lfm2", "qwen3")


# The other models are compiled in test_transformers_fused.py.
@pytest.mark.parametrize(
    "name",
    [n if n in WITH_AOT else pytest.param(n, marks=pytest.mark.slow) for n in models.NAMES],
)
def test_compiled_tokens_equal_eager_transformers(name: str) -> None:
    model = paged(name, layers=2 if name in TWO_LAYERS else 1)
    prompts = models.prompts((5, 17, 1))
    want = models.eager_greedy(model, prompts, NEW)
    counter = CompileCounterWithBackend("aot_eager" if name in WITH_AOT else "eager")
    cache = PagedKVCache.for_model(model, 24, 8)
    # fullgraph is on: a graph break would raise.
    assert generate(model, prompts, NEW, cache, {"backend": counter}) == want
    assert counter.frame_count == 2, "one graph for prefill, one for all decode steps"


@pytest.mark.parametrize("name", ["qwen3", "lfm2"])
def test_other_lengths_compile_once_more_and_then_never(name: str) -> None:
    model = paged(name, layers=2 if name == "lfm2" else 1)
    counter = CompileCounterWithBackend("eager")
    cache = PagedKVCache.for_model(model, 64, 8)
    counts = []
    for lengths in ((5, 17, 2), (4, 9, 3), (2, 8, 20), (7, 7, 7)):
        prompts = models.prompts(lengths)
        got = generate(model, prompts, 3, cache, {"backend": counter})
        assert got == models.eager_greedy(model, prompts, 3)
        counts.append(counter.frame_count)
    # prefill + decode; prefill with a dynamic length; nothing any more.
    assert counts == [2, 3, 3, 3]
    # Another cache of the same sizes runs the same code.
    other = PagedKVCache.for_model(model, 64, 8)
    generate(model, models.prompts((3, 4, 6)), 3, other, {"backend": counter})
    assert counter.frame_count == 3


def test_another_batch_size_compiles_decode_once_more() -> None:
    model = paged("qwen3")
    counter = CompileCounterWithBackend("eager")
    cache = PagedKVCache.for_model(model, 64, 8)
    for lengths in ((5, 9), (3, 9, 4), (5, 2, 8, 8), (2, 3, 4, 5, 6)):
        prompts = models.prompts(lengths)
        got = generate(model, prompts, 3, cache, {"backend": counter})
        assert got == models.eager_greedy(model, prompts, 3)
    assert counter.frame_count == 4


def test_models_do_not_use_up_each_others_recompiles() -> None:
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in range(3):
            model = models.build("llama", layers=1, seed=number)
            model.set_attn_implementation("fusion_paged")
            cache = PagedKVCache.for_model(model, 4, 8)
            generate(model, models.prompts((2 + number,)), 2, cache, {"backend": counter})
            assert counter.frame_count == 2 * (number + 1)


def test_dynamic_shapes_from_the_start_never_recompile() -> None:
    model = paged("qwen3")
    cache = PagedKVCache.for_model(model, 64, 8)
    options = {"backend": "aot_eager", "dynamic": True}
    batches = [models.prompts(lengths) for lengths in ((5, 17, 2), (4, 9), (2, 8, 20))]
    want = [models.eager_greedy(model, prompts, 3) for prompts in batches]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [generate(model, prompts, 3, cache, options) for prompts in batches] == want


def test_end_tokens_stop_a_row_and_free_its_blocks() -> None:
    model = paged("qwen3")
    prompts = models.prompts((5, 9, 3))
    full = models.eager_greedy(model, prompts, 8)
    stop = full[1][2]
    want = [row[: row.index(stop) + 1] if stop in row else row for row in full]
    assert len(want[1]) <= 3 < len(want[0])
    cache = PagedKVCache.for_model(model, 24, 4)
    free: list[int] = []
    got = generate(
        model,
        prompts,
        8,
        cache,
        eos_token_id=[stop, 10**6],
        on_logits=lambda step, _: free.append(cache.free_blocks),
    )
    assert got == want
    assert got == models.eager_greedy(model, prompts, 8, eos_token_id=stop)
    assert free[3] > free[2] - 1, "the blocks of the row that is over came back"
    assert cache.free_blocks == 24


def test_a_generation_that_does_not_fit_never_starts() -> None:
    model = paged("qwen3")
    cache = PagedKVCache.for_model(model, 4, 4)
    kept = cache.allocate(3)
    with pytest.raises(OutOfBlocks, match="needs 4 more, 3 of 4 are free"):
        generate(model, [[1, 2, 3], [4, 5]], 4, cache)
    assert cache.free_blocks == 3
    assert cache.allocator.sequences == (kept,)
    # The last token is not written: 1 + 8 - 1 tokens are two blocks.
    assert len(generate(model, [[1]], 8, cache)[0]) == 8


def test_an_error_in_the_middle_frees_everything() -> None:
    model = paged("qwen3")
    cache = PagedKVCache.for_model(model, 8, 4)

    def fail(step: int, logits: torch.Tensor) -> None:
        if step == 1:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        generate(model, [[1, 2, 3]], 4, cache, on_logits=fail)
    assert cache.free_blocks == 8


def test_wrong_calls_are_named() -> None:
    model = models.build("qwen3", layers=1)
    cache = PagedKVCache.for_model(model, 4, 4)
    with pytest.raises(ValueError, match="attention implementation is 'eager'"):
        generate(model, [[1]], 2, cache)
    model.set_attn_implementation("fusion_paged")
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, [[1], []], 2, cache)
    with pytest.raises(ValueError, match="must not be negative"):
        generate(model, [[1]], -1, cache)
    with pytest.raises(ValueError, match="longer than max_seq_len=16"):
        generate(model, [[1] * 10], 8, cache)
    assert generate(model, [], 4, cache) == []
    assert generate(model, [[1], [2]], 0, cache) == [[], []]


def test_compiled_steps_neither_copy_with_the_model_nor_keep_it_alive() -> None:
    model = paged("llama", layers=1)
    cache = PagedKVCache.for_model(model, 4, 8)
    want = generate(model, [[1, 2]], 2, cache, {"backend": "eager"})
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(twin))
    assert twin._fusion_steps.items == again._fusion_steps.items == []
    assert generate(again, [[1, 2]], 2, cache) == want
    alive = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
