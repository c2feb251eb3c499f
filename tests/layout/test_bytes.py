"""fp8 caches that an engine keeps as uint8, as vLLM does.

Decided: the view belongs in front of the compiled function. There ``cache.view(torch.float8_…)``
is an ordinary fp8 cache, every layout and every pass works on it, and the engine's uint8 tensor
shows the same bytes. A view *inside* a graph is not fused, and the report says what to do: the
functional wrapper that keeps caches from being copied can express any strides of a buffer, but
no other dtype. An operation that is handed bytes refuses them by name, since it would have to
guess which of two fp8 formats they are.
"""

from __future__ import annotations

import pytest
import torch

import fusion
from fusion.layout import KVCacheLayout, split_kv_cache
from tests.prologue_block import inputs, same_bits, variant
from tests.test_pass_qk_norm_rope_kv_cache import rotated

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
G0 = variant()


def block(x, key, value):
    q, k, v = rotated(x)
    fusion.ops.kv_cache_write(k, v, key, value, x.slots, x.k_scale, x.v_scale)
    return q, key.float().sum()


def outside(x, cache):
    """``cache`` is fp8 already."""
    return block(x, *split_kv_cache(cache, KVCacheLayout.PACKED, 32))


def within(dtype):
    def fn(x, cache):
        return outside(x, cache.view(dtype))

    return fn


def make(dtype):
    x = inputs(variant(cache_dtype=dtype))
    return x, x.cache.view(torch.uint8)


def site():
    (one,) = [s for s in fusion.reports()[-1].sites if s.pass_name == "qk_norm_rope_kv_cache"]
    return one


@pytest.mark.parametrize("dtype", FP8)
def test_bytes_that_are_viewed_in_front_of_the_graph_are_fused(dtype):
    (x, mine), (y, other) = make(dtype), make(dtype)
    fn = torch.compile(outside, backend="fusion", options={"inner": "aot_eager"})
    got, want = fn(x, mine.view(dtype)), outside(y, other.view(dtype))
    assert site().status == "fused", site().reasons
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert mine.dtype == torch.uint8
    assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", FP8)
def test_bytes_that_are_viewed_in_the_graph_are_right_and_the_report_says_why(dtype):
    (x, mine), (y, other) = make(dtype), make(dtype)
    before = mine.clone()
    got = torch.compile(within(dtype), backend="fusion", options={"inner": "aot_eager"})(x, mine)
    want = within(dtype)(y, other)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(mine, other)
    assert not torch.equal(mine, before)
    sites = fusion.reports()[-1].sites
    assert all(s.status in ("missed", "partial") for s in sites)
    (reason,) = [r for s in sites for r in s.reasons if r.code == "match.cache-view"]
    assert reason.have == "torch.uint8"
    assert "view the bytes before the compiled function" in reason.need
    assert reason.node


@pytest.mark.parametrize("dtype", FP8)
def test_a_cache_that_is_written_as_bytes_names_the_operation_that_needs_none(dtype):
    """The cache has its dtype already: there is no buffer of bytes to view in front."""

    def fn(x, key_cache, value_cache):
        q, k, v = rotated(x)
        for cache, rows in ((key_cache, k), (value_cache, v)):
            stored = rows.float().clamp(-200, 200).to(dtype).view(torch.uint8)
            cache.view(torch.uint8)[x.slots] = stored
        return q

    def caches():
        return [torch.zeros(4096, *rows.shape[1:]).to(dtype) for rows in rotated(inputs(G0))[1:]]

    mine, other = caches(), caches()
    got = torch.compile(fn, backend="fusion", options={"inner": "aot_eager"})(inputs(G0), *mine)
    assert same_bits(got, fn(inputs(G0), *other))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(mine, other, strict=True)
    )
    reasons = [r for s in fusion.reports()[-1].sites for r in s.reasons]
    (reason,) = [r for r in reasons if r.code == "match.cache-view"]
    assert (reason.have, reason.need) == (str(dtype), "write with fusion.ops.kv_cache_write")
    assert "torch.uint8" in reason.message


def test_an_operation_never_guesses_what_bytes_mean():
    x, cache = make(FP8[0])
    key, value = split_kv_cache(cache, "PACKED", 32)
    _, k, v = rotated(x)
    with pytest.raises(ValueError, match=r"key_cache is torch\.uint8, .* float8_e4m3fn"):
        fusion.ops.kv_cache_write(k, v, key, value, x.slots)
