"""Paged attention, causal or not, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.backends.reference.cache import gather


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
) -> Tensor:
    """Attention of ragged queries over a paged cache. See :func:`fusion.ops.paged_attention`.

    Sequences are padded to ``max_query_len`` rows and ``max_seq_len`` keys, scores and sums are
    float32 (float64 for float64 queries). Rows past ``max_query_len`` of their sequence yield
    zeros and keys past ``max_seq_len`` are not seen: both are host numbers that bound the work.
    """
    tokens, q_heads = query.shape[0], query.shape[1]
    shuffled = kv_layout == "SHUFFLE"
    blocks = key_cache.shape[0]
    block_size = key_cache.shape[3] if shuffled else key_cache.shape[1]
    kv_heads = key_cache.shape[1] if shuffled else key_cache.shape[2]
    dim_v = value_cache.shape[3]
    batch = seq_lens.shape[0]
    group = q_heads // kv_heads
    keys = min(max_seq_len, block_table.shape[1] * block_size)
    if 0 in (tokens, batch, blocks, keys, max_query_len, q_heads):
        return query.new_zeros(tokens, q_heads, dim_v)
    device = query.device
    work = torch.float64 if query.dtype == torch.float64 else torch.float32

    start = query_start_loc.to(torch.int64)
    seq_len = seq_lens.to(torch.int64)
    q_len = start[1:] - start[:-1]
    row = torch.arange(max_query_len, device=device)
    j = torch.arange(keys, device=device)

    # Which key each row sees: [batch, rows, keys].
    q_pos = (row + (seq_len - q_len)[:, None])[:, :, None]
    visible = (j < seq_len[:, None])[:, None, :] & (row < q_len[:, None])[:, :, None]
    if causal:
        visible = visible & (j <= q_pos)
    if window_left >= 0:
        visible = visible & (j >= q_pos - window_left)
    if window_right >= 0:
        visible = visible & (j <= q_pos + window_right)

    # Only pages with a key that some row sees are followed: the others may be freed (entries out
    # of range) or hold anything. They are replaced by slot 0 and zeroed after the read.
    needed = visible.any(1)
    page = block_table.to(torch.int64)[:, j // block_size]
    slot = torch.where(needed, page * block_size + j % block_size, 0)
    k = gather(key_cache, slot, kv_layout, which="key", dtype=work, scale=k_scale)
    v = gather(value_cache, slot, kv_layout, which="value", dtype=work, scale=v_scale)
    k = torch.where(needed[:, :, None, None], k, 0.0).permute(0, 2, 3, 1)  # [b, Hk, D, keys]
    v = torch.where(needed[:, :, None, None], v, 0.0).permute(0, 2, 1, 3)  # [b, Hk, keys, Dv]

    # Query rows of one KV head side by side: [b, Hk, group * rows, D].
    at = (start[:-1, None] + row).clamp(0, tokens - 1)
    q = query[at].to(work).reshape(batch, max_query_len, kv_heads, group, -1)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = torch.matmul(q, k) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible[:, None].expand(batch, group, max_query_len, keys).flatten(1, 2)[:, None]
    scores = scores.masked_fill(~mask, float("-inf"))

    # Softmax by hand: a row that sees nothing gives zeros, a sink adds to the denominator only.
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(work).reshape(1, kv_heads, group, 1, 1)
        sink = sink.expand(1, kv_heads, group, max_query_len, 1).flatten(2, 3)
        top = torch.maximum(top, sink)
    top = torch.where(torch.isinf(top) & (top < 0), 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weight = weight / torch.where(total == 0, 1.0, total)
    out = _weighted_sum(weight, v, mask)

    # Back to the ragged rows: [T, Hq, Dv]; rows of no sequence yield zeros.
    out = out.reshape(batch, kv_heads, group, max_query_len, dim_v)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    t = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(start[1:].contiguous(), t, right=True).clamp(max=batch - 1)
    index = t - start[sequence]
    inside = (t >= start[0]) & (t < start[-1]) & (index < max_query_len)
    rows = out[sequence, index.clamp(0, max_query_len - 1)]
    return torch.where(inside[:, None, None], rows, 0.0).to(query.dtype)


def _weighted_sum(weight: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``weight @ v`` in which a value that a row does not see cannot reach it.

    ``0 * nan`` is nan, so a plain product would carry an infinite or undefined value that one row
    sees into every other row of the sequence.

    Args:
        weight: ``[b, Hk, rows, keys]``, zero where the mask is False.
        v: ``[b, Hk, keys, Dv]``.
        mask: ``[b, 1, rows, keys]`` bool.
    """
    if v.device.type == "cpu" and bool(torch.isfinite(v).all()):  # no device to wait for
        return torch.matmul(weight, v)
    out = torch.matmul(weight, torch.where(torch.isfinite(v), v, 0.0))
    seen = mask.to(weight.dtype)
    plus = torch.matmul(weight, (v == float("inf")).to(weight.dtype)) > 0
    minus = torch.matmul(weight, (v == float("-inf")).to(weight.dtype)) > 0
    nan = torch.matmul(seen, torch.isnan(v).to(weight.dtype)) > 0
    out = torch.where(plus, float("inf"), out)
    out = torch.where(minus, float("-inf"), out)
    return torch.where(nan | (plus & minus), float("nan"), out)
