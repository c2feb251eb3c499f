"""``fusion diff``: the graph before and after, limited to what changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.tools import options as opt
from fusion.tools.console import data, talk

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
    """Show what each pass changes in the graph, as a unified diff of its listing: one node a
    line, removed ones with -, new ones with +. With --site, only the nodes of those sites."""
    from fusion.dump import diff
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
            found.append(diff(event, context))

    # The sites are those of the captured layers: twins have no nodes of their own.
    plain = replace(loaded, twins={})
    report = explain_loaded(plain, target=machine, options=config, observer=observe)
    if site is None:
        data("".join(found)) if found else talk("nothing changed")
        return
    chosen = selected(report, site, pass_name).sites
    parts = [site_diff(s) for s in chosen if s.after]
    data("\n".join(parts)) if parts else talk("nothing changed there")


def site_diff(site: Site) -> str:
    """The nodes that a site lost and those that it got."""
    where = site.layer or site.source or "-"
    lines = [f"--- {where} before", f"+++ {where} after {site.pass_name}"]
    lines += [f"-{line}" for line in site.before if line not in site.after]
    lines += [f"+{line}" for line in site.after if line not in site.before]
    return "\n".join(lines) + "\n"
