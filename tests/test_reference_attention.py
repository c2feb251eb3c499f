"""The reference paged attention against a loop over rows and keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion.backends import reference
from fusion.layout import KVCacheLayout, empty_kv_cache, split_kv_cache


def oracle(
    query: Tensor, keys: list[Tensor], values: list[Tensor], seq_lens: list[int],
    starts: list[int], scale: float, causal: bool, left: int = -1, right: int = -1,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """keys[b], values[b]: [seq_len, Hk, D], dense. Loops; only visible keys are ever touched."""
    hq, dv = query.shape[1], values[0].shape[2]
    out = torch.zeros(query.shape[0], hq, dv, dtype=torch.float64)
    for b, seq_len in enumerate(seq_lens):
        q_len = starts[b + 1] - starts[b]
        for i in range(q_len):
            pos = i + seq_len - q_len
            seen = [
                j for j in range(seq_len)
                if (not causal or j <= pos)
                and (left < 0 or j >= pos - left)
                and (right < 0 or j <= pos + right)
            ]  # fmt: skip
            if not seen:
                continue
            for h in range(hq):
                kv = h // (hq // keys[b].shape[1])
                s = keys[b][seen, kv].double() @ query[starts[b] + i, h].double() * scale
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                extra = [] if sinks is None else [sinks[h].double().reshape(1)]
                p = torch.softmax(torch.cat([s, *extra]), 0)[: len(seen)]
                out[starts[b] + i, h] = (p[:, None] * values[b][seen, kv].double()).sum(0)
    return out.to(query.dtype)


class Case:
    """A poisoned cache, a shuffled table, NaN keys past each sequence, wild unused entries."""

    def __init__(
        self, q_lens: list[int], seq_lens: list[int], *, hq: int = 8, hk: int = 4, d: int = 16,
        dv: int = 8, block: int = 4, layout: KVCacheLayout = KVCacheLayout.PACKED,
        dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, extra: int = 3,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(sum(seq_lens) + 7 * sum(q_lens) + hq)
        cache_dtype = cache_dtype or dtype
        pages = [math.ceil(s / block) for s in seq_lens]
        total = sum(pages) + 2
        made = empty_kv_cache(layout, total, block, hk, d, dv, cache_dtype)
        for part in [made] if isinstance(made, Tensor) else made:
            part.fill_(float("nan"))
        self.kc, self.vc = split_kv_cache(made, layout, d, dv)
        self.layout = layout.op_layout
        ids = torch.randperm(total, generator=g).tolist()
        width = max([*pages, 0]) + 2
        self.table = torch.full((len(seq_lens), width), 10**6, dtype=torch.int32)
        self.table[:, 1::2] = -(10**6)
        self.keys, self.values = [], []
        for b, (s, count) in enumerate(zip(seq_lens, pages, strict=True)):
            mine = [ids.pop() for _ in range(count)]
            self.table[b, :count] = torch.tensor(mine, dtype=torch.int32)
            k = torch.randn(s, hk, d, generator=g).to(dtype)
            v = torch.randn(s, hk, dv, generator=g).to(dtype)
            slots = torch.tensor([mine[j // block] * block + j % block for j in range(s)])
            reference.kv_cache_write(
                k, v, self.kc, self.vc, slots.to(torch.int64), kv_layout=self.layout
            )
            self.keys.append(k.to(cache_dtype).to(dtype))
            self.values.append(v.to(cache_dtype).to(dtype))
        self.seq_lens = seq_lens
        self.starts = [1]  # row 0 belongs to nobody
        for q in q_lens:
            self.starts.append(self.starts[-1] + q)
        self.query = torch.randn(self.starts[-1] + extra, hq, d, generator=g).to(dtype)
        self.max_q, self.max_s = max([*q_lens, 0]), max([*seq_lens, 0])

    def run(self, scale: float = 0.3, causal: bool = False, more: int = 0, **kw: Any) -> Tensor:
        return reference.paged_attention(
            self.query, self.kc, self.vc, self.table,
            torch.tensor(self.seq_lens, dtype=torch.int32),
            torch.tensor(self.starts, dtype=torch.int32),
            self.max_q + more, self.max_s + more, scale, causal, kv_layout=self.layout, **kw,
        )  # fmt: skip

    def want(self, scale: float = 0.3, causal: bool = False, **kw: Any) -> Tensor:
        names = {"window_left": "left", "window_right": "right"}
        kw = {names.get(k, k): v for k, v in kw.items()}
        return oracle(self.query, self.keys, self.values, self.seq_lens, self.starts, scale,
                      causal, **kw)  # fmt: skip


def close(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


RAGGED = ([1, 5, 0, 3, 4], [9, 5, 6, 1, 17])  # q_len = 0 and kv_len < q_len among them


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (2, -1), (-1, 1), (3, 0), (0, 0)])
def test_ragged_windows(causal: bool, left: int, right: int) -> None:
    case = Case(*RAGGED)
    kw = {"causal": causal, "window_left": left, "window_right": right}
    close(case.run(**kw), case.want(**kw))
    close(case.run(more=5, **kw), case.want(**kw))  # bounds may be larger than needed


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize(("hq", "hk"), [(8, 4), (3, 3), (6, 3), (4, 1)])
def test_layouts_and_groups(layout: KVCacheLayout, hq: int, hk: int) -> None:
    case = Case(*RAGGED, hq=hq, hk=hk, d=8, dv=8, layout=layout)
    close(case.run(causal=True), case.want(causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_softcap_and_sinks(causal: bool) -> None:
    case = Case(*RAGGED)
    sinks = torch.randn(8) * 3
    kw = {"causal": causal, "softcap": 1.5, "sinks": sinks}
    close(case.run(scale=2.0, **kw), case.want(scale=2.0, **kw))
    plain = case.run(scale=2.0, causal=causal)
    assert not torch.allclose(case.run(scale=2.0, causal=causal, softcap=1.5), plain)
    assert not torch.allclose(case.run(scale=2.0, causal=causal, sinks=sinks), plain)


def test_rows_of_nobody_and_rows_that_see_nothing_are_zero() -> None:
    case = Case([3, 2], [1, 0])
    out = case.run(causal=True, sinks=torch.zeros(8))
    assert (out[0] == 0).all()  # before the first sequence
    assert (out[1:3] == 0).all()  # q_pos < 0
    assert (out[3] != 0).any()
    assert (out[4:] == 0).all()  # empty sequence, then rows past the last


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_scales_are_multiplied_each_its_own(dtype: torch.dtype) -> None:
    case = Case(*RAGGED, cache_dtype=dtype)
    got = case.run(k_scale=torch.tensor(0.25), v_scale=torch.tensor([3.0]))
    want = case.want(scale=0.3 * 0.25) * 3.0
    close(got, want)


def test_wider_value_heads_bf16_and_int64_tables() -> None:
    case = Case([2, 3], [7, 12], d=16, dv=32, dtype=torch.bfloat16)
    case.table = case.table.to(torch.int64)
    torch.testing.assert_close(case.run(), case.want(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_key_reaches_only_rows_that_see_it(poison: float) -> None:
    # Key 2 is seen by row 0 (position 3, window 1) and by no later row.
    case = Case([3], [6])
    clean = case.run(window_left=1)
    page = int(case.table[0, 0])
    case.vc[page, 2, :, 0] = poison
    case.kc[page, 3] = float("nan")  # seen by row 0 and row 1
    out = case.run(window_left=1)
    assert out[1].isnan().all()
    assert out[2].isnan().all()
    assert torch.equal(out[3], clean[3])
    case.kc[page, 3] = 0.1
    value = case.run(window_left=1)[1, :, 0]
    assert value.isnan().all() if math.isnan(poison) else (value == poison).all()


def test_freed_pages_left_of_the_window_are_not_followed() -> None:
    case = Case([2], [17], block=4)
    want = case.want(causal=True, window_left=3)
    case.table[0, :3] = -12345
    close(case.run(causal=True, window_left=3), want)


def test_nothing_to_do() -> None:
    case = Case([0, 0], [0, 0], extra=0)
    case.query = case.query[:0]
    assert case.run().shape == (0, 8, 8)
    assert (Case([2], [0]).run() == 0).all()


def test_same_bits_each_time() -> None:
    case = Case(*RAGGED)
    first = case.run(causal=True)
    assert all(torch.equal(case.run(causal=True), first) for _ in range(5))


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), min_size=1, max_size=4),
    causal=st.booleans(),
    left=st.integers(-1, 5),
    right=st.integers(-1, 5),
    block=st.sampled_from([1, 3, 8]),
)
def test_any_ragged_batch(
    lens: list[tuple[int, int]], causal: bool, left: int, right: int, block: int
) -> None:
    case = Case([q for q, _ in lens], [s for _, s in lens], hq=3, hk=3, d=4, dv=4, block=block)
    kw = {"causal": causal, "window_left": left, "window_right": right}
    close(case.run(**kw), case.want(**kw))
