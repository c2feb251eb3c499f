"""Launches the kernels of paged attention; imported, with Triton, at the first launch."""

from __future__ import annotations

import torch
import triton.language as tl

from fusion.backends.triton import paged_attention_tiles as tiles
from fusion.backends.triton.paged_attention_kernel import paged_attention_kernel
from fusion.backends.triton.paged_attention_merge import merge_kernel

COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(
    geo: tiles.Tiles,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_strides: list[int],
    v_strides: list[int],
    kv_heads: int,
    page: int,
    x: int,
    fp8: str,
    compute: torch.dtype,
    precision: str,
    out_dtype: torch.dtype,
    max_seq_len: int,
    max_programs: int,
    overlap: bool,
) -> torch.Tensor:
    """Allocate the output (and the partial results of the splits) and launch one or two kernels.

    ``k_strides``/``v_strides``: elements between blocks, tokens, heads, and (shuffled layout
    only) groups of the head dimension. ``overlap``: launch each kernel while the one before it
    still ends (programmatic dependent launch). Other arguments as in ``paged_attention``.
    """
    # Only a guess, so it is kept where 32-bit arithmetic of the kernel cannot wrap.
    longest = max(0, min(max_seq_len, block_table.shape[1] * page, 2**30 // geo.splits))
    overlapped = {"launch_pdl": True} if overlap else {}
    tokens, q_heads, head_dim = query.shape
    value_dim = value_cache.shape[3]
    batch = seq_lens.shape[0]
    splits = geo.splits
    out = query.new_empty((tokens, q_heads, value_dim), dtype=out_dtype)
    if splits > 1:
        part = query.new_empty((tokens, q_heads, splits, value_dim), dtype=torch.float32)
        lse = query.new_empty((tokens, q_heads, splits), dtype=torch.float32)
    else:
        part, lse = out, out

    wide = max(abs(k_strides[1]), abs(v_strides[1])) * page >= 2**31
    # One head's V right behind its K, as in a packed cache: one address serves both.
    packed = (
        x == 0
        and head_dim == value_dim
        and k_strides == v_strides
        and value_cache.data_ptr() - key_cache.data_ptr() == head_dim * key_cache.element_size()
    )
    per_seq = geo.row_blocks * kv_heads * splits
    step = max(1, max_programs // per_seq)
    for first in range(0, batch, step):
        programs = per_seq * min(step, batch - first)
        paged_attention_kernel[(programs,)](
            query, key_cache, value_cache, part, lse, block_table, seq_lens, query_start_loc,
            sinks, k_scale, v_scale, first, batch, tokens, geo.row_blocks, splits,
            scale, softcap, window_left, window_right,
            query.stride(0), query.stride(1), *k_strides, *v_strides,
            block_table.stride(0), block_table.shape[1],
            longest,
            HK=kv_heads, G=q_heads // kv_heads, D=head_dim, DV=value_dim, PAGE=page,
            CAUSAL=causal, LEFT=window_left >= 0, RIGHT=window_right >= 0, SOFTCAP=softcap > 0,
            SINKS=sinks is not None, K_SCALE=k_scale is not None, V_SCALE=v_scale is not None,
            SPLIT=splits > 1, X=x, WIDE=wide, PACKED=packed, FP8=fp8, COMPUTE=COMPUTE[compute],
            PRECISION=precision,
            BLOCK_M=geo.rows, BLOCK_N=geo.keys, BLOCK_D=geo.block_d, BLOCK_DV=geo.block_dv,
            STAGES=geo.stages, OVERLAP=overlap, num_warps=geo.warps, num_stages=geo.stages,
            **overlapped,
        )  # fmt: skip
    if splits > 1:
        total_rows = tokens * q_heads
        merge = tiles.merge_tiles(splits, geo.block_dv)
        merge_kernel[(-(-total_rows // merge.rows),)](
            part, lse, out, query_start_loc, batch, splits, total_rows,
            HQ=q_heads, DV=value_dim, ROWS=merge.rows, BLOCK_S=merge.block_s, CHUNK=merge.chunk,
            BLOCK_DV=geo.block_dv, OVERLAP=overlap, num_warps=merge.warps, **overlapped,
        )  # fmt: skip
    return out
