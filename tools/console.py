"""What every command shares: consoles, exit statuses, and files that are not overwritten.

Data goes to stdout, talk to stderr. Nothing is coloured where the stream is no terminal, where
``NO_COLOR`` is set (to anything) or where ``TERM`` is ``dumb``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

OK, MISSED, FAILED = 0, 1, 2
"""Exit statuses: as expected; an expectation was missed; usage or internal error."""

_STYLES = (
    (r"(?m)^fusion \w+:.*$", "bold"),
    (r"\bfused\b", "green"),
    (r"\b(accepted|equal, bit by bit)\b", "green"),
    (r"\b(partial|off|left alone)\b", "yellow"),
    (r"\b(missed|refused|worse|NOT equal)\b", "red"),
    (r"\b(cache|config|gate|internal|match|plugin|profit|safety)\.[a-z0-9-]+\b", "cyan"),
    (r"(?m)^\s+(remedy|nearest change):", "bold"),
    (r"(?m)^\s+\|.*$", "dim"),
    (r"(?m)^\+.*$", "green"),
    (r"(?m)^-.*$", "red"),
    (r"(?m)^@@.*$", "cyan"),
)


class CommandError(Exception):
    """Something that the user can put right; shown as it is, exit status 2."""


_CHECKED = re.compile(r"[\w ]*[Vv]alidation error for (.*?):\s*\n\s*\w+: (.*)", re.DOTALL)
"""How a strict dataclass tells of a check: its subject and, on a line of its own, the complaint."""


def said_by(error: BaseException) -> str:
    """What an error of a library says, on one line and without the library's own framing.

    Checkers of configurations (pydantic, Hugging Face's strict dataclasses) wrap what is wrong in
    the name of the check; only the field and the complaint are of use to who wrote the value.
    """
    text = str(error).strip()
    listed = getattr(error, "errors", None)
    if callable(listed):
        with suppress(Exception):  # not pydantic's errors(): the text as it is
            told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in listed())
            text = told or text
    elif match := _CHECKED.match(text):
        subject, complaint = match.groups()
        field = subject.removeprefix("field ").strip("'\"")
        of_field = subject.startswith("field ") and field not in complaint
        text = f"{field}: {complaint}" if of_field else complaint
    elif not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.replace("Value error, ", "").split())


def _console(stream: Any) -> Console:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return Console(
        file=stream,
        color_system=None if plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def data(text: str) -> None:
    """Print what was asked for, to stdout, in the given lines (never wrapped)."""
    styled = Text(text.rstrip("\n"))
    console = _console(sys.stdout)
    if console.color_system is not None:
        for pattern, style in _STYLES:
            styled.highlight_regex(pattern, style)
    console.print(styled, soft_wrap=True)


def talk(text: str) -> None:
    """Say something about the work, to stderr."""
    _console(sys.stderr).print(Text(text), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with the time while something takes long; nothing where nobody watches."""
    console = _console(sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def check_output(path: str | None, overwrite: bool) -> None:
    """Refuse to write over a file, before any work is done (``-`` is stdout)."""
    if path is None or path == "-":
        return
    place = Path(path)
    if place.is_dir():
        raise CommandError(f"{path} is a folder; name a file")
    if place.exists() and not overwrite:
        raise CommandError(f"{path} exists; pass --overwrite to replace it")
    if not place.absolute().parent.is_dir():
        raise CommandError(f"the folder of {path} does not exist")


def write(path: str, text: str, overwrite: bool) -> None:
    """Write a file, or stdout for ``-``. Raises :class:`CommandError` where it cannot."""
    if path == "-":
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    check_output(path, overwrite)
    try:
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error


def columns() -> int:
    """How wide text that is laid out may be: as the terminal, 80 columns where there is none."""
    return min(max(shutil.get_terminal_size((80, 24)).columns - 1, 59), 159)


def packed(pieces: Sequence[str], first: str, rest: str, width: int) -> list[str]:
    """Pieces of text one after the other, as many as fit on a line of ``width``.

    A piece begins a new line before it is broken, and is broken between words only. ``first`` and
    ``rest`` stand before the first line and the ones that follow it.
    """
    lines, fresh = [first], True
    for piece in pieces:
        if not fresh and len(lines[-1]) + 1 + len(piece) > width:
            lines.append(rest)
            fresh = True
        for word in piece.split(" "):
            if not fresh and len(lines[-1]) + 1 + len(word) > width:
                lines.append(rest)
                fresh = True
            lines[-1] += word if fresh else f" {word}"
            fresh = False
    return lines


def table(rows: Sequence[Sequence[str]], indent: str = "  ", widest: int = 44) -> list[str]:
    """Columns as wide as their widest cell, cells over ``widest`` not counted; the last one is
    not padded."""
    if not rows:
        return []
    widths = [
        max((len(r[i]) for r in rows if len(r[i]) <= widest), default=0)
        for i in range(len(rows[0]) - 1)
    ]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*cells, row[-1]])).rstrip())
    return lines
