"""The canonical operations as functions.

Each checks its arguments, asks the gate for a kernel and runs it; each is a ``torch.library``
operation ``torch.ops.fusion.<name>`` with a fake implementation, so it may be called inside
``torch.compile``. They are for inference: an argument that requires grad, with grad mode on, is an
error. The functions of :mod:`fusion.backends.reference` are their semantics.

Names used below: T tokens, Hq query heads, Hk KV heads, D head dim of q and k, Dv of v, R =
``rotary_dim``, B sequences. A *cache* argument is an NHD view ``[num_blocks, block_size, Hk, D]``
with any strides but a contiguous last dimension (:func:`fusion.layout.split_kv_cache` makes them
out of every dense layout), or with ``kv_layout="SHUFFLE"`` AITER's shuffled tensors. A *slot* is
``block * block_size + offset``; a negative one is padding and writes nothing.

Errors common to all: ``ValueError`` names the argument that does not fit, what it is and what it
must be; ``IndexError`` names a slot or block outside the cache where a kernel on the CPU meets one
(a GPU is never waited for); ``RuntimeError`` when gradients are wanted;
:class:`fusion.selection.NoKernelError` when the kernel named by ``kernel`` cannot run the call,
with every candidate and its reasons.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.ops.dispatch import choose, describe_call
from fusion.ops.registration import OVERLOADS, SIGNATURES
from fusion.ops.schema import OPERATIONS, SCHEMAS

__all__ = [
    "OPERATIONS",
    "OVERLOADS",
    "SCHEMAS",
    "SIGNATURES",
    "choose",
    "describe_call",
    "kv_cache_write",
    "paged_attention",
    "qk_norm_rope",
    "qk_norm_rope_kv_cache",
    "rope_kv_cache",
]


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    kernel: str = "auto",
) -> None:
    """Writes K and V rows into a paged cache, in place.

    ``key_cache[slot // block_size, slot % block_size] = key[t]`` for ``slot = slot_mapping[t] >=
    0``, in 64-bit arithmetic; no other element of the cache's storage changes a bit.

    Args:
        key: ``[T, Hk, D]``, float32, bfloat16, float16 or float64, any strides.
        value: ``[T, Hk, Dv]``, likewise.
        key_cache, value_cache: written in place; NHD views (see the module), any float dtype of
            the above, ``float8_e4m3fn`` or ``float8_e4m3fnuz``.
        slot_mapping: ``[N]``, int64 or int32, N <= T; rows N and on are not written. Which row
            wins where two name one slot is undefined.
        k_scale, v_scale: one float each; an fp8 cache stores ``x / scale`` (None = 1), computed
            in float32 and saturated to the largest finite value. Other caches ignore them.
        kv_layout: ``"NHD"`` or ``"SHUFFLE"``.
        kernel: ``"auto"``, or the name of a kernel.
    """
    torch.ops.fusion.kv_cache_write(
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
        kv_layout=kv_layout, kernel=kernel,
    )  # fmt: skip


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
    kernel: str = "auto",
) -> Tensor:
    """Attention of ragged queries over a paged cache, causal or not.

    Row i of sequence b stands at ``q_pos = i + seq_lens[b] - q_len[b]``. It sees key j if
    ``j < seq_lens[b]``, ``j <= q_pos`` where causal, ``j >= q_pos - window_left`` and ``j <=
    q_pos + window_right`` where those are not negative. With s = ``scale * q.k`` (and ``softcap *
    tanh(s / softcap)`` if softcap > 0) the result is ``sum(exp(s) v) / (sum(exp(s)) +
    exp(sink))``, in float32 (Vaswani et al. 2017; softcap: Gemma 2; sinks: GPT-OSS). A key that a
    row does not see cannot reach it, not even as NaN, and pages that no row needs are not read,
    so their table entries may hold anything.

    Args:
        query: ``[T, Hq, D]``, Hq a multiple of Hk (query head h reads KV head ``h // (Hq/Hk)``).
        key_cache, value_cache: NHD views with D and Dv (see the module).
        block_table: ``[B, max_blocks]`` int32 or int64, the pages of each sequence.
        seq_lens: ``[B]`` integers, keys of each sequence, new tokens included.
        query_start_loc: ``[B + 1]`` integers, ascending; rows ``[b]`` to ``[b + 1]`` of query
            belong to sequence b. Empty sequences are fine.
        max_query_len, max_seq_len: upper bounds on the host; may be larger than needed.
        scale: factor on ``q.k``, such as ``D ** -0.5``.
        causal: whether a row sees only keys up to its own position.
        window_left, window_right: in tokens, negative = no limit.
        softcap: 0 = none.
        sinks: ``[Hq]`` floats, one extra logit per head, in the denominator only.
        k_scale, v_scale: one float each; fp8 K and V are multiplied by them (None = 1).
        kv_layout, kernel: as in :func:`kv_cache_write`.

    Returns:
        ``[T, Hq, Dv]`` in query's dtype. Rows that see no key, or that belong to no sequence, are
        zero.
    """
    out: Tensor = torch.ops.fusion.paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, max_query_len,
        max_seq_len, scale, causal, window_left, window_right, softcap, sinks, k_scale, v_scale,
        kv_layout=kv_layout, kernel=kernel,
    )  # fmt: skip
    return out


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
    rope_style: str,
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    return_key: bool = False,
    kv_layout: str = "NHD",
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The attention prologue: RMSNorm of q and k per head, rope, K and V to the cache.

    Norm as in :func:`fusion.backends.reference.rms_norm`, rope as in
    :func:`fusion.backends.reference.rope`, write as in :func:`kv_cache_write`, one after the
    other; each rounding point is an argument.

    Args:
        query: ``[T, Hq, D]``, any strides.
        key: ``[T, Hk, D]``, any strides.
        value: ``[T, Hk, Dv]``, any strides.
        q_weight, k_weight: ``[D]`` or None for no weight.
        cos, sin: per token ``[T, R/2 or R]`` where positions is None; else tables ``[max_pos,
            R/2 or R]``.
        positions: ``[T]`` int32 or int64 rows of the tables, clamped into them; or None.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as in :func:`kv_cache_write`. The
            key is written as rope left it, in ``out_dtype``, cast to the cache's dtype.
        q_eps, k_eps: added to the mean square.
        q_eps_tensor, k_eps_tensor: 0-dim floats that, where given, take the place of the numbers.
        weight_mode, norm_cast, inv_rms: see :func:`fusion.backends.reference.rms_norm`.
        rope_style, rotary_dim, rope_dtype, out_dtype: see
            :func:`fusion.backends.reference.rope`. The tail beyond ``rotary_dim`` keeps the normed
            value.
        return_key: whether k is wanted back.
        kv_layout, kernel: as in :func:`kv_cache_write`.

    Returns:
        q ``[T, Hq, D]`` and k ``[T, Hk, D]`` (``[0, Hk, D]`` unless ``return_key``), contiguous,
        in ``out_dtype``. Padding rows of q are computed too.
    """
    out: tuple[Tensor, Tensor] = torch.ops.fusion.qk_norm_rope_kv_cache(
        query, key, value, q_weight, k_weight, cos, sin, positions, key_cache, value_cache,
        slot_mapping, k_scale, v_scale, q_eps=q_eps, k_eps=k_eps, q_eps_tensor=q_eps_tensor,
        k_eps_tensor=k_eps_tensor, weight_mode=weight_mode, norm_cast=norm_cast, inv_rms=inv_rms,
        rope_style=rope_style, rotary_dim=rotary_dim, rope_dtype=rope_dtype, out_dtype=out_dtype,
        return_key=return_key, kv_layout=kv_layout, kernel=kernel,
    )  # fmt: skip
    return out


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
    rope_style: str,
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    return_key: bool = False,
    kv_layout: str = "NHD",
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rope of q and k, K and V to the cache: :func:`qk_norm_rope_kv_cache` without the norms.

    Arguments and results as there.
    """
    out: tuple[Tensor, Tensor] = torch.ops.fusion.rope_kv_cache(
        query, key, value, cos, sin, positions, key_cache, value_cache, slot_mapping, k_scale,
        v_scale, rope_style=rope_style, rotary_dim=rotary_dim, rope_dtype=rope_dtype,
        out_dtype=out_dtype, return_key=return_key, kv_layout=kv_layout, kernel=kernel,
    )  # fmt: skip
    return out


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
    rope_style: str,
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RMSNorm and rope of q and k: :func:`qk_norm_rope_kv_cache` without the write.

    Arguments as there.

    Returns:
        q ``[T, Hq, D]`` and k ``[T, Hk, D]``, contiguous, in ``out_dtype``.
    """
    out: tuple[Tensor, Tensor] = torch.ops.fusion.qk_norm_rope(
        query, key, q_weight, k_weight, cos, sin, positions, q_eps=q_eps, k_eps=k_eps,
        q_eps_tensor=q_eps_tensor, k_eps_tensor=k_eps_tensor, weight_mode=weight_mode,
        norm_cast=norm_cast, inv_rms=inv_rms, rope_style=rope_style, rotary_dim=rotary_dim,
        rope_dtype=rope_dtype, out_dtype=out_dtype, kernel=kernel,
    )  # fmt: skip
    return out
