"""What a kernel requires, declared as data and evaluated without calling the kernel.

A condition compares one thing of a :class:`~fusion.kernel.KernelCall` with what is needed. It
yields an :class:`Outcome` with both sides and where the value came from, whether it holds or
not, so that ``fusion kernels`` can print the whole table; unmet ones carry a
:class:`~fusion.reason.Reason`. Nothing returns a bare ``False``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from packaging.specifiers import SpecifierSet

from fusion.kernel import KernelCall
from fusion.reason import Reason


@dataclass(frozen=True)
class Outcome:
    """One condition, looked at: ``ok``, what it has and needs, and where ``have`` came from.

    ``applies`` is False where there is nothing to look at, which is ok: a condition on AMD chips
    and an NVIDIA chip, the dtype of an argument that is not given.
    """

    name: str
    ok: bool
    have: str
    need: str
    origin: str
    reason: Reason | None = None
    applies: bool = field(default=True, compare=False)


class Condition(Protocol):
    """Anything that can look at a call. Must not raise for any call, and must not run code."""

    def look(self, call: KernelCall) -> Outcome:
        """Compare the call with what is needed."""
        ...


def outcome(
    name: str,
    ok: bool,
    have: object,
    need: object,
    origin: str,
    code: str,
    message: str,
    applies: bool = True,
) -> Outcome:
    """Build an outcome, with a reason where it is not ok."""
    have_text, need_text = str(have), str(need)
    reason = None if ok else Reason(code, message, have=have_text, need=need_text)
    return Outcome(name, ok, have_text, need_text, origin, reason, applies)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Vendor:
    """The chip's maker is one of ``names`` (``cpu``, ``nvidia``, ``amd``)."""

    names: tuple[str, ...]

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        target = call.target
        return outcome(
            "vendor",
            target.vendor in self.names,
            f"{target.vendor} ({target.arch})",
            " or ".join(self.names),
            f"target {target.origin}",
            "gate.arch",
            f"runs on {' and '.join(self.names)} only",
        )


@dataclass(frozen=True)
class Arch:
    """The chip is one of ``names`` exactly (``gfx942``, ``sm_90``).

    With a ``vendor``, only chips of that maker are looked at; the others pass.
    """

    names: tuple[str, ...]
    vendor: str | None = None

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        target = call.target
        return outcome(
            "arch" if self.vendor is None else f"arch ({self.vendor})",
            self.vendor not in (None, target.vendor) or target.arch in self.names,
            target.arch,
            " or ".join(self.names),
            f"target {target.origin}",
            "gate.arch",
            f"is not built for {target.arch}",
            self.vendor in (None, target.vendor),
        )


@dataclass(frozen=True)
class MinCapability:
    """NVIDIA compute capability at least ``minimum`` (80 for sm_80); other vendors pass."""

    minimum: int

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        target = call.target
        capability = target.capability
        ok = target.vendor != "nvidia" or (capability is not None and capability >= self.minimum)
        return outcome(
            "compute capability",
            ok,
            target.arch,
            f"sm_{self.minimum} or newer",
            f"target {target.origin}",
            "gate.arch",
            f"needs sm_{self.minimum} or newer",
            target.vendor == "nvidia",
        )


@dataclass(frozen=True)
class PackageVersion:
    """An installed package satisfies a version specifier such as ``>=3.6,<3.10``.

    ``code`` is the reason code for a version outside it; an absent package is
    ``gate.backend-unavailable``.
    """

    package: str
    specifier: str
    code: str = "gate.backend-unavailable"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        text = call.target.version_text(self.package)
        version = call.target.version(self.package)
        ok = version is not None and SpecifierSet(self.specifier, prereleases=True).contains(
            version
        )
        return outcome(
            f"{self.package} version",
            ok,
            text or "not installed",
            self.specifier or "any",
            f"target {call.target.origin}",
            self.code if text else "gate.backend-unavailable",
            f"{self.package} {text or 'is not installed'}",
        )


@dataclass(frozen=True)
class DtypeIn:
    """The dtypes of the named tensor arguments are among ``dtypes`` (absent ones pass)."""

    tensors: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    code: str = "gate.dtype"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        have = {n: s.dtype for n in self.tensors if (s := call.tensor(n)) is not None}
        bad = {n: d for n, d in have.items() if d not in self.dtypes}
        return outcome(
            f"dtype of {', '.join(self.tensors)}",
            not bad,
            ", ".join(f"{n} {_dtype_name(d)}" for n, d in (bad or have).items()) or "absent",
            " or ".join(_dtype_name(d) for d in self.dtypes),
            "arguments",
            self.code,
            f"{', '.join(bad)} has a dtype that the kernel does not take",
            bool(have),
        )


@dataclass(frozen=True)
class SameDtype:
    """The named tensor arguments that are there share one dtype."""

    tensors: tuple[str, ...]
    code: str = "gate.dtype"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        have = {n: s.dtype for n in self.tensors if (s := call.tensor(n)) is not None}
        return outcome(
            f"one dtype for {', '.join(self.tensors)}",
            len(set(have.values())) <= 1,
            ", ".join(f"{n} {_dtype_name(d)}" for n, d in have.items()),
            "one dtype",
            "arguments",
            self.code,
            "the kernel wants one dtype for " + ", ".join(have),
            len(have) > 1,
        )


@dataclass(frozen=True)
class SizeIn:
    """A dimension of a tensor argument is static and among ``allowed`` (a set or a range)."""

    tensor: str
    dim: int
    allowed: Iterable[int]
    what: str
    code: str
    need: str = ""

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        spec = call.tensor(self.tensor)
        size = spec.shape[self.dim] if spec is not None else None
        ok = spec is None or (size is not None and size in self.allowed)
        need = self.need or " or ".join(str(a) for a in self.allowed)
        have = "absent" if spec is None else "symbolic" if size is None else str(size)
        return outcome(
            self.what,
            ok,
            have,
            need,
            f"shape of {self.tensor}",
            self.code,
            f"{self.what} is {have}",
            spec is not None,
        )


@dataclass(frozen=True)
class UnitLastStride:
    """The named tensor arguments are contiguous along their last dimension."""

    tensors: tuple[str, ...]
    code: str = "gate.cache-stride"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        have = {n: s for n in self.tensors if (s := call.tensor(n)) is not None and s.ndim}
        bad = [n for n, s in have.items() if s.shape[-1] != 1 and s.stride[-1] != 1]
        steps = {n: "unknown" if s.stride[-1] is None else s.stride[-1] for n, s in have.items()}
        return outcome(
            f"unit last stride of {', '.join(self.tensors)}",
            not bad,
            ", ".join(f"{n} {steps[n]}" for n in (bad or have)),
            "1",
            "strides",
            self.code,
            f"{', '.join(bad)} is not contiguous along its last dimension",
            bool(have),
        )


@dataclass(frozen=True)
class OnDevice:
    """The named tensor arguments live on a device type (absent ones pass)."""

    tensors: tuple[str, ...]
    device: str
    code: str = "gate.device"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        have = {n: s.device for n in self.tensors if (s := call.tensor(n)) is not None}
        bad = {n: d for n, d in have.items() if d != self.device}
        return outcome(
            f"device of {', '.join(self.tensors)}",
            not bad,
            ", ".join(f"{n} on {d}" for n, d in (bad or have).items()) or "absent",
            self.device,
            "arguments",
            self.code,
            f"{', '.join(bad)} must be on {self.device}",
            bool(have),
        )


@dataclass(frozen=True)
class AttributeIn:
    """An attribute of the call (a number, string or dtype) is among ``allowed``."""

    name: str
    allowed: tuple[Any, ...]
    code: str = "gate.argument"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        value = call.attributes.get(self.name)
        return outcome(
            self.name,
            value in self.allowed,
            _dtype_name(value),
            " or ".join(_dtype_name(a) for a in self.allowed),
            "arguments",
            self.code,
            f"{self.name}={_dtype_name(value)} has no home in the kernel",
        )


@dataclass(frozen=True)
class Absent:
    """An optional tensor argument is not given, since the kernel has no home for it."""

    tensor: str
    code: str = "gate.argument"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        spec = call.tensor(self.tensor)
        return outcome(
            self.tensor,
            spec is None,
            "absent" if spec is None else str(spec),
            "absent",
            "arguments",
            self.code,
            f"{self.tensor} has no home in the kernel",
        )


@dataclass(frozen=True)
class KVLayout:
    """The cache layout of the call is among ``names`` (``NHD``, ``SHUFFLE``)."""

    names: tuple[str, ...]

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        return outcome(
            "kv layout",
            call.kv_layout in self.names,
            call.kv_layout,
            " or ".join(self.names),
            "call",
            "gate.kv-layout",
            f"does not address the {call.kv_layout} layout",
        )


@dataclass(frozen=True)
class Check:
    """A condition in code, for rules that no class above states.

    ``look_at`` returns ``(ok, have)`` or ``(ok, have, message)``; it must not raise.
    """

    name: str
    need: str
    code: str
    look_at: Callable[[KernelCall], tuple[bool, object] | tuple[bool, object, str]] = field(
        compare=False
    )
    origin: str = "arguments"

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`Condition`."""
        ok, have, *rest = self.look_at(call)
        message = rest[0] if rest else f"{self.name} is {have}"
        return outcome(self.name, ok, have, self.need, self.origin, self.code, str(message))


@dataclass(frozen=True)
class Requires:
    """All conditions of a kernel, in the order in which a reader wants to see them."""

    conditions: tuple[Condition, ...] = ()

    def evaluate(self, call: KernelCall) -> list[Outcome]:
        """Look at every condition; a condition that raises becomes ``internal.error``."""
        outcomes: list[Outcome] = []
        for condition in self.conditions:
            try:
                outcomes.append(condition.look(call))
            except Exception as error:  # a plug-in's condition must not break a compile
                text = f"{type(error).__name__}: {error}"
                reason = Reason("internal.error", f"condition {condition!r} raised {text}")
                outcomes.append(Outcome(repr(condition), False, text, "", "condition", reason))
        return outcomes

    def unmet(self, call: KernelCall) -> list[Reason]:
        """The reasons of all unmet conditions."""
        return [o.reason for o in self.evaluate(call) if o.reason is not None]

    def __add__(self, other: Sequence[Condition] | Requires) -> Requires:
        more = other.conditions if isinstance(other, Requires) else tuple(other)
        return Requires(self.conditions + tuple(more))
