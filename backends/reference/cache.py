"""Reading and writing a paged cache: slots, padding rows, fp8, the shuffled layout.

Nothing here waits for the device: no value is read on the host and no shape depends on data, so
every function can be captured into a CUDA or HIP graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The value as the cache keeps it.

    fp8: ``x / scale`` in float32 (scale None = 1), clamped to the largest finite value of the
    format (448 for e4m3fn, 240 for e4m3fnuz), then cast; NaN stays NaN. Any other dtype: an
    ordinary cast, the scale plays no part.
    """
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    y = x.to(torch.float32)
    if scale is not None:
        y = y / scale.to(torch.float32).reshape(())
    limit = torch.finfo(dtype).max
    return y.clamp(-limit, limit).to(dtype)


def loaded(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The inverse of :func:`stored`: cast to ``dtype`` and, for fp8, multiplied by the scale."""
    y = x.to(dtype)
    if scale is not None and x.dtype in FP8_DTYPES:
        y = y * scale.to(dtype).reshape(())
    return y


def bits(x: Tensor) -> Tensor:
    """An fp8 tensor seen as bytes (same storage), because few operators know fp8; else ``x``."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


@dataclass(frozen=True)
class Redirected:
    """Which row goes where once padding rows are out of the way.

    ``source [N]`` int64, the row whose value each row writes; ``slot [N]`` int64, >= 0, where it
    goes; ``any_valid``, 0-dim bool, whether anything is to be written at all.
    """

    source: Tensor
    slot: Tensor
    any_valid: Tensor


def redirect_padding(slot_mapping: Tensor) -> Redirected:
    """Turns padding rows into harmless repetitions of the last row that is not padding.

    A scatter without data-dependent shapes has to write something for each row. Sending padding
    rows to a spare slot would race with the row that owns it, so they repeat, value and slot, the
    last row with ``slot >= 0``: identical bits to the same place, in any order. If every row is
    padding, all of them go to slot 0 and write back what is there.

    Args:
        slot_mapping: ``[N]``, N >= 1, int32 or int64, negative = padding.
    """
    rows = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    valid = slot_mapping >= 0
    last = torch.where(valid, rows, -1).amax()
    source = torch.where(valid, rows, last).clamp(min=0)
    slot = slot_mapping[source].to(torch.int64).clamp(min=0)
    return Redirected(source, slot, last >= 0)


def key_view(cache: Tensor, kv_layout: str) -> Tensor:
    """A key cache as ``[blocks, block, Hk, ...]``; the shuffled one ends in ``[D/x, x]``."""
    return cache.permute(0, 3, 1, 2, 4) if kv_layout == "SHUFFLE" else cache


def value_view(cache: Tensor, kv_layout: str) -> Tensor:
    """A value cache as ``[blocks, block, Hk, Dv]``; shuffled: ``[blocks, block/x, x, Hk, Dv]``."""
    return cache.permute(0, 2, 4, 1, 3) if kv_layout == "SHUFFLE" else cache


def key_index(cache: Tensor, slot: Tensor, kv_layout: str) -> tuple[Tensor, ...]:
    """Index of ``slot`` (int64, any shape) into :func:`key_view` of ``cache``."""
    block = cache.shape[3] if kv_layout == "SHUFFLE" else cache.shape[1]
    return slot // block, slot % block


def value_index(cache: Tensor, slot: Tensor, kv_layout: str) -> tuple[Tensor, ...]:
    """Index of ``slot`` (int64, any shape) into :func:`value_view` of ``cache``."""
    if kv_layout != "SHUFFLE":
        return slot // cache.shape[1], slot % cache.shape[1]
    x = cache.shape[4]
    block = cache.shape[2] * x
    offset = slot % block
    return slot // block, offset // x, offset % x


def rows_to_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Key and value rows as the caches keep them, ``[T, Hk, ...]`` with the dims of the views."""
    key_rows = stored(key, key_cache.dtype, k_scale)
    if kv_layout == "SHUFFLE":
        key_rows = key_rows.reshape(*key.shape[:2], key_cache.shape[2], key_cache.shape[4])
    return key_rows, stored(value, value_cache.dtype, v_scale)


def _put(view: Tensor, index: tuple[Tensor, ...], rows: Tensor, to: Redirected) -> None:
    # Only copies, in no arithmetic dtype, so that the bits of NaNs survive.
    view, rows = bits(view), bits(rows)
    held = view[tuple(i[:1] for i in index)]
    view.index_put_(index, torch.where(to.any_valid, rows[to.source], held))


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
    """Writes rows into a paged cache, in place. See :func:`fusion.ops.kv_cache_write`.

    Slots that no row names keep their bits. Which row wins when two name the same slot is
    undefined, as it is for ``Tensor.index_put_``.
    """
    if slot_mapping.shape[0] == 0:
        return
    if key_cache.shape[0] == 0:  # no row to hold on to, and nothing but padding can be meant
        if slot_mapping.device.type == "cpu" and bool((slot_mapping >= 0).any()):
            raise IndexError("slot_mapping names a slot, but the cache has no block")
        return
    to = redirect_padding(slot_mapping)
    key_rows, value_rows = rows_to_store(
        key, value, key_cache, value_cache, k_scale, v_scale, kv_layout=kv_layout
    )
    _put(key_view(key_cache, kv_layout), key_index(key_cache, to.slot, kv_layout), key_rows, to)
    _put(
        value_view(value_cache, kv_layout),
        value_index(value_cache, to.slot, kv_layout),
        value_rows,
        to,
    )


def gather(
    cache: Tensor,
    slot: Tensor,
    kv_layout: str,
    *,
    which: str,
    dtype: torch.dtype,
    scale: Tensor | None,
) -> Tensor:
    """Reads ``slot`` (int64, any shape S, all in range) of a key or value cache.

    Returns:
        ``S + [Hk, D]`` in ``dtype``, multiplied by the scale if the cache is fp8.
    """
    if which == "key":
        view, index = key_view(cache, kv_layout), key_index(cache, slot, kv_layout)
    else:
        view, index = value_view(cache, kv_layout), value_index(cache, slot, kv_layout)
    rows = bits(view)[index].view(cache.dtype)
    if which == "key" and kv_layout == "SHUFFLE":
        rows = rows.flatten(-2)
    return loaded(rows, dtype, scale)
