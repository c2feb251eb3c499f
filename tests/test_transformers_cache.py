"""The paged cache's memory and the tensors of a forward."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from fusion.integrations.transformers import KVLayer, OutOfBlocks, PagedKVCache, kv_layers
from fusion.integrations.transformers.inputs import KEPT_SHAPES
from fusion.layout import KVCacheLayout
from tests import models

LAYERS = (KVLayer(4, 16, 16), None, KVLayer(2, 32, 32))
PAGED_LAYOUTS = [m for m in KVCacheLayout if m is not KVCacheLayout.HF_STATIC]


def make(layout: str = "packed", num_blocks: int = 6, block_size: int = 4, **more: object):
    options = {"dtype": torch.float32, **more}
    return PagedKVCache(LAYERS, num_blocks, block_size, layout=layout, **options)


@pytest.mark.parametrize("name", models.NAMES)
def test_heads_are_read_off_the_model(name: str) -> None:
    model = models.build(name, layers=2)
    found = kv_layers(model)
    config = model.config
    dim = getattr(config, "head_dim", None) or models.HIDDEN // models.HQ
    heads = models.HQ if name == "gptj" else models.HK
    expected = [KVLayer(heads, dim, dim)] * 2
    if name == "lfm2":
        expected[0] = None  # a short convolution
    assert list(found) == expected


def test_layers_may_differ_and_be_absent() -> None:
    cache = make()
    key, value = cache.views(0)
    assert key.shape == value.shape == (6, 4, 4, 16)
    assert cache.views(2)[0].shape == (6, 4, 2, 32)
    with pytest.raises(KeyError, match="layer 1 has no KV cache"):
        cache.views(1)
    assert cache.nbytes == 2 * (6 * 4 * 4 * 16 + 6 * 4 * 2 * 32) * 4


@pytest.mark.parametrize("layout", PAGED_LAYOUTS, ids=lambda m: m.name)
def test_a_written_fork_gets_its_own_copy_in_every_layer(layout: KVCacheLayout) -> None:
    cache = make(layout.name)
    for kv in cache.kv:
        for tensor in () if kv is None else (kv,) if isinstance(kv, torch.Tensor) else kv:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    parent = cache.allocate(6)
    child = cache.fork(parent)
    old = cache.allocator.blocks(parent)[1]
    cache.append(child)
    new = cache.allocator.blocks(child)[1]
    assert new != old
    for layer in (0, 2):
        for view in cache.views(layer):  # blocks are the first dimension of every view
            assert torch.equal(view[new], view[old])
            others = [b for b in range(6) if b != new]
            assert len({float(view[b].flatten()[0]) for b in others}) == len(others)


def test_unwritten_memory_is_zero_also_in_fp8() -> None:
    cache = make(dtype=torch.float8_e4m3fn, k_scale=0.5)
    assert all(not view.float().any() for layer in (0, 2) for view in cache.views(layer))
    assert cache.k_scale is not None
    assert cache.k_scale.item() == 0.5
    assert cache.v_scale is None


def test_inputs_of_packed_ragged_prompts() -> None:
    cache = make()
    a, b = cache.allocate(), cache.allocate()
    inputs = cache.inputs([a, b], [5, 2])
    assert inputs.slot_mapping.tolist() == [*cache.allocator.slots(a), *cache.allocator.slots(b)]
    assert inputs.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert inputs.query_start_loc.tolist() == [0, 5, 7]
    assert inputs.seq_lens.tolist() == [5, 2]
    assert inputs.last_rows.tolist() == [4, 6]
    assert inputs.block_table[0, :2].tolist() == list(cache.allocator.blocks(a))
    assert inputs.max_query_len is None
    dtypes = [inputs.slot_mapping.dtype, inputs.block_table.dtype, inputs.query_start_loc.dtype]
    assert dtypes == [torch.int64, torch.int32, torch.int32]


def test_inputs_of_left_padded_prompts_write_only_the_prompt() -> None:
    cache = make()
    a, b = cache.allocate(), cache.allocate()
    inputs = cache.inputs([a, b], [1, 3], padded=True)
    assert inputs.positions.tolist() == [[0, 0, 0], [0, 1, 2]]
    slots = inputs.slot_mapping.tolist()
    assert slots[:2] == [-1, -1]
    assert slots[2:] == [*cache.allocator.slots(a), *cache.allocator.slots(b)]
    # The padding belongs to the sequence, so that its positions before the start see no key.
    assert inputs.query_start_loc.tolist() == [0, 3, 6]
    assert inputs.seq_lens.tolist() == [1, 3]


def test_decode_updates_the_same_tensors_in_place() -> None:
    cache = make()
    a, b = cache.allocate(3), cache.allocate(4)
    first = cache.inputs([a, b])
    names = [n for n, v in vars(first).items() if isinstance(v, torch.Tensor)]
    addresses = [getattr(first, name).data_ptr() for name in names]
    slots = first.slot_mapping.tolist()
    second = cache.inputs([a, b])
    assert second is first
    assert [getattr(second, name).data_ptr() for name in names] == addresses
    assert second.slot_mapping.tolist() != slots
    assert second.positions.tolist() == [[4, 5]]
    assert second.seq_lens.tolist() == [5, 6]
    assert second.max_query_len == 1


def test_a_row_that_is_over_writes_and_sees_nothing() -> None:
    cache = make()
    a = cache.allocate(2)
    inputs = cache.inputs([None, a])
    assert inputs.slot_mapping.tolist() == [-1, cache.allocator.slots(a)[2]]
    assert inputs.seq_lens.tolist() == [0, 3]
    assert inputs.query_start_loc.tolist() == [0, 1, 2]


def test_a_row_that_is_over_keeps_its_share_of_the_tokens() -> None:
    """The shapes of a speculative step do not depend on which rows are over."""
    cache = make()
    a = cache.allocate(2)
    both = cache.inputs([cache.allocate(), a], 3)
    slots = both.slot_mapping
    inputs = cache.inputs([None, a], [3, 3])
    assert inputs.slot_mapping is slots
    assert inputs.slot_mapping.tolist() == [-1, -1, -1, *cache.allocator.slots(a, 5)]
    assert inputs.seq_lens.tolist() == [0, 8]
    assert inputs.query_start_loc.tolist() == [0, 3, 6]
    assert inputs.last_rows.tolist() == [2, 5]
    with pytest.raises(ValueError, match="sequence None gets 0 new tokens"):
        cache.inputs([None, a], [0, 1])


def test_out_of_blocks_comes_before_anything_was_appended() -> None:
    cache = make(num_blocks=3)
    a, b = cache.allocate(4), cache.allocate(4)
    with pytest.raises(OutOfBlocks, match="needs 2 more, 1 of 3 are free"):
        cache.inputs([a, b])
    assert [cache.allocator.length(s) for s in (a, b)] == [4, 4]
    assert cache.free_blocks == 1
    cache.inputs([a])


def test_two_forks_that_write_each_need_a_copy() -> None:
    cache = make(num_blocks=2)
    parent = cache.allocate(2)
    child = cache.fork(parent)
    # One of the two keeps the old block: one copy, one block.
    cache.inputs([parent, child])
    assert cache.free_blocks == 0
    assert cache.allocator.blocks(parent) != cache.allocator.blocks(child)


def test_wrong_calls_are_named() -> None:
    cache = make(max_seq_len=10)
    a = cache.allocate(3)
    with pytest.raises(ValueError, match="named twice"):
        cache.inputs([a, a])
    with pytest.raises(ValueError, match="longer than max_seq_len=10"):
        cache.inputs([a], [8])
    with pytest.raises(ValueError, match="gets 0 new tokens"):
        cache.inputs([a], [0])
    with pytest.raises(ValueError, match="HF_STATIC has no pages"):
        make("hf_static")
    with pytest.raises(ValueError, match="is not a KV-cache layout"):
        make("sideways")
    assert cache.allocator.length(a) == 3


def test_recurrent_states_are_not_forked() -> None:
    model = models.build("lfm2", layers=2)
    cache = PagedKVCache.for_model(model, 4, 4)
    assert cache.recurrent
    sequence = cache.allocate(3)
    for action in (cache.fork, lambda s: cache.truncate(s, 1)):
        with pytest.raises(NotImplementedError, match="belong to batch rows"):
            action(sequence)


def test_a_cache_can_be_made_for_a_model_without_weights() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config("gemma3", 3), dtype=torch.bfloat16)
    cache = PagedKVCache.for_model(model, 8, 16)
    assert cache.device.type == "meta"
    assert cache.dtype is torch.bfloat16
    inputs = cache.inputs([cache.allocate()], [7])
    assert inputs.slot_mapping.shape == (7,)


def test_models_that_cannot_be_paged_say_so() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        kv_layers(T5ForConditionalGeneration(tiny))
    model = models.build("llama", layers=1)
    del model.model.layers[0].self_attn.k_proj
    with pytest.raises(ValueError, match="no attention layer"):
        kv_layers(model)


def test_tables_follow_sequences_through_reused_tensors() -> None:
    cache = make(num_blocks=12)
    sequences = [cache.allocate(3) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(9):
        order = torch.randperm(3, generator=generator).tolist()
        rows = [sequences[i] for i in order]
        inputs = cache.inputs(rows)
        for row, sequence in enumerate(rows):
            blocks = cache.allocator.blocks(sequence)
            assert inputs.block_table[row, : len(blocks)].tolist() == list(blocks)
        if cache.allocator.length(sequences[0]) > 8:
            cache.free(sequences[0])
            sequences[0] = cache.allocate(2)


def test_only_a_few_shapes_keep_their_tensors() -> None:
    cache = make(num_blocks=40)
    sequence = cache.allocate()
    kept = cache.inputs([sequence])
    for tokens in range(2, 12):
        cache.inputs([sequence], [tokens])
        assert cache.inputs([sequence]) is kept
    assert len(cache._pool) == KEPT_SHAPES
