"""What the pts operation requires: every condition of its contract, checked by AITER or not.

Wrong shapes end the process there, and wrong dtypes, short slot mappings and misaligned widths are
not looked at at all.
"""

from __future__ import annotations

import torch
from packaging.version import Version

from fusion.backends.aiter import contract, gate, numerics
from fusion.kernel import Dim, KernelCall, TensorSpec
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
