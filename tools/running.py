"""Explain a loaded model, and give the sites of captured layers to their twins."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusion.tools.console import CommandError, talk, working
from fusion.tools.sources import Loaded, Request, load

if TYPE_CHECKING:
    from fusion import Report, Site, Target
    from fusion.pipeline import Observer


#: Passes that make one site for all layers: such a site has no twins.
_SHARED = ("shared_rope_table",)


def open_source(source: str, request: Request) -> Loaded:
    """Load a source and say on stderr what there is to say about it."""
    with working(f"loading {source}"), quiet():
        loaded = load(source, request)
    for note in loaded.notes:
        talk(f"note: {note}")
    return loaded


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, warnings of torch and transformers about tracing are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def explain_loaded(
    loaded: Loaded,
    *,
    target: Target | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    observer: Observer | None = None,
) -> Report:
    """The report of a loaded model, for every layer of it.

    Raises :class:`CommandError` where the model cannot be traced at all.
    """
    import fusion
    from fusion.explaining import CaptureError

    with working("reading the graph"), quiet():
        try:
            report = fusion.explain(
                loaded.model,
                *loaded.args,
                target=target,
                options=options,
                dynamic=dynamic,
                observer=observer,
                **loaded.kwargs,
            )
        except CaptureError as error:
            raise CommandError(traced(str(error))) from error
    graphs = report.graphs
    phase = loaded.phase
    if phase:  # a name that says something, and is the same in every run
        names = [phase] if len(graphs) == 1 else [f"{phase}/{i}" for i in range(len(graphs))]
        graphs = tuple(replace(g, id=n) for g, n in zip(graphs, names, strict=True))
    graphs = tuple(replace(g, sites=_for_twins(g.sites, loaded)) for g in graphs)
    return replace(report, graphs=graphs)


def traced(text: str) -> str:
    """What torch says about a model that it cannot trace: what happened, and where in the model.

    The advice and the frames in between stay away unless ``TORCHDYNAMO_VERBOSE=1``, which torch
    itself names for more.
    """
    head, _, stack = text.partition("\nfrom user code:")
    frames = re.findall(r'(?m)^ +File "([^"]+)", line (\d+), in .*\n +(.+)$', stack)
    if not frames or os.environ.get("TORCHDYNAMO_VERBOSE") == "1":
        return text
    said = head.splitlines()[0]
    explained = re.search(r"(?m)^  Explanation: (.+)$", head)
    if explained is not None:
        got = re.search(r": got (\w+)\((['\"])(.*)\2\)\s*$", explained[1])
        cause = f"{got[1]}: {got[3]}" if got else explained[1]
        said = f"{said.partition(': ')[0]}: {cause}"
    file, line, code = frames[-1]
    more = "(TORCHDYNAMO_VERBOSE=1 shows all that torch says)"
    return "\n".join((said, f"  at {file}:{line}", f"  | {code.strip()}", f"  {more}"))


def _layer_of(match: re.Match[str] | None) -> int:
    return -1 if match is None else int(match[2])


def _for_twins(sites: tuple[Site, ...], loaded: Loaded) -> tuple[Site, ...]:
    """Each site of a captured layer once for every layer that it stands for, in layer order."""
    if not loaded.twins:
        return sites
    pattern = re.compile(rf"(.*?){re.escape(loaded.prefix)}\.(\d+)(\..*)?")
    placed: list[tuple[int, int, Site]] = []
    for number, site in enumerate(sites):
        match = pattern.fullmatch(site.layer or "")
        if match is None or site.pass_name in _SHARED:
            placed.append((_layer_of(match), number, site))
            continue
        start, index, rest = match[1], int(match[2]), match[3] or ""
        layers = loaded.twins.get(index, (index,))
        for layer in layers:
            name = f"{start}{loaded.prefix}.{layer}{rest}"
            facts = dict(site.facts)
            if layer != layers[0]:
                facts["captured_as"] = f"{start}{loaded.prefix}.{layers[0]}{rest}"
            placed.append((layer, number, replace(site, layer=name, facts=facts)))
    placed.sort(key=lambda item: item[:2])
    return tuple(site for _, _, site in placed)
