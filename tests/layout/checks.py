"""The checks that every kernel has to pass, whatever the layout. See ``test_properties.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fusion import ops
from fusion.backends.reference import rope
from fusion.backends.reference.rotary import token_tables
from fusion.layout import split_kv_cache
from tests.layout.strategies import Geometry, Memory, Slots, address, build, positions, rows, slots

Scales = tuple[float, float] | None


@dataclass(frozen=True)
class Kernels:
    """Who writes and reads: the public operations, or a backend's functions of the same names."""

    kv_cache_write: Callable[..., None]
    rope_kv_cache: Callable[..., tuple[Tensor, Tensor]]
    paged_attention: Callable[..., Tensor]
    least_dim: int = 1
    """The smallest head dim that the gate lets into this attention."""


REFERENCE = Kernels(
    *(
        partial(f, kernel="reference")
        for f in (ops.kv_cache_write, ops.rope_kv_cache, ops.paged_attention)
    )
)


def integers(x: Tensor) -> Tensor:
    """The bits of a tensor, same storage and strides."""
    size = x.dtype.itemsize
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def halves(memory: Memory) -> tuple[Tensor, Tensor]:
    """What :func:`fusion.layout.split_kv_cache` cuts out."""
    g = memory.geometry
    return split_kv_cache(memory.cache, g.layout, g.dim, g.dim_v)


def stored(x: Tensor, dtype: torch.dtype, scale: float | None) -> Tensor:
    """Bits that a cache of ``dtype`` keeps of ``x``: fp8 is ``x / scale``, saturated."""
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        y = x.float() / torch.tensor(1.0 if scale is None else scale)
        x = torch.where(y.abs() > top, top * y.sign(), y)
    return integers(x.to(dtype))


def _scales(scales: Scales) -> dict[str, Tensor | None]:
    if scales is None:
        return {"k_scale": None, "v_scale": None}
    return {"k_scale": torch.tensor(scales[0]), "v_scale": torch.tensor([scales[1]])}


def written(
    memory: Memory, key: Tensor, value: Tensor, mapping: Tensor, scales: Scales, run: Kernels
) -> None:
    """The public write."""
    k, v = halves(memory)
    layout = memory.geometry.layout.op_layout
    run.kv_cache_write(
        key,
        value,
        k,
        v,
        mapping,
        **_scales(scales),
        kv_layout=layout,
    )


def expected(memory: Memory, key: Tensor, value: Tensor, mapping: Tensor, scales: Scales) -> Tensor:
    """The pool as it has to be after a write: :func:`address` and plain indexing."""
    out = memory.flat().clone()
    dtype = memory.geometry.torch_dtype
    keep = mapping >= 0
    for kv, x in enumerate((key, value)):
        bits = stored(x[: len(mapping)], dtype, None if scales is None else scales[kv])
        out[address(memory, kv, mapping[keep].long())] = bits[keep]
    return out


def read(memory: Memory) -> tuple[Tensor, Tensor]:
    """K and V of every slot ``[slots, heads, dim]``, read through the map."""
    every = torch.arange(memory.geometry.slots)
    elements = integers(memory.elements())
    k, v = (elements[address(memory, kv, every)] for kv in (0, 1))
    return k, v


def attend(memory: Memory, seed: int, scales: Scales, run: Kernels, rows_: int = 3) -> Tensor:
    """The public read: non-causal attention of a few rows over all slots, pages reversed."""
    g = memory.geometry
    k, v = halves(memory)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows_, 2 * g.heads, g.dim, generator=generator)
    table = torch.arange(g.blocks - 1, -1, -1, dtype=torch.int32)[None]
    return run.paged_attention(
        query.bfloat16(), k, v, table, torch.tensor([g.slots]), torch.tensor([0, rows_]), rows_,
        g.slots, g.dim**-0.5, False, **_scales(scales), kv_layout=g.layout.op_layout,
    )  # fmt: skip


def one_key(memory: Memory, slot: int, scales: Scales, run: Kernels) -> Tensor:
    """The public read of one slot: with one visible key attention returns its value."""
    g = memory.geometry
    k, v = halves(memory)
    table = torch.tensor([[slot // g.block]], dtype=torch.int32)
    return run.paged_attention(
        torch.ones(1, g.heads, g.dim), k, v, table, torch.tensor([slot % g.block + 1]),
        torch.tensor([0, 1]), 1, g.block, 1.0, True, window_left=0, **_scales(scales),
        kv_layout=g.layout.op_layout,
    )[0]  # fmt: skip


def check_write(
    g: Geometry, wanted: Slots, scales: Scales, dtype: torch.dtype, run: Kernels
) -> None:
    """Write, compare the whole pool, read back through the map and through attention."""
    memory = build(g)
    key, value = rows(g, wanted.tokens, 1, dtype)
    mapping = wanted.tensor()
    want = expected(memory, key, value, mapping, scales)
    written(memory, key, value, mapping, scales, run)
    wrong = (memory.flat() != want).nonzero()
    assert not len(wrong), f"{len(wrong)} elements of the pool, first at {wrong[:4].tolist()}"
    seen = read(memory)
    for row, slot in enumerate(mapping.tolist()):
        if slot < 0:
            continue
        for kv, x in enumerate((key, value)):
            scale = None if scales is None else scales[kv]
            assert torch.equal(seen[kv][slot], stored(x[row], g.torch_dtype, scale))
    valid = [(row, slot) for row, slot in enumerate(mapping.tolist()) if slot >= 0]
    for row, slot in valid[: min(g.dim, g.dim_v) >= run.least_dim]:
        kept = stored(value[row], g.torch_dtype, None if scales is None else scales[1])
        back = kept.view(g.torch_dtype).float()
        if scales is not None and g.torch_dtype.itemsize == 1:
            back = back * torch.tensor(scales[1])
        assert torch.equal(one_key(memory, slot, scales, run), back)


def check_prologue(data: Any, g: Geometry, scales: Scales, run: Kernels) -> None:
    """``rope_kv_cache`` writes the bytes of rope followed by a write, and nothing else."""
    wanted = data.draw(slots(g))
    table_rows = 50
    padded = [t for t in range(wanted.tokens) if t >= len(wanted.mapping) or wanted.mapping[t] < 0]
    at = data.draw(positions(wanted.tokens, table_rows, padded))
    style = data.draw(st.sampled_from(["half", "interleaved"]))
    rotary = data.draw(st.integers(0, g.dim // 2)) * 2
    memory = build(g)
    key, value = rows(g, wanted.tokens, 2, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    cos, sin = torch.randn(2, table_rows, rotary // 2, generator=generator).unbind(0)
    query = torch.randn(wanted.tokens, 2 * g.heads, g.dim, generator=generator).bfloat16()
    mapping = wanted.tensor()
    attributes = {
        "rope_style": style, "rotary_dim": rotary, "rope_dtype": torch.float32,
        "out_dtype": torch.bfloat16,
    }  # fmt: skip
    safe = at.long().clamp(0, table_rows - 1)
    turned = rope(key, *token_tables(cos, sin, safe), **attributes)
    want = expected(memory, turned, value, mapping, scales)
    k, v = halves(memory)
    q, back = run.rope_kv_cache(
        query, key, value, cos, sin, at, k, v, mapping, **_scales(scales), **attributes,
        return_key=True, kv_layout=g.layout.op_layout,
    )  # fmt: skip
    assert torch.equal(back, turned)
    assert torch.equal(q, rope(query, *token_tables(cos, sin, safe), **attributes))
    wrong = (memory.flat() != want).nonzero()
    assert not len(wrong), f"{len(wrong)} elements of the pool, first at {wrong[:4].tolist()}"
