"""Put a pipeline together for a configuration: options checked, passes built, kernels counted."""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Mapping
from typing import Any

from fusion import selection
from fusion.config import Config, ConfigError, unknown
from fusion.discovery import build_passes, pass_names
from fusion.dump import observer_from_environment
from fusion.graph import compat
from fusion.pipeline import Collector, FusionRequiredError, Observer, PassManager
from fusion.target import Target

_lock = threading.RLock()
_validations: dict[tuple[str, str], dict[Any, Any]] = {}


def make_config(options: Mapping[str, Any] | Config | None) -> Config:
    """Check options (:class:`~fusion.config.ConfigError` names the valid ones)."""
    if isinstance(options, Config):
        config = options
        config.check(pass_names())
    else:
        config = Config.from_options(options, pass_names())
    _check_kernels(config)
    _check_inductor(config)
    return config


def _check_kernels(config: Config) -> None:
    """A kernel that nobody offers is a typing error.

    Unless a backend could not be loaded, for then the name may be one of that backend's: sites
    report it as ``gate.backend-unavailable`` beside the backend's own reason.
    """
    if not config.kernels or selection.broken_backends():
        return
    known = sorted({k.name for k in selection.kernels()})
    for name in config.kernels:
        if name not in known:
            raise ConfigError(unknown("kernel", name, known))


def _check_inductor(config: Config) -> None:
    """Names and types of Inductor's own options, as ``torch.compile`` checks them."""
    if not config.inductor:
        return
    try:
        compat.inductor_patches(None, dict(config.inductor))
    except RuntimeError as error:
        known = compat.inductor_options()
        for name, _ in config.inductor:
            if name.replace("-", "_") not in known:
                near = difflib.get_close_matches(name, known, 5, 0.5)
                raise ConfigError(unknown("option of inductor", name, near or known)) from None
        raise ConfigError(f"options['inductor']: {error}") from error


def make_manager(
    config: Config,
    target: Target | None = None,
    *,
    phase: str = "post_grad",
    collector: Collector | None = None,
    observer: Observer | None = None,
) -> PassManager:
    """A pipeline for one configuration. Managers of equal configurations share validations.

    Raises :class:`FusionRequiredError` where a required pass could not be built,
    :class:`~fusion.config.ConfigError` for an environment switch that says neither yes nor no, and
    :class:`~fusion.selection.DuplicateBackendError` where two packages offer one kernel.
    """
    target = target or Target.current()
    config.check_switches()  # a misspelt switch is an error, now
    selection.kernels()  # ... and so are two owners of one kernel
    passes, not_built, origins = build_passes(config, target)
    lost = [s for s in not_built if config.mode(s.name) == "required"]
    if lost:
        lines = [f"{s.name} is required, but was not built:" for s in lost]
        lines += [f"  {r} ({r.remedy})" for s in lost for r in s.reasons]
        raise FusionRequiredError("\n".join(lines))
    manager = PassManager(
        passes,
        config,
        target,
        observer=observer or observer_from_environment(),
        collector=collector,
        not_built=not_built,
        origins=origins,
        fingerprint=functools.partial(kernel_fingerprint, target),
        phase=phase,
    )
    with _lock:
        # By text, because values of options (lists, mappings) need not be hashable.
        known = _validations.setdefault((repr(config), repr(target)), {})
        manager.share_validations(known, _lock)
    return manager


def kernel_fingerprint(target: Target) -> object:
    """Which kernels there are and which backends are broken, for the compile-cache key."""
    lost = [(name, reason.message) for name, reason in selection.broken_backends()]
    return (selection.offered(), lost, target.versions)


def versions() -> dict[str, str | None]:
    """The versions that a report carries (None: not installed)."""
    from fusion import __version__

    here = Target.current()
    found = {name: here.version_text(name) for name in ("torch", "triton", "aiter", "transformers")}
    return {"fusion": __version__, **found}


def describe_target(target: Target) -> dict[str, Any]:
    """The target as a report carries it."""
    return {
        "vendor": target.vendor,
        "arch": target.arch,
        "origin": target.origin,
        "versions": dict(target.versions),
    }


def describe_config(config: Config) -> dict[str, Any]:
    """The configuration as a report carries it."""
    return {
        "passes": dict(config.passes),
        "kernels": list(config.kernels),
        "inner": config.inner,
        "validate": config.validate,
        "numerics": config.numerics,
    }
