"""Under Inductor the reference is native: no opaque call, no cache-sized buffer, right bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion.ops as ops
from fusion.backends import reference
from fusion.backends.reference import lowering
from fusion.layout import KVCacheLayout, split_kv_cache
from fusion.ops import registration
from fusion.selection import NoKernelError
from tests.ops_cases import BLOCK, DV, HK, NORM, ROPE, D, arguments, filled_cache

BLOCKS = 50  # cache sizes stand out from every other size


def compiled_code(
    f: Callable[..., Any], *args: Any, dynamic: bool | None = False
) -> tuple[Any, str]:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        out, codes = run_and_get_code(torch.compile(f, dynamic=dynamic, fullgraph=True), *args)
    return out, "\n".join(codes)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def native(code: str) -> None:
    assert "torch.ops.fusion" not in code
    assert "cpp_fused" in code


def no_cache_sized_buffer(code: str, cache: Tensor) -> None:
    for size in re.findall(r"empty_strided_cpu\(\((.*?)\), \(", code):
        count = 1
        for s in size.split(","):
            count *= int(s) if s.strip().isdigit() else 1
        assert count < cache.numel() // 4, f"buffer ({size}) is as large as the cache"


def prologue(q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor,
             base: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    kc, vc = split_kv_cache(base, "packed", D, DV)
    return ops.qk_norm_rope_kv_cache(
        q, k, v, wq, wk, cos, sin, None, kc, vc, slots, return_key=True, **NORM,
        **{**ROPE, "rope_dtype": dtype, "out_dtype": dtype},
    )  # fmt: skip


def operands(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    a = arguments("qk_norm_rope_kv_cache", tokens)
    names = ("query", "key", "value", "q_weight", "k_weight", "cos", "sin")
    return [a[n].to(dtype) for n in names]


def some_slots(tokens: int) -> Tensor:
    slots = torch.randperm(BLOCKS * BLOCK)[:tokens]
    slots[1::3] = -1
    return slots


# From 16 rows on narrow caches are written another way (put_rows).
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 5), (torch.bfloat16, 20)])
def test_packed_halves_of_one_input_static(dtype: torch.dtype, tokens: int) -> None:
    (base,), _, _ = filled_cache(KVCacheLayout.PACKED, BLOCKS, dtype)
    x, slots = operands(tokens, dtype), some_slots(tokens)
    other, start = base.clone(), base.clone()

    def f(*a: Tensor) -> tuple[Tensor, Tensor]:
        return prologue(*a, dtype)

    (q, k), code = compiled_code(f, *x, base, slots)
    native(code)
    no_cache_sized_buffer(code, base)
    wq, wk = prologue(*x, other, slots, dtype)
    # Inductor keeps bf16 intermediates in float32: a rounding or two apart from eager.
    tol = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close((q, k), (wq, wk), **tol)
    torch.testing.assert_close(base, other, **tol)
    written = slots[slots >= 0]
    rows = base.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[written][..., :D], k[slots >= 0])  # the cache has the very k returned
    assert torch.equal(rows[written][..., D:], x[2][slots >= 0])
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[written] = False
    old = start.transpose(1, 2).flatten(0, 1)
    assert torch.equal(raw(rows[untouched]), raw(old[untouched]))
    # All padding: what is there is written back, NaNs of every kind included.
    raw(base[0]).copy_(torch.randint(0, 256, raw(base[0]).shape))
    start = base.clone()
    torch.compile(f, dynamic=False, fullgraph=True)(*x, base, torch.full_like(slots, -1))
    assert torch.equal(raw(base), raw(start))


def test_dynamic_tokens_one_graph_module_buffers_and_all_padding() -> None:
    dtype = torch.bfloat16

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            (base,), _, _ = filled_cache(KVCacheLayout.PACKED, BLOCKS, dtype)
            self.register_buffer("cache", base)

        def forward(self, *a: Tensor) -> tuple[Tensor, Tensor]:
            return prologue(*a[:-1], self.cache, a[-1], dtype)

    layer = Layer()
    # NaNs of every kind in slot 0: all-padding steps write it back, and no bit may change.
    layer.cache[0].view(torch.int16).copy_(torch.randint(0x7F80, 0x8000, layer.cache[0].shape))
    frames = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    step = torch.compile(layer, backend=frames, fullgraph=True)
    for i, tokens in enumerate([7, 2, 64, 11]):
        x, slots = operands(tokens, dtype), some_slots(tokens)
        if i == 2:
            slots.fill_(-1)
        if i == 0:
            for t in (*x[:3], *x[5:], slots):
                torch._dynamo.mark_dynamic(t, 0)
        before, want = layer.cache.clone(), layer.cache.clone()
        step(*x, slots)
        prologue(*x, want, slots, dtype)
        changed = (raw(layer.cache) != raw(before)).any()
        assert bool(changed) == (i != 2)
        torch.testing.assert_close(layer.cache, want, rtol=2e-2, atol=2e-2, equal_nan=True)
        untouched = raw(want) == raw(before)
        assert torch.equal(raw(layer.cache)[untouched], raw(before)[untouched]) or i != 2
    assert frames.frame_count == 1


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.float8_e4m3fn, 20), (torch.float8_e4m3fnuz, 5)]
)
def test_fp8_rope_and_table_shuffled_and_plain_write_in_one_graph(
    dtype: torch.dtype, tokens: int
) -> None:
    parts, _, _ = filled_cache(KVCacheLayout.HND, BLOCKS, dtype)
    shape_k, shape_v = (4, HK, D // 16, 16, 16), (4, HK, 1, DV, 16)
    sk, sv = torch.randn(shape_k).to(dtype), torch.randn(shape_v).to(dtype)
    a = arguments("rope_kv_cache", tokens, table=True)
    ks, vs = torch.tensor(0.25), torch.tensor(3.0)
    a["value"] = a["value"] * 900  # saturates
    slots, short = some_slots(tokens), torch.tensor([3, -1, 0])

    def f(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, *c: Tensor
    ) -> Any:
        kc, vc = split_kv_cache(c[:2], "hnd", D, DV)
        out, _ = ops.rope_kv_cache(q, k, v, cos, sin, pos, kc, vc, slots, ks, vs, **ROPE)
        ops.kv_cache_write(k, v, c[2], c[3], short, ks, vs, kv_layout="SHUFFLE")
        return out

    x = [a[n] for n in ("query", "key", "value", "cos", "sin", "positions")]
    mine = [t.clone() for t in (*parts, sk, sv)]
    got, code = compiled_code(f, *x, *parts, sk, sv)
    native(code)
    want = f(*x, *mine)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for t, w in zip((*parts, sk, sv), mine, strict=True):
        assert torch.equal(raw(t), raw(w))


def test_as_good_as_the_same_lines_in_plain_torch() -> None:
    # float32: equal bits to norm + rope + index_put compiled by Inductor itself.
    (kc, vc), _, _ = filled_cache(KVCacheLayout.NHD, BLOCKS)
    x, slots = operands(5, torch.float32), torch.randperm(BLOCKS * BLOCK)[:5]

    def plain(q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor,
              kc: Tensor, vc: Tensor, slots: Tensor) -> Tensor:  # fmt: skip
        q, k = reference.qk_norm_rope(q, k, wq, wk, cos, sin, None, **NORM, **ROPE)
        kc[slots // BLOCK, slots % BLOCK] = k
        vc[slots // BLOCK, slots % BLOCK] = v
        return q

    def fused(*a: Tensor) -> Tensor:
        return ops.qk_norm_rope_kv_cache(*a[:7], None, *a[7:], **NORM, **ROPE)[0]

    mine = [kc.clone(), vc.clone()]
    want, _ = compiled_code(plain, *x, *mine, slots)
    got, code = compiled_code(fused, *x, kc, vc, slots)
    native(code)
    assert torch.equal(got, want)
    assert torch.equal(kc, mine[0])
    assert torch.equal(vc, mine[1])


def test_layers_in_a_row_readers_between_and_an_opaque_call() -> None:
    # Two layers in one stacked cache, attention (opaque) between: order of write and read is kept.
    stack = torch.randn(2, BLOCKS, HK, BLOCK, D + DV)
    a = arguments("paged_attention", 5)
    x, slots = operands(5, torch.float32), some_slots(5)
    rest = [a[n] for n in ("block_table", "seq_lens", "query_start_loc")]

    def f(*t: Tensor) -> Tensor:
        out = torch.zeros(())
        for layer in range(2):
            x = [y + out for y in t[:3]]  # as in a model, a layer waits for the one before
            q, _ = prologue(*x, *t[3:7], t[7][layer], t[8], torch.float32)
            kc, vc = split_kv_cache(t[7][layer], KVCacheLayout.PACKED, D, DV)
            out = out + ops.paged_attention(q, kc, vc, *t[9:], 5, 8, 0.2, True).sum()
        return out + t[7].sum()

    mine = stack.clone()
    got, code = compiled_code(f, *x, stack, slots, *rest)
    assert "torch.ops.fusion.paged_attention" in code
    assert "torch.ops.fusion.qk_norm" not in code
    no_cache_sized_buffer(code, stack)
    torch.testing.assert_close(got, f(*x, mine, slots, *rest), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(stack, mine, rtol=1e-5, atol=1e-5)


def test_compile_caches_see_a_change_of_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    a = arguments("kv_cache_write", 1)

    def compile_once() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda **kw: ops.kv_cache_write(**kw), fullgraph=True)(**a)
        hits = (
            counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"]
        )
        return min(hits, 1), counters["inductor"]["fxgraph_cache_miss"]

    with torch._inductor.config.patch(unsafe_marked_cacheable_functions={}):
        assert compile_once() == (0, 1)
        assert compile_once() == (1, 0)
        monkeypatch.setattr(registration, "fingerprint", lambda: "sources were edited")
        assert compile_once() == (0, 1)
        monkeypatch.undo()


def test_a_named_kernel_survives_every_way_down() -> None:
    # `kernel` as a keyword is what Inductor's own fallback cannot take.
    a = arguments("paged_attention")
    names = [n for n in a if isinstance(a[n], Tensor)]
    rest = {n: v for n, v in a.items() if n not in names}

    def f(*t: Tensor) -> Tensor:
        kw = dict(zip(names, t, strict=True))
        return ops.paged_attention(**kw, **rest, kernel="reference")

    args = [a[n] for n in names]
    got, code = compiled_code(f, *args)
    assert "torch.ops.fusion.paged_attention.opaque" in code
    assert torch.equal(got, f(*args))


def test_a_kernel_that_does_not_exist_fails_the_call_and_not_the_compile() -> None:
    a = arguments("kv_cache_write")

    def f(**kw: Tensor) -> None:
        ops.kv_cache_write(**kw, kernel="refrence")

    with pytest.raises(NoKernelError, match=r"known: .*reference"):
        torch.compile(f, fullgraph=True)(**a)


def test_a_lowering_that_breaks_half_way_leaves_the_opaque_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (base,), _, _ = filled_cache(KVCacheLayout.PACKED, BLOCKS)
    x, slots = operands(5, torch.float32), some_slots(5)
    mine, real, calls = base.clone(), lowering.put_rows, []

    def put_rows(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:  # K is written natively, then V is not
            raise KeyError("a private name of another torch version")
        real(*args)

    monkeypatch.setattr(lowering, "put_rows", put_rows)

    def f(*a: Tensor) -> tuple[Tensor, Tensor]:
        return prologue(*a, torch.float32)

    got, code = compiled_code(f, *x, base, slots)
    assert "torch.ops.fusion.qk_norm_rope_kv_cache.opaque" in code
    assert "failed; it stays a call" in caplog.text
    torch.testing.assert_close(got, f(*x, mine, slots), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base, mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", ["copied", "view", "computed"])
def test_rows_of_the_cache_are_read_before_it_is_written(spelling: str, dynamic: bool) -> None:
    """A context shift. Inductor takes the model's own copy out where it looks needless."""
    made = {
        "copied": lambda rows: rows.clone(),
        "view": lambda rows: rows,
        "computed": lambda rows: rows * 2,
    }[spelling]

    def shift(
        q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor, slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        k, v = (made(c.flatten(0, 1)[: slots.shape[0]]) for c in (kc, vc))
        q, _ = ops.rope_kv_cache(
            q, k, v, cos, sin, None, kc, vc, slots, rope_style="half", rotary_dim=16,
            rope_dtype=torch.float32, out_dtype=torch.float32,
        )  # fmt: skip
        return q

    def given() -> tuple[torch.Tensor, ...]:
        g = torch.Generator().manual_seed(0)
        q, kc, vc, cos, sin = (
            torch.randn(shape, generator=g)
            for shape in ((6, 4, 16), (16, 4, 2, 16), (16, 4, 2, 16), (6, 8), (6, 8))
        )
        return q, kc, vc, cos, sin, torch.tensor([3, 4, 5, 6, 7, 8])

    want, have = given(), given()
    expected = shift(*want)
    result = torch.compile(shift, backend="inductor", dynamic=dynamic, fullgraph=True)(*have)
    torch.testing.assert_close(result, expected)
    for mine, other in zip(have[1:3], want[1:3], strict=True):
        torch.testing.assert_close(mine, other)
