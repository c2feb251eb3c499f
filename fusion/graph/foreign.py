"""Operators of other libraries, read through a registered decomposition.

``register_op(op, decomposition)`` says what a custom operator computes, in plain torch. Readers
then look inside its calls as if the plain form stood there; the graph itself is not changed.
Calls of operators that nobody registered are opaque, and readers refuse them by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from fusion.fingerprint import function_source
from fusion.graph.functional import (
    AUTO_FUNCTIONALIZED,
    ArgView,
    arg_views,
    is_auto_functionalized,
    mutable_op,
    mutated_names,
    plain_kwargs,
)
from fusion.graph.shapes import NoHintError, hint

_REGISTRY: dict[Any, Callable[..., Any]] = {}
_EXPANDED: weakref.WeakKeyDictionary[Node, tuple[Any, GraphModule | None]] = (
    weakref.WeakKeyDictionary()
)


def registered() -> tuple[tuple[str, str, str], ...]:
    """What :func:`register_op` was told, sorted: it decides what is read through."""
    return tuple(
        sorted(
            (str(op), getattr(fn, "__qualname__", repr(fn)), function_source(fn))
            for op, fn in _REGISTRY.items()
        )
    )


def register_op(op: Any, decomposition: Callable[..., Any]) -> None:
    """Let readers look through calls of ``op``.

    ``op`` is an ``OpOverload`` (``torch.ops.ns.name.default``) or an ``OpOverloadPacket``.
    ``decomposition`` takes the op's arguments and returns what the op returns, computed with
    plain torch operations that mutate nothing. For an op that mutates arguments it returns a
    tuple: the op's own results, then the new value of each mutated argument in schema order.
    Registering again replaces the decomposition.
    """
    overloads = (
        [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
        if isinstance(op, torch._ops.OpOverloadPacket)
        else [op]
    )
    for overload in overloads:
        _REGISTRY[overload] = decomposition
    _EXPANDED.clear()


def called_op(node: Node) -> Any:
    """The operator that a node calls; for a functional wrapper, the mutating op inside."""
    return mutable_op(node) if is_auto_functionalized(node) else node.target


def is_registered(node: Node) -> bool:
    """Whether somebody said what the operator that ``node`` calls computes."""
    return node.op == "call_function" and called_op(node) in _REGISTRY


def owner(node: Node) -> Node:
    """The node of the compiled graph that a node stands in (itself, unless inside a call)."""
    outer = node.meta.get("fusion_owner")
    return node if outer is None else owner(outer)


def outer(node: Node) -> Node:
    """The argument of the compiled graph that an inner placeholder stands for, else the node."""
    given = node.meta.get("fusion_outer")
    return node if given is None else outer(given)


def is_inner(node: Node) -> bool:
    """Whether a node exists only inside a decomposition."""
    return "fusion_owner" in node.meta


def expansion(node: Node) -> list[Node | None] | None:
    """The inner nodes that compute a registered call's results, or None.

    Inner placeholders carry ``meta['fusion_outer']``, the argument's node outside. A functional
    wrapper's results are those of the wrapper: the op's results, then the new values.
    """
    if not is_registered(node):
        return None
    known = _EXPANDED.get(node)
    signature = (node.args, dict(node.kwargs))
    if known is None or known[0] != signature:
        known = (signature, _trace(node))
        _EXPANDED[node] = known
    if known[1] is None:
        return None
    (results,) = next(n for n in known[1].graph.nodes if n.op == "output").args
    listed = list(results) if isinstance(results, (tuple, list)) else [results]
    return [r if isinstance(r, Node) else None for r in listed]


class _Slot:
    """The position of a tensor argument among the traced inputs."""

    def __init__(self, position: int) -> None:
        self.position = position


def _trace(node: Node) -> GraphModule | None:
    """The decomposition's graph on fake tensors of the hinted sizes; None where it fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors: list[Node] = []

    def visit(argument: Node) -> Any:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            if argument not in tensors:
                tensors.append(argument)
            return _Slot(tensors.index(argument))
        return value if isinstance(value, (float, bool)) else hint(value)

    try:
        function, given = _call(node)
        args, kwargs = torch.fx.map_arg(given, visit)

        def call(*values: torch.Tensor) -> Any:
            def fill(a: Any) -> Any:
                return values[a.position] if isinstance(a, _Slot) else a

            return function(*tree_map(fill, args), **tree_map(fill, kwargs))

        with FakeTensorMode():
            fakes = [_like(n.meta["val"]) for n in tensors]
        with torch.no_grad():
            traced = make_fx(torch.func.functionalize(call))(*fakes)
    except Exception:  # a decomposition is foreign code: whatever it raises, the op stays opaque
        return None
    placeholders = iter(tensors)
    for inner in traced.graph.nodes:
        inner.meta["fusion_owner"] = node
        if inner.op == "placeholder":
            inner.meta["fusion_outer"] = next(placeholders)
    return traced


def _like(value: torch.Tensor) -> torch.Tensor:
    sizes, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _call(node: Node) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """What computes a call's results, and the arguments to trace it with."""
    decomposition = _REGISTRY[called_op(node)]
    if not is_auto_functionalized(node):
        return decomposition, (node.args, dict(node.kwargs))
    op = mutable_op(node)
    returns = len(op._schema.returns)

    def results(values: Any) -> tuple[list[Any], list[Any]]:
        """The op's results (one empty slot where it has none) and the new values."""
        listed = list(values) if isinstance(values, (tuple, list)) else [values]
        return listed[:returns] or [None], listed[returns:]

    if node.target is AUTO_FUNCTIONALIZED:
        kwargs = {k: v for k, v in node.kwargs.items() if k != "_mutable_op"}

        def version_one(**given: Any) -> Any:
            first, new = results(decomposition(**given))
            return (*first, *new)

        return version_one, ((), kwargs)
    names, views = mutated_names(op), arg_views(node)

    def version_two(bases: list[Any], **given: Any) -> Any:
        for name in names:
            view = views[name]
            given[name] = None if view is None else _viewed(bases[view.base_index], view)
        first, new = results(decomposition(**given))
        after = list(bases)
        for name, value in zip(names, new, strict=True):
            view = views[name]
            if view is not None:
                after[view.base_index] = _written(after[view.base_index], view, value)
        return (*first, *after)

    return version_two, ((list(node.kwargs["_all_bases"]),), plain_kwargs(node))  # type: ignore[arg-type]


def _number(value: Any) -> int:
    """A size of a view as a plain number. Raises :class:`NoHintError` for a symbolic one."""
    if isinstance(value, int):
        return value
    raise NoHintError(f"{value} is symbolic")


def _strided(view: ArgView) -> tuple[list[int], list[int], int]:
    sizes = [_number(s) for s in view.size]
    return sizes, [_number(s) for s in view.stride], _number(view.storage_offset)


def _viewed(base: Any, view: ArgView) -> Any:
    if view.kind in ("base", "alias"):
        return base
    if view.kind == "slice":
        dim, start, end = _number(view.dim), _number(view.start), _number(view.end)
        return torch.ops.aten.slice.Tensor(base, dim, start, end)
    return torch.ops.aten.as_strided.default(base, *_strided(view))


def _written(base: Any, view: ArgView, value: Any) -> Any:
    if view.kind in ("base", "alias"):
        return value
    if view.kind == "slice":
        dim, start, end = _number(view.dim), _number(view.start), _number(view.end)
        return torch.ops.aten.slice_scatter.default(base, value, dim, start, end)
    return torch.ops.aten.as_strided_scatter.default(base, value, *_strided(view))
