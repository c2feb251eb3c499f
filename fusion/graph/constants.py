"""Small integer tensors that a graph computes from nothing: ``arange``, ``iota`` and their sums."""

from __future__ import annotations

import math
import weakref

import torch
from torch.fx import Node

from fusion.graph.elements import Array, Unreadable, op_name, shape_of, value_of
from fusion.graph.values import behind, is_undefined

_LIMIT = 1 << 16
"""Elements of the largest constant that is evaluated (a table of head dims, never of tokens)."""
_NODES = 1024
"""Nodes of the longest computation that is evaluated."""
_KNOWN: weakref.WeakKeyDictionary[Node, Array | None] = weakref.WeakKeyDictionary()


def constant(node: Node) -> Array | None:
    """The values of an integer tensor that depends on no input, or None."""
    if node not in _KNOWN:
        try:
            value = _evaluate(node)
        except (Unreadable, RuntimeError, TypeError):
            value = None
        is_integer = value is not None and not value.is_floating_point() and not value.is_complex()
        # Inside a compile a fake mode is active, which must not see these real tensors.
        with torch._C._DisableTorchDispatch():
            _KNOWN[node] = (
                value.to(torch.int64).numpy() if is_integer and value is not None else None
            )
    return _KNOWN[node]


def _evaluate(node: Node) -> torch.Tensor | None:
    """The value of a node, each node behind it computed once; None where it has inputs."""
    nodes: list[Node] = []
    for at in behind([node]):
        if len(nodes) == _NODES or not (at.op == "get_attr" or _is_small_and_pure(at)):
            return None
        nodes.append(at)
    values: dict[Node, torch.Tensor] = {}
    for at in sorted(nodes):
        value = _held(at) if at.op == "get_attr" else _compute(at, values)
        if value is None:
            return None
        values[at] = value
    return values[node]


def _held(node: Node) -> torch.Tensor | None:
    held = getattr(node.graph.owning_module, str(node.target), None)
    if type(held) is not torch.Tensor or held.device.type != "cpu":
        return None
    return held if held.numel() <= _LIMIT else None


def _is_small_and_pure(node: Node) -> bool:
    fake = value_of(node)
    if node.op != "call_function" or not isinstance(fake, torch.Tensor) or is_undefined(node):
        return False
    if not all(isinstance(size, int) for size in fake.shape) or math.prod(shape_of(node)) > _LIMIT:
        return False
    if op_name(node).split(".")[0] not in ("aten", "prims"):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def _compute(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with torch._C._DisableTorchDispatch():
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value if isinstance(value, torch.Tensor) else None
