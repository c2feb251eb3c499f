"""QK-norm + rope + cache write on ``fused_qk_norm_rope_cache_pts_quant_shuffle`` (HIP).

One launch: RMSNorm of q and k, rotation, and the write of k and v with per-tensor scales. The
function wants q, k and v as one packed tensor, cos and sin as one table in the dtype of q, and its
scales in host memory; wrong shapes end the process, and wrong dtypes, short slot mappings and
misaligned widths are not looked at by AITER at all. All of that is in :data:`REQUIRES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from fusion.backends.aiter import contract, gate, numerics, operands, runtime, scales
from fusion.kernel import Dim, Kernel, KernelCall, TensorSpec
from fusion.requires import (
    Absent,
    AttributeIn,
    Check,
    DtypeIn,
    Outcome,
    Requires,
    SameDtype,
    SizeIn,
    UnitLastStride,
)

HEAD_SIZES = (64, 128, 256)
LANES = 32
"""Lanes that share one head; each loads and stores ``D / 32`` elements at a time."""

_QKV = ("query", "key", "value")
_WEIGHTS = ("q_weight", "k_weight")
_MAX_INT32 = 2**31 - 1


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
    # The interleaved kernel loads half a vector beyond the sine of the last pair.
    slack = dim // LANES if rope_style == "interleaved" else 0
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


def _weight(weight: Tensor | None, like: Tensor, mode: str) -> Tensor:
    if weight is None:
        return like.new_ones(like.shape[-1])
    # With "late" the graph, too, adds 1 in the weight's dtype; other casts are refused.
    return 1.0 + weight if mode == "1+w" else weight


# --- requirements -------------------------------------------------------------------------------


def _scaled(a: Dim, b: Dim) -> Dim:
    return None if a is None or b is None else a * b


def _packed(call: KernelCall) -> tuple[bool, object, str]:
    q, k, v = (call.need(n) for n in _QKV)
    dim, heads = q.shape[2], (q.shape[1], k.shape[1], v.shape[1])
    message = "q, k and v are not the columns of one packed tensor"
    if dim is None or None in heads:
        return False, "symbolic sizes", message
    width = sum(h or 0 for h in heads) * dim
    rows = [s.stride[0] for s in (q, k, v)]
    single = q.shape[0] == 1
    inner = all(_fits(s, (None, dim, 1)) for s in (q, k, v))
    together = all(r == width for r in rows)
    bases = [s.base for s in (q, k, v)]
    if None in bases:  # unknown storage: only columns of one wide tensor have this row stride
        return inner and together, f"row strides {rows} for a width of {width}", message
    if not (bases[0] == bases[1] == bases[2]):
        return False, "tensors of their own", message
    start = q.storage_offset
    offsets = [s.storage_offset for s in (q, k, v)]
    want = None
    if start is not None:
        want = [
            start,
            start + (heads[0] or 0) * dim,
            start + ((heads[0] or 0) + (heads[1] or 0)) * dim,
        ]
    ok = inner and (together or single) and offsets == want
    return ok, f"views of one tensor, row strides {rows}, offsets {offsets}", message


def _fits(spec: TensorSpec, stride: tuple[Dim, ...]) -> bool:
    return all(
        n == 1 or need is None or have == need
        for n, have, need in zip(spec.shape, spec.stride, stride, strict=True)
    )


def _lane_width(call: KernelCall) -> int:
    dim = call.need("query").shape[2]
    return max((dim or 0) // LANES, 1)


def _aligned(call: KernelCall) -> tuple[bool, object]:
    width = _lane_width(call)
    have = {}
    for name in _QKV[:1]:
        have[name] = call.need(name).storage_offset
    for name, spec in gate.caches(call):
        have[f"{name} offset"] = spec.storage_offset
        for dim in range(3):
            if spec.shape[dim] != 1:
                have[f"{name} stride {dim}"] = spec.stride[dim]
    bad = {n: v for n, v in have.items() if v is None or v % width or (v <= 0 and "stride" in n)}
    return not bad, ", ".join(f"{n} {v}" for n, v in (bad or have).items())


def _rotary(call: KernelCall) -> tuple[bool, object]:
    width, dim = call.attributes.get("rotary_dim"), call.need("query").shape[2]
    style = call.attributes.get("rope_style")
    if not isinstance(width, int) or dim is None:
        return False, f"{width} of {dim}"
    lane = _lane_width(call)
    part = width // 2 if style == "half" else width
    ok = 0 < width <= dim and width % 2 == 0 and width % lane == 0 and part % lane == 0
    return ok, f"{width} of {dim} ({style}), {lane} elements a lane"


def _table(call: KernelCall) -> tuple[bool, object, str]:
    width = call.attributes.get("rotary_dim")
    have = {n: call.need(n) for n in ("cos", "sin")}
    text = ", ".join(f"{n} {s}" for n, s in have.items())
    if isinstance(width, int) and all(s.shape[-1] == width for s in have.values()):
        message = "cos and sin have one entry per element; their halves are not known to be equal"
        return False, text, message
    ok = isinstance(width, int) and all(
        s.ndim == 2 and s.shape[1] is not None and 2 * s.shape[1] == width for s in have.values()
    )
    return ok, text, "cos and sin do not have one entry per rotated pair"


def _weight_form(call: KernelCall) -> tuple[bool, object]:
    dim = call.need("query").shape[2]
    have = {n: s for n in _WEIGHTS if (s := call.tensor(n)) is not None}
    ok = all(s.shape == (dim,) and s.contiguous for s in have.values())
    return ok, ", ".join(f"{n} {s} strides {list(s.stride)}" for n, s in have.items()) or "absent"


def _eps(call: KernelCall) -> tuple[bool, object]:
    q, k = call.attributes.get("q_eps"), call.attributes.get("k_eps")
    return q == k and isinstance(q, float), f"{q} for q, {k} for k"


def _scale_source(call: KernelCall) -> tuple[bool, object, str]:
    have = {n: s.device for n in ("k_scale", "v_scale") if (s := call.tensor(n)) is not None}
    text = ", ".join(f"{n} on {d}" for n, d in have.items()) or "absent (1)"
    if not gate.is_fp8(call):
        return True, f"{text}; the cache is not fp8", ""
    computed = call.attributes.get("scales_static") is False
    on_host = all(d == "cpu" for d in have.values())
    message = "the graph computes an fp8 scale on the device; AITER reads scales on the host"
    return (
        on_host or not computed,
        f"{text}{', computed in the graph' if computed else ''}",
        message,
    )


def _returned_key(call: KernelCall) -> tuple[bool, object, str]:
    if not call.attributes.get("return_key"):
        return True, "k is not returned", ""
    if gate.is_fp8(call):
        message = "AITER returns k as it was stored (fp8), the graph wants it before the cast"
        return False, "k is returned, fp8 cache", message
    message = "AITER leaves rows of k that have no slot unwritten; they come back as zeros"
    return call.config.numerics != "exact", "k is returned", message


def _tokens(call: KernelCall) -> tuple[bool, object]:
    tokens = call.need("query").shape[0]
    heads = sum(call.need(n).shape[1] or 0 for n in _QKV)
    if tokens is None:
        return True, "symbolic"
    return tokens * heads * LANES <= _MAX_INT32, f"{tokens} tokens of {heads} heads"


class _CacheStrides:
    """The release reads the strides that the cache has."""

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        need, what = strides_need(call)
        return gate.release(call, need, what)

    def __repr__(self) -> str:
        return "CacheStrides()"


def strides_need(call: KernelCall) -> tuple[Version, str]:
    """The release that addresses these caches, and how they lie.

    Up to 0.1.15 a cache is contiguous; from 0.1.16 the stride between pages is free; from
    0.1.19.post1 those of tokens and heads, too (packed views).
    """
    need, what = contract.PTS.first, "a contiguous cache"
    for name, spec in gate.caches(call):
        if not gate.dense_page(spec, strict=True):
            return contract.FREE_STRIDES, f"a packed view or strided page ({name})"
        page = _scaled(_scaled(spec.shape[1], spec.shape[2]), spec.shape[3])
        if spec.stride[0] != page:
            need, what = contract.BLOCK_STRIDE, f"pages that do not touch ({name})"
    return need, what


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_RANKS = {"query": 3, "key": 3, "value": 3, "cos": 2, "sin": 2}

REQUIRES = Requires(gate.base(contract.PTS)) + Requires(
    gate.guarded(
        _RANKS,
        (
            SizeIn("query", 2, HEAD_SIZES, "head size", "gate.head-dim"),
            gate.one_head_dim("query"),
            DtypeIn(_QKV, _FLOATS),
            SameDtype((*_QKV, *_WEIGHTS)),
            Check(
                "dtype of the result",
                "the dtype of q",
                "gate.dtype",
                lambda c: (
                    c.attributes.get("out_dtype") == c.need("query").dtype,
                    str(c.attributes.get("out_dtype")).removeprefix("torch."),
                ),
            ),
            Check("q, k, v", "views of one packed [T, (Hq+2Hk)*D]", "gate.qkv-packed", _packed),
            Check("weights", "contiguous [D]", "gate.argument", _weight_form),
            Absent("q_eps_tensor", "gate.eps-tensor"),
            Absent("k_eps_tensor", "gate.eps-tensor"),
            Check("epsilon", "one number for q and k", "gate.argument", _eps),
            AttributeIn("rope_style", ("half", "interleaved"), "gate.rotary"),
            Check("rotary width", "a positive multiple of the lane width", "gate.rotary", _rotary),
            Check("cos and sin", "[rows, R/2] each", "gate.table", _table),
            DtypeIn(("cos", "sin"), _FLOATS, "gate.table"),
            DtypeIn(("positions",), (torch.int64, torch.int32)),
            DtypeIn(("slot_mapping",), (torch.int64, torch.int32)),
            Check(
                "rope dtype",
                "float32 or the dtype of q",
                "gate.dtype",
                lambda c: (
                    c.attributes.get("rope_dtype") in (torch.float32, c.need("query").dtype),
                    str(c.attributes.get("rope_dtype")).removeprefix("torch."),
                ),
            ),
            Check(
                "cache dtype",
                "the dtype of q, or fp8",
                "gate.cache-dtype",
                lambda c: (
                    all(s.dtype in (c.need("query").dtype, *gate.FP8) for _, s in gate.caches(c))
                    and len({s.dtype for _, s in gate.caches(c)}) == 1,
                    ", ".join(f"{n} {s}" for n, s in gate.caches(c)),
                ),
            ),
            gate.fp8_of_chip(),
            gate.power_of_two_page(),
            UnitLastStride(("key_cache", "value_cache")),
            Check("alignment", "multiples of the lane width D/32", "gate.cache-stride", _aligned),
            _CacheStrides(),
            gate.scale_shapes(),
            Check(
                "fp8 scales",
                "constants, readable on the host",
                "gate.scale-location",
                _scale_source,
            ),
            Check(
                "returned k",
                "not wanted, or not fp8 and numerics=tolerant",
                "gate.argument",
                _returned_key,
            ),
            Check("tokens", "32-bit lane numbers", "gate.token-range", _tokens),
            numerics.no_losses(),
            numerics.Rounding(numerics.prologue_differences),
        ),
    )
)


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
