"""`fusion_paged` against transformers' own eager attention, model by model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

import fusion
from fusion.integrations.transformers import (
    PagedAttentionError,
    PagedKVCache,
    forward_arguments,
    generate,
    kv_layers,
    write_kv,
)
from fusion.integrations.transformers.attention import (
    WindowMask,
    paged_attention_forward,
    paged_mask,
)
from fusion.integrations.transformers.layers import cache_argument
from tests import models

NEW = 6


def paged(name: str, **options: Any) -> Any:
    model = models.build(name, layers=2, **options)
    model.set_attn_implementation("fusion_paged")
    if model.config._attn_implementation != "fusion_paged":
        pytest.skip(f"this transformers' {name} has no exchangeable attention function")
    return model


@torch.no_grad()
def eager_logits(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """`[step, B, V]`: what eager says at each step, from one forward over the whole text."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    rows = []
    for prompt, new in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + new[:-1]])
        rows.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    model.set_attn_implementation(before)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("name", models.NAMES)
def test_logits_and_tokens_equal_eager(name: str) -> None:
    model = paged(name)
    prompts = models.prompts()  # longer than the window, at and across block borders
    want = models.eager_greedy(model, prompts, NEW)
    cache = PagedKVCache.for_model(model, 24, 8)
    logits: list[torch.Tensor] = []
    got = generate(model, prompts, NEW, cache, on_logits=lambda _, x: logits.append(x.clone()))
    assert got == want
    assert cache.free_blocks == 24
    reference = eager_logits(model, prompts, want)
    torch.testing.assert_close(torch.stack(logits), reference, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND", "KV_FIRST", "BLOCK_FIRST", "SHUFFLE"])
def test_every_layout_gives_the_same_tokens(layout: str) -> None:
    model = paged("qwen3")
    prompts = models.prompts((9, 3))
    want = models.eager_greedy(model, prompts, NEW)
    cache = PagedKVCache.for_model(model, 8, 8, layout=layout)
    assert generate(model, prompts, NEW, cache) == want


def test_a_fork_goes_on_from_the_same_tokens() -> None:
    model = paged("gemma3")
    prompt = models.prompts((13,))[0]
    continuations = models.prompts((3, 3), seed=5)
    cache = PagedKVCache.for_model(model, 12, 8)
    parent = cache.allocate()
    run(model, cache, [parent], [prompt])
    child = cache.fork(parent)
    both = zip((parent, child), continuations, strict=True)
    last = [run(model, cache, [sequence], [new]) for sequence, new in both]
    for logits, continuation in zip(last, continuations, strict=True):
        reference = eager_logits(model, [prompt + continuation], [[0]])[0]
        torch.testing.assert_close(logits, reference, atol=2e-4, rtol=1e-4)


def test_chunked_prefill_and_rollback() -> None:
    model = paged("gemma3")
    text = models.prompts((21,))[0]
    cache = PagedKVCache.for_model(model, 12, 8)
    sequence = cache.allocate()
    run(model, cache, [sequence], [text[:9]])
    run(model, cache, [sequence], [[1, 2, 3, 4, 5]])  # a rejected draft
    cache.truncate(sequence, 9)
    logits = run(model, cache, [sequence], [text[9:]])
    torch.testing.assert_close(logits, eager_logits(model, [text], [[0]])[0], atol=2e-4, rtol=1e-4)


@torch.no_grad()
def run(
    model: Any, cache: PagedKVCache, sequences: list[int], tokens: list[list[int]]
) -> torch.Tensor:
    """One forward; the logits of each sequence's newest token."""
    inputs = cache.inputs(sequences, [len(t) for t in tokens])
    inputs.token_ids.copy_(torch.tensor([[x for t in tokens for x in t]]))
    return model(**forward_arguments(inputs)).logits[0, inputs.last_rows]


def call(**changes: Any) -> torch.Tensor:
    """The attention function itself on one layer of 4 query and 2 KV heads."""
    cache = PagedKVCache.for_model(
        models.build("qwen3", layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        4,
        4,
    )
    inputs = cache.inputs([cache.allocate()], [3])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 3, 16, generator=generator) for h in (4, 2, 2))
    module = SimpleNamespace(layer_idx=0, is_causal=True)
    arguments = {"module": module, "query": q, "key": k, "value": v, "paged_kv": inputs, **changes}
    return paged_attention_forward(**arguments)[0]


def test_causality_comes_from_the_layer() -> None:
    causal = call()
    other = call(module=SimpleNamespace(layer_idx=0, is_causal=False))
    assert torch.equal(causal, call(is_causal=True))
    assert torch.equal(other, call(is_causal=False))
    # The last row sees everything either way, the first one does not.
    assert torch.equal(causal[:, -1], other[:, -1])
    assert not torch.allclose(causal[:, 0], other[:, 0])
    config = SimpleNamespace(is_causal=False)
    module = SimpleNamespace(layer_idx=0, is_causal=True, config=config)
    assert torch.equal(other, call(module=module))


def test_a_window_counts_the_query_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    _, _, v = (torch.randn(1, h, 3, 16, generator=generator) for h in (4, 2, 2))
    own_value = v.transpose(1, 2).repeat_interleave(2, 2)
    torch.testing.assert_close(call(sliding_window=1), own_value)


def test_a_window_to_both_sides_reaches_so_many_keys_either_way() -> None:
    """As transformers' bidirectional masks have it: `abs(query - key) <= sliding_window`."""
    bidirectional = SimpleNamespace(layer_idx=0, is_causal=False)
    full = call(module=bidirectional)
    assert torch.equal(call(module=bidirectional, sliding_window=2), full)
    # Of three tokens the outer ones lose each other, the middle one nobody.
    near = call(module=bidirectional, sliding_window=1)
    assert torch.equal(near[:, 1], full[:, 1])
    assert not torch.allclose(near[:, 0], full[:, 0])
    assert not torch.allclose(near[:, 2], full[:, 2])
    # The last of two visible keys: the same as causal attention with a window of two.
    torch.testing.assert_close(near[:, 2], call(sliding_window=2)[:, 2])


REACH = 5
KINDS = ((False, None), (False, REACH), (True, REACH), (True, None))
"""Causality and window of the layers of `mixed`."""


def mixed() -> Any:
    """A Qwen3 whose layers differ in causality and in window."""
    types = ["full_attention" if window is None else "sliding_attention" for _, window in KINDS]
    model = models.build(
        "qwen3", layers=4, layer_types=types, sliding_window=REACH, use_sliding_window=True
    )
    for layer, (causal, window) in zip(model.model.layers, KINDS, strict=True):
        layer.self_attn.is_causal = causal
        assert layer.self_attn.sliding_window == window
    return model


def by_layer(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kw: Any
) -> tuple[torch.Tensor, None]:
    """Dense attention with the mask that the layer asks for, by transformers' formulas."""
    at = torch.arange(query.shape[2])
    behind = at[:, None] - at
    mask = torch.ones_like(behind, dtype=torch.bool)
    window = kw["sliding_window"]
    if module.is_causal:
        mask = behind >= 0
    if window is not None:
        mask = mask & ((behind < window) if module.is_causal else (behind.abs() <= window))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=kw["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2), None


@torch.no_grad()
def test_causality_and_window_are_the_layers_own() -> None:
    """One graph with every combination: numbers of all tokens, and what each call says."""
    model = mixed()
    prompts = models.prompts((13, 9))
    AttentionInterface.register("by_layer", by_layer)
    model.set_attn_implementation("by_layer")
    want = [model(input_ids=torch.tensor([p]), use_cache=False).logits[0] for p in prompts]

    model.set_attn_implementation("fusion_paged")
    cache = PagedKVCache.for_model(model, 8, 4)
    inputs = cache.inputs([cache.allocate() for _ in prompts], [len(p) for p in prompts])
    inputs.token_ids.copy_(torch.tensor([[t for p in prompts for t in p]]))
    got = model(**forward_arguments(inputs)).logits[0]
    torch.testing.assert_close(got, torch.cat(want), atol=2e-4, rtol=1e-4)

    report = fusion.explain(model, **forward_arguments(inputs))
    sites = [s for s in report.sites if s.pass_name == "non_causal_attention"]
    calls = [s.facts["call"] for s in sites]
    named = [(c["causal"], c["window_left"], c["window_right"]) for c in calls]
    assert named == [
        ("False", "-1", "-1"),
        ("False", "5", "5"),
        ("True", "4", "-1"),
        ("True", "-1", "-1"),
    ]
    assert [(s.status, s.applicable) for s in sites] == [
        ("fused", True),
        ("fused", True),
        ("missed", False),
        ("missed", False),
    ]


def test_keys_without_queries_are_written_where_one_says() -> None:
    model = models.build("qwen3", layers=2, num_key_value_heads=2, head_dim=16)
    cache = PagedKVCache.for_model(model, 4, 4, layers=(kv_layers(model)[0], None))
    sequence = cache.allocate()
    slots = cache.append(sequence, 5)
    inputs = cache.inputs([sequence], 2)
    key, value = torch.randn(2, 1, 2, 4, 16)
    where = torch.tensor([slots[3], -1, slots[0], -1])
    module: Any = SimpleNamespace(layer_idx=0)
    views = write_kv(module, key, value, inputs, where)
    for view, rows in zip(views, (key, value), strict=True):
        flat = view.reshape(-1, 2, 16)
        expected = torch.zeros_like(flat)
        expected[slots[3]], expected[slots[0]] = rows[0, :, 0], rows[0, :, 2]
        assert torch.equal(flat, expected)
    # By default to the newest slots of the sequence.
    write_kv(module, key[:, :, :2], value[:, :, :2], inputs)
    newest = cache.allocator.slots(sequence, 5)
    assert torch.equal(views[0].reshape(-1, 2, 16)[list(newest)], key[0, :, :2].transpose(0, 1))
    with pytest.raises(PagedAttentionError, match="layer 1 attends, but the cache was built"):
        write_kv(SimpleNamespace(layer_idx=1), key, value, inputs, where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paged_kv": None}, "needs paged_kv="),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "no place for a mask tensor"),
        ({"position_bias": torch.zeros(1)}, "no place for a position_bias"),
        ({"dropout": 0.1}, "for inference"),
        ({"attention_mask": WindowMask(4)}, "passes sliding_window=None"),
        ({"attention_mask": WindowMask(4), "sliding_window": 5}, "passes sliding_window=5"),
        ({"module": SimpleNamespace(layer_idx=3)}, "layers 0 to 0"),
        ({"module": SimpleNamespace()}, "layer_idx None"),
    ],
)
def test_what_cannot_be_done_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PagedAttentionError, match=message):
        call(**changes)


def test_a_layer_without_cache_that_attends_is_named() -> None:
    model = paged("qwen3")
    full = PagedKVCache.for_model(model, 4, 4)
    cache = PagedKVCache.for_model(model, 4, 4, layers=(full.layers[0], None))
    with pytest.raises(PagedAttentionError, match="layer 1 attends, but the cache was built"):
        run(model, cache, [cache.allocate()], [[1, 2]])


def test_masks_that_would_be_lost_are_refused() -> None:
    config = models.config("qwen3", 1, sliding_window=4, use_sliding_window=True)
    config._attn_implementation = "fusion_paged"
    embeds = torch.zeros(1, 3, 8)
    arguments = {"config": config, "inputs_embeds": embeds, "attention_mask": None}
    arguments[cache_argument(create_causal_mask)] = None
    assert create_causal_mask(**arguments) is None
    with pytest.raises(PagedAttentionError, match="own mask function"):
        create_causal_mask(**arguments, or_mask_function=lambda *_: True)
    config.attention_chunk_size = 4
    with pytest.raises(PagedAttentionError, match="chunked attention"):
        create_chunked_causal_mask(**arguments)
    assert paged_mask(local_size=12, config=SimpleNamespace()) == WindowMask(12)
