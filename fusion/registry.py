"""What was compiled in this process: one entry for each compiled graph, thread-safe.

An entry belongs to one Dynamo compile. When Dynamo restarts its analysis and compiles the frame
again, the new attempt replaces the old one; a recompile (another guard set) is an entry of its
own. Entries hold plain data and weak references only.
"""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion.report import GraphReport, Report, Site


@dataclass
class Entry:
    """One compiled graph; ``graphs`` holds what the pipeline said (nested graphs included).

    ``roots`` are the lines (file, number) of the compiled function that its nodes stem from.
    """

    id: str
    compile_context: Any = None
    attempt: int = 0
    header: Report = field(default_factory=Report)
    graphs: list[GraphReport] = field(default_factory=list)
    cached: bool = False
    tensors: list[weakref.ref[torch.Tensor]] = field(default_factory=list, repr=False)
    roots: frozenset[tuple[str, int]] = frozenset()
    seconds: float = 0.0

    def graph(self) -> GraphReport:
        """The parts as one graph report."""
        sites: tuple[Site, ...] = tuple(s for g in self.graphs for s in g.sites)
        times: dict[str, float] = {}
        for g in self.graphs:
            for name, seconds in g.times.items():
                times[name] = times.get(name, 0.0) + seconds
        phases = [g.phase for g in self.graphs]
        return GraphReport(
            self.id,
            sites,
            self.cached,
            phases[0] if phases else "",
            tuple(r for g in self.graphs for r in g.reasons),
            times,
            (sum(g.nodes[0] for g in self.graphs), sum(g.nodes[1] for g in self.graphs)),
        )

    def report(self) -> Report:
        """A report with this one graph."""
        times = {
            "compile": self.seconds,
            "fusion": sum(g.times.get("total", 0.0) for g in self.graphs),
        }
        return replace(self.header, graphs=(self.graph(),), times=times)

    def mentions(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of the tensors is an input of the compiled graph (by identity)."""
        mine = {id(t) for ref in self.tensors if (t := ref()) is not None}
        return any(id(t) in mine for t in tensors)

    def belongs_to(self, code: types.CodeType) -> bool:
        """Whether the traced lines stand in this function's code (file and line range)."""
        lines = [line for _, _, line in code.co_lines() if line is not None]
        first, last = code.co_firstlineno, max(lines, default=code.co_firstlineno)
        return any(f == code.co_filename and first <= line <= last for f, line in self.roots)


class Registry:
    """The entries of a process, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._direct = itertools.count()

    def begin(self, context: Any, header: Report, inputs: Sequence[Any]) -> Entry:
        """An entry for a compile that starts; it counts only once :meth:`commit` was called."""
        compile_id = getattr(context, "compile_id", None)
        name = str(compile_id) if compile_id is not None else f"direct/{next(self._direct)}"
        return Entry(
            name,
            None if context is None else weakref.ref(context),
            getattr(context, "attempt", 0),
            header,
            tensors=[weakref.ref(t) for t in inputs if isinstance(t, torch.Tensor)],
        )

    def commit(self, entry: Entry) -> None:
        """The compile succeeded: list the entry, in place of an earlier attempt of the same."""
        context = None if entry.compile_context is None else entry.compile_context()
        with self._lock:
            if context is not None:
                self._entries = [
                    e
                    for e in self._entries
                    if e.compile_context is None
                    or e.compile_context() is not context
                    or e.attempt >= entry.attempt
                ]
            taken = {e.id for e in self._entries}
            base, number = entry.id, 2
            while entry.id in taken:  # Dynamo counts from 0 again after a reset
                entry.id, number = f"{base}#{number}", number + 1
            self._entries.append(entry)

    def entries(self) -> list[Entry]:
        """A copy of the list."""
        with self._lock:
            return list(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


REGISTRY = Registry()


def reports(*, clear: bool = False) -> list[Report]:
    """What was compiled with fusion in this process: one report for each compiled graph.

    In the order of compilation; a compile that came from a cache is listed with
    ``cached=True`` and the sites of the compile that filled the cache. ``Report.merge`` makes
    one report of several. ``clear=True`` forgets them afterwards.
    """
    found = [e.report() for e in REGISTRY.entries()]
    if clear:
        REGISTRY.clear()
    return found
