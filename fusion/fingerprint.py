"""What a compile cache must tell apart: sources of the package, environment switches."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import types
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
    if not file or name.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    folder = Path(file).parent
    packaged = bool(getattr(module, "__package__", None))
    return hash_files(sorted(folder.glob("*.py")) if packaged else [Path(file)], folder)


def function_source(function: Any) -> str:
    """A hash over where a function (a kernel, a decomposition) is defined.

    Its module's files, or its code where there are none (a notebook, ``exec``).
    """
    while True:
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    found = module_source(getattr(function, "__module__", None) or "")
    code = getattr(function, "__code__", None)
    if found or not isinstance(code, types.CodeType):
        return found
    name = str(getattr(function, "__module__", "")).partition(".")[0]
    return "" if name == __name__.partition(".")[0] else digest_of(_code(code))


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
