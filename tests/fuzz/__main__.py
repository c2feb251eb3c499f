"""``python -m tests.fuzz --minutes N --seed S --workers W``: fuzz until the time is over.

Each worker draws programs of its own (seeds S, S+1, ...). Prints the number of programs, distinct
graph structures, what became of the sites, and each finding with the program that shows it; the
exit status is 1 where there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.campaign import Tally, fuzz


def main() -> int:
    """Run the fuzzer; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--inductor", type=int, default=0, help="every n-th through Inductor")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as executor:
        runs = [
            executor.submit(
                fuzz, options.seed + i, options.minutes, options.inductor, not options.no_shrink
            )
            for i in range(options.workers)
        ]
        tally = sum((run.result() for run in runs), Tally())
    print("\n".join(tally.text()))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
