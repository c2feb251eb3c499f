"""A stretch of fuzzing: random programs for a time, and what became of them."""

from __future__ import annotations

import collections
import random
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from tests.fuzz.draw import random_program
from tests.fuzz.run import SkipProgram, run_program
from tests.fuzz.shrink import shrink

_SHOWN = 12  # findings of one kind that are shrunk and printed

Count = collections.Counter[tuple[str, ...]]


@dataclass
class Tally:
    """What a worker saw."""

    ran: int = 0
    skipped: int = 0
    structures: set[str] = field(default_factory=set)
    clean: Count = field(default_factory=collections.Counter)
    odd: Count = field(default_factory=collections.Counter)
    skips: Count = field(default_factory=collections.Counter)
    findings: collections.Counter[str] = field(default_factory=collections.Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.ran + other.ran,
            self.skipped + other.skipped,
            self.structures | other.structures,
            self.clean + other.clean,
            self.odd + other.odd,
            self.skips + other.skips,
            self.findings + other.findings,
        )

    def text(self) -> Iterable[str]:
        """The summary, line by line."""
        yield (
            f"{self.ran} programs ({self.skipped} that eager or torch.compile refuse), "
            f"{len(self.structures)} distinct graph structures, "
            f"{sum(self.findings.values())} findings"
        )
        for title in ("clean", "odd", "skips"):
            yield f"{title}:"
            for what, count in getattr(self, title).most_common(40):
                yield f"  {count:6d} {what}"
        yield str(dict(self.findings))


def fuzz(seed: int, minutes: float, inductor: int, shrinking: bool) -> Tally:
    """Run random programs for a time; every ``inductor``-th (0: none) through Inductor."""
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    tally = Tally()
    with torch.no_grad():
        while time.monotonic() < deadline:
            program = random_program(rng)
            if inductor and tally.ran % inductor == inductor - 1:
                program = replace(program, inner="inductor")
            try:
                result = run_program(program)
            except SkipProgram as why:
                tally.skipped += 1
                tally.skips[(str(why)[:160],)] += 1
                continue
            tally.ran += 1
            tally.structures.add(result.structure)
            sites = tally.odd if any(m.odd for m in program.layers) else tally.clean
            for status, operation, code in result.statuses:
                sites[(status, str(operation), code)] += 1
            if result.finding is None:
                continue
            tally.findings[result.finding] += 1
            if tally.findings[result.finding] > _SHOWN:
                continue
            if shrinking:
                program, result = shrink(program, result)
            print(
                f"\n=== {result.finding} (seed {seed}): {result.detail}\n{program}\n"
                f"{program.source()}\n{result.statuses}",
                flush=True,
            )
    return tally
