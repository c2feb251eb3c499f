"""One value in its other forms: moved, or cast to any dtype."""

from __future__ import annotations

import torch
from torch.fx import Node

from fusion.graph.elements import CASTS, op_name, value_of
from fusion.graph.moves import is_move


def forms_behind(node: Node) -> frozenset[Node]:
    """The node, and the values that it is a form of (all that it was put together from)."""
    forms: set[Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if at not in forms:
            forms.add(at)
            if _is_form(at):
                todo += at.all_input_nodes
    return frozenset(forms)


def forms_of(node: Node) -> frozenset[Node]:
    """The whole value in every form, before it and after it, and the parts of it alone."""
    forms = {node}
    todo = [node]
    while todo:
        at = todo.pop()
        near = [n for n in at.all_input_nodes if _is_form(at) and _count(n) == _count(at)]
        near += [n for n in at.users if _is_form(n) and not _is_joined(n)]
        todo += [n for n in near if n not in forms]
        forms.update(near)
    return frozenset(forms)


def _is_joined(node: Node) -> bool:
    """Whether other values stand beside in the result."""
    counts = [_count(n) for n in node.all_input_nodes]
    return len(counts) > 1 and _count(node) not in counts


def _count(node: Node) -> str:
    """Number of elements (symbolic ones have no hash; their text is their expression)."""
    value = value_of(node)
    return str(value.numel()) if isinstance(value, torch.Tensor) else node.name


def _is_form(node: Node) -> bool:
    return is_move(node) or op_name(node) in CASTS
