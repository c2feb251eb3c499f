"""Walking back from a value to the nodes that compute it, for readers of one fixed form."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusion.graph.elements import Ref, dtype_of, op_name, operand
from fusion.graph.foreign import owner
from fusion.match.miss import No
from fusion.match.trail import Trail, common, same_index, trails
from fusion.match.views import Frame


class Walk:
    """One reading of one value: its grid, and the nodes that were passed on the way."""

    def __init__(self, frame: Frame, seen: set[Node]) -> None:
        self.frame, self.seen = frame, seen

    def still(self, ref: Ref) -> Ref:
        """Follow data movement (no casts) to the node that computes the elements."""
        found = trails(ref, self.seen, negate=False, exact=False)
        if len(found) != 1:
            node = found[0].end.ref.node
            raise No("match.no-norm", "the value is put together from parts", node, 0)
        return found[0].end.ref

    def of(self, ref: Ref, argument: Any) -> Ref:
        """An operand of a pointwise node, followed to where it is computed."""
        assert isinstance(argument, Node)
        return self.still(operand(ref, argument))

    def quiet(self, ref: Ref, argument: Node) -> Ref | None:
        """An operand's computing node, or None where it is put together from parts."""
        found = trails(operand(ref, argument), set(), negate=False, exact=False)
        if len(found) != 1:
            return None
        end = found[0].end.ref
        if op_name(end.node).split(".")[0] not in ("aten", "prims"):
            return None
        self.seen.update(owner(h.ref.node) for h in found[0].hops)
        return end

    def meeting(self, a: Ref, b: Ref) -> tuple[Trail, list[Node]] | None:
        """The nodes at which two references name the same elements, near to far."""
        one = trails(a, self.seen, negate=False)
        two = trails(b, self.seen, negate=False)
        if len(one) != 1 or len(two) != 1:
            return None
        nodes = []
        for node in common([one[0], two[0]]):
            x, y = one[0].at(node), two[0].at(node)
            if x is not None and y is not None and same_index(x.ref.index, y.ref.index):
                nodes.append(node)
        if not nodes:
            return (one[0], []) if self.same_inner(one[0], two[0]) else None
        return one[0], nodes

    @staticmethod
    def same_inner(a: Trail, b: Trail) -> bool:
        x, y = a.end.ref, b.end.ref
        return x.node is y.node and same_index(x.index, y.index)


def constant_number(argument: Any) -> float | None:
    """A number, or the number that fills a constant tensor (as the tensor's dtype holds it)."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    name = op_name(argument) if isinstance(argument, Node) else ""
    if name in ("aten.ones.default", "aten.ones_like.default"):
        return 1.0
    if name in ("aten.full.default", "aten.full_like.default"):
        number = constant_number(argument.args[1])
    elif name == "aten.scalar_tensor.default":
        number = constant_number(argument.args[0])
    else:
        return None
    return None if number is None else _held(number, dtype_of(argument))


def _held(number: float, dtype: torch.dtype) -> float:
    """A number as a tensor holds it; itself where single precision sees no difference."""
    held = torch.tensor(number, dtype=dtype, device="cpu").double()
    return number if held.float() == torch.tensor(number).float() else float(held)
