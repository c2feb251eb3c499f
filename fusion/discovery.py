"""Which passes there are: the built-in ones, and plug-ins of the entry-point group.

A module of ``fusion.passes`` that defines ``PASS`` (a frozen dataclass, see
:class:`fusion.pipeline.Pass`) brings a built-in pass; an entry point of the group
``fusion.passes`` names such a class. A plug-in that cannot be loaded is a reason in the report;
two owners of one name are an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.config import Config, ConfigError
from fusion.pipeline import Pass
from fusion.reason import Reason
from fusion.report import PassStatus
from fusion.target import Target

ENTRY_POINT_GROUP = "fusion.passes"
_BUILTIN_PACKAGE = "fusion.passes"
RESERVED = frozenset(f.name for f in dataclasses.fields(Config))
"""Names that mean something else among the options of a compile."""


class DuplicatePassError(RuntimeError):
    """Two packages offer a pass of the same name; the message names both."""


@dataclass(frozen=True)
class PassInfo:
    """A known pass: its class, where it came from, and the names of its options."""

    name: str
    cls: type[Any]
    origin: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the dataclass fields."""
        if not dataclasses.is_dataclass(self.cls):
            return ()
        return tuple(f.name for f in dataclasses.fields(self.cls))


@dataclass(frozen=True)
class Discovered:
    """Passes in pipeline order, and those that could not be loaded."""

    passes: tuple[PassInfo, ...]
    broken: tuple[PassStatus, ...]


@functools.lru_cache(maxsize=1)
def discover() -> Discovered:
    """Find every pass, once a process. Raises :class:`DuplicatePassError`."""
    found: dict[str, PassInfo] = {}
    broken: list[PassStatus] = []
    for label, origin, load in (*_builtin(), *_plugins()):
        try:
            cls = load()
            if cls is None:
                continue
            info = PassInfo(_name_of(cls), cls, origin)
            _check_class(cls)
        except (Exception, SystemExit) as error:
            text = f"{origin}: {type(error).__name__}: {error}"
            reason = Reason("plugin.broken", f"pass {label} could not be loaded from {text}")
            broken.append(PassStatus(label, "not-built", (reason,), origin=origin))
            continue
        other = found.setdefault(info.name, info)
        if other.cls is not info.cls:
            raise DuplicatePassError(
                f"a pass named {info.name!r} is offered by both {other.origin} and {origin}"
            )
    ordered = sorted(found.values(), key=lambda i: (getattr(i.cls, "order", 100), i.name))
    return Discovered(tuple(ordered), tuple(broken))


def _builtin() -> Iterator[tuple[str, str, Any]]:
    package = importlib.import_module(_BUILTIN_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{_BUILTIN_PACKAGE}.{module.name}"

        def load(name: str = name) -> Any:
            return getattr(importlib.import_module(name), "PASS", None)

        yield module.name, f"fusion ({name})", load


def _plugins() -> Iterator[tuple[str, str, Any]]:
    entries: Iterable[importlib.metadata.EntryPoint] = importlib.metadata.entry_points(
        group=ENTRY_POINT_GROUP
    )
    for entry in entries:
        owner = entry.dist.name if entry.dist is not None else "an unknown package"
        yield entry.name, f"{owner} ({entry.value})", entry.load


def _name_of(cls: Any) -> str:
    name = getattr(cls, "name", None)
    if not isinstance(cls, type) or not isinstance(name, str) or not hasattr(cls, "run"):
        raise TypeError(f"{cls!r} is not a pass class: it needs a `name` and a `run` method")
    return name


def _check_class(cls: Any) -> None:
    if cls.name in RESERVED:
        raise ValueError(f"{cls.name!r} is the name of an option; a pass cannot have it")
    order = getattr(cls, "order", 100)
    if isinstance(order, bool) or not isinstance(order, (int, float)) or order != order:
        raise TypeError(f"the order of {cls.__name__} is {order!r}, not a number")


def pass_names() -> dict[str, tuple[str, ...] | None]:
    """Known pass names with their option fields, as :meth:`Config.from_options` wants them.

    Passes that are known but broken count as known, with ``None``: any option is taken, since
    options that were right must not become an error because the plug-in does not load.
    """
    found = discover()
    names: dict[str, tuple[str, ...] | None] = {s.name: None for s in found.broken}
    names.update({p.name: p.options for p in found.passes})
    return names


def build_passes(
    config: Config, target: Target
) -> tuple[tuple[Pass, ...], tuple[PassStatus, ...], dict[str, str]]:
    """Instances with the configured options, those not built, and where each came from.

    Raises :class:`ConfigError` where a pass does not take an option's value. A plug-in that
    cannot be built although nothing was asked of it is a reason.
    """
    found = discover()
    built: list[Pass] = []
    not_built = list(found.broken)
    origins: dict[str, str] = {}
    for info in found.passes:
        options = dict(dict(config.pass_options).get(info.name, ()))
        _check_options(info, options)
        mode = config.mode(info.name)
        instance: Any = None
        try:
            instance = info.cls(**options)
        except (Exception, SystemExit) as error:
            if options and isinstance(error, (TypeError, ValueError)):
                raise ConfigError(f"options of pass {info.name}: {error}") from error
            text = f"{info.origin}: {type(error).__name__}: {error}"
            reasons = [Reason("plugin.broken", f"{info.name} could not be built: {text}")]
        else:
            reasons = list(_unavailable(instance, config, target))
        if reasons:
            status = PassStatus(info.name, "not-built", tuple(reasons), mode, info.origin, options)
            not_built.append(status)
            continue
        origins[info.name] = info.origin
        built.append(instance)
    return tuple(built), tuple(not_built), origins


def _unavailable(instance: Any, config: Config, target: Target) -> tuple[Reason, ...]:
    ask = getattr(instance, "unavailable", None)
    if ask is None:
        return ()
    try:
        reasons = tuple(ask(config, target))
        for reason in reasons:
            if not isinstance(reason, Reason):
                raise TypeError(f"`unavailable` gave {reason!r}, not a Reason")
        return reasons
    except (Exception, SystemExit) as error:
        return (Reason("internal.error", f"{type(error).__name__}: {error}"),)


def _check_options(info: PassInfo, options: Mapping[str, Any]) -> None:
    """Values against the types of the fields; a type that cannot be told is not checked."""
    try:
        hints = typing.get_type_hints(info.cls)
    except Exception:  # a plug-in's annotations may name what is not imported
        return
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            hint = hints[name]
            need = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ConfigError(f"options of pass {info.name}: {name} is {value!r}, not {need}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, (int, float))
    # Collections and classes of a plug-in are its own business: it may take a list for a tuple.
    return isinstance(value, hint) if hint in (bool, int, str) else True
