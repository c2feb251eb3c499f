"""The Triton prologue's arguments as the kernel wants them: constants, numbers, pointers.

Everything here is computed from descriptions (dtype, sizes, strides), so that an eager call, a
warm-up and Inductor's lowering, where sizes may be symbolic, share it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.backends.triton import prologue_tiles as tiles
from fusion.backends.triton.sizes import next_power_of_2

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FP8_CODES = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 2}
NORM_CASTS = {"late": 0, "early": 1, "none": 2}
ROPE_STYLES = {"half": False, "interleaved": True}

TENSORS = (
    "query", "key", "value", "q_weight", "k_weight", "cos", "sin", "positions", "key_cache",
    "value_cache", "slot_mapping", "k_scale", "v_scale", "q_eps_tensor", "k_eps_tensor",
)  # fmt: skip
"""Tensor arguments of the operations, in the kernel's order (outputs are put between)."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument as the kernel's parameters depend on it; sizes in elements."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """Describe a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class Attributes:
    """The operation's attributes (see `fusion.ops`); defaults are a call without norm and rope."""

    norm: bool = False
    weight_mode: str = "w"
    norm_cast: str = "late"
    rope_style: str = "half"
    rotary_dim: int = 0
    rope_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    return_key: bool = False
    kv_layout: str = "NHD"


def fp8_code(dtype: torch.dtype) -> int:
    """How the kernel makes bytes of a cache dtype: 0 not fp8, 1 e4m3fn and 2 e4m3fnuz by
    integer arithmetic, 3 e4m3fn by the chip's conversion (checked on sm_90 to give the same)."""
    native = dtype is torch.float8_e4m3fn and not interpreted() and _capability() >= (8, 9)
    return 3 if native else FP8_CODES.get(dtype, 0)


@functools.lru_cache(maxsize=1)
def _capability() -> tuple[int, int]:
    """CUDA capability of the current device; (0, 0) elsewhere."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability()


def _y_code(x: torch.dtype, weight: Operand | None) -> int:
    """Code of the dtype that ``w * n.to(x.dtype)`` has (ordinary promotion)."""
    return DTYPE_CODES[x if weight is None else torch.promote_types(x, weight.dtype)]


def constants(operands: Mapping[str, Operand | None], a: Attributes) -> dict[str, Any]:
    """Compile-time constants of `prologue_kernel`, without the tile.

    Args:
        operands: the tensor arguments by name (`TENSORS`); ``key`` must be there. The sizes read
            here (heads, head sizes, block size) must be plain integers.
        a: the attributes.

    Returns:
        Constant by kernel parameter name: ints and bools only, so that it can be written into
        generated code.
    """
    get = operands.get
    key = operands["key"]
    assert key is not None
    query, value, cos = get("query"), get("value"), get("cos")
    q_weight, k_weight = get("q_weight"), get("k_weight")
    key_cache, value_cache = get("key_cache"), get("value_cache")
    heads, dim = int(key.shape[1]), int(key.shape[2])
    rotary = a.rotary_dim
    late = a.norm_cast == "late"
    one_plus = a.weight_mode == "1+w"
    dim_v = int(value.shape[2]) if value is not None else dim
    shuffle = a.kv_layout == "SHUFFLE"
    block_size, x = 1, 1
    if key_cache is not None:
        block_size = int(key_cache.shape[3 if shuffle else 1])
        x = int(key_cache.shape[4]) if shuffle else 1
    out_dtype = a.out_dtype or key.dtype
    return {
        "HQ": int(query.shape[1]) if query is not None else 0,
        "HK": heads,
        "D": dim,
        "DV": dim_v,
        "R": rotary,
        "NORM": a.norm,
        "HAS_QW": q_weight is not None,
        "HAS_KW": k_weight is not None,
        "ONE_PLUS": one_plus,
        "QW_CODE": DTYPE_CODES[q_weight.dtype] if q_weight is not None and late else 0,
        "KW_CODE": DTYPE_CODES[k_weight.dtype] if k_weight is not None and late else 0,
        "NORM_CAST": NORM_CASTS[a.norm_cast],
        "X_CODE": DTYPE_CODES[key.dtype],
        "QY_CODE": _y_code(key.dtype, q_weight),
        "KY_CODE": _y_code(key.dtype, k_weight),
        "INTERLEAVED": ROPE_STYLES[a.rope_style],
        "FULL": bool(cos is not None and rotary > 0 and int(cos.shape[-1]) == rotary),
        "HAS_POS": get("positions") is not None,
        "ROPE_CODE": DTYPE_CODES[a.rope_dtype],
        "OUT_CODE": DTYPE_CODES[out_dtype],
        "WRITE": int(key_cache is not None),
        "RETURN_K": a.return_key,
        "K_FP8": fp8_code(key_cache.dtype) if key_cache is not None else 0,
        "V_FP8": fp8_code(value_cache.dtype) if value_cache is not None else 0,
        "HAS_KS": get("k_scale") is not None,
        "HAS_VS": get("v_scale") is not None,
        "HAS_Q_EPS": get("q_eps_tensor") is not None,
        "HAS_K_EPS": get("k_eps_tensor") is not None,
        "BLOCK_SIZE": block_size,
        "SHUFFLE": int(shuffle),
        "X": x,
        "BH": next_power_of_2(rotary // 2),
        "BT": next_power_of_2(dim - rotary),
        "BV": next_power_of_2(dim_v),
    }


def numbers(
    operands: Mapping[str, Operand | None], a: Attributes, q_eps: float, k_eps: float
) -> dict[str, Any]:
    """Run-time numbers of `prologue_kernel`; sizes and strides may be symbolic.

    A stride that is never multiplied by anything but 0 is passed as 0, so that it does not make
    another specialisation.
    """
    get = operands.get
    key = operands["key"]
    assert key is not None
    query, value, cos, sin = get("query"), get("value"), get("cos"), get("sin")
    slots, key_cache, value_cache = get("slot_mapping"), get("key_cache"), get("value_cache")

    def strides(x: Operand | None, dims: tuple[int, ...]) -> list[Any]:
        if x is None:
            return [0] * len(dims)
        return [0 if d < 0 or _is(x.shape[d], 1) else x.stride[d] for d in dims]

    # The kernel's four cache strides; the order by layout is told in `_store_cache`.
    shuffle = a.kv_layout == "SHUFFLE"
    k_dims = (0, 1, 2, 3) if shuffle else (0, 1, 2, -1)
    v_dims = (0, 1, 2, 3) if shuffle else (0, 1, 2, -1)
    q_st, q_sh = strides(query, (0, 1))
    k_st, k_sh = strides(key, (0, 1))
    v_st, v_sh = strides(value, (0, 1))
    kc = strides(key_cache, k_dims)
    vc = strides(value_cache, v_dims)
    return {
        "tokens": key.shape[0],
        "num_slots": slots.shape[0] if slots is not None else 0,
        "table_rows": cos.shape[0] if cos is not None else 1,
        "q_eps": q_eps, "k_eps": k_eps,
        "q_st": q_st, "q_sh": q_sh, "k_st": k_st, "k_sh": k_sh, "v_st": v_st, "v_sh": v_sh,
        "cos_st": strides(cos, (0,))[0], "sin_st": strides(sin, (0,))[0],
        "kc_s0": kc[0], "kc_s1": kc[1], "kc_s2": kc[2], "kc_s3": kc[3],
        "vc_s0": vc[0], "vc_s1": vc[1], "vc_s2": vc[2], "vc_s3": vc[3],
    }  # fmt: skip


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def pointers(tensors: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel's pointer parameters in order, from arguments (`TENSORS`) and outputs by name."""
    names = {
        "q_ptr": "query", "k_ptr": "key", "v_ptr": "value", "qw_ptr": "q_weight",
        "kw_ptr": "k_weight", "cos_ptr": "cos", "sin_ptr": "sin", "pos_ptr": "positions",
        "q_out_ptr": "", "k_out_ptr": "", "k_cache_ptr": "key_cache",
        "v_cache_ptr": "value_cache", "slot_ptr": "slot_mapping", "k_scale_ptr": "k_scale",
        "v_scale_ptr": "v_scale", "q_eps_ptr": "q_eps_tensor", "k_eps_ptr": "k_eps_tensor",
    }  # fmt: skip
    return {p: outputs[p] if p in outputs else tensors[n] for p, n in names.items()}


def programs(constant: Mapping[str, Any], tile: tiles.Tile, tokens: Any) -> Any:
    """Number of programs of a launch (``tokens`` may be symbolic)."""
    q_groups = -(-constant["HQ"] // tile.heads)
    k_groups = -(-constant["HK"] // tile.heads)
    groups = q_groups + k_groups * (1 + constant["WRITE"])
    return (tokens + tile.tokens - 1) // tile.tokens * groups


def pick(constant: Mapping[str, Any], tokens: int | None) -> tiles.Tile:
    """The tile for a call with these constants."""
    dim = max(constant["D"], constant["DV"])
    return tiles.choose(constant["HQ"], constant["HK"], dim, tokens, hints=hints())


def hints() -> bool:
    """Streaming hints were measured on NVIDIA only."""
    return torch.version.hip is None


RUN_TIME = ("tokens", "num_slots", "table_rows")
"""Numbers that are run-time arguments of both kernels."""
VIEWS = {
    "q_off": "query", "k_off": "key", "v_off": "value", "cos_off": "cos", "sin_off": "sin",
    "kc_off": "key_cache", "vc_off": "value_cache",
}  # fmt: skip
"""Offsets (in elements, of a view in its buffer) of the static kernel, and what each is of."""


SAME_BUFFER = {"key": "query", "value": "key", "sin": "cos", "value_cache": "key_cache"}
"""Tensors whose pointer the static kernel need not be given where they lie in one buffer with
another (a packed projection, one table of cos and sin, a packed cache): each pointer of a launch
costs host time. In this order, so that a value may share through the key."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"
