"""QK-norm + rope + cache write on ``fused_qk_norm_rope_cache_pts_quant_shuffle`` (HIP).

One launch: RMSNorm of q and k, rotation, and the write of k and v with per-tensor scales. The
function wants q, k and v as one packed tensor, cos and sin as one table in the dtype of q, and its
scales in host memory; wrong shapes end the process, and wrong dtypes, short slot mappings and
misaligned widths are not looked at by AITER at all; see :mod:`.prologue_requires`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.backends.aiter import contract, gate, numerics, operands, runtime, scales
from fusion.backends.aiter.prologue_requires import LANES, REQUIRES, strides_need
from fusion.kernel import Kernel, KernelCall

__all__ = ["KERNEL", "REQUIRES", "qk_norm_rope_kv_cache"]


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
    """``fusion::qk_norm_rope_kv_cache`` through AITER, for a call that :data:`REQUIRES` accepts.

    Returns:
        q ``[T, Hq, D]`` contiguous; k ``[T, Hk, D]`` contiguous if ``return_key`` (rows without a
        slot are zeros: AITER does not write them), else ``[0, Hk, D]``.

    Raises:
        fusion.backends.aiter.scales.ScaleNotOnHostError: fp8, device scales, and a graph is being
            captured before any run.
    """
    tokens, q_heads, dim = query.shape
    kv_heads = key.shape[1]
    q_out = query.new_empty((tokens, q_heads, dim))
    k_out = key.new_zeros((tokens if return_key else 0, kv_heads, dim))
    if tokens == 0:
        return q_out, k_out
    fp8 = key_cache.dtype in gate.FP8
    k_host = scales.HOST.get(k_scale if fp8 else None)
    v_host = scales.HOST.get(v_scale if fp8 else None)
    slack = _slack(dim, rope_style)
    table, at = operands.joined_table(cos, sin, positions, query.dtype, slack)
    call = runtime.resolve(contract.PTS)
    call(
        operands.packed_qkv(query, key, value),
        _weight(q_weight, query, weight_mode),
        _weight(k_weight, query, weight_mode),
        table,
        at,
        tokens,
        q_heads,
        kv_heads,
        kv_heads,
        dim,
        rope_style == "half",
        float(q_eps),
        q_out,
        key_cache,
        value_cache,
        operands.token_slots(slot_mapping, tokens),
        k_host,
        v_host,
        k_out if return_key else None,
        None,  # v_out: V is not returned
        return_key,
        False,  # use_shuffle_layout
        key_cache.shape[1],
        16 // key_cache.element_size(),
        rotary_dim,  # never 0, which would mean the whole head
    )
    return q_out, k_out


def _slack(dim: int, rope_style: str) -> int:
    """The interleaved kernel loads half a vector beyond the sine of the last pair."""
    return dim // LANES if rope_style == "interleaved" else 0


def _rope_table(dim: int, rope_style: str) -> tuple[Any, int]:
    """The operation that makes a table for all layers, and its slack; for the pass
    :mod:`fusion.passes.shared_rope_table`, which finds this as an attribute of the kernel."""
    from fusion.backends.aiter.table_op import OP

    return OP, _slack(dim, rope_style)


qk_norm_rope_kv_cache.rope_table = _rope_table  # type: ignore[attr-defined]


def _weight(weight: Tensor | None, like: Tensor, mode: str) -> Tensor:
    if weight is None:
        return like.new_ones(like.shape[-1])
    # With "late" the graph, too, adds 1 in the weight's dtype; other casts are refused.
    return 1.0 + weight if mode == "1+w" else weight


def describe(call: KernelCall) -> Mapping[str, Any]:
    """What the call would be, for the report."""
    need, what = strides_need(call)
    notes = numerics.prologue_differences(call)
    found: dict[str, Any] = {
        "function": contract.PTS.name,
        "cache": f"{what}: AITER >= {need}",
        "rounding": notes or "the graph's own rounding points",
    }
    if call.attributes.get("return_key"):
        found["returned k"] = "rows without a slot are zeros"
    return found


KERNEL = Kernel(
    name="aiter",
    op="qk_norm_rope_kv_cache",
    fn=qk_norm_rope_kv_cache,
    requires=REQUIRES,
    backend="aiter",
    describe=describe,
)
