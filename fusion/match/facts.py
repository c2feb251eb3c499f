"""What recognisers say about a graph: typed facts, or a :class:`Miss` that names the node.

A fact is read-only knowledge about existing nodes. Nothing in here changes a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fusion.reason import Reason

Size: TypeAlias = Any
"""An ``int`` or a ``torch.SymInt``, as found in fake-tensor metadata."""


@dataclass(frozen=True)
class TokenView:
    """A node's value seen as ``[tokens, heads, dim]``.

    ``order`` is a permutation of the node's dimensions that puts token dimensions first, then
    the head dimension (absent where ``heads == 1`` was squeezed away), then the dim axis;
    permuting by it and reshaping to ``(tokens, heads, dim)`` gives the canonical operand.
    ``token_dims`` says how many leading entries of ``order`` are token dimensions and
    ``token_sizes`` gives their sizes, so the inverse (canonical result back to the node's own
    shape) can be built as well. A dimension that merges tokens and heads (``[T*H, D]``) is
    counted as a token dimension with ``merged_heads=True``.
    """

    node: Node
    order: tuple[int, ...]
    token_dims: int
    token_sizes: tuple[Size, ...]
    tokens: Size
    heads: int
    dim: int
    merged_heads: bool = False


@dataclass(frozen=True)
class RopeTable:
    """The cos or sin operand of a rope.

    Per token (``positions is None``): ``node`` broadcasts over heads; ``roles[i]`` says what
    dimension ``i`` of the node follows: an integer (index into ``Rope.x``'s token dimensions),
    ``"dim"`` (the rotated dimension) or None (size 1). As a table: ``node`` is
    ``[max_pos, width]`` and ``positions`` a node holding one integer per token.
    ``columns`` is the half-open range of the node's dim axis that the rope reads, and
    ``full`` tells whether it has one entry per rotated element (``rotary_dim`` columns) or one
    per pair (``rotary_dim // 2``). A full-width table whose two halves are proved equal is
    given as its first half (for interleaved: stays full unless a half-width source is found).
    ``part`` (``real`` or ``imag``) is set where ``node`` is complex: the table is that component.
    """

    node: Node
    roles: tuple[int | str | None, ...]
    columns: tuple[int, int]
    full: bool
    positions: Node | None = None
    part: str | None = None


@dataclass(frozen=True)
class RMSNorm:
    """``y = x * rsqrt(mean(x**2) + eps) * w`` over the last axis of each head.

    ``cast``: ``late`` (down-cast, then multiply by the weight), ``early`` (weight in f32, then
    down-cast) or ``none`` (stays f32). ``weight_mode``: ``w`` or ``1+w``. ``inv_rms``:
    ``rsqrt``, ``pow`` (``** -0.5``), ``div`` (``x / sqrt``) or ``recip`` (``x * (1 / sqrt)``).
    ``eps`` is a number, or the node of a 0-dim tensor. ``nodes`` are the nodes between ``x``
    and the output, both the output included and ``x`` excluded.
    """

    x: TokenView
    weight: Node | None
    eps: float | Node
    weight_mode: str
    cast: str
    inv_rms: str
    out_dtype: torch.dtype
    nodes: frozenset[Node] = field(repr=False, default=frozenset())


@dataclass(frozen=True)
class Rope:
    """``out = x * cos + partner(x) * sin`` on the first ``rotary_dim`` elements of each head.

    ``style``: ``half`` or ``interleaved``. ``rope_dtype`` is the dtype in which products and
    sums are rounded; ``out_dtype`` that of the result. ``product`` is ``separate`` where each of
    them is an operation of its own, ``complex`` where one complex multiplication computes both:
    then the kernel that runs it decides whether it rounds products and sums apart. ``x`` is the
    value before the rope (after the norm, if there is one), ``out`` the rotated value.
    """

    x: TokenView
    out: TokenView
    cos: RopeTable
    sin: RopeTable
    style: str
    rotary_dim: int
    rope_dtype: torch.dtype
    out_dtype: torch.dtype
    product: str = "separate"
    nodes: frozenset[Node] = field(repr=False, default=frozenset())


@dataclass(frozen=True)
class CachePlane:
    """K or V of a paged cache, as an NHD view ``[num_blocks, block_size, heads, dim]``.

    ``base`` is the node that holds the storage before the write (a graph input, or the result
    of an earlier write to it); size, stride and storage_offset address it in elements, relative
    to the base's own storage, as ``torch.as_strided`` would.
    """

    base: Node
    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    storage_offset: Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Slots:
    """Where the rows go: ``node`` holds one slot (or block/offset pair) per token.

    ``kind``: ``slots`` (a 1-D slot mapping whose negative entries write nothing),
    ``index`` (entries of ``index_put``: a negative one counts from the end, as in torch) or
    ``block_offset`` (``node`` is the block index, ``offset`` the offset within the block;
    both wrap like ``index``).  ``batch`` is set for HF's static cache ``[B, H, S, D]`` where
    each sequence is a block and ``node`` holds positions shared by all sequences.
    """

    node: Node
    kind: str
    offset: Node | None = None
    batch: Size | None = None


@dataclass(frozen=True)
class CacheWrite:
    """One layer's write of K and V into its cache.

    ``key`` and ``value`` are the written rows (before any cast or scaling to the cache dtype,
    which the write itself does). ``nodes`` are all nodes that the rewrite replaces;
    ``results`` maps each replaced node that stands for the *new content of a base* to that
    base's index in ``bases``; readers of these must move to the fused op's result.
    """

    spelling: str
    key: TokenView
    value: TokenView
    key_plane: CachePlane
    value_plane: CachePlane
    slots: Slots
    k_scale: Node | None
    v_scale: Node | None
    kv_layout: str
    bases: tuple[Node, ...]
    results: dict[Node, int] = field(repr=False, hash=False, default_factory=dict)
    nodes: frozenset[Node] = field(repr=False, default=frozenset())
    anchor: Node | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Miss:
    """A recogniser's "no": the reason, and how far it got (larger ``depth`` = nearer miss)."""

    reason: Reason
    node: Node | None = None
    depth: int = 0
    facts: tuple[object, ...] = ()
