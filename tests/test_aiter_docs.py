"""docs/aiter.md says what the gate does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.backends.aiter import doc
from tests.aiter_cases import KERNELS

PAGE = Path(__file__).parent.parent / "docs" / "aiter.md"


def test_the_generated_part_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert doc.refresh(text) == text, "run: python -m fusion.backends.aiter.doc docs/aiter.md"


def test_the_examples_of_the_page_are_accepted_calls() -> None:
    for op, kernel in KERNELS.items():
        assert kernel.requires.unmet(doc.example(op)) == []


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="marks"):
        doc.refresh("# a page")
