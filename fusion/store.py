"""Reports kept beside Inductor's compile cache, so that a warm process reports the same sites.

When AOTAutograd's or Inductor's cache answers, no pass runs. The report of the compile that
filled the cache is then read from ``<Inductor's cache folder>/fusion_reports/<key>/``. The key
covers the Dynamo graph with its inputs, the pipeline's uuid and Inductor's patches, and leaves
out where the code stands: layer names and source lines are carried over by position, because
one cache entry serves every layer with an equal graph. All of it is best effort: a folder that
cannot be written loses the report, never the compile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion.graph import compat
from fusion.graph.provenance import layer_of, source_of
from fusion.report import SCHEMA, GraphReport

log = logging.getLogger("fusion")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
FOLDER = "fusion_reports"


class Key:
    """Identifies a compile: ``digest`` for the graph, ``hints`` for the example sizes."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], *salt: object) -> None:
        digest = hashlib.sha256(repr((SCHEMA, torch.__version__, salt)).encode())
        self._layers: list[str | None] = []
        self._sources: list[str | None] = []
        for name, module in sorted(gm.named_modules(), key=lambda item: item[0]):
            if isinstance(module, GraphModule):
                digest.update(f"{name}\n{_ADDRESS.sub('', module.code)}".encode())
                for node in module.graph.nodes:
                    digest.update(_input_text(node).encode())
                    self._layers.append(layer_of(node))
                    self._sources.append(source_of(node))
        for name, tensor in (*gm.named_parameters(), *gm.named_buffers()):
            digest.update(f"{name} {tensor_text(tensor)}".encode())
        digest.update(repr((torch.is_grad_enabled(), torch.is_inference_mode_enabled())).encode())
        self.digest = digest.hexdigest()
        hints = [_hints(value) for value in inputs]
        self.hints = hashlib.sha256(repr(hints).encode()).hexdigest()[:16]

    def places(self) -> dict[str, list[str | None]]:
        """Layers and source lines of the Dynamo graph's nodes, in order."""
        return {"layer": self._layers, "source": self._sources}


def _input_text(node: Node) -> str:
    if node.op != "placeholder":
        return ""
    value = node.meta.get("example_value", node.meta.get("val"))
    return f"{node.name} {tensor_text(value)}\n"


def tensor_text(value: Any) -> str:
    """Shape, dtype, stride and device as text (symbolic sizes by name); other values by type."""
    if not isinstance(value, torch.Tensor):
        return (
            f"{type(value).__name__} {value}"
            if isinstance(value, (torch.SymInt, int))
            else (type(value).__name__)
        )
    try:
        stride = str(tuple(value.stride()))
    except RuntimeError:  # sparse layouts
        stride = str(value.layout)
    shape = tuple(value.shape)
    return f"{value.dtype} {shape} {stride} {value.device} {value.requires_grad}"


def _hints(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return [_hints(s) for s in value.shape]
    if isinstance(value, torch.SymInt):
        return getattr(value.node, "hint", None)
    return value if isinstance(value, int) else type(value).__name__


def folder() -> Path | None:
    """Where reports are kept, or None where Inductor's cache folder cannot be made."""
    try:
        return Path(compat.inductor_cache_dir()) / FOLDER
    except Exception:
        log.debug("no compile-cache folder", exc_info=True)
        return None


def save(key: Key, graphs: Sequence[GraphReport]) -> None:
    """Write what the pipeline said about one compile; atomic, never raises."""
    root = folder()
    if root is None:
        return
    data = {"graphs": [g.to_dict() for g in graphs], "places": key.places()}
    try:
        target = root / key.digest
        target.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(temporary, target / f"{key.hints}.json")
    except (OSError, TypeError, ValueError):
        log.debug("the report could not be stored", exc_info=True)


def load(key: Key) -> list[GraphReport] | None:
    """What was stored for an equal compile, with this compile's layers and lines; or None.

    The report with the same example sizes, or the newest where the compiled code serves
    several sizes.
    """
    root = folder()
    if root is None:
        return None
    try:
        found = sorted((root / key.digest).glob("*.json"), key=lambda p: p.stat().st_mtime)
        if not found:
            return None
        exact = root / key.digest / f"{key.hints}.json"
        data = json.loads((exact if exact in found else found[-1]).read_text("utf-8"))
        moved = _move(data["graphs"], data["places"], key.places())
        return [GraphReport.from_dict(g) for g in moved]
    except (OSError, KeyError, TypeError, ValueError):
        log.debug("the stored report could not be read", exc_info=True)
        return None


def _move(
    graphs: list[dict[str, Any]],
    old: Mapping[str, Sequence[str | None]],
    new: Mapping[str, Sequence[str | None]],
) -> list[dict[str, Any]]:
    maps: dict[str, dict[str, str | None]] = {}
    for kind in ("layer", "source"):
        if len(old[kind]) == len(new[kind]):
            pairs = zip(old[kind], new[kind], strict=True)
            maps[kind] = {a: b for a, b in pairs if a is not None}
        else:
            maps[kind] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(v) for v in value]
        if isinstance(value, dict):
            return {
                k: maps[k].get(v, v) if k in maps and isinstance(v, str) else visit(v)
                for k, v in value.items()
            }
        return value

    moved: list[dict[str, Any]] = visit(graphs)
    return moved
