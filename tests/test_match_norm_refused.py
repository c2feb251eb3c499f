"""Look-alikes of a norm, one node away: each is refused by the recogniser itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion.match.facts import Miss
from fusion.match.norm import read_norm
from tests.match_graphs import Traced, trace
from tests.norm_spellings import (
    EPS,
    B,
    D,
    H,
    S,
    norm,
    read,
    refused,
    value,
)


def like(body: Callable[[Any, Any, Any], Any], *extra: torch.Tensor, plain: bool = False) -> Traced:
    """A norm-like function of (n = x.float(), w, x)."""
    return trace(
        lambda x, w, *more: body(x.float(), w, x, *more), value(B, S, H, D), value(D), *extra,
        plain=plain,
    )  # fmt: skip


def late(n: Any, inv: Any, w: Any, x: Any) -> Any:
    return w * (n * inv).to(x.dtype)


def test_wrong_axis() -> None:
    for axis in (0, 1, 2):
        traced = like(
            lambda n, w, x, a=axis: late(n, torch.rsqrt(n.pow(2).mean(a, True) + EPS), w, x)
        )
        refused(traced, "match.norm-axis")


@pytest.mark.parametrize("shape", [(1, D, 2, D), (2, 3, D, D), (D, 2, 2, D)])
def test_wrong_axis_of_the_right_size(shape: tuple[int, ...]) -> None:
    """The reduced axis has D elements too, but they are not the head's."""
    for axis in (0, 1, 2):
        if shape[axis] != D:
            continue
        traced = trace(
            lambda x, w, a=axis: late(
                x.float(), torch.rsqrt(x.float().pow(2).mean(a, True) + EPS), w, x
            ),
            value(*shape), value(D),
        )  # fmt: skip
        refused(traced, "match.norm-axis")


def test_mean_of_another_head() -> None:
    def body(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n.roll(1, 2).pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body), "match.norm-axis")


def test_mean_of_another_value() -> None:
    def body(n: Any, w: Any, x: Any, y: Any) -> Any:
        return late(n, torch.rsqrt(y.float().pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body, value(B, S, H, D)), "match.norm-axis")


def test_mean_of_permuted_dims_is_refused() -> None:
    """The same set in another order: another sum in floating point."""

    def body(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n.flip(-1).pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body), "match.norm-axis")


def test_norm_over_all_heads() -> None:
    def fn(x: Any, w: Any) -> Any:
        return norm(x, w).view(B, S, H, D).transpose(1, 2)

    traced = trace(fn, value(B, S, H * D), value(H * D))
    miss = refused(traced, "match.norm-over-heads", "bhsd")
    assert (miss.reason.have, miss.reason.need) == (str(H * D), str(D))

    def two_axes(x: Any, w: Any) -> Any:
        n = x.float()
        return w * (n * torch.rsqrt(n.pow(2).mean((-1, -2), True) + EPS)).to(x.dtype)

    refused(trace(two_axes, value(B, S, H, D), value(D)), "match.norm-over-heads")


def test_norm_over_part_of_the_head() -> None:
    def fn(x: Any, w: Any) -> Any:
        return norm(x.view(B, S, H, 2, D // 2), w).view(B, S, H, D)

    fact = read_norm(trace(fn, value(B, S, H, D), value(D // 2)).view("bshd"))
    assert isinstance(fact, Miss)
    assert fact.reason.code in ("match.head-dim", "match.norm-axis")

    def prefix(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n[..., :16].pow(2).mean(-1, True) + EPS), w, x)

    refused(like(prefix), "match.head-dim")


FORMS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "sum for mean": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).sum(-1, True) + EPS), w, x),
        "match.norm-form"),
    "mean divided again": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) / 2 + EPS), w, x),
        "match.norm-form"),
    "sum / (D - 1)": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).sum(-1, True) / (D - 1) + EPS), w, x),
        "match.norm-form"),
    "cube": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(4).mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "abs": (
        lambda n, w, x: late(n, torch.rsqrt(n.abs().mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "amax": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).amax(-1, True) + EPS), w, x),
        "match.norm-form"),
    "variance": (
        lambda n, w, x: late(n, torch.rsqrt(n.var(-1, keepdim=True) + EPS), w, x),
        "match.norm-form"),
    "mean of products of two values": (
        lambda n, w, x: late(n, torch.rsqrt((n * (n + 1)).mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "epsilon as a bound": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True).clamp(min=EPS)), w, x),
        "match.norm-eps"),
    "negative epsilon": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + -EPS), w, x),
        "match.norm-eps"),
    "epsilon outside the root": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True)) + EPS, w, x),
        "match.norm-form"),
    "epsilon beside the root": (
        lambda n, w, x: w * (n / (n.pow(2).mean(-1, True).sqrt() + EPS)).to(x.dtype),
        "match.norm-form"),
    "mean subtracted": (
        lambda n, w, x: late(
            n - n.mean(-1, True), torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x),
        "match.norm-axis"),
    "epsilon per dim": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + w[:1]), w, x),
        "match.norm-eps"),
    "squares in bf16": (
        lambda n, w, x: late(n, torch.rsqrt(x.pow(2).float().mean(-1, True) + EPS), w, x),
        "match.norm-dtype"),
    "all in bf16": (
        lambda n, w, x: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS)), "match.norm-dtype"),
    "to another 16-bit dtype": (
        lambda n, w, x: (n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS)).to(torch.float16),
        "match.norm-dtype"),
    "weight by head": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS),
                             w.expand(H, D) * torch.arange(1, H + 1)[:, None].to(w.dtype), x),
        "match.norm-form"),
    "scaled after": (
        lambda n, w, x: 1.2 * late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x),
        "match.norm-order"),
    "clamped after": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x).clamp(-1, 1),
        "match.norm-order"),
    "biased after": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x) + w,
        "match.norm-order"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_look_alikes(name: str) -> None:
    body, code = FORMS[name]
    for plain in (False, True):
        refused(like(body, plain=plain), code)


def test_mixed_float32_and_float64_are_refused() -> None:
    def mean_in_double(n: Any, w: Any, x: Any) -> Any:
        v = n.pow(2).mean(-1, True, dtype=torch.float64) + EPS
        return (n * torch.rsqrt(v)).to(x.dtype)

    refused(like(mean_in_double), "match.norm-dtype")

    def all_double(n: Any, w: Any, x: Any) -> Any:
        n = n.double()
        return late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x)

    refused(like(all_double), "match.norm-dtype")

    def double_weight(n: Any, w: Any, x: Any) -> Any:
        return (n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS) * w.double()).to(x.dtype)

    refused(like(double_weight), "match.norm-dtype")


def test_float64_stays_float64() -> None:
    x, w = value(B, S, H, D, dtype=torch.float64), value(D, dtype=torch.float64)
    fn = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS))  # noqa: E731
    assert read(trace(fn, x, w)).out_dtype == torch.float64


def test_layer_norm_and_l2_norm() -> None:
    layer = trace(lambda x, w: F.layer_norm(x, (D,), w), value(B, S, H, D), value(D))
    assert isinstance(read_norm(layer.view("bshd")), Miss)
    plain = trace(lambda x, w: F.layer_norm(x, (D,), w), value(B, S, H, D), value(D), plain=True)
    refused(plain, "match.norm-form")

    def by_vector_norm(n: Any, w: Any, x: Any) -> Any:
        return late(n, 1 / (torch.linalg.vector_norm(n, dim=-1, keepdim=True) + EPS), w, x)

    for plain_ in (False, True):
        fact = read_norm(like(by_vector_norm, plain=plain_).view("bshd"))
        assert isinstance(fact, Miss)


def test_weight_times_inverse_first_rounds_elsewhere() -> None:
    """n * (inv * w) is not (n * inv) * w in floating point."""

    def body(n: Any, w: Any, x: Any) -> Any:
        inv = torch.rsqrt(n.pow(2).mean(-1, True) + EPS)
        return (n * (inv * w.float())).to(x.dtype)

    assert isinstance(read_norm(like(body).view("bshd")), Miss)

    def other(n: Any, w: Any, x: Any) -> Any:
        inv = torch.rsqrt(n.pow(2).mean(-1, True) + EPS)
        return ((n * w.float()) * inv).to(x.dtype)

    assert isinstance(read_norm(like(other).view("bshd")), Miss)


@pytest.mark.parametrize("name", ["projection", "bias", "input", "clamp"])
def test_no_norm(name: str) -> None:
    def fn(x: Any, w: Any, b: Any) -> Any:
        y = x.view(B * S, -1) @ w
        y = y + b if name == "bias" else y.clamp(-8, 8) if name == "clamp" else y
        return (x if name == "input" else y).view(B, S, H, D)

    args = (value(B, S, H * D), value(H * D, H * D), value(H * D))
    refused(trace(fn, *args), "match.no-norm")


def test_residual_norm_before_the_projection_is_not_the_qk_norm() -> None:
    def fn(x: Any, w: Any, p: Any) -> Any:
        return (norm(x, w).view(B * S, -1) @ p).view(B, S, H, D)

    traced = trace(fn, value(B, S, H * D), value(H * D), value(H * D, H * D))
    refused(traced, "match.no-norm")
