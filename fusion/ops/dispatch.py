"""Which kernel runs a call: the named one, or the first that may."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.config import Config
from fusion.fingerprint import digest_of, environment, package_sources
from fusion.graph.storage import storage_id
from fusion.kernel import Kernel, KernelCall, TensorSpec
from fusion.ops.checks import check, read_of_written
from fusion.selection import NoKernelError, find, kernels, offered, preference, select
from fusion.target import Target


def describe_call(
    op: str,
    arguments: Mapping[str, Any],
    *,
    target: Target | None = None,
    config: Config | None = None,
) -> KernelCall:
    """Describes a call, real or fake, for the gate.

    Args:
        op: name of the canonical operation.
        arguments: its arguments by name; tensors may be fake. Symbolic numbers become None.
        target: the machine; None = what this process runs on. For CPU tensors on a probed
            machine that is its CPU (:meth:`~fusion.target.Target.for_device`).
        config: None = the defaults.
    """
    tensors: dict[str, TensorSpec | None] = {}
    attributes: dict[str, Any] = {}
    device = "cpu"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[name] = TensorSpec.of(value)
            if value.device.type != "cpu":
                device = value.device.type
        elif name != "kernel":
            attributes[name] = None if isinstance(value, torch.SymInt) else value
    target = (target or Target.current()).for_device(device)
    layout = attributes.get("kv_layout", "NHD")
    return KernelCall(op, tensors, attributes, target, config or Config(), layout)


def choose(op: str, arguments: Mapping[str, Any]) -> Kernel:
    """The kernel for a call, by its ``kernel`` argument.

    Raises:
        fusion.selection.NoKernelError: the named kernel does not exist or cannot run this call,
            or none can; the message holds every candidate with its reasons.
    """
    name = arguments["kernel"]
    call = describe_call(op, arguments)
    if name == "auto":
        selection = select(call)
        if selection.kernel is None:
            raise NoKernelError(
                f"no kernel can run this call of fusion.ops.{op}:\n{selection.table()}",
                selection.candidates,
            )
        return selection.kernel
    kernel = find(op, name)
    if kernel.requires.unmet(call):
        selection = select(_preferring(call, name))
        raise NoKernelError(
            f"kernel {name!r} cannot run this call of fusion.ops.{op}:\n{selection.table()}",
            selection.candidates,
        )
    return kernel


def resolve(op: str, arguments: Mapping[str, Any]) -> tuple[Kernel, tuple[str, ...]]:
    """Checks a call; its kernel, and the arguments to copy first; what was found is remembered.

    To be copied are those that are read and lie in a cache that is written.

    Both depend on nothing but the metadata of the arguments, the switches, the machine and the
    kernels that there are, so a call like an earlier one costs a look-up (some 10 microseconds
    instead of 60, which is what counts where a graph calls an operation in every layer).

    Raises:
        ValueError: see :func:`fusion.ops.checks.check`.
        fusion.selection.NoKernelError: see :func:`choose`.
    """
    known = kernels(op)
    key = (
        op,
        Target.current(),
        tuple(map(id, known)),
        *map(os.environ.get, _SWITCHES),
        *_metadata(arguments),
    )
    found = _resolved.get(key)
    if found is None:
        check(op, arguments)
        if len(_resolved) >= 4096:  # forget rather than grow without bound with the shapes seen
            _resolved.clear()
        # The kernels are kept with the entry so that their ids stay theirs.
        found = _resolved[key] = (choose(op, arguments), read_of_written(op, arguments), known)
    return found[0], found[1]


_SWITCHES = ("FUSION_AITER", "FUSION_KV_LAYOUT", "TRITON_INTERPRET")
_resolved: dict[Hashable, tuple[Kernel, tuple[str, ...], tuple[Kernel, ...]]] = {}


_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def _metadata(arguments: Mapping[str, Any]) -> list[Hashable]:
    """What checks and conditions read of the arguments.

    The last entry numbers the storages in order of appearance: with offsets and strides that says
    which tensors overlap.
    """
    found: list[Hashable] = []
    homes: list[int] = []
    for value in arguments.values():
        # Asking a number whether it is a Tensor takes half a microsecond; there are twenty.
        if type(value) not in _PLAIN and isinstance(value, Tensor):
            found.append(
                (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
            )
            homes.append(storage_id(value))
        else:
            found.append((type(value), value))
    found.append(tuple(map(homes.index, homes)))
    return found


def fingerprint() -> str:
    """What compiled code depends on beside its graph: sources, switches, machine, kernels."""
    return _fingerprint(environment())


@functools.lru_cache(maxsize=64)
def _fingerprint(switches: tuple[tuple[str, str], ...]) -> str:
    return digest_of((package_sources(), switches, repr(Target.current()), offered()))


def _preferring(call: KernelCall, name: str) -> KernelCall:
    """The same call with the named kernel first in the table, then the usual ones."""
    rest = tuple(n for n in preference(call) if n != name)
    return replace(call, config=call.config.replace(kernels=(name, *rest)))
