"""Merges the splits of paged attention; imported, with Triton, at the first launch."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "total_rows"])
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, starts_ptr, num_seqs, num_splits, total_rows,
    HQ: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_DV: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row] = sum_s 2**lse_s * part_s / sum_s 2**lse_s for ROWS (token, head) rows a program.

    part f32 [T*Hq, num_splits, DV], lse f32 [T*Hq, num_splits]; rows of no request yield zeros.
    The order of the sum is fixed, so the result has the same bits each time. All loads are
    independent of each other: this kernel is nothing but latency.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the end of the kernel before; nothing is read sooner
    first = tl.load(starts_ptr).to(tl.int32)
    last = tl.load(starts_ptr + num_seqs).to(tl.int32)
    is_row = row < total_rows
    at = row * num_splits
    lse = tl.load(lse_ptr + at[:, None] + s[None, :],
                  mask=is_row[:, None] & (s < num_splits)[None, :], other=NEG_INF)  # fmt: skip
    top = tl.max(lse, 1)
    top = tl.where(top == NEG_INF, 0.0, top)
    weight = tl.exp2(lse - top[:, None])
    total = tl.sum(weight, 1)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for s0 in tl.static_range(0, BLOCK_S, CHUNK):
        sc = s0 + tl.arange(0, CHUNK)
        mask = is_row[:, None] & (sc < num_splits)[None, :]
        if CHUNK < BLOCK_S:
            lse = tl.load(lse_ptr + at[:, None] + sc[None, :], mask=mask, other=NEG_INF)
            weight = tl.exp2(lse - top[:, None])
        part = tl.load(
            part_ptr + (at * DV)[:, None, None] + (sc * DV)[None, :, None] + dv[None, None, :],
            mask=mask[:, :, None] & (dv < DV)[None, None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(part * weight[:, :, None], 1)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    token = row // HQ
    mine = is_row & (token >= first) & (token < last)
    acc = tl.where(mine[:, None], acc, 0.0)
    tl.store(out_ptr + (row * DV)[:, None] + dv[None, :], acc,
             mask=is_row[:, None] & (dv < DV)[None, :])  # fmt: skip
