"""A report as plain text and as one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING

from fusion.drawing import kind_of, svg
from fusion.nodetext import readable
from fusion.reason import Reason

if TYPE_CHECKING:  # the report calls these functions; at run time nothing is needed from it
    from fusion.report import CandidateLike, Group, Report, Site


_NUMBERED = re.compile(r"(?:[^.]*\.)*?\d+(?=\.|$)")
"""The path of a numbered layer: ``model.layers.3`` of ``model.layers.3.self_attn``."""
_CHIP = "gate.arch"
"""The reason of a kernel that runs on other chips only, whatever the call."""

Code = Callable[[str], "str | None"]
"""Gives the text of the line that a ``file:line`` names, or None where it is not at hand."""


def to_text(
    report: Report, *, all_sites: bool = False, details: bool = False, code: Code | None = None
) -> str:
    """Plain text: header, one table a graph grouped by identical outcome, then the misses.

    ``all_sites`` lists every site on its own line instead of grouping; ``details`` tells of fused
    sites what it tells of the others; ``code`` looks up the lines of model code to show (of graphs
    that were seen by this process: a stored report may be older than the files).
    """
    lines = [_header(report)]
    lines += [
        f"pass {p.name}: {p.status}" + (f" ({p.reasons[0]})" if p.reasons else f", {p.mode}")
        for p in report.passes
        if p.status != "built" or p.mode != "auto"
    ]
    lines += [] if details else _refused_on_target(report)
    if not report.graphs:
        lines.append("no graph was compiled")
    for graph in report.graphs:
        unknown = any(r.code == "cache.no-report" for r in graph.reasons)  # perhaps no hit at all
        cached = ", from the compile cache" if graph.cached and not unknown else ""
        lines += [
            "",
            f"graph {graph.id or '-'} ({graph.phase}{cached}): {_tally(graph.sites, unknown)}",
        ]
        for reason in graph.reasons:
            lines += [f"  {reason}", f"    remedy: {reason.remedy}"]
        groups = graph.groups()
        if all_sites:
            rows = [(where(s), s.pass_name, summary(s)) for s in graph.sites]
        else:
            rows = [(_count(g), g.first.pass_name, summary(g.first)) for g in groups]
        lines += _table(rows)
        for g in groups:
            if g.first.near_miss or details:
                lines += ["", *_explain(g, None if graph.stored else code, details)]
            else:
                lines += _passed_over(g)
    return "\n".join(lines) + "\n"


def summary(site: Site) -> str:
    """``fused, reference`` or ``missed: match.norm-order``: a site in a few words."""
    if not site.applicable:
        return f"left alone: {site.reasons[0].message}" if site.reasons else "left alone"
    text = site.status
    if site.status in ("fused", "partial"):
        if site.operation and site.operation != site.pass_name:
            text += f" as {site.operation}"
        if site.kernel:
            text += f", {site.kernel}"
    if site.status != "fused" and site.reasons:
        text += f": {site.reasons[0].code}"
    return text


def where(site: Site) -> str:
    """The layer, else the source line, else ``node NAME``, else a dash."""
    return site.layer or site.place()


def fact_text(value: object) -> str:
    """A fact as words: ``spelling op, layout NHD, rows [5, 4, 64]``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {fact_text(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(fact_text(v) for v in value) + "]"
    return "none" if value is None else str(value)


def _header(report: Report) -> str:
    target = report.target
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items() if v)
    return (
        f"fusion report: target {target.get('arch', '?')} ({target.get('origin', '?')}); {versions}"
    )


def _tally(sites: Sequence[Site], unknown: bool = False) -> str:
    if not sites:
        return "sites unknown" if unknown else "no KV-cache write, no attention call"
    counts: dict[str, int] = {}
    for site in sites:
        word = site.status if site.applicable else "left alone"
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(f"{n} {word}" for word, n in counts.items())


def _count(g: Group) -> str:
    """``36 layers``, or ``36 sites`` where they are not each in a numbered layer of its own."""
    n = len(g.sites)
    if n == 1:
        return where(g.first)
    layers = {found[0] for s in g.sites if (found := _NUMBERED.match(s.layer or ""))}
    return f"{n} {'layers' if len(layers) == n else 'sites'}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(2)]
    return [f"  {r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]}".rstrip() for r in rows]


def _refused_on_target(report: Report) -> list[str]:
    """A line for each kernel that was wanted and is not for this chip, instead of one a group."""
    wanted = [c for s in report.sites for c in _wanted(s)]
    wanted += [c for s in report.sites if s.near_miss for c in s.candidates if not c.accepted]
    said = [
        f"kernel {c.kernel} refused on this target: {replace(r, node=None)}"
        for c in wanted
        for r in c.reasons
        if r.code == _CHIP
    ]
    return list(dict.fromkeys(said))


def _wanted(site: Site) -> list[CandidateLike]:
    """The refused kernels that stood before the chosen one in the order of preference."""
    names = [c.kernel for c in site.candidates]
    end = names.index(site.kernel) if site.kernel in names else len(names)
    return [c for c in site.candidates[:end] if not c.accepted]


def _explain(g: Group, code: Code | None, details: bool) -> list[str]:
    site = g.first
    places = list(dict.fromkeys(where(s) for s in g.sites))
    shown = ", ".join(places[:4])
    if len(places) > 4 or len(places) < len(g.sites):
        shown += f"{', ...' if len(places) > 4 else ''} ({len(g.sites)} in all)"
    status = site.status if site.applicable else "left alone"
    line = f" at {site.source}" if site.source and site.layer else ""
    lines = [f"  {status}: {shown}{line}"]
    lines += _code_line(site.source, code, "    ")
    for reason in site.reasons:
        here = reason.node is None and reason.source == site.source
        lines += _reason(replace(reason, source=None) if here else reason, "    ", code)
    known = {_gist(r) for r in site.reasons}
    for candidate in site.candidates:
        if candidate.accepted:
            continue
        codes = [r.code for r in candidate.reasons]
        lines.append(f"    kernel {candidate.kernel} refused")
        if not details and _CHIP in codes:
            lines[-1] += f": {_CHIP}, see above"
        elif codes and known.issuperset(map(_gist, candidate.reasons)):
            lines[-1] += f": {', '.join(dict.fromkeys(codes))}, see above"
        else:
            for reason in once(candidate.reasons):
                lines += _reason(reason, "      ", code)
    if site.validation is not None:
        lines.append(f"    checked: {fact_text(site.validation)}")
    if site.facts:
        lines += [f"    read: {k}: {fact_text(v)}" for k, v in site.facts.items()]
    if site.hint:
        lines.append(f"    nearest change: {site.hint}")
    return lines


def _passed_over(g: Group) -> list[str]:
    """The kernels that selection wanted more than the one that it took, each with its reasons.

    Those that are not for this chip are told of once, at the top.
    """
    lines: list[str] = []
    for candidate in _wanted(g.first):
        if any(r.code == _CHIP for r in candidate.reasons):
            continue
        lines += ["", f"  {_count(g)}: {g.first.kernel}, because {candidate.kernel} was refused"]
        for reason in once(candidate.reasons):
            lines += _reason(reason, "    ")
    return lines


def once(reasons: Sequence[Reason]) -> list[Reason]:
    """Reasons that say the same, needs aside, as one that needs all that they need."""
    needs: dict[Reason, dict[str, None]] = {}
    for r in reasons:
        found = needs.setdefault(replace(r, need=None), {})
        if r.need is not None:
            found[r.need] = None
    return [replace(r, need=" and ".join(found) or None) for r, found in needs.items()]


def _gist(reason: Reason) -> tuple[str | None, ...]:
    """What a reason says, wherever it is said."""
    return (reason.code, reason.message, reason.have, reason.need)


def _code_line(source: str | None, code: Code | None, indent: str) -> list[str]:
    text = code(source) if code is not None and source is not None else None
    return [f"{indent}| {text.strip()}"] if text and text.strip() else []


def _reason(reason: Reason, indent: str, code: Code | None = None) -> list[str]:
    lines = [f"{indent}{reason.code}: {reason.message}"]
    if reason.have is not None or reason.need is not None:
        sides = (("have", reason.have), ("need", reason.need))
        lines.append(f"{indent}  " + ", ".join(f"{w} {v}" for w, v in sides if v is not None))
    if reason.node or reason.source:
        lines.append(f"{indent}  at {' '.join(t for t in (reason.node, reason.source) if t)}")
        lines += _code_line(reason.source, code, f"{indent}  ")
    lines.append(f"{indent}  remedy: {reason.remedy}")
    return lines


def to_html(report: Report, *, code: Code | None = None) -> str:
    """One self-contained page from ``fusion/templates/report.html.j2``; everything is escaped.

    ``code`` looks up the lines of model code to show, as in :func:`to_text`.
    """
    import jinja2
    from markupsafe import Markup

    source = resources.files("fusion").joinpath("templates/report.html.j2").read_text("utf-8")
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    env.trim_blocks = env.lstrip_blocks = True
    template = env.from_string(source)
    graphs = [(g, g.groups()) for g in report.graphs]

    def drawing(site: Site, which: str) -> str:
        lines = site.before if which == "before" else site.after
        return Markup(svg(lines, _facts_of(site), f"{where(site)} {which}"))

    return template.render(
        report=report,
        graphs=graphs,
        rows=_rows(report),
        summary=summary,
        where=where,
        once=once,
        tally=_tally,
        fact_text=fact_text,
        drawing=drawing,
        kinds_of=_kinds,
        kind_of=kind_of,
        readable=readable,
        code=code or (lambda _: None),
    )


def _facts_of(site: Site) -> dict[str, str]:
    return {str(n["name"]): str(n["fact"]) for n in site.nodes if n.get("fact")}


def _kinds(site: Site) -> list[tuple[str, str]]:
    """The facts of a site's nodes, for the legend: CSS class and text."""
    found = {kind_of(fact): fact for fact in _facts_of(site).values()}
    return list(found.items()) + ([("fused", "fused operation")] if site.after else [])


def _rows(report: Report) -> list[dict[str, object]]:
    """Every site, with the anchor of its group."""
    rows: list[dict[str, object]] = []
    for number, graph in enumerate(report.graphs):
        at = {id(s): i for i, g in enumerate(graph.groups()) for s in g.sites}
        rows += [
            {"site": s, "graph": graph.id, "anchor": f"g{number}-{at[id(s)]}"} for s in graph.sites
        ]
    return rows
