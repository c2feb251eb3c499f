"""The operations inside torch.compile, without Inductor: every cache layout, dynamic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion.ops as ops
from fusion.layout import KVCacheLayout, empty_kv_cache, split_kv_cache
from tests.ops_cases import DV, HK, NORM, ROPE, D, arguments

LAYOUTS = [x for x in KVCacheLayout if x is not KVCacheLayout.SHUFFLE]
NAMES = ("query", "key", "value", "q_weight", "k_weight", "cos", "sin", "slot_mapping")


def step(x: tuple[Tensor, ...], kc: Tensor, vc: Tensor, kernel: str = "auto") -> Tensor:
    q, k, v, wq, wk, cos, sin, slots = x
    q, k = ops.qk_norm_rope_kv_cache(
        q, k, v, wq, wk, cos, sin, None, kc, vc, slots, return_key=True, kernel=kernel,
        **NORM, **ROPE,
    )  # fmt: skip
    # A reader of the cache after the write, so that a stale cache would be seen.
    return q.sum() + k.sum() + kc.sum() * 3 + vc.sum() * 5


def inputs(tokens: int = 5, dv: int = DV) -> tuple[Tensor, ...]:
    a = arguments("qk_norm_rope_kv_cache", tokens)
    a["value"] = torch.randn(tokens, HK, dv)
    return tuple(a[n] for n in NAMES)


def buffers(layout: KVCacheLayout, dv: int) -> list[Tensor]:
    made = empty_kv_cache(layout, 3, 4, HK, D, dv, torch.float32)
    parts = [made] if isinstance(made, Tensor) else list(made)
    return [p.copy_(torch.randn(p.shape)) for p in parts]


def same(got: Tensor, want: Tensor, mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert torch.equal(got, want)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_graph_inputs(layout: KVCacheLayout, dynamic: bool) -> None:
    dv = D if layout.equal_head_dims else DV
    x, parts = inputs(dv=dv), buffers(layout, dv)
    mine = [p.clone() for p in parts]

    def f(parts: list[Tensor], *x: Tensor) -> Tensor:
        kc, vc = split_kv_cache(parts if layout.is_pair else parts[0], layout, D, dv)
        return step(x, kc, vc, kernel="reference")

    compiled = torch.compile(f, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    same(compiled(parts, *x), f(mine, *x), parts, mine)


@pytest.mark.parametrize("layout", [KVCacheLayout.PACKED, KVCacheLayout.HND])
def test_module_buffers_and_one_graph_for_many_token_counts(layout: KVCacheLayout) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, part in enumerate(buffers(layout, DV)):
                self.register_buffer(f"cache{i}", part)

        def forward(self, *x: Tensor) -> Tensor:
            parts = list(self.buffers())
            return step(x, *split_kv_cache(parts if layout.is_pair else parts[0], layout, D, DV))

    layer = Layer()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for i, tokens in enumerate([7, 2, 11]):
        x = inputs(tokens)
        if i == 0:
            for t in (*x[:3], *x[5:]):
                torch._dynamo.mark_dynamic(t, 0)
        mine = [b.clone() for b in layer.buffers()]
        got = compiled(*x)
        theirs = [b.clone() for b in layer.buffers()]
        for b, old in zip(layer.buffers(), mine, strict=True):
            b.copy_(old)
        same(got, layer(*x), theirs, list(layer.buffers()))
    assert counter.frame_count == 1


def test_every_operation_in_one_graph_with_views_made_outside() -> None:
    parts = buffers(KVCacheLayout.PACKED, DV)
    x, a = inputs(), arguments("paged_attention")
    rest = [a[n] for n in ("block_table", "seq_lens", "query_start_loc")]
    one = torch.tensor(0.5)

    def f(kc: Tensor, vc: Tensor, *t: Tensor) -> Any:
        q, k, v, wq, wk, cos, sin, slots = t[:8]
        ops.kv_cache_write(k, v, kc, vc, slots)
        q1, k1 = ops.qk_norm_rope(q, k, wq, wk, cos, sin, None, **NORM, **ROPE)
        q2, _ = ops.rope_kv_cache(q1, k1, v, cos, sin, None, kc, vc, slots[:2], one, one, **ROPE)
        return q1, k1, ops.paged_attention(q2, kc, vc, *t[8:], 5, 8, 0.2, False, window_left=4)

    mine = [p.clone() for p in parts]
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    got = compiled(*split_kv_cache(parts[0], "packed", D, DV), *x, *rest)
    want = f(*split_kv_cache(mine[0], "packed", D, DV), *x, *rest)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(parts[0], mine[0])


def test_no_tokens_then_some() -> None:
    parts = buffers(KVCacheLayout.PACKED, DV)

    def f(base: Tensor, *x: Tensor) -> Tensor:
        return step(x, *split_kv_cache(base, "packed", D, DV))

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    before = parts[0].clone()
    compiled(parts[0], *inputs(0))
    assert torch.equal(parts[0], before)
    mine, x = [before], inputs(5)
    same(compiled(parts[0], *x), f(mine[0], *x), parts, mine)


def test_plain_words_for_gradients_and_shapes_while_compiling() -> None:
    parts = buffers(KVCacheLayout.PACKED, DV)

    def f(base: Tensor, *x: Tensor) -> Tensor:
        return step(x, *split_kv_cache(base, "packed", D, DV))

    x = list(inputs())
    x[0] = x[0].clone().requires_grad_()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    with torch.enable_grad(), pytest.raises(Exception, match=r"for inference only.*'query'"):
        compiled(parts[0], *x)
    x = list(inputs())
    x[5] = x[5][:, :3]
    with pytest.raises(Exception, match="width of cos"):
        compiled(parts[0], *x)
