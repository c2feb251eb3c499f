"""Causal paged attention (Triton in the real library)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter._strict import FP8, STATE, behind, fault


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    q_scales=None,
    alibi_slopes=None,
    output_scale=None,
    qq_bias=None,
    sinks=None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
):
    STATE.calls.append(("unified", (), dict(locals())))
    assert causal, "Only causal attention is supported"
    tokens, heads, dim = q.shape
    assert k.dtype in (torch.float16, torch.bfloat16, STATE.fp8), "KV dtype"
    assert v.shape == k.shape and k.shape[3] == dim, "one head size"
    assert sinks is None or sinks.shape[0] == heads, "sinks"
    assert q.stride(2) == 1, "last stride of q"
    assert block_table.stride(1) == 1 or block_table.shape[1] == 1, "columns of the table"
    for name, t in (("lengths", seqused_k), ("starts", cu_seqlens_q), ("table", block_table)):
        assert t.dtype == torch.int32, f"{name} are int32"
    assert seqused_k.is_contiguous() and cu_seqlens_q.is_contiguous()
    blocks, page, kv_heads, _ = k.shape
    decode = int(max_seqlen_q) == 1
    window = 1 + window_size[0]
    two_d = window > 0 or max_seqlen_k <= 512
    tile = min(64, page) if decode or not two_d else 32 if dim >= 256 else 64
    masked = tile != page
    group = heads // kv_heads
    if k_descale is None or v_descale is None:
        k_descale = v_descale = None  # one alone is ignored
    for b in range(seqused_k.shape[0]):
        length = int(seqused_k[b])
        begin, end = (b, b + 1) if decode else (int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        fault(end <= tokens, "rows behind the query")
        for row in range(begin, end):
            position = length - (end - begin) + row - begin
            last = min(position + 1, length)
            first_tile = max(0, position - window + 1) // tile if window > 0 else 0
            keys = torch.arange(first_tile * tile, -(-last // tile) * tile)
            if last <= 0:
                out[row] = 0
                continue
            columns = keys // page
            over = int(columns.max()) - block_table.shape[1] + 1
            if over > 0:
                fault(b + 1 < block_table.shape[0] or behind(block_table) >= over, "table")
            entry = block_table[b, columns.clamp(max=block_table.shape[1] - 1)].long()
            loaded = keys < last if masked else torch.ones_like(keys, dtype=torch.bool)
            fault(bool(((entry >= 0) & (entry < blocks))[loaded].all()), "page")
            slot = torch.where(loaded, entry, 0)
            kk, vv = (_load(c, slot, keys % page, loaded, q.dtype) for c in (k, v))
            kk, vv = (x.repeat_interleave(group, 1).float() for x in (kk, vv))
            s = torch.einsum("hd,khd->hk", q[row].float(), kk) * softmax_scale
            if k_descale is not None:
                s = s * k_descale.reshape(-1)[0]
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            seen = keys <= position
            if window > 0:
                seen = seen & (position - keys < window)
            s = torch.where(seen, s, float("-inf"))
            top = s.amax(-1, keepdim=True)
            if sinks is not None:
                top = torch.maximum(top, sinks.float()[:, None])
            p = torch.exp(s - top)
            total = p.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(sinks.float()[:, None] - top)
            acc = torch.einsum("hk,khd->hd", p.to(q.dtype).float(), vv) / total
            if v_descale is not None:
                acc = acc * v_descale.reshape(-1)[0]
            out[row] = acc.to(out.dtype)
    return out


def _load(cache: Tensor, slot: Tensor, at: Tensor, loaded: Tensor, dtype: torch.dtype) -> Tensor:
    bits = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    rows = bits[slot, at].view(cache.dtype).to(dtype)
    return torch.where(loaded[:, None, None], rows, torch.zeros((), dtype=dtype))
