"""Per-head RMSNorm, read from the elements of its result.

``y = w * (x * inv)`` where ``inv`` depends on token and head only and is the inverse root of a
mean over exactly the elements ``x[t, h, 0..D-1]`` plus epsilon. The places of the casts tell
whether the weight is multiplied before the down-cast (early), after it (late) or without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fusion.graph.elements import (
    Ref,
    Unreadable,
    along,
    arguments,
    cast_source,
    collapse,
    depends,
    dtype_of,
    exact_cast,
    op_name,
    operand,
    shape_of,
    value_of,
    zero,
)
from fusion.graph.foreign import is_inner, owner
from fusion.graph.moves import axis_of
from fusion.match.facts import Miss, RMSNorm, TokenView
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.trail import Trail, between, common, same_index, trails
from fusion.match.views import Frame, frame_of, view_at
from fusion.reason import Reason

_WIDE = (torch.float32, torch.float64)
_ADD = ("aten.add.Tensor", "aten.add.Scalar")
_MUL = ("aten.mul.Tensor",)
_DIV = ("aten.div.Tensor", "aten.true_divide.Tensor")
_SQUARE_POW = ("aten.pow.Tensor_Scalar",)


def read_norm(view: TokenView) -> RMSNorm | Miss:
    """The RMSNorm over each head whose result is ``view``, or a Miss.

    ``match.no-norm`` says that nothing like a norm stands there; any other code that something
    does which is not this norm. ``RMSNorm.x`` is the nearest node before the norm with separate
    token, head and dim axes, before the up-cast.
    """
    try:
        return read_norm_or_raise(view)
    except No as no:
        return no.miss
    except Unreadable as error:
        node = error.node or view.node
        return Miss(Reason("match.norm-form", str(error), node=node.name), node, 0)


def read_norm_or_raise(view: TokenView) -> RMSNorm:
    """:func:`read_norm`, raising :class:`No` or :class:`Unreadable` instead of a Miss."""
    frame, ref = frame_of(view)
    reading = _Reading(frame, set())
    return reading.norm(view, ref)


@dataclass(frozen=True)
class _Normed:
    """``x * inv``: references at the two factors, both read as the same element of x."""

    x: Ref
    square: Ref
    eps: float | Node
    inv_rms: str
    node: Node


@dataclass(frozen=True)
class _Scaled:
    """A normed value with the casts and the weight around it."""

    normed: _Normed
    weight: Ref | None
    cast: str | None
    down: torch.dtype | None


class _Reading:
    def __init__(self, frame: Frame, seen: set[Node]) -> None:
        self.frame, self.seen = frame, seen

    def norm(self, view: TokenView, ref: Ref) -> RMSNorm:
        """The fact. Raises :class:`No`."""
        top = self.still(ref)
        try:
            scaled = self.scaled(top)
        except No as no:
            raise self.explained(top, no) from no
        x = self.source(scaled.normed)
        x_dtype = dtype_of(x.node)
        out_dtype = dtype_of(view.node)
        if scaled.down is not None and scaled.down != x_dtype:
            raise No(
                "match.norm-dtype", "the norm's result is cast to another dtype than its input's",
                top.node, 5, have=str(scaled.down), need=str(x_dtype),
            )  # fmt: skip
        cast = scaled.cast or ("late" if out_dtype == x_dtype or scaled.weight is None else "none")
        if scaled.cast is None and out_dtype != x_dtype and x_dtype not in _WIDE:
            cast = "none"
        weight, mode = self.weight(scaled.weight, cast)
        boundary = [x.node, *(n for n in (weight, scaled.normed.eps) if isinstance(n, Node))]
        return RMSNorm(
            x=x,
            weight=weight,
            eps=scaled.normed.eps,
            weight_mode=mode,
            cast=cast,
            inv_rms=scaled.normed.inv_rms,
            out_dtype=out_dtype,
            nodes=between(view.node, boundary, self.seen),
        )

    # --- walking --------------------------------------------------------------------------------

    def still(self, ref: Ref) -> Ref:
        """Follow data movement (no casts) to the node that computes the elements."""
        found = trails(ref, self.seen, negate=False, exact=False)
        if len(found) != 1:
            node = found[0].end.ref.node
            raise No("match.no-norm", "the value is put together from parts", node, 0)
        return found[0].end.ref

    def of(self, ref: Ref, argument: Any) -> Ref:
        """An operand of a pointwise node, followed to where it is computed."""
        if not isinstance(argument, Node):
            raise No("match.no-norm", "a number where a tensor is needed", ref.node, 0)
        return self.still(operand(ref, argument))

    # --- y = w * cast(x * inv) ------------------------------------------------------------------

    def scaled(self, ref: Ref) -> _Scaled:
        """The result's casts and weight, outside in."""
        source = cast_source(ref.node)
        if source is not None:
            down = dtype_of(ref.node)
            inner = self.still(ref.at(source, ref.index))
            if exact_cast(dtype_of(source), down):
                raise No("match.no-norm", "an up-cast", ref.node, 0)
            weighted = self.weighted(inner)
            if weighted is not None:
                return _Scaled(weighted[0], weighted[1], "early", down)
            return _Scaled(self.normed(inner), None, "late", down)
        weighted = self.weighted(ref)
        if weighted is not None:
            return _Scaled(weighted[0], weighted[1], None, None)
        late = self.late(ref)
        if late is not None:
            return late
        return _Scaled(self.normed(ref), None, None, None)

    def late(self, ref: Ref) -> _Scaled | None:
        """``w * cast(x * inv)``."""
        if op_name(ref.node) not in _MUL:
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
            return _Scaled(self.normed(below), weight, "late", dtype_of(inner.node))
        return None

    def weighted(self, ref: Ref) -> tuple[_Normed, Ref] | None:
        """``w * (x * inv)`` without a cast between."""
        if op_name(ref.node) not in _MUL:
            return None
        for value, other in self.both(ref):
            inner = self.of(ref, value)
            if self.is_normed(inner):
                return self.normed(inner), operand(ref, other)
        return None

    @staticmethod
    def both(ref: Ref) -> list[tuple[Node, Node]]:
        """The two tensor operands in both orders (none where one is a number)."""
        a, b = ref.node.args[:2]
        return [(a, b), (b, a)] if isinstance(a, Node) and isinstance(b, Node) else []

    def is_normed(self, ref: Ref) -> bool:
        """Whether the node looks like ``x * inv`` (the details are checked by ``normed``)."""
        name = op_name(ref.node)
        if name in _DIV:
            return self.root_of(ref, ref.node.args[1]) is not None
        if name not in _MUL:
            return False
        return any(self.inverse_of(ref, inv) is not None for _, inv in self.both(ref))

    def normed(self, ref: Ref) -> _Normed:
        """``x * inv`` or ``x / root``, with its reduction checked element by element."""
        name = op_name(ref.node)
        found: list[tuple[Node, tuple[Ref, str]]] = []
        if name in _DIV and isinstance(ref.node.args[0], Node):
            root = self.root_of(ref, ref.node.args[1])
            if root is not None:
                found.append((ref.node.args[0], (root, "div")))
        elif name in _MUL:
            for value, inv in self.both(ref):
                inverse = self.inverse_of(ref, inv)
                if inverse is not None:
                    found.append((value, inverse))
        if not found:
            op = opaque_node(ref.node)
            if op is not None and _per_head(op, self.frame):
                raise opaque(op, 1)
            raise No("match.no-norm", f"{ref.node.name} is not a norm", ref.node, 0)
        value, (variance, kind) = found[0]
        if dtype_of(ref.node) not in _WIDE:
            raise No(
                "match.norm-dtype", "the norm is not computed in float32", ref.node, 3,
                have=str(dtype_of(ref.node)), need="torch.float32",
            )  # fmt: skip
        mean, eps = self.epsilon(variance)
        square = self.reduced(mean, ref)
        return _Normed(operand(ref, value), square, eps, kind, ref.node)

    # --- inv ------------------------------------------------------------------------------------

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
        if name in _SQUARE_POW and node.args[1] == -0.5:
            return self.of(inv, node.args[0]), "pow"
        if name == "aten.reciprocal.default":
            root = self.root_of(inv, node.args[0])
            return None if root is None else (root, "recip")
        if name in _DIV and _constant(node.args[0]) == 1:
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
        is_root = name == "aten.sqrt.default" or (name in _SQUARE_POW and node.args[1] == 0.5)
        return self.of(root, node.args[0]) if is_root else None

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

    def epsilon(self, variance: Ref) -> tuple[Ref, float | Node]:
        """``(mean, eps)``; a missing epsilon is 0."""
        node, name = variance.node, op_name(variance.node)
        if name in _ADD:
            a = arguments(node)
            if a.get("alpha", 1) != 1:
                raise No("match.norm-eps", "epsilon is scaled", node, 3)
            for mean, eps in ((a["self"], a["other"]), (a["other"], a["self"])):
                number = _constant(eps)
                if number is not None and isinstance(mean, Node):
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
        if dtype_of(node) not in _WIDE:
            raise No("match.norm-dtype", "the mean is not computed in float32", node, 3)
        a = arguments(node)
        source = a["self"]
        shape = shape_of(source)
        dims = a.get("dim")
        listed = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
        over = sorted(axis_of(d, len(shape)) for d in listed)
        count = math.prod(shape[d] for d in over)
        if any(frame.dim_axis in depends(collapse(i)) for i in mean.index):
            raise No("match.norm-axis", "the mean runs over another axis than dim", node, 4)
        static = all(isinstance(value_of(source).shape[d], int) for d in over)
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
        if name in (*_DIV, "aten.div.Scalar"):
            number = _constant(node.args[1])
            if number is not None:
                return self.of(ref, node.args[0]), number
        if name in (*_MUL, "aten.mul.Scalar"):
            number = _constant(node.args[1])
            if number and math.frexp(number)[0] == 0.5:
                return self.of(ref, node.args[0]), 1 / number
        return ref, 1

    def squared(self, ref: Ref) -> Ref:
        """The element that is squared."""
        node, name = ref.node, op_name(ref.node)
        if dtype_of(node) not in _WIDE:
            raise No("match.norm-dtype", "squares are not computed in float32", node, 4)
        if name in _SQUARE_POW and node.args[1] == 2:
            return operand(ref, node.args[0])  # type: ignore[arg-type]
        if name == "aten.square.default":
            return operand(ref, node.args[0])  # type: ignore[arg-type]
        if name in _MUL and all(isinstance(n, Node) for n in node.args[:2]):
            left, right = (operand(ref, n) for n in node.args[:2])  # type: ignore[arg-type]
            if self.meeting(left, right) is not None:
                return left
        raise No("match.norm-form", "the mean is not of squares", node, 3)

    # --- x and w --------------------------------------------------------------------------------

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

    def source(self, normed: _Normed) -> TokenView:
        """x: checked to be the very elements that are squared."""
        met = self.meeting(normed.x, normed.square)
        if met is None:
            raise No(
                "match.norm-axis", "the mean square is not that of the normed elements",
                normed.node, 5,
            )  # fmt: skip
        trail, nodes = met
        for merged in (False, True):
            for node in nodes:
                hop = trail.at(node)
                assert hop is not None
                view = view_at(self.frame, node, hop.ref.index, hop.ref.labels, merged=merged)
                if view is not None:
                    return self.slid(view, trail, merged)
        node = nodes[0] if nodes else normed.node
        raise No(
            "match.norm-form",
            f"the normed value is not [tokens, {self.frame.heads}, {self.frame.dim}] of a node",
            node, 5,
        )  # fmt: skip

    def slid(self, view: TokenView, trail: Trail, merged: bool) -> TokenView:
        """Past copies and the up-cast, as long as the axes stay apart."""
        nodes = list(trail.nodes())
        after = nodes[nodes.index(view.node) + 1 :]
        best = view
        for node in after:
            hop = trail.at(node)
            assert hop is not None
            if shape_of(node) != shape_of(view.node):
                break
            there = view_at(self.frame, node, hop.ref.index, hop.ref.labels, merged=merged)
            if there is None or there.order != view.order:
                break
            best = there
        if dtype_of(best.node) in _WIDE:
            # The up-cast may stand before the view that splits heads.
            for node in after:
                hop = trail.at(node)
                assert hop is not None
                if dtype_of(node) == dtype_of(best.node):
                    continue
                there = view_at(self.frame, node, hop.ref.index, hop.ref.labels, merged=True)
                if there is not None:
                    return there
        return best

    def weight(self, ref: Ref | None, cast: str) -> tuple[Node | None, str]:
        """The weight vector and its mode. Raises where it is not one number per dim."""
        if ref is None:
            return None, "w"
        frame = self.frame
        if any(depends(collapse(i)) - {frame.dim_axis} for i in ref.index):
            raise No(
                "match.norm-form", "the weight differs from head to head or token to token",
                ref.node, 5,
            )  # fmt: skip
        plain = self.vector(ref, exact=cast != "late")
        one = self.still(ref)
        if op_name(one.node) in _ADD:
            a = arguments(one.node)
            for value, number in ((a["self"], a["other"]), (a["other"], a["self"])):
                if _constant(number) != 1 or not isinstance(value, Node) or a.get("alpha", 1) != 1:
                    continue
                inner = self.vector(operand(one, value), exact=cast != "late")
                if inner is None:
                    continue
                fits = dtype_of(one.node) == dtype_of(inner)
                if cast != "late":
                    fits = dtype_of(one.node) in _WIDE
                if fits:
                    return inner, "1+w"
        if plain is None:
            op = opaque_node(one.node)
            if op is not None and is_inner(ref.node):
                raise opaque(op, 5)
            raise No(
                "match.norm-form", "the weight is not a vector of one number per dim", ref.node, 5
            )
        return plain, "w"

    def vector(self, ref: Ref, *, exact: bool) -> Node | None:
        """The farthest ``[D]`` node that holds the weight's elements."""
        best = None
        found = trails(ref, self.seen, negate=False, exact=exact)
        if len(found) != 1:
            return None
        for hop in found[0].hops:
            node = hop.ref.node
            if is_inner(node) or shape_of(node) != (self.frame.dim,):
                continue
            flat = np.broadcast_to(collapse(hop.ref.index[0]).reshape(-1), (self.frame.dim,))
            if np.array_equal(flat, np.arange(self.frame.dim)):
                best = node
        return best

    # --- saying no ------------------------------------------------------------------------------

    def explained(self, top: Ref, no: No) -> No:
        """A better reason where a norm stands a little further back."""
        if no.miss.depth > 0:
            return no
        op = opaque_node(top.node)
        if op is not None:
            return opaque(op, 1) if _per_head(op, self.frame) else no
        for argument in top.node.all_input_nodes:
            value = value_of(argument)
            if not isinstance(value, torch.Tensor) or not op_name(top.node):
                continue
            if shape_of(argument) != shape_of(top.node) or not _is_pointwise(top.node):
                continue
            try:
                inner = self.still(operand(top, argument))
                self.scaled(inner)
            except No as other:
                if other.miss.depth > 1:
                    return other
                continue
            return No(
                "match.norm-order", f"{top.node.name} stands between the norm and the rope",
                top.node, 2,
            )  # fmt: skip
        return no


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or op_name(node).startswith("prims.convert")


def _per_head(op: Node, frame: Frame) -> bool:
    """Whether an opaque call keeps the shape of one of its inputs (as a norm would)."""
    value = value_of(op)
    shapes = [v.shape for v in (value if isinstance(value, (tuple, list)) else [value])
              if isinstance(v, torch.Tensor)]  # fmt: skip
    inputs = [value_of(n) for n in op.all_input_nodes]
    return any(isinstance(i, torch.Tensor) and i.shape in shapes for i in inputs)


def _constant(argument: Any) -> float | None:
    """A number, or the number that fills a constant tensor."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    if isinstance(argument, Node):
        name = op_name(argument)
        if name in ("aten.full.default", "aten.full_like.default"):
            return _constant(argument.args[1])
        if name == "aten.scalar_tensor.default":
            return _constant(argument.args[0])
        if name in ("aten.ones.default", "aten.ones_like.default"):
            return 1.0
    return None
