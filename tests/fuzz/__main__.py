"""``python -m tests.fuzz --minutes N --seed S``: fuzz until the time is over.

Prints the number of programs, distinct graph structures, what became of the sites, and each
finding with the program that shows it; the exit status is 1 where there was one.
"""

from __future__ import annotations

import argparse
import collections
import random
import time
import warnings
from dataclasses import replace

import torch

from tests.fuzz.draw import random_program
from tests.fuzz.run import SkipProgram, run_program
from tests.fuzz.shrink import shrink


def main() -> int:
    """Run the fuzzer; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inductor", type=int, default=0, help="every n-th through Inductor")
    parser.add_argument("--no-shrink", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = random.Random(arguments.seed)
    deadline = time.monotonic() + 60 * arguments.minutes
    ran = skipped = 0
    structures: set[str] = set()
    sites: collections.Counter[tuple[str, ...]] = collections.Counter()
    clean: collections.Counter[tuple[str, ...]] = collections.Counter()
    skips: collections.Counter[str] = collections.Counter()
    findings: collections.Counter[str] = collections.Counter()
    with torch.no_grad():
        while time.monotonic() < deadline:
            program = random_program(rng)
            if arguments.inductor and ran % arguments.inductor == arguments.inductor - 1:
                program = replace(program, inner="inductor")
            try:
                result = run_program(program)
            except SkipProgram as why:
                skipped += 1
                skips[str(why)[:160]] += 1
                continue
            ran += 1
            structures.add(result.structure)
            odd = any(m.odd for m in program.layers)
            for status, operation, code in result.statuses:
                (sites if odd else clean)[(status, str(operation), code)] += 1
            if result.finding is None:
                continue
            findings[result.finding] += 1
            if findings[result.finding] > 12:
                continue
            if not arguments.no_shrink:
                program, result = shrink(program, result)
            print(f"\n=== {result.finding}: {result.detail}\n{program}\n{program.source()}")
            print(result.statuses, flush=True)
    print(
        f"{ran} programs ({skipped} that eager or torch.compile refuse), "
        f"{len(structures)} distinct graph structures, {sum(findings.values())} findings"
    )
    for title, counter in (("clean", clean), ("odd", sites), ("skips", skips)):
        print(f"{title}:")
        for what, count in counter.most_common(40):
            print(f"  {count:6d} {what}")
    print(dict(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
