"""Which of two row writes is K and which is V: ``index_put`` does not say."""

from __future__ import annotations

from torch.fx import Node

from fusion.match import cache_view as cv
from fusion.match.cache_rows import Rows
from fusion.match.facts import TokenView

_MOVES = {
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::permute", "aten::transpose",
    "aten::slice", "aten::select", "aten::split", "aten::split_with_sizes", "aten::unsqueeze",
    "aten::squeeze", "aten::clone", "aten::expand", "aten::alias", "aten::contiguous",
    "aten::_to_copy", "prims::convert_element_type", "aten::t", "getitem",
}  # fmt: skip
_PROJECTIONS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"}


def _projected(view: TokenView) -> bool:
    """Whether the rows are a projection (or an input) only moved around, as V is."""
    node = view.node
    while node.op == "call_function" and cv.op_name(node) in _MOVES and node.args:
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = source
    return node.op == "placeholder" or cv.op_name(node) in _PROJECTIONS


_ROTATIONS = {"aten::cat", "aten::neg", "aten::stack", "aten::view_as_real"}


def _rotated(view: TokenView, depth: int = 6) -> bool:
    """Whether something that looks like a rotation stands close behind the rows."""
    level = {view.node}
    for _ in range(depth):
        if any(n.op == "call_function" and cv.op_name(n) in _ROTATIONS for n in level):
            return True
        level = {i for n in level for i in n.all_input_nodes if i.op == "call_function"}
    return False


def key_and_value(first: Rows, second: Rows) -> tuple[Rows, Rows]:
    """Which of two writes is K: the computed one where the other is only projected.

    Where both are computed (V may be normalised), the one that is rotated; else the first.

    A wrong guess is no wrong result (the pass then finds no rope on the key), and
    ``fusion.match.cache_write.swapped`` turns the fact around.
    """
    projected = _projected(first.view), _projected(second.view)
    if projected[0] != projected[1]:
        return (second, first) if projected[0] else (first, second)
    if _rotated(second.view) and not _rotated(first.view):
        return second, first
    return first, second
