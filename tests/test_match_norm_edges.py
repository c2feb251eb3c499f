"""Norms at the edge: constants that are tensors, and factors put together from parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.match_graphs import trace
from tests.norm_spellings import EPS, B, D, H, S, bf16, read, refused, value

f32 = torch.float32


def _normed(x: Any, eps: Any) -> Any:
    n = x.float()
    return n * torch.rsqrt(n.pow(2).mean(-1, True) + eps)


EPSILONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "full": (lambda x: torch.full((), EPS), EPS),
    "full_like": (lambda x: torch.full_like(x[..., :1], EPS, dtype=f32), EPS),
    "scalar_tensor": (lambda x: torch.scalar_tensor(EPS), EPS),
    "ones": (lambda x: torch.ones(()), 1.0),
    "ones_like": (lambda x: torch.ones_like(x[..., :1]), 1.0),
    # A tensor in 16 bits holds another number, and that is the one that is added.
    "bfloat16": (lambda x: torch.full((), EPS, dtype=bf16), float(torch.tensor(EPS, dtype=bf16))),
}


@pytest.mark.parametrize("name", EPSILONS)
def test_an_epsilon_that_fills_a_tensor_is_its_number(name: str) -> None:
    make, number = EPSILONS[name]
    traced = trace(lambda x: _normed(x, make(x)), value(B, S, H, D), plain=True)
    assert read(traced).eps == number


def test_the_one_that_is_added_to_the_weight_may_be_a_tensor() -> None:
    def fn(x: Any, w: Any) -> Any:
        return (_normed(x, EPS) * (torch.ones_like(w, dtype=f32) + w.float())).to(x.dtype)

    fact = read(trace(fn, value(B, S, H, D), value(D), plain=True))
    assert fact.weight_mode == "1+w" and fact.weight is not None
    assert fact.weight.op == "placeholder"


def test_a_true_that_is_added_is_no_number() -> None:
    traced = trace(lambda x: _normed(x, True), value(B, S, H, D), plain=True)
    refused(traced, "match.norm-eps")


def test_an_inverse_root_that_is_put_together_is_no_norm() -> None:
    """Half of the heads divide by the root of another mean."""

    def fn(x: Any, y: Any) -> Any:
        inverse = [torch.rsqrt(t.float().pow(2).mean(-1, True) + EPS) for t in (x, y)]
        return x.float() * torch.cat((inverse[0][:, :, :1], inverse[1][:, :, 1:]), 2)

    refused(trace(fn, value(B, S, H, D), value(B, S, H, D) * 2), "match.norm-form")
