"""Operands in the form that AITER's kernels take: packed qkv, a table, positions, slots.

Everything here is a view where the arguments already have the form; otherwise a small device
operation. Nothing reads a value on the host, so all of it can be captured into a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[T, (Hq + Hk + Hv) * D]``, contiguous, in the order q, k, v.

    A view where the three are the columns of one such tensor (what the gate asks for); a copy where
    a compiler moved them apart after the gate looked.
    """
    tokens, heads, dim = query.shape
    width = (heads + key.shape[1] + value.shape[1]) * dim
    at = query.data_ptr()
    item = query.element_size()
    parts = (query, key, value)
    adjacent = all(p.dtype == query.dtype and _row_major(p, width) for p in parts)
    for part in parts:
        adjacent = adjacent and part.data_ptr() == at
        at += part.shape[1] * dim * item
    if adjacent and tokens > 0:
        return query.as_strided((tokens, width), (width, 1))
    return torch.cat([p.reshape(tokens, -1) for p in parts], dim=1)


def _row_major(x: Tensor, width: int) -> bool:
    """Whether ``[T, H, D]`` is a run of columns of a contiguous ``[T, width]``."""
    want = (width, x.shape[2], 1)
    return all(
        n == 1 or have == need for n, have, need in zip(x.shape, x.stride(), want, strict=True)
    )


def joined_table(
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    dtype: torch.dtype,
    slack: int = 0,
) -> tuple[Tensor, Tensor]:
    """One contiguous table ``[rows, R]``, cos half then sin half, and int64 positions ``[T]``.

    ``cos`` and ``sin`` are ``[rows, R/2]``, per token or (with ``positions``) tables. Where they
    are the two halves of one table of the right dtype that table is used as it is, so a caller that
    builds ``cat((cos, sin))`` once a step shares it with all layers. Otherwise the rows of the
    present tokens are joined, and token t looks up row t.

    ``slack``: elements behind the last row that the kernel may read (their values do not matter).

    Positions are clamped into the table: those of padding rows may be anything.
    """
    rows, half = cos.shape
    width = 2 * half
    own = (
        cos.dtype == sin.dtype == dtype
        and rows > 0
        and sin.shape == cos.shape
        and (rows == 1 or cos.stride(0) == sin.stride(0) == width)
        and (half == 1 or cos.stride(1) == sin.stride(1) == 1)
        and sin.data_ptr() == cos.data_ptr() + half * cos.element_size()
        and _elements_behind(cos, rows * width) >= slack
    )
    if own:
        table = cos.as_strided((rows, width), (width, 1))
        if positions is None:
            return table, torch.arange(rows, device=cos.device)
        return table, positions.to(torch.int64).clamp(0, rows - 1)
    table = joined_rows(cos, sin, positions, dtype, slack)
    return table, torch.arange(table.shape[0], device=cos.device)


def joined_rows(
    cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype, slack: int
) -> Tensor:
    """``[T, R]``, new and contiguous: the rows of the present tokens, cos half then sin half."""
    if positions is not None:
        at = positions.clamp(0, max(cos.shape[0] - 1, 0))
        cos, sin = cos[at], sin[at]
    tokens, half = cos.shape
    flat = cos.new_empty(tokens * 2 * half + slack, dtype=dtype)
    table = flat[: tokens * 2 * half].view(tokens, 2 * half)
    table[:, :half].copy_(cos)
    table[:, half:].copy_(sin)
    return table


def _elements_behind(x: Tensor, used: int) -> int:
    """Elements of the storage from ``x`` on, beyond the first ``used``."""
    return int(x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - used)


def token_slots(slot_mapping: Tensor, tokens: int) -> Tensor:
    """``[tokens]`` int64, contiguous; rows that have no slot get -1, which writes nothing."""
    slots = slot_mapping.to(torch.int64)
    missing = tokens - slots.shape[0]
    if missing > 0:
        slots = torch.nn.functional.pad(slots, (0, missing), value=-1)
    return slots.contiguous()


def live_pages(
    block_table: Tensor, seq_lens: Tensor, query_lens: Tensor, window_left: int, page: int
) -> tuple[Tensor, Tensor]:
    """Table and lengths without the pages that lie wholly left of every row's window.

    Such pages may be freed, with any number in the table, and AITER reads pages that a window
    masks. Attention knows positions only relative to the end of a sequence, so leaving out whole
    pages at its start changes nothing else.

    Args:
        block_table: ``[B, n]`` integers, n >= 1. seq_lens, query_lens: ``[B]``.

    Returns:
        ``[B, n]``, each row moved left, and ``[B]`` in the dtype of ``seq_lens``.
    """
    first = (seq_lens.to(torch.int64) - query_lens - window_left).clamp(min=0) // page
    column = torch.arange(block_table.shape[1], device=block_table.device)
    at = (column[None, :] + first[:, None]).clamp(max=block_table.shape[1] - 1)
    return block_table.gather(1, at), seq_lens - (first * page).to(seq_lens.dtype)


def readable_table(block_table: Tensor, multiple: int) -> Tensor:
    """An int32 table with unit column stride whose rows may be read up to a multiple of columns.

    A kernel whose tile spans several pages reads table entries behind the last column of the last
    row. They must be memory; what they hold does not matter.
    """
    table = block_table.to(torch.int32)
    if table.stride(1) != 1 and table.shape[1] > 1:
        table = table.contiguous()
    rows, columns = table.shape
    over = -columns % multiple
    if over and _elements_behind(table, (rows - 1) * table.stride(0) + columns) < over:
        table = torch.nn.functional.pad(table, (0, over))[:, :columns]
    return table
