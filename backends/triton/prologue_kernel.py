"""Triton source of the attention prologue: per-head RMSNorm, RoPE, paged-cache write.

One source serves ``qk_norm_rope_kv_cache``, ``rope_kv_cache``, ``qk_norm_rope`` and
``kv_cache_write``: what is absent is a compile-time flag. This module imports triton, so only
code that really launches (or compiles) a kernel may import it.

Work is cut into programs of one *kind*: a tile of ``TT`` tokens by ``HH`` heads, all of q, all of
k, or all of v. The kind is decided by the program id, so every branch on it is uniform. Programs
of one token are neighbours, so that a packed qkv row is read in order.

All arithmetic is done in f32 and rounded where the attributes say so (`_round`). Multiplications
that feed a rounded sum go through `_mul`, which keeps the compiler from contracting the product
into the sum: the reference rounds both. Helpers take and return tiles ``[TT, HH, N]``.

Inductor copies this source into the code that it generates: only module-level jit functions and
the names ``tl`` and ``triton`` may be used below.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102  (constexpr conditions must stay apart from run-time ones)
# fmt: off

import triton
import triton.language as tl

from fusion.backends.triton.prologue_parts import (
    _load,
    _mask,
    _mul,
    _pair_table,
    _round,
    _scale,
    _scale_by_weight,
    _slots,
    _store,
    _store_cache,
    _stored,
    _weight,
)


@triton.jit
def _rotated(
    x_ptr, w_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows,
    st, sh, cos_st, sin_st,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_W: tl.constexpr, ONE_PLUS: tl.constexpr, W_CODE: tl.constexpr,
    NORM_CAST: tl.constexpr, X_CODE: tl.constexpr, Y_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr, STREAM: tl.constexpr,
):
    """Norm and rope of one tile of q or k.

    Returns (first, second, tail) in f32, rounded to the output dtype: halves or even/odd elements
    [TT, HH, BH] of the rotated part and [TT, HH, BT] of what lies past it. A part that does not
    exist is a scalar 0.
    """
    half: tl.constexpr = R // 2
    rows = x_ptr + t.to(tl.int64) * st + h.to(tl.int64) * sh
    i = tl.arange(0, BH)[None, None, :]
    x1 = 0.0
    x2 = 0.0
    xt = 0.0
    if R > 0:
        if INTERLEAVED:
            j = tl.arange(0, 2 * BH)[None, None, :]
            x = _load(rows, j, _mask(t, h, j, tokens, H, R, TT, HH, 2 * BH), STREAM)
            x1, x2 = tl.split(tl.reshape(x, [TT, HH, BH, 2]))
        else:
            m = _mask(t, h, i, tokens, H, half, TT, HH, BH)
            x1 = _load(rows, i, m, STREAM)
            x2 = _load(rows, i + half, m, STREAM)
    if R < D:
        n = tl.arange(0, BT)[None, None, :]
        xt = _load(rows, n + R, _mask(t, h, n, tokens, H, D - R, TT, HH, BT), STREAM)
    if R > 0:
        row = t.to(tl.int64)
        if TT > 1:
            row = tl.minimum(row, tokens - 1)
        if HAS_POS:
            row = tl.load(pos_ptr + row).to(tl.int64)
            row = tl.minimum(tl.maximum(row, 0), table_rows - 1)
        c1, c2 = _pair_table(cos_ptr, row, cos_st, R, BH, FULL, INTERLEAVED, ROPE_CODE, TT)
        s1, s2 = _pair_table(sin_ptr, row, sin_st, R, BH, FULL, INTERLEAVED, ROPE_CODE, TT)
    if NORM:
        if R == 0:
            ss = tl.sum(xt * xt, axis=2)
        else:
            # fma, so that every variant of the kernel contracts the two products alike
            ss = tl.sum(tl.fma(x2, x2, x1 * x1), axis=2)
            if R < D:
                ss += tl.sum(xt * xt, axis=2)
        inv = tl.rsqrt(ss * (1.0 / D) + eps)[:, :, None]
        if R > 0:
            if HAS_W:
                if INTERLEAVED:
                    w = _weight(w_ptr, j, j, R, 2 * BH, ONE_PLUS, W_CODE)
                    w1, w2 = tl.split(tl.reshape(w, [1, 1, BH, 2]))
                else:
                    w1 = _weight(w_ptr, i, i, half, BH, ONE_PLUS, W_CODE)
                    w2 = _weight(w_ptr, i + half, i, half, BH, ONE_PLUS, W_CODE)
            else:
                w1 = 1.0
                w2 = 1.0
            x1 = _scale_by_weight(x1 * inv, w1, HAS_W, NORM_CAST, X_CODE, Y_CODE)
            x2 = _scale_by_weight(x2 * inv, w2, HAS_W, NORM_CAST, X_CODE, Y_CODE)
        if R < D:
            if HAS_W:
                wt = _weight(w_ptr, n + R, n, D - R, BT, ONE_PLUS, W_CODE)
            else:
                wt = 1.0
            xt = _scale_by_weight(xt * inv, wt, HAS_W, NORM_CAST, X_CODE, Y_CODE)
    if R > 0:
        x1 = _round(x1, ROPE_CODE)
        x2 = _round(x2, ROPE_CODE)
        c1, x1 = tl.broadcast(c1, x1)
        c2, x2 = tl.broadcast(c2, x2)
        s1, x1 = tl.broadcast(s1, x1)
        s2, x2 = tl.broadcast(s2, x2)
        o1 = _round(_mul(x1, c1, ROPE_CODE) - _mul(x2, s1, ROPE_CODE), ROPE_CODE)
        o2 = _round(_mul(x2, c2, ROPE_CODE) + _mul(x1, s2, ROPE_CODE), ROPE_CODE)
        x1 = _round(o1, OUT_CODE)
        x2 = _round(o2, OUT_CODE)
    if R < D:
        xt = _round(xt, OUT_CODE)
    return x1, x2, xt


@triton.jit
def _store_rows(ptr, x1, x2, xt, t, h, tokens, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                TT: tl.constexpr, HH: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
                INTERLEAVED: tl.constexpr, STREAM: tl.constexpr):
    """Stores a tile into a contiguous [tokens, H, D] tensor."""
    rows = ptr + (t.to(tl.int64) * H + h) * D
    if R > 0:
        if INTERLEAVED:
            j = tl.arange(0, 2 * BH)[None, None, :]
            x = tl.reshape(tl.join(x1, x2), [TT, HH, 2 * BH])
            _store(rows + j, x, _mask(t, h, j, tokens, H, R, TT, HH, 2 * BH), STREAM)
        else:
            i = tl.arange(0, BH)[None, None, :]
            m = _mask(t, h, i, tokens, H, R // 2, TT, HH, BH)
            _store(rows + i, x1, m, STREAM)
            _store(rows + i + R // 2, x2, m, STREAM)
    if R < D:
        n = tl.arange(0, BT)[None, None, :]
        _store(rows + n + R, xt, _mask(t, h, n, tokens, H, D - R, TT, HH, BT), STREAM)


@triton.jit
def _query_program(
    q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, eps, t, h, tokens, table_rows,
    st, sh, cos_st, sin_st,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_W: tl.constexpr, ONE_PLUS: tl.constexpr, W_CODE: tl.constexpr,
    NORM_CAST: tl.constexpr, X_CODE: tl.constexpr, Y_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr, STREAM: tl.constexpr,
):
    x1, x2, xt = _rotated(
        q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows, st, sh, cos_st,
        sin_st, H, D, R, TT, HH, BH, BT, NORM, HAS_W, ONE_PLUS, W_CODE, NORM_CAST, X_CODE,
        Y_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE, OUT_CODE, STREAM)
    _store_rows(q_out_ptr, x1, x2, xt, t, h, tokens, H, D, R, TT, HH, BH, BT, INTERLEAVED, STREAM)


@triton.jit
def _key_program(
    k_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, k_out_ptr, eps, t, h, tokens, table_rows,
    st, sh, cos_st, sin_st,
    cache_ptr, slot_ptr, scale_ptr, num_slots, s0, s1, s2, s3,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_W: tl.constexpr, ONE_PLUS: tl.constexpr, W_CODE: tl.constexpr,
    NORM_CAST: tl.constexpr, X_CODE: tl.constexpr, Y_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
    WRITE: tl.constexpr, RETURN_K: tl.constexpr, FP8: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr, X: tl.constexpr, STREAM: tl.constexpr,
):
    if WRITE:
        block, offset, written = _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE, TT)
        scale = _scale(scale_ptr, HAS_SCALE)
    x1, x2, xt = _rotated(
        k_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows, st, sh, cos_st,
        sin_st, H, D, R, TT, HH, BH, BT, NORM, HAS_W, ONE_PLUS, W_CODE, NORM_CAST, X_CODE,
        Y_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE, OUT_CODE, STREAM)
    if RETURN_K:
        _store_rows(k_out_ptr, x1, x2, xt, t, h, tokens, H, D, R, TT, HH, BH, BT, INTERLEAVED,
                    STREAM)
    if WRITE:
        if R > 0:
            x1 = _stored(x1, scale, HAS_SCALE, FP8)
            x2 = _stored(x2, scale, HAS_SCALE, FP8)
            if INTERLEAVED:
                j = tl.arange(0, 2 * BH)[None, None, :]
                x = tl.reshape(tl.join(x1, x2), [TT, HH, 2 * BH])
                m = _mask(t, h, j, tokens, H, R, TT, HH, 2 * BH) & written
                _store_cache(cache_ptr, x, block, offset, h, j, s0, s1, s2, s3, m, FP8,
                             SHUFFLE, X, STREAM)
            else:
                i = tl.arange(0, BH)[None, None, :]
                m = _mask(t, h, i, tokens, H, R // 2, TT, HH, BH) & written
                _store_cache(cache_ptr, x1, block, offset, h, i, s0, s1, s2, s3, m, FP8,
                             SHUFFLE, X, STREAM)
                _store_cache(cache_ptr, x2, block, offset, h, i + R // 2, s0, s1, s2, s3,
                             m, FP8, SHUFFLE, X, STREAM)
        if R < D:
            n = tl.arange(0, BT)[None, None, :]
            m = _mask(t, h, n, tokens, H, D - R, TT, HH, BT) & written
            xt = _stored(xt, scale, HAS_SCALE, FP8)
            _store_cache(cache_ptr, xt, block, offset, h, n + R, s0, s1, s2, s3, m, FP8,
                         SHUFFLE, X, STREAM)


@triton.jit
def _value_program(
    v_ptr, cache_ptr, slot_ptr, scale_ptr, t, h, tokens, num_slots, st, sh, s0, s1, s2, s3,
    H: tl.constexpr, DV: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr, BV: tl.constexpr,
    FP8: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr,
    X: tl.constexpr, STREAM: tl.constexpr,
):
    block, offset, written = _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE, TT)
    scale = _scale(scale_ptr, HAS_SCALE)
    n = tl.arange(0, BV)[None, None, :]
    m = _mask(t, h, n, tokens, H, DV, TT, HH, BV)
    x = _load(v_ptr + t.to(tl.int64) * st + h.to(tl.int64) * sh, n, m, STREAM)
    x = _stored(x, scale, HAS_SCALE, FP8)
    _store_cache(cache_ptr, x, block, offset, h, n, s0, s1, s2, s3, m & written, FP8,
                 SHUFFLE, X, STREAM)


@triton.jit
def _prologue(
    q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr,
    q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr,
    q_eps_ptr, k_eps_ptr,
    tokens, num_slots, table_rows,
    q_eps, k_eps,
    q_st, q_sh, k_st, k_sh, v_st, v_sh, cos_st, sin_st,
    kc_s0, kc_s1, kc_s2, kc_s3, vc_s0, vc_s1, vc_s2, vc_s3,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, HAS_QW: tl.constexpr, HAS_KW: tl.constexpr, ONE_PLUS: tl.constexpr,
    QW_CODE: tl.constexpr, KW_CODE: tl.constexpr, NORM_CAST: tl.constexpr,
    X_CODE: tl.constexpr, QY_CODE: tl.constexpr, KY_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
    WRITE: tl.constexpr, RETURN_K: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, HAS_KS: tl.constexpr, HAS_VS: tl.constexpr,
    HAS_Q_EPS: tl.constexpr, HAS_K_EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr, X: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, HH: tl.constexpr, TT: tl.constexpr,
    STREAM: tl.constexpr,
):
    """One tile of TT tokens x HH heads of q, k or v per program.

    Grid: ``cdiv(tokens, TT) * GROUPS``; what each argument is: `prologue_plan.constants`.
    """
    QG: tl.constexpr = (HQ + HH - 1) // HH
    KG: tl.constexpr = (HK + HH - 1) // HH
    GROUPS: tl.constexpr = QG + KG + KG * WRITE
    pid = tl.program_id(0)
    g = pid % GROUPS
    t = (pid // GROUPS) * TT + tl.arange(0, TT)[:, None, None]
    hh = tl.arange(0, HH)[None, :, None]
    if HQ > 0:
        if g < QG:
            eps = tl.cast(q_eps, tl.float32)
            if HAS_Q_EPS:
                eps = tl.load(q_eps_ptr).to(tl.float32)
            _query_program(
                q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, eps, t, g * HH + hh, tokens,
                table_rows, q_st, q_sh, cos_st, sin_st, HQ, D, R, TT, HH, BH, BT, NORM, HAS_QW,
                ONE_PLUS, QW_CODE, NORM_CAST, X_CODE, QY_CODE, INTERLEAVED, FULL, HAS_POS,
                ROPE_CODE, OUT_CODE, STREAM)
    if (g >= QG) & (g < QG + KG):
        eps = tl.cast(k_eps, tl.float32)
        if HAS_K_EPS:
            eps = tl.load(k_eps_ptr).to(tl.float32)
        _key_program(
            k_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, k_out_ptr, eps, t, (g - QG) * HH + hh,
            tokens, table_rows, k_st, k_sh, cos_st, sin_st, k_cache_ptr, slot_ptr, k_scale_ptr,
            num_slots, kc_s0, kc_s1, kc_s2, kc_s3, HK, D, R, TT, HH, BH, BT, NORM, HAS_KW,
            ONE_PLUS, KW_CODE, NORM_CAST, X_CODE, KY_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE,
            OUT_CODE, WRITE, RETURN_K, K_FP8, HAS_KS, BLOCK_SIZE, SHUFFLE, X, STREAM)
    if WRITE:
        if g >= QG + KG:
            _value_program(
                v_ptr, v_cache_ptr, slot_ptr, v_scale_ptr, t, (g - QG - KG) * HH + hh, tokens,
                num_slots, v_st, v_sh, vc_s0, vc_s1, vc_s2, vc_s3, HK, DV, TT, HH, BV, V_FP8,
                HAS_VS, BLOCK_SIZE, 2 * SHUFFLE, X, STREAM)


@triton.jit(do_not_specialize=["tokens", "num_slots", "table_rows"])
def prologue_kernel(
    q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr,
    q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr,
    q_eps_ptr, k_eps_ptr,
    tokens, num_slots, table_rows,
    q_eps, k_eps,
    q_st, q_sh, k_st, k_sh, v_st, v_sh, cos_st, sin_st,
    kc_s0, kc_s1, kc_s2, kc_s3, vc_s0, vc_s1, vc_s2, vc_s3,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, HAS_QW: tl.constexpr, HAS_KW: tl.constexpr, ONE_PLUS: tl.constexpr,
    QW_CODE: tl.constexpr, KW_CODE: tl.constexpr, NORM_CAST: tl.constexpr,
    X_CODE: tl.constexpr, QY_CODE: tl.constexpr, KY_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
    WRITE: tl.constexpr, RETURN_K: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, HAS_KS: tl.constexpr, HAS_VS: tl.constexpr,
    HAS_Q_EPS: tl.constexpr, HAS_K_EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr, X: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, HH: tl.constexpr, TT: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The kernel for calls outside a compiled graph: strides and epsilons are run-time numbers."""
    _prologue(
        q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, k_out_ptr,
        k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, q_eps_ptr, k_eps_ptr, tokens,
        num_slots, table_rows, q_eps, k_eps, q_st, q_sh, k_st, k_sh, v_st, v_sh, cos_st, sin_st,
        kc_s0, kc_s1, kc_s2, kc_s3, vc_s0, vc_s1, vc_s2, vc_s3, HQ, HK, D, DV, R, NORM, HAS_QW,
        HAS_KW, ONE_PLUS, QW_CODE, KW_CODE, NORM_CAST, X_CODE, QY_CODE, KY_CODE, INTERLEAVED, FULL,
        HAS_POS, ROPE_CODE, OUT_CODE, WRITE, RETURN_K, K_FP8, V_FP8, HAS_KS, HAS_VS, HAS_Q_EPS,
        HAS_K_EPS, BLOCK_SIZE, SHUFFLE, X, BH, BT, BV, HH, TT, STREAM)


@triton.jit(do_not_specialize=["tokens", "num_slots", "table_rows"])
def prologue_kernel_static(
    q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr,
    q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr,
    q_eps_ptr, k_eps_ptr,
    tokens, num_slots, table_rows,
    q_eps: tl.constexpr, k_eps: tl.constexpr, q_st: tl.constexpr, q_sh: tl.constexpr,
    k_st: tl.constexpr, k_sh: tl.constexpr, v_st: tl.constexpr, v_sh: tl.constexpr,
    cos_st: tl.constexpr, sin_st: tl.constexpr, kc_s0: tl.constexpr, kc_s1: tl.constexpr,
    kc_s2: tl.constexpr, kc_s3: tl.constexpr, vc_s0: tl.constexpr, vc_s1: tl.constexpr,
    vc_s2: tl.constexpr, vc_s3: tl.constexpr,
    q_off: tl.constexpr, k_off: tl.constexpr, v_off: tl.constexpr, cos_off: tl.constexpr,
    sin_off: tl.constexpr, kc_off: tl.constexpr, vc_off: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, HAS_QW: tl.constexpr, HAS_KW: tl.constexpr, ONE_PLUS: tl.constexpr,
    QW_CODE: tl.constexpr, KW_CODE: tl.constexpr, NORM_CAST: tl.constexpr,
    X_CODE: tl.constexpr, QY_CODE: tl.constexpr, KY_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
    WRITE: tl.constexpr, RETURN_K: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, HAS_KS: tl.constexpr, HAS_VS: tl.constexpr,
    HAS_Q_EPS: tl.constexpr, HAS_K_EPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr, X: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, HH: tl.constexpr, TT: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The kernel for compiled graphs: strides, epsilons and offsets (in elements, of a view in
    its buffer) are constants, so that a launch has few arguments and makes no view. A pointer that
    is absent (`prologue_plan.SAME_BUFFER`) is that of the tensor it shares its buffer with."""
    if k_ptr is None:
        k_ptr = q_ptr
    if v_ptr is None:
        v_ptr = k_ptr
    if sin_ptr is None:
        sin_ptr = cos_ptr
    if v_cache_ptr is None:
        v_cache_ptr = k_cache_ptr
    if q_off != 0:
        q_ptr += q_off
    if k_off != 0:
        k_ptr += k_off
    if v_off != 0:
        v_ptr += v_off
    if cos_off != 0:
        cos_ptr += cos_off
    if sin_off != 0:
        sin_ptr += sin_off
    if kc_off != 0:
        k_cache_ptr += kc_off
    if vc_off != 0:
        v_cache_ptr += vc_off
    _prologue(
        q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, k_out_ptr,
        k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, q_eps_ptr, k_eps_ptr, tokens,
        num_slots, table_rows, q_eps, k_eps, q_st, q_sh, k_st, k_sh, v_st, v_sh, cos_st, sin_st,
        kc_s0, kc_s1, kc_s2, kc_s3, vc_s0, vc_s1, vc_s2, vc_s3, HQ, HK, D, DV, R, NORM, HAS_QW,
        HAS_KW, ONE_PLUS, QW_CODE, KW_CODE, NORM_CAST, X_CODE, QY_CODE, KY_CODE, INTERLEAVED, FULL,
        HAS_POS, ROPE_CODE, OUT_CODE, WRITE, RETURN_K, K_FP8, V_FP8, HAS_KS, HAS_VS, HAS_Q_EPS,
        HAS_K_EPS, BLOCK_SIZE, SHUFFLE, X, BH, BT, BV, HH, TT, STREAM)
