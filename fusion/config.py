"""Options of ``torch.compile(backend="fusion", options=...)``, checked in one place."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

MODES = ("off", "auto", "required")
NUMERICS = ("tolerant", "exact")
INNER = ("inductor", "aot_eager", "aot_eager_decomp")
KV_LAYOUTS = (None, "shuffle", "dense")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class ConfigError(ValueError):
    """An option has an unknown name or value; the message names the valid ones."""


@dataclass(frozen=True)
class Switch:
    """A three-state switch with the place its value came from."""

    value: bool | None
    origin: str


def env_switch(name: str) -> Switch:
    """Read an environment switch: 1/true/yes/on, 0/false/no/off, unset or empty = None.

    Any other text raises :class:`ConfigError`, since a misspelt switch must not be silent.
    """
    text = os.environ.get(name)
    if text is None or not text.strip():
        return Switch(None, f"{name} unset")
    word = text.strip().lower()
    if word in _TRUE:
        return Switch(True, f"{name}={text}")
    if word in _FALSE:
        return Switch(False, f"{name}={text}")
    raise ConfigError(f"{name}={text!r} is neither of {'/'.join(_TRUE)} nor {'/'.join(_FALSE)}")


@dataclass(frozen=True)
class Config:
    """Everything that a compile with fusion can be told.

    ``passes`` maps pass names to ``off``, ``auto`` or ``required``; ``pass_options`` maps
    ``pass name -> {field: value}``; ``kernels`` is an order of preference (empty: automatic);
    ``inner`` is the compiler behind fusion (``aot_eager_decomp``: ``aot_eager`` with Inductor's
    decompositions); ``numerics`` says whether a kernel may round once
    where the graph rounds twice; ``aiter`` switches AITER (None: by ``FUSION_AITER``, then
    on where found and supported); ``kv_layout`` names the cache layout when the graph cannot
    show it (``"shuffle"`` closes AITER's gate; None: by ``FUSION_KV_LAYOUT``);
    ``inductor`` is handed to Inductor as config patches.
    """

    passes: tuple[tuple[str, str], ...] = ()
    pass_options: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    kernels: tuple[str, ...] = ()
    inner: str = "inductor"
    validate: bool = True
    validation_seconds: float = 0.5
    validation_mb: float = 64.0
    numerics: str = "tolerant"
    aiter: bool | None = None
    kv_layout: str | None = None
    inductor: tuple[tuple[str, Any], ...] = field(default=())

    def mode(self, pass_name: str) -> str:
        """``off``, ``auto`` or ``required`` for a pass (``auto`` where nothing was said)."""
        return dict(self.passes).get(pass_name, "auto")

    def aiter_switch(self) -> Switch:
        """Whether AITER is wanted, and who said so (option before environment)."""
        if self.aiter is not None:
            return Switch(self.aiter, f"option aiter={self.aiter}")
        return env_switch("FUSION_AITER")

    def check_switches(self) -> None:
        """Raise :class:`ConfigError` for an environment switch that nobody can read."""
        self.aiter_switch()
        declared, origin = self.kv_layout_switch()
        if declared not in KV_LAYOUTS:
            raise ConfigError(f"{origin} is neither shuffle nor dense")

    def kv_layout_switch(self) -> tuple[str | None, str]:
        """The declared cache layout and who declared it (option before environment)."""
        if self.kv_layout is not None:
            return self.kv_layout.lower(), f"option kv_layout={self.kv_layout}"
        text = os.environ.get("FUSION_KV_LAYOUT", "").strip().lower()
        return (text or None), f"FUSION_KV_LAYOUT={text}" if text else "FUSION_KV_LAYOUT unset"

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | None, pass_names: Mapping[str, tuple[str, ...] | None]
    ) -> Config:
        """Check an ``options`` mapping.

        ``pass_names`` maps the names of the known passes to their option fields, ``None`` where
        nobody knows them (a broken plug-in: any option will do). A pass may be given a mode
        (``"required"``) or a mapping ``{"mode": ..., field: value}``. Raises
        :class:`ConfigError` for an unknown key or value, naming the valid ones.
        """
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"options is a mapping, not {options!r}")
        options = {str(key): value for key, value in (options or {}).items()}
        plain = {f.name for f in fields(cls)} - {"passes", "pass_options"}
        modes: list[tuple[str, str]] = []
        extra: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
        given: dict[str, Any] = {}
        for key, value in options.items():
            if key in pass_names:
                mode, rest = _pass_option(key, value, pass_names[key])
                modes.append((key, mode))
                if rest:
                    extra.append((key, tuple(sorted(rest.items()))))
            elif key in plain:
                given[key] = value
            else:
                raise ConfigError(unknown("option", key, sorted({*plain, *pass_names})))
        config = cls(
            passes=tuple(sorted(modes)),
            pass_options=tuple(sorted(extra, key=lambda item: item[0])),
            **_norm(given),
        )
        config.check(pass_names)
        return config

    def check(self, pass_names: Mapping[str, tuple[str, ...] | None]) -> None:
        """Raise :class:`ConfigError` for a value that is not valid, naming those that are.

        ``pass_names`` as for :meth:`from_options`. Kernel names and Inductor's options are not
        known on this floor: :func:`fusion.build.make_config` checks them.
        """
        for name, mode in self.passes:
            if name not in pass_names:
                raise ConfigError(unknown("pass", name, sorted(pass_names)))
            _mode(name, mode)
        for name, given in self.pass_options:
            options = pass_names.get(name, ())
            for option, _ in given:
                if options is not None and option not in options:
                    raise ConfigError(unknown(f"option of {name}", option, [*options]))
        for name in ("validation_seconds", "validation_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigError(f"{name} is a number of at least 0, not {value!r}")
        if self.kv_layout is not None and not isinstance(self.kv_layout, str):
            raise ConfigError(f"kv_layout is 'shuffle', 'dense' or None, not {self.kv_layout!r}")
        for name, value, valid in (
            ("inner", self.inner, INNER),
            ("numerics", self.numerics, NUMERICS),
            ("kv_layout", self.kv_layout, KV_LAYOUTS),
        ):
            if (value.lower() if name == "kv_layout" and value else value) not in valid:
                raise ConfigError(unknown(name, str(value), [str(v) for v in valid if v]))
        if not isinstance(self.validate, bool):
            raise ConfigError(f"validate is True or False, not {self.validate!r}")
        if not isinstance(self.aiter, (bool, type(None))):
            raise ConfigError(f"aiter is True, False or None, not {self.aiter!r}")


def _norm(given: dict[str, Any]) -> dict[str, Any]:
    if "kernels" in given:
        kernels = given["kernels"]
        kernels = [kernels] if isinstance(kernels, str) else kernels
        if not isinstance(kernels, (list, tuple)) or not all(isinstance(k, str) for k in kernels):
            raise ConfigError(f"kernels is a kernel's name or a list of names, not {kernels!r}")
        given["kernels"] = tuple(dict.fromkeys(kernels))  # a name said twice is asked once
    if "inductor" in given:
        if not isinstance(given["inductor"], Mapping):
            raise ConfigError(f"inductor is a mapping of options, not {given['inductor']!r}")
        for name in given["inductor"]:
            if not isinstance(name, str):
                raise ConfigError(f"inductor maps names of options to values, not {name!r}")
        given["inductor"] = tuple(sorted(dict(given["inductor"]).items()))
    return given


def _pass_option(
    name: str, value: Any, option_fields: tuple[str, ...] | None
) -> tuple[str, dict[str, Any]]:
    if isinstance(value, Mapping):
        rest = dict(value)
        mode = rest.pop("mode", "auto")
        for key in rest:
            if option_fields is not None and key not in option_fields:
                raise ConfigError(unknown(f"option of {name}", str(key), ["mode", *option_fields]))
    else:
        mode, rest = value, {}
    return _mode(name, mode), rest


def _mode(name: str, mode: object) -> str:
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigError(unknown(f"mode of {name}", str(mode), list(MODES)))
    return mode


def unknown(what: str, name: str, valid: list[str]) -> str:
    """The message of an error about a name that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, valid, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Valid: {', '.join(valid)}"
