"""Random programs through the compiler: a fast profile of ``python -m tests.fuzz``.

``FUZZ_EXAMPLES`` sets the number of programs. The default is derandomised: the same programs in
every run, so that a red run means a change of the code.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from fusion.passes.prologue import chain
from tests.fuzz.draw import draw_program
from tests.fuzz.program import Layer, Program
from tests.fuzz.run import SkipProgram, run_program

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "14"))

programs = st.composite(
    lambda draw: draw_program(lambda _, options: draw(st.sampled_from(options)))
)()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 50,
    suppress_health_check=list(HealthCheck),
)
@given(programs)
def test_eager_and_fused_agree(program):
    note(program.source())
    try:
        result = run_program(program)
    except SkipProgram:
        assume(False)
    assert result.finding is None, f"{result.finding}: {result.detail}\n{program.source()}"


def test_the_simplest_program_fuses():
    """The fuzzer compares something: its plain program is fused, in every write and layout."""
    for write, cache in (("op", "packed"), ("index", "nhd"), ("block_offset", "hnd")):
        result = run_program(Program((Layer(write=write, cache=cache),)))
        assert result.finding is None, result.detail
        assert [s[0] for s in result.statuses] == ["fused"]


def test_a_wrong_bit_is_a_finding(monkeypatch):
    """A recogniser that misreads the eps of k is seen, by the check and without it."""
    honest = chain.with_norms

    def misread(found):
        found = honest(found)
        return replace(found, k_norm=replace(found.k_norm, eps=0.01))

    monkeypatch.setattr(chain, "with_norms", misread)
    assert run_program(Program()).finding == "match.validation"
    blind = run_program(Program(validate=False))
    assert blind.finding == "wrong bits"
    assert "buffer key0" in blind.detail or "output" in blind.detail
