"""``fusion explain``: what fuses, what does not, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.tools import options as opt
from fusion.tools.console import MISSED, CommandError, check_output, data, talk, write

if TYPE_CHECKING:
    from fusion import Report, Site

SHORT = "What fuses in a model, what does not, and why."
EPILOG = """Examples:

\b
  fusion explain mymodel:build
  fusion explain Qwen3-8B/config.json --target gfx942,aiter=0.1.20 --phase decode
  fusion explain model.pt2 --json report.json --html report.html
  fusion explain mymodel:build --expect qk_norm_rope_kv_cache=36 --baseline last.json

\b
Exit status: 0 as expected, 1 an expectation or the baseline was missed, 2 usage or
internal error. Data goes to stdout, talk to stderr; no colour where NO_COLOR is set."""


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
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Trace with dynamic=True, as torch.compile would.")
    ] = False,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="TEXT",
            help="Only sites whose layer or source contains this (or matches it as a pattern "
            "with * and ?), in full detail.",
        ),
    ] = None,
    pass_name: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Only sites of this pass.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="One line for each site instead of each outcome.")
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="PASS=N",
            help="Exit 1 unless so many places are fused: a number, >=N, or all. Repeatable.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="Compare with an earlier --json report; exit 1 where a fusion was lost.",
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report; - is stdout.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Say what fuses in a model, what does not, and why: a table of the sites by outcome, then
    for each miss the reason, the graph node, the line of model code, what was read, what it has
    and would need, and the remedy. No kernel runs and no weights are needed; --target answers
    for a machine that is not here."""
    from fusion.codeline import code_line
    from fusion.render import to_html
    from fusion.tools.baseline import changes, read_report
    from fusion.tools.baseline import to_text as changes_text
    from fusion.tools.running import explain_loaded, open_source
    from fusion.tools.sources import Request

    for path in (json, html):
        check_output(path, overwrite)
    if json == html == "-":
        raise CommandError("--json and --html cannot both go to stdout")
    config = opt.config_of(kernels, option)
    check_names(config, pass_name, expect)
    machine = opt.target_of(target)
    old = read_report(baseline) if baseline is not None else None
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
    report = explain_loaded(
        loaded,
        target=machine,
        options=config,
        dynamic=True if dynamic else None,
    )
    shown = selected(report, site, pass_name)
    if json is not None:
        write(json, report.to_json(), overwrite)
    if html is not None:
        write(html, to_html(report, code=code_line), overwrite)
    if "-" not in (json, html):
        text = to_text(shown, all_sites=every, details=site is not None, code=code_line)
        data(text)
    missed = False
    if old is not None:
        assert baseline is not None
        found = changes(old, report)
        if old.target.get("arch") != report.target.get("arch"):
            talk(f"note: {baseline} was made for target {old.target.get('arch')}")
        words = changes_text(found, baseline)
        talk(words) if "-" in (json, html) else data("\n" + words)
        missed = any(change.worse for change in found)
    missed |= not expectations_hold(report, expect)
    if missed:
        raise typer.Exit(MISSED)


def to_text(report: Report, **how: object) -> str:
    """The report as text (see :func:`fusion.render.to_text`)."""
    from fusion.render import to_text as render

    return render(report, **how)  # type: ignore[arg-type]


def check_names(
    config: dict[str, object], pass_name: str | None, expect: Sequence[str] | None
) -> None:
    """Unknown options, passes and counts are errors before any work is done."""
    from fusion import ConfigError, Report
    from fusion import expect as check
    from fusion.build import make_config

    try:
        make_config(config)
        for name, count in [parse_expectation(e) for e in expect or ()]:
            try:
                check(Report(), **{name: count})
            except AssertionError:
                continue  # of course: the report is empty
        if pass_name is not None:
            check(Report(), **{pass_name: 0})
    except (ConfigError, ValueError) as error:
        raise CommandError(str(error)) from error


def parse_expectation(text: str) -> tuple[str, int | str]:
    """``PASS=N``, ``PASS=>=N``, ``PASS>=N`` or ``PASS=all``."""
    match = re.fullmatch(r"\s*([\w.-]+?)\s*(>=|=)\s*(.+?)\s*", text)
    if match is None:
        raise CommandError(f"--expect: {text!r} is not PASS=N, PASS>=N or PASS=all")
    name, sign, count = match.groups()
    if sign == ">=":
        return name, f">={count}"
    return name, int(count) if count.isdigit() else count


def expectations_hold(report: Report, expect: Sequence[str] | None) -> bool:
    """Check every expectation; what is missed is told on stderr."""
    from fusion import expect as check

    held = True
    for text in expect or ():
        name, count = parse_expectation(text)
        try:
            check(report, **{name: count})
        except AssertionError as error:
            talk(f"expectation missed: {error}")
            held = False
    return held


def selected(report: Report, site: str | None, pass_name: str | None) -> Report:
    """Only the sites that ``--site`` and ``--pass`` ask for.

    Raises :class:`CommandError` where ``--site`` names none, listing some that exist.
    """

    def wanted(s: Site) -> bool:
        if pass_name is not None and s.pass_name != pass_name:
            return False
        names = (s.layer or "", s.source or "")
        return site is None or any(site in n or fnmatch(n, site) for n in names)

    graphs = tuple(replace(g, sites=tuple(filter(wanted, g.sites))) for g in report.graphs)
    if site is not None and not any(g.sites for g in graphs):
        known = [s.layer or s.source or "-" for s in report.sites]
        shown = ", ".join(dict.fromkeys(known[:8])) or "none"
        raise CommandError(f"--site: no site matches {site!r}; there are {len(known)}: {shown}")
    return replace(report, graphs=graphs)
