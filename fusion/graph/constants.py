"""Small integer tensors that a graph computes from nothing: ``arange``, ``iota`` and their sums."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.fx import Node

from fusion.graph.elements import Array, Unreadable, op_name, shape_of, value_of

_LIMIT = 1 << 16
"""Elements of the largest constant that is evaluated (a table of head dims, never of tokens)."""
_DEPTH = 24
_KNOWN: weakref.WeakKeyDictionary[Node, Array | None] = weakref.WeakKeyDictionary()


def constant(node: Node) -> Array | None:
    """The values of an integer tensor that depends on no input, or None."""
    if node not in _KNOWN:
        try:
            value = _evaluate(node, _DEPTH)
        except (Unreadable, RuntimeError, TypeError):
            value = None
        is_integer = value is not None and not value.is_floating_point() and not value.is_complex()
        # Inside a compile a fake mode is active, which must not see these real tensors.
        with torch._C._DisableTorchDispatch():
            _KNOWN[node] = (
                value.to(torch.int64).numpy() if is_integer and value is not None else None
            )
    return _KNOWN[node]


def _evaluate(node: Node, depth: int) -> torch.Tensor | None:
    fake = value_of(node)
    if node.op == "get_attr" and node.graph.owning_module is not None:
        held = getattr(node.graph.owning_module, str(node.target), None)
        if type(held) is not torch.Tensor or held.device.type != "cpu":
            return None
        return held if held.numel() <= _LIMIT else None
    if depth == 0 or node.op != "call_function" or not isinstance(fake, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in fake.shape) or math.prod(shape_of(node)) > _LIMIT:
        return None
    if op_name(node).split(".")[0] not in ("aten", "prims"):
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return None
    missing = False

    def fill(argument: Node) -> Any:
        nonlocal missing
        value = _evaluate(argument, depth - 1)
        missing = missing or value is None
        return value

    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), fill)
    if missing:
        return None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with torch._C._DisableTorchDispatch():
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    return value if isinstance(value, torch.Tensor) else None
