"""Paged attention under Triton's interpreter; run by ``test_triton_paged_attention.py`` in a
process of its own (TRITON_INTERPRET must be set before triton is imported)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.backends.triton import paged_attention as module
from fusion.backends.triton.paged_attention import paged_attention
from fusion.backends.triton.paged_attention_tiles import Tiles
from fusion.backends.triton.sizes import next_power_of_2
from tests.attention_probe import LAYOUTS, Problem, assert_non_causal, sees_keys

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_paged_attention.py"

FN8, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@st.composite
def problems(draw: st.DrawFn, longest: int = 90) -> Problem:
    """The whole argument space, in small."""
    batch = draw(st.integers(1, 3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 4), (1, 8), (3, 2)]))
    cache = draw(st.sampled_from([None, None, torch.bfloat16, torch.float16, FN8, FNUZ]))
    query = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scaled = cache in (FN8, FNUZ) and draw(st.booleans())
    layout = draw(st.sampled_from([*LAYOUTS, "SHUFFLE"]))
    dim = draw(st.sampled_from([32, 48, 64, 80]))
    dim_v = draw(st.sampled_from([None, None, 32, 96]))
    page = draw(st.sampled_from([1, 3, 8, 16, 24, 64, 128]))
    if layout in ("KV_FIRST", "BLOCK_FIRST"):
        dim_v = None
    if layout == "SHUFFLE":
        page = draw(st.sampled_from([16, 32, 64]))
    return Problem(
        q_lens=tuple(draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))),
        kv_lens=tuple(draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        dim_v=dim_v,
        page=page,
        layout=layout,
        query_dtype=query,
        cache_dtype=cache,
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 5, 17, 1 << 40])),
        window_right=draw(st.sampled_from([-1, -1, 0, 4, 1 << 40])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        k_scale=draw(st.sampled_from([0.25, 2.0])) if scaled else None,
        v_scale=draw(st.sampled_from([3.0, 0.5])) if scaled else None,
        rows_before=draw(st.sampled_from([0, 0, 2])),
        rows_after=draw(st.sampled_from([0, 0, 3])),
        query_strided=draw(st.booleans()),
        max_seq_len=draw(st.sampled_from([None, None, 1, 4096])),
        seed=draw(st.integers(0, 1 << 16)),
    )


@given(problems())
@settings(max_examples=35)
def test_equals_the_oracle(problem: Problem) -> None:
    problem.check(paged_attention)


@pytest.mark.slow
@given(problems(longest=700))
@settings(max_examples=600, derandomize=False, deadline=None)
def test_equals_the_oracle_deep(problem: Problem) -> None:
    problem.check(paged_attention)


@given(problems(), st.sampled_from([16, 32]), st.sampled_from([16, 32, 64]), st.integers(1, 7))
@settings(max_examples=18)
def test_any_geometry_gives_the_same(problem: Problem, rows: int, keys: int, splits: int) -> None:
    blocks = -(-max([*problem.q_lens, 1]) * problem.q_heads // problem.kv_heads // rows)
    dims = [next_power_of_2(n) for n in (problem.dim, problem.dim_v or problem.dim)]
    geometry = Tiles(rows, keys, 4, 2, splits, blocks + 1, *dims)
    problem.check(lambda *a, **k: paged_attention(*a, geometry=geometry, **k))


def test_edges_of_the_tiles_without_mask() -> None:
    """Every alignment of the causal and window edges to tiles of 16 keys."""
    geometry = Tiles(16, 16, 4, 2, 1, 1, 32, 32)
    for edges in ({"causal": True}, {"window_left": 20}, {"window_right": 2, "window_left": 17}):
        for start in range(0, 17, 4):
            lengths = tuple(range(40 + start, 44 + start))
            problem = Problem((3,) * 4, lengths, 2, 1, **edges)
            problem.check(lambda *a, **k: paged_attention(*a, geometry=geometry, **k))


@pytest.mark.parametrize("causal", [False, True])
def test_batches_larger_than_a_grid_are_launched_in_parts(causal, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 5)
    problem = Problem((3, 0, 2, 1, 4), (20, 9, 2, 33, 70), causal=causal, rows_after=2)
    problem.check(paged_attention)


def test_is_really_non_causal() -> None:
    assert_non_causal(paged_attention)
    for splits in (2, 5):
        geometry = Tiles(16, 16, 4, 2, splits, 1, 64, 64)
        assert_non_causal(lambda *a, g=geometry, **k: paged_attention(*a, geometry=g, **k))


def test_causality_and_windows_are_anchored_at_the_end() -> None:
    assert sees_keys(paged_attention, causal=True) == [list(range(9)), list(range(10))]
    left = sees_keys(paged_attention, window_left=3)
    assert left == [list(range(5, 10)), list(range(6, 10))]
    both = sees_keys(paged_attention, window_left=3, window_right=0)
    assert both == [list(range(5, 9)), list(range(6, 10))]
    # fewer keys than queries: the first rows stand before key 0
    assert sees_keys(paged_attention, 4, 2, causal=True) == [[], [], [0], [0, 1]]
    assert sees_keys(paged_attention, 4, 2) == [[0, 1]] * 4


def test_no_tokens_and_no_requests() -> None:
    Problem((0, 0), (5, 0)).check(paged_attention)
    positional, keywords = Problem((2,), (4,)).arguments()
    positional[3:6] = [positional[3][:0], positional[4][:0], positional[5][:1]]
    assert not paged_attention(*positional, **keywords).any()


def test_strided_lengths_tables_and_sinks() -> None:
    problem = Problem((3, 2), (40, 21), sinks=True, page=4)
    positional, keywords = problem.arguments()
    for i in (4, 5, 13):
        positional[i] = torch.stack([positional[i], positional[i] * 0 - 1], 1)[:, 0]
    positional[3] = positional[3].t().contiguous().t()
    out = paged_attention(*positional, **keywords)
    torch.testing.assert_close(out.double(), problem.oracle(), rtol=1e-5, atol=1e-5)


def test_lengths_and_tables_are_read_on_the_device() -> None:
    """What a captured graph does: host numbers of the first call, contents of the second."""
    small = Problem((2, 2), (8, 8), seed=1, max_seq_len=8)
    large = Problem((2, 2), (40, 33), seed=2, max_seq_len=8, page=16)
    small.check(paged_attention)
    large.check(paged_attention)


def test_same_bits_each_time() -> None:
    geometry = Tiles(16, 16, 4, 2, 3, 1, 32, 32)
    problem = Problem((4, 3), (90, 57), query_dtype=torch.bfloat16, softcap=5.0)
    positional, keywords = problem.arguments()
    runs = [paged_attention(*positional, geometry=geometry, **keywords) for _ in range(3)]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_all_fp8_codes_are_decoded_exactly() -> None:
    """Attention over one key returns its value: all 256 bytes pass through."""
    for dtype in (FN8, FNUZ):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        value = codes.view(1, 1, 8, 32).expand(1, 16, 8, 32).contiguous()
        key = torch.zeros(1, 16, 8, 32).to(dtype)
        out = paged_attention(
            torch.zeros(1, 8, 32), key, value, torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([1]), torch.tensor([0, 1]), 1, 1, 1.0, False,
        )  # fmt: skip
        torch.testing.assert_close(out.flatten(), codes.float(), rtol=0, atol=0, equal_nan=True)
