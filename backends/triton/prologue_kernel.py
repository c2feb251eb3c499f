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
# fmt: off

import triton
import triton.language as tl


@triton.jit
def _round(x, CODE: tl.constexpr):
    """f32 tile rounded to the dtype with this code (0 f32, 1 bf16, 2 fp16), kept in f32."""
    if CODE == 1:
        return x.to(tl.bfloat16).to(tl.float32)
    elif CODE == 2:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _mul(x, y, CODE: tl.constexpr):
    """x * y rounded to the dtype with this code.

    In f32 the product is written as ``fma(x, y, 0)``: same value, but it cannot be contracted
    with the addition that follows. (A product of -0 becomes +0.)
    """
    if CODE == 0:
        return tl.fma(x, y, tl.zeros_like(x))
    else:
        return _round(x * y, CODE)


@triton.jit
def _mask(t, h, d, tokens, H: tl.constexpr, N: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
          BN: tl.constexpr):
    """In-range mask [TT, HH, BN]; what always holds is left out so that it costs nothing."""
    m = tl.full([TT, HH, BN], 1, tl.int1)
    if TT > 1:
        m = m & (t < tokens)
    if H % HH != 0:
        m = m & (h < H)
    if N != BN:
        m = m & (d < N)
    return m


@triton.jit
def _weight(ptr, d, n, N: tl.constexpr, BN: tl.constexpr, ONE_PLUS: tl.constexpr,
            W_CODE: tl.constexpr):
    """Norm weight as an f32 tile; ``1 + w`` rounded to the dtype with code ``W_CODE``."""
    if N != BN:
        w = tl.load(ptr + d, mask=n < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        w = tl.load(ptr + d, eviction_policy="evict_last").to(tl.float32)
    if ONE_PLUS:
        w = _round(1.0 + w, W_CODE)
    return w


@triton.jit
def _scale_by_weight(n, w, HAS_W: tl.constexpr, NORM_CAST: tl.constexpr, X_CODE: tl.constexpr,
                     Y_CODE: tl.constexpr):
    """Normed value times weight with the roundings of late (0), early (1), none (2)."""
    if NORM_CAST == 0:
        y = _round(n, X_CODE)
        if HAS_W:
            y = _round(y * w, Y_CODE)
    elif NORM_CAST == 1:
        if HAS_W:
            n = n * w
        y = _round(n, X_CODE)
    else:
        y = n
        if HAS_W:
            y = n * w
    return y


@triton.jit
def _table_rows(ptr, row, stride, d, n, N: tl.constexpr, BN: tl.constexpr, CODE: tl.constexpr):
    """cos or sin of the tile's tokens, f32 rounded to the rope dtype: [TT, 1, BN]."""
    p = ptr + row * stride + d
    if N != BN:
        c = tl.load(p, mask=n < N, other=0.0)
    else:
        c = tl.load(p)
    return _round(c.to(tl.float32), CODE)


@triton.jit
def _pair_table(ptr, row, stride, R: tl.constexpr, BH: tl.constexpr, FULL: tl.constexpr,
                INTERLEAVED: tl.constexpr, CODE: tl.constexpr, TT: tl.constexpr):
    """Entries that multiply the first and the second element of each rotated pair."""
    half: tl.constexpr = R // 2
    i = tl.arange(0, BH)[None, None, :]
    if FULL:
        if INTERLEAVED:
            j = tl.arange(0, 2 * BH)[None, None, :]
            c = _table_rows(ptr, row, stride, j, j, R, 2 * BH, CODE)
            c1, c2 = tl.split(tl.reshape(c, [TT, 1, BH, 2]))
        else:
            c1 = _table_rows(ptr, row, stride, i, i, half, BH, CODE)
            c2 = _table_rows(ptr, row, stride, i + half, i, half, BH, CODE)
    else:
        c1 = _table_rows(ptr, row, stride, i, i, half, BH, CODE)
        c2 = c1
    return c1, c2


@triton.jit
def _to_fp8(x, MODE: tl.constexpr):
    """Bits of f32 x in e4m3fn (1) or e4m3fnuz (2): saturated, round to nearest even, NaN kept.

    Integer arithmetic, so that every chip, and the interpreter, gives the bytes of torch's cast.
    Normal results: add the rounding increment to the bit pattern and shift. Subnormal results:
    adding 2**k with the right k leaves the rounded mantissa in the low bits of the sum.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits & 0x80000000
    mag = bits ^ sign
    if MODE == 1:
        top: tl.constexpr = 0x43E00000  # 448.0
        low: tl.constexpr = 121 << 23  # 2**-6, the smallest normal
        shift: tl.constexpr = 141 << 23
        bias: tl.constexpr = ((127 - 7) << 23) - 0x7FFFF
        nan: tl.constexpr = 0x7F
    else:
        top: tl.constexpr = 0x43700000  # 240.0
        low: tl.constexpr = 120 << 23  # 2**-7
        shift: tl.constexpr = 140 << 23
        bias: tl.constexpr = ((127 - 8) << 23) - 0x7FFFF
        nan: tl.constexpr = 0x80
    is_nan = mag > 0x7F800000
    mag = tl.minimum(mag, top)
    small = mag.to(tl.float32, bitcast=True) + tl.full([1], shift, tl.uint32).to(
        tl.float32, bitcast=True)
    small = small.to(tl.uint32, bitcast=True) - shift
    big = (mag - bias + ((mag >> 20) & 1)) >> 20
    out = tl.where(mag < low, small, big)
    if MODE == 1:
        out = out | (sign >> 24)
        out = tl.where(is_nan, nan | (sign >> 24), out)
    else:
        out = tl.where(out == 0, 0, out | (sign >> 24))  # no negative zero
        out = tl.where(is_nan, nan, out)
    return out.to(tl.uint8)


@triton.jit
def _store_cache(ptr, x, scale, block, offset, h, d, s0, s1, s2, s3, mask, FP8: tl.constexpr,
                 SHUFFLE: tl.constexpr, X: tl.constexpr):
    """Writes tile x (f32) into one cache; ``block``/``offset`` int64 [TT, 1, 1].

    SHUFFLE 0: strides are block, offset, head. 1 (key): block, head, d // X, offset; 2 (value):
    block, head, offset // X, d.
    """
    if SHUFFLE == 0:
        p = ptr + (block * s0 + offset * s1 + h.to(tl.int64) * s2) + d
    elif SHUFFLE == 1:
        p = ptr + (block * s0 + h.to(tl.int64) * s1 + offset * s3) + ((d // X) * s2 + d % X)
    else:
        p = ptr + (block * s0 + h.to(tl.int64) * s1 + (offset // X) * s2 + offset % X) + d * s3
    if FP8 == 0:
        tl.store(p, x.to(ptr.dtype.element_ty), mask=mask)
    else:
        p8 = p.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(p8, _to_fp8(tl.div_rn(x, tl.zeros_like(x) + scale), FP8), mask=mask)


@triton.jit
def _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE: tl.constexpr, TT: tl.constexpr):
    """(block, offset, written) of the tile's tokens; rows past ``num_slots`` are not written."""
    slot = tl.load(slot_ptr + t, mask=t < tl.minimum(tokens, num_slots), other=-1).to(tl.int64)
    written = slot >= 0
    slot = tl.maximum(slot, 0)
    block = slot // BLOCK_SIZE
    return block, slot - block * BLOCK_SIZE, written


@triton.jit
def _scale(ptr, HAS: tl.constexpr):
    s = 1.0
    if HAS:
        s = tl.load(ptr).to(tl.float32)
    return s


@triton.jit
def _load(rows, d, mask):
    return tl.load(rows + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotated(
    x_ptr, w_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows,
    st, sh, cos_st, sin_st,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_W: tl.constexpr, ONE_PLUS: tl.constexpr, W_CODE: tl.constexpr,
    NORM_CAST: tl.constexpr, X_CODE: tl.constexpr, Y_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
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
            x = _load(rows, j, _mask(t, h, j, tokens, H, R, TT, HH, 2 * BH))
            x1, x2 = tl.split(tl.reshape(x, [TT, HH, BH, 2]))
        else:
            m = _mask(t, h, i, tokens, H, half, TT, HH, BH)
            x1 = _load(rows, i, m)
            x2 = _load(rows, i + half, m)
    if R < D:
        n = tl.arange(0, BT)[None, None, :]
        xt = _load(rows, n + R, _mask(t, h, n, tokens, H, D - R, TT, HH, BT))
    if R > 0:
        row = t.to(tl.int64)
        if TT > 1:
            row = tl.minimum(row, (tokens - 1).to(tl.int64))
        if HAS_POS:
            row = tl.load(pos_ptr + row).to(tl.int64)
            row = tl.minimum(tl.maximum(row, 0), (table_rows - 1).to(tl.int64))
        c1, c2 = _pair_table(cos_ptr, row, cos_st, R, BH, FULL, INTERLEAVED, ROPE_CODE, TT)
        s1, s2 = _pair_table(sin_ptr, row, sin_st, R, BH, FULL, INTERLEAVED, ROPE_CODE, TT)
    if NORM:
        if R == 0:
            ss = tl.sum(xt * xt, axis=2)
        else:
            ss = tl.sum(x1 * x1 + x2 * x2, axis=2)
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
                INTERLEAVED: tl.constexpr):
    """Stores a tile into a contiguous [tokens, H, D] tensor."""
    rows = ptr + (t.to(tl.int64) * H + h) * D
    dtype = ptr.dtype.element_ty
    if R > 0:
        if INTERLEAVED:
            j = tl.arange(0, 2 * BH)[None, None, :]
            x = tl.reshape(tl.join(x1, x2), [TT, HH, 2 * BH])
            tl.store(rows + j, x.to(dtype), mask=_mask(t, h, j, tokens, H, R, TT, HH, 2 * BH))
        else:
            i = tl.arange(0, BH)[None, None, :]
            m = _mask(t, h, i, tokens, H, R // 2, TT, HH, BH)
            tl.store(rows + i, x1.to(dtype), mask=m)
            tl.store(rows + i + R // 2, x2.to(dtype), mask=m)
    if R < D:
        n = tl.arange(0, BT)[None, None, :]
        tl.store(rows + n + R, xt.to(dtype), mask=_mask(t, h, n, tokens, H, D - R, TT, HH, BT))


@triton.jit
def _query_program(
    q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, eps, t, h, tokens, table_rows,
    st, sh, cos_st, sin_st,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_W: tl.constexpr, ONE_PLUS: tl.constexpr, W_CODE: tl.constexpr,
    NORM_CAST: tl.constexpr, X_CODE: tl.constexpr, Y_CODE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FULL: tl.constexpr, HAS_POS: tl.constexpr,
    ROPE_CODE: tl.constexpr, OUT_CODE: tl.constexpr,
):
    x1, x2, xt = _rotated(
        q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows, st, sh, cos_st,
        sin_st, H, D, R, TT, HH, BH, BT, NORM, HAS_W, ONE_PLUS, W_CODE, NORM_CAST, X_CODE,
        Y_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE, OUT_CODE)
    _store_rows(q_out_ptr, x1, x2, xt, t, h, tokens, H, D, R, TT, HH, BH, BT, INTERLEAVED)


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
    BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr, X: tl.constexpr,
):
    if WRITE:
        block, offset, written = _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE, TT)
        scale = _scale(scale_ptr, HAS_SCALE)
    x1, x2, xt = _rotated(
        k_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, eps, t, h, tokens, table_rows, st, sh, cos_st,
        sin_st, H, D, R, TT, HH, BH, BT, NORM, HAS_W, ONE_PLUS, W_CODE, NORM_CAST, X_CODE,
        Y_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE, OUT_CODE)
    if RETURN_K:
        _store_rows(k_out_ptr, x1, x2, xt, t, h, tokens, H, D, R, TT, HH, BH, BT, INTERLEAVED)
    if WRITE:
        if R > 0:
            if INTERLEAVED:
                j = tl.arange(0, 2 * BH)[None, None, :]
                x = tl.reshape(tl.join(x1, x2), [TT, HH, 2 * BH])
                m = _mask(t, h, j, tokens, H, R, TT, HH, 2 * BH) & written
                _store_cache(cache_ptr, x, scale, block, offset, h, j, s0, s1, s2, s3, m, FP8,
                             SHUFFLE, X)
            else:
                i = tl.arange(0, BH)[None, None, :]
                m = _mask(t, h, i, tokens, H, R // 2, TT, HH, BH) & written
                _store_cache(cache_ptr, x1, scale, block, offset, h, i, s0, s1, s2, s3, m, FP8,
                             SHUFFLE, X)
                _store_cache(cache_ptr, x2, scale, block, offset, h, i + R // 2, s0, s1, s2, s3,
                             m, FP8, SHUFFLE, X)
        if R < D:
            n = tl.arange(0, BT)[None, None, :]
            m = _mask(t, h, n, tokens, H, D - R, TT, HH, BT) & written
            _store_cache(cache_ptr, xt, scale, block, offset, h, n + R, s0, s1, s2, s3, m, FP8,
                         SHUFFLE, X)


@triton.jit
def _value_program(
    v_ptr, cache_ptr, slot_ptr, scale_ptr, t, h, tokens, num_slots, st, sh, s0, s1, s2, s3,
    H: tl.constexpr, DV: tl.constexpr, TT: tl.constexpr, HH: tl.constexpr, BV: tl.constexpr,
    FP8: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHUFFLE: tl.constexpr,
    X: tl.constexpr,
):
    block, offset, written = _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE, TT)
    scale = _scale(scale_ptr, HAS_SCALE)
    n = tl.arange(0, BV)[None, None, :]
    m = _mask(t, h, n, tokens, H, DV, TT, HH, BV)
    x = _load(v_ptr + t.to(tl.int64) * st + h.to(tl.int64) * sh, n, m)
    _store_cache(cache_ptr, x, scale, block, offset, h, n, s0, s1, s2, s3, m & written, FP8,
                 SHUFFLE, X)


@triton.jit(do_not_specialize=["tokens", "num_slots", "table_rows"])
def prologue_kernel(
    q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr,
    q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr,
    q_eps_ptr, k_eps_ptr, q_eps, k_eps,
    tokens, num_slots, table_rows,
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
):
    """One tile of TT tokens x HH heads of q, k or v per program.

    Grid: ``cdiv(tokens, TT) * GROUPS``; what each argument is: `prologue.constants`.
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
            eps = q_eps
            if HAS_Q_EPS:
                eps = tl.load(q_eps_ptr).to(tl.float32)
            _query_program(
                q_ptr, qw_ptr, cos_ptr, sin_ptr, pos_ptr, q_out_ptr, eps, t, g * HH + hh, tokens,
                table_rows, q_st, q_sh, cos_st, sin_st, HQ, D, R, TT, HH, BH, BT, NORM, HAS_QW,
                ONE_PLUS, QW_CODE, NORM_CAST, X_CODE, QY_CODE, INTERLEAVED, FULL, HAS_POS,
                ROPE_CODE, OUT_CODE)
    if (g >= QG) & (g < QG + KG):
        eps = k_eps
        if HAS_K_EPS:
            eps = tl.load(k_eps_ptr).to(tl.float32)
        _key_program(
            k_ptr, kw_ptr, cos_ptr, sin_ptr, pos_ptr, k_out_ptr, eps, t, (g - QG) * HH + hh,
            tokens, table_rows, k_st, k_sh, cos_st, sin_st, k_cache_ptr, slot_ptr, k_scale_ptr,
            num_slots, kc_s0, kc_s1, kc_s2, kc_s3, HK, D, R, TT, HH, BH, BT, NORM, HAS_KW,
            ONE_PLUS, KW_CODE, NORM_CAST, X_CODE, KY_CODE, INTERLEAVED, FULL, HAS_POS, ROPE_CODE,
            OUT_CODE, WRITE, RETURN_K, K_FP8, HAS_KS, BLOCK_SIZE, SHUFFLE, X)
    if WRITE:
        if g >= QG + KG:
            _value_program(
                v_ptr, v_cache_ptr, slot_ptr, v_scale_ptr, t, (g - QG - KG) * HH + hh, tokens,
                num_slots, v_st, v_sh, vc_s0, vc_s1, vc_s2, vc_s3, HK, DV, TT, HH, BV, V_FP8,
                HAS_VS, BLOCK_SIZE, 2 * SHUFFLE, X)
