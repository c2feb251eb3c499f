"""The suite finds planted faults. Quick: every edit still fits. Slow: every fault is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted.faults import FAULTS, KINDS, Fault, StaleFaultError, apply, room_of
from tests.planted.run import LIMIT, ROOT, find


def _shadow(fault: Fault, folder: Path) -> Path:
    """A tree of one file."""
    file = folder / fault.path
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / fault.path).read_text())
    return file


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_edit_fits(fault: Fault, tmp_path: Path) -> None:
    file = _shadow(fault, tmp_path)
    before = file.read_text()
    apply(fault, tmp_path)
    assert file.read_text() != before
    compile(file.read_text(), fault.path, "exec")
    for name in room_of(fault.path):
        assert (ROOT / name).is_file()


def test_every_kind_is_planted() -> None:
    assert set(Counter(f.kind for f in FAULTS)) == set(KINDS)
    assert len({f.name for f in FAULTS}) == len(FAULTS)


def test_an_edit_that_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    fault = FAULTS[0]
    file = _shadow(fault, tmp_path)
    text = file.read_text()
    for stale in (text.replace(fault.edits[0][0], "pass"), text + fault.edits[0][0]):
        file.write_text(stale)
        with pytest.raises(StaleFaultError, match="not once"):
            apply(fault, tmp_path)
        assert file.read_text() == stale


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_suite_finds(fault: Fault) -> None:
    finding = find(fault)
    assert finding.test is not None, f"nobody noticed:\n{finding.output[-3000:]}"
    assert finding.cpu_seconds < LIMIT
