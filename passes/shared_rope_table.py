"""One cos-sin table a step for all layers whose kernel reads cos and sin as one table.

Such a kernel (its function has an attribute ``rope_table``) reads cos and sin as the halves of one
table in the dtype of q. Transformers' models compute cos and sin once a step, as two tensors;
without this pass each layer would join them anew.

Matches, in a graph in which the prologue pass has named such a kernel:

    q, k, cache = fusion.qk_norm_rope_kv_cache(..., cos, sin, positions, ..., kernel=name)  # x n

Replaces cos and sin, for all n calls that share them:

    table = <the kernel's table operation>(cos, sin, positions, q.dtype, slack)
    q, k, cache = fusion.qk_norm_rope_kv_cache(..., table[:, :R/2], table[:, R/2:], None, ...)

The numbers do not change: the kernel's adapter would make the same table. Calls whose cos and sin
are the halves of one table already are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fusion.graph.functional import is_auto_functionalized, mutable_op
from fusion.graph.storage import root_of
from fusion.pipeline import Context
from fusion.report import Site
from fusion.selection import kernels

aten = torch.ops.aten
_OPERATION = "qk_norm_rope_kv_cache"


@dataclass(frozen=True)
class SharedRopeTable:
    """The pass. It has no options; every table that it makes is a site."""

    name: ClassVar[str] = "shared_rope_table"
    # After the pass that names kernels.
    order: ClassVar[int] = 150

    def run(self, graph: Graph, context: Context) -> list[Site]:
        """Make one table for each group of calls that share cos and sin."""
        if not context.rewrite:
            return []
        sites = []
        for calls in groups(graph):
            table = share(graph, calls)
            facts = {"calls": len(calls), "dtype": str(table.meta["val"].dtype)}
            kernel = str(calls[0].kwargs["kernel"])
            sites.append(
                context.site("fused", calls[0], operation="rope_table", kernel=kernel, facts=facts)
            )
        return sites


PASS = SharedRopeTable


def groups(graph: Graph) -> list[list[Node]]:
    """Calls that share kernel, cos, sin, positions, dtype, head size and style, in graph order."""
    found: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if not _wants_table(node) or _already_joined(node):
            continue
        value = node.kwargs["query"].meta["val"]
        shared = ("kernel", "cos", "sin", "positions", "rope_style")
        key = (*(node.kwargs[n] for n in shared), value.dtype, value.shape[-1])
        found.setdefault(key, []).append(node)
    return list(found.values())


def _table_maker(kernel: object) -> Callable[[int, str], tuple[Any, int]] | None:
    """``rope_table`` of the kernel's function: head size and style to operation and slack."""
    for known in kernels(_OPERATION):
        if known.name == kernel:
            return getattr(known.fn, "rope_table", None)
    return None


def _wants_table(node: Node) -> bool:
    named = ("query", "cos", "sin", "positions", "rope_style", "kernel")
    if node.op != "call_function" or not all(name in node.kwargs for name in named):
        return False
    op: Any = mutable_op(node) if is_auto_functionalized(node) else node.target
    schema = getattr(op, "_schema", None)
    if schema is None or schema.name != f"fusion::{_OPERATION}":
        return False
    return _table_maker(node.kwargs["kernel"]) is not None


def _already_joined(node: Node) -> bool:
    """Whether cos and sin are the halves of one table in the dtype of q."""
    cos, sin = node.kwargs["cos"], node.kwargs["sin"]
    query = node.kwargs["query"]
    assert isinstance(cos, Node)
    assert isinstance(sin, Node)
    assert isinstance(query, Node)
    c, s = cos.meta["val"], sin.meta["val"]
    left, right = root_of(cos), root_of(sin)
    half = c.shape[1]
    return bool(
        left.node is right.node
        and c.dtype == query.meta["val"].dtype
        and str(c.stride(0)) == str(s.stride(0)) == str(2 * half)
        and left.offset is not None
        and right.offset == left.offset + half
    )


def share(graph: Graph, calls: list[Node]) -> Node:
    """Put a table before the first of the calls and hand its halves to all; returns its node."""
    first = calls[0].kwargs
    query, cos, sin, positions = (first[n] for n in ("query", "cos", "sin", "positions"))
    assert isinstance(query, Node)
    assert isinstance(cos, Node)
    value = query.meta["val"]
    maker = _table_maker(first["kernel"])
    assert maker is not None
    operation, slack = maker(value.shape[-1], str(first["rope_style"]))
    half = cos.meta["val"].shape[1]
    with graph.inserting_before(calls[0]):
        table = _add(graph, operation, (cos, sin, positions, value.dtype, slack), calls[0])
        left = _add(graph, aten.slice.Tensor, (table, 1, 0, half), calls[0])
        right = _add(graph, aten.slice.Tensor, (table, 1, half, 2 * half), calls[0])
    for call in calls:
        call.kwargs = {**call.kwargs, "cos": left, "sin": right, "positions": None}
    return table


_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")


def _add(graph: Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    node = graph.call_function(target, args)
    node.meta.update({k: like.meta[k] for k in _PROVENANCE if k in like.meta})
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
    return node
