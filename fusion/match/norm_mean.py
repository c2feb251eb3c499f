"""The inverse root mean square of a norm, its reduction checked element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fusion.graph.elements import (
    Ref,
    along,
    arguments,
    cast_source,
    collapse,
    depends,
    dtype_of,
    op_name,
    operand,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.foreign import is_inner
from fusion.graph.reshaping import axis_of
from fusion.graph.shapes import pinned
from fusion.match.miss import No
from fusion.match.views import Frame
from fusion.match.walk import Walk, constant_number

WIDE = (torch.float32, torch.float64)
ADD = ("aten.add.Tensor", "aten.add.Scalar")
MUL = ("aten.mul.Tensor",)
DIV = ("aten.div.Tensor", "aten.true_divide.Tensor")
POW = ("aten.pow.Tensor_Scalar",)


class MeanReader(Walk):
    """``rsqrt(mean(x ** 2) + eps)`` in its spellings.

    ``wide`` collects the dtypes in which the parts of the norm are computed.
    """

    def __init__(self, frame: Frame, seen: set[Node]) -> None:
        super().__init__(frame, seen)
        self.wide: set[torch.dtype] = set()

    def inverse_of(self, ref: Ref, argument: Any) -> tuple[Ref, str] | None:
        """``(variance, spelling)`` where the operand is an inverse root, else None."""
        if not isinstance(argument, Node):
            return None
        inv = self.quiet(ref, argument)
        if inv is None:
            return None
        node, name = inv.node, op_name(inv.node)
        if name == "aten.rsqrt.default":
            return self.of(inv, node.args[0]), "rsqrt"
        if name in POW and node.args[1] == -0.5:
            return self.of(inv, node.args[0]), "pow"
        if name in MUL and constant_number(node.args[1]) == 1:
            return self.inverse_of(inv, node.args[0])  # 1 / root is reciprocal(root) * 1
        if name == "aten.reciprocal.default":
            root = self.root_of(inv, node.args[0])
            return None if root is None else (root, "recip")
        if name in DIV and constant_number(node.args[0]) == 1:
            root = self.root_of(inv, node.args[1])
            return None if root is None else (root, "recip")
        return None

    def root_of(self, ref: Ref, argument: Any) -> Ref | None:
        """The radicand where the operand is a square root, else None."""
        if not isinstance(argument, Node):
            return None
        root = self.quiet(ref, argument)
        if root is None:
            return None
        node, name = root.node, op_name(root.node)
        is_root = name == "aten.sqrt.default" or (name in POW and node.args[1] == 0.5)
        return self.of(root, node.args[0]) if is_root else None

    def epsilon(self, variance: Ref) -> tuple[Ref, float | Node]:
        """``(mean, eps)``; a missing epsilon is 0."""
        node, name = variance.node, op_name(variance.node)
        self.wide.add(dtype_of(node))
        if name in ADD:
            a = arguments(node)
            if a.get("alpha", 1) != 1:
                raise No("match.norm-eps", "epsilon is scaled", node, 3)
            for mean, eps in ((a["self"], a["other"]), (a["other"], a["self"])):
                number = constant_number(eps)
                if number is not None and isinstance(mean, Node):
                    if not number >= 0:
                        raise No("match.norm-eps", "epsilon is negative", node, 3,
                                 have=f"{number:g}", need="0 or more")  # fmt: skip
                    return self.of(variance, mean), number
                scalar = isinstance(eps, Node) and math.prod(shape_of(eps)) == 1
                if scalar and isinstance(mean, Node) and math.prod(shape_of(mean)) != 1:
                    return self.of(variance, mean), self.eps_node(eps, node)
            for mean, eps in ((a["self"], a["other"]), (a["other"], a["self"])):
                if isinstance(eps, Node) and not shape_of(eps) and isinstance(mean, Node):
                    return self.of(variance, mean), self.eps_node(eps, node)
            raise No("match.norm-eps", "what is added to the mean square is not a scalar", node, 3)
        if name.startswith(("aten.clamp", "aten.maximum")):
            raise No("match.norm-eps", "epsilon is a lower bound, not added", node, 3)
        return variance, 0.0

    def eps_node(self, eps: Node, at: Node) -> Node:
        """The 0-dim tensor that is added; it must exist outside any decomposition."""
        if is_inner(eps):
            eps = eps.meta.get("fusion_outer", eps)
        if is_inner(eps) or shape_of(eps):
            raise No("match.norm-eps", "epsilon is not a 0-dim tensor", at, 3)
        return eps

    def reduced(self, mean: Ref, at: Ref) -> Ref:
        """The squares that the mean runs over, the reduced position on the dim axis."""
        frame = self.frame
        mean, scale = self.divided(mean)
        node, name = mean.node, op_name(mean.node)
        is_sum = name in ("aten.sum.dim_IntList", "aten.sum.default")
        if name not in ("aten.mean.dim", "aten.mean.default") and not is_sum:
            form = "a variance (the mean is subtracted)" if "var" in name else name or node.name
            raise No("match.norm-form", f"the inverse root is of {form}", node, 2)
        if dtype_of(node) not in WIDE:
            raise No("match.norm-dtype", "the mean is not computed in float32", node, 3)
        self.wide.add(dtype_of(node))
        a = arguments(node)
        source = a["self"]
        shape = shape_of(source)
        dims = a.get("dim")
        listed = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
        over = sorted(axis_of(d, len(shape)) for d in listed)
        count = math.prod(shape[d] for d in over)
        if any(frame.dim_axis in depends(collapse(i)) for i in mean.index):
            raise No("match.norm-axis", "the mean runs over another axis than dim", node, 4)
        static = all(pinned(value_of(source).shape[d]) is not None for d in over)
        if count != frame.dim or not static:
            heads = any(frame.head_axis in depends(collapse(i)) for i in mean.index)
            if not heads and frame.heads > 1 and count % frame.dim == 0:
                raise No(
                    "match.norm-over-heads", f"the mean runs over {count} elements", node, 5,
                    have=str(count), need=str(frame.dim),
                )  # fmt: skip
            code = "match.head-dim" if count < frame.dim else "match.norm-axis"
            raise No(
                code, f"the mean runs over {count} elements", node, 4,
                have=str(count), need=str(frame.dim),
            )  # fmt: skip
        if is_sum and scale != count:
            raise No("match.norm-form", "a sum where the mean is needed", node, 4)
        if not is_sum and scale != 1:
            raise No("match.norm-form", "the mean is divided once more", node, 4)
        position = along(np.arange(count), frame.dim_axis, frame.rank)
        keep = iter(mean.index)
        index = [zero(frame.rank)] * len(shape)
        for d in range(len(shape)):
            if d not in over:
                index[d] = next(keep)
            elif a.get("keepdim", False):
                next(keep)
        for d in reversed(over):
            index[d] = collapse(position % shape[d])
            position = position // shape[d]
        labels = (*at.labels[:-1], np.arange(count))
        return self.squared(self.still(Ref(source, tuple(index), labels)))

    def divided(self, ref: Ref) -> tuple[Ref, float]:
        """A sum's divisor: ``sum / n`` or ``sum * (1 / n)`` where that is exact."""
        node, name = ref.node, op_name(ref.node)
        if name in (*DIV, "aten.div.Scalar"):
            number = constant_number(node.args[1])
            if number is not None:
                return self.of(ref, node.args[0]), number
        if name in (*MUL, "aten.mul.Scalar"):
            number = constant_number(node.args[1])
            if number and math.frexp(number)[0] == 0.5:
                return self.of(ref, node.args[0]), 1 / number
        return ref, 1

    def squared(self, ref: Ref) -> Ref:
        """The element that is squared."""
        node, name = ref.node, op_name(ref.node)
        if dtype_of(node) not in WIDE or cast_source(node) is not None:
            raise No("match.norm-dtype", "squares are not computed in float32", node, 4)
        self.wide.add(dtype_of(node))
        if name in POW and node.args[1] == 2:
            return operand(ref, node.args[0])  # type: ignore[arg-type]
        if name == "aten.square.default":
            return operand(ref, node.args[0])  # type: ignore[arg-type]
        if name in MUL and all(isinstance(n, Node) for n in node.args[:2]):
            left, right = (operand(ref, n) for n in node.args[:2])  # type: ignore[arg-type]
            if self.meeting(left, right) is not None:
                return left
        raise No("match.norm-form", "the mean is not of squares", node, 3)
