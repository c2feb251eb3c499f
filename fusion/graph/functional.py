"""Reading the functional wrappers that AOTAutograd puts around mutating custom ops.

Private names of ``torch._higher_order_ops.auto_functionalize``; run on torch 2.13, and the same
in the published sources of 2.11 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops import auto_functionalize as _af
from torch.fx import Node

AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized
AUTO_FUNCTIONALIZED_V2 = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True)
class ArgView:
    """How ``auto_functionalized_v2`` makes one mutated argument from its base.

    ``kind``: ``base`` (the base itself), ``alias`` (the same geometry), ``slice`` (``dim``,
    ``start``, ``end`` of the base) or ``strided`` (``size``, ``stride``, ``storage_offset`` in
    elements of the base's storage). Numbers may be FX nodes that hold a SymInt.
    """

    base_index: int
    kind: str
    size: tuple[Any, ...] = ()
    stride: tuple[Any, ...] = ()
    storage_offset: Any = 0
    dim: Any = 0
    start: Any = 0
    end: Any = 0


def is_auto_functionalized(node: Node) -> bool:
    """Whether the node is the functional wrapper (v1 or v2) of a mutating custom op."""
    return node.op == "call_function" and node.target in (
        AUTO_FUNCTIONALIZED,
        AUTO_FUNCTIONALIZED_V2,
    )


def mutable_op(node: Node) -> Any:
    """The op inside an ``auto_functionalized`` or ``auto_functionalized_v2`` node."""
    return node.args[0] if node.args else node.kwargs["_mutable_op"]


def mutated_names(op: Any) -> list[str]:
    """Names of the arguments that an op's schema marks as written, in schema order."""
    return [
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]


def arg_views(node: Node) -> dict[str, ArgView | None]:
    """Read a v2 node's encoding of its mutated arguments with torch's own reader.

    Maps argument name to its view, None for an optional argument that is not given.
    Arguments that are lists of tensors are left out: no canonical op has any.
    """
    op = mutable_op(node)
    names, types = _af.get_mutable_args(op)
    kwargs = dict(node.kwargs)
    bases: Any = kwargs.pop("_all_bases")
    infos = _af.read_view_information_from_args(names, types, kwargs, bases)
    views: dict[str, ArgView | None] = {}
    for name, info in infos.items():
        if info is None:
            views[name] = None
        elif isinstance(info, _af.NotView):
            views[name] = ArgView(info.base_index, "base")
        elif isinstance(info, _af.AliasViewInfo):
            views[name] = ArgView(info.base_index, "alias")
        elif isinstance(info, _af.SliceViewInfo):
            views[name] = ArgView(
                info.base_index, "slice", dim=info.dim, start=info.start, end=info.end
            )
        else:  # AsStridedViewInfo
            views[name] = ArgView(
                info.base_index,
                "strided",
                tuple(info.size),
                tuple(info.stride),
                info.storage_offset,
            )
    return views


def plain_kwargs(node: Node) -> dict[str, Any]:
    """The arguments of the wrapped op that are not mutated (wrapper bookkeeping removed)."""
    op = mutable_op(node)
    written = set(mutated_names(op))
    names = {a.name for a in op._schema.arguments} - written
    return {k: v for k, v in node.kwargs.items() if k in names}


def returns_count(op: Any) -> int:
    """Outputs of the wrapper before the new base values: an op without returns has one slot."""
    return max(1, len(op._schema.returns))
