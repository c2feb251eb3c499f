"""``fusion diff``: the graph before and after, limited to what changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.nodetext import name_of, readable
from fusion.tools import options as opt
from fusion.tools.console import columns, data, packed, talk

if TYPE_CHECKING:
    from fusion import Site
    from fusion.pipeline import PassEvent

SHORT = "The graph before and after, limited to what changed."
EPILOG = """Examples:

\b
  fusion diff mymodel:build
  fusion diff Qwen3-8B/config.json --target sm_90 --site layers.0
  fusion diff mymodel:build --pass qk_norm_rope_kv_cache --context 0

\b
Exit status: 0, also where nothing changed; 2 usage or internal error."""


def command(
    source: opt.Source,
    target: opt.TargetOption = None,
    kernels: opt.KernelsOption = None,
    option: opt.OptionOption = None,
    phase: opt.PhaseOption = opt.Phase.decode,
    batch: opt.BatchOption = 1,
    tokens: opt.TokensOption = 16,
    cache: opt.CacheOption = opt.Cache.paged,
    layout: opt.LayoutOption = "packed",
    block_size: opt.BlockOption = 16,
    dtype: opt.DtypeOption = None,
    cache_dtype: opt.CacheDtypeOption = None,
    all_layers: opt.AllLayersOption = False,
    pack_qkv: opt.PackOption = False,
    site: Annotated[
        str | None,
        typer.Option(
            "--site", metavar="TEXT", help="Only the nodes of sites whose layer contains this."
        ),
    ] = None,
    pass_name: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Only what this pass changed.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Unchanged nodes around each change.")
    ] = 2,
) -> None:
    """Show what each pass changes in the graph, as a unified diff of its listing: one node at a
    time, removed ones with - and what they were read as, new ones with +. With --site, only the
    nodes of those sites, with the lines of model code that they come from."""
    from fusion.tools.explain import check_names, selected
    from fusion.tools.running import explain_loaded, open_source
    from fusion.tools.sources import Request

    config = opt.config_of(kernels, option)
    check_names(config, pass_name, None)
    machine = opt.target_of(target)
    request = Request(
        phase.value,
        batch,
        tokens,
        cache.value,
        layout,
        block_size,
        opt.dtype_of(dtype),
        opt.dtype_of(cache_dtype, "--cache-dtype"),
        all_layers,
        pack_qkv,
    )
    loaded = open_source(source, request)
    found: list[str] = []

    def observe(event: PassEvent) -> None:
        if event.changed and pass_name in (None, event.pass_name):
            found.append(pass_diff(event, context, columns()))

    # The sites are those of the captured layers: twins have no nodes of their own.
    plain = replace(loaded, twins={})
    report = explain_loaded(plain, target=machine, options=config, observer=observe)
    if site is None:
        data("".join(found)) if found else talk("nothing changed")
        return
    chosen = selected(report, site, pass_name).sites
    parts = [site_diff(s, columns()) for s in chosen if s.after]
    data("\n".join(parts)) if parts else talk("nothing changed there")


def pass_diff(event: PassEvent, context: int, width: int) -> str:
    """What a pass changed: a unified diff whose parts are headed by the layers that they are of."""
    from fusion.dump import diff

    nodes = [(str(n["name"]), s, n.get("fact")) for s in event.sites for n in s.nodes]
    facts = {name: str(fact) for name, _, fact in nodes if fact}
    layers = {name: site.layer for name, site, _ in nodes if site.layer}
    head, *parts = re.split(r"(?m)^(?=@@ )", diff(event, context))
    lines = head.splitlines()
    for part in parts:
        first, *changes = part.splitlines()
        names = [name_of(line[1:]) for line in changes if line[0] == "-"]
        places = list(dict.fromkeys(layers[n] for n in names if n in layers))
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if places[3:] else "")
        lines.append(f"{first} {shown}".rstrip())
        for line in changes:
            fact = facts.get(name_of(line[1:])) if line[0] == "-" else None
            lines += _node(line[0], line[1:], width, fact)
    return "\n".join(lines) + "\n"


def site_diff(site: Site, width: int) -> str:
    """The nodes that a site lost, by what they are, and those that it got."""
    from fusion.render import summary, where

    place = where(site)
    lines = [f"--- {place} before" + (f" at {site.source}" if site.source != place else "")]
    lines.append(f"+++ {place} after {site.pass_name}: {summary(site)}")
    known = {str(n["name"]): n for n in site.nodes}
    gone = [line for line in site.before if line not in site.after]
    for fact, group in groupby(gone, lambda line: known.get(name_of(line), {}).get("fact")):
        removed = list(group)
        if fact:
            sources = [known[name_of(line)].get("source") for line in removed]
            lines += packed([str(fact), *_places(sources)], "@@ ", "@@    ", width)
        for line in removed:
            lines += _node("-", line, width)
    added = [line for line in site.after if line not in site.before]
    if added and any(line.startswith("@@") for line in lines):
        lines.append("@@ new")
    for line in added:
        lines += _node("+", line, width)
    return "\n".join(lines) + "\n"


def _places(sources: Sequence[str | None]) -> list[str]:
    """``at file:3-5, 8``: every line of model code once, each piece with its comma."""
    found: dict[str, set[int]] = {}
    for file, _, line in (s.rpartition(":") for s in sources if s):
        if line.isdigit():
            found.setdefault(file, set()).add(int(line))
    pieces = []
    for file, lines in found.items():
        runs = groupby(enumerate(sorted(lines)), lambda pair: pair[1] - pair[0])
        parts = [[line for _, line in run] for _, run in runs]
        shown = [str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts]
        shown[0] = f"{file}:{shown[0]}"
        pieces += [f"{text}," for text in shown]
    return ["at", *pieces[:-1], pieces[-1].removesuffix(",")] if pieces else []


def _node(sign: str, line: str, width: int, fact: str | None = None) -> list[str]:
    """One node on as many lines as it takes."""
    text = readable(line)
    if len(text) < width:
        lines = [sign + text]
    else:
        lines = packed(re.split(r"(?<=,) ", text), sign, f"{sign}    ", width)
    if fact:
        note = f"  # {fact}"
        if len(lines[-1] + note) <= width:
            lines[-1] += note
        else:
            lines.append(f"{sign}  {note}")
    return lines
