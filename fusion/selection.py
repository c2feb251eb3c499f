"""Choose a kernel for a call: the first accepted one in order of preference.

The choice comes with the whole table of candidates, accepted or not, each with all its unmet
conditions, because "why not the fast one" is the question that people ask.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusion.fingerprint import function_source
from fusion.kernel import Kernel, KernelCall
from fusion.reason import Reason
from fusion.requires import Requires

ENTRY_POINT_GROUP = "fusion.backends"
BUILTIN = {
    "aiter": "fusion.backends.aiter",
    "triton": "fusion.backends.triton",
    "reference": "fusion.backends.reference",
}


class NoKernelError(RuntimeError):
    """No kernel (or not the named one) may run this call; the message holds the table."""

    def __init__(self, text: str, candidates: Sequence[Candidate] = ()) -> None:
        super().__init__(text)
        self.candidates = tuple(candidates)


class DuplicateBackendError(RuntimeError):
    """Two packages offer a kernel of the same name for the same operation."""


@dataclass(frozen=True)
class Candidate:
    """One kernel that was looked at, with its unmet conditions."""

    kernel: str
    accepted: bool
    reasons: tuple[Reason, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready mapping."""
        return {
            "kernel": self.kernel,
            "accepted": self.accepted,
            "reasons": [r.to_dict() for r in self.reasons],
        }


@dataclass(frozen=True)
class Selection:
    """The chosen kernel (None where none may run) and every candidate in order."""

    kernel: Kernel | None
    candidates: tuple[Candidate, ...]

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """The unmet conditions of all candidates, in order."""
        return tuple(r for c in self.candidates for r in c.reasons)

    def table(self) -> str:
        """The candidates as text, one line a kernel and one a reason."""
        lines = []
        for c in self.candidates:
            lines.append(f"  {c.kernel}: {'accepted' if c.accepted else 'refused'}")
            lines += [f"    {r}" for r in c.reasons]
        return "\n".join(lines) or "  (no kernel offers this operation)"


@dataclass(frozen=True)
class _Registry:
    kernels: tuple[Kernel, ...]
    broken: tuple[tuple[str, Reason], ...]


_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _load() -> _Registry:
    kernels: list[Kernel] = []
    broken: list[tuple[str, Reason]] = []
    owners: dict[tuple[str, str], str] = {}
    sources: list[tuple[str, str, importlib.metadata.EntryPoint | None]] = [
        (name, module, None) for name, module in BUILTIN.items()
    ]
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        sources.append((entry.name, entry.value, entry))
    for name, where, entry_point in sources:
        try:
            module = entry_point.load() if entry_point else importlib.import_module(where)
            found = _offer_of(module)
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            broken.append((name, Reason("plugin.broken", f"backend {name} ({where}): {text}")))
            continue
        for kernel in found:
            key = (kernel.op, kernel.name)
            if key in owners:
                raise DuplicateBackendError(
                    f"kernel {kernel.name!r} for {kernel.op} is offered by both "
                    f"{owners[key]} and {where}"
                )
            owners[key] = where
            kernels.append(kernel)
    return _Registry(tuple(kernels), tuple(broken))


def _offer_of(module: Any) -> tuple[Kernel, ...]:
    """The kernels of a backend; raises where that is not what it offers."""
    ask = getattr(module, "kernels", None)
    found = tuple(ask() if callable(ask) else module.KERNELS)
    for kernel in found:
        if not isinstance(kernel, Kernel) or not isinstance(kernel.requires, Requires):
            raise TypeError(f"it offers {kernel!r}, which is not a Kernel with its Requires")
        if not isinstance(kernel.name, str) or kernel.name in ("", "auto"):
            raise ValueError(f"{kernel.name!r} cannot be the name of a kernel")
        if not callable(kernel.fn):
            raise TypeError(f"kernel {kernel.name!r} has the function {kernel.fn!r}")
    return found


def kernels(op: str | None = None) -> tuple[Kernel, ...]:
    """Every known kernel (of one operation), built-in ones first."""
    with _lock:
        found = _load().kernels
    return tuple(k for k in found if op is None or k.op == op)


def offered() -> tuple[tuple[str, ...], ...]:
    """Every kernel with its requirements and the hash of its source, for compile-cache keys."""
    return tuple(
        (
            k.op,
            k.name,
            k.backend,
            repr(k.requires),
            function_source(k.fn),
            function_source(k.lowering),
        )
        for k in kernels()
    )


def broken_backends() -> tuple[tuple[str, Reason], ...]:
    """Backends that could not be loaded, each with its reason."""
    with _lock:
        return _load().broken


def find(op: str, name: str) -> Kernel:
    """The kernel of that name. Raises :class:`NoKernelError` naming those that exist."""
    for kernel in kernels(op):
        if kernel.name == name:
            return kernel
    known = ", ".join(k.name for k in kernels(op)) or "none"
    raise NoKernelError(f"{op} has no kernel named {name!r}; known: {known}")


def preference(call: KernelCall) -> tuple[str, ...]:
    """The order in which kernels are asked: the user's, then what suits the target."""
    known = [k.name for k in kernels(call.op)]
    if call.config.kernels:
        return call.config.kernels
    third_party = [n for n in known if n not in BUILTIN]
    if call.target.vendor == "cpu":
        return ("reference", *third_party)
    return ("aiter", *third_party, "triton", "reference")


def select(call: KernelCall) -> Selection:
    """Choose the first accepted kernel in order of preference.

    A name in ``config.kernels`` that no backend offers for this operation is a candidate with the
    reason ``gate.operation``, or ``gate.backend-unavailable`` where none offers it for any; nothing
    raises here.
    """
    chosen: Kernel | None = None
    candidates: list[Candidate] = []
    by_name = {k.name: k for k in kernels(call.op)}
    lost = dict(broken_backends())
    for name in preference(call):
        kernel = by_name.get(name)
        if kernel is None:
            if name in lost:
                candidates.append(Candidate(name, False, (lost[name],)))
            elif name in call.config.kernels:
                candidates.append(Candidate(name, False, (_no_such(name, call.op, list(by_name)),)))
            continue
        reasons = tuple(kernel.requires.unmet(call))
        candidates.append(Candidate(name, not reasons, reasons))
        if not reasons and chosen is None:
            chosen = kernel
    return Selection(chosen, tuple(candidates))


def _no_such(name: str, op: str, known: list[str]) -> Reason:
    need = f"one of {', '.join(known)}" if known else None
    if any(k.name == name for k in kernels()):
        return Reason("gate.operation", f"{name} does not implement {op}", need=need)
    return Reason("gate.backend-unavailable", f"no backend offers a kernel {name}", need=need)
