"""``python -m tests.planted [WORD ...]``: plant faults (those whose name has a WORD) and report."""

from __future__ import annotations

import sys

from tests.planted.faults import FAULTS
from tests.planted.run import find


def main(words: list[str]) -> int:
    """One line a fault; 1 if one was not found in time."""
    chosen = [f for f in FAULTS if not words or any(w in f.name or w in f.path for w in words)]
    missed = 0
    print("| fault | place | found by | s | CPU s |\n| --- | --- | --- | --- | --- |")
    for fault in chosen:
        try:
            finding = find(fault)
        except RuntimeError as error:  # the tree itself is broken: nothing can be said
            missed += 1
            print(f"| {fault.name} | {fault.path} | {str(error).splitlines()[0]} | | |", flush=True)
            continue
        missed += not finding.ok
        where = "NOT FOUND" if finding.test is None else finding.test
        print(
            f"| {fault.name} | {fault.path} | {where} | {finding.seconds:.0f} "
            f"| {finding.cpu_seconds:.0f} |",
            flush=True,
        )
    print(f"{len(chosen) - missed} of {len(chosen)} found", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
