"""Rope and cache write (Triton in the real library)."""

from __future__ import annotations

import torch
from torch import Tensor

from aiter._strict import STATE, fault


def fused_qk_rope_reshape_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    is_neox: bool,
    flash_layout: bool,
    apply_scale: bool = True,
    offs: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    output_zeros: bool = True,
    zeros_out: Tensor | None = None,
    upcast_operand: bool = False,
) -> tuple[Tensor, ...]:
    STATE.calls.append(("rope", (), dict(locals())))
    t, qh, d = q.shape
    kh = k.shape[1]
    assert t > 0, "an empty grid"
    assert key_cache.dtype in (torch.bfloat16, STATE.fp8), "KV cache dtype"
    assert flash_layout, "the stand-in has no shuffled layout"
    assert not apply_scale and key_cache.dtype == torch.bfloat16, "the stand-in has no fp8"
    assert t == k.shape[0] == v.shape[0] <= slot_mapping.shape[0], "tokens"
    blocks, page, heads, dim = key_cache.shape
    assert value_cache.shape == key_cache.shape, "caches differ"
    assert kh == v.shape[1] == heads, "KV heads"
    assert d == k.shape[2] == v.shape[2] == dim and d & (d - 1) == 0, "head size"
    assert page & (page - 1) == 0, "block size"
    assert qh % kh == 0, "heads"
    assert cos.shape[-1] in (d, d // 2), "width of cos"
    assert output_zeros is False, "would allocate zeros"
    assert q_out is not None and k_out is not None
    assert pos.stride(0) == 1, "positions are read with stride one"
    fault(bool(((pos[:t] >= 0) & (pos[:t] < cos.shape[0])).all()), "position")
    fault(bool((slot_mapping < blocks * page).all()), "slot")
    sin = sin.as_strided(sin.shape, cos.stride(), sin.storage_offset())  # cos's strides for both
    c, s = (x[pos[:t].long()].unsqueeze(1) for x in (cos, sin))
    if upcast_operand:
        c, s = c.float(), s.float()
    if cos.shape[-1] == d // 2:
        c, s = ((torch.cat((x, x), -1) if is_neox else x.repeat_interleave(2, -1)) for x in (c, s))
    q_out.copy_(_rotate(q, c, s, is_neox))
    rows = slot_mapping[:t] >= 0
    rotated = _rotate(k, c, s, is_neox)[rows]
    k_out[rows] = rotated.to(k_out.dtype)
    at = slot_mapping[:t][rows].long()
    key_cache[at // page, at % page] = rotated.to(key_cache.dtype)
    value_cache[at // page, at % page] = v[rows].to(value_cache.dtype)
    extra = torch.arange(slot_mapping.shape[0]) >= t
    assert not bool((extra & (slot_mapping.cpu() >= 0)).any()), "slots behind the tokens"
    return q_out, k_out, key_cache, value_cache


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    if neox:
        a, b = x.chunk(2, -1)
        other = torch.cat((-b, a), -1)
    else:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + other * sin
