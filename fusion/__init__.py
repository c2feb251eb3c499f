"""fusion: fuse attention prologues and bind non-causal attention in ``torch.compile`` graphs.

Everything public is reached from here and loaded when it is first used: ``import fusion`` by
itself imports neither Triton nor AITER nor transformers, and not ``torch._inductor`` either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fusion import layout, ops
    from fusion.backend import inductor_passes
    from fusion.config import Config, ConfigError
    from fusion.expecting import expect
    from fusion.explaining import capture, explain
    from fusion.layout import KVCacheLayout, split_kv_cache
    from fusion.pipeline import Context, FusionRequiredError, Pass, PassManager
    from fusion.reason import Reason
    from fusion.registry import reports
    from fusion.report import Report, Site
    from fusion.target import Target
    from fusion.verifying import verify

_HOME = {
    "Config": "config",
    "ConfigError": "config",
    "Context": "pipeline",
    "FusionRequiredError": "pipeline",
    "KVCacheLayout": "layout",
    "Pass": "pipeline",
    "PassManager": "pipeline",
    "Reason": "reason",
    "Report": "report",
    "Site": "report",
    "Target": "target",
    "capture": "explaining",
    "expect": "expecting",
    "explain": "explaining",
    "inductor_passes": "backend",
    "reports": "registry",
    "split_kv_cache": "layout",
    "verify": "verifying",
}
_MODULES = ("layout", "ops")

__all__ = [
    "Config",
    "ConfigError",
    "Context",
    "FusionRequiredError",
    "KVCacheLayout",
    "Pass",
    "PassManager",
    "Reason",
    "Report",
    "Site",
    "Target",
    "__version__",
    "capture",
    "expect",
    "explain",
    "inductor_passes",
    "layout",
    "ops",
    "reports",
    "split_kv_cache",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use.

    No module is called like a public function (``explaining`` holds ``explain``): importing a
    submodule sets an attribute of its name here and would hide the function.
    """
    if name in _MODULES:
        return importlib.import_module(f"fusion.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"fusion.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
