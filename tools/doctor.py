"""``fusion doctor``: versions, devices, switches, plug-ins and caches of this machine."""

from __future__ import annotations

import os
import platform
import sys
from typing import Annotated, Any

import typer

from fusion.tools import options as opt
from fusion.tools.console import data, table, write

SHORT = "Versions, devices, switches, plug-ins and caches."
EPILOG = """Examples:

\b
  fusion doctor
  fusion doctor --json doctor.json    # for a bug report"""

_SWITCHES = {
    "FUSION_AITER": "whether AITER may be used (1 or 0)",
    "FUSION_KV_LAYOUT": "cache layout that the graph cannot show (shuffle or dense)",
    "FUSION_DUMP": "folder for the diff of every changed graph",
    "TORCHINDUCTOR_CACHE_DIR": "folder of Inductor's compile cache",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "switches the compile cache off",
    "TORCH_LOGS": "what torch logs",
}


def command(
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write as JSON; - is stdout.")
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Tell what fusion sees on this machine: versions, devices, environment switches, passes,
    kernels by operation, broken plug-ins with their errors, and the compile cache."""
    found = examine()
    if json is not None:
        import json as codec

        write(json, codec.dumps(found, indent=2), overwrite)
    if json != "-":
        data(to_text(found))


def examine() -> dict[str, Any]:
    """Everything as a JSON-ready mapping; nothing here raises for a broken installation."""
    from fusion import Target, __version__, store
    from fusion.discovery import discover
    from fusion.selection import broken_backends, kernels

    target = Target.current()
    found = discover()
    folder = store.folder()
    stored = 0 if folder is None else sum(1 for _ in folder.glob("*/*.json"))
    offered: dict[str, list[str]] = {}
    for kernel in kernels():
        offered.setdefault(kernel.op, []).append(kernel.name)
    broken = [
        {"kind": "backend", "name": name, **reason.to_dict()} for name, reason in broken_backends()
    ]
    broken += [
        {"kind": "pass", "name": s.name, **r.to_dict()} for s in found.broken for r in s.reasons
    ]
    return {
        "versions": {
            "fusion": __version__,
            "python": platform.python_version(),
            **dict(target.versions),
        },
        "platform": f"{sys.platform} {platform.machine()}",
        "target": {"vendor": target.vendor, "arch": target.arch, "origin": target.origin},
        "devices": _devices(),
        "aiter": _aiter(target),
        "switches": {name: os.environ.get(name) for name in _SWITCHES},
        "passes": {p.name: p.origin for p in found.passes},
        "kernels": offered,
        "broken": broken,
        "cache": {"folder": None if folder is None else str(folder), "reports": stored},
    }


def _devices() -> list[str]:
    import torch

    try:
        return [
            f"cuda:{i} {torch.cuda.get_device_name(i)}, "
            f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
            for i in range(torch.cuda.device_count())
        ]
    except Exception as error:
        return [f"cuda devices cannot be read: {type(error).__name__}: {error}"]


def _aiter(target: Any) -> str:
    """One line: is AITER there, may it be used, and who says so."""
    from fusion import Config, ConfigError

    installed = target.version_text("aiter")
    try:
        switch = Config().aiter_switch()
    except ConfigError as error:
        return f"error: {error}"
    if installed is None:
        return f"not installed ({switch.origin})"
    if switch.value is False:
        return f"{installed}, switched off ({switch.origin})"
    return f"{installed} ({switch.origin})"


def to_text(found: dict[str, Any]) -> str:
    """The examination as text."""
    lines = ["versions"]
    lines += table([(name, str(version)) for name, version in found["versions"].items()])
    target = found["target"]
    lines += ["machine"]
    rows = [
        ("platform", found["platform"]),
        ("target", f"{target['arch']} ({target['vendor']}, {target['origin']})"),
        ("aiter", found["aiter"]),
        *(("device", d) for d in found["devices"] or ["no GPU"]),
    ]
    lines += table(rows)
    lines += ["switches"]
    lines += table(
        [(n, "unset" if v is None else v, _SWITCHES[n]) for n, v in found["switches"].items()]
    )
    lines += ["passes", *table(list(found["passes"].items()))]
    lines += ["kernels", *table([(op, ", ".join(n)) for op, n in found["kernels"].items()])]
    lines += ["plug-ins"]
    if not found["broken"]:
        lines.append("  none is broken")
    for b in found["broken"]:
        lines.append(f"  {b['kind']} {b['name']}: {b['code']}: {b['message']}")
    cache = found["cache"]
    lines += ["compile cache", *table([("folder", str(cache["folder"]))])]
    lines.append(f"  {cache['reports']} stored reports")
    return "\n".join(lines) + "\n"
