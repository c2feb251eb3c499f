"""The per-tensor-scale prologue (HIP in the real library)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter._strict import FP8, STATE, fault, need, poison, strict_contiguous, to_fp8


def fused_qk_norm_rope_cache_pts_quant_shuffle(
    qkv: Tensor,
    qw: Tensor,
    kw: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    num_tokens: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_size: int,
    is_neox_style: bool,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    per_tensor_k_scale: Tensor,
    per_tensor_v_scale: Tensor,
    k_out: Tensor | None,
    v_out: Tensor | None,
    return_kv: bool,
    use_shuffle_layout: bool,
    block_size: int,
    x: int,
    rotary_dim: int = 0,
) -> None:
    arguments = dict(locals())
    STATE.calls.append(("pts", tuple(arguments.values()), {}))
    _types(arguments)
    need(all(t.is_contiguous() for t in (qkv, qw, kw, cos_sin)), "contiguous inputs")
    need(slot_mapping.is_contiguous(), "contiguous slots")
    for cache in (k_cache, v_cache):
        if STATE.at_least("0.1.19.post1"):
            need(cache.stride(-1) == 1, "last stride")
        elif STATE.at_least("0.1.16"):
            need(strict_contiguous(cache, 1), "dense within a block")
        else:
            need(strict_contiguous(cache, 0), "contiguous caches")
    need(positions.dim() == 1, "positions are 1-D")
    for scale in (per_tensor_k_scale, per_tensor_v_scale):
        if STATE.at_least("0.1.16"):
            on_device = scale.device.type != "cpu" or scale.data_ptr() in STATE.device_pointers
            fault(not on_device, "a device scale dereferenced on the host")
        fault(scale.numel() == 1 and scale.dtype == torch.float32, "scales are one float32 each")
    need(qkv.dtype in (torch.float32, torch.float16, torch.bfloat16), "dtype of qkv")
    need(k_cache.dtype in (qkv.dtype, STATE.fp8), "cache dtype")
    need(head_size in (64, 128, 256), "head size")
    need(block_size == 0 or block_size & (block_size - 1) == 0, "block size")
    need(not use_shuffle_layout or (x > 0 and x & (x - 1) == 0), "x")
    if num_tokens == 0:
        raise need(False, "a launch of no blocks")  # hipErrorInvalidConfiguration

    # From here on nothing is checked by the real library.
    fault(not use_shuffle_layout and block_size == k_cache.shape[1], "page geometry")
    heads = num_heads_q + num_heads_k + num_heads_v
    width, lane = rotary_dim or head_size, head_size // 32
    fault(qkv.shape == (num_tokens, heads * head_size), "size of qkv")
    fault(qw.numel() >= head_size and kw.numel() >= head_size, "size of the weights")
    fault(positions.numel() >= num_tokens, "size of positions")
    fault(q_out.numel() >= num_tokens * num_heads_q * head_size, "size of q_out")
    garbage = (
        any(t.dtype != qkv.dtype for t in (qw, kw, cos_sin, q_out))
        or positions.dtype != torch.int64
        or slot_mapping.dtype != torch.int64
        or slot_mapping.numel() < num_tokens
        or not q_out.is_contiguous()
        or v_cache.dtype != k_cache.dtype
        or cos_sin.shape[-1] != width
        or width % lane != 0
        or (is_neox_style and (width // 2) % lane != 0)
        or (return_kv and k_out is not None and k_out.dtype != k_cache.dtype)
        or (return_kv and k_out is not None and not k_out.is_contiguous())
        or qkv.data_ptr() % (lane * qkv.element_size()) != 0
    )
    for cache in (k_cache, v_cache):
        steps = [s for n, s in zip(cache.shape[:3], cache.stride()[:3], strict=True) if n > 1]
        garbage = garbage or any(s % lane != 0 or s == 0 for s in steps)
        garbage = garbage or cache.storage_offset() % lane != 0
    if garbage:
        poison(q_out, k_cache, v_cache, k_out if return_kv else None)
        return
    fault(bool(((positions >= 0) & (positions < cos_sin.shape[0])).all()), "position")
    if not is_neox_style:
        used = (int(positions.max()) + 1) * width + lane // 2
        storage = cos_sin.untyped_storage().nbytes() // cos_sin.element_size()
        fault(cos_sin.storage_offset() + used <= storage, "half a vector behind the table")
    capacity = k_cache.shape[0] * block_size
    fault(bool((slot_mapping[:num_tokens] < capacity).all()), "slot")
    fault(k_cache.shape[2] == num_heads_k and v_cache.shape[2] == num_heads_v, "heads of the cache")
    fault(k_cache.shape[3] == head_size == v_cache.shape[3], "head size of the cache")

    parts = [n * head_size for n in (num_heads_q, num_heads_k, num_heads_v)]
    q, k, v = (p.unflatten(1, (-1, head_size)) for p in qkv.split(parts, dim=1))
    table = cos_sin[positions[:num_tokens]]
    q = _rope(_norm(q, qw, eps), table, width, is_neox_style)
    k = _rope(_norm(k, kw, eps), table, width, is_neox_style)
    q_out.copy_(q)
    rows = slot_mapping[:num_tokens] >= 0
    slots = slot_mapping[:num_tokens][rows]
    block, offset = slots // block_size, slots % block_size
    stored_k = _stored(k, k_cache.dtype, per_tensor_k_scale)[rows]
    stored_v = _stored(v, v_cache.dtype, per_tensor_v_scale)[rows]
    _bits(k_cache)[block, offset] = _bits(stored_k)
    _bits(v_cache)[block, offset] = _bits(stored_v)
    if return_kv and k_out is not None:
        _bits(k_out)[rows] = _bits(stored_k)
    if return_kv and v_out is not None:
        _bits(v_out)[rows] = _bits(stored_v)


def _types(arguments: dict[str, object]) -> None:
    for name, value in arguments.items():
        if name.startswith("num_") or name in ("head_size", "block_size", "x", "rotary_dim"):
            ok = type(value) is int
        elif name in ("is_neox_style", "return_kv", "use_shuffle_layout"):
            ok = type(value) is bool
        elif name == "eps":
            ok = type(value) is float
        else:
            ok = isinstance(value, Tensor) or (name in ("k_out", "v_out") and value is None)
        if not ok:
            raise TypeError(f"{name} is {value!r}")


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def _rope(x: Tensor, table: Tensor, width: int, neox: bool) -> Tensor:
    cos, sin = (h.float().unsqueeze(1) for h in table.split(width // 2, dim=-1))
    head, tail = x[..., :width].float(), x[..., width:]
    if neox:
        a, b = head.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = head[..., ::2], head[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((out.to(x.dtype), tail), dim=-1)


def _stored(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    if dtype not in FP8:
        return x
    y = x.float()
    y = y * (1.0 / scale) if STATE.at_least("0.1.20") else y / scale
    return to_fp8(y, dtype, saturate=True)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in FP8 else x
