"""A paged KV cache for a transformers model: its memory, and the sequences in it.

The bookkeeping of blocks is :class:`~fusion.integrations.transformers.allocator.BlockAllocator`,
the tensors that a forward reads besides the memory are in
:mod:`fusion.integrations.transformers.inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusion.integrations.transformers.allocator import BlockAllocator, OutOfBlocks
from fusion.integrations.transformers.inputs import (
    Batch,
    InputPool,
    PagedInputs,
    mark_static,
)
from fusion.integrations.transformers.layers import KVLayer, kv_layers, recurrent_cache
from fusion.layout import KVCacheLayout, empty_kv_cache, split_kv_cache


class PagedKVCache:
    """Paged key and value memory of a transformers model, with a block allocator.

    Build it with :meth:`for_model`. Sequences are numbered: `allocate`, `append`, `fork`,
    `truncate` and `free` keep the books (see :class:`BlockAllocator`), `inputs` appends tokens
    and hands out the tensors of the next forward. Raises
    :class:`~fusion.integrations.transformers.allocator.OutOfBlocks` when the pool is used up,
    and then leaves all sequences as they were.

    `recurrent` says that the model also has layers with a state of their own (LFM2's short
    convolutions). Their states belong to batch rows, not to blocks: such a model is run on left
    padded batches, always in the same rows, and its sequences cannot be forked or truncated.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer | None],
        num_blocks: int,
        block_size: int,
        *,
        layout: KVCacheLayout | str = KVCacheLayout.PACKED,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
        recurrent: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.layout = KVCacheLayout.parse(layout)
        if self.layout is KVCacheLayout.HF_STATIC:
            raise ValueError("layout HF_STATIC has no pages; use HND, which has its strides")
        self.dtype, self.device = dtype, torch.device(device)
        self.recurrent = recurrent
        self.allocator = BlockAllocator(num_blocks, block_size)
        capacity = num_blocks * block_size
        limit = capacity if max_seq_len is None else min(max_seq_len, capacity)
        # Whole blocks: `max_seq_len` bounds what kernels loop over and is the same in every step.
        self._table_width = self.allocator.blocks_for(limit)
        self.max_seq_len = limit
        self.kv = tuple(None if layer is None else self._empty(layer) for layer in self.layers)
        self.k_scale = self._scale(k_scale)
        self.v_scale = self._scale(v_scale)
        self._pool = InputPool(self._bind, self._table_width, self.device)
        self._states: dict[int, Any] = {}

    @classmethod
    def for_model(
        cls,
        model: Any,
        num_blocks: int,
        block_size: int,
        layout: KVCacheLayout | str = KVCacheLayout.PACKED,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        max_seq_len: int | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layers: Sequence[KVLayer | None] | None = None,
    ) -> PagedKVCache:
        """A zeroed cache that fits the attention layers of `model`, a transformers decoder.

        `num_blocks` blocks of `block_size` tokens are shared by all sequences; `layout` is a
        :class:`~fusion.layout.KVCacheLayout` or its name; `dtype` and `device` default to the
        model's. A dtype of fp8 stores `value / scale` with `k_scale`, `v_scale` (1 by default).
        `max_seq_len` bounds one sequence (default: the model's `max_position_embeddings`, and
        never more than the pool). `layers` overrides what is read off the model.

        Raises `ValueError` where the heads of a layer cannot be read off the model, and
        `NotImplementedError` for encoder-decoders and layers that share another's cache.
        """
        text = model.config.get_text_config(decoder=True)
        if max_seq_len is None:
            max_seq_len = getattr(text, "max_position_embeddings", None)
        found = kv_layers(model) if layers is None else tuple(layers)
        return cls(
            found,
            num_blocks,
            block_size,
            layout=layout,
            dtype=model.dtype if dtype is None else dtype,
            device=model.device if device is None else device,
            max_seq_len=max_seq_len,
            recurrent=recurrent_cache(model, found) is not None,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    # Sequences

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.allocator.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.allocator.block_size

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence uses."""
        return self.allocator.free_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of key and value memory in all layers."""
        return sum(t.numel() * t.element_size() for kv in self.kv for t in _tensors(kv))

    def allocate(self, tokens: int = 0) -> int:
        """Start a sequence with room for `tokens` tokens that somebody else writes; its id."""
        self._check_length(tokens)
        return self.allocator.allocate(tokens)

    def append(self, sequence: int, tokens: int = 1) -> tuple[int, ...]:
        """Make `sequence` longer and return the slots of the new tokens.

        Blocks that a fork still shares are copied first, in every layer.
        """
        self._check_length(self.allocator.length(sequence) + tokens)
        done = self.allocator.append(sequence, tokens)
        self._copy(done.copies)
        return done.slots

    def fork(self, sequence: int) -> int:
        """A second sequence that goes on from the same tokens; blocks are shared until written.

        Raises `NotImplementedError` for models with recurrent layers.
        """
        self._check_not_recurrent("forked")
        return self.allocator.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on. Raises as :meth:`fork` does."""
        self._check_not_recurrent("truncated")
        self.allocator.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        """End `sequence` and give its blocks back. Their contents stay until overwritten."""
        self.allocator.free(sequence)

    # Forwards

    def inputs(
        self,
        sequences: Sequence[int | None],
        new_tokens: Sequence[int] | int = 1,
        *,
        padded: bool = False,
        max_query_len: int | Literal["auto"] | None = "auto",
    ) -> PagedInputs:
        """Append `new_tokens` (one number, or one for each) to `sequences`; the next forward.

        The tokens are one packed row `[1, T]`, sequence after sequence. With `padded` they are
        `[B, S]`, S the largest number of new tokens, filled up on the *left*: the padding
        writes nothing and its positions are zero. A sequence None is a row that is over: it
        takes part with its new tokens, so that the shapes stay as they were, but they write
        nothing and attend to nothing (zeros come out).

        Where every sequence gets the same shape as before, the same tensors are updated in
        place and returned again: use them before the next call. `max_query_len` bounds the new
        tokens of a sequence for kernels; None leaves them the bound S or T, which is in the
        shapes, and "auto" is 1 where every sequence gets one token, else None.

        Raises `ValueError` for a sequence named twice or longer than `max_seq_len`, and
        `OutOfBlocks` before anything was appended.
        """
        counts = [new_tokens] * len(sequences) if isinstance(new_tokens, int) else [*new_tokens]
        living = [s for s in sequences if s is not None]
        if len(set(living)) != len(living):
            raise ValueError(f"a sequence is named twice in {list(sequences)}")
        self._check_room(sequences, counts)
        width = max(counts, default=0)
        batch = Batch(padded, (len(counts), width) if padded else (1, sum(counts)))
        for sequence, count in zip(sequences, counts, strict=True):
            pad = width - count if padded else 0
            if sequence is None:
                batch.add(pad, [-1] * count, 0, 0, ())
                continue
            before = self.allocator.length(sequence)
            slots = self.append(sequence, count)
            batch.add(pad, slots, before, before + count, self.allocator.blocks(sequence))
        bound = max_query_len
        if bound == "auto":
            bound = 1 if width == 1 and not padded else None
        return self._pool.fill(batch, bound)

    def state(self, model: Any, rows: int) -> tuple[Any, bool]:
        """The transformers cache with the states of the recurrent layers for `rows` rows, and
        whether it is new; (None, False) where the model has none. Kept by number of rows."""
        if not self.recurrent:
            return None, False
        fresh = rows not in self._states
        if fresh:
            self._states[rows] = recurrent_cache(model, self.layers)
        return self._states[rows], fresh

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value of `layer` as the operations take them
        (:func:`fusion.layout.split_kv_cache`). `KeyError` for a layer without cache."""
        spec, kv = self.layers[layer], self.kv[layer]
        if spec is None or kv is None:
            raise KeyError(f"layer {layer} has no KV cache")
        return split_kv_cache(kv, self.layout, spec.head_dim, spec.head_dim_v)

    # Memory

    def _empty(self, layer: KVLayer) -> Tensor | tuple[Tensor, Tensor]:
        kv = empty_kv_cache(
            self.layout,
            self.num_blocks,
            self.block_size,
            layer.heads,
            layer.head_dim,
            layer.head_dim_v,
            self.dtype,
            self.device,
        )
        for tensor in _tensors(kv):
            # Zeros, so that slots which were never written cannot hold a NaN.
            tensor.view(torch.uint8).zero_()
            mark_static(tensor)
        return kv

    def _scale(self, scale: float | None) -> Tensor | None:
        if scale is None:
            return None
        tensor = torch.tensor(scale, dtype=torch.float32, device=self.device)
        mark_static(tensor)
        return tensor

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            for kv in self.kv:
                for tensor in _tensors(kv):
                    # Every layout but this one has the blocks first.
                    axis = 1 if self.layout is KVCacheLayout.KV_FIRST else 0
                    tensor.select(axis, destination).copy_(tensor.select(axis, source))

    def _bind(self, tensors: dict[str, Tensor]) -> PagedInputs:
        return PagedInputs(
            self.kv,
            self.layout,
            **tensors,
            max_query_len=None,
            max_seq_len=self.max_seq_len,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    # Checks

    def _check_room(self, sequences: Sequence[int | None], counts: Sequence[int]) -> None:
        for named, count in zip(sequences, counts, strict=True):
            if count < 1:
                raise ValueError(f"sequence {named} gets {count} new tokens, it must be >= 1")
        requests = [(s, n) for s, n in zip(sequences, counts, strict=True) if s is not None]
        for sequence, count in requests:
            self._check_length(self.allocator.length(sequence) + count)
        need = self.allocator.cost(requests)
        if need > self.free_blocks:
            what = f"a forward with {sum(counts)} new tokens of {len(counts)} sequences"
            raise OutOfBlocks(need, self.free_blocks, self.num_blocks, what)

    def check_fits(self, lengths: Sequence[int]) -> None:
        """Raises unless new sequences of these lengths fit at once: `ValueError` for one longer
        than `max_seq_len`, `OutOfBlocks` where the free blocks do not suffice."""
        for length in lengths:
            self._check_length(length)
        need = sum(self.allocator.blocks_for(length) for length in lengths)
        if need > self.free_blocks:
            what = f"{len(lengths)} sequences of up to {max(lengths)} tokens"
            raise OutOfBlocks(need, self.free_blocks, self.num_blocks, what)

    def _check_length(self, length: int) -> None:
        if length > self.max_seq_len:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_seq_len={self.max_seq_len} "
                "of this cache"
            )

    def _check_not_recurrent(self, what: str) -> None:
        if self.recurrent:
            raise NotImplementedError(
                f"sequences of a model with recurrent layers cannot be {what}: their states "
                "belong to batch rows, not to blocks"
            )


def _tensors(kv: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    if kv is None:
        return ()
    return (kv,) if isinstance(kv, Tensor) else kv
