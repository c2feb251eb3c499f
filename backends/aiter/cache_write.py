"""K/V cache write on ``reshape_and_cache_flash`` (HIP), where its contract fits a view.

The function reads the stride between pages only, takes it from K for both caches, and believes the
rest dense, so packed views are refused. Its cast to fp8 does not saturate, so fp8 is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.backends.aiter import contract, gate, runtime
from fusion.backends.aiter.operands import token_slots
from fusion.kernel import Kernel, KernelCall
from fusion.requires import Check, DtypeIn, Requires, SameDtype

_MAX_INT32 = 2**31 - 1


def kv_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
) -> None:
    """``fusion::kv_cache_write`` through AITER, for a call that :data:`REQUIRES` accepts."""
    count = slot_mapping.shape[0]  # AITER takes the number of rows from the key
    if count == 0 or key.shape[1] == 0:
        return
    # Scales play no part in a cache that is not fp8, but the kernel loads one float from each.
    unused = torch.empty(1, dtype=torch.float32, device=key.device)
    call = runtime.resolve(contract.WRITE)
    call(
        key[:count],
        value[:count],
        key_cache,
        value_cache,
        token_slots(slot_mapping, count),
        "auto",
        unused,
        unused,
    )


def _dense_pages(call: KernelCall) -> tuple[bool, object]:
    have = dict(gate.caches(call))
    dense = all(gate.dense_page(s, strict=False) for s in have.values())
    blocks = {s.stride[0] for s in have.values() if s.shape[0] != 1}
    small = all(b is not None and 0 < b <= _MAX_INT32 for b in blocks)
    text = ", ".join(f"{n} strides {list(s.stride)}" for n, s in have.items())
    return dense and len(blocks) <= 1 and small, text


def _dense_rows(call: KernelCall) -> tuple[bool, object]:
    have = {n: call.need(n) for n in ("key", "value")}
    ok = True
    for spec in have.values():
        heads, dim = spec.shape[1], spec.shape[2]
        row = spec.stride[0]
        ok = ok and (dim == 1 or spec.stride[2] == 1) and (heads == 1 or spec.stride[1] == dim)
        ok = ok and (spec.shape[0] == 1 or (row is not None and 0 <= row <= _MAX_INT32))
    return ok, ", ".join(f"{n} strides {list(s.stride)}" for n, s in have.items())


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_RANKS = {"key": 3, "value": 3, "slot_mapping": 1}

REQUIRES = Requires(gate.base(contract.WRITE)) + Requires(
    gate.guarded(
        _RANKS,
        (
            gate.one_head_dim("key"),
            DtypeIn(("key", "value"), _FLOATS),
            DtypeIn(("key_cache", "value_cache"), _FLOATS, "gate.cache-dtype"),
            SameDtype(("key", "value", "key_cache", "value_cache"), "gate.cache-dtype"),
            DtypeIn(("slot_mapping",), (torch.int64, torch.int32)),
            Check("pages", "dense, one stride for K and V", "gate.cache-stride", _dense_pages),
            Check("rows of k and v", "dense [H, D]", "gate.argument", _dense_rows),
        ),
    )
)

KERNEL = Kernel(
    name="aiter", op="kv_cache_write", fn=kv_cache_write, requires=REQUIRES, backend="aiter"
)
