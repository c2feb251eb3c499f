"""The lines of model code that a report points to."""

from __future__ import annotations

import linecache
import os
import sys

_FILES: dict[str, set[str]] = {}
"""Whole paths of the files that graphs of this process named, by the name in their reports."""


def remember(name: str, path: str) -> None:
    """Which file a report means by ``name``: a relative name would mean another one elsewhere."""
    _FILES.setdefault(name, set()).add(os.path.abspath(path))


def code_line(source: str) -> str | None:
    """The text of ``file:line`` as it is now; of a file that this process never met, looked for in
    the work folder and on the import path.

    None where there is no such file or line here (a report may come from another machine), or where
    the name means two files.
    """
    file, colon, number = source.rpartition(":")
    if not colon or not number.isdigit():
        return None
    known = _FILES.get(file)
    paths = known or [os.path.abspath(os.path.join(folder, file)) for folder in ("", *sys.path)]
    found = [path for path in paths if os.path.isfile(path)]
    if not found or (known is not None and len(known) > 1):
        return None
    path = found[0]
    linecache.checkcache(path)
    return linecache.getline(path, int(number)).strip() or None
