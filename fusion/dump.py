"""``FUSION_DUMP=folder``: what each pass changed in each graph, for a reader with a text editor.

One folder a process (``<folder>/<rank or process id>``, so that ranks do not overwrite each
other), holding ``index.txt`` with one line a pass and, only where a pass changed something, a
unified diff of the graph's listing. Setting the variable is part of the compile-cache key, so
graphs that a cache would have answered are compiled and seen.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import threading
from pathlib import Path

from fusion.graph.snapshot import Snapshot
from fusion.pipeline import Observer, PassEvent

log = logging.getLogger("fusion")
VARIABLE = "FUSION_DUMP"
_serial = itertools.count()
_lock = threading.Lock()


def observer_from_environment() -> Observer | None:
    """The observer that ``FUSION_DUMP`` asks for, or None where it is not set."""
    folder = os.environ.get(VARIABLE, "").strip()
    return Dumper(Path(folder)) if folder else None


class Dumper:
    """Writes one diff a changed graph; a folder that cannot be written is a warning, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _process_name()
        self._failed = False

    def __call__(self, event: PassEvent) -> None:
        """See :class:`~fusion.pipeline.PassEvent`."""
        if self._failed:
            return
        try:
            self._write(event)
        except OSError as error:
            self._failed = True
            log.warning("fusion: %s cannot be written, nothing is dumped: %s", self.folder, error)

    def _write(self, event: PassEvent) -> None:
        counts: dict[str, int] = {}
        for site in event.sites:
            counts[site.status] = counts.get(site.status, 0) + 1
        said = ", ".join(f"{n} {status}" for status, n in counts.items()) or "no site"
        name = ""
        with _lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            if event.changed:
                name = f"{next(_serial):03d}-{event.pass_name}.diff"
                (self.folder / name).write_text(diff(event), encoding="utf-8")
            line = f"{event.phase}\t{event.pass_name}\t{said}\t{name or 'unchanged'}\n"
            with (self.folder / "index.txt").open("a", encoding="utf-8") as index:
                index.write(line)


def diff(event: PassEvent, context: int = 2) -> str:
    """A unified diff of the graph's listing before and after the pass."""
    before = list(event.before.listing().values())
    after = list(Snapshot(event.graph).listing().values())
    lines = difflib.unified_diff(
        before, after, "before", f"after {event.pass_name}", "", "", context, ""
    )
    return "\n".join(lines) + "\n"


def _process_name() -> str:
    rank = os.environ.get("RANK", "").strip()
    return f"rank{rank}-{os.getpid()}" if rank.isdigit() else f"pid{os.getpid()}"
