"""When two nodes compute the same value because they are spelled the same."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.fx import Node

from fusion.graph.values import behind


def structure(value: Any) -> str:
    """A text that is equal for nodes (or plain arguments) of one graph that compute equal values by
    the same operators from the same nodes.

    Inductor merges equal nodes, AOTAutograd does not: K's and V's slots may be two equal chains.
    Every node is looked at once, however often the chain uses it.
    """
    if not isinstance(value, Node):
        return _plain(value, {})
    forms: dict[Node, str] = {}
    for node in sorted(behind([value], follow=_is_pure)):
        if _is_pure(node):
            text = f"{node.target}{_plain(node.args, forms)}{_plain(node.kwargs, forms)}"
            forms[node] = hashlib.sha256(text.encode()).hexdigest()
        else:
            forms[node] = node.name
    return forms[value]


def _is_pure(node: Node) -> bool:
    return node.op == "call_function" and not node.is_impure()


def _plain(value: Any, forms: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return f"%{forms[value]}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(_plain(item, forms) for item in value)})"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_plain(v, forms)}' for k, v in sorted(value.items()))}}}"
    return repr(value)
