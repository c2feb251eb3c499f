"""The one place that imports AITER, lazily, and turns whatever happens into a reason.

Importing AITER runs a build system, asks the driver, and on some machines ends with SystemExit;
each of these is a :class:`~fusion.reason.Reason`. The package called ``aiter`` on PyPI is an
unrelated library of async iterators: it is recognised without being imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from fusion.backends.aiter.contract import Function
from fusion.reason import Reason


def locate() -> Reason | None:
    """Whether a package called ``aiter`` that looks like AMD's is there; imports nothing."""
    loaded = sys.modules.get("aiter")
    if loaded is not None:
        paths = list(getattr(loaded, "__path__", []))
        known = hasattr(loaded, "ops")
    else:
        known = False
        try:
            spec = importlib.util.find_spec("aiter")
        except (Exception, SystemExit) as error:
            text = f"looking for aiter raised {type(error).__name__}: {error}"
            return Reason("gate.aiter-probe", text)
        if spec is None:
            return Reason(
                "gate.backend-unavailable", "aiter is not installed", "nothing", "amd-aiter"
            )
        paths = list(spec.submodule_search_locations or [])
    if not known and not any(os.path.isdir(os.path.join(p, "ops")) for p in paths):
        return Reason(
            "gate.aiter-probe",
            "the package called aiter here is not AMD's (it has no aiter.ops; PyPI has an "
            "unrelated async library of that name)",
            have=", ".join(paths) or "a module",
            need="amd-aiter",
        )
    return None


@functools.lru_cache(maxsize=64)
def function(spec: Function) -> Callable[..., Any] | Reason:
    """The callable of a function of AITER, imported and its signature checked, or a reason.

    The result, good or bad, is kept: a failed import is not tried again at every compile.
    """
    if (reason := locate()) is not None:
        return reason
    try:
        module = importlib.import_module(spec.module)
    except (Exception, SystemExit) as error:
        return Reason(
            "gate.aiter-probe",
            f"importing {spec.module} raised {type(error).__name__}: {error}".rstrip(": "),
            have=type(error).__name__,
            need="an import without errors",
        )
    found = getattr(module, spec.name, None)
    if not callable(found):
        return Reason(
            "gate.aiter-callable",
            f"{spec.module} has no function {spec.name}",
            have="absent",
            need=spec.name,
        )
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return Reason(
            "gate.aiter-callable", f"the signature of {spec.name} cannot be read: {error}"
        )
    return spec.check(signature) or found


def reset() -> None:
    """Forget what was found (for tests, and after installing AITER in a running process)."""
    function.cache_clear()
