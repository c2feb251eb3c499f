"""The written rows before what the write itself does to them: scale, saturate, convert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion.graph.elements import Unreadable, cast_source
from fusion.graph.foreign import is_inner
from fusion.match import cache_view as cv
from fusion.match.facts import TokenView
from fusion.match.trail import trails
from fusion.match.views import frame_of, view_at
from fusion.reason import Reason

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Source:
    """``node`` holds the rows, ``scale`` divides them; ``inner`` are the nodes in between."""

    node: Node
    scale: Node | None = None
    inner: tuple[Node, ...] = ()


def source_of(values: Node, dtype: torch.dtype) -> Source | Reason:
    """Read ``(rows.float() / scale).clamp(-max, max).to(fp8)`` backwards.

    For a cache that is not fp8 the rows are the written values as they stand: a cast before
    the write belongs to the chain (it is where the model rounds), and :func:`before_cast` finds
    the value behind it.

    A conversion to fp8 without saturation is refused, because it gives NaN where the canonical
    write gives the largest number. A scale that is not one f32 number stays part of the chain.
    """
    if dtype not in FP8:
        return Source(values)
    converted = _converted(values)
    if converted is None:
        return _no(values, "the fp8 rows are not converted right before the write")
    unclamped = _unclamped(converted, torch.finfo(dtype).max)
    if unclamped is None:
        return _no(values, "the rows are converted to fp8 without saturating first")
    rows, inner = unclamped
    inner = (values, *inner)
    plain = _plain(rows)
    if rows.meta["val"].dtype == torch.float32 and cv.op_name(rows) == "aten::div":
        over, scale = rows.args[0], rows.args[1]
        if isinstance(over, Node) and isinstance(scale, Node) and _one_number(scale):
            source = _plain(over)
            passed = () if source is over else (over,)
            return Source(source, scale, (*inner, rows, *passed))
    passed = () if plain is rows else (rows,)
    return Source(plain, None, (*inner, *passed))


def before_cast(view: TokenView, dtype: torch.dtype) -> TokenView | None:
    """The rows before the cast to the cache's ``dtype``, or None where no such cast made them all.

    The canonical write converts to that dtype itself, so rows ``[T, H, D]`` of another one are
    as good as their conversion; a cast to a third dtype is a rounding of its own. Raises
    nothing: what cannot be followed is None.
    """
    if view.node.meta["val"].dtype != dtype:
        return None
    try:
        frame, ref = frame_of(view)
        found = trails(ref, set(), negate=False, exact=False)
        end = found[0].end.ref
        source = cast_source(end.node)
        if len(found) != 1 or source is None or is_inner(source):
            return None
        return view_at(frame, source, end.index, end.labels)
    except Unreadable:
        return None


def _converted(node: Node) -> Node | None:
    """The input of a dtype conversion."""
    if node.op != "call_function":
        return None
    if cv.op_name(node) not in ("prims::convert_element_type", "aten::_to_copy"):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _plain(node: Node) -> Node:
    """Look through a widening conversion to f32, which the canonical write does itself."""
    source = _converted(node)
    if source is None or node.meta["val"].dtype != torch.float32:
        return node
    before: torch.dtype = source.meta["val"].dtype
    return source if before in (torch.bfloat16, torch.float16) else node


def _unclamped(node: Node, limit: float) -> tuple[Node, tuple[Node, ...]] | None:
    """The value inside ``clamp(-limit, limit)``, in one op or two."""
    low = high = False
    inner: list[Node] = []
    while node.op == "call_function" and not (low and high):
        name = cv.op_name(node)
        if name not in ("aten::clamp", "aten::clamp_min", "aten::clamp_max"):
            break
        a = cv.arguments(node)
        least, most = a.get("min"), a.get("max")
        # A limit that is a node equals no number.
        if (least is not None and least != -limit) or (most is not None and most != limit):
            return None
        low, high = low or least is not None, high or most is not None
        inner.append(node)
        node = a["self"]
    return (node, tuple(inner)) if low and high else None


def _one_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    return value.dim() == 0 or (value.dim() == 1 and cv.equal(value.shape[0], 1))


def _no(node: Node, message: str) -> Reason:
    return Reason("match.value", message, node=node.name)
