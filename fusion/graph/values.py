"""Small questions about metadata and ops of a graph's nodes. None of them adds a guard."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds for certain."""
    if isinstance(condition, bool):
        return condition
    # Imported late: it costs a quarter of a second and only symbolic graphs need it.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def plain(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes as numbers, where some are given as nodes."""
    return tuple(s.meta["val"] if isinstance(s, Node) else s for s in sizes)


def all_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two size tuples are known to be equal."""
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides, dimensions of size one aside."""
    return all(
        known(n == 1) or known(s == t)
        for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, strides and storage offset."""
    same = all_equal(a.shape, b.shape) and same_strides(a, b)
    return same and known(a.storage_offset() == b.storage_offset())


def is_view(node: Node) -> bool:
    """Whether the value lives in the storage of the node's first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    if schema is None or schema.is_mutable or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None


def is_size(node: Node) -> bool:
    """Whether the node asks for sizes or strides only."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.startswith("aten::sym_")


def copies_to(node: Node, base: Node) -> bool:
    """Whether the node is the epilogue that stores a new content in its buffer."""
    return node.target is aten.copy_.default and node.args[0] is base and node.args[1] is not base


def is_undefined(node: Node) -> bool:
    """Whether the value's contents are whatever lies in memory (``empty`` and its kin)."""
    return isinstance(node.target, torch._ops.OpOverload) and "empty" in str(node.target)


def behind(
    nodes: Iterable[Node],
    *,
    stop: Set[Node] = frozenset(),
    follow: Callable[[Node], bool] | None = None,
    most: int | None = None,
) -> Iterator[Node]:
    """The nodes and what they are computed from, each once, nearest first.

    Nodes of ``stop`` are left out, and what they are computed from with them unless there is
    another way. The inputs of a node are looked at only after it was yielded, and only where
    ``follow`` says so. Ends once more than ``most`` nodes are known.
    """
    todo = deque(dict.fromkeys(node for node in nodes if node not in stop))
    seen = set(todo)
    while todo and (most is None or len(seen) <= most):
        node = todo.popleft()
        yield node
        if follow is None or follow(node):
            fresh = [n for n in node.all_input_nodes if n not in seen and n not in stop]
            seen.update(fresh)
            todo += fresh
