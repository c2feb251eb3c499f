"""Spellings of rotary embedding, for the tests of its recogniser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion.match.facts import Miss, Rope
from fusion.match.rope import read_rope
from tests.match_graphs import Traced, assert_rope_holds

B, S, H = 2, 5, 3
bf16 = torch.bfloat16


def tables(rotary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-width cos and sin ``[S, rotary // 2]``; not on the unit circle, so nothing cancels."""
    angle = torch.arange(S)[:, None] * 10 ** (-torch.arange(rotary // 2) / rotary)
    return (1.2 * angle.cos()).to(dtype), (0.9 * angle.sin() + 0.01).to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def wide(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table, table), -1)


# Each spelling rotates x [B, H, S, D] by half-width tables c and s [S, R/2].
Spelling = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def with_rotate_half(x: Any, c: Any, s: Any) -> Any:
    return x * wide(c) + rotate_half(x) * wide(s)


def swapped_operands(x: Any, c: Any, s: Any) -> Any:
    return wide(s) * rotate_half(x) + wide(c) * x


def by_chunks(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def by_slices(x: Any, c: Any, s: Any) -> Any:
    n = x.shape[-1] // 2
    a, b = x[..., :n], x[..., n:]
    return torch.cat((a * c - b * s, a * s + b * c), -1)


def by_view(x: Any, c: Any, s: Any) -> Any:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((a * c - b * s, b * c + a * s), -2).flatten(-2)


def by_roll(x: Any, c: Any, s: Any) -> Any:
    n = x.shape[-1] // 2
    return x * wide(c) + torch.roll(x, n, -1) * torch.cat((-s, s), -1)


def by_addition_of_negative(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c + b * (-s), b * c + a * s), -1)


def times_minus_one(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * wide(c) + torch.cat((b * -1, a), -1) * wide(s)


def into_a_buffer(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    out = torch.empty_like(x)
    n = x.shape[-1] // 2
    out[..., :n] = a * c - b * s
    out[..., n:] = b * c + a * s
    return out


def strided(x: Any, c: Any, s: Any) -> Any:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def strided_buffer(x: Any, c: Any, s: Any) -> Any:
    a, b = x[..., ::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., ::2] = a * c - b * s
    out[..., 1::2] = b * c + a * s
    return out


def paired(x: Any, c: Any, s: Any) -> Any:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((a * c - b * s, b * c + a * s), -1).reshape(x.shape)


def gptj(x: Any, c: Any, s: Any) -> Any:
    c, s = (t.repeat_interleave(2, -1) for t in (c, s))
    other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * c + other * s


def complex_product(x: Any, c: Any, s: Any) -> Any:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * torch.complex(c.float(), s.float())).flatten(-2)
    return turned.to(x.dtype)


HALF = [with_rotate_half, swapped_operands, by_chunks, by_slices, by_view, by_roll,
        by_addition_of_negative, times_minus_one, into_a_buffer]  # fmt: skip
INTERLEAVED = [strided, strided_buffer, paired, gptj, complex_product]


def head_of(x: torch.Tensor, spelling: Spelling, rotary: int, c: Any, s: Any) -> torch.Tensor:
    """The spelling on the first ``rotary`` elements of each head."""
    if rotary == x.shape[-1]:
        return spelling(x, c, s)
    return torch.cat((spelling(x[..., :rotary], c, s), x[..., rotary:]), -1)


def read(traced: Traced, dims: str = "bhsd") -> Rope:
    fact = read_rope(traced.view(dims), complex_tables=True)
    assert isinstance(fact, Rope), fact
    assert_rope_holds(traced, fact)
    return fact


def refused(traced: Traced, code: str, dims: str = "bhsd") -> Miss:
    fact = read_rope(traced.view(dims))
    assert isinstance(fact, Miss), fact
    assert fact.reason.code == code, fact.reason
    assert fact.reason.node is not None
    assert any(n.name == fact.reason.node for n in traced.graph.nodes)
    return fact


def value(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)
