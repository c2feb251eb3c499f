"""The form of a norm's result: ``y = w * cast(x * inv)``, its casts and where the weight enters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion.graph.elements import Ref, cast_source, dtype_of, exact_cast, op_name, operand, value_of
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.norm_mean import DIV, MUL, WIDE, MeanReader
from fusion.match.views import Frame


@dataclass(frozen=True)
class Normed:
    """``x * inv``: references at the two factors, both read as the same element of x."""

    x: Ref
    square: Ref
    eps: float | Node
    inv_rms: str
    node: Node


@dataclass(frozen=True)
class Scaled:
    """A normed value with the casts and the weight around it."""

    normed: Normed
    weight: Ref | None
    cast: str | None
    down: torch.dtype | None


class FormReader(MeanReader):
    """Reads a value outside in, down to ``x`` and the squares under the root."""

    def scaled(self, ref: Ref) -> Scaled:
        """The result's casts and weight, outside in."""
        source = cast_source(ref.node)
        if source is not None:
            down = dtype_of(ref.node)
            inner = self.still(ref.at(source, ref.index))
            if exact_cast(dtype_of(source), down):
                raise No("match.no-norm", "an up-cast", ref.node, 0)
            weighted = self.weighted(inner)
            if weighted is not None:
                return Scaled(weighted[0], weighted[1], "early", down)
            return Scaled(self.normed(inner), None, "late", down)
        weighted = self.weighted(ref)
        if weighted is not None:
            return Scaled(weighted[0], weighted[1], None, None)
        late = self.late(ref)
        if late is not None:
            return late
        return Scaled(self.normed(ref), None, None, None)

    def late(self, ref: Ref) -> Scaled | None:
        """``w * cast(x * inv)``."""
        if op_name(ref.node) not in MUL:
            return None
        for value, other in self.both(ref):
            inner = self.of(ref, value)
            source = cast_source(inner.node)
            if source is None or exact_cast(dtype_of(source), dtype_of(inner.node)):
                continue
            below = self.still(inner.at(source, inner.index))
            if not self.is_normed(below):
                continue
            weight = operand(ref, other)
            return Scaled(self.normed(below), weight, "late", dtype_of(inner.node))
        return None

    def weighted(self, ref: Ref) -> tuple[Normed, Ref] | None:
        """``w * (x * inv)`` without a cast between."""
        if op_name(ref.node) not in MUL:
            return None
        for value, other in self.both(ref):
            inner = self.of(ref, value)
            if self.is_normed(inner):
                normed = self.normed(inner)
                self.wide.add(dtype_of(ref.node))
                return normed, operand(ref, other)
        return None

    @staticmethod
    def both(ref: Ref) -> list[tuple[Node, Node]]:
        """The two tensor operands in both orders (none where one is a number)."""
        a, b = ref.node.args[:2]
        return [(a, b), (b, a)] if isinstance(a, Node) and isinstance(b, Node) else []

    def is_normed(self, ref: Ref) -> bool:
        """Whether the node looks like ``x * inv`` (the details are checked by ``normed``)."""
        name = op_name(ref.node)
        if name in DIV:
            return self.root_of(ref, ref.node.args[1]) is not None
        if name not in MUL:
            return False
        return any(self.inverse_of(ref, inv) is not None for _, inv in self.both(ref))

    def normed(self, ref: Ref) -> Normed:
        """``x * inv`` or ``x / root``, with its reduction checked element by element."""
        name = op_name(ref.node)
        found: list[tuple[Node, tuple[Ref, str]]] = []
        if name in DIV and isinstance(ref.node.args[0], Node):
            root = self.root_of(ref, ref.node.args[1])
            if root is not None:
                found.append((ref.node.args[0], (root, "div")))
        elif name in MUL:
            for value, inv in self.both(ref):
                inverse = self.inverse_of(ref, inv)
                if inverse is not None:
                    found.append((value, inverse))
        if not found:
            op = opaque_node(ref.node)
            if op is not None and per_head(op, self.frame):
                raise opaque(op, 1)
            raise No("match.no-norm", f"{ref.node.name} is not a norm", ref.node, 0)
        value, (variance, kind) = found[0]
        if dtype_of(ref.node) not in WIDE:
            raise No(
                "match.norm-dtype", "the norm is not computed in float32", ref.node, 3,
                have=str(dtype_of(ref.node)), need="torch.float32",
            )  # fmt: skip
        self.wide.add(dtype_of(ref.node))
        mean, eps = self.epsilon(variance)
        square = self.reduced(mean, ref)
        return Normed(operand(ref, value), square, eps, kind, ref.node)


def per_head(op: Node, frame: Frame) -> bool:
    """Whether an opaque call keeps the shape of one of its inputs (as a norm would)."""
    value = value_of(op)
    shapes = [v.shape for v in (value if isinstance(value, (tuple, list)) else [value])
              if isinstance(v, torch.Tensor)]  # fmt: skip
    inputs = [value_of(n) for n in op.all_input_nodes]
    return any(isinstance(i, torch.Tensor) and i.shape in shapes for i in inputs)
