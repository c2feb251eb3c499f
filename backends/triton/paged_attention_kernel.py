"""Triton kernels of paged attention (imported only when one of them is about to run).

One program owns one (request, KV head, row block, split): all query rows that share the KV head,
``rows = q_len * G`` with ``G = Hq // Hk``, are packed token-major into row blocks, so K and V are
read once for the whole group. The keys of a program are cut into three stretches of whole tiles:
tiles that some row sees only partly on the left (window), tiles that every row sees completely
(no mask at all), and tiles that are partly seen on the right (causal edge, end of sequence).

The page ids of a tile are loaded one iteration ahead and carried in registers. Page id and then
K and V inside one iteration would be a chain of two dependent loads, on which the software
pipeline would spend its stages twice.

Softmax is the usual running one in base 2 (``exp2`` is one instruction); the log-sum-exp that
splits exchange is in base 2 too.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _decode(x, FP8: tl.constexpr, COMPUTE: tl.constexpr):
    """Cache elements as COMPUTE dtype (exact for 8-bit floats).

    FP8 "fn" and "fnuz": bytes decoded with integer arithmetic, for chips without that format.
    The four exponent bits move into a float16 exponent, whose bias is 15 instead of 7 (fn) or
    8 (fnuz): the missing power of two is multiplied in; subnormals come right by themselves.
    """
    if FP8 == "fn" or FP8 == "fnuz":
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32)
        if FP8 == "fn":
            value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value * 256.0)
        else:
            value = tl.where(bits == 0x80, float("nan"), value * 128.0)
        return value.to(COMPUTE)
    else:
        return x.to(COMPUTE)


@triton.jit
def _page_ids(table, n0, hi, PAGE: tl.constexpr, N: tl.constexpr, ONE: tl.constexpr):
    """Page ids of the keys n0 .. n0+N-1 (one scalar if a tile lies within a page).

    n0 is a multiple of N. Entries at or past the page of key ``hi - 1`` are not read: they may
    not exist.
    """
    n = tl.arange(0, N)
    if ONE:
        return tl.load(table + n0 // PAGE, mask=n0 < hi, other=0)
    elif N % PAGE == 0:
        return tl.load(table + n0 // PAGE + n // PAGE, mask=n < hi - n0, other=0)
    else:
        return tl.load(table + (n0 + n) // PAGE, mask=n < hi - n0, other=0)


@triton.jit
def _rows_at(
    ptr, pages, n0, s_block, s_token, s_x, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, ONE: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Pointers to rows n0 .. n0+N-1 of K or V, [N, BLOCK_D].

    KX, VX: elements that the shuffled layout keeps together (along D for K, along tokens for V),
    0 otherwise. Block offsets have 64 bits: a block may start past 2**31 elements; offsets within
    a block have 32 unless WIDE. What does not change from tile to tile comes first, so that the
    compiler moves it out of the loop.
    """
    n = tl.arange(0, N)
    d = tl.arange(0, BLOCK_D)
    if ONE or N % PAGE != 0:
        slot = n0 % PAGE + n
        if not ONE:
            slot = slot % PAGE
    else:
        slot = n % PAGE
    if WIDE:
        slot = slot.to(tl.int64)
    if VX > 0:
        rows = (slot // VX) * s_token + slot % VX
    else:
        rows = slot * s_token
    if KX > 0:
        cols = (d // KX) * s_x + d % KX
    elif VX > 0:
        cols = d * s_x
    else:
        cols = d
    block = pages.to(tl.int64) * s_block
    if ONE:
        return (ptr + block) + (rows[:, None] + cols[None, :])
    else:
        return (ptr + (rows[:, None] + cols[None, :])) + block[:, None]


@triton.jit
def _rows(
    at, n0, lo, hi, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr
):
    """The rows themselves; MASKED: zeros outside ``lo <= n < hi``, where nothing is read."""
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        n = tl.arange(0, N)
        inside = (n >= lo - n0) & (n < hi - n0)
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif D != BLOCK_D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _queries(
    q_ptr, start, q_len, row_first, head, q_st, q_sh, G: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows of a block, [BLOCK_M, BLOCK_D], of a request whose queries begin at `start`."""
    rows = row_first + tl.arange(0, BLOCK_M)
    token = rows // G
    d = tl.arange(0, BLOCK_D)
    at = (start + token).to(tl.int64) * q_st + (head * G + rows % G) * q_sh
    mask = (token < q_len)[:, None] & (d < D)[None, :]
    return tl.load(q_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _soften(
    qk, m, den, n0, lo, hi, q_pos, qk_scale, cap_scale, softcap, window_left, window_right,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Running softmax in base 2: probabilities [M, N], factor for what was summed so far, m, den.

    m is the running maximum of the scores, den the running sum, both f32 [M].
    """
    if SOFTCAP:
        # cap * tanh(x), tanh(x) = 1 - 2 / (1 + e**2x): right at both infinities
        qk = (1.0 - 2.0 / (1.0 + tl.exp2(qk * cap_scale))) * softcap
    if MASKED:
        n = n0 + tl.arange(0, N)
        see = ((n >= lo) & (n < hi))[None, :]
        if CAUSAL:
            see = see & (n[None, :] <= q_pos[:, None])
        if LEFT:
            see = see & (n[None, :] >= q_pos[:, None] - window_left)
        if RIGHT:
            see = see & (n[None, :] <= q_pos[:, None] + window_right)
        if not SOFTCAP:
            qk = qk * qk_scale
        qk = tl.where(see, qk, NEG_INF)
        m_new = tl.maximum(m, tl.max(qk, 1))
        # a row that has seen nothing yet keeps m = -inf; -inf - -inf would be NaN
        m_safe = tl.where(m_new == NEG_INF, 0.0, m_new)
        p = tl.exp2(qk - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
    else:
        if SOFTCAP:
            m_new = tl.maximum(m, tl.max(qk, 1))
            p = tl.exp2(qk - m_new[:, None])
        else:
            # qk_scale >= 0, so the maximum may be taken first and the scale fused with the minus
            m_new = tl.maximum(m, tl.max(qk, 1) * qk_scale)
            p = tl.exp2(qk * qk_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
    return p, alpha, m_new, den * alpha + tl.sum(p, 1)


@triton.jit
def _attend(
    q, acc, m, den, pages, n0, lo, hi, q_pos, k_ptr, v_ptr,
    k_sb, k_st, k_sx, v_sb, v_st, v_sx, qk_scale, cap_scale, softcap, window_left, window_right,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ONE: tl.constexpr,
    X: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, FP8: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: scores, running softmax, weighted values.

    q [M, BLOCK_D], acc [M, BLOCK_DV] f32. MASKED tiles load nothing outside ``lo <= n < hi``: V
    too, since a zero probability times a NaN of a page tail would still be NaN.
    """
    k_at = _rows_at(k_ptr, pages, n0, k_sb, k_st, k_sx, BLOCK_D, PAGE, BLOCK_N, ONE, X, 0, WIDE)
    k = _rows(k_at, n0, lo, hi, MASKED, D, BLOCK_D, BLOCK_N)
    qk = tl.dot(q, tl.trans(_decode(k, FP8, COMPUTE)), input_precision=PRECISION)
    p, alpha, m, den = _soften(
        qk, m, den, n0, lo, hi, q_pos, qk_scale, cap_scale, softcap, window_left, window_right,
        MASKED, CAUSAL, LEFT, RIGHT, SOFTCAP, BLOCK_N,
    )  # fmt: skip
    acc = acc * alpha[:, None]
    if PACKED:
        v_at = k_at + D
    else:
        v_at = _rows_at(v_ptr, pages, n0, v_sb, v_st, v_sx, BLOCK_DV, PAGE, BLOCK_N, ONE, 0, X,
                        WIDE)  # fmt: skip
    v = _rows(v_at, n0, lo, hi, MASKED, DV, BLOCK_DV, BLOCK_N)
    acc = tl.dot(p.to(COMPUTE), _decode(v, FP8, COMPUTE), acc, input_precision=PRECISION)
    return acc, m, den


@triton.jit(do_not_specialize=[
    "total_tokens", "num_row_blocks", "num_splits", "window_left", "window_right", "first_seq",
    "num_seqs", "table_width", "max_len",
])  # fmt: skip
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, seq_lens_ptr, starts_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr,
    first_seq, num_seqs, total_tokens, num_row_blocks, num_splits,
    scale, softcap, window_left, window_right,
    q_st, q_sh, k_sb, k_st, k_sh, k_sx, v_sb, v_st, v_sh, v_sx, table_s0, table_width, max_len,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, SPLIT: tl.constexpr,
    X: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, FP8: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one row block over one split of the keys.

    Without SPLIT, out is [T, Hq, DV] in the query's dtype; with it, out is f32
    [T, Hq, num_splits, DV] (normalised within the split) and lse f32 [T, Hq, num_splits], base 2,
    -inf where the split holds no key of that row (its part of out is then zero).
    """
    pid = tl.program_id(0)
    row_block = pid % num_row_blocks
    rest = pid // num_row_blocks
    head = rest % HK
    rest = rest // HK
    split = rest % num_splits
    seq = first_seq + rest // num_splits

    ONE: tl.constexpr = PAGE % BLOCK_N == 0
    table = table_ptr + seq.to(tl.int64) * table_s0
    if OVERLAP:
        # Launched before the end of the kernel before, whose results are read from here on.
        tl.extra.cuda.gdc_wait()
    # The first page ids need not wait for the lengths where a guess comes true: that this request
    # is the longest one. Larger tiles have no registers to keep them.
    GUESS: tl.constexpr = not LEFT and BLOCK_M <= 64
    likely = 0
    if GUESS:
        if SPLIT:
            likely = split * ((max_len + BLOCK_N - 1) // BLOCK_N) // num_splits * BLOCK_N
        pages = _page_ids(table, likely, table_width * PAGE, PAGE, BLOCK_N, ONE)
    # Likewise the queries, for the case that all requests have equally many: K and V are asked for
    # only once the queries are there, and those would be asked for once their place is known.
    row_first = row_block * BLOCK_M
    GUESS_Q: tl.constexpr = GUESS and not SPLIT
    likely_len = 0
    if GUESS_Q:
        likely_len = total_tokens // num_seqs
        q = _queries(q_ptr, seq * likely_len, likely_len, row_first, head, q_st, q_sh, G, D,
                     BLOCK_M, BLOCK_D)  # fmt: skip
    start = tl.load(starts_ptr + seq).to(tl.int32)
    q_len = tl.load(starts_ptr + seq + 1).to(tl.int32) - start
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    if not SPLIT:
        # Rows that belong to no request yield zeros; normally there are none. Behind the loads that
        # everything waits for: a load behind this loop could not start before its end.
        first = tl.load(starts_ptr).to(tl.int32)
        last = tl.load(starts_ptr + num_seqs).to(tl.int32)
        row_size: tl.constexpr = HK * G * DV
        for i in range(pid, first + total_tokens - last, tl.num_programs(0)):
            row = tl.where(i < first, i, last - first + i).to(tl.int64)
            for c in range(0, row_size, 1024):
                at = c + tl.arange(0, 1024)
                zero = tl.zeros([1024], out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * row_size + at, zero, mask=at < row_size)
    if row_first >= q_len * G:
        return

    rows = row_first + tl.arange(0, BLOCK_M)
    token = rows // G
    q_head = head * G + rows % G
    row_ok = token < q_len
    q_pos = token + seq_len - q_len
    pos_min = row_first // G + seq_len - q_len
    pos_max = tl.minimum((row_first + BLOCK_M - 1) // G, q_len - 1) + seq_len - q_len

    # lo <= n < hi: keys that some row sees; full_lo <= n < full_hi: keys that every row sees
    lo = 0
    full_lo = 0
    hi = tl.minimum(seq_len, table_width * PAGE)
    full_hi = hi
    if CAUSAL:
        hi = tl.minimum(hi, pos_max + 1)
        full_hi = tl.minimum(full_hi, pos_min + 1)
    if RIGHT:
        hi = tl.minimum(hi, pos_max + window_right + 1)
        full_hi = tl.minimum(full_hi, pos_min + window_right + 1)
    if LEFT:
        lo = tl.maximum(lo, pos_min - window_left)
        full_lo = tl.maximum(full_lo, pos_max - window_left)
    hi = tl.maximum(hi, 0)
    full_hi = tl.maximum(full_hi, 0) // BLOCK_N * BLOCK_N
    full_lo = (full_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N

    begin = lo // BLOCK_N * BLOCK_N
    tiles = (tl.maximum(hi - begin, 0) + BLOCK_N - 1) // BLOCK_N
    end = tl.minimum(hi, begin + (split + 1) * tiles // num_splits * BLOCK_N)
    begin = begin + split * tiles // num_splits * BLOCK_N
    full_begin = tl.minimum(tl.maximum(full_lo, begin), end)
    full_end = tl.maximum(tl.minimum(full_hi, end), full_begin)

    if not GUESS:
        pages = _page_ids(table, begin, end, PAGE, BLOCK_N, ONE)
    elif SPLIT:  # noqa: SIM102 - one is known when compiling, the other is not
        if begin != likely:
            pages = _page_ids(table, begin, end, PAGE, BLOCK_N, ONE)

    qk_scale = scale
    if K_SCALE:
        qk_scale = qk_scale * tl.load(k_scale_ptr).to(tl.float32)
    if not GUESS_Q or (start != seq * likely_len) | (q_len != likely_len):
        q = _queries(q_ptr, start, q_len, row_first, head, q_st, q_sh, G, D, BLOCK_M, BLOCK_D)
    q = q.to(COMPUTE)
    if K_SCALE:
        # The sign of the scale goes into q (exact), so that scaling keeps the order of the scores;
        # the host did so for ``scale``. Arithmetic on q makes it a register operand of the matrix
        # product instead of a shared-memory one, which costs registers: only where needed.
        q = tl.where(qk_scale < 0, -q, q)
        qk_scale = tl.abs(qk_scale)
    cap_scale = qk_scale
    if SOFTCAP:
        cap_scale = qk_scale / softcap * (2.0 * LOG2E)
    qk_scale = qk_scale * LOG2E

    k_base = k_ptr + head.to(tl.int64) * k_sh
    v_base = v_ptr + head.to(tl.int64) * v_sh
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # noqa: SIM102 - one is known when compiling, the other is not
        if split == 0:  # the sink enters the denominator once
            sink = tl.load(sinks_ptr + q_head, mask=row_ok, other=0.0).to(tl.float32)
            m = sink * LOG2E
            den += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    if LEFT:
        for n0 in tl.range(begin, full_begin, BLOCK_N, num_stages=1):
            here = pages
            pages = _page_ids(table, n0 + BLOCK_N, end, PAGE, BLOCK_N, ONE)
            acc, m, den = _attend(
                q, acc, m, den, here, n0, lo, end, q_pos, k_base, v_base,
                k_sb, k_st, k_sx, v_sb, v_st, v_sx, qk_scale, cap_scale, softcap * LOG2E,
                window_left, window_right, True, CAUSAL, LEFT, RIGHT, SOFTCAP, PAGE, D, DV,
                BLOCK_N, BLOCK_D, BLOCK_DV, ONE, X, WIDE, PACKED, FP8, COMPUTE,
            PRECISION,
            )  # fmt: skip
    for n0 in tl.range(full_begin, full_end, BLOCK_N, num_stages=STAGES):
        here = pages
        pages = _page_ids(table, n0 + BLOCK_N, end, PAGE, BLOCK_N, ONE)
        acc, m, den = _attend(
            q, acc, m, den, here, n0, lo, end, q_pos, k_base, v_base,
            k_sb, k_st, k_sx, v_sb, v_st, v_sx, qk_scale, cap_scale, softcap * LOG2E,
            window_left, window_right, False, CAUSAL, LEFT, RIGHT, SOFTCAP, PAGE, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_DV, ONE, X, WIDE, PACKED, FP8, COMPUTE,
            PRECISION,
        )  # fmt: skip
    for n0 in tl.range(full_end, end, BLOCK_N, num_stages=1):
        here = pages
        pages = _page_ids(table, n0 + BLOCK_N, end, PAGE, BLOCK_N, ONE)
        acc, m, den = _attend(
            q, acc, m, den, here, n0, lo, end, q_pos, k_base, v_base,
            k_sb, k_st, k_sx, v_sb, v_st, v_sx, qk_scale, cap_scale, softcap * LOG2E,
            window_left, window_right, True, CAUSAL, LEFT, RIGHT, SOFTCAP, PAGE, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_DV, ONE, X, WIDE, PACKED, FP8, COMPUTE,
            PRECISION,
        )  # fmt: skip

    if BLOCK_M * BLOCK_N > 128 * 64:
        # Row numbers anew, from a load that the compiler must not merge with the first one: kept
        # alive across the loop they do not fit beside the largest tiles.
        again = tl.load(starts_ptr + seq, volatile=True).to(tl.int32)
        q_len = tl.load(starts_ptr + seq + 1, volatile=True).to(tl.int32) - again
        rows = row_first + (again - start) + tl.arange(0, BLOCK_M)
        token = rows // G
        q_head = head * G + rows % G
        row_ok = token < q_len

    if OVERLAP and SPLIT:
        # The merge may be launched now; it waits for the end of this kernel before it reads. Any
        # sooner, and its programs get in the way of this loop.
        tl.extra.cuda.gdc_launch_dependents()
    # den == 0: the row saw no key (and no sink), acc is zero; a NaN stays a NaN
    empty = den == 0.0
    den = tl.where(empty, 1.0, den)
    norm = 1.0 / den
    if V_SCALE:
        norm = norm * tl.load(v_scale_ptr).to(tl.float32)
    out = acc * norm[:, None]
    dv = tl.arange(0, BLOCK_DV)
    row = (start + token).to(tl.int64) * (HK * G) + q_head
    keep = row_ok[:, None] & (dv < DV)[None, :]
    if SPLIT:
        row = row * num_splits + split
        lse = tl.where(empty, NEG_INF, m + tl.log2(den))
        tl.store(lse_ptr + row, lse, mask=row_ok)
    tl.store(out_ptr + row[:, None] * DV + dv[None, :], out, mask=keep)
