"""What a compile cache must tell apart: sources of the package, environment switches."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@functools.lru_cache(maxsize=1)
def package_sources() -> str:
    """A hash over every Python file of fusion (passes and backends included), once a process."""
    root = Path(__file__).resolve().parent
    folders = [root, *(p.resolve() for p in root.iterdir() if p.is_symlink() and p.is_dir())]
    found = {f for folder in folders for f in folder.rglob("*.py")}
    return hash_files(sorted(found), root.parent)


def hash_files(files: list[Path], root: Path) -> str:
    """A hash over names (relative to ``root``) and contents; unreadable files count as empty."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.path.relpath(file, root).encode())
        try:
            data = file.read_bytes()
        except OSError:
            data = b""
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def module_source(name: str) -> str:
    """A hash over the file of a module (a plug-in's pass or kernel), empty where there is none.

    A module of a package is hashed together with the files beside it, because a kernel's body
    often stands in a neighbouring file. Modules of fusion are in :func:`package_sources` already.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not file or _own(name):
        return ""
    folder = Path(file).parent
    packaged = bool(getattr(module, "__package__", None))
    return hash_files(sorted(folder.glob("*.py")) if packaged else [Path(file)], folder)


def function_source(function: Any) -> str:
    """A hash over what a function (a kernel, a decomposition) does; empty for built-in ones.

    Covers every layer of wrappers (``functools.partial``, ``functools.wraps``, methods, objects
    that are called): the files of its module (those of fusion are in :func:`package_sources`), or
    its code and the globals that it names where there is no file (a notebook, ``exec``); and what
    is bound to it: arguments of a partial, defaults, closure, attributes of the object. Of
    tensors only dtype and shape count.
    """
    parts = _layers(function, {})
    return digest_of(parts) if parts else ""


_MOST_LAYERS = 512
"""Objects looked at for one function: a chain may make new ones for ever."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))


def _layers(function: Any, seen: dict[int, Any]) -> list[object]:
    """What each layer says; ``seen`` (it keeps objects, so that no id comes twice) ends a loop."""
    if id(function) in seen or len(seen) >= _MOST_LAYERS:
        return []
    seen[id(function)] = function
    if isinstance(function, functools.partial):
        bound = [_value(v, seen) for v in (function.args, function.keywords)]
        return ["partial", *bound, *_layers(function.func, seen)]
    if isinstance(function, types.MethodType):
        return ["method", _value(function.__self__, seen), *_layers(function.__func__, seen)]
    if isinstance(function, types.FunctionType):
        return [*_function(function, seen), *_layers(_inner(function, "__wrapped__"), seen)]
    if isinstance(function, type):
        found = module_source(function.__module__)
        own = [] if found else [v for v in vars(function).values() if callable(v)]
        return [function.__qualname__, found, *(_layers(v, seen) for v in own)]
    call = _inner(type(function), "__call__")
    if not isinstance(call, types.FunctionType):
        # Built-in: it may still wrap something (``functools.lru_cache``).
        return _layers(_inner(function, "__wrapped__"), seen)
    state = _inner(function, "__dict__") or {}
    parts: list[object] = ["object", *_layers(type(function), seen)]
    parts += _layers(call, seen)
    if "__module__" in state:  # dressed as the function that it wraps; the rest is its own affair
        parts.append(module_source(str(state["__module__"])))
    else:
        parts.append(_value(state, seen))
    return parts + [x for n in ("func", "__wrapped__") for x in _layers(_inner(function, n), seen)]


def _function(function: types.FunctionType, seen: dict[int, Any]) -> list[object]:
    space = function.__globals__
    # `functools.wraps` gives a wrapper the module of what it wraps.
    modules = {str(function.__module__), str(space.get("__name__"))}
    found = sorted(filter(None, map(module_source, modules)))
    parts: list[object] = [function.__qualname__, *found]
    if not found and not any(_own(name) for name in modules):
        names = sorted(set(_names(function.__code__)) & space.keys())
        parts += [_code(function.__code__), *(_value(space[n], seen) for n in names)]
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(None)
    return [*parts, *(_value(v, seen) for v in (
        function.__defaults__, function.__kwdefaults__, cells
    ))]  # fmt: skip


def _value(value: Any, seen: dict[int, Any]) -> object:
    """What is known of a value that a function uses, equal in every process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in seen or len(seen) >= _MOST_LAYERS:
        return "again"
    if isinstance(value, (tuple, list, set, frozenset, Mapping)):
        seen[id(value)] = value
        items = value.items() if isinstance(value, Mapping) else value
        parts = [_value(item, seen) for item in items]
        ordered = isinstance(value, (tuple, list))
        return (type(value).__name__, parts if ordered else sorted(map(repr, parts)))
    if isinstance(value, types.ModuleType):
        return value.__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return (type(value).__name__, str(value.dtype), str(tuple(value.shape)))
    if callable(value):
        return _layers(value, seen)
    try:
        return repr(value)
    except Exception:
        return type(value).__qualname__


def _inner(function: Any, name: str) -> Any:
    try:
        return getattr(function, name, None)
    except Exception:  # a property of somebody else
        return None


def _own(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _code(code: types.CodeType) -> tuple[object, ...]:
    def plain(constant: object) -> object:
        if isinstance(constant, types.CodeType):
            return _code(constant)
        # The order of a set differs between processes.
        return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant

    return (code.co_code, code.co_names, list(map(plain, code.co_consts)))


def environment() -> tuple[tuple[str, str], ...]:
    """The switches that are set: ``FUSION_*``, and those of others that a gate looks at; sorted."""
    return tuple(
        sorted((k, v) for k, v in os.environ.items() if k.startswith("FUSION_") or k in _FOREIGN)
    )


_FOREIGN = ("TRITON_INTERPRET",)


def digest_of(parts: object) -> str:
    """A hash over the text of a value; addresses in it (``<function f at 0x..>``) are left out,
    since they differ between processes that are equal in every other way."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", repr(parts)).encode()).hexdigest()
