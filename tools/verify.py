"""``fusion verify``: fused against unfused, down to the first bad site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.tools import options as opt
from fusion.tools.console import MISSED, CommandError, check_output, data, talk, working, write

if TYPE_CHECKING:
    from fusion.verifying import Verification

SHORT = "Fused against unfused, down to the first bad site."
EPILOG = """Examples:

\b
  fusion verify mymodel:build
  fusion verify mymodel:build --option kernels='["triton"]' --tolerance 0.02
  fusion verify tiny/config.json --phase prefill --repro repro.py

\b
Exit status: 0 equal (a kernel of --kernels that was not used is warned of), 1 not equal,
2 usage or internal error."""


def command(
    source: opt.Source,
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
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            min=0.0,
            help="Largest difference that counts as equal; 0 compares bit by bit.",
        ),
    ] = 0.0,
    repro: Annotated[
        str | None,
        typer.Option(
            "--repro",
            metavar="FILE",
            help="Where they differ, write a stand-alone script that runs the first bad site "
            "fused and unfused.",
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result; - is stdout.")
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Run a model fused and unfused on this machine and compare every output and every byte of
    the caches. Where they differ, the values that leave each site are compared in graph order,
    which names the first bad site. Every run begins at the same state of the random number
    generators. A kernel that was asked for and bound at no site is warned of.
    A Hugging Face model is run with random weights."""
    import fusion
    from fusion.tools.explain import check_names
    from fusion.tools.running import open_source, quiet
    from fusion.tools.sources import Request
    from fusion.verifying import VerifyError

    for path in (repro, json):
        check_output(path, overwrite)
    config = opt.config_of(kernels, option)
    check_names(config, None, None)
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
        real=True,
    )
    loaded = open_source(source, request)
    model: Any = loaded.model
    if hasattr(model, "graph_module") and hasattr(model, "module"):
        raise CommandError("an exported program is not run here; use module:function")
    try:
        with working("running fused and unfused"), quiet():
            result = fusion.verify(model, *loaded.args, options=config, **loaded.kwargs)
    except VerifyError as error:
        raise CommandError(str(error)) from error
    for name in not_bound(result, config):
        talk(
            f"warning: kernel {name} was asked for and bound at no site, so this says nothing "
            "about it; the report tells why"
        )
    good = result.equal or (tolerance > 0 and result.max_abs_error <= tolerance)
    if json is not None:
        import json as codec

        write(json, codec.dumps(result.to_dict(), indent=2), overwrite)
    if json != "-":
        data(to_text(result, tolerance))
    if good:
        return
    bad = result.first_bad_site
    if repro is not None and bad is not None:
        from fusion.tools.repro import script

        write(repro, script(loaded, config, bad), overwrite)
        talk(f"wrote {repro}; run it with python {repro}")
    elif bad is not None:
        talk("pass --repro FILE to get a script that shows the first bad site alone")
    raise typer.Exit(MISSED)


def not_bound(result: Verification, config: Mapping[str, Any]) -> list[str]:
    """The kernels of the options that no site was bound to though nothing before them was taken.

    Names that stand behind a kernel that was used are a second choice that was not needed.
    """
    from fusion.build import make_config

    named = make_config(config).kernels or ()
    used = {site.kernel for site, _ in result.sites}
    last = max((i for i, name in enumerate(named) if name in used), default=len(named))
    return [name for name in named[:last] if name not in used]


def to_text(result: Verification, tolerance: float) -> str:
    """The verdict, every tensor that differs, the sites in order, the first bad one in full."""
    compared = len(result.outputs) + len(result.mutated)
    head = "equal, bit by bit" if result.equal else "NOT equal"
    if not result.equal and tolerance and result.max_abs_error <= tolerance:
        head = f"equal within {tolerance:g} (at most {result.max_abs_error:g})"
    lines = [f"fused against unfused: {head}"]
    sites = f"{len(result.sites)} fused site{'' if len(result.sites) == 1 else 's'}"
    told = bool(result.sites) or result.innocent
    untested = "" if told else ": nothing was fused, so nothing of fusion was tested"
    lines.append(f"  {compared} tensors compared, {sites}{untested}")
    lines += [f"  {d}" for d in (*result.outputs, *result.mutated) if not d.equal]
    bad = result.first_bad_site
    if bad is not None:
        what = f"{bad.operation}, kernel {bad.kernel}"
        lines.append(f"first site that differs: {bad.place()}, {what}")
        found = next(ds for s, ds in result.sites if s is bad)
        lines += [f"  {d}" for d in found if not d.equal]
    elif result.innocent:
        from fusion.verifying import INNOCENT

        lines.append(INNOCENT)
    elif not result.equal:
        lines.append("no fused site passes on another value: look at the sites' surroundings")
    return "\n".join(lines) + "\n\n" + result.report.to_text()
