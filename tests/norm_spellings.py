"""Spellings of RMSNorm, for the tests of its recogniser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.match.facts import Miss, RMSNorm
from fusion.match.norm import read_norm
from tests.match_graphs import Traced, assert_norm_holds

B, S, H, D = 2, 5, 3, 32
EPS = 1e-6
bf16 = torch.bfloat16


def value(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def read(traced: Traced, dims: str = "bshd") -> RMSNorm:
    view = traced.view(dims)
    fact = read_norm(view)
    assert isinstance(fact, RMSNorm), fact
    assert_norm_holds(traced, fact, view)
    return fact


def refused(traced: Traced, code: str, dims: str = "bshd") -> Miss:
    fact = read_norm(traced.view(dims))
    assert isinstance(fact, Miss), fact
    assert fact.reason.code == code, fact.reason
    assert any(n.name == fact.reason.node for n in traced.graph.nodes)
    return fact


SQUARES: dict[str, Callable[[Any], Any]] = {
    "pow": lambda n: n.pow(2),
    "product": lambda n: n * n,
    "square": torch.square,
}
INVERSES: dict[str, Callable[[Any, Any], Any]] = {
    "rsqrt": lambda n, v: n * torch.rsqrt(v),
    "pow": lambda n, v: n * torch.pow(v, -0.5),
    "div": lambda n, v: n / torch.sqrt(v),
    "recip": lambda n, v: n * (1 / torch.sqrt(v)),
}
MEANS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda q: q.mean(-1, keepdim=True),
    "sum / D": lambda q: q.sum(-1, keepdim=True) / q.shape[-1],
    "mean, unsqueezed": lambda q: q.mean(-1).unsqueeze(-1),
}
# name: (function of (n, w, x), cast, mode)
WEIGHTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str, str]] = {
    "late": (lambda n, w, x: w * n.to(x.dtype), "late", "w"),
    "early": (lambda n, w, x: (n * w).to(x.dtype), "early", "w"),
    "early, cast": (lambda n, w, x: (n * w.float()).to(x.dtype), "early", "w"),
    "early 1+w": (lambda n, w, x: (n * (1 + w.float())).to(x.dtype), "early", "1+w"),
    "late 1+w": (lambda n, w, x: (w + 1) * n.to(x.dtype), "late", "1+w"),
    "none": (lambda n, w, x: n * w.float(), "none", "w"),
    "none 1+w": (lambda n, w, x: (1.0 + w.float()) * n, "none", "1+w"),
    "no weight": (lambda n, w, x: n.to(x.dtype), "late", "w"),
}


def norm(x: Any, w: Any, weight: str = "late", inverse: str = "rsqrt", square: str = "pow",
         mean: str = "mean", eps: Any = EPS) -> Any:  # fmt: skip
    """One spelling of a norm over the last axis."""
    n = x.float()
    v = MEANS[mean](SQUARES[square](n)) + eps
    return WEIGHTS[weight][0](INVERSES[inverse](n, v), w, x)
