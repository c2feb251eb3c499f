"""Where a value comes from, looking through projections and views."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

aten = torch.ops.aten
_PROJECTIONS = {
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.bmm.default: 0,
    aten.linear.default: 0,
    aten.matmul.default: 0,
}
_THROUGH = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
    aten.expand.default,
    aten.t.default,
    operator.getitem,
}


def activation_of(node: Node) -> Node:
    """The activation that a projected value was projected from.

    Walks back through views and at most one matrix product and its bias; a value that no
    projection made is its own source (a packed qkv input, say).
    """
    projected = False
    while node.op == "call_function":
        if node.target in _THROUGH:
            at = 0
        elif node.target in _PROJECTIONS and not projected:
            at, projected = _PROJECTIONS[node.target], True
        elif node.target is aten.add.Tensor and not projected:
            at = 0
        else:
            break
        source = node.args[at]
        if not isinstance(source, Node):
            break
        node = source
    return node
