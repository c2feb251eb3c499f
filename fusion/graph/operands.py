"""What surgery needs to know of an operand, structurally.

The typed facts of ``fusion.match.facts`` satisfy these protocols; this floor does not import
them. See there for what the fields mean.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.fx import Node


class TokenViewLike(Protocol):
    """A node's value seen as ``[tokens, heads, dim]``."""

    @property
    def node(self) -> Node: ...
    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def token_dims(self) -> int: ...
    @property
    def token_sizes(self) -> tuple[Any, ...]: ...
    @property
    def tokens(self) -> Any: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def merged_heads(self) -> bool: ...


class TableLike(Protocol):
    """A cos or sin operand."""

    @property
    def node(self) -> Node: ...
    @property
    def roles(self) -> tuple[Any, ...]: ...
    @property
    def columns(self) -> tuple[int, int]: ...
    @property
    def full(self) -> bool: ...
    @property
    def positions(self) -> Node | None: ...
    @property
    def part(self) -> str | None: ...


class PlaneLike(Protocol):
    """K or V of a cache, as strides over a base."""

    @property
    def base(self) -> Node: ...
    @property
    def size(self) -> tuple[Any, ...]: ...
    @property
    def stride(self) -> tuple[Any, ...]: ...
    @property
    def storage_offset(self) -> Any: ...
    @property
    def dtype(self) -> torch.dtype: ...


class SlotsLike(Protocol):
    """Where the rows go."""

    @property
    def node(self) -> Node: ...
    @property
    def kind(self) -> str: ...
    @property
    def offset(self) -> Node | None: ...
    @property
    def batch(self) -> Any: ...


class WriteLike(Protocol):
    """A cache write that the new call replaces."""

    @property
    def key_plane(self) -> PlaneLike: ...
    @property
    def value_plane(self) -> PlaneLike: ...
    @property
    def bases(self) -> tuple[Node, ...]: ...
    @property
    def results(self) -> dict[Node, int]: ...
    @property
    def nodes(self) -> frozenset[Node]: ...
    @property
    def anchor(self) -> Node | None: ...


def kind_of(value: object) -> type | None:
    """The protocol that an operand satisfies, None for nodes and constants."""
    cls = type(value)
    if cls not in _KINDS:  # looking at the fields is slow: once a class
        _KINDS[cls] = _kind(cls)
    return _KINDS[cls]


_KINDS: dict[type, type | None] = {}


def _kind(cls: type) -> type | None:
    names = {n for c in cls.__mro__ for n in getattr(c, "__annotations__", {})}
    for protocol, fields in _FIELDS:
        if fields <= names:
            return protocol
    return None


_FIELDS: tuple[tuple[type, frozenset[str]], ...] = (
    (TokenViewLike, frozenset({"node", "order", "token_dims", "token_sizes", "heads", "dim"})),
    (TableLike, frozenset({"node", "roles", "columns", "positions"})),
    (PlaneLike, frozenset({"base", "size", "stride", "storage_offset", "dtype"})),
    (SlotsLike, frozenset({"node", "kind", "offset", "batch"})),
)
