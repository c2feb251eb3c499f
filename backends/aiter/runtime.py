"""For which machine the adapters call AITER, and how they get at its functions."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from fusion.backends.aiter import probe
from fusion.backends.aiter.contract import Function
from fusion.reason import Reason
from fusion.selection import NoKernelError
from fusion.target import Target

_assumed: contextvars.ContextVar[Target | None] = contextvars.ContextVar("_assumed", default=None)


def target() -> Target:
    """The machine whose AITER is called: the present one, unless :func:`assume` says another."""
    return _assumed.get() or Target.current()


@contextlib.contextmanager
def assume(other: Target) -> Iterator[None]:
    """Call AITER as on another machine; for tests with a stand-in or an interpreter."""
    token = _assumed.set(other)
    try:
        yield
    finally:
        _assumed.reset(token)


def resolve(spec: Function) -> Callable[..., Any]:
    """The callable. Raises :class:`~fusion.selection.NoKernelError` with the reason.

    The gate has asked before, so this fails only where an adapter is called past the gate.
    """
    found = probe.function(spec)
    if isinstance(found, Reason):
        raise NoKernelError(f"AITER's {spec.name} cannot be called: {found}")
    return found
