"""Sizes as plain integers, read without adding guards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class NoHintError(ValueError):
    """A symbolic size has no example value (an unbacked symbol)."""


def hint(size: Any) -> int:
    """An ``int`` for an ``int`` or a backed ``SymInt`` (its example value; no guard is added).

    Raises :class:`NoHintError` for an unbacked symbol. Run on torch 2.11 and 2.13.
    """
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    value = getattr(node, "hint", None)
    if value is None and node is not None and getattr(node, "has_hint", lambda: False)():
        value = node.require_hint()
    if value is None:
        raise NoHintError(f"{size} has no example value")
    return int(value)


def hints(shape: Iterable[Any]) -> tuple[int, ...]:
    """:func:`hint` of every size of a shape or stride."""
    return tuple(hint(s) for s in shape)
