"""What a compile cache must tell apart: sources of the package, environment switches."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from pathlib import Path


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
    """A hash over the file of a module (a plug-in's pass or kernel), empty where there is none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return hash_files([Path(file)], Path(file).parent) if file else ""


def environment() -> tuple[tuple[str, str], ...]:
    """The ``FUSION_*`` switches that are set, sorted."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("FUSION_")))


def digest_of(parts: object) -> str:
    """A hash over the text of a value; addresses in it (``<function f at 0x..>``) are left out,
    since they differ between processes that are equal in every other way."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", repr(parts)).encode()).hexdigest()
