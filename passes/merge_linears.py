"""Merge linears that are computed more than once: equal GEMMs on equal inputs become one.

This is common-subexpression elimination for matrix products only (and the views that lead to
them). AOTAutograd does none for inference graphs, and a model whose projections share one packed
weight (``fusion.integrations.transformers.pack_qkv``) calls the same linear three times.

Works on functional ATen graphs (AOTAutograd's or Inductor's post-grad), which may end in
``copy_`` into their inputs. Nothing is moved: the first of several equal products takes over the
users of the later ones. Two products are equal where they are the same operation on the same
values, looked at through equal views. A product is left alone where it could tell: where a view of
it is a graph output (two outputs must not share memory) or is written in place.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fusion.graph.functional import is_auto_functionalized
from fusion.pipeline import Context
from fusion.reason import Reason
from fusion.report import Site

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.matmul.default,
    }
)
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)


@dataclass
class Group:
    """Equal products: `kept` stays, `merged` go into it."""

    kept: Node
    merged: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class MergeLinears:
    """The pass. It has no options; every group of merged products is a site."""

    name: ClassVar[str] = "merge_linears"
    # Before the passes that want to see packed qkv.
    order: ClassVar[int] = 50

    def run(self, graph: Graph, context: Context) -> list[Site]:
        """Merge equal products in ``graph``; one site for each group."""
        groups = find(graph)
        sites = [self._site(group, context) for group in groups]
        if context.rewrite:
            merge(graph, groups)
        return sites

    def _site(self, group: Group, context: Context) -> Site:
        facts = {"linears": 1 + len(group.merged), "weight": _weight_name(group.kept)}
        if context.rewrite:
            return context.site("fused", group.kept, operation="linear", facts=facts)
        code = "config.training" if context.training else "config.off"
        reason = Reason(code, f"{self.name} was not applied")
        return context.site("off", group.kept, operation="linear", reasons=(reason,), facts=facts)


PASS = MergeLinears


def find(graph: Graph) -> list[Group]:
    """The groups of equal products of ``graph``, which is not changed."""
    known: dict[Hashable, Node] = {}
    value: dict[Node, Node] = {}
    groups: dict[Node, Group] = {}
    for node in graph.nodes:
        value[node] = node
        if node.op != "call_function":
            continue
        if _mutates(node):
            # A value read before a write is not the value read after it.
            known.clear()
            continue
        if node.target not in PRODUCTS and node.target not in VIEWS:
            continue
        key = _key(node, value)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is node or not _same_metadata(first, node):
            continue
        if node.target in VIEWS:
            value[node] = first
        elif _may_share(first) and _may_share(node):
            value[node] = first
            groups.setdefault(first, Group(first)).merged.append(node)
    return list(groups.values())


def merge(graph: Graph, groups: list[Group]) -> int:
    """Carry out what :func:`find` found; returns the number of products removed.

    Views that led only to a removed product are removed with it.
    """
    removed = 0
    for group in groups:
        for node in group.merged:
            operands = list(node.all_input_nodes)
            node.replace_all_uses_with(group.kept)
            graph.erase_node(node)
            removed += 1
            while operands:
                operand = operands.pop()
                if operand._erased or operand.users:
                    continue
                if operand.target in VIEWS:
                    operands += operand.all_input_nodes
                    graph.erase_node(operand)
    return removed


def merge_linears(graph: Graph) -> int:
    """Merge equal linears of ``graph`` in place; returns the number of products removed."""
    return merge(graph, find(graph))


def _key(node: Node, value: dict[Node, Node]) -> Hashable | None:
    try:
        key = (
            node.target,
            _freeze(node.args, value),
            _freeze(tuple(sorted(node.kwargs.items())), value),
        )
        hash(key)
    except TypeError:
        return None
    return key


def _freeze(argument: Any, value: dict[Node, Node]) -> Hashable:
    if isinstance(argument, Node):
        return value.get(argument, argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_freeze(item, value) for item in argument)
    if isinstance(argument, (bool, int, float)):
        # 1, 1.0 and True are equal keys and different arguments.
        return (type(argument).__name__, argument)
    return argument  # type: ignore[no-any-return]


def _same_metadata(a: Node, b: Node) -> bool:
    """Whether both values are known and look alike, strides included."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    if (x.dtype, x.device, x.dim()) != (y.dtype, y.device, y.dim()):
        return False
    # As text, since comparing symbolic sizes would put guards into the graph.
    return _text(x) == _text(y)


def _text(value: torch.Tensor) -> tuple[list[str], list[str]]:
    return [str(s) for s in value.shape], [str(s) for s in value.stride()]


def _may_share(node: Node) -> bool:
    """Whether no view of ``node`` leaves the graph or is written in place."""
    for view in _aliases(node):
        for user in view.users:
            if user.op == "output":
                return False
            if user.op == "call_function" and _writes(user, view):
                return False
    return True


def _aliases(node: Node) -> Iterator[Node]:
    """``node`` and everything that may be a view of it."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        yield current
        for user in current.users:
            if user not in seen and (_is_view(user) or user.target is operator.getitem):
                seen.add(user)
                pending.append(user)


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _writes(user: Node, view: Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return _mutates(user)
    bound = list(zip(schema.arguments, user.args, strict=False))
    bound += [(a, user.kwargs[a.name]) for a in schema.arguments if a.name in user.kwargs]
    return any(
        a.alias_info is not None and a.alias_info.is_write and _holds(given, view)
        for a, given in bound
    )


def _holds(argument: Any, node: Node) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_holds(item, node) for item in argument)
    return argument is node


def _mutates(node: Node) -> bool:
    """Whether the node may write into one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    # Functionalised operations copy what they write where somebody else reads it, and arithmetic
    # on sizes has no memory at all. Of other higher-order operations nothing is known.
    if is_auto_functionalized(node) or node.target is operator.getitem:
        return False
    return any(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes)


def _weight_name(node: Node) -> str:
    operands = [a for a in node.args if isinstance(a, Node)]
    weight = operands[-1]
    while weight.target in VIEWS:
        weight = weight.all_input_nodes[0]
    return weight.name
