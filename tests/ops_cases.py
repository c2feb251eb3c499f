"""Arguments for every canonical operation, shared by the tests of the operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.layout import KVCacheLayout, empty_kv_cache, split_kv_cache

HQ, HK, D, DV, BLOCK = 6, 3, 32, 16, 4
ROPE = {
    "rope_style": "half",
    "rotary_dim": 16,
    "rope_dtype": torch.float32,
    "out_dtype": torch.float32,
}
NORM = {"q_eps": 1e-6, "k_eps": 1e-5}


def filled_cache(
    layout: KVCacheLayout = KVCacheLayout.PACKED,
    blocks: int = 3,
    dtype: torch.dtype = torch.float32,
    dv: int = DV,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Whole buffers with noise, and the key and value halves to hand to an operation."""
    made = empty_kv_cache(layout, blocks, BLOCK, HK, D, dv, dtype)
    parts = [made] if isinstance(made, Tensor) else list(made)
    for part in parts:
        part.copy_(torch.randn(part.shape))
    return parts, *split_kv_cache(made, layout, D, dv)


def arguments(op: str, tokens: int = 5, *, table: bool = False, **cache: Any) -> dict[str, Any]:
    """Every required argument of an operation by name, small and valid."""
    _, kc, vc = filled_cache(**cache)
    qkv = torch.randn(tokens, HQ * D + HK * (D + DV))
    q, k, v = qkv.split((HQ * D, HK * D, HK * DV), dim=-1)
    q, k, v = q.view(-1, HQ, D), k.view(-1, HK, D), v.view(-1, HK, DV)
    slots = torch.randperm(3 * BLOCK)[:tokens]
    slots[1::3] = -1
    write = {"key_cache": kc, "value_cache": vc, "slot_mapping": slots}
    if op == "kv_cache_write":
        return {"key": k, "value": v, **write}
    if op == "paged_attention":
        return {
            "query": q, "key_cache": kc, "value_cache": vc,
            "block_table": torch.tensor([[2, 0], [1, 1]], dtype=torch.int32),
            "seq_lens": torch.tensor([6, 3], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, tokens // 2, tokens], dtype=torch.int32),
            "max_query_len": tokens, "max_seq_len": 8, "scale": 0.2, "causal": True,
        }  # fmt: skip
    rows = 11 if table else tokens
    rope = {
        "cos": torch.randn(rows, 8), "sin": torch.randn(rows, 8),
        "positions": torch.randint(0, rows, (tokens,)) if table else None,
    }  # fmt: skip
    weights = {"q_weight": torch.randn(D), "k_weight": torch.randn(D)}
    if op == "rope_kv_cache":
        return {"query": q, "key": k, "value": v, **rope, **write, **ROPE}
    if op == "qk_norm_rope":
        return {"query": q, "key": k, **weights, **rope, **NORM, **ROPE}
    return {"query": q, "key": k, "value": v, **weights, **rope, **write, **NORM, **ROPE}
