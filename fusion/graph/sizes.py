"""Sizes as node arguments: a SymInt becomes the node that computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

Emit = Callable[[Any, tuple[Any, ...], Any], Node]


class NoSuchSize(ValueError):
    """A symbolic size that no node of the graph gives."""


class Sizes:
    """Nodes of a graph that hold sizes, by expression; missing ones are built from symbols."""

    def __init__(self, graph: Graph) -> None:
        self._early: dict[Any, Node] = {}
        self._tensors: dict[Any, tuple[Node, int]] = {}
        self._tensor_values: dict[Any, Any] = {}
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._early.setdefault(_expression(value), node)
            elif isinstance(value, torch.Tensor):
                for i, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self._tensors.setdefault(_expression(size), (node, i))
                        self._tensor_values.setdefault(_expression(size), size)

    def argument(self, size: Any, emit: Emit) -> Any:
        """An ``int``, or a node holding the size.

        ``emit(target, args, value)`` makes a node where it may be used; nodes are not kept
        between calls, so that a transaction can take them back. Raises :class:`NoSuchSize`.
        """
        if isinstance(size, Node):
            return size
        if not isinstance(size, torch.SymInt):
            return size
        return self._build(_expression(size), size, emit)

    def _build(self, expression: Any, size: Any, emit: Emit) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self._early:
            return self._early[expression]
        if expression in self._tensors:
            node, dim = self._tensors[expression]
            return emit(torch.ops.aten.sym_size.int, (node, dim), self._tensor_values[expression])
        fold: Any = None
        if expression.is_Add:
            fold = operator.add
        elif expression.is_Mul:
            fold = operator.mul
        elif expression.is_Pow and expression.exp.is_Integer and int(expression.exp) > 1:
            parts = [self._build(expression.base, size, emit)] * int(expression.exp)
            return self._fold(operator.mul, parts, emit)
        elif type(expression).__name__ in ("FloorDiv", "CleanDiv"):
            fold = operator.floordiv
        elif type(expression).__name__ in ("Mod", "PythonMod"):
            fold = operator.mod
        if fold is None:
            raise NoSuchSize(f"no node gives the size {expression}")
        return self._fold(fold, [self._build(a, size, emit) for a in expression.args], emit)

    @staticmethod
    def _fold(op: Any, parts: list[Any], emit: Emit) -> Any:
        result = parts[0]
        for part in parts[1:]:
            value = op(_value(result), _value(part))
            result = emit(op, (result, part), value) if _any_node(result, part) else value
        return result


def _any_node(*parts: Any) -> bool:
    return any(isinstance(p, Node) for p in parts)


def _value(part: Any) -> Any:
    return part.meta["val"] if isinstance(part, Node) else part


def _expression(size: torch.SymInt) -> Any:
    return size.node.expr
