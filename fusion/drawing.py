"""A piece of a graph as SVG: boxes in layers from inputs to results, coloured by fact.

The input is the listing that a site carries (one node a line, as ``torch.fx`` prints them), so a
page can be drawn from a stored report. Everything that ends up in the SVG is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_NAME = re.compile(r"^%?(\w+)")
_TARGET = re.compile(r"target=([^\]]+)\]|= (?:aten|prims|fusion|torch)?\.?([\w.]+)\(")
_REFERENCE = re.compile(r"%(\w+)")
_BOX = (148, 34)
_GAP = (14, 22)
_PASSES = 4
"""Sweeps that move boxes below what they read."""


@dataclass
class _Box:
    name: str
    target: str
    kind: str
    reads: list[str] = field(default_factory=list)
    layer: int = 0
    column: float = 0.0
    x: float = 0.0


def svg(lines: Sequence[str], facts: Mapping[str, str], title: str) -> str:
    """The graph of some nodes; ``facts`` maps node names to the fact that they belong to.

    Nodes that are read but not listed are drawn as inputs. Returns an ``<svg>`` element whose
    colours come from CSS classes ``node-<kind>`` (:func:`kind_of`), or "" without nodes.
    """
    boxes = _boxes(lines, facts)
    if not boxes:
        return ""
    rows = _arrange(boxes)
    width = max(len(row) for row in rows) * (_BOX[0] + _GAP[0]) + _GAP[0]
    height = len(rows) * (_BOX[1] + _GAP[1]) + _GAP[1]
    for row in rows:
        _place(row, width)
    parts = [
        f'<svg role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
    ]
    for box in boxes.values():
        parts += [_edge(boxes[name], box) for name in box.reads]
    parts += [_drawn(box) for box in boxes.values()]
    return "".join([*parts, "</svg>"])


def kind_of(fact: str | None) -> str:
    """``q norm`` -> ``q-norm``: a fact as part of a CSS class name."""
    return re.sub(r"[^a-z0-9]+", "-", (fact or "other").lower()).strip("-") or "other"


def _boxes(lines: Sequence[str], facts: Mapping[str, str]) -> dict[str, _Box]:
    boxes: dict[str, _Box] = {}
    reads: dict[str, list[str]] = {}
    for line in lines:
        match = _NAME.match(line.strip())
        if match is None:
            continue
        name = match[1]
        found = _TARGET.search(line)
        target = next((g for g in (found.groups() if found else ()) if g), "")
        rest = line[line.index("(") :] if "(" in line else ""
        reads[name] = list(dict.fromkeys(r for r in _REFERENCE.findall(rest) if r != name))
        fused = "fusion." in line or "auto_functionalized" in target
        kind = kind_of(facts.get(name) or ("fused" if fused else None))
        boxes[name] = _Box(name, _short(target, line), kind)
    for name, sources in reads.items():
        for source in sources:
            boxes.setdefault(source, _Box(source, "input", "input"))
        boxes[name].reads = sources
    return boxes


def _short(target: str, line: str) -> str:
    """``torch.ops.aten.mul.Tensor`` -> ``aten.mul.Tensor``; a wrapper by what it wraps."""
    if "auto_functionalized" in target:
        inner = re.search(r"fusion\.(\w+)", line)
        return f"fusion.{inner[1]}" if inner else target
    return target.removeprefix("torch.ops.").removeprefix("operator.").removeprefix("_operator.")


def _arrange(boxes: dict[str, _Box]) -> list[list[_Box]]:
    """Layers by the longest way from an input; inputs just above their first reader."""
    for box in boxes.values():  # listings are in graph order: what is read stands before
        box.layer = max((boxes[r].layer + 1 for r in box.reads if r != box.name), default=0)
    for _ in range(2):  # inputs were added last, so that their readers are settled only now
        for box in boxes.values():
            if box.kind != "input":
                box.layer = max((boxes[r].layer + 1 for r in box.reads), default=box.layer)
    for box in boxes.values():
        if box.kind == "input":
            readers = [b.layer for b in boxes.values() if box.name in b.reads]
            box.layer = max(0, min(readers, default=1) - 1)
    rows: dict[int, list[_Box]] = {}
    for box in boxes.values():
        rows.setdefault(box.layer, []).append(box)
    ordered = [rows[i] for i in sorted(rows)]
    for row in ordered:
        for i, box in enumerate(row):
            box.column = float(i)
    for sweep in range(_PASSES):
        for row in ordered if sweep % 2 == 0 else ordered[::-1]:
            for box in row:
                near = [boxes[r].column for r in box.reads]
                near += [b.column for b in boxes.values() if box.name in b.reads]
                box.column = sum(near) / len(near) if near else box.column
            row.sort(key=lambda b: b.column)
            for i, box in enumerate(row):
                box.column = i - len(row) / 2
    return ordered


def _place(row: list[_Box], width: float) -> None:
    step = _BOX[0] + _GAP[0]
    left = (width - len(row) * step + _GAP[0]) / 2
    for i, box in enumerate(row):
        box.x = left + i * step


def _top(box: _Box) -> float:
    return _GAP[1] + box.layer * (_BOX[1] + _GAP[1])


def _edge(source: _Box, box: _Box) -> str:
    x1, y1 = source.x + _BOX[0] / 2, _top(source) + _BOX[1]
    x2, y2 = box.x + _BOX[0] / 2, _top(box)
    bend = max(10.0, (y2 - y1) / 2)
    return (
        f'<path class="edge" d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} '
        f'{x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>'
    )


def _drawn(box: _Box) -> str:
    x, y = box.x, _top(box)
    name, target = _clip(box.name, 20), _clip(box.target, 24)
    return (
        f'<g class="node-{box.kind}"><title>{escape(box.name)}: {escape(box.target)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX[0]}" height="{_BOX[1]}" rx="5"/>'
        f'<text x="{x + 8:.0f}" y="{y + 14:.0f}">{escape(name)}</text>'
        f'<text class="op" x="{x + 8:.0f}" y="{y + 27:.0f}">{escape(target)}</text></g>'
    )


def _clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
