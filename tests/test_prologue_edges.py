"""Prologues in forms that the check has to make small with care: fused, and equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.report import Site
from tests.prologue_block import same_bits

PASS = "qk_norm_rope_kv_cache"
B, S, HQ, HK, D = 2, 3, 4, 2, 16
T = B * S
EPS = 1e-6


def norm(x: Tensor, w: Tensor, eps: Any = EPS) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    return w * n.to(x.dtype)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rand(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g)


def rows(seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v as ``[T, H, D]``, the weights."""
    return (rand(T, HQ, D, seed=seed), rand(T, HK, D, seed=seed + 1), rand(T, HK, D, seed=seed + 2),
            rand(D, seed=3), rand(D, seed=4))  # fmt: skip


def batched() -> tuple[Tensor, ...]:
    """q, k, v as ``[B, S, H, D]``, the weights."""
    q, k, v, *weights = rows()
    return *(x.view(B, S, -1, D) for x in (q, k, v)), *weights


def cache(*shape: int) -> Tensor:
    return rand(*shape, seed=9)


def slots(n: int = T) -> Tensor:
    return torch.randperm(64, generator=torch.Generator().manual_seed(1))[:n]


def put(kc: Tensor, vc: Tensor, k: Tensor, v: Tensor, at: Tensor) -> None:
    kc.view(-1, HK, D)[at] = k.reshape(-1, HK, D)
    vc.view(-1, HK, D)[at] = v.reshape(-1, HK, D)


def plain(q, k, v, wq, wk, cos, sin, kc, vc, at):  # type: ignore[no-untyped-def]
    q, k = (half(norm(x, w), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    put(kc, vc, k, v, at)
    return q, kc.sum() + vc.sum()


def merged(q, k, v, wq, wk, cos, sin, kc, vc, at):  # type: ignore[no-untyped-def]
    """Scaled and normed with tokens and heads in one dimension."""
    q, k = (x.reshape(-1, D) * 1.5 for x in (q, k))
    q, k = norm(q, wq).view(-1, HQ, D), norm(k, wk).view(-1, HK, D)
    q, k = (half(x, cos[:, None], sin[:, None]) for x in (q, k))
    put(kc, vc, k, v, at)
    return q, kc.sum() + vc.sum()


def shared_positions(q, k, v, wq, wk, table, positions, kc, vc, at):  # type: ignore[no-untyped-def]
    """One row of positions ``[1, S]`` for all sequences, or one of their own for each."""
    rows = table[positions]
    cos, sin = (t[:, :, None] for t in rows.chunk(2, -1))
    q, k = half(norm(q, wq), cos, sin), half(norm(k, wk), cos, sin)
    put(kc, vc, k, v, at)
    return q, kc.sum() + vc.sum()


def wide_tables(q, k, v, wq, wk, cos, sin, kc, vc, at):  # type: ignore[no-untyped-def]
    """Tables that are twice as wide as what is read of them."""
    cos, sin = cos[:, None, : D // 2], sin[:, None, : D // 2]
    q, k = pairs(norm(q, wq), cos, sin), pairs(norm(k, wk), cos, sin)
    put(kc, vc, k, v, at)
    return q, kc.sum() + vc.sum()


def tensor_eps(q, k, v, wq, wk, cos, sin, kc, vc, at, eps):  # type: ignore[no-untyped-def]
    """Epsilon is a tensor, as a buffer of the norm."""
    q, k = (half(norm(x, w, eps), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    put(kc, vc, k, v, at)
    return q, kc.sum() + vc.sum()


def static_range(q, k, v, wq, wk, cos, sin, kc, vc):  # type: ignore[no-untyped-def]
    """The first positions of a static cache ``[B, H, S, D]``."""
    q, k = (half(norm(x, w), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    kc[:, :, :S] = k.transpose(1, 2)
    vc[:, :, :S] = v.transpose(1, 2)
    return q, kc.sum() + vc.sum()


def packed_range(q, k, v, wq, wk, cos, sin, c):  # type: ignore[no-untyped-def]
    """K and V side by side in one static cache."""
    kc, vc = c.split(D, -1)
    return static_range(q, k, v, wq, wk, cos, sin, kc, vc)


def static_columns(q, k, v, wq, wk, cos, sin, kc, vc, at):  # type: ignore[no-untyped-def]
    """The same positions of every sequence, as indices from the end."""
    q, k = (half(norm(x, w), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    kc[:, :, at] = k.transpose(1, 2)
    vc[:, :, at] = v.transpose(1, 2)
    return q, kc.sum() + vc.sum()


def computed_scale(q, k, v, wq, wk, cos, sin, kc, vc, at, ks, vs):  # type: ignore[no-untyped-def]
    """The scale of K is computed in the graph."""
    q, k = (half(norm(x, w), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    fusion.ops.kv_cache_write(k, v, kc, vc, at, ks * 2, vs)
    return q, kc.float().sum() + vc.float().sum()


def part_of_a_pool(q, k, v, wq, wk, cos, sin, pool, at):  # type: ignore[no-untyped-def]
    """The cache is the front of a larger buffer."""
    kc, vc = pool[:4], pool[4:8]
    q, k = (half(norm(x, w), cos[:, None], sin[:, None]) for x, w in ((q, wq), (k, wk)))
    fusion.ops.kv_cache_write(k, v, kc, vc, at)
    return q, kc.sum() + vc.sum()


HALVES = (rand(T, D // 2, seed=5), rand(T, D // 2, seed=6))
FP8 = tuple(cache(4, 16, HK, D).to(torch.float8_e4m3fn) for _ in range(2))
STATIC = (rand(S, D // 2, seed=5), rand(S, D // 2, seed=6))
PAGED = (cache(4, 16, HK, D), cache(4, 16, HK, D))


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    args: tuple[Any, ...]


CASES = (
    Case(plain, (*rows(), *HALVES, *PAGED, slots())),
    Case(merged, (*rows(), *HALVES, *PAGED, slots())),
    Case(
        shared_positions,
        (*batched(), rand(40, D), torch.tensor([[7, 0, 31]]), *PAGED, slots()),
    ),
    Case(
        shared_positions,
        (*batched(), rand(40, D), torch.tensor([[7, 0, 31], [2, -1, 8]]), *PAGED, slots()),
    ),
    Case(
        computed_scale,
        (*rows(), *HALVES, *FP8, slots(), torch.tensor(0.25), torch.tensor(3.0)),
    ),
    Case(wide_tables, (*rows(), rand(T, D, seed=5), rand(T, D, seed=6), *PAGED, slots())),
    Case(tensor_eps, (*rows(), *HALVES, *PAGED, slots(), torch.tensor(1e-3))),
    Case(static_range, (*batched(), *STATIC, cache(B, HK, 9, D), cache(B, HK, 9, D))),
    Case(packed_range, (*batched(), *STATIC, cache(B, HK, 9, 2 * D))),
    Case(
        static_columns,
        (*batched(), *STATIC, cache(B, HK, 9, D), cache(B, HK, 9, D), torch.tensor([4, -1, 0])),
    ),
)


def compiled(case: Case, **options: Any) -> Site:
    """The one site of the pass; results and every argument must be eager's, to the bit."""
    want_args, args = copy.deepcopy(case.args), copy.deepcopy(case.args)
    want = case.fn(*want_args)
    torch._dynamo.reset()
    run = torch.compile(case.fn, backend="fusion", options={"inner": "aot_eager", **options})
    for a, b in zip((*run(*args), *args), (*want, *want_args), strict=True):
        assert same_bits(a, b)
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == PASS]
    return site


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.fn.__name__)
def test_fused_and_equal(case: Case) -> None:
    site = compiled(case)
    assert site.status == "fused", [str(r) for r in site.reasons]
    assert site.validation is not None
    assert site.validation["status"] == "passed"


def test_a_part_of_a_larger_buffer_is_left_alone() -> None:
    """The check cannot make it small, so nothing is said to be proved; results stay eager's."""
    site = compiled(Case(part_of_a_pool, (*rows(), *HALVES, cache(9, 16, HK, D), slots())))
    assert (site.status, site.reasons[0].code) == ("refused", "match.validation-bound")
    assert "blocks do not fill a dimension" in site.reasons[0].message
