"""Paged attention: ``unified_attention`` where it is causal, ``flash_attn_with_kvcache`` where not.

Both are Triton kernels of AITER's, and each fits half of the operation: the first asserts
``causal``, the second has no ragged queries, no softcap, no sinks and no fp8 cache under a 16-bit
query. A window ``(w - 1, 0)`` makes the second one causal whatever ``causal`` says; here the right
bound is passed as it stands in the call, so -1 stays unbounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.backends.aiter import contract, gate, numerics, operands, runtime
from fusion.kernel import Kernel, KernelCall
from fusion.requires import (
    Absent,
    AttributeIn,
    Check,
    Condition,
    DtypeIn,
    Requires,
    UnitLastStride,
)

TILE = 64
"""Keys that the 2-D causal kernel takes at a time (32 for heads of 256 and more)."""

TWO_DIMENSIONAL = 512
"""Up to this ``max_seqlen_k`` AITER takes its 2-D kernel; the length itself is read on the device.

Its 3-D kernel takes one page a tile and then masks no load, so that whatever lies behind the last
key of a page enters the product as ``0 * x``; a NaN there would come out.
"""


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
) -> Tensor:
    """``fusion::paged_attention`` through AITER, for a call that :data:`REQUIRES` accepts.

    Returns:
        ``[T, Hq, D]`` in the query's dtype; rows of no sequence and rows that see no key are zeros
        (causal: as long as no sequence is shorter than its queries).
    """
    out = query.new_zeros(query.shape)
    if 0 in (*query.shape, seq_lens.shape[0], block_table.shape[1], key_cache.shape[0]):
        return out
    starts = query_start_loc.to(torch.int32).contiguous()
    lengths = seq_lens.to(torch.int32).contiguous()
    left, right = max(int(window_left), -1), max(int(window_right), -1)
    if left >= 0:
        query_lens = (starts[1:] - starts[:-1]).to(torch.int64)
        page = key_cache.shape[1]
        block_table, lengths = operands.live_pages(block_table, lengths, query_lens, left, page)
    if not causal:
        return _non_causal(
            query, key_cache, value_cache, block_table, lengths, starts, max_query_len, scale,
            (left, right),
        )  # fmt: skip
    page = key_cache.shape[1]
    fp8 = key_cache.dtype in gate.FP8
    call = runtime.resolve(contract.UNIFIED)
    call(
        q=query if query.stride(2) == 1 else query.contiguous(),
        k=key_cache,
        v=value_cache,
        out=out,
        cu_seqlens_q=starts,
        # With 1, AITER takes row i for sequence i, wrong where some sequence has no new token.
        max_seqlen_q=max(int(max_query_len), 2),
        seqused_k=lengths,
        max_seqlen_k=min(int(max_seq_len), TWO_DIMENSIONAL),
        softmax_scale=float(scale),
        causal=True,
        window_size=(left, 0) if left >= 0 else (-1, -1),
        block_table=operands.readable_table(block_table, max(TILE // page, 1)),
        softcap=float(softcap),
        q_descale=None,
        # One alone would be ignored by some releases: both or none.
        k_descale=_descale(k_scale, query) if fp8 else None,
        v_descale=_descale(v_scale, query) if fp8 else None,
        sinks=None if sinks is None else sinks.contiguous(),
    )
    return out


def _descale(scale: Tensor | None, like: Tensor) -> Tensor:
    if scale is None:
        return torch.ones(1, dtype=torch.float32, device=like.device)
    return scale.to(torch.float32).reshape(1)


def _non_causal(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    rows: int,
    scale: float,
    window: tuple[int, int],
) -> Tensor:
    """Queries as ``[B, rows, Hq, D]``, aligned to the *end* of each sequence's rows.

    AITER takes row r of a sequence for position ``seq_len - rows + r``. Aligned to the end, that is
    the position of every query however many of them a sequence has, so a ragged batch, which
    cannot be told from its shapes, is right as well.
    """
    tokens, batch = query.shape[0], lengths.shape[0]
    begin, end = starts[:-1].to(torch.int64), starts[1:].to(torch.int64)
    row = torch.arange(rows, device=query.device)
    source = (end[:, None] - rows + row).clamp(0, tokens - 1)
    call = runtime.resolve(contract.FLASH)
    made = call(
        q=query[source],
        k_cache=key_cache,
        v_cache=value_cache,
        cache_seqlens=lengths,
        softmax_scale=float(scale),
        causal=False,  # the default is True
        window_size=window,
        page_table=operands.readable_table(block_table, 1),
    )
    token = torch.arange(tokens, device=query.device)
    sequence = torch.searchsorted(end, token, right=True).clamp(max=batch - 1)
    at = token - end[sequence] + rows
    length = lengths[sequence].to(torch.int64)
    position = length + at - rows
    first = (position - window[0]).clamp(min=0) if window[0] >= 0 else torch.zeros_like(position)
    last = torch.minimum(position + window[1], length - 1) if window[1] >= 0 else length - 1
    inside = (token >= begin[0]) & (token < end[-1]) & (at >= 0) & (first <= last)
    picked = made[sequence, at.clamp(0, rows - 1)]
    return torch.where(inside[:, None, None], picked, 0.0).to(query.dtype)


# --- requirements -------------------------------------------------------------------------------


def _is_causal(call: KernelCall) -> bool:
    return bool(call.attributes.get("causal"))


def _is_non_causal(call: KernelCall) -> bool:
    return not _is_causal(call)


def _head_size(call: KernelCall) -> tuple[bool, object]:
    dim = call.need("query").shape[2]
    top = 511 if _is_causal(call) else 256
    return dim is not None and 16 <= dim <= top, dim


def _head_dims(call: KernelCall) -> tuple[bool, object]:
    have = {n: call.need(n).shape[-1] for n in ("query", "key_cache", "value_cache")}
    same = len(set(have.values())) == 1 and None not in have.values()
    return same, ", ".join(f"{n} {d}" for n, d in have.items())


def _page(call: KernelCall) -> tuple[bool, object, str]:
    page, dim = call.need("key_cache").shape[1], call.need("query").shape[2]
    if page is None or page < 1 or dim is None:
        return False, page, "the page size is not known"
    if _is_non_causal(call):
        return True, page, ""
    tiles = (TILE,) if dim < 256 else (TILE, TILE // 2)
    message = "a page as large as AITER's tile is loaded without a mask past the last key"
    return page & (page - 1) == 0 and page not in tiles, f"{page} (head size {dim})", message


def _kv_dtype(call: KernelCall) -> tuple[bool, object]:
    query = call.need("query").dtype
    have = {n: call.need(n).dtype for n in ("key_cache", "value_cache")}
    fp8 = gate.FP8 if _is_causal(call) else ()
    ok = len(set(have.values())) == 1 and all(d in (query, *fp8) for d in have.values())
    return ok, ", ".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in have.items())


def _uniform(call: KernelCall) -> tuple[bool, object]:
    tokens, batch = call.need("query").shape[0], call.need("seq_lens").shape[0]
    rows = call.attributes.get("max_query_len")
    if tokens is None or batch is None or not isinstance(rows, int):
        return True, "symbolic"
    return tokens == batch * rows, f"{tokens} tokens for {batch} sequences of up to {rows}"


def _scale_device(call: KernelCall) -> tuple[bool, object]:
    place = call.need("query").device
    have = {n: s.device for n in ("k_scale", "v_scale") if (s := call.tensor(n)) is not None}
    ok = not gate.is_fp8(call) or all(d == place for d in have.values())
    return ok, ", ".join(f"{n} on {d}" for n, d in have.items()) or "absent (1)"


def _sinks(call: KernelCall) -> tuple[bool, object]:
    spec = call.tensor("sinks")
    return spec is None or spec.shape == (call.need("query").shape[1],), spec or "absent"


def _causal(condition: Condition) -> gate.When:
    return gate.When("causal", _is_causal, condition)


def _non(condition: Condition) -> gate.When:
    return gate.When("not causal", _is_non_causal, condition)


_INTS = (torch.int32, torch.int64)

_RANKS = {"query": 3, "block_table": 2, "seq_lens": 1, "query_start_loc": 1}

REQUIRES = Requires(
    (
        *gate.base(contract.UNIFIED)[:3],
        _causal(gate.Release(contract.UNIFIED.first, contract.UNIFIED.name)),
        _causal(gate.CallableFits(contract.UNIFIED)),
        _non(gate.Release(contract.FLASH.first, contract.FLASH.name)),
        _non(gate.CallableFits(contract.FLASH)),
        *gate.guarded(
            _RANKS,
            (
                AttributeIn("causal", (True, False)),
                Check("head size", "16 to 511 (not causal: 256)", "gate.head-dim", _head_size),
                Check("one head size for Q, K and V", "Dv == D", "gate.head-dim", _head_dims),
                gate.heads_divide(),
                DtypeIn(("query",), (torch.bfloat16, torch.float16)),
                Check(
                    "cache dtype", "the dtype of q (causal: or fp8)", "gate.cache-dtype", _kv_dtype
                ),
                gate.fp8_of_chip(),
                UnitLastStride(("key_cache", "value_cache")),
                Check(
                    "block size", "a power of two that is not the tile", "gate.block-size", _page
                ),
                DtypeIn(("block_table", "seq_lens", "query_start_loc"), _INTS),
                gate.scale_shapes(),
                Check("fp8 scales", "on the device of q", "gate.scale-location", _scale_device),
                _causal(Check("sinks", "[Hq]", "gate.argument", _sinks)),
                _non(Absent("sinks")),
                _non(AttributeIn("softcap", (0.0, 0, None))),
                _non(Check("query lengths", "one length for all", "gate.argument", _uniform)),
                numerics.Rounding(numerics.attention_differences),
            ),
        ),
    )
)


def describe(call: KernelCall) -> Mapping[str, Any]:
    """What the call would be, for the report."""
    function = contract.UNIFIED if _is_causal(call) else contract.FLASH
    return {"function": function.name, "rounding": numerics.attention_differences(call)}


KERNEL = Kernel(
    name="aiter",
    op="paged_attention",
    fn=paged_attention,
    requires=REQUIRES,
    backend="aiter",
    describe=describe,
)
