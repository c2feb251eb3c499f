"""Plant faults in copies of the tree and see whether ordinary tests find them, and how fast."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.planted.faults import Fault, apply, room_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0
"""Seconds of one core in which a fault has to be found."""
_LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "node_modules", "*.log"
)


@dataclass(frozen=True)
class Finding:
    """``test``: the first test that failed, None if none did; seconds until then."""

    fault: Fault
    test: str | None
    seconds: float
    cpu_seconds: float
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the fault was found in time. CPU time: other work here is no excuse."""
        return self.test is not None and self.cpu_seconds < LIMIT


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree (links kept, no caches, no environment), deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, symlinks=True, ignore=_LEFT_OUT)
        yield root


def _run(root: Path, *arguments: str) -> tuple[int, str]:
    """pytest in the copy; its exit status and output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider",
               "-p", "no:xdist", "-m", "not slow and not gpu and not rocm", *arguments]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=8 * LIMIT
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {8 * LIMIT} s"
    return done.returncode, done.stdout + done.stderr


def check_imports(root: Path) -> None:
    """The copy's own ``fusion`` must be the one that is tested."""
    code = "import fusion, fusion.backends; print(fusion.__file__, fusion.backends.__file__)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    for path in out.split():
        if root.resolve() not in Path(path).resolve().parents:
            raise RuntimeError(f"{path} was imported instead of the copy in {root}")


_healthy: set[str] = set()


def find(fault: Fault) -> Finding:
    """Plant one fault and run the tests of its room until one fails.

    A test counts only if it passes without the fault (tried once a process). Raises
    :class:`~tests.planted.faults.StaleFaultError`.
    """
    with copied() as root:
        check_imports(root)
        pristine = (root / fault.path).read_text()
        apply(fault, root)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        status, output = _run(root, *room_of(fault.path))
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        failed = re.findall(r"^FAILED (\S+?)(?: - .*)?$", output, re.MULTILINE)
        if status < 0:  # the process died: the test that ran is not named
            return Finding(fault, f"(killed by signal {-status})", seconds, cpu, output)
        if status != 1 or not failed:
            return Finding(fault, None, seconds, cpu, output)
        if failed[0] not in _healthy:
            (root / fault.path).write_text(pristine)
            status, healthy = _run(root, failed[0])
            if status != 0:
                raise RuntimeError(f"{failed[0]} fails without the fault, too:\n{healthy[-3000:]}")
            _healthy.add(failed[0])
        return Finding(fault, failed[0], seconds, cpu, output)
