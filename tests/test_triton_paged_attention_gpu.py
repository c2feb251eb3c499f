"""Paged attention on a real GPU: native fp8, matrix units, graph replay, large caches."""

from __future__ import annotations

import pytest
import torch

from fusion.backends.triton import paged_attention as module
from fusion.backends.triton.paged_attention import paged_attention
from tests.attention_probe import LAYOUTS, Problem, assert_non_causal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FN8 = torch.float8_e4m3fn

PROBLEMS = {
    "draft": Problem((8, 8, 3), (500, 77, 9), 8, 2, 128, query_dtype=BF16),
    "draft f16": Problem((8, 8, 3), (500, 77, 9), 8, 2, 128, query_dtype=F16, layout="PACKED"),
    "draft f32": Problem((8, 8, 3), (500, 77, 9), 8, 2, 128, layout="HND"),
    "verify": Problem((8, 2, 5), (500, 77, 9), 8, 2, 128, query_dtype=BF16, causal=True),
    "decode": Problem((1, 1, 1), (3000, 77, 1), 8, 2, 128, query_dtype=BF16, causal=True),
    "64 rows": Problem((8, 8), (600, 300), 16, 2, 128, query_dtype=BF16),
    "128 rows": Problem((16, 16), (600, 300), 16, 2, 128, query_dtype=BF16),
    "256 rows": Problem((16, 16), (600, 300), 32, 2, 128, query_dtype=BF16),
    "prefill": Problem((300, 40), (300, 200), 8, 2, 128, query_dtype=BF16, causal=True),
    "window": Problem((7, 4), (900, 300), 8, 2, 128, query_dtype=BF16, window_left=100),
    "window both": Problem((7, 4), (900, 300), 8, 2, 64, query_dtype=BF16, window_left=100,
                           window_right=2),
    "causal window": Problem((7, 4), (900, 300), 8, 2, 64, query_dtype=BF16, causal=True,
                             window_left=17, sinks=True),
    "softcap sinks": Problem((7, 4), (900, 300), 8, 2, 64, query_dtype=BF16, softcap=20.0,
                             sinks=True),
    "few keys": Problem((9, 5, 0), (4, 0, 3), 8, 2, 64, query_dtype=BF16, causal=True,
                        rows_before=2, rows_after=3),
    "fp8": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, cache_dtype=FN8, k_scale=0.25,
                   v_scale=3.0),
    "fp8 128 rows": Problem((16, 16), (600, 300), 16, 2, 128, query_dtype=BF16, cache_dtype=FN8,
                            k_scale=-0.25, v_scale=3.0),
    "fnuz": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=F16,
                    cache_dtype=torch.float8_e4m3fnuz, k_scale=2.0),
    "mixed": Problem((8, 3), (200, 77), 8, 2, 64, query_dtype=F16, cache_dtype=BF16),
    "page 1": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, page=1),
    "page 48": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, page=48, layout="PADDED"),
    "page 256": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, page=256),
    "page 1000": Problem((8, 3), (2500, 77), 8, 2, 128, query_dtype=BF16, page=1000),
    "shuffled": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, layout="SHUFFLE"),
    "shuffled fp8": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, layout="SHUFFLE",
                            cache_dtype=FN8, page=64),
    "dim 32": Problem((8, 3), (500, 77), 8, 2, 32, query_dtype=BF16),
    "dim 96, 80": Problem((8, 3), (500, 77), 6, 2, 96, 80, query_dtype=BF16),
    "dim 192, 128": Problem((8, 3), (500, 77), 8, 2, 192, 128, query_dtype=BF16),
    "dim 256": Problem((16, 3), (500, 77), 8, 1, 256, query_dtype=BF16),
    "dim 512": Problem((8, 3), (500, 77), 8, 2, 512, query_dtype=BF16),
    "strided query": Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, query_strided=True,
                             index_dtype=torch.int64, scale=-0.1),
    **{layout: Problem((5, 3), (200, 77), 8, 2, 64, query_dtype=BF16, layout=layout)
       for layout in LAYOUTS},
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_oracle(name: str) -> None:
    problem = PROBLEMS[name]
    problem.device = "cuda"
    problem.check(paged_attention, 2e-2 if problem.query_dtype == BF16 else None)


def test_is_really_non_causal() -> None:
    assert_non_causal(paged_attention, device="cuda", dtype=BF16)


def test_a_captured_graph_follows_lengths_and_tables() -> None:
    """Capture at 8 keys, replay at 40 with another table, 2000 with a third."""
    pool = torch.randn(400, 16, 2, 256, device="cuda", dtype=BF16)
    key, value = pool[..., :128], pool[..., 128:]
    query = torch.randn(16, 8, 128, device="cuda", dtype=BF16)
    table = torch.zeros(2, 130, dtype=torch.int32, device="cuda")
    lens = torch.tensor([8, 8], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 8, 16], dtype=torch.int32, device="cuda")
    for max_len in (8, 2048):  # one split, many splits
        call = (query, key, value, table, lens, starts, 8, max_len, 0.1, False)
        lens.fill_(8)
        table.zero_()
        paged_attention(*call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = paged_attention(*call)
        for first, second in ((40, 33), (2000, 1), (8, 0)):
            lens.copy_(torch.tensor([first, second]))
            table.copy_(torch.randint(0, 400, table.shape))
            out.fill_(float("nan"))
            graph.replay()
            for b, n in enumerate((first, second)):
                slots = table[b].long()
                k = key[slots].flatten(0, 1)[:n].float().repeat_interleave(4, 1)
                v = value[slots].flatten(0, 1)[:n].float().repeat_interleave(4, 1)
                q = query[8 * b : 8 * b + 8].float()
                p = torch.einsum("ihd,jhd->hij", q, k).mul(0.1).softmax(-1)
                want = torch.einsum("hij,jhd->ihd", p, v)
                torch.testing.assert_close(
                    out[8 * b : 8 * b + 8].float(), want, rtol=2e-2, atol=2e-2
                )


@pytest.mark.parametrize("splits", [1, 7])
def test_same_bits_each_time(splits: int) -> None:
    problem = Problem((8, 3, 1), (2000, 77, 900), 8, 2, 128, query_dtype=BF16, device="cuda")
    positional, keywords = problem.arguments()
    positional[7] = 16 if splits == 1 else 2000
    runs = [paged_attention(*positional, **keywords) for _ in range(20)]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_blocks_past_two_to_the_31_elements() -> None:
    page, heads, dim = 16, 8, 128
    blocks = (1 << 31) // (page * heads * dim) + 64
    if torch.cuda.mem_get_info()[0] < 3 * blocks * page * heads * dim * 2:
        pytest.skip("needs 13 GB of free device memory")
    key = torch.empty(blocks, page, heads, dim, device="cuda", dtype=BF16)
    value = torch.empty_like(key)
    key[-4:].normal_()
    value[-4:].normal_()
    table = torch.arange(blocks - 4, blocks, device="cuda", dtype=torch.int32)[None]
    query = torch.randn(2, 8, dim, device="cuda", dtype=BF16)
    rest = (torch.tensor([64], device="cuda"), torch.tensor([0, 2], device="cuda"), 2, 64, 0.1)
    out = paged_attention(query, key, value, table, *rest, False)
    near = paged_attention(
        query, key[-4:].clone(), value[-4:].clone(), table - (blocks - 4), *rest, False
    )
    assert torch.equal(out, near)


def test_no_host_synchronisation() -> None:
    problem = Problem((8, 3), (500, 77), 8, 2, 128, query_dtype=BF16, device="cuda")
    positional, keywords = problem.arguments()
    paged_attention(*positional, **keywords)
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_attention(*positional, **keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_larger_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 30)
    problem = Problem((4,) * 20, (70,) * 20, 8, 2, 64, query_dtype=BF16, device="cuda")
    problem.check(paged_attention)
