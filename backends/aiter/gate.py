"""Conditions that every AITER kernel shares: switch, chip, version, callable, layout, strides.

The same gate stands before both passes and both attention paths. Conditions are looked at in
order of cost; :class:`CallableFits`, which imports AITER, looks only where everything that is
known without an import says yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from packaging.version import Version

from fusion.backends.aiter import contract, probe
from fusion.backends.aiter.contract import Function
from fusion.config import ConfigError
from fusion.kernel import Dim, KernelCall, TensorSpec
from fusion.reason import Reason
from fusion.requires import Arch, Check, Condition, Outcome, outcome

ARCHS = ("gfx942", "gfx950")
"""MI300 and MI350. gfx1250 takes AITER's Gluon paths, which nobody has compared with anything."""

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class Enabled:
    """AITER is not switched off (option, then ``FUSION_AITER``; default: on where found)."""

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        try:
            switch = call.config.aiter_switch()
        except ConfigError as error:
            return outcome(
                "AITER enabled", False, "unreadable", "on", "FUSION_AITER", "gate.aiter-disabled",
                str(error),
            )  # fmt: skip
        ok = switch.value is not False
        have = {True: "on", False: "off", None: "on by default"}[switch.value]
        return outcome(
            "AITER enabled", ok, have, "on", switch.origin, "gate.aiter-disabled",
            f"AITER is switched off ({switch.origin})",
        )  # fmt: skip


@dataclass(frozen=True)
class DenseLayout:
    """The cache is a strided view, and nobody declared the shuffled layout."""

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        declared, origin = call.config.kv_layout_switch()
        if declared not in (None, "dense"):
            have = str(declared).upper()
        elif call.kv_layout != "NHD":
            have, origin = call.kv_layout, "call"
        else:
            wrong = [
                f"{name} of {s.ndim} dimensions"
                for name in ("key_cache", "value_cache")
                if (s := call.tensor(name)) is not None and s.ndim != 4
            ]
            if wrong:
                have, origin = ", ".join(wrong), "shapes"
            else:
                have = "NHD"
        return outcome(
            "kv layout", have == "NHD", have, "NHD (a strided view)", origin, "gate.kv-layout",
            f"AITER is used with strided caches only; the layout is {have} ({origin})",
        )  # fmt: skip


@dataclass(frozen=True)
class Release:
    """The installed AITER is at least ``minimum`` (for ``what``) and not beyond what is known."""

    minimum: Version
    what: str

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        return release(call, self.minimum, self.what)


def release(call: KernelCall, minimum: Version, what: str) -> Outcome:
    """Compare the target's AITER with the release that a feature needs."""
    text = call.target.version_text("aiter")
    version = call.target.version("aiter")
    name, origin = f"AITER version for {what}", f"target {call.target.origin}"
    need = f">={minimum},<{contract.LIMIT}"
    if text is None:
        reason = probe.locate() if _probed(call) else None
        message = reason.message if reason else "AITER is not installed on this target"
        code = reason.code if reason else "gate.backend-unavailable"
        return outcome(name, False, "not installed", f"amd-aiter {need}", origin, code, message)
    if version is None:
        return outcome(
            name, False, text, need, origin, "gate.aiter-version",
            f"{text!r} is not a version, so nothing is known of this AITER",
        )  # fmt: skip
    sure = contract.proven(version)
    ok = minimum <= sure and version < contract.LIMIT
    have = text if sure == version else f"{text} (surely contains {sure})"
    if version >= contract.LIMIT:
        message = f"nothing is known of AITER {text}"
    else:
        message = f"AITER {text} is too old for {what}"
    return outcome(name, ok, have, need, origin, "gate.aiter-version", message)


def _probed(call: KernelCall) -> bool:
    return call.target.origin == "probed" and call.target.vendor == "amd"


@dataclass(frozen=True)
class CallableFits:
    """The function can be imported and has the known signature.

    Asked of the present machine only, and only where chip, switch and version say yes: a target
    given in words is answered from the table of releases.
    """

    function: Function

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        name, need = f"callable {self.function.name}", "the known signature"
        first = (Arch(ARCHS), Enabled(), Release(self.function.first, self.function.name))
        if not all(c.look(call).ok for c in first):
            return Outcome(name, True, "not looked at", need, "conditions above")
        if not _probed(call):
            version = call.target.version("aiter")
            have = f"as released in {version}"
            return Outcome(name, True, have, need, "table of releases")
        found = probe.function(self.function)
        if isinstance(found, Reason):
            return Outcome(name, False, found.have or found.message, need, "probe", found)
        return Outcome(name, True, self.function.module, need, "probe")


@dataclass(frozen=True)
class When:
    """A condition that counts only for calls of one kind (``causal`` or not)."""

    kind: str
    applies: Callable[[KernelCall], bool] = field(compare=False)
    condition: Condition

    def look(self, call: KernelCall) -> Outcome:
        """See :class:`fusion.requires.Condition`."""
        if self.applies(call):
            return self.condition.look(call)
        return Outcome(f"({self.kind})", True, "not looked at", self.kind, "arguments")


def guarded(ranks: Mapping[str, int], conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """``conditions``, looked at only where the tensors have the dimensions that they index.

    Caches of another rank than four are reported by :class:`DenseLayout`.
    """

    def wrong(call: KernelCall) -> list[str]:
        have = {n: s for n in ranks if (s := call.tensor(n)) is not None}
        return [f"{n} {s}" for n, s in have.items() if s.ndim != ranks[n]]

    last: tuple[KernelCall | None, bool] = (None, False)

    def fits(call: KernelCall) -> bool:
        nonlocal last  # asked once for each condition of the same call
        seen, answer = last
        if seen is not call:
            halves = (call.tensor("key_cache"), call.tensor("value_cache"))
            answer = not wrong(call) and all(s.ndim == 4 for s in halves if s is not None)
            last = (call, answer)
        return answer

    def look(call: KernelCall) -> tuple[bool, object]:
        return not wrong(call), ", ".join(wrong(call)) or "as declared"

    text = ", ".join(f"{n} {rank}-D" for n, rank in ranks.items())
    first = Check("ranks", text, "gate.argument", look)
    return (first, *(When("shapes fit", fits, c) for c in conditions))


def base(function: Function) -> tuple[Condition, ...]:
    """The conditions of every AITER kernel, for one of its functions."""
    return (
        Enabled(),
        Arch(ARCHS),
        DenseLayout(),
        Release(function.first, function.name),
        CallableFits(function),
    )


def caches(call: KernelCall) -> Iterator[tuple[str, TensorSpec]]:
    """The four-dimensional caches of a call, by name."""
    for name in ("key_cache", "value_cache"):
        spec = call.tensor(name)
        if spec is not None and spec.ndim == 4:
            yield name, spec


def is_fp8(call: KernelCall) -> bool:
    """Whether the cache is an 8-bit float."""
    return any(s.dtype in FP8 for _, s in caches(call))


def dense_page(spec: TensorSpec, *, strict: bool) -> bool:
    """Whether a page ``[block, Hk, D]`` lies dense, as far as sizes and strides are known.

    ``strict``: also the stride of a dimension of size one must be the dense one, as a checker that
    does not know better would ask.
    """
    expected: Dim = 1
    for size, stride in list(zip(spec.shape, spec.stride, strict=True))[:0:-1]:
        if stride != expected and (strict or size != 1):
            return False
        expected = None if size is None or expected is None else expected * size
    return True


def fp8_of_chip() -> Check:
    """An 8-bit cache has the chip's own format: fnuz on gfx942, fn on gfx950."""

    def look(call: KernelCall) -> tuple[bool, object, str]:
        have = {n: s.dtype for n, s in caches(call)}
        own = call.target.fp8_dtype
        bad = [n for n, d in have.items() if d in FP8 and d != own]
        text = ", ".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in have.items())
        name = str(own).removeprefix("torch.")
        return not bad, text, f"{call.target.arch} computes with {name}"

    return Check("fp8 format", "the chip's own", "gate.cache-dtype", look)


def power_of_two_page() -> Check:
    """The page size is a known power of two."""

    def look(call: KernelCall) -> tuple[bool, object]:
        sizes = {s.shape[1] for _, s in caches(call)}
        ok = all(n is not None and n > 0 and n & (n - 1) == 0 for n in sizes) and len(sizes) == 1
        return ok, " and ".join("symbolic" if n is None else str(n) for n in sizes) or "no page"

    return Check("block size", "one power of two", "gate.block-size", look)


def heads_divide() -> Check:
    """Query heads are a multiple of KV heads."""

    def look(call: KernelCall) -> tuple[bool, object]:
        q, k = call.need("query").shape[1], call.need("key_cache").shape[2]
        return bool(q) and bool(k) and q % k == 0, f"{q} over {k}"  # type: ignore[operator]

    return Check("query heads per KV head", "a whole number", "gate.argument", look)


def one_head_dim(first: str) -> Check:
    """Q, K and V have one head size."""

    def look(call: KernelCall) -> tuple[bool, object]:
        names = (first, "key", "value", "key_cache", "value_cache")
        have = {n: s.shape[-1] for n in names if (s := call.tensor(n)) is not None}
        text = ", ".join(f"{n} {size}" for n, size in have.items())
        return len(set(have.values())) == 1 and None not in have.values(), text

    return Check("one head size for Q, K and V", "Dv == D", "gate.head-dim", look)


def scale_shapes() -> Check:
    """A given scale holds one element."""

    def look(call: KernelCall) -> tuple[bool, object]:
        have = {n: s for n in ("k_scale", "v_scale") if (s := call.tensor(n)) is not None}
        ok = all(size == 1 for s in have.values() for size in s.shape)
        return ok, ", ".join(f"{n} {s}" for n, s in have.items()) or "absent"

    return Check("scales", "one element each", "gate.argument", look)
