"""What the Triton prologue offers to selection, and what it requires of a call.

There is little: any head size up to 512, any strides that keep a head's elements side by side in
the cache, any page size, any rotary width. Sizes may be symbolic (but for a token count, a compiled
graph is specialised on them). Everything is stated, so that ``fusion kernels`` shows
the same table for every kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion.backends.triton import cache_write, lowering, prologue
from fusion.backends.triton import prologue_tiles as tiles
from fusion.backends.triton.chips import CHIPS
from fusion.kernel import Function, Kernel, KernelCall
from fusion.requires import (
    AttributeIn,
    Check,
    Condition,
    DtypeIn,
    KVLayout,
    Requires,
    SameDtype,
    UnitLastStride,
)

MAX_HEAD_DIM = 512
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_INTS = (torch.int32, torch.int64)
_SCALES = ("k_scale", "v_scale")
_CACHES = ("key_cache", "value_cache")


def _one_device(call: KernelCall) -> tuple[bool, object]:
    """Epsilon tensors are left out (the host may hold them), scales are looked at apart."""
    apart = (*_SCALES, "q_eps_tensor", "k_eps_tensor")
    found = {s.device for n, s in call.tensors.items() if s is not None and n not in apart}
    return len(found) <= 1, ", ".join(sorted(found))


def _scale_location(call: KernelCall) -> tuple[bool, object, str]:
    device = call.need("key").device
    scales = {n: s for n in _SCALES if (s := call.tensor(n)) is not None}
    have = ", ".join(f"{n} {s} on {s.device}" for n, s in scales.items()) or "absent"
    ok = all(
        s.device == device and s.dtype in _FLOATS and all(d == 1 for d in s.shape)
        for s in scales.values()
    )
    return ok, have, "a scale is not one float on the device of the key"


def _head_dims(call: KernelCall) -> tuple[bool, object, str]:
    """A symbolic size is judged by its example: a compiled graph is specialised on it."""
    sizes = [s.hint(2) for n in ("query", "key", "value") if (s := call.tensor(n)) is not None]
    ok = all(d is not None and 1 <= d <= MAX_HEAD_DIM for d in sizes)
    text = " and ".join("unknown" if d is None else str(d) for d in dict.fromkeys(sizes))
    return ok, text, "a head size is unknown or too large"


def _weights(call: KernelCall) -> tuple[bool, object]:
    dim = call.need("key").hint(2)
    specs = [s for n in ("q_weight", "k_weight") if (s := call.tensor(n)) is not None]
    return all(s.ndim == 1 and s.hint(0) == dim for s in specs), ", ".join(map(str, specs))


def _rotary(call: KernelCall) -> tuple[bool, object]:
    rotary, dim = call.attributes.get("rotary_dim"), call.need("key").hint(2)
    ok = isinstance(rotary, int) and dim is not None and 0 <= rotary <= dim and rotary % 2 == 0
    return ok, rotary


_EVERY: tuple[Condition, ...] = (
    *CHIPS,
    KVLayout(("NHD", "SHUFFLE")),
    Check("one device", "one device for all", "gate.device", _one_device),
    DtypeIn(("query", "key", "value"), _FLOATS),
    SameDtype(("query", "key")),
    Check("head sizes", f"at most {MAX_HEAD_DIM}", "gate.head-dim", _head_dims),
)
_WRITE: tuple[Condition, ...] = (
    DtypeIn(_CACHES, (*_FLOATS, *_FP8), "gate.cache-dtype"),
    DtypeIn(("slot_mapping",), _INTS),
    UnitLastStride(_CACHES),
    Check("fp8 scales", "one float on the device", "gate.scale-location", _scale_location),
)
_ROPE: tuple[Condition, ...] = (
    DtypeIn(("cos", "sin"), _FLOATS),
    SameDtype(("cos", "sin")),
    DtypeIn(("positions",), _INTS),
    Check("rotary width", "even, at most the head size", "gate.rotary", _rotary),
    AttributeIn("rope_style", ("half", "interleaved"), "gate.rotary"),
    AttributeIn("rope_dtype", _FLOATS, "gate.dtype"),
    AttributeIn("out_dtype", _FLOATS, "gate.dtype"),
)
_NORM: tuple[Condition, ...] = (
    DtypeIn(("q_weight", "k_weight"), _FLOATS),
    DtypeIn(("q_eps_tensor", "k_eps_tensor"), (*_FLOATS, torch.float64)),
    Check("norm weights", "[D] or absent", "gate.argument", _weights),
    AttributeIn("weight_mode", ("w", "1+w")),
    AttributeIn("norm_cast", ("late", "early", "none")),
)

REQUIRES: Mapping[str, Requires] = {
    "qk_norm_rope_kv_cache": Requires((*_EVERY, *_WRITE, *_ROPE, *_NORM)),
    "rope_kv_cache": Requires((*_EVERY, *_WRITE, *_ROPE)),
    "qk_norm_rope": Requires((*_EVERY, *_ROPE, *_NORM)),
    "kv_cache_write": Requires((*_EVERY, *_WRITE)),
}

_FUNCTIONS: Mapping[str, Function] = {
    "qk_norm_rope_kv_cache": prologue.qk_norm_rope_kv_cache,
    "rope_kv_cache": prologue.rope_kv_cache,
    "qk_norm_rope": prologue.qk_norm_rope,
    "kv_cache_write": cache_write.kv_cache_write,
}


def _describe(call: KernelCall) -> Mapping[str, Any]:
    """The tile for this call and the rule that chose it; one launch in every case."""
    query, key, value = call.tensor("query"), call.need("key"), call.tensor("value")
    sizes = [key.hint(1), key.hint(2), query.hint(1) if query is not None else 0]
    if None in sizes:
        return {"launches": 1}
    kv_heads, dim, q_heads = (int(s or 0) for s in sizes)
    dim = max(dim, (value.hint(2) or 0) if value is not None else 0)
    hints = call.target.vendor == "nvidia"
    tile = tiles.choose(q_heads, kv_heads, dim, key.hint(0), hints=hints)
    return {"tile": str(tile), "launches": 1, "num_warps": tile.warps}


KERNELS = tuple(
    Kernel(
        name="triton",
        op=op,
        fn=_FUNCTIONS[op],
        requires=requires,
        backend="triton",
        lowering=lowering.LOWERINGS[op],
        describe=_describe,
    )
    for op, requires in REQUIRES.items()
)
