"""Pieces of the prologue kernel: rounding, masks, tables, fp8, cache addresses.

All tiles are ``[TT, HH, N]``: tokens, heads, elements. See `prologue_kernel`.
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

    The product is written as ``fma(x, y, 0)``: same value (but -0 becomes +0), and it cannot be
    contracted with the addition that follows. Without that the compiler turns f32 products, and
    bf16 ones too, which it recognises through the casts, into one fused rounding.
    """
    return _round(tl.fma(x, y, tl.zeros_like(x)), CODE)


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
        w = tl.load(ptr + d, mask=n < N, other=0.0).to(tl.float32)
    else:
        w = tl.load(ptr + d).to(tl.float32)
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
    """Bits of f32 x in e4m3fn (1, 3) or e4m3fnuz (2): saturated, to nearest even, NaN kept."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    if MODE == 3:
        native = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)  # saturates
        return tl.where(x != x, 0x7F | sign, native).to(tl.uint8)
    else:
        return _to_fp8_by_integers(x, sign, MODE)


@triton.jit
def _to_fp8_by_integers(x, sign, MODE: tl.constexpr):
    """Every chip, and the interpreter, gives the bytes of torch's cast.

    Normal results: add the rounding increment to the bit pattern and shift. Subnormal results:
    adding 2**k with the right k leaves the rounded mantissa in the low bits of the sum.
    """
    mag = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    if MODE == 1:
        top: tl.constexpr = 0x43E00000  # 448.0
        low: tl.constexpr = 121 << 23  # 2**-6, the smallest normal
        shift: tl.constexpr = 141 << 23
        bias: tl.constexpr = ((127 - 7) << 23) - 0x7FFFF
    else:
        top: tl.constexpr = 0x43700000  # 240.0
        low: tl.constexpr = 120 << 23  # 2**-7
        shift: tl.constexpr = 140 << 23
        bias: tl.constexpr = ((127 - 8) << 23) - 0x7FFFF
    is_nan = mag > 0x7F800000
    mag = tl.minimum(mag, top)
    step = tl.full([1], shift, tl.uint32).to(tl.float32, bitcast=True)
    small = (mag.to(tl.float32, bitcast=True) + step).to(tl.uint32, bitcast=True) - shift
    big = (mag - bias + ((mag >> 20) & 1)) >> 20
    out = tl.where(mag < low, small, big)
    if MODE == 1:
        out = tl.where(is_nan, 0x7F, out) | sign
    else:
        out = tl.where(out == 0, 0, out | sign)  # no negative zero
        out = tl.where(is_nan, 0x80, out)
    return out.to(tl.uint8)


@triton.jit
def _load(rows, d, mask, STREAM: tl.constexpr):
    """Activations as f32. STREAM 1 or 3: read once, they may leave L2 first."""
    if STREAM % 2 == 1:
        return tl.load(rows + d, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(rows + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(p, x, mask, STREAM: tl.constexpr):
    """Stores x in the pointer's dtype. STREAM 2 or 3: it need not stay in L2."""
    if STREAM >= 2:
        tl.store(p, x.to(p.dtype.element_ty), mask=mask, cache_modifier=".cs")
    else:
        tl.store(p, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _stored(x, scale, HAS_SCALE: tl.constexpr, FP8: tl.constexpr):
    """What a cache keeps of f32 x: the bits of ``x / scale`` in an fp8 format, else x itself."""
    if FP8 == 0:
        return x
    else:
        if HAS_SCALE:
            x = tl.div_rn(x, tl.zeros_like(x) + scale)
        return _to_fp8(x, FP8)


@triton.jit
def _store_cache(ptr, x, block, offset, h, d, s0, s1, s2, s3, mask, FP8: tl.constexpr,
                 SHUFFLE: tl.constexpr, X: tl.constexpr, STREAM: tl.constexpr):
    """Writes a tile of `_stored` values into one cache; ``block``/``offset`` int64 [TT, 1, 1].

    SHUFFLE 0: strides are block, offset, head. 1 (key): block, head, d // X, offset; 2 (value):
    block, head, offset // X, d.
    """
    if SHUFFLE == 0:
        p = ptr + (block * s0 + offset * s1 + h.to(tl.int64) * s2) + d
    elif SHUFFLE == 1:
        p = ptr + (block * s0 + h.to(tl.int64) * s1 + offset * s3) + ((d // X) * s2 + d % X)
    else:
        p = ptr + (block * s0 + h.to(tl.int64) * s1 + (offset // X) * s2 + offset % X) + d * s3
    if FP8 != 0:
        p = p.to(tl.pointer_type(tl.uint8), bitcast=True)
    _store(p, x, mask, STREAM)


@triton.jit
def _slots(slot_ptr, t, tokens, num_slots, BLOCK_SIZE: tl.constexpr, TT: tl.constexpr):
    """(block, offset, written) of the tile's tokens; rows past ``num_slots`` are not written."""
    slot = tl.load(slot_ptr + t, mask=(t < tokens) & (t < num_slots), other=-1).to(tl.int64)
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
