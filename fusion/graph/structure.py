"""When two nodes compute the same value because they are spelled the same."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from fusion.graph.values import behind, is_undefined


def structure(value: Any) -> str:
    """A text that is equal for nodes (or plain arguments) of one graph that compute equal values by
    the same operators from the same nodes.

    Inductor merges equal nodes, AOTAutograd does not: K's and V's slots may be two equal chains.
    Every node is looked at once, however often the chain uses it.
    """
    nodes: list[Node] = []
    map_arg(value, nodes.append)
    forms: dict[Node, str] = {}
    for node in sorted(behind(nodes, follow=_is_pure)):
        if _is_pure(node):
            # Two functions of one name, such as math.pow and operator.pow, print alike.
            where = getattr(node.target, "__module__", "")
            text = f"{where}:{node.target}{_plain(node.args, forms)}{_plain(node.kwargs, forms)}"
            forms[node] = hashlib.sha256(text.encode()).hexdigest()
        else:
            forms[node] = node.name
    return _plain(value, forms)


def _is_pure(node: Node) -> bool:
    """Whether the value follows from target and arguments (random or undefined contents do not)."""
    return node.op == "call_function" and not node.is_impure() and not is_undefined(node)


def _plain(value: Any, forms: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return f"%{forms[value]}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(_plain(item, forms) for item in value)})"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_plain(v, forms)}' for k, v in sorted(value.items()))}}}"
    return repr(value)
