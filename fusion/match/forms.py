"""One value in its other forms: moved, or cast to any dtype."""

from __future__ import annotations

from torch.fx import Node

from fusion.graph.elements import CASTS, op_name
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


def forms_ahead(node: Node) -> frozenset[Node]:
    """The node, and the values that are forms of it (also those that it is only a part of)."""
    forms = {node}
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in forms and _is_form(user):
                forms.add(user)
                todo.append(user)
    return frozenset(forms)


def _is_form(node: Node) -> bool:
    return is_move(node) or op_name(node) in CASTS
