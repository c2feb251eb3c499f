"""``fusion passes``: the pipeline, its options, and where each pass came from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated, Any

import typer

from fusion.tools import options as opt
from fusion.tools.console import data, write

SHORT = "The pipeline: order, options, where each pass came from."
EPILOG = """Examples:

\b
  fusion passes
  fusion passes --target gfx942 --option non_causal_attention=off
  fusion passes --json -"""


def command(
    target: opt.TargetOption = None,
    kernels: opt.KernelsOption = None,
    option: opt.OptionOption = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write as JSON; - is stdout.")
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """List the passes in the order in which they run: mode, options with their values, the
    package that each came from, and why a pass is not built. Broken plug-ins are listed too."""
    found = describe(target, kernels, option)
    if json is not None:
        import json as codec

        write(json, codec.dumps(found, indent=2), overwrite)
    if json != "-":
        data(to_text(found))


def describe(target: str | None, kernels: str | None, option: list[str] | None) -> list[Any]:
    """Every pass as a JSON-ready mapping, in pipeline order; broken ones last."""
    from fusion import Target
    from fusion.build import make_config
    from fusion.discovery import build_passes, discover

    config = make_config(opt.config_of(kernels, option))
    machine = opt.target_of(target) or Target.current()
    _, not_built, _ = build_passes(config, machine)
    lost = {s.name: s for s in not_built}
    found = []
    for info in discover().passes:
        chosen = dict(dict(config.pass_options).get(info.name, ()))
        status = lost.pop(info.name, None)
        found.append(
            {
                "name": info.name,
                "status": "built" if status is None else status.status,
                "mode": config.mode(info.name),
                "origin": info.origin,
                "about": about(info.cls),
                "options": [
                    {"name": f.name, "type": str(f.type), "value": chosen.get(f.name, _default(f))}
                    for f in dataclasses.fields(info.cls)
                ],
                "reasons": [] if status is None else [r.to_dict() for r in status.reasons],
            }
        )
    for status in lost.values():
        found.append(
            {
                "name": status.name,
                "status": status.status,
                "mode": config.mode(status.name),
                "origin": status.origin,
                "about": "",
                "options": [],
                "reasons": [r.to_dict() for r in status.reasons],
            }
        )
    return found


def about(cls: type[Any]) -> str:
    """What a pass does, in plain words: the head of its docstring.

    Where that says no more than that it is the pass (or is the one that ``dataclass`` makes up),
    the head of its module's, and of the class's what it says about options.
    """
    head = _head(cls)
    if head.startswith(f"{cls.__name__}("):
        head = ""
    if head and not head.startswith("The pass."):
        return head
    options = head.removeprefix("The pass.").strip() if dataclasses.fields(cls) else ""
    module = inspect.getmodule(cls)
    return f"{_head(module) if module is not None else ''} {options}".strip()


def _head(documented: Any) -> str:
    """The first paragraph of a docstring on one line, without the marks of reStructuredText."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.sub(r"(?::[\w:]+:)?(`+)~?(.+?)\1_{0,2}", r"\2", text)


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory()


def to_text(found: list[Any]) -> str:
    """The passes as text."""
    lines = []
    for number, p in enumerate(found, 1):
        lines.append(f"{number}. {p['name']}: {p['status']}, {p['mode']}")
        if p["about"]:
            lines.append(f"   {p['about']}")
        lines.append(f"   from {p['origin']}")
        for o in p["options"]:
            lines.append(f"   option {o['name']}: {o['type']} = {o['value']}")
        for r in p["reasons"]:
            lines.append(f"   {r['code']}: {r['message']}")
    return "\n".join(lines) + "\n"
