"""Host side of the Triton prologue: from an operation's arguments to one kernel launch.

No function here waits for the device. triton is imported when a kernel is first launched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.backends.triton import prologue_tiles as tiles
from fusion.backends.triton.prologue_plan import (
    FP8_CODES,
    RUN_TIME,
    TENSORS,
    VIEWS,
    Attributes,
    Operand,
    constants,
    hints,
    interpreted,
    numbers,
    pick,
    pointers,
    programs,
)


@functools.lru_cache(maxsize=2)
def kernel(static: bool = False) -> Any:
    """The jitted kernel; ``static``: with strides, offsets and epsilons as constants.

    The token count, the number of slots and the rows of the table are not specialised on: else
    a call with another divisibility by 16, or with one token, would be compiled again.
    """
    from fusion.backends.triton import prologue_kernel as source

    return source.prologue_kernel_static if static else source.prologue_kernel


def _unit_last(x: Tensor | None) -> Tensor | None:
    """An input whose elements of a head lie side by side (copied only if they do not)."""
    if x is None or x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.contiguous()


def _host_eps(eps: float, tensor: Tensor | None) -> tuple[float, Tensor | None]:
    """An epsilon tensor on the host is read there; one on the device is read by the kernel."""
    if tensor is not None and tensor.device.type == "cpu" and not interpreted():
        return float(tensor), None
    return eps, tensor


def _prepare(
    tensors: Mapping[str, Tensor | None],
    a: Attributes,
    q_eps: float,
    k_eps: float,
    tile: tiles.Tile | None,
    static: bool = False,
) -> tuple[list[Any], dict[str, Any], Any, list[Tensor]]:
    """Positional arguments, constants, grid and the outputs (q, k) of one launch."""
    t = {name: tensors.get(name) for name in TENSORS}
    for name in ("query", "key", "value", "cos", "sin", "q_weight", "k_weight", "positions",
                 "slot_mapping"):  # fmt: skip
        t[name] = _unit_last(t[name])
    q_eps, t["q_eps_tensor"] = _host_eps(q_eps, t["q_eps_tensor"])
    k_eps, t["k_eps_tensor"] = _host_eps(k_eps, t["k_eps_tensor"])
    operands = {n: None if x is None else Operand.of(x) for n, x in t.items()}
    constant = constants(operands, a)
    number = numbers(operands, a, q_eps, k_eps)
    key, query = t["key"], t["query"]
    assert key is not None
    tokens, heads, dim = key.shape
    out_dtype = a.out_dtype or key.dtype
    k_out = key.new_empty((tokens if a.return_key else 0, heads, dim), dtype=out_dtype)
    q_out = k_out
    if query is not None:
        q_out = query.new_empty(query.shape, dtype=out_dtype)
    tile = tile or pick(constant, tokens)
    t["key_cache"], t["value_cache"] = _bytes(t["key_cache"]), _bytes(t["value_cache"])
    outputs = {
        "q_out_ptr": q_out if query is not None else None,
        "k_out_ptr": k_out if a.return_key else None,
    }
    if static:
        for offset, name in VIEWS.items():
            t[name], constant[offset] = _buffer(t[name])
        constant |= {n: x for n, x in number.items() if n not in RUN_TIME}
        number = {n: number[n] for n in RUN_TIME}
    args = [*pointers(t, outputs).values(), *number.values()]
    constant |= {
        "HH": tile.heads, "TT": tile.tokens, "STREAM": tile.stream, "num_warps": tile.warps,
    }  # fmt: skip
    return args, constant, (programs(constant, tile, tokens),), [q_out, k_out]


def _buffer(x: Tensor | None) -> tuple[Tensor | None, int]:
    """The tensor that ``x`` is a view of, and where the view begins in it, in elements."""
    base = None if x is None else x._base
    if x is None or base is None or base.dtype != x.dtype:
        return x, 0
    return base, int(x.storage_offset() - base.storage_offset())


def _bytes(cache: Tensor | None) -> Tensor | None:
    """fp8 caches are handed over as bytes: not every chip's Triton has a pointer to them."""
    return cache.view(torch.uint8) if cache is not None and cache.dtype in FP8_CODES else cache


def launch(
    tensors: Mapping[str, Tensor | None],
    a: Attributes,
    q_eps: float = 0.0,
    k_eps: float = 0.0,
    tile: tiles.Tile | None = None,
    static: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on these arguments (names: `TENSORS`).

    Args:
        tensors, a, q_eps, k_eps: the operation's arguments.
        tile: overrides the heuristic.
        static: use the kernel of compiled graphs, which is compiled for these very strides.

    Returns:
        (q, k), contiguous, in ``out_dtype``; k is ``[0, Hk, D]`` unless ``return_key``.
    """
    args, constant, grid, (q_out, k_out) = _prepare(tensors, a, q_eps, k_eps, tile, static)
    if grid[0] > 0:
        with _on_device_of(args[1]):
            kernel(static)[grid](*args, **constant)
    return q_out, k_out


def warmup(
    tensors: Mapping[str, Tensor | None], a: Attributes, q_eps: float = 0.0, k_eps: float = 0.0
) -> int:
    """Compile (or load from Triton's cache) every tile that a call like this one may use.

    Nothing is launched and nothing is written, so it is safe before a graph capture; afterwards
    a call with any token count launches without compiling. Returns the number of variants.
    """
    key = tensors["key"]
    assert key is not None
    query, value = tensors.get("query"), tensors.get("value")
    dim = max(key.shape[2], value.shape[2] if value is not None else 0)
    heads = query.shape[1] if query is not None else 0
    found = tiles.choices(heads, key.shape[1], dim, hints=hints())
    for tile in found:
        args, constant, grid, _ = _prepare(tensors, a, q_eps, k_eps, tile)
        with _on_device_of(args[1]):
            kernel().warmup(*args, **constant, grid=grid)
    return len(found)


def _on_device_of(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(tensor.device.type).device(tensor.device)


def qk_norm_rope_kv_cache(
    query: Tensor, key: Tensor, value: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    cos: Tensor, sin: Tensor, positions: Tensor | None, key_cache: Tensor, value_cache: Tensor,
    slot_mapping: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None, *,
    q_eps: float, k_eps: float, q_eps_tensor: Tensor | None = None,
    k_eps_tensor: Tensor | None = None, weight_mode: str = "w", norm_cast: str = "late",
    inv_rms: str = "rsqrt", rope_style: str = "half", rotary_dim: int, rope_dtype: torch.dtype,
    out_dtype: torch.dtype, return_key: bool = False, kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `fusion.ops.qk_norm_rope_kv_cache`. ``inv_rms`` makes no difference here: the device's
    reciprocal root is used for every spelling."""
    tensors = {
        "query": query, "key": key, "value": value, "q_weight": q_weight, "k_weight": k_weight,
        "cos": cos, "sin": sin, "positions": positions, "key_cache": key_cache,
        "value_cache": value_cache, "slot_mapping": slot_mapping, "k_scale": k_scale,
        "v_scale": v_scale, "q_eps_tensor": q_eps_tensor, "k_eps_tensor": k_eps_tensor,
    }  # fmt: skip
    a = Attributes(
        True,
        weight_mode,
        norm_cast,
        rope_style,
        rotary_dim,
        rope_dtype,
        out_dtype,
        return_key,
        kv_layout,
    )
    return launch(tensors, a, q_eps, k_eps)


def rope_kv_cache(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, rope_style: str = "half",
    rotary_dim: int, rope_dtype: torch.dtype, out_dtype: torch.dtype, return_key: bool = False,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `fusion.ops.rope_kv_cache`."""
    tensors = {
        "query": query, "key": key, "value": value, "cos": cos, "sin": sin,
        "positions": positions, "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    a = Attributes(
        False, "w", "none", rope_style, rotary_dim, rope_dtype, out_dtype, return_key, kv_layout
    )
    return launch(tensors, a)


def qk_norm_rope(
    query: Tensor, key: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, positions: Tensor | None, *, q_eps: float, k_eps: float,
    q_eps_tensor: Tensor | None = None, k_eps_tensor: Tensor | None = None,
    weight_mode: str = "w", norm_cast: str = "late", inv_rms: str = "rsqrt",
    rope_style: str = "half", rotary_dim: int, rope_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `fusion.ops.qk_norm_rope`."""
    tensors = {
        "query": query, "key": key, "q_weight": q_weight, "k_weight": k_weight, "cos": cos,
        "sin": sin, "positions": positions, "q_eps_tensor": q_eps_tensor,
        "k_eps_tensor": k_eps_tensor,
    }  # fmt: skip
    a = Attributes(
        True, weight_mode, norm_cast, rope_style, rotary_dim, rope_dtype, out_dtype, return_key=True
    )
    return launch(tensors, a, q_eps, k_eps)
