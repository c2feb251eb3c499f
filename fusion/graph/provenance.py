"""Where a node came from: the module path of its layer and the line of model code.

Reads ``nn_module_stack`` and ``stack_trace``, which Dynamo, AOTAutograd and export leave in
``node.meta`` (format seen with torch 2.13; what is absent or odd gives None, never an error).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fusion.codeline import remember

_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)', re.M)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The root of a path is an argument of the compiled function; ``*args`` adds an index.
_ROOT = re.compile(
    r"^(?:[LG]\[['\"]args['\"]\]\[\d+\]|[LG]\[['\"]?[^\]'\"]*['\"]?\])\.?|^L__self___?"
)
_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_GETATTR = re.compile(r"getattr\(([^()]+), ['\"]([^'\"]+)['\"]\)")


def layer_of(node: Node) -> str | None:
    """The module path of the innermost module, such as ``model.layers.0.self_attn``.

    None where the node does not stem from a module (or from the root module itself).
    """
    stack = node.meta.get("nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return None
    entry = list(stack.values())[-1]
    path = entry[0] if isinstance(entry, tuple) and entry else None
    return _clean_path(path) if isinstance(path, str) else None


@functools.lru_cache(maxsize=4096)
def _clean_path(path: str) -> str | None:
    while _GETATTR.search(path) is not None:
        path = _GETATTR.sub(r"\1.\2", path)
    path = _ROOT.sub("", path, count=1)
    path = _INDEX.sub(r".\1", path)
    parts = [p for p in path.split(".") if p and p not in ("_modules", "__dict__")]
    return ".".join(parts) or None


def module_class_of(node: Node) -> str | None:
    """The qualified class name of the innermost module, or None."""
    stack = node.meta.get("nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return None
    entry = list(stack.values())[-1]
    kind = entry[1] if isinstance(entry, tuple) and len(entry) > 1 else None
    if isinstance(kind, type):
        return f"{kind.__module__}.{kind.__qualname__}"
    return kind if isinstance(kind, str) else None


def frames_of(node: Node) -> tuple[tuple[str, int], ...]:
    """The user frames ``(file, line)`` of a node, outermost first; torch's own left out."""
    text = node.meta.get("stack_trace")
    return _frames(text) if isinstance(text, str) else ()


# Layers share their code, and so their stack traces: the caches are what keeps this cheap.
@functools.lru_cache(maxsize=8192)
def _frames(text: str) -> tuple[tuple[str, int], ...]:
    found = [(m["file"], int(m["line"])) for m in _FRAME.finditer(text)]
    return tuple((f, n) for f, n in found if not f.startswith((_TORCH, "<")))


def source_of(node: Node) -> str | None:
    """``file:line`` of the model code that made the node.

    The innermost frame in the file that defines the node's layer; failing that, the innermost
    frame that is neither torch's nor fusion's; None where there is no trace.
    """
    text = node.meta.get("stack_trace")
    return _source(text, module_class_of(node)) if isinstance(text, str) else None


@functools.lru_cache(maxsize=8192)
def _source(text: str, module_class: str | None) -> str | None:
    frames = _frames(text)
    if not frames:
        return None
    home = _module_file(module_class)
    if home is not None:
        for file, line in reversed(frames):
            if os.path.abspath(file) == home:
                return f"{short_path(file)}:{line}"
    outside = [f for f in frames if not f[0].startswith(_OURS)]
    file, line = (outside or frames)[-1]
    return f"{short_path(file)}:{line}"


def _module_file(qualified: str | None) -> str | None:
    name = qualified
    while name:
        name = name.rpartition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None) if name else None
        if isinstance(file, str):
            path = os.path.abspath(file)
            return None if path.startswith(_TORCH) else path
    return None


def short_path(path: str) -> str:
    """A path that means the same on another machine: below site-packages or the work folder."""
    short = _shortened(path)
    remember(short, path)
    return short


def _shortened(path: str) -> str:
    for marker in ("site-packages", "dist-packages"):
        _, found, tail = path.rpartition(f"{os.sep}{marker}{os.sep}")
        if found:
            return tail
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # another drive, or the work folder is gone
        return path
    return path if relative.startswith(os.pardir) else relative


def target_text(op: str, target: object) -> str:
    """An operator as text: ``aten.mul.Tensor``, ``getitem``, ``placeholder``."""
    if op != "call_function":
        return op if op in ("placeholder", "output") else f"{op} {target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def describe(nodes: Iterable[Node], fact: str | None = None) -> tuple[dict[str, Any], ...]:
    """Nodes as the report lists them: name, target, the fact they belong to, source line."""
    return tuple(
        {
            "name": n.name,
            "target": target_text(n.op, n.target),
            "fact": fact,
            "source": source_of(n),
        }
        for n in nodes
    )
