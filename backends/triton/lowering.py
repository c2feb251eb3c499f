"""The prologue kernel inside Inductor's generated code.

Each function takes the operation's arguments with Inductor's IR in the place of tensors and
leaves one Triton launch in the graph, with the constants and numbers of `prologue_plan`. What
cannot be expressed there (an epsilon on the host, an fp8 format whose pointers this chip's Triton
does not know) declines: the call then stays a call of the operation, which handles it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion.backends.triton import prologue_plan as plan
from fusion.backends.triton.cache_write import attributes as write_attributes
from fusion.backends.triton.prologue import kernel
from fusion.backends.triton.prologue_plan import Attributes, Operand
from fusion.graph import triton_lowering as ir
from fusion.graph.lowerings import Decline
from fusion.target import Target

_CACHES = ("key_cache", "value_cache")


def _check(arguments: Mapping[str, Any], device: torch.device) -> None:
    """Raises Decline for what only the eager path can do; no IR has been made yet."""
    for name, x in arguments.items():
        if x is not None and x.get_device() != device:
            raise Decline(f"{name} is on {x.get_device()}, the kernel on {device}")
    target = Target.current()
    for name in _CACHES:
        cache = arguments.get(name)
        dtype = cache.get_dtype() if cache is not None else None
        if dtype in plan.FP8_CODES and target.vendor == "nvidia":
            old = (target.capability or 0) < 89
            if dtype is torch.float8_e4m3fnuz or old:
                raise Decline(f"Triton has no pointer to {dtype} on {target.arch}")


def _launch(
    arguments: Mapping[str, Any], a: Attributes, q_eps: float, k_eps: float
) -> tuple[Any, Any]:
    device = arguments["key"].get_device()
    _check(arguments, device)
    tensors: dict[str, Any] = dict.fromkeys(plan.TENSORS)
    for name in _CACHES:
        if arguments.get(name) is not None:
            tensors[name] = ir.writable(arguments[name])
            if tensors[name] is None:
                raise Decline(f"{name} is not a strided view of a buffer")
    for name, x in arguments.items():
        if name not in _CACHES and x is not None:
            tensors[name] = ir.readable(x)
    operands = {n: None if x is None else _operand(x) for n, x in tensors.items()}
    constant = plan.constants(operands, a)
    # Guards made while the constants were read may have settled strides that were symbolic.
    number = {n: ir.plain(x) for n, x in plan.numbers(operands, a, q_eps, k_eps).items()}
    key = operands["key"]
    assert key is not None
    tokens, heads, dim = key.shape
    out_dtype = a.out_dtype or key.dtype
    k_out = ir.empty((tokens if a.return_key else 0, heads, dim), out_dtype, device)
    q_out = None
    query = operands["query"]
    if query is not None:
        q_out = ir.empty(query.shape, out_dtype, device)
    tile = plan.pick(constant, ir.hint(tokens))
    if tokens == 0:
        return q_out, k_out
    outputs = {"q_out_ptr": q_out, "k_out_ptr": k_out if a.return_key else None}
    based = {o: ir.base(tensors[n]) for o, n in plan.VIEWS.items() if tensors[n] is not None}
    offsets = {o: ir.plain(based[o][1]) if o in based else 0 for o in plan.VIEWS}
    fixed = [x for n, x in (number | offsets).items() if n not in plan.RUN_TIME]
    static = all(isinstance(x, int | float) for x in fixed)
    if static:
        # Buffers and constant offsets instead of views: making a view costs host time.
        number |= offsets
        tensors |= {plan.VIEWS[o]: buffer for o, (buffer, _) in based.items()}
        shared = [n for n, o in plan.SAME_BUFFER.items() if ir.same(tensors[n], tensors[o])]
        tensors |= dict.fromkeys(shared)
    pointers = plan.pointers(tensors, outputs)
    written = [n for n in (*outputs, "k_cache_ptr", "v_cache_ptr") if pointers[n] is not None]
    constant |= {"HH": tile.heads, "TT": tile.tokens, "STREAM": tile.stream}
    ir.launch(
        kernel(static),
        {**pointers, **number, **constant},
        written,
        ir.ceil_div(tokens, tile.tokens) * plan.programs(constant, tile, 1),
        warps=tile.warps,
    )
    return q_out, k_out


def _operand(x: Any) -> Operand:
    """Sizes and strides of IR; everything but token counts, table rows and strides is static."""
    size, stride = ir.sizes(x)
    fixed = (size[0], *(ir.static(s) for s in size[1:])) if size else size
    return Operand(x.get_dtype(), fixed, stride)


def qk_norm_rope_kv_cache(
    query: Any, key: Any, value: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any,
    positions: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, k_scale: Any = None,
    v_scale: Any = None, *, q_eps: float, k_eps: float, q_eps_tensor: Any = None,
    k_eps_tensor: Any = None, weight_mode: str = "w", norm_cast: str = "late",
    inv_rms: str = "rsqrt", rope_style: str = "half", rotary_dim: int, rope_dtype: torch.dtype,
    out_dtype: torch.dtype, return_key: bool = False, kv_layout: str = "NHD",
) -> tuple[Any, Any]:  # fmt: skip
    """Lowering of `fusion.ops.qk_norm_rope_kv_cache`."""
    tensors = {
        "query": query, "key": key, "value": value, "q_weight": q_weight, "k_weight": k_weight,
        "cos": cos, "sin": sin, "positions": positions, "key_cache": key_cache,
        "value_cache": value_cache, "slot_mapping": slot_mapping, "k_scale": k_scale,
        "v_scale": v_scale, "q_eps_tensor": q_eps_tensor, "k_eps_tensor": k_eps_tensor,
    }  # fmt: skip
    a = Attributes(True, weight_mode, norm_cast, rope_style, rotary_dim, rope_dtype, out_dtype,
                   return_key, kv_layout)  # fmt: skip
    return _launch(tensors, a, q_eps, k_eps)


def rope_kv_cache(
    query: Any, key: Any, value: Any, cos: Any, sin: Any, positions: Any, key_cache: Any,
    value_cache: Any, slot_mapping: Any, k_scale: Any = None, v_scale: Any = None, *,
    rope_style: str = "half", rotary_dim: int, rope_dtype: torch.dtype, out_dtype: torch.dtype,
    return_key: bool = False, kv_layout: str = "NHD",
) -> tuple[Any, Any]:  # fmt: skip
    """Lowering of `fusion.ops.rope_kv_cache`."""
    tensors = {
        "query": query, "key": key, "value": value, "cos": cos, "sin": sin,
        "positions": positions, "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    a = Attributes(False, "w", "none", rope_style, rotary_dim, rope_dtype, out_dtype, return_key,
                   kv_layout)  # fmt: skip
    return _launch(tensors, a, 0.0, 0.0)


def qk_norm_rope(
    query: Any, key: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, *,
    q_eps: float, k_eps: float, q_eps_tensor: Any = None, k_eps_tensor: Any = None,
    weight_mode: str = "w", norm_cast: str = "late", inv_rms: str = "rsqrt",
    rope_style: str = "half", rotary_dim: int, rope_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Any, Any]:  # fmt: skip
    """Lowering of `fusion.ops.qk_norm_rope`."""
    tensors = {
        "query": query, "key": key, "q_weight": q_weight, "k_weight": k_weight, "cos": cos,
        "sin": sin, "positions": positions, "q_eps_tensor": q_eps_tensor,
        "k_eps_tensor": k_eps_tensor,
    }  # fmt: skip
    a = Attributes(True, weight_mode, norm_cast, rope_style, rotary_dim, rope_dtype, out_dtype,
                   return_key=True)  # fmt: skip
    return _launch(tensors, a, q_eps, k_eps)


def kv_cache_write(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any,
    k_scale: Any = None, v_scale: Any = None, *, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Lowering of `fusion.ops.kv_cache_write`."""
    tensors = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    _launch(tensors, write_attributes(key.get_dtype(), kv_layout), 0.0, 0.0)


LOWERINGS: Mapping[str, Callable[..., Any]] = {
    "qk_norm_rope_kv_cache": qk_norm_rope_kv_cache,
    "rope_kv_cache": rope_kv_cache,
    "qk_norm_rope": qk_norm_rope,
    "kv_cache_write": kv_cache_write,
}
