"""The reference prologue against eager spellings taken from real models, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.backends import reference

NORM = {"weight_mode": "w", "norm_cast": "late", "inv_rms": "rsqrt"}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    x[..., ::17] *= 30.0  # outlier channels
    return x.to(dtype)


# --- eager spellings, as models write them -------------------------------------------------


def qwen3_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return w * x.to(dtype)


def gemma_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (out * (1.0 + w.float())).type_as(x)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def neox_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Full-width cos/sin of one dtype with x; partial width leaves the tail."""
    r = cos.shape[-1]
    rot, rest = x[..., :r], x[..., r:]
    out = rot * cos[:, None] + rotate_half(rot) * sin[:, None]
    return torch.cat((out, rest), dim=-1)


def gptj_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-width tables, repeated; partner of an element is its neighbour."""
    r = 2 * cos.shape[-1]
    rot, rest = x[..., :r], x[..., r:]
    cos = cos.repeat_interleave(2, dim=-1)[:, None]
    sin = sin.repeat_interleave(2, dim=-1)[:, None]
    swapped = torch.stack((-rot[..., 1::2], rot[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rot * cos + swapped * sin, rest), dim=-1)


# --- norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_late_norm_is_qwen3s(dtype: torch.dtype) -> None:
    x, w = rand(5, 4, 128, dtype=dtype), rand(128, dtype=dtype)
    assert same(reference.rms_norm(x, w, 1e-6, **NORM), qwen3_norm(x, w, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_w_early_is_gemmas(dtype: torch.dtype) -> None:
    x, w = rand(5, 3, 64, dtype=dtype), rand(64, dtype=dtype)
    got = reference.rms_norm(x, w, 1e-5, weight_mode="1+w", norm_cast="early", inv_rms="rsqrt")
    assert same(got, gemma_norm(x, w, 1e-5))
    other = reference.rms_norm(x, w, 1e-5, weight_mode="w", norm_cast="early", inv_rms="rsqrt")
    assert not same(other, got)


def test_late_and_early_differ_in_bf16_and_late_follows_promotion() -> None:
    x, w = rand(5, 4, 128, dtype=torch.bfloat16), rand(128, dtype=torch.bfloat16)
    late = reference.rms_norm(x, w, 1e-6, norm_cast="late")
    early = reference.rms_norm(x, w, 1e-6, norm_cast="early")
    assert not torch.equal(late, early)
    wide = reference.rms_norm(x, w.float(), 1e-6, norm_cast="late")
    assert wide.dtype == torch.float32
    assert same(wide, w.float() * reference.rms_norm(x, None, 1e-6, norm_cast="late"))
    assert reference.rms_norm(x, w, 1e-6, norm_cast="none").dtype == torch.float32


@pytest.mark.parametrize(
    ("inv_rms", "eager"),
    [
        ("rsqrt", lambda n, v: n * torch.rsqrt(v)),
        ("pow", lambda n, v: n * v.pow(-0.5)),
        ("div", lambda n, v: n / v.sqrt()),
        ("recip", lambda n, v: n * (1 / v.sqrt())),
    ],
)
def test_every_inverse_root(inv_rms: str, eager) -> None:  # type: ignore[no-untyped-def]
    x = rand(257, 3, 80, dtype=torch.float32)
    v = (x * x).mean(-1, keepdim=True) + 1e-6
    assert same(reference.rms_norm(x, None, 1e-6, inv_rms=inv_rms), eager(x, v))


def test_eps_tensor_of_any_float_dtype_and_f64_input_stays_f64() -> None:
    x = rand(5, 4, 32, dtype=torch.float32) * 1e-3
    number = reference.rms_norm(x, None, 1e-3)
    assert same(reference.rms_norm(x, None, torch.tensor(1e-3, dtype=torch.float64)), number)
    assert not torch.equal(reference.rms_norm(x, None, 1e-6), number)
    assert reference.rms_norm(x.double(), None, 1e-6).dtype == torch.float64


@pytest.mark.parametrize("bad", [{"weight_mode": "w+1"}, {"norm_cast": "x"}, {"inv_rms": "x"}])
def test_unknown_norm_attribute(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        reference.rms_norm(torch.ones(1, 1, 4), None, 1e-6, **bad)


# --- rope ----------------------------------------------------------------------------------


def rope_args(style: str, r: int, dtype: torch.dtype) -> dict[str, object]:
    return {"rope_style": style, "rotary_dim": r, "rope_dtype": dtype, "out_dtype": dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("r", [32, 64, 128])
@pytest.mark.parametrize("heads", [3, 4])
def test_half_split_full_width_tables(dtype: torch.dtype, r: int, heads: int) -> None:
    # Random full-width tables: the two halves of cos differ, as they may.
    x = rand(5, heads, 128, dtype=dtype)
    cos, sin = rand(5, r, dtype=dtype, seed=1) * 1.2, rand(5, r, dtype=dtype, seed=2)
    got = reference.rope(x, cos, sin, **rope_args("half", r, dtype))
    assert same(got, neox_rope(x, cos, sin))
    assert same(got[..., r:], x[..., r:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("r", [16, 48, 64])
def test_interleaved_half_width_tables(dtype: torch.dtype, r: int) -> None:
    x = rand(5, 3, 64, dtype=dtype)
    cos, sin = rand(5, r // 2, dtype=dtype, seed=1), rand(5, r // 2, dtype=dtype, seed=2)
    got = reference.rope(x, cos, sin, **rope_args("interleaved", r, dtype))
    assert same(got, gptj_rope(x, cos, sin))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_half_width_is_full_width_with_repeated_entries(style: str) -> None:
    x = rand(7, 4, 96, dtype=torch.bfloat16)
    cos, sin = rand(7, 24, dtype=torch.float32, seed=1), rand(7, 24, dtype=torch.float32, seed=2)
    full = (
        [torch.cat((t, t), -1) for t in (cos, sin)]
        if style == "half"
        else [t.repeat_interleave(2, -1) for t in (cos, sin)]
    )
    args = {
        "rope_style": style,
        "rotary_dim": 48,
        "rope_dtype": torch.float32,
        "out_dtype": torch.bfloat16,
    }
    want = reference.rope(x, cos, sin, **args)
    assert same(reference.rope(x, *full, **args), want)
    assert same(reference.rope(x, full[0], sin, **args), want)


def test_rounding_point_of_rope_is_an_attribute() -> None:
    x = rand(33, 4, 64, dtype=torch.bfloat16)
    cos, sin = rand(33, 32, dtype=torch.float32, seed=1), rand(33, 32, dtype=torch.float32, seed=2)
    kw = {"rope_style": "half", "rotary_dim": 64, "out_dtype": torch.bfloat16}
    wide = reference.rope(x, cos, sin, rope_dtype=torch.float32, **kw)
    narrow = reference.rope(x, cos, sin, rope_dtype=torch.bfloat16, **kw)
    assert not torch.equal(wide, narrow)
    want = neox_rope(x.float(), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    assert same(wide, want.to(torch.bfloat16))


def test_positions_gather_rows_and_never_leave_the_table() -> None:
    table = rand(11, 16, dtype=torch.float32)
    positions = torch.tensor([3, 0, 10, -7, 999], dtype=torch.int32)
    cos, sin = reference.token_tables(table, -table, positions)
    assert torch.equal(cos, table[[3, 0, 10, 0, 10]])
    assert torch.equal(sin, -cos)


# --- the whole -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prologue_is_norm_then_rope_then_write(tokens: int, dtype: torch.dtype) -> None:
    hq, hk, d, dv, block, r = 8, 4, 64, 48, 16, 32
    qkv = rand(tokens, hq * d + hk * d + hk * dv, dtype=dtype)
    q, k, v = qkv.split((hq * d, hk * d, hk * dv), dim=-1)
    q, k, v = q.view(-1, hq, d), k.view(-1, hk, d), v.view(-1, hk, dv)
    assert tokens <= 1 or not q.is_contiguous()
    wq, wk = rand(d, dtype=dtype, seed=3), rand(d, dtype=dtype, seed=4)
    cos, sin = rand(tokens, r, dtype=dtype, seed=5), rand(tokens, r, dtype=dtype, seed=6)
    blocks = tokens // block + 2
    g = torch.Generator().manual_seed(7)
    slots = torch.randperm(blocks * block, generator=g)[:tokens]
    kc = torch.full((blocks, block, hk, d), float("nan"), dtype=dtype)
    vc = torch.full((blocks, block, hk, dv), float("nan"), dtype=dtype)
    want_k, want_v = kc.clone(), vc.clone()
    rq = neox_rope(qwen3_norm(q, wq, 1e-6), cos, sin)
    rk = neox_rope(qwen3_norm(k, wk, 1e-5), cos, sin)
    want_k.view(-1, hk, d)[slots] = rk
    want_v.view(-1, hk, dv)[slots] = v
    got_q, got_k = reference.qk_norm_rope_kv_cache(
        q, k, v, wq, wk, cos, sin, None, kc, vc, slots, q_eps=1e-6, k_eps=1e-5, **NORM,
        return_key=True, **rope_args("half", r, dtype),
    )  # fmt: skip
    assert same(got_q, rq)
    assert same(got_k, rk)
    assert same(kc, want_k)
    assert same(vc, want_v)
    assert got_q.is_contiguous()
    assert got_k.is_contiguous()


def test_key_only_where_asked_and_never_an_alias_of_the_input() -> None:
    q, k = rand(5, 3, 32, dtype=torch.float32), rand(5, 3, 32, dtype=torch.float32)
    empty = torch.empty(5, 0)
    cache = torch.zeros(2, 4, 3, 32)
    args = rope_args("half", 0, torch.float32)
    slots = torch.arange(5)
    out, key = reference.rope_kv_cache(q, k, k, empty, empty, None, cache, cache.clone(), slots,
                                       **args)  # fmt: skip
    assert key.shape == (0, 3, 32)
    assert out.data_ptr() != q.data_ptr()
    assert torch.equal(out, q)
    assert torch.equal(cache.view(8, 3, 32)[:5], k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_f_rms_norm_is_early(dtype: torch.dtype) -> None:
    x, w = rand(9, 4, 64, dtype=dtype), rand(64, dtype=dtype)
    assert same(reference.rms_norm(x, w, 1e-6, norm_cast="early"), F.rms_norm(x, (64,), w, 1e-6))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_same_bits_on_every_call(tokens: int) -> None:
    x, v = rand(tokens, 4, 64, dtype=torch.bfloat16), rand(tokens, 4, 32, dtype=torch.bfloat16)
    w, cos = rand(64, dtype=torch.bfloat16), rand(tokens, 16, dtype=torch.float32)
    slots = torch.arange(tokens)
    slots[::5] = -1
    first = None
    for _ in range(6):
        kc = torch.zeros(tokens, 1, 4, 64, dtype=torch.bfloat16)
        vc = torch.zeros(tokens, 1, 4, 32, dtype=torch.bfloat16)
        q, _ = reference.qk_norm_rope_kv_cache(
            x, x, v, w, w, cos, cos, None, kc, vc, slots, q_eps=1e-6, k_eps=1e-6, **NORM,
            **rope_args("half", 32, torch.bfloat16),
        )  # fmt: skip
        first = first or (q, kc, vc)
        assert all(same(a, b) for a, b in zip(first, (q, kc, vc), strict=True))


def test_error_against_float64_is_that_of_the_eager_spelling() -> None:
    # Outlier channels of 1e3: rounding at the declared points, nowhere else.
    x = rand(33, 4, 128, dtype=torch.bfloat16)
    x[..., ::31] *= 1e3
    w, cos = rand(128, dtype=torch.bfloat16), rand(33, 128, dtype=torch.bfloat16, seed=1)
    got = reference.rope(
        reference.rms_norm(x, w, 1e-6, **NORM), cos, cos, **rope_args("half", 128, torch.bfloat16)
    )
    eager = neox_rope(qwen3_norm(x, w, 1e-6), cos, cos)
    exact = neox_rope(exact_norm(x.double(), w.double(), 1e-6), cos.double(), cos.double())
    assert same(got, eager)
    assert (got.double() - exact).abs().max() <= (eager.double() - exact).abs().max()


def exact_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def test_an_epsilon_tensor_takes_the_place_of_its_own_number() -> None:
    q, k, w = (rand(3, 4, 8, dtype=torch.float32, seed=i) * 1e-2 for i in range(3))
    cos = rand(3, 8, dtype=torch.float32, seed=9)

    def run(q_eps: float, k_eps: float, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return reference.qk_norm_rope(
            q, k, w[0, 0], w[0, 1], cos, cos, None, q_eps=q_eps, k_eps=k_eps, **NORM, **tensors,
            **rope_args("half", 8, torch.float32),
        )  # fmt: skip

    plain, other = run(1e-3, 1e-1), run(7.0, 7.0)
    assert not same(plain[0], other[0]) and not same(plain[1], other[1])
    both = run(7.0, 7.0, q_eps_tensor=torch.tensor(1e-3), k_eps_tensor=torch.tensor(1e-1))
    assert same(both[0], plain[0]) and same(both[1], plain[1])
    one = run(7.0, 1e-1, q_eps_tensor=torch.tensor(1e-3))
    assert same(one[0], plain[0]) and same(one[1], plain[1])
    swapped = run(1e-3, 7.0, k_eps_tensor=torch.tensor(1e-1))
    assert same(swapped[0], plain[0]) and same(swapped[1], plain[1])
