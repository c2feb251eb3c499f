"""Paged attention on Triton: interpreter runs, selection rule, gate, and the causality probe."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from fusion.backends.reference.attention import paged_attention as reference
from fusion.backends.triton import paged_attention as module
from fusion.backends.triton import paged_attention_tiles as tiles
from fusion.kernel import KernelCall, TensorSpec
from fusion.target import Target
from tests.attention_probe import Problem, assert_non_causal, sees_keys

HERE = pathlib.Path(__file__).parent
H200 = Target.parse("sm_90", triton="3.6.0")
BF16 = torch.bfloat16


def interpreted(markers: str) -> None:
    """Run tests/attention_interpreted.py where triton is not imported yet."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / "attention_interpreted.py"), "-m", markers,
         "-p", "no:cacheprovider", "-x"],
        env=env, cwd=HERE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_interpreted() -> None:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    interpreted("not slow")


@pytest.mark.slow
def test_interpreted_deep() -> None:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    interpreted("slow")


# --- the probe itself ---------------------------------------------------------------------------


def test_the_reference_is_non_causal() -> None:
    assert_non_causal(reference)
    assert sees_keys(reference, causal=True) == [list(range(9)), list(range(10))]


def test_a_stand_in_that_masks_causally_is_caught() -> None:
    def stand_in(*args: Any, **keywords: Any) -> torch.Tensor:
        return reference(*args[:9], True, *args[10:], **keywords)

    with pytest.raises(AssertionError, match="2 queries and 10 keys"):
        assert_non_causal(stand_in)


def test_a_window_that_turns_causal_is_caught() -> None:
    """vLLM's (w-1, 0) with causal=False: the right edge makes it causal."""

    def stand_in(*args: Any, **keywords: Any) -> torch.Tensor:
        return reference(*args[:10], args[10], 0, *args[12:], **keywords)

    with pytest.raises(AssertionError, match="the rows see"):
        assert_non_causal(stand_in)


def test_the_oracle_agrees_with_the_reference_and_sees_poison() -> None:
    problem = Problem((4, 0, 3), (20, 9, 2), window_left=6, softcap=3.0, sinks=True, rows_after=2)
    problem.check(reference)

    def reads_past_the_end(*args: Any, **keywords: Any) -> torch.Tensor:
        table = args[3].clamp(0, len(args[1]) - 1)
        more = (table, args[4] + 1, *args[5:7], args[7] + 1)
        return reference(*args[:3], *more, *args[8:], **keywords)

    with pytest.raises(AssertionError):
        Problem((4,), (20,)).check(reads_past_the_end)


# --- selection rule -----------------------------------------------------------------------------


def rule(batch=1, heads=8, group=4, dim=128, rows=8, keys=8192, **change: Any) -> tiles.Tiles:
    arguments: dict[str, Any] = {
        "batch": batch, "kv_heads": heads, "group": group, "head_dim": dim, "value_dim": dim,
        "max_query_len": rows, "max_seq_len": keys, "itemsize": 2, "wide": False, "target": H200,
    }  # fmt: skip
    return tiles.choose(**{**arguments, **change})


def test_all_rows_of_a_kv_head_are_in_one_block_when_the_grid_is_full() -> None:
    for rows, group in ((1, 4), (8, 4), (16, 8), (16, 16)):
        geo = rule(batch=128, group=group, rows=rows)
        assert geo.row_blocks == 1
        assert geo.rows >= rows * group
        assert geo.splits == 1


def test_where_keys_are_split_128_rows_are_two_blocks_that_share_a_multiprocessor() -> None:
    """Measured on an H200: 3 to 6 % faster than one large block; 5 to 12 % slower unsplit."""
    for batch, blocks in ((8, 2), (32, 2), (128, 1)):
        geo = rule(batch, heads=1, group=8, rows=16, keys=32768)
        assert geo.row_blocks == blocks
        assert (geo.splits > 1) == (blocks > 1)
        assert geo.keys == 64
    assert rule(8, heads=4, group=16, rows=16, keys=32768).row_blocks == 1  # long, 256 rows
    assert rule(8, heads=4, group=16, rows=16, keys=1024).row_blocks == 4


def test_more_rows_ask_for_more_keys_in_a_split_and_few_keys_for_smaller_tiles() -> None:
    assert rule(keys=32768, rows=8).splits == 32  # 32 rows: 1024 keys a split are enough
    assert rule(keys=32768, rows=16).splits == 16  # 64 rows: a partial result is twice as large
    assert rule(8, keys=8192, rows=16).splits == 4
    assert [rule(batch, keys=1024).keys for batch in (16, 17, 32, 33)] == [64, 32, 32, 64]
    assert rule(32, keys=8192).keys == 64
    assert rule(32, keys=1024, target=Target.parse("gfx942")).keys == 64
    # A larger block fills a multiprocessor by itself: the programs do not start together.
    for rows, group in ((16, 8), (16, 16)):
        assert rule(17, group=group, rows=rows, keys=1024).keys == 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_long_runs_of_many_rows_are_not_cut_into_small_blocks(arch: str) -> None:
    """Each block reads K and V again."""
    target = Target.parse(arch)
    largest = 256 if arch == "sm_90" else 128
    for rows in (64, 512):
        geo = rule(heads=1, group=16, rows=rows, keys=131072, target=target)
        assert geo.rows == largest


def test_a_small_batch_is_split_and_a_short_one_is_not_split_to_dust() -> None:
    assert rule().splits == 16
    assert rule(keys=32768).splits == 32
    assert rule(keys=64).splits == 1
    assert rule(heads=1, keys=32768).splits == 128
    assert rule(heads=1, keys=1 << 22).splits <= tiles.MAX_SPLITS


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx950", "cpu"])
@pytest.mark.parametrize("dim", [16, 32, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("wide", [False, True])
def test_tiles_are_legal_everywhere(arch: str, dim: int, wide: bool) -> None:
    target = Target.parse(arch)
    for group in (1, 3, 4, 16):
        for rows in (0, 1, 8, 300):
            geo = rule(3, 2, group, dim, rows, wide=wide, itemsize=4 if wide else 2, target=target)
            assert geo.rows * geo.row_blocks >= rows * group
            assert geo.row_blocks * geo.splits >= 1
            assert geo.block_d >= dim
            for size in (geo.rows, geo.keys, geo.warps):
                assert size & (size - 1) == 0
            assert geo.rows >= 16
            assert geo.keys >= 16


def test_the_grid_depends_on_host_numbers_only() -> None:
    """Nothing about the device but its name enters, so equal calls get equal geometry."""
    assert rule() == rule(target=Target.parse("sm_90"))


# --- gate ---------------------------------------------------------------------------------------


def call(problem: Problem, target: Target = H200, **change: Any) -> KernelCall:
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc",
             "max_query_len", "max_seq_len", "scale", "causal", "window_left", "window_right",
             "softcap", "sinks", "k_scale", "v_scale")  # fmt: skip
    positional, keywords = problem.arguments()
    values = {**dict(zip(names, positional, strict=True)), **change}
    on_gpu = {
        n: TensorSpec(**{**vars(TensorSpec.of(v)), "device": "cuda"})
        for n, v in values.items()
        if isinstance(v, torch.Tensor)
    }
    rest = {n: v for n, v in values.items() if n not in on_gpu}
    return KernelCall("paged_attention", on_gpu, rest, target, kv_layout=keywords["kv_layout"])


def codes(*args: Any, **keywords: Any) -> set[str]:
    return {r.code for r in module.KERNEL.requires.unmet(call(*args, **keywords))}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(query_dtype=BF16, sinks=True, softcap=3.0, window_left=4),
        Problem(query_dtype=BF16, layout="SHUFFLE"),
        Problem(page=1, dim=80, dim_v=96),
        Problem(page=1000, dim=512, cache_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0),
    ],
    ids=str,
)
def test_accepts(problem: Problem) -> None:
    assert codes(problem) == set()
    assert codes(problem, Target.parse("gfx942", triton="3.6.0")) == set()


def test_refuses_with_a_reason_each() -> None:
    problem = Problem()
    assert codes(problem, Target.parse("cpu", triton="3.6.0")) == {"gate.arch"}
    assert codes(problem, Target.parse("sm_75", triton="3.6.0")) == {"gate.arch"}
    assert codes(problem, Target.parse("sm_90")) == {"gate.backend-unavailable"}
    assert codes(Problem(dim=8)) == {"gate.head-dim"}
    assert codes(Problem(query_dtype=torch.float64, cache_dtype=torch.float32)) == {"gate.dtype"}
    assert codes(problem, k_scale=torch.ones(3)) == {"gate.argument"}
    key = torch.zeros(4, 16, 2, 64)[..., ::2]
    assert codes(problem, key_cache=key) == {"gate.cache-stride"}


def test_the_report_names_the_tiles() -> None:
    text = module.KERNEL.describe(call(Problem(query_dtype=BF16, dim=128)))  # type: ignore[misc]
    assert "64 rows x 64 keys" in text["tiles"]
    assert text["launches"] == 1
