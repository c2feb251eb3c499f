"""The flash-layout cache writer (HIP in the real library)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter._strict import FP8, STATE, fault, need, poison, to_fp8


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    STATE.calls.append(("write", tuple(locals().values()), {}))
    need(key_cache.stride(0) == value_cache.stride(0), "one block stride")
    need(kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"), "kv_cache_dtype")
    tokens, heads, dim = key.shape
    need(tokens > 0, "a launch of no blocks")
    fault(slot_mapping.numel() >= tokens, "slots")
    fault(all(s.dtype == torch.float32 and s.numel() for s in (k_scale, v_scale)), "scales")
    for name, rows in (("key", key), ("value", value)):
        fault(rows.numel() == tokens * heads * dim, f"size of {name}")
    blocks, page = key_cache.shape[:2]
    wrong = slot_mapping.dtype not in (torch.int64, torch.int32) or not slot_mapping.is_contiguous()
    wrong = wrong or (slot_mapping.dtype == torch.int32 and not STATE.at_least("0.1.20"))
    if kv_cache_dtype == "auto":
        same = key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
        wrong = wrong or not same
    if wrong:
        poison(key_cache, value_cache)
        return
    slots = slot_mapping[:tokens]
    fault(bool((slots < blocks * page).all()), "slot")
    keep = slots >= 0
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        # Only the token stride of the rows and the block stride of K are read.
        flat = rows.as_strided((tokens, heads * dim), (rows.stride(0), 1))[keep]
        if cache.dtype in FP8:
            flat = to_fp8(flat.float() * (1.0 / scale), cache.dtype, saturate=False)
        believed = cache.as_strided(
            (blocks, page, heads * dim), (key_cache.stride(0), heads * dim, 1)
        )
        bits = torch.uint8 if cache.dtype in FP8 else cache.dtype
        believed.view(bits)[slots[keep] // page, slots[keep] % page] = flat.view(bits)
