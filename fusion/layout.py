"""KV-cache layouts: the shapes, where K and V are cut, and slot arithmetic.

Every dense layout is a *NHD view* ``[num_blocks, block_size, heads, head_dim]`` with some strides,
and the operations of :mod:`fusion.ops` take those views. :func:`split_kv_cache` is the only place
where K and V are cut out of a cache. It is told the layout and never guesses it from a shape:
``[B, 2, N, H, D]`` with B = 2 looks exactly like ``[2, B, N, H, D]``.

AITER's shuffled layout is no such view; it is passed on as it is, with ``kv_layout="SHUFFLE"``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor


class KVCacheLayout(enum.Enum):
    """How a paged KV cache lies in memory.

    B = blocks, N = tokens in a block, H = KV heads, D = head dim of K, Dv of V, S = tokens of a
    sequence, x = 16 // itemsize.

    ============  =============================================================  ==============
    member        shape                                                          Dv != D
    ============  =============================================================  ==============
    NHD           pair, ``[B, N, H, D]`` and ``[B, N, H, Dv]``                   yes
    HND           pair, ``[B, H, N, D]`` and ``[B, H, N, Dv]``                   yes
    PACKED        one, ``[B, H, N, D + Dv]``, K first                            yes
    KV_FIRST      one, ``[2, B, N, H, D]``                                       no
    BLOCK_FIRST   one, ``[B, 2, N, H, D]``                                       no
    HF_STATIC     pair, ``[B, H, S, D]`` and ``[B, H, S, Dv]`` (block=sequence)  yes
    SHUFFLE       pair, ``[B, H, D/x, N, x]`` and ``[B, H, N/x, Dv, x]``         yes
    ============  =============================================================  ==============
    """

    NHD = "NHD"
    HND = "HND"
    PACKED = "PACKED"
    KV_FIRST = "KV_FIRST"
    BLOCK_FIRST = "BLOCK_FIRST"
    HF_STATIC = "HF_STATIC"
    SHUFFLE = "SHUFFLE"

    @classmethod
    def parse(cls, name: str | KVCacheLayout) -> KVCacheLayout:
        """The layout of that name, in any case, ``-`` or ``_``.

        Raises:
            ValueError: there is no such layout; names those that exist.
        """
        if isinstance(name, cls):
            return name
        try:
            return cls[str(name).strip().upper().replace("-", "_")]
        except KeyError:
            known = ", ".join(member.name for member in cls)
            raise ValueError(
                f"{name!r} is not a KV-cache layout; the layouts are {known}"
            ) from None

    @property
    def is_pair(self) -> bool:
        """Whether K and V are two tensors (else one tensor holds both)."""
        return self not in _ONE_TENSOR

    @property
    def equal_head_dims(self) -> bool:
        """Whether the layout forces V to have K's head dim."""
        return self in (KVCacheLayout.KV_FIRST, KVCacheLayout.BLOCK_FIRST)

    @property
    def op_layout(self) -> str:
        """What the ``kv_layout`` argument of the operations has to be: "NHD" or "SHUFFLE"."""
        return "SHUFFLE" if self is KVCacheLayout.SHUFFLE else "NHD"

    def describe(self) -> str:
        """The shape in words, for documentation and messages."""
        return _DESCRIPTIONS[self]


_ONE_TENSOR = frozenset({KVCacheLayout.PACKED, KVCacheLayout.KV_FIRST, KVCacheLayout.BLOCK_FIRST})
_DESCRIPTIONS = {
    KVCacheLayout.NHD: "a pair: key [blocks, block, heads, D], value [blocks, block, heads, Dv]",
    KVCacheLayout.HND: "a pair: key [blocks, heads, block, D], value [blocks, heads, block, Dv]",
    KVCacheLayout.PACKED: "one tensor [blocks, heads, block, D + Dv], K first",
    KVCacheLayout.KV_FIRST: "one tensor [2, blocks, block, heads, D]",
    KVCacheLayout.BLOCK_FIRST: "one tensor [blocks, 2, block, heads, D]",
    KVCacheLayout.HF_STATIC: (
        "a pair: key [sequences, heads, length, D], value [sequences, heads, length, Dv]; "
        "a block is a sequence"
    ),
    KVCacheLayout.SHUFFLE: (
        "a pair: key [blocks, heads, D/x, block, x], value [blocks, heads, block/x, Dv, x], "
        "x = 16 / bytes per element"
    ),
}
_RANK_5 = frozenset({KVCacheLayout.KV_FIRST, KVCacheLayout.BLOCK_FIRST, KVCacheLayout.SHUFFLE})


def shuffle_width(dtype: torch.dtype) -> int:
    """x of the shuffled layout: how many elements fill 16 bytes."""
    return 16 // dtype.itemsize


def split_kv_cache(
    kv_cache: Tensor | Sequence[Tensor],
    layout: KVCacheLayout | str,
    head_dim: int,
    head_dim_v: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cuts a cache into its key half and its value half, as views.

    Nothing is copied: strides and storage offset of the cache are kept, whatever they are.

    Args:
        kv_cache: one tensor, or the pair (key, value), as the layout says
            (:class:`KVCacheLayout`).
        layout: never guessed from the shape.
        head_dim: D, elements in one head of K.
        head_dim_v: Dv, elements in one head of V; None = D.

    Returns:
        ``(key, value)``: NHD views ``[num_blocks, block_size, heads, D or Dv]`` with a contiguous
        last dimension. For ``SHUFFLE`` the two tensors as they are, to be passed to the operations
        with ``kv_layout="SHUFFLE"``.

    Raises:
        TypeError: a pair where the layout is one tensor, or the reverse.
        ValueError: rank, head dim or strides do not fit the layout; says which, and what is needed.
    """
    layout = KVCacheLayout.parse(layout)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if layout.equal_head_dims and head_dim != head_dim_v:
        raise ValueError(
            f"layout {layout.name} holds K and V in one tensor of one head dim, but head_dim is "
            f"{head_dim} and head_dim_v is {head_dim_v}; use a pair layout or PACKED"
        )
    if layout.is_pair:
        if isinstance(kv_cache, Tensor):
            have = f"kv_cache is one tensor of shape {list(kv_cache.shape)}"
            raise TypeError(f"layout {layout.name} is {layout.describe()}; {have}")
        if len(kv_cache) != 2:
            have = f"kv_cache has {len(kv_cache)} items"
            raise TypeError(f"layout {layout.name} is {layout.describe()}; {have}")
        key, value = kv_cache
        _check_rank("key cache", key, layout)
        _check_rank("value cache", value, layout)
        if layout is KVCacheLayout.SHUFFLE:
            return _check_shuffled(key, value, head_dim, head_dim_v)
        if layout is not KVCacheLayout.NHD:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
    else:
        if not isinstance(kv_cache, Tensor):
            have = f"kv_cache is a {type(kv_cache).__name__}"
            raise TypeError(f"layout {layout.name} is {layout.describe()}; {have}")
        _check_rank("kv_cache", kv_cache, layout)
        if layout is KVCacheLayout.PACKED:
            if kv_cache.shape[3] != head_dim + head_dim_v:
                raise ValueError(
                    f"layout PACKED is {layout.describe()}; the last dimension is "
                    f"{kv_cache.shape[3]}, but head_dim + head_dim_v is "
                    f"{head_dim} + {head_dim_v} = {head_dim + head_dim_v}"
                )
            nhd = kv_cache.transpose(1, 2)
            key, value = nhd[..., :head_dim], nhd[..., head_dim:]
        else:
            axis = 0 if layout is KVCacheLayout.KV_FIRST else 1
            if kv_cache.shape[axis] != 2:
                raise ValueError(
                    f"layout {layout.name} is {layout.describe()}; dimension {axis} is "
                    f"{kv_cache.shape[axis]}, it must be 2 (K and V)"
                )
            key, value = kv_cache.select(axis, 0), kv_cache.select(axis, 1)
    for name, half, dim in (("key", key, head_dim), ("value", value, head_dim_v)):
        if half.shape[3] != dim:
            raise ValueError(
                f"layout {layout.name} is {layout.describe()}; the {name} half has head dim "
                f"{half.shape[3]}, it must be {dim}"
            )
        if half.shape[3] > 1 and half.stride(3) != 1:
            raise ValueError(
                f"the elements of a head must lie side by side in the {name} half; its last "
                f"stride is {half.stride(3)}, it must be 1 (layout {layout.name}, strides "
                f"{list(half.stride())})"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value cache must have equal blocks, block size and heads; as "
            f"[blocks, block, heads] they have {list(key.shape[:3])} and {list(value.shape[:3])}"
        )
    return key, value


def _check_rank(name: str, tensor: Tensor, layout: KVCacheLayout) -> None:
    rank = 5 if layout in _RANK_5 else 4
    if tensor.dim() != rank:
        raise ValueError(
            f"layout {layout.name} is {layout.describe()}; {name} has {tensor.dim()} dimensions "
            f"(shape {list(tensor.shape)}), it must have {rank}"
        )


def _check_shuffled(
    key: Tensor, value: Tensor, head_dim: int, head_dim_v: int
) -> tuple[Tensor, Tensor]:
    x = shuffle_width(key.dtype)
    what = KVCacheLayout.SHUFFLE.describe()
    if key.shape[4] != x or key.shape[2] * x != head_dim:
        raise ValueError(
            f"layout SHUFFLE is {what}; the key cache has shape {list(key.shape)}, with D = "
            f"{head_dim} and x = {x} dimensions 2 and 4 must be {head_dim / x:g} and {x}"
        )
    if value.shape[4] != x or value.shape[3] != head_dim_v:
        raise ValueError(
            f"layout SHUFFLE is {what}; the value cache has shape {list(value.shape)}, with Dv = "
            f"{head_dim_v} and x = {x} dimensions 3 and 4 must be {head_dim_v} and {x}"
        )
    if key.shape[:2] != value.shape[:2] or key.shape[3] != value.shape[2] * x:
        raise ValueError(
            f"layout SHUFFLE is {what}; blocks, heads and block size of the key cache "
            f"({list(key.shape)}) and of the value cache ({list(value.shape)}) differ"
        )
    return key, value


def cache_shapes(
    layout: KVCacheLayout | str,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensor or tensors of a cache. See :func:`empty_kv_cache`."""
    layout = KVCacheLayout.parse(layout)
    dim_v = head_dim if head_dim_v is None else head_dim_v
    b, n, h, d = num_blocks, block_size, num_heads, head_dim
    for name, size, least in (
        ("num_blocks", b, 0),
        ("block_size", n, 1),
        ("num_heads", h, 1),
        ("head_dim", d, 1),
        ("head_dim_v", dim_v, 1),
    ):
        if size < least:
            raise ValueError(f"{name} is {size}, it must be at least {least}")
    if layout.equal_head_dims and d != dim_v:
        raise ValueError(
            f"layout {layout.name} needs equal head dims for K and V, but head_dim is {d} and "
            f"head_dim_v is {dim_v}"
        )
    if layout is KVCacheLayout.NHD:
        return (b, n, h, d), (b, n, h, dim_v)
    if layout in (KVCacheLayout.HND, KVCacheLayout.HF_STATIC):
        return (b, h, n, d), (b, h, n, dim_v)
    if layout is KVCacheLayout.PACKED:
        return ((b, h, n, d + dim_v),)
    if layout is KVCacheLayout.KV_FIRST:
        return ((2, b, n, h, d),)
    if layout is KVCacheLayout.BLOCK_FIRST:
        return ((b, 2, n, h, d),)
    x = shuffle_width(dtype)
    if d % x or n % x:
        raise ValueError(
            f"layout SHUFFLE keeps {x} elements of {dtype} together: head_dim ({d}) and "
            f"block_size ({n}) must be multiples of {x}"
        )
    return (b, h, d // x, n, x), (b, h, n // x, dim_v, x)


def empty_kv_cache(
    layout: KVCacheLayout | str,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Allocates a cache, contiguous and *not* initialised.

    Args:
        layout: see :class:`KVCacheLayout`; for ``HF_STATIC`` ``num_blocks`` is the number of
            sequences and ``block_size`` the length of each.
        num_blocks, block_size, num_heads, head_dim, head_dim_v: sizes in elements;
            ``head_dim_v`` None = ``head_dim``.

    Returns:
        One tensor, or the pair (key, value), as :func:`split_kv_cache` takes it.

    Raises:
        ValueError: a size is too small or the layout does not allow the combination.
    """
    shapes = cache_shapes(layout, num_blocks, block_size, num_heads, head_dim, head_dim_v, dtype)
    tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])


def slot_to_block_offset(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each slot, ``slot = block * block_size + offset``, in 64 bits.

    Args:
        slots: any shape, int32 or int64. Negative slots (padding) give block and offset -1.
        block_size: tokens in a block.

    Returns:
        ``(block, offset)``, int64, the shape of ``slots``.

    Raises:
        ValueError: ``slots`` is not of an integer dtype, or ``block_size`` is under 1.
    """
    _check_integers("slots", slots)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, it must be at least 1")
    wide = slots.to(torch.int64)
    padding = wide < 0
    block = torch.div(wide, block_size, rounding_mode="floor").masked_fill(padding, -1)
    return block, torch.remainder(wide, block_size).masked_fill(padding, -1)


def make_slot_mapping(
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    sequences: Tensor | None = None,
) -> Tensor:
    """Slot of each token, ``block_table[sequence, pos // block_size] * block_size + pos %
    block_size``, in 64 bits and without looking at values on the host.

    Args:
        block_table: ``[B, max_blocks]`` int32 or int64, the pages of each sequence; -1 where a
            page is not allocated.
        positions: position of each token in its sequence, int32 or int64. ``[B, S]``: row b
            belongs to sequence b. ``[T]``: token t belongs to ``sequences[t]``, or to sequence t
            if ``sequences`` is None (one new token each, T == B). Negative = padding.
        block_size: tokens in a block.
        sequences: ``[T]`` integers, only with ``positions`` of shape ``[T]``.

    Returns:
        ``[T]`` (or ``[B * S]``) int64. -1, which writes nothing, for padding, for positions past
        the table and for pages that are not allocated.

    Raises:
        ValueError: a shape or dtype does not fit; says which.
    """
    _check_integers("block_table", block_table)
    _check_integers("positions", positions)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, it must be at least 1")
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)}, it must be [sequences, blocks]"
        )
    batch, width = block_table.shape
    if positions.dim() == 2:
        if sequences is not None:
            raise ValueError("sequences only goes with positions of shape [T], not [B, S]")
        if positions.shape[0] != batch:
            raise ValueError(
                f"positions has {positions.shape[0]} rows, block_table has {batch}; with "
                "positions of shape [B, S] they must be equal"
            )
        rows = torch.arange(batch, device=positions.device)[:, None].expand(positions.shape)
    elif positions.dim() == 1 and sequences is None:
        if positions.shape[0] != batch:
            raise ValueError(
                f"positions has {positions.shape[0]} tokens for {batch} rows of block_table; "
                "give sequences, the sequence of each token"
            )
        rows = torch.arange(batch, device=positions.device)
    elif positions.dim() == 1 and sequences is not None:
        _check_integers("sequences", sequences)
        if sequences.shape != positions.shape:
            raise ValueError(
                f"sequences has shape {list(sequences.shape)}, positions "
                f"{list(positions.shape)}; they must be equal"
            )
        rows = sequences.to(torch.int64)
    else:
        raise ValueError(f"positions has shape {list(positions.shape)}, it must be [T] or [B, S]")
    position = positions.to(torch.int64)
    if width == 0:
        return torch.full_like(position, -1).reshape(-1)
    page = torch.div(position, block_size, rounding_mode="floor")
    block = block_table.to(torch.int64)[rows, page.clamp(0, width - 1)]
    unknown = (position < 0) | (page >= width) | (block < 0)
    slot = block * block_size + torch.remainder(position, block_size)
    return slot.masked_fill(unknown, -1).reshape(-1)


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {tensor.dtype}, it must be torch.int32 or torch.int64")
