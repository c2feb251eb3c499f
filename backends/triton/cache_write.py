"""``kv_cache_write`` as the prologue kernel without q, norm and rope."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.backends.triton.prologue import launch
from fusion.backends.triton.prologue_plan import Attributes


def attributes(key_dtype: torch.dtype, kv_layout: str) -> Attributes:
    """A plain write: no norm, no rotated part, K stored in its own dtype first."""
    return Attributes(False, norm_cast="none", out_dtype=key_dtype, kv_layout=kv_layout)


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
    """See `fusion.ops.kv_cache_write`."""
    tensors: dict[str, Tensor | None] = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    launch(tensors, attributes(key.dtype, kv_layout))
