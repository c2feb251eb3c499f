"""Per-head RMSNorm, read from the elements of its result.

``y = w * (x * inv)`` where ``inv`` depends on token and head only and is the inverse root of a
mean over exactly the elements ``x[t, h, 0..D-1]`` plus epsilon. The places of the casts tell
whether the weight is multiplied before the down-cast (early), after it (late) or without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fusion.graph.elements import (
    CASTS,
    Ref,
    Unreadable,
    arguments,
    cast_source,
    collapse,
    depends,
    dtype_of,
    op_name,
    operand,
    shape_of,
    value_of,
)
from fusion.graph.foreign import is_inner, owner, register_op
from fusion.graph.moves import is_move
from fusion.match.facts import Miss, RMSNorm, TokenView
from fusion.match.miss import No, opaque, opaque_node
from fusion.match.norm_form import FormReader, Normed, per_head
from fusion.match.norm_mean import ADD, DIV, MUL, WIDE
from fusion.match.trail import Trail, between, trails
from fusion.match.views import frame_of, view_at
from fusion.match.walk import constant_number
from fusion.reason import Reason

_REDUCTIONS = (
    "mean",
    "sum",
    "amax",
    "amin",
    "var",
    "var_mean",
    "std",
    "linalg_vector_norm",
    "norm",
)
_FAR = 6
"""How many pointwise operators after a norm are looked through to find it."""


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """What ``aten.rms_norm`` computes (ATen's composite: weight in float32, then down-cast)."""
    wide = x if x.dtype == torch.float64 else x.float()
    dims = tuple(range(-len(shape), 0))
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + small)
    return (normed if weight is None else normed * weight).to(x.dtype)


def _fused_rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _rms_norm(x, shape, weight, eps), None


register_op(torch.ops.aten.rms_norm.default, _rms_norm)
if hasattr(torch.ops.aten, "_fused_rms_norm"):
    register_op(torch.ops.aten._fused_rms_norm.default, _fused_rms_norm)


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
        node = owner(error.node or view.node)
        return Miss(Reason("match.norm-form", str(error), node=node.name), node, 0)


def read_norm_or_raise(view: TokenView) -> RMSNorm:
    """:func:`read_norm`, raising :class:`No` or :class:`Unreadable` instead of a Miss."""
    frame, ref = frame_of(view)
    reading = _Reading(frame, set())
    return reading.norm(view, ref)


class _Reading(FormReader):
    """One reading, from the value to the fact."""

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
                "match.norm-dtype",
                f"{x.node.name} is normed in its own dtype, and the result is cast to another",
                x.node, 5, have=f"{x_dtype} to {scaled.down}", need="one dtype before and after",
            )  # fmt: skip
        want = x_dtype if x_dtype in WIDE else torch.float32
        if self.wide != {want}:
            raise No(
                "match.norm-dtype", f"the norm is not computed in {want}",
                scaled.normed.node, 5, have=", ".join(sorted(map(str, self.wide))), need=str(want),
            )  # fmt: skip
        cast = scaled.cast or ("late" if out_dtype == x_dtype or scaled.weight is None else "none")
        if scaled.cast is None and out_dtype != x_dtype and x_dtype not in WIDE:
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

    # --- x and w --------------------------------------------------------------------------------

    def source(self, normed: Normed) -> TokenView:
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
        if dtype_of(best.node) in WIDE:
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
        if op_name(one.node) in ADD:
            a = arguments(one.node)
            for value, number in ((a["self"], a["other"]), (a["other"], a["self"])):
                is_one = constant_number(number) == 1 and a.get("alpha", 1) == 1
                if not is_one or not isinstance(value, Node):
                    continue
                inner = self.vector(operand(one, value), exact=cast != "late")
                if inner is None:
                    continue
                fits = dtype_of(one.node) == dtype_of(inner)
                if cast != "late":
                    fits = dtype_of(one.node) in WIDE
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
            return opaque(op, 1) if per_head(op, self.frame) else no
        if (op := _other_norm(top.node)) is not None:
            return No("match.norm-form", f"{op_name(op)} is not an RMSNorm", op, 2)
        found = self.behind(top, _FAR)
        if found is not None:
            return found
        return self.odd_scale(top) or no

    def behind(self, top: Ref, far: int) -> No | None:
        """The refusal where a norm stands up to ``far`` pointwise operators before ``top``."""
        if not _is_pointwise(top.node):
            return None
        for argument in top.node.all_input_nodes:
            value = value_of(argument)
            if not isinstance(value, torch.Tensor) or shape_of(argument) != shape_of(top.node):
                continue
            try:
                inner = self.still(operand(top, argument))
            except No:
                continue
            try:
                self.scaled(inner)
            except No as other:
                if other.miss.depth > 1:
                    return other
                deeper = self.odd_scale(inner)
                if deeper is None and far > 1:
                    deeper = self.behind(inner, far - 1)
                if deeper is None:
                    continue
                if deeper.miss.node is None or cast_source(deeper.miss.node) is None:
                    return deeper
            message = f"{top.node.name} stands between the norm and the rope"
            return No("match.norm-order", message, top.node, 2)
        return None

    def odd_scale(self, top: Ref) -> No | None:
        """The refusal of something times or over another reduction of each head."""
        if not self.scales_heads(top):
            return None
        message = f"{top.node.name} scales each head, but not by an inverse root mean square"
        return No("match.norm-form", message, top.node, 1)

    def scales_heads(self, top: Ref) -> bool:
        """Whether the value is something times or over a reduction of each head."""
        if op_name(top.node) not in (*MUL, *DIV):
            return False
        for argument in top.node.all_input_nodes:
            if shape_of(argument) == shape_of(top.node) or len(shape_of(argument)) < 2:
                continue
            back, todo = 0, [argument]
            while todo and back < 8:
                node = todo.pop(0)
                back += 1
                if op_name(node).split(".")[1:2] and op_name(node).split(".")[1] in _REDUCTIONS:
                    return True
                if _is_pointwise(node) or is_move(node):
                    todo += node.all_input_nodes
        return False


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or op_name(node) in CASTS


def _other_norm(node: Node) -> Node | None:
    """A normalisation of another kind that the value is a result of."""
    source = node.args[0] if op_name(node) == "getitem" else node
    if isinstance(source, Node) and op_name(source).split(".")[1:2]:
        name = op_name(source).split(".")[1]
        return source if name.endswith("_norm") else None
    return None
