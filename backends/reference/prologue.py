"""The attention prologue: per-head norm, rope, cache write."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.backends.reference.cache import kv_cache_write
from fusion.backends.reference.norm import rms_norm
from fusion.backends.reference.rotary import rope, token_tables


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    q_eps: float,
    k_eps: float,
    q_eps_tensor: Tensor | None = None,
    k_eps_tensor: Tensor | None = None,
    weight_mode: str = "w",
    norm_cast: str = "late",
    inv_rms: str = "rsqrt",
    rope_style: str = "half",
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Norm and rope of q and k. See :func:`fusion.ops.qk_norm_rope`.

    Returns:
        q ``[T, Hq, D]`` and k ``[T, Hk, D]``, contiguous, in ``out_dtype``.
    """
    q = rms_norm(
        query,
        q_weight,
        q_eps if q_eps_tensor is None else q_eps_tensor,
        weight_mode=weight_mode,
        norm_cast=norm_cast,
        inv_rms=inv_rms,
    )
    k = rms_norm(
        key,
        k_weight,
        k_eps if k_eps_tensor is None else k_eps_tensor,
        weight_mode=weight_mode,
        norm_cast=norm_cast,
        inv_rms=inv_rms,
    )
    return rope_qk(
        q,
        k,
        cos,
        sin,
        positions,
        rope_style=rope_style,
        rotary_dim=rotary_dim,
        rope_dtype=rope_dtype,
        out_dtype=out_dtype,
    )


def rope_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    rope_style: str,
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Rope of q and k with the same tables; new contiguous tensors in ``out_dtype``."""
    cos, sin = token_tables(cos, sin, positions)
    q, k = (
        rope(
            x,
            cos,
            sin,
            rope_style=rope_style,
            rotary_dim=rotary_dim,
            rope_dtype=rope_dtype,
            out_dtype=out_dtype,
        )
        for x in (query, key)
    )
    return _fresh(q, query), _fresh(k, key)


def _fresh(out: Tensor, x: Tensor) -> Tensor:
    # With rotary_dim 0 and no cast nothing was computed; an op must not return its input.
    return out.clone(memory_format=torch.contiguous_format) if out is x else out.contiguous()


def qk_norm_rope_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    q_eps: float,
    k_eps: float,
    q_eps_tensor: Tensor | None = None,
    k_eps_tensor: Tensor | None = None,
    weight_mode: str = "w",
    norm_cast: str = "late",
    inv_rms: str = "rsqrt",
    rope_style: str = "half",
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    return_key: bool = False,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Norm and rope of q and k, k and v to the cache. See
    :func:`fusion.ops.qk_norm_rope_kv_cache`.
    """
    q, k = qk_norm_rope(
        query,
        key,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        q_eps=q_eps,
        k_eps=k_eps,
        q_eps_tensor=q_eps_tensor,
        k_eps_tensor=k_eps_tensor,
        weight_mode=weight_mode,
        norm_cast=norm_cast,
        inv_rms=inv_rms,
        rope_style=rope_style,
        rotary_dim=rotary_dim,
        rope_dtype=rope_dtype,
        out_dtype=out_dtype,
    )
    kv_cache_write(
        k, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout=kv_layout
    )
    return q, k if return_key else k.new_empty((0, *k.shape[1:]))


def rope_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    rope_style: str = "half",
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    return_key: bool = False,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Rope of q and k, k and v to the cache. See :func:`fusion.ops.rope_kv_cache`."""
    q, k = rope_qk(
        query,
        key,
        cos,
        sin,
        positions,
        rope_style=rope_style,
        rotary_dim=rotary_dim,
        rope_dtype=rope_dtype,
        out_dtype=out_dtype,
    )
    kv_cache_write(
        k, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_layout=kv_layout
    )
    return q, k if return_key else k.new_empty((0, *k.shape[1:]))
