"""``fusion.expect``: fail a test or a build when fewer places fuse than they used to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusion import discovery
from fusion.registry import REGISTRY
from fusion.report import Report, Site


def expect(report_or_model: Any, **counts: int | str) -> Report:
    """Assert how many places each pass fused.

    ``report_or_model`` is a :class:`~fusion.report.Report`, several of them, or a module or
    function that was compiled with ``backend="fusion"`` and has run. A count is an exact
    number, ``">=N"``, or ``"all"`` (every site where the pass applies, and at least one).

    A place is counted once however often it was compiled (recompiles, prefill and decode); it
    counts as fused when it is fused in every graph that holds it. Raises ``AssertionError``
    listing the near misses, and ``ValueError`` for a name that is no pass or a count that is
    none of the above. Returns the report that was looked at.
    """
    report = _report_of(report_or_model)
    known = sorted({*discovery.pass_names(), *(p.name for p in report.passes)})
    problems: list[str] = []
    for name, count in counts.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"no pass is called {name!r}{hint} Passes: {', '.join(known)}")
        accept, wanted = _wanted(name, count)
        places = _places(report, name)
        fused = sum(all(s.status == "fused" for s in sites) for sites in places)
        if not accept(fused, len(places)):
            problems.append(_problem(report, name, wanted, fused, places))
    if problems:
        raise AssertionError("\n".join(problems))
    return report


def _wanted(name: str, count: int | str) -> tuple[Callable[[int, int], bool], str]:
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return (lambda fused, _: fused == count), f"exactly {count}"
    if isinstance(count, str):
        if count.strip() == "all":
            return (lambda fused, sites: fused == sites > 0), "all sites (at least one)"
        match = re.fullmatch(r"\s*>=\s*(\d+)\s*", count)
        if match:
            least = int(match.group(1))
            return (lambda fused, _: fused >= least), f"at least {least}"
        if count.strip().isdigit():
            return _wanted(name, int(count))
    raise ValueError(f"{name}={count!r}: a count is a number, '>=N' or 'all'")


def _places(report: Report, name: str) -> list[list[Site]]:
    """Sites of a pass by place: the same layer and line in several graphs is one place."""
    found: dict[tuple[object, ...], list[Site]] = {}
    for graph in report.graphs:
        seen: dict[tuple[object, ...], int] = {}
        for site in graph.sites:
            if site.pass_name != name or not site.applicable:
                continue
            key = (site.layer, site.source)
            number = seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, number), []).append(site)
    return list(found.values())


def _problem(
    report: Report, name: str, wanted: str, fused: int, places: Sequence[Sequence[Site]]
) -> str:
    lines = [f"{name}: expected {wanted} fused, found {fused} of {len(places)} site(s)"]
    for status in report.passes:
        if status.name == name and status.status != "built":
            lines.append("  the pass was not built:")
            lines += [f"    {r}" for r in status.reasons]
    misses = [s for sites in places for s in sites if s.near_miss]
    misses.sort(key=lambda s: -s.depth)
    if not places:
        lines.append(f"  no site of this pass in {len(report.graphs)} graph(s)")
    elif misses:
        lines.append("  near misses, nearest first:")
    for site in misses[:10]:
        lines.append(f"    {site.place()}: {site.status}")
        lines += [f"      {r}" for r in site.reasons]
        refused = [c for c in site.candidates if not c.accepted]
        lines += [f"      kernel {c.kernel}: {r}" for c in refused for r in c.reasons]
        if site.hint:
            lines.append(f"      nearest change: {site.hint}")
    if len(misses) > 10:
        lines.append(f"    ... and {len(misses) - 10} more")
    for broken in discovery.discover().broken:
        lines.append(f"  pass {broken.name} is broken: {broken.reasons[0]}")
    return "\n".join(lines)


def _report_of(value: Any) -> Report:
    if isinstance(value, Report):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(v, Report) for v in value):
        return Report.merge(value)
    module = getattr(value, "_orig_mod", value)
    if isinstance(module, torch.nn.Module):
        tensors: Iterable[torch.Tensor] = [*module.parameters(), *module.buffers()]
        found = [e.report() for e in REGISTRY.entries() if e.mentions(tensors)]
    else:
        function = value
        while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
            function = inner
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None:
            raise TypeError(f"expect wants a report or a compiled model, not {value!r}")
        found = [e.report() for e in REGISTRY.entries() if e.belongs_to(code)]
    if not found:
        raise AssertionError(
            "nothing of this model was compiled with backend='fusion' yet "
            "(run it once; a module without parameters is found by its report only)"
        )
    return Report.merge(found)
