"""Non-causal (or causal) attention over a paged cache (Triton in the real library)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter._strict import FP8, STATE, fault


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
) -> Tensor:
    STATE.calls.append(("flash", (), dict(locals())))
    if softcap != 0.0 or num_splits not in (0, 1) or cu_seqlens_q is not None:
        raise NotImplementedError
    fp8 = [x.dtype in FP8 for x in (q, k_cache, v_cache)]
    if any(fp8) and not all(fp8):
        raise ValueError("all of q, k and v are fp8, or none")
    assert not any(fp8), "the stand-in has no fp8 attention"
    assert page_table is not None and isinstance(cache_seqlens, Tensor)
    assert q.dim() == 4 and q.shape[0] == page_table.shape[0] == cache_seqlens.shape[0]
    assert q.shape[3] == k_cache.shape[3] == v_cache.shape[3], "one head size"
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert STATE.at_least("0.1.16"), "before 0.1.16 the block stride is taken for dense"
    batch, rows, heads, dim = q.shape
    blocks, page, kv_heads, _ = k_cache.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    scaled = (q * (scale * 1.44269504)).to(q.dtype)
    left, right = window_size
    for b in range(batch):
        length = int(cache_seqlens[b])
        if length == 0:
            continue
        keys = torch.arange(length)
        entry = page_table[b, keys // page].long()  # every page up to the length is loaded
        fault(bool(((entry >= 0) & (entry < blocks)).all()), "page")
        kk, vv = (
            c[entry, keys % page].repeat_interleave(heads // kv_heads, 1).float()
            for c in (k_cache, v_cache)
        )
        at = torch.arange(rows)[:, None] + length - rows
        seen = torch.ones(rows, length, dtype=torch.bool)
        if causal:
            seen &= keys <= at
        if left >= 0:
            seen &= keys >= at - left
        if right >= 0:
            seen &= keys <= at + right
        s = torch.einsum("rhd,khd->hrk", scaled[b].float(), kk)
        s = s.masked_fill(~seen, float("-inf"))
        top = s.amax(-1, keepdim=True)
        p = torch.exp2(s - torch.where(top > float("-inf"), top, 0.0))
        total = p.sum(-1, keepdim=True)
        acc = torch.einsum("hrk,khd->hrd", p.to(q.dtype).float(), vv)
        acc = acc / torch.where(total > 0, total, 1.0)
        out[b] = acc.transpose(0, 1).to(q.dtype)
    return out
