"""A stand-alone script that runs one site twice: its own nodes, and what replaced them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fusion.tools.console import CommandError
from fusion.tools.sources import Loaded

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from fusion import Site

_NAME = re.compile(r"%?(\w+)")

_SCRIPT = '''"""Repro by `fusion verify`: {where}, pass {pass_name}, kernel {kernel}.

Runs the nodes of the site as they were and as they were replaced, on random inputs of the same
shapes, dtypes and strides, and compares every value that the rest of the graph reads.
Exit status: 0 equal bit by bit, 1 not equal. Made with {versions}.
"""

import sys

import torch
from torch import device, inf, nan  # noqa: F401  (names that generated code may use)

import fusion.ops  # noqa: F401  (registers the operations)


def tensor(shape, stride, dtype, seed, device):
    """Random values; integers count from 0, so that they are valid slots and positions."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if 0 not in shape else 0
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        flat = torch.randn(extent, generator=generator).to(dtype)
    elif dtype == torch.bool:
        flat = torch.ones(extent, dtype=dtype)
    else:
        flat = torch.arange(extent).to(dtype)
    return flat.as_strided(shape, stride).to(device)


def inputs(seed):
{inputs}
    return {names}


def before({parameters}):
{before}

def after({parameters}):
{after}

OUTPUTS = {outputs}


def bits(x):
    kinds = {{1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}}
    return x.contiguous().view(kinds[x.element_size()])


def main():
    status = 0
    with torch.no_grad():
        old, new = before(*inputs(0)), after(*inputs(0))
    for name, a, b in zip(OUTPUTS, old, new):
        differ = int((bits(a) != bits(b)).sum()) if a.shape == b.shape else a.numel()
        most = ""
        if differ and a.shape == b.shape:
            most = f", at most by {{(a.double() - b.double()).abs().max().item()}}"
        print(f"{{name}}: {{differ}} elements differ{{most}}")
        status |= differ > 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
'''


def script(loaded: Loaded, options: Mapping[str, Any] | None, bad: Site) -> str:
    """The text of the script for one fused site.

    Raises :class:`CommandError` where the site is not met again or shares nodes with another.
    """
    import torch

    from fusion.build import make_config, make_manager, versions
    from fusion.graph.capture import capture

    config = make_config(options).replace(inner="aot_eager")
    with torch.no_grad():
        graphs = capture(loaded.model, loaded.args, dict(loaded.kwargs), decompose=False)
    for captured in graphs:
        old = copy.deepcopy(captured.gm).graph
        report = make_manager(config).run(captured.graph, phase="aot_eager")
        for site in report.sites:
            if (site.pass_name, site.layer, site.source) == (
                bad.pass_name,
                bad.layer,
                bad.source,
            ) and site.status in ("fused", "partial"):
                return _script(old, captured.graph, site, versions())
    raise CommandError("the site was not met again; no repro was written")


def _script(old: Graph, new: Graph, site: Site, versions: Mapping[str, str | None]) -> str:
    before = {n.name: n for n in old.nodes}
    after = {n.name: n for n in new.nodes}
    removed = {str(n["name"]) for n in site.nodes} & before.keys() - after.keys()
    added = {m[1] for line in site.after if (m := _NAME.match(line))} & after.keys() - before.keys()
    pairs = _pairs(before, after, removed, added)
    if not pairs:
        raise CommandError("nothing reads what the site makes; no repro was written")
    gone, fresh = before.keys() - after.keys(), after.keys() - before.keys()
    regions = [
        _closed([before[a] for a, _ in pairs], gone | {a for a, _ in pairs}),
        _closed([after[b] for _, b in pairs], fresh | {b for _, b in pairs}),
    ]
    needed = [n for region in regions for n in _inputs(region)]
    names = list(dict.fromkeys(n.name for n in needed))
    if missing := [n for n in names if n not in before]:
        raise CommandError(f"the site needs {missing[0]} of another site; no repro was written")
    return _SCRIPT.format(
        where=f"{site.layer or '-'} at {site.source or '-'}",
        pass_name=site.pass_name,
        kernel=site.kernel,
        versions=", ".join(f"{k} {v}" for k, v in versions.items() if v),
        inputs="\n".join(_input(before[n], i) for i, n in enumerate(names)),
        names=f"({', '.join(names)},)",
        parameters=", ".join(names),
        before=_function(regions[0], names, [before[a] for a, _ in pairs]),
        after=_function(regions[1], names, [after[b] for _, b in pairs]),
        outputs=tuple(a for a, _ in pairs),
    )


def _pairs(
    before: Mapping[str, Node], after: Mapping[str, Node], removed: set[str], added: set[str]
) -> list[tuple[str, str]]:
    """What surviving readers read of the site: (old node, new node), each once."""
    found: dict[tuple[str, str], None] = {}
    for name, node in before.items():
        if name not in after:
            continue
        olds, news = node.all_input_nodes, after[name].all_input_nodes
        if len(olds) != len(news):
            continue
        for old, new in zip(olds, news, strict=True):
            if old.name != new.name and (old.name in removed or new.name in added):
                # Of a call with several results, what is read is the reader's own value.
                several = isinstance(old.meta.get("val"), (tuple, list))
                found[(name, name) if several else (old.name, new.name)] = None
    return list(found)


def _closed(roots: Iterable[Node], inside: Iterable[str]) -> list[Node]:
    """The roots and what they need of the nodes ``inside``, in graph order."""
    names, seen, stack = set(inside), set[Any](), list(roots)
    while stack:
        node = stack.pop()
        if node in seen or node.name not in names:
            continue
        seen.add(node)
        stack += node.all_input_nodes
    return [n for n in next(iter(seen)).graph.nodes if n in seen] if seen else []


def _inputs(region: list[Node]) -> list[Node]:
    inside = set(region)
    return [i for n in region for i in n.all_input_nodes if i not in inside]


def _function(region: list[Node], names: list[str], outputs: list[Node]) -> str:
    """The body of a function that runs a region, as torch.fx writes it."""
    from torch.fx import Graph, GraphModule

    graph, made = Graph(), {}
    where = {n.name: n for node in region for n in node.all_input_nodes}
    for name in names:
        placeholder = graph.placeholder(name)
        if name in where:
            made[where[name]] = placeholder
    for node in region:
        made[node] = graph.node_copy(node, lambda n: made[n])
    graph.output(tuple(made[n] for n in outputs))
    code = GraphModule({}, graph).code
    body = code[code.index("\n", code.index("def forward")) + 1 :]
    return "\n".join(line.split(";  ")[0] for line in body.rstrip().splitlines()) + "\n"


def _input(node: Node, number: int) -> str:
    import torch

    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape, stride = _ints(value.shape), _ints(value.stride())
        return (
            f"    {node.name} = tensor({shape}, {stride}, {value.dtype}, seed + {number}, "
            f"{str(value.device)!r})"
        )
    if isinstance(value, (int, torch.SymInt, float, torch.SymFloat)):
        return f"    {node.name} = {_ints([value])[0]}"
    raise CommandError(f"{node.name} is no tensor and no number; no repro was written")


def _ints(sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, (int, float)) else s.node.hint for s in sizes)
