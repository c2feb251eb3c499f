"""Undo functionalisation where that is safe, for graphs that run without Inductor.

Inductor updates caches in place by itself; a graph that is executed node by node would clone
the whole cache for every ``auto_functionalized_v2``. :func:`decompose_mutations` applies
Inductor's own two passes, ``reinplace_inplaceable_ops_core`` (which decides what may be
updated in place) and ``decompose_auto_functionalized``, to such a graph.

Private names of ``torch._inductor.fx_passes``, imported late; run on torch 2.13.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph

from fusion.graph import functional
from fusion.graph.compat import fake_mode_of


def decompose_mutations(graph: Graph) -> int:
    """Turn functional wrappers into direct calls that write in place; returns how many.

    A base that somebody still reads afterwards, or that nobody stores back, is cloned first,
    as it would be with Inductor. Nothing is changed in a graph without wrappers.
    """
    count = sum(functional.is_auto_functionalized(node) for node in graph.nodes)
    if count == 0:
        return 0
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
    from torch._inductor.virtualized import V

    fake_mode: Any = fake_mode_of(graph)
    with V.set_fake_mode(fake_mode) if fake_mode is not None else nullcontext():
        reinplace_inplaceable_ops_core(graph)
        decompose_auto_functionalized(graph)  # type: ignore[no-untyped-call]
    _drop_self_copies(graph)
    return count


def _drop_self_copies(graph: Graph) -> None:
    """``copy_(x, x)`` is what remains of an epilogue whose value is now in place."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0] is node.args[1]:
            source = node.args[0]
            if isinstance(source, torch.fx.Node):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
