"""Which tensor's storage a value lives in, by looking through views of the graph.

Two tensors share memory where ``untyped_storage()._cdata`` is one number; this private name of
torch was run with 2.13.0.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

aten = torch.ops.aten
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.alias.default,
    aten.expand.default,
    aten.as_strided.default,
    aten.detach.default,
}


@dataclass(frozen=True)
class Root:
    """The node that owns the storage, and the value's storage offset where it is a number."""

    node: Node
    offset: int | None


def root_of(node: Node) -> Root:
    """The node whose storage ``node`` is a view of (itself where it owns its storage).

    ``aten.reshape`` counts as a view where its strides fit, which post-grad graphs rely on:
    the fake tensors' own storage tells.
    """
    value = node.meta.get("val")
    offset = value.storage_offset() if isinstance(value, torch.Tensor) else None
    while node.op == "call_function":
        if node.target is operator.getitem:
            source = node.args[0]
            if not (isinstance(source, Node) and source.target in _VIEWS):
                break
            node = source
            continue
        if node.target in _VIEWS or (node.target is aten.reshape.default and _shares(node)):
            source = node.args[0]
            assert isinstance(source, Node)
            node = source
            continue
        break
    return Root(node, offset if isinstance(offset, int) else None)


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors (real or fake) in one storage have in common, while they live."""
    return int(tensor.untyped_storage()._cdata)


def _shares(node: Node) -> bool:
    """Whether a reshape is a view: dense inputs are, others are judged by their strides."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.is_contiguous():
        return True
    return bool(before.untyped_storage()._cdata == after.untyped_storage()._cdata)
