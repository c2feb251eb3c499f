"""Hypothesis strategies for paged KV caches in foreign memory, and an address map to judge by.

A :class:`Geometry` says which layout, sizes and dtype a cache has and how it lies in its *pool*:
one flat buffer of noise that also holds other layers and gaps between everything. :func:`address`
is the documented meaning of a layout, written down a second time, element by element and without
a look at :func:`fusion.layout.split_kv_cache`: which element of which tensor holds ``(block,
offset, head, d)``. Whatever a call must not touch is the rest of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fusion.layout import KVCacheLayout

L = KVCacheLayout
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "uint8 as e4m3fn": torch.float8_e4m3fn,
    "uint8 as e4m3fnuz": torch.float8_e4m3fnuz,
}
HEADS = st.sampled_from([4, 1, 2, 3, 5, 6, 7, 8, 9])
DIMS = st.one_of(st.sampled_from([8, 16, 32, 64, 80, 96, 112, 128, 192, 256]), st.integers(8, 256))
BLOCKS = st.one_of(st.sampled_from([1, 2, 8, 16, 32, 64, 128, 256, 784, 832]), st.integers(1, 832))
MOST = 1 << 19  # elements of a drawn cache; another size gives way to a large one


@dataclass(frozen=True)
class Geometry:
    """A cache and its place in a pool, in words.

    ``order`` permutes the axes ``(layer, part, *shape without the last)`` from the outermost to
    the innermost in memory (``part`` counts the tensors of a pair that share a stride pattern);
    ``pads`` are elements left out after each of them, ``offset`` those before everything.
    """

    layout: KVCacheLayout = L.PACKED
    blocks: int = 3
    block: int = 16
    heads: int = 4
    dim: int = 32
    dim_v: int = 32
    dtype: str = "bf16"
    layers: int = 1
    layer: int = 0
    order: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    offset: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that operations see."""
        return DTYPES[self.dtype]

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.blocks * self.block

    @property
    def width(self) -> int:
        """x of the shuffled layout."""
        return 16 // self.torch_dtype.itemsize

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that the layout's documentation gives, written down again."""
        b, n, h, d, dv, x = (
            self.blocks, self.block, self.heads, self.dim, self.dim_v, self.width,
        )  # fmt: skip
        table: dict[KVCacheLayout, tuple[tuple[int, ...], ...]] = {
            L.NHD: ((b, n, h, d), (b, n, h, dv)),
            L.HND: ((b, h, n, d), (b, h, n, dv)),
            L.HF_STATIC: ((b, h, n, d), (b, h, n, dv)),
            L.PACKED: ((b, h, n, d + dv),),
            L.KV_FIRST: ((2, b, n, h, d),),
            L.BLOCK_FIRST: ((b, 2, n, h, d),),
            L.SHUFFLE: ((b, h, d // x, n, x), (b, h, n // x, dv, x)),
        }
        return table[self.layout]


@dataclass
class Memory:
    """A pool of noise with the cache of a geometry in it.

    ``pool`` is the flat buffer as bytes, ``tensors`` the tensors of the cache (views of it), and
    ``cache`` what :func:`fusion.layout.split_kv_cache` takes.
    """

    geometry: Geometry
    pool: Tensor
    tensors: tuple[Tensor, ...]
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.tensors if self.geometry.layout.is_pair else self.tensors[0]

    def elements(self) -> Tensor:
        """The pool as a flat tensor of the cache's dtype."""
        return self.pool.view(self.geometry.torch_dtype)

    def flat(self) -> Tensor:
        """The pool as integers, one for each element, to compare bits."""
        size = self.geometry.torch_dtype.itemsize
        return self.pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])


def strides(g: Geometry, shape: Sequence[int], parts: int) -> tuple[list[int], int, int, int]:
    """Element strides of one tensor in the pool, of a part, of a layer, and the extent."""
    sizes = [g.layers, parts, *shape[:-1]]
    order = g.order or tuple(range(len(sizes)))
    pads = g.pads or (0,) * len(sizes)
    at = shape[-1] + pads[0]
    out = [0] * len(sizes)
    for position, axis in enumerate(reversed(order)):
        out[axis] = at
        at = at * sizes[axis] + (pads[position + 1] if position + 1 < len(pads) else 0)
    return [*out[2:], 1], out[1], out[0], at


def build(g: Geometry, seed: int = 0) -> Memory:
    """The pool of a geometry, full of noise (NaNs included), and the cache in it."""
    shapes = g.shapes()
    together = len(set(shapes)) == 1
    dtype = g.torch_dtype
    if together:
        step, part, layer, extent = strides(g, shapes[0], len(shapes))
        starts = [g.offset + p * part + g.layer * layer for p in range(len(shapes))]
        steps = [step] * len(shapes)
        total = g.offset + extent
    else:
        steps, starts, total = [], [], g.offset
        for shape in shapes:
            step, _, layer, extent = strides(g, shape, 1)
            steps.append(step)
            starts.append(total + g.layer * layer)
            total += extent
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(
        -(2**63), 2**63 - 1, (-(-total * dtype.itemsize // 8) + 1,), generator=generator
    ).view(torch.uint8)
    if g.dtype.startswith("uint8"):
        # The engine's cache is made of bytes; its view is what the operations get.
        tensors = tuple(
            pool.as_strided(s, t, o).view(dtype)
            for s, t, o in zip(shapes, steps, starts, strict=True)
        )
    else:
        elements = pool.view(dtype)
        tensors = tuple(
            elements.as_strided(s, t, o) for s, t, o in zip(shapes, steps, starts, strict=True)
        )
    return Memory(g, pool, tensors)


def address(memory: Memory, kv: int, slot: Tensor) -> Tensor:
    """Where K (``kv`` 0) or V (1) of each slot lies: elements of the pool ``[S, heads, dim]``.

    The formulas are those of the layout's documentation; strides and offsets are read off the
    tensors that were put into the pool.
    """
    g = memory.geometry
    b, n = (slot // g.block)[:, None, None], (slot % g.block)[:, None, None]
    h = torch.arange(g.heads)[None, :, None]
    d = torch.arange(g.dim_v if kv else g.dim)[None, None, :]
    x = g.width
    t = memory.tensors[kv if g.layout.is_pair else 0]
    index: dict[KVCacheLayout, tuple[Any, ...]] = {
        L.NHD: (b, n, h, d),
        L.HND: (b, h, n, d),
        L.HF_STATIC: (b, h, n, d),
        L.PACKED: (b, h, n, d + kv * g.dim),
        L.KV_FIRST: (kv, b, n, h, d),
        L.BLOCK_FIRST: (b, kv, n, h, d),
        L.SHUFFLE: (b, h, n // x, d, n % x) if kv else (b, h, d // x, n, d % x),
    }
    at = torch.full((), t.storage_offset(), dtype=torch.int64)
    for i, stride in zip(index[g.layout], t.stride(), strict=True):
        at = at + i * stride
    return at.expand(slot.shape[0], h.shape[1], d.shape[2])


def owned(memory: Memory) -> Tensor:
    """Every element of the pool that belongs to the cache's tensors, in no special order."""
    places = []
    for t in memory.tensors:
        at = torch.full((), t.storage_offset(), dtype=torch.int64)
        for size, stride in zip(t.shape, t.stride(), strict=True):
            at = at[..., None] + torch.arange(size) * stride
        places.append(at.reshape(-1))
    return torch.cat(places)


# --- strategies ----------------------------------------------------------------------------


@st.composite
def geometries(
    draw: st.DrawFn,
    layouts: Sequence[KVCacheLayout] = tuple(L),
    dtypes: Sequence[str] = tuple(DTYPES),
    most: int = MOST,
    logical: Geometry | None = None,
) -> Geometry:
    """A cache in any layout, sizes, dtype and place; ``logical`` fixes what a reader can see."""
    layout = draw(st.sampled_from(list(layouts)))
    dtype = draw(st.sampled_from(list(dtypes)))
    if logical is None:
        heads, dim, block = draw(HEADS), draw(DIMS), draw(BLOCKS)
        dim_v = dim if layout.equal_head_dims or draw(st.booleans()) else draw(DIMS)
        if layout is L.SHUFFLE:
            x = 16 // DTYPES[dtype].itemsize
            dim, block = -(-dim // x) * x, min(-(-block // x) * x, 832)
        blocks = draw(st.sampled_from([1, 2, 2, 3, 4, 5]))
        if blocks * block * heads * (dim + dim_v) > most:
            # Something has to give way; what, is drawn too, so that every size is seen large.
            x = 16 if layout is L.SHUFFLE else 1
            room = most // blocks
            give = draw(st.sampled_from(["heads", "block", "dim"]))
            if give == "dim":
                dim = dim_v = 16
            if give == "heads" or heads * (dim + dim_v) > room // x:
                heads = max(1, room // ((dim + dim_v) * block))
            block = max(x, min(block, room // (heads * (dim + dim_v)) // x * x))
    else:
        heads, dim, dim_v = logical.heads, logical.dim, logical.dim_v
        block, blocks = logical.block, logical.blocks
    rank = 5 if layout in (L.KV_FIRST, L.BLOCK_FIRST, L.SHUFFLE) else 4
    place = draw(st.sampled_from(["dense", "stack", "pool", "pool"]))
    layers, order, pads, offset = 1, (), (), 0
    if place != "dense":
        layers = draw(st.integers(1, 3))
    if place == "pool":
        order = tuple(draw(st.permutations(range(rank + 1))))
        pads = tuple(draw(st.lists(st.integers(0, 9), min_size=rank + 2, max_size=rank + 2)))
        offset = draw(st.integers(0, 77))
        if heads * dim * block * blocks > most // 8:
            pads = (pads[0] % 2, *(0 for _ in pads[1:]))
    return Geometry(
        layout, blocks, block, heads, dim, dim_v, dtype, layers,
        draw(st.integers(0, layers - 1)), order, pads, offset,
    )  # fmt: skip


@dataclass(frozen=True)
class Slots:
    """``mapping``: slot of each row, at most ``tokens`` of them, negative = padding."""

    tokens: int
    mapping: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The slot mapping as an operation takes it."""
        return torch.tensor(self.mapping, dtype=self.dtype)


@st.composite
def slots(draw: st.DrawFn, g: Geometry, tokens: int | None = None) -> Slots:
    """Distinct slots: random, at block boundaries, in the last block; padded, or short of T."""
    kind = draw(st.sampled_from(["random", "boundary", "last block", "run"]))
    total = g.slots
    if kind == "random":
        pool = st.integers(0, total - 1)
    elif kind == "boundary":
        edges = {b * g.block + e for b in range(g.blocks) for e in (0, g.block - 1)}
        pool = st.sampled_from(sorted(edges | {0, total - 1}))
    elif kind == "last block":
        pool = st.integers(total - g.block, total - 1)
    else:
        start = draw(st.integers(0, total - 1))
        pool = st.integers(start, min(start + 8, total - 1))
    chosen = draw(st.lists(pool, unique=True, max_size=7 if tokens is None else tokens))
    mapping: list[int] = []
    for slot in chosen:
        mapping += [draw(st.sampled_from([-1, -1, -7, -(2**31)]))] * draw(
            st.sampled_from([0, 0, 0, 1, 2])
        )
        mapping.append(slot)
    mapping += [-1] * draw(st.integers(0, 2))
    if tokens is None:
        tokens = len(mapping) + draw(st.integers(0, 2))
    return Slots(tokens, tuple(mapping[:tokens]), draw(st.sampled_from([torch.int32, torch.int64])))


@st.composite
def positions(draw: st.DrawFn, tokens: int, rows: int, padded: Sequence[int] = ()) -> Tensor:
    """Positions into a table of ``rows`` rows; those of ``padded`` tokens may be anything."""
    values = [draw(st.one_of(st.sampled_from([0, rows - 1]), st.integers(0, rows - 1)))
              for _ in range(tokens)]  # fmt: skip
    for t in padded:
        values[t] = draw(st.sampled_from([0, -1, rows, 10**6, -(2**31)]))
    return torch.tensor(values, dtype=draw(st.sampled_from([torch.int32, torch.int64])))


def rows(g: Geometry, tokens: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key and value ``[T, heads, D or Dv]``, with outliers past what fp8 can hold."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(tokens, g.heads, g.dim, generator=generator) * 60
    value = torch.randn(tokens, g.heads, g.dim_v, generator=generator) * 600
    return key.to(dtype), value.to(dtype)
