"""The reference operations as Inductor code: traced, then run as ATen lowerings.

Only the copy into the cache is spelled here, because it must happen in place; everything else is
the reference itself. So a compiled call costs what the same lines in the model would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.backends.reference import prologue
from fusion.backends.reference.cache import (
    key_index,
    redirect_padding,
    rows_to_store,
    value_index,
)
from fusion.graph.lowerings import Decline, examples, inline, once, put_rows

_WRITE = ("key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")


def _positional(op: str) -> tuple[str, ...]:
    rope = ("cos", "sin", "positions")
    weights = ("q_weight", "k_weight")
    return {
        "kv_cache_write": ("key", "value", *_WRITE),
        "rope_kv_cache": ("query", "key", "value", *rope, *_WRITE),
        "qk_norm_rope_kv_cache": ("query", "key", "value", *weights, *rope, *_WRITE),
        "qk_norm_rope": ("query", "key", *weights, *rope),
    }[op]


def lowering(op: str) -> Callable[..., Any]:
    """The Inductor lowering of one operation of the reference.

    Raises (when called):
        fusion.graph.lowerings.Decline: off the CPU, or where the reference cannot be traced.
    """
    names = _positional(op)

    def lower(*args: Any, **kwargs: Any) -> Any:
        fake_args, fake_kwargs = examples()
        fakes = {**dict(zip(names, fake_args, strict=True)), **fake_kwargs}
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        fakes.pop("kernel", None)
        return _lower(op, values, fakes)

    return lower


def _lower(op: str, values: Mapping[str, Any], fakes: Mapping[str, Any]) -> Any:
    tensors = [name for name, fake in fakes.items() if isinstance(fake, Tensor)]
    rest = {name: fake for name, fake in fakes.items() if not isinstance(fake, Tensor)}
    if any(fakes[name].device.type != "cpu" for name in tensors):
        raise Decline("on a GPU the reference is not chosen for speed")

    def functional(*given: Tensor) -> Any:
        return _functional(op, {**dict(zip(tensors, given, strict=True)), **rest})

    key = (op, tuple(tensors), tuple(sorted((k, str(v)) for k, v in rest.items())))
    result, rows = inline(
        functional, [values[n] for n in tensors], [fakes[n] for n in tensors], key
    )
    if rows is not None:
        _write(rows, values, fakes)
    return result


def _write(rows: tuple[Any, Any], values: Mapping[str, Any], fakes: Mapping[str, Any]) -> None:
    """The copy into both caches; ``rows`` as :func:`rows_to_store` gives them, but IR."""
    layout, fake_slots = fakes["kv_layout"], fakes["slot_mapping"]
    for name, index_of, dims, data in (
        ("key_cache", key_index, (0, 3, 1, 2, 4), rows[0]),
        ("value_cache", value_index, (0, 2, 4, 1, 3), rows[1]),
    ):
        cache, fake = values[name], fakes[name]

        def plan(slots: Tensor, cache: Tensor, index_of: Any = index_of) -> tuple[Tensor, ...]:
            to = redirect_padding(slots)
            return to.source, to.any_valid, *index_of(cache, to.slot, layout)

        def make(slots: Any, cache: Any = cache, fake: Any = fake, plan: Any = plan) -> Any:
            return inline(plan, [slots, cache], [fake_slots, fake])

        # The index depends on the cache's block size and on nothing else of it.
        sizes = tuple(str(s) for s in (fake.shape[1:2] if layout == "NHD" else fake.shape[2:]))
        shuffled = (name, layout) if layout == "SHUFFLE" else layout
        source, any_valid, *index = once(values["slot_mapping"], (shuffled, sizes), make)
        if layout == "SHUFFLE":  # key_view and value_view, on IR
            from torch._inductor.lowering import lowerings

            cache = lowerings[torch.ops.aten.permute.default](cache, dims)
        put_rows(cache, index, data, source, any_valid)


def _functional(op: str, a: dict[str, Any]) -> tuple[Any, Any]:
    """What the operation returns, and the rows that are left to copy (None for nothing)."""
    layout = a.pop("kv_layout", "NHD")
    return_key = a.pop("return_key", False)
    write = {name: a.pop(name, None) for name in _WRITE}
    value = a.pop("value", None)
    if op == "kv_cache_write":
        result, key = None, a["key"]
    elif op == "rope_kv_cache":
        result = prologue.rope_qk(**a)
        key = result[1]
    else:
        result = prologue.qk_norm_rope(**a)
        key = result[1]
    if op == "qk_norm_rope":
        return result, None
    slots = write.pop("slot_mapping")
    rows = None
    if slots.shape[0] != 0 and write["key_cache"].shape[0] != 0:
        rows = rows_to_store(key, value, **write, kv_layout=layout)
    if result is not None and not return_key:
        result = (result[0], key.new_empty((0, *key.shape[1:])))
    return result, rows
