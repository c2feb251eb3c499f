"""Paged attention on Triton: causal or not, ragged, windowed, for any NHD view of a cache.

The kernels are in ``paged_attention_kernel.py`` and are imported at the first launch; importing
this module needs no Triton.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from fusion.backends.triton import paged_attention_tiles as tiles
from fusion.backends.triton.chips import CHIPS
from fusion.kernel import Kernel, KernelCall
from fusion.requires import (
    Check,
    DtypeIn,
    KVLayout,
    OnDevice,
    Requires,
    SameDtype,
    UnitLastStride,
)
from fusion.target import Target

# A launch has a one-dimensional grid; HIP allows fewer than 2**32 threads in it, 512 a program.
MAX_PROGRAMS = 2**23 - 1
# Windows beyond this many keys do not cut anything off; keeps 32-bit arithmetic from wrapping.
_MAX_WINDOW = 2**30

_FP8 = {torch.float8_e4m3fn: "fn", torch.float8_e4m3fnuz: "fnuz"}


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


@functools.lru_cache(maxsize=64)
def native_fp8(dtype: torch.dtype, target: Target) -> bool:
    """True where the chip converts this 8-bit float itself (else its bytes are decoded)."""
    if target.vendor == "nvidia":
        return dtype == torch.float8_e4m3fn and (target.capability or 0) >= 89
    if target.vendor == "amd":
        if dtype == torch.float8_e4m3fnuz:
            return target.arch in ("gfx940", "gfx941", "gfx942")
        return target.arch in ("gfx950", "gfx1200", "gfx1201", "gfx1250")
    return False


def compute_dtype(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """Operand dtype of the matrix products: the query's for 8-bit caches and where both agree.

    A float16 query over a bfloat16 cache (or the other way round) computes in float32: neither
    format holds the other's values.
    """
    if interpreted():
        return torch.float32  # the interpreter has no bfloat16 arithmetic
    if cache in _FP8 or query == cache:
        return query
    return torch.float32


def overlaps(target: Target) -> bool:
    """True where a kernel can be launched before the one it depends on has ended (from sm_90)."""
    return target.vendor == "nvidia" and (target.capability or 0) >= 90 and not interpreted()


def _window(size: int) -> int:
    return -1 if size < 0 else min(size, _MAX_WINDOW)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    geometry: tiles.Tiles | None = None,
) -> torch.Tensor:
    """``fusion::paged_attention`` (see ``fusion/ops.py`` for the meaning) on the GPU.

    query [T, Hq, D] float32/bfloat16/float16; caches [blocks, block, Hk, D or Dv], any strides
    with a contiguous last dimension, in the query's dtype, another float dtype or e4m3fn/fnuz;
    block_table [B, max_blocks] int32/int64; seq_lens [B] and query_start_loc [B+1] int32/int64,
    all on the device and read there. Returns [T, Hq, Dv] in the query's dtype. No host
    synchronisation; the grid depends only on shapes and on ``max_query_len``/``max_seq_len``.

    ``kv_layout="SHUFFLE"``: K [blocks, Hk, D/x, block, x], V [blocks, Hk, block/x, Dv, x],
    x = 16 / itemsize. ``geometry`` overrides the selection rule (measurements and tests only).
    """
    target = Target.current()
    shuffled = kv_layout == "SHUFFLE"
    num_tokens, q_heads, head_dim = query.shape
    value_dim = value_cache.shape[3]
    batch = seq_lens.shape[0]
    if shuffled:
        kv_heads, page, x = key_cache.shape[1], key_cache.shape[3], key_cache.shape[4]
        # (block, token, head, d-group of K / d of V); V's "token" is a group of x tokens
        k_strides = [key_cache.stride(i) for i in (0, 3, 1, 2)]
        v_strides = [value_cache.stride(i) for i in (0, 2, 1, 3)]
    else:
        page, kv_heads, x = key_cache.shape[1], key_cache.shape[2], 0
        k_strides = [*key_cache.stride()[:3], 0]
        v_strides = [*value_cache.stride()[:3], 0]
    if num_tokens == 0 or batch == 0 or q_heads * value_dim == 0:
        return query.new_zeros(num_tokens, q_heads, value_dim)
    compute = compute_dtype(query.dtype, key_cache.dtype)
    geo = geometry or tiles.choose(
        batch=batch,
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        itemsize=compute.itemsize,
        wide=compute == torch.float32,
        target=target,
        shuffled=shuffled,
    )

    if query.stride(2) != 1:
        query = query.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    sinks = sinks if sinks is None else sinks.contiguous()
    if scale < 0:  # the kernel takes the row maximum before it scales
        query, scale = -query, -scale
    if key_cache.dtype not in _FP8:
        k_scale = v_scale = None  # only fp8 caches are scaled
    fp8 = ""
    if key_cache.dtype in _FP8 and (interpreted() or not native_fp8(key_cache.dtype, target)):
        fp8 = _FP8[key_cache.dtype]
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)

    from fusion.backends.triton.paged_attention_launch import launch

    return launch(
        geo, query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
        scale=float(scale), causal=bool(causal), window_left=_window(window_left),
        window_right=_window(window_right), softcap=float(softcap), sinks=sinks,
        k_scale=k_scale, v_scale=v_scale, k_strides=k_strides, v_strides=v_strides,
        kv_heads=kv_heads, page=page, x=x, fp8=fp8, compute=compute,
        precision="tf32x3" if target.vendor == "nvidia" else "ieee",
        out_dtype=torch.float32 if interpreted() else query.dtype,
        max_seq_len=max_seq_len, max_programs=MAX_PROGRAMS,
        overlap=overlaps(target),
    ).to(query.dtype)  # fmt: skip


def _head_dims(call: KernelCall) -> tuple[bool, object]:
    sizes = [
        s.shape[-1] if name == "query" or call.kv_layout == "NHD" else s.shape[3]
        for name in ("query", "value_cache")
        if (s := call.tensor(name)) is not None
    ]
    return all(n is not None and 16 <= n <= 512 for n in sizes), sizes


def _page(call: KernelCall) -> tuple[bool, object]:
    size = call.need("key_cache").shape[1 if call.kv_layout == "NHD" else 3]
    return size is not None and size >= 1, size


def _groups(call: KernelCall) -> tuple[bool, object]:
    q_heads = call.need("query").shape[1]
    kv_heads = call.need("key_cache").shape[2 if call.kv_layout == "NHD" else 1]
    ok = q_heads is not None and bool(kv_heads) and q_heads % (kv_heads or 1) == 0
    return ok, f"{q_heads} over {kv_heads}"


def _scales(call: KernelCall) -> tuple[bool, object]:
    have = {n: s for n in ("k_scale", "v_scale") if (s := call.tensor(n)) is not None}
    ok = all(size == 1 for s in have.values() for size in s.shape)
    return ok, ", ".join(f"{n} {s}" for n, s in have.items()) or "absent"


def _describe(call: KernelCall) -> Mapping[str, Any]:
    """Tile choice for the report, as far as the sizes are known (symbolic ones use hints)."""
    query, keys, values = (call.need(n) for n in ("query", "key_cache", "value_cache"))
    max_q, max_k = call.attributes.get("max_query_len"), call.attributes.get("max_seq_len")
    batch = call.need("seq_lens").hint(0)
    kv_heads = keys.shape[2 if call.kv_layout == "NHD" else 1]
    sizes = (query.shape[1], query.shape[2], values.shape[3], kv_heads, batch, max_q, max_k)
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or not kv_heads:
        return {"tiles": "chosen at run time: a size is symbolic"}
    heads, dim, dim_v, groups_of, requests, rows, length = known
    compute = compute_dtype(query.dtype, keys.dtype)
    geo = tiles.choose(
        batch=requests,
        kv_heads=groups_of,
        group=heads // groups_of,
        head_dim=dim,
        value_dim=dim_v,
        max_query_len=rows,
        max_seq_len=length,
        itemsize=compute.itemsize,
        wide=compute == torch.float32,
        target=call.target,
        shuffled=call.kv_layout == "SHUFFLE",
    )
    return {"tiles": str(geo), "launches": 2 if geo.splits > 1 else 1}


_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

KERNEL = Kernel(
    name="triton",
    op="paged_attention",
    fn=paged_attention,
    backend="triton",
    describe=_describe,
    requires=Requires(
        (
            *CHIPS,
            OnDevice(
                ("query", "key_cache", "value_cache", "block_table", "seq_lens",
                 "query_start_loc", "sinks", "k_scale", "v_scale"),
                "cuda",
            ),
            KVLayout(("NHD", "SHUFFLE")),
            DtypeIn(("query",), _FLOATS),
            DtypeIn(("key_cache", "value_cache"), (*_FLOATS, *_FP8), "gate.cache-dtype"),
            SameDtype(("key_cache", "value_cache"), "gate.cache-dtype"),
            DtypeIn(("block_table", "seq_lens", "query_start_loc"), _INTS),
            DtypeIn(("sinks", "k_scale", "v_scale"), _FLOATS),
            UnitLastStride(("key_cache", "value_cache")),
            Check("head sizes", "16 to 512, static", "gate.head-dim", _head_dims),
            Check("page size", "static", "gate.block-size", _page),
            Check("query heads per KV head", "a whole number, static", "gate.head-dim", _groups),
            Check("fp8 scales", "one number each", "gate.argument", _scales),
        )
    ),
)  # fmt: skip
