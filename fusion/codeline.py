"""The lines of model code that a report points to."""

from __future__ import annotations

import linecache
import os
import sys


def code_line(source: str) -> str | None:
    """The text of ``file:line``, looked for in the work folder and on the import path.

    None where there is no such file or line here (a report may come from another machine).
    """
    file, colon, number = source.rpartition(":")
    if not colon or not number.isdigit():
        return None
    for folder in ("", *sys.path):
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            return linecache.getline(path, int(number)).strip() or None
    return None
