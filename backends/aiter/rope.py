"""Rope + cache write (no QK norm) on ``fused_qk_rope_reshape_and_cache`` (Triton).

AITER asserts a bfloat16 or fp8 cache and a rotation of the whole head. Its cast to fp8 does not
saturate, so fp8 is refused here; what is left is the bfloat16 model with a bfloat16 cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.backends.aiter import contract, gate, operands, runtime
from fusion.kernel import Kernel, KernelCall
from fusion.requires import AttributeIn, Check, DtypeIn, Requires

_MAX_INT32 = 2**31 - 1
_BF16 = (torch.bfloat16,)


def rope_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    rope_style: str = "half",
    rotary_dim: int,
    rope_dtype: torch.dtype,
    out_dtype: torch.dtype,
    return_key: bool = False,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """``fusion::rope_kv_cache`` through AITER, for a call that :data:`REQUIRES` accepts.

    Returns:
        q ``[T, Hq, D]``; k ``[T, Hk, D]`` if ``return_key`` (rows without a slot are zeros: AITER
        does not write them), else ``[0, Hk, D]``; contiguous.
    """
    tokens = query.shape[0]
    q_out = query.new_empty(query.shape)
    k_out = key.new_zeros(key.shape) if return_key else key.new_empty(key.shape)
    if tokens > 0:
        cos, sin, at = token_rows(cos, sin, positions, rope_dtype)
        call = runtime.resolve(contract.ROPE)
        call(
            q=query,
            k=key,
            v=value,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=operands.token_slots(slot_mapping, tokens),
            pos=at,
            cos=cos,
            sin=sin,
            k_scale=None,
            v_scale=None,
            is_neox=rope_style == "half",
            flash_layout=True,
            apply_scale=False,
            q_out=q_out,
            k_out=k_out,
            output_zeros=False,  # else a tensor of zeros is made and returned
        )
    return q_out, k_out if return_key else k_out[:0]


def token_rows(
    cos: Tensor, sin: Tensor, positions: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of one dtype and one pair of strides, and in-range int64 positions.

    The kernel multiplies in the wider of the dtypes of x and the tables, so tables in the dtype of
    the rotation round where the graph does. It reads sine with the strides of cosine. Positions of
    padding rows may be anything and are clamped; whole tables are never converted, only rows.
    """
    fits = cos.dtype == sin.dtype == dtype and cos.stride() == sin.stride()
    if positions is not None and not fits:
        at = positions.clamp(0, cos.shape[0] - 1)
        cos, sin, positions = cos[at], sin[at], None
    if not fits:
        cos, sin = cos.to(dtype).contiguous(), sin.to(dtype).contiguous()
    if positions is None:
        return cos, sin, torch.arange(cos.shape[0], device=cos.device)
    return cos, sin, positions.to(torch.int64).clamp(0, cos.shape[0] - 1)


def _head_size(call: KernelCall) -> tuple[bool, object]:
    dim = call.need("query").shape[2]
    return dim is not None and 16 <= dim <= 512 and dim & (dim - 1) == 0, dim


def _rotary(call: KernelCall) -> tuple[bool, object]:
    width, dim = call.attributes.get("rotary_dim"), call.need("query").shape[2]
    return width is not None and width == dim, f"{width} of {dim}"


def _table(call: KernelCall) -> tuple[bool, object]:
    dim = call.need("query").shape[2]
    have = {n: call.need(n) for n in ("cos", "sin")}
    widths = {s.shape[-1] for s in have.values()}
    ok = all(s.ndim == 2 for s in have.values()) and len(widths) == 1
    width = next(iter(widths))
    ok = ok and dim is not None and width in (dim, dim // 2)
    return ok, ", ".join(f"{n} {s}" for n, s in have.items())


def _small_offsets(call: KernelCall) -> tuple[bool, object]:
    worst = 0
    for name in ("query", "key", "value"):
        spec = call.need(name)
        if spec.shape[0] is None or spec.stride[0] is None:
            continue
        worst = max(worst, spec.shape[0] * spec.stride[0])
    return worst <= _MAX_INT32, f"{worst} elements"


def _returned_key(call: KernelCall) -> tuple[bool, object, str]:
    wanted = bool(call.attributes.get("return_key"))
    message = "AITER leaves rows of k that have no slot unwritten; they come back as zeros"
    have = "k is returned" if wanted else "k is not returned"
    return not (wanted and call.config.numerics == "exact"), have, message


def _positive_strides(call: KernelCall) -> tuple[bool, object]:
    have = {n: s.stride for n, s in gate.caches(call)}
    bad = {
        n: s.stride
        for n, s in gate.caches(call)
        if any(
            size != 1 and (d is None or d <= 0) for size, d in zip(s.shape, s.stride, strict=True)
        )
    }
    return not bad, ", ".join(f"{n} {list(s)}" for n, s in (bad or have).items())


_RANKS = {"query": 3, "key": 3, "value": 3, "cos": 2, "sin": 2}

REQUIRES = Requires(gate.base(contract.ROPE)) + Requires(
    gate.guarded(
        _RANKS,
        (
            Check("head size", "a power of two", "gate.head-dim", _head_size),
            gate.one_head_dim("query"),
            DtypeIn(("query", "key", "value"), _BF16),
            AttributeIn("out_dtype", _BF16, "gate.dtype"),
            AttributeIn("rope_dtype", (torch.bfloat16, torch.float32), "gate.dtype"),
            DtypeIn(("key_cache", "value_cache"), _BF16, "gate.cache-dtype"),
            gate.heads_divide(),
            AttributeIn("rope_style", ("half", "interleaved"), "gate.rotary"),
            Check("rotary width", "the whole head", "gate.rotary", _rotary),
            Check("cos and sin", "[rows, D] or [rows, D/2], alike", "gate.table", _table),
            DtypeIn(("cos", "sin"), (torch.bfloat16, torch.float16, torch.float32), "gate.table"),
            DtypeIn(("positions",), (torch.int64, torch.int32)),
            DtypeIn(("slot_mapping",), (torch.int64, torch.int32)),
            gate.power_of_two_page(),
            Check("cache strides", "known and positive", "gate.cache-stride", _positive_strides),
            Check("token offsets", "32 bits", "gate.token-range", _small_offsets),
            Check("returned k", "not wanted, or numerics=tolerant", "gate.argument", _returned_key),
        ),
    )
)


def describe(call: KernelCall) -> Mapping[str, Any]:
    """What the call would be, for the report."""
    found: dict[str, Any] = {
        "function": contract.ROPE.name,
        "rounding": "the graph's own rounding points",
    }
    if call.attributes.get("return_key"):
        found["returned k"] = "rows without a slot are zeros"
    return found


KERNEL = Kernel(
    name="aiter",
    op="rope_kv_cache",
    fn=rope_kv_cache,
    requires=REQUIRES,
    backend="aiter",
    describe=describe,
)
