"""The tensors of one forward: which slots are written, which blocks and lengths are read.

They keep their addresses from step to step and are updated in place, so that a compiled decode
step is neither recompiled nor re-captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion.layout import KVCacheLayout

# How many (batch, tokens) shapes keep their own tensors. Decode uses one for each batch size.
KEPT_SHAPES = 8

_Key = tuple[int, int, bool, int]


@dataclass
class PagedInputs:
    """What every attention layer reads in one forward: pass it to the model as `paged_kv=`.

    For B sequences with T new tokens together: `slot_mapping [T]` int64 (-1 writes nothing),
    `block_table [B, M]` int32, `seq_lens [B]` int32 with the new tokens counted,
    `query_start_loc [B+1]` int32. `kv` holds one tensor or one (key, value) pair for each layer,
    None for layers without KV cache. `max_query_len` is None where only the shapes bound it.
    `k_scale`, `v_scale` are 0-dim f32 tensors for quantised caches, else None.

    `positions [1, T]` int64 (`[B, S]` when padded) is meant for the model's `position_ids`, and
    `token_ids` of the same shape is room for its `input_ids`, which the caller fills.
    `last_rows [B]` int64 is the row of each sequence's newest token.
    """

    kv: tuple[Tensor | tuple[Tensor, Tensor] | None, ...]
    layout: KVCacheLayout
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    positions: Tensor
    token_ids: Tensor
    last_rows: Tensor
    max_query_len: int | None
    max_seq_len: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass
class Batch:
    """The same on the host, being put together: `token_shape` is `(1, T)` or `(B, S)`."""

    padded: bool
    token_shape: tuple[int, int]
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    lengths: list[int] = field(default_factory=list)
    tables: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self, pad: int, slots: Sequence[int], start: int, length: int, blocks: tuple[int, ...]
    ) -> None:
        """One more sequence: `pad` tokens of padding, then new tokens from position `start`."""
        self.slots += [*[-1] * pad, *slots]
        self.positions += [*[0] * pad, *range(start, start + len(slots))]
        self.starts.append(self.starts[-1] + pad + len(slots))
        self.lengths.append(length)
        self.tables.append(blocks)


class InputPool:
    """Keeps the tensors of the last few shapes and writes batches into them.

    `bind` makes a :class:`PagedInputs` of the tensors by name; `width` is the number of blocks of
    the longest sequence.
    """

    def __init__(
        self, bind: Callable[[dict[str, Tensor]], PagedInputs], width: int, device: torch.device
    ) -> None:
        self._bind, self._width, self._device = bind, width, device
        # With the blocks that each row of the block table holds.
        self._kept: OrderedDict[_Key, tuple[PagedInputs, list[tuple[int, ...]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def fill(self, batch: Batch, max_query_len: int | None) -> PagedInputs:
        """The tensors of this batch's shape, holding `batch`."""
        size, tokens = len(batch.lengths), len(batch.slots)
        key = (size, tokens, batch.padded, -1 if max_query_len is None else max_query_len)
        found = self._kept.pop(key, None) or (self._new(batch.token_shape, size), [()] * size)
        self._kept[key] = found
        while len(self._kept) > KEPT_SHAPES:
            self._kept.popitem(last=False)
        inputs, written = found
        inputs.max_query_len = max_query_len
        _fill(inputs.slot_mapping, batch.slots)
        _fill(inputs.positions, batch.positions)
        _fill(inputs.seq_lens, batch.lengths)
        _fill(inputs.query_start_loc, batch.starts)
        _fill(inputs.last_rows, [stop - 1 for stop in batch.starts[1:]])
        for row, blocks in enumerate(batch.tables):
            # Most steps begin no block. What stands right of a row's blocks is never read.
            if written[row] != blocks:
                _fill(inputs.block_table[row, : len(blocks)], blocks)
                written[row] = blocks
        return inputs

    def _new(self, token_shape: tuple[int, int], size: int) -> PagedInputs:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "slot_mapping": ((token_shape[0] * token_shape[1],), torch.int64),
            "block_table": ((size, self._width), torch.int32),
            "seq_lens": ((size,), torch.int32),
            "query_start_loc": ((size + 1,), torch.int32),
            "positions": (token_shape, torch.int64),
            "token_ids": (token_shape, torch.int64),
            "last_rows": ((size,), torch.int64),
        }
        made = {
            name: torch.zeros(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in shapes.items()
        }
        for tensor in made.values():
            _static_address(tensor)
        return self._bind(made)


def _fill(target: Tensor, values: Sequence[int]) -> None:
    target.copy_(torch.tensor(values, dtype=target.dtype).view(target.shape))


def mark_static(tensor: Tensor) -> None:
    """Tell the compiler that neither the address nor any size of `tensor` changes."""
    # Also under dynamic=True no size of the cache is a dynamic dimension.
    torch._dynamo.mark_static(tensor)
    _static_address(tensor)


def _static_address(tensor: Tensor) -> None:
    # CUDA graphs then read and write the tensor where it is instead of copying it in and out.
    # Without a guard: another cache of the same shapes runs the same compiled code. Both calls are
    # in torch's documentation in spite of their module's name; run on torch 2.13.
    torch._dynamo.mark_static_address(tensor, guard=False)
