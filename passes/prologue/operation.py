"""Turn a chain into a call of a canonical operation, as data.

An :class:`Operation` names every operand by the fact that describes it. It is used three times:
to ask the gate (:func:`kernel_call`), to check the rewrite on small inputs, and to emit nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fusion.config import Config
from fusion.graph.shapes import example
from fusion.graph.storage import root_of
from fusion.kernel import KernelCall, TensorSpec
from fusion.match.facts import CachePlane, RopeTable, Slots, TokenView
from fusion.passes.prologue.chain import Chain
from fusion.target import Target

Operand: TypeAlias = "TokenView | RopeTable | CachePlane | Slots | Node | None"


@dataclass(frozen=True)
class Operation:
    """One call: ``name`` of the canonical operation, its tensors by argument, its attributes."""

    name: str
    tensors: Mapping[str, Operand]
    attributes: Mapping[str, Any]
    kv_layout: str = "NHD"


def operation_of(chain: Chain, *, return_key: bool) -> Operation:
    """The canonical call that computes a chain.

    ``return_key`` asks for the rotated key as a result, for graphs that read it elsewhere.
    """
    rope, write = chain.k_rope, chain.write
    tensors: dict[str, Operand] = {"query": chain.query, "key": chain.key}
    attributes: dict[str, Any] = {}
    if write is not None:
        tensors["value"] = write.value
    if chain.q_norm is not None and chain.k_norm is not None:
        q, k = chain.q_norm, chain.k_norm
        tensors |= {"q_weight": q.weight, "k_weight": k.weight}
        for side, eps in (("q", q.eps), ("k", k.eps)):
            attributes[f"{side}_eps"] = 0.0 if isinstance(eps, Node) else float(eps)
            tensors[f"{side}_eps_tensor"] = eps if isinstance(eps, Node) else None
        mode = k.weight_mode if k.weight is not None else q.weight_mode
        attributes |= {"weight_mode": mode, "norm_cast": k.cast, "inv_rms": k.inv_rms}
    tensors |= {"cos": rope.cos, "sin": rope.sin, "positions": rope.cos.positions}
    attributes |= {
        "rope_style": rope.style,
        "rotary_dim": rope.rotary_dim,
        "rope_dtype": rope.rope_dtype,
        "out_dtype": rope.out_dtype,
    }
    if write is not None:
        tensors |= {
            "key_cache": write.key_plane,
            "value_cache": write.value_plane,
            "slot_mapping": write.slots,
            "k_scale": write.k_scale,
            "v_scale": write.v_scale,
        }
        attributes |= {"return_key": return_key, "kv_layout": write.kv_layout}
        return Operation(chain.operation, tensors, attributes, write.kv_layout)
    return Operation(chain.operation, tensors, attributes)


def kernel_call(operation: Operation, target: Target, config: Config) -> KernelCall:
    """Describe the call for the gate, from fake-tensor metadata alone."""
    specs = {name: _spec(operand) for name, operand in operation.tensors.items()}
    declared, _ = config.kv_layout_switch()
    layout = "SHUFFLE" if declared == "shuffle" else operation.kv_layout
    attributes = dict(operation.attributes)
    scales = [operation.tensors.get(name) for name in ("k_scale", "v_scale")]
    if any(
        isinstance(s, Node) and root_of(s).node.op not in ("placeholder", "get_attr")
        for s in scales
    ):
        # A kernel that wants host copies of the scales cannot keep one of a computed scale.
        attributes["scales_static"] = False
    key = specs["key"]
    assert key is not None
    target = target.for_device(key.device)
    return KernelCall(operation.name, specs, attributes, target, config, layout)


def _spec(operand: Operand) -> TensorSpec | None:
    if operand is None:
        return None
    if isinstance(operand, Node):
        return TensorSpec.of(operand.meta["val"], base=root_of(operand).node.name)
    if isinstance(operand, TokenView):
        return _token_view_spec(operand)
    if isinstance(operand, RopeTable):
        return _table_spec(operand)
    if isinstance(operand, Slots):
        value = operand.node.meta["val"]
        # A range has no slot tensor: one is made, with an entry for every row.
        rows = None if operand.kind == "range" else _int(value.numel())
        return TensorSpec((rows,), torch.int64, (1,), value.device.type)
    device = operand.base.meta["val"].device.type
    return TensorSpec(
        tuple(_int(s) for s in operand.size),
        operand.dtype,
        tuple(_int(s) for s in operand.stride),
        device,
        _int(operand.storage_offset),
        base=root_of(operand.base).node.name,
        hints=tuple(example(s) for s in operand.size),
    )


def _token_view_spec(view: TokenView) -> TensorSpec:
    """``[T, H, D]`` with the strides that permute and reshape give (dense where they copy)."""
    value = view.node.meta["val"]
    root = root_of(view.node)
    sizes = [example(value.shape[d]) for d in view.order]
    strides = [example(value.stride(d)) for d in view.order]
    shape = (_int(view.tokens), view.heads, view.dim)
    hints = (example(view.tokens), view.heads, view.dim)
    grouped = _view_strides(sizes, strides, hints)
    if grouped is None:  # the reshape copies: a tensor of its own
        dense = (view.heads * view.dim, view.dim, 1)
        return TensorSpec(shape, value.dtype, dense, value.device.type, 0, None, hints)
    offset = root.offset if root.offset is not None else _int(value.storage_offset())
    return TensorSpec(shape, value.dtype, grouped, value.device.type, offset, root.node.name, hints)


def _view_strides(
    sizes: list[int | None], strides: list[int | None], target: tuple[int | None, ...]
) -> tuple[int, ...] | None:
    """Strides after a reshape that needs no copy, or None where it needs one."""
    n, st, t = ([x for x in xs if x is not None] for xs in (sizes, strides, target))
    if len(n) + len(st) + len(t) != len(sizes) + len(strides) + len(target):
        return None
    try:
        return torch.empty_strided(n, st, device="meta").view(t).stride()
    except (RuntimeError, ValueError):  # ValueError: under an ambient fake mode
        return None


def _table_spec(table: RopeTable) -> TensorSpec:
    value = table.node.meta["val"]
    start, stop = table.columns
    # A component of a complex table is a real tensor with every other element.
    step = 1 if table.part is None else 2
    if table.positions is not None:
        rows, stride = _int(value.shape[0]), _int(value.stride(0))
    else:
        sized = [i for i, role in enumerate(table.roles) if isinstance(role, int)]
        rows = _int(value.shape[sized[-1]]) if len(sized) == 1 else None
        stride = _int(value.stride(sized[-1])) if len(sized) == 1 else stop - start
    return TensorSpec(
        (rows, stop - start),
        value.dtype.to_real(),
        (None if stride is None else stride * step, step),
        value.device.type,
        base=root_of(table.node).node.name,
        hints=(rows, stop - start),
    )


def _int(size: Any) -> int | None:
    return size if isinstance(size, int) else None
