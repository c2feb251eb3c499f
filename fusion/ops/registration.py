"""Registers the canonical operations with ``torch.library``.

Each has a schema, a fake implementation, an implementation for every device that checks its
arguments and runs the chosen kernel, and an autograd rule that says "for inference only". Import
of this module registers them, once a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.graph.dispatch import below_autograd
from fusion.graph.lowerings import install, offer, stamp_caches
from fusion.ops.checks import check, out_of_range
from fusion.ops.dispatch import choose, fingerprint, resolve
from fusion.ops.schema import NAMESPACE, SCHEMAS, Signature, opaque_schema
from fusion.selection import NoKernelError

# Inductor must hand over exactly the strides that the gate saw when the kernel was chosen.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _empty_results(op: str, a: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor] | None:
    """Outputs of the right shape, dtype and device, uninitialised; sizes may be symbolic."""
    if op == "kv_cache_write":
        return None
    query = a["query"]
    if op == "paged_attention":
        dim_v = a["value_cache"].shape[3]
        out: Tensor = query.new_empty((query.shape[0], query.shape[1], dim_v))
        return out
    key = a["key"]
    tokens = key.shape[0] if op == "qk_norm_rope" or a["return_key"] else 0
    return (
        query.new_empty(query.shape, dtype=a["out_dtype"]),
        key.new_empty((tokens, *key.shape[1:]), dtype=a["out_dtype"]),
    )


def _register(op: str) -> tuple[Any, Signature]:
    _library.define(op + SCHEMAS[op], tags=_TAGS)
    _library.define(f"{op}.opaque{opaque_schema(op)}", tags=_TAGS)
    packet = getattr(getattr(torch.ops, NAMESPACE), op)
    signature = Signature(op, packet.default._schema)

    def lowering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return choose(op, signature.bind(args, kwargs)).lowering
        except NoKernelError:  # the call says so when it is made; compiling must not fail here
            return None

    offer(packet.default, packet.opaque, lowering)
    _implement(op, packet.default, signature)
    _implement(f"{op}.opaque", packet.opaque, Signature(op, packet.opaque._schema))
    return packet.default, signature


def _implement(name: str, overload: Any, signature: Signature) -> None:
    """The three registrations of one overload: every device, fake, autograd."""
    op = signature.op

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(args, kwargs)
        kernel, in_cache = resolve(op, arguments)
        for name in in_cache:  # read before the cache is written, whatever order the kernel has
            arguments[name] = arguments[name].clone()
        positional, keyword = SIGNATURES[op].split(arguments)
        try:
            return kernel.fn(*positional, **keyword)
        except IndexError as error:
            raise out_of_range(op, arguments, error) from error

    def fake(*args: Any, **kwargs: Any) -> Any:
        install()
        stamp_caches(fingerprint())
        arguments = signature.bind(args, kwargs)
        check(op, arguments)
        return _empty_results(op, arguments)

    def autograd(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(args, kwargs)
        if torch.is_grad_enabled():
            for argument, value in arguments.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"fusion.ops.{op} is for inference only, but its argument {argument!r} "
                        "requires grad; call it under torch.no_grad() or detach the argument"
                    )
        with below_autograd():
            result = overload(*args, **kwargs)
        for argument in signature.mutated:
            # Below autograd nobody else records that the cache was written in place.
            torch.autograd.graph.increment_version(arguments[argument])
        return result

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


_registered: dict[str, tuple[Any, Signature]] = {op: _register(op) for op in SCHEMAS}

OVERLOADS: Mapping[str, Callable[..., Any]] = {op: made[0] for op, made in _registered.items()}
"""``torch.ops.fusion.<name>.default`` by name."""

SIGNATURES: Mapping[str, Signature] = {op: made[1] for op, made in _registered.items()}
"""Argument names, order and defaults of each operation."""
