"""Saying no inside a recogniser, and telling opaque operators apart."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fusion.graph.foreign import called_op, is_registered, owner
from fusion.match.facts import Miss
from fusion.reason import Reason

_PLAIN = ("aten", "prims")


class No(Exception):
    """Why a value is not what a recogniser looks for; ``depth`` grows with how far it got."""

    def __init__(
        self,
        code: str,
        message: str,
        node: Node | None,
        depth: int = 0,
        *,
        have: str | None = None,
        need: str | None = None,
    ) -> None:
        super().__init__(message)
        node = None if node is None else owner(node)
        name = None if node is None else node.name
        self.miss = Miss(Reason(code, message, have, need, name), node, depth)


def opaque_node(node: Node) -> Node | None:
    """The node itself where it calls an operator that readers cannot look into, else None.

    Operators of torch itself (aten, prims) are never opaque in this sense, nor are those with
    a registered decomposition. For one result of a call, the call is looked at.
    """
    if node.op in ("call_module", "call_method"):
        return node
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return opaque_node(node.args[0])
    if is_registered(node):
        return None
    namespace = getattr(node.target, "namespace", None)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node
    return node if namespace is not None and namespace not in _PLAIN else None


def opaque(node: Node, depth: int) -> No:
    """The refusal that names an opaque operator."""
    name = str(called_op(node))
    message = f"{name} has no registered decomposition"
    return No("match.opaque-op", message, node, depth, have=name)
