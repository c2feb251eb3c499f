"""Sizes as plain integers, read without adding guards."""

from __future__ import annotations

import weakref
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


def example(size: Any) -> int | None:
    """:func:`hint`, or None where a size has no example value (or is no size at all)."""
    try:
        return hint(size)
    except NoHintError:
        return None


def pinned(size: Any) -> int | None:
    """The number that a size is whenever the graph runs, or None where it may be another one.

    A symbolic size counts where the guards that are there already leave it a single value
    (``(s + 1) // 2 == 4``, because it was broadcast with 4). No guard is added. Unlike
    :func:`hint`, whose answer is an example, this one may be built into a graph.
    """
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    if node is None:
        return None
    if node.expr.is_Integer:
        return int(node.expr)
    known = _PINNED.setdefault(node.shape_env, {})
    if node.expr not in known:
        # Imported late: it costs a quarter of a second and only symbolic graphs need it.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        try:
            value = hint(size)
        except NoHintError:
            return None
        if not statically_known_true(size == value):
            return None  # guards may still come: not remembered
        known[node.expr] = value
    return known[node.expr]


_PINNED: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def hints(shape: Iterable[Any]) -> tuple[int, ...]:
    """:func:`hint` of every size of a shape or stride."""
    return tuple(hint(s) for s in shape)
