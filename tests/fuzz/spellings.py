"""Norms, ropes and cache writes as the fuzzed programs call them, right and nearly right.

Shapes: x ``[..., D]``; cos and sin ``[..., R / 2]`` or, for ``rotate_half``, ``[..., R]``, with
the head dimension already inserted. A name in ``ODD_NORMS`` and ``ODD_ROPES`` is a look-alike:
one thing differs from what its name promises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def seen(cache: Tensor) -> Tensor:
    """The content as whole numbers, whose sum is the same in any order of memory."""
    return (cache.float().nan_to_num(0.0).clamp(-1000, 1000) * 256).long()


def late(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def early(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt((n * n).mean(-1, keepdim=True) + eps)
    return (n * w.float()).to(x.dtype)


def one_plus(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    n = n * torch.pow(n.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (n * (1.0 + w.float())).to(x.dtype)


def one_plus_late(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    return n.to(x.dtype) * (w + 1.0)


def divided(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.to(torch.float32)
    n = n / torch.sqrt(n.square().mean(dim=-1, keepdim=True) + eps)
    return n.type_as(x) * w


def recip(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    n = n * (1 / torch.sqrt(torch.mean(n**2, -1, True) + eps))
    return (w.float() * n).type_as(x)


def sum_over_d(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return w * n.to(x.dtype)


def uncast(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps) * w.float()


def unweighted(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def storage(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def builtin(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w.to(x.dtype), eps)


def no_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x


NORMS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    f.__name__: f
    for f in (
        late,
        early,
        one_plus,
        one_plus_late,
        divided,
        recip,
        sum_over_d,
        uncast,
        unweighted,
        storage,
        builtin,
        no_norm,
    )
}


def summed(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def over_heads(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(-2, keepdim=True) + eps)).to(x.dtype)


def over_tokens(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(0, keepdim=True) + eps)).to(x.dtype)


def over_all_heads(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean((-2, -1), keepdim=True) + eps)).to(x.dtype)


def centred(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    c = n - n.mean(-1, keepdim=True)
    return w * (n * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def eps_outside(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * (torch.rsqrt(n.pow(2).mean(-1, keepdim=True)) + eps)).to(x.dtype)


def eps_twice(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps + eps)).to(x.dtype)


def clamped(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True).clamp(min=eps))).to(x.dtype)


def weight_twice(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * late(x, w, eps)


def weight_rolled(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return late(x, w.roll(1), eps)


def weight_squared(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return early(x, w * w, eps)


def normed_twice(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return late(late(x, w, eps), w, eps)


def neighbour(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """The variance is that of the next head."""
    n = x.float()
    v = n.pow(2).mean(-1, keepdim=True).roll(1, -2)
    return w * (n * torch.rsqrt(v + eps)).to(x.dtype)


def half_variance(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    v = n[..., : x.shape[-1] // 2].pow(2).mean(-1, keepdim=True)
    return w * (n * torch.rsqrt(v + eps)).to(x.dtype)


def cubed(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt((n * n * n).abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


ODD_NORMS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    f.__name__: f
    for f in (
        summed,
        over_heads,
        over_tokens,
        over_all_heads,
        centred,
        eps_outside,
        eps_twice,
        clamped,
        weight_twice,
        weight_rolled,
        weight_squared,
        normed_twice,
        neighbour,
        half_variance,
        cubed,
    )
}


Rope = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def half(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot[..., : rotary // 2], rot[..., rotary // 2 :]
    out = rot * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def interleaved(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot[..., ::2], rot[..., 1::2]
    out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def in_halves(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """Two cats: the rotated part first, the rest behind it."""
    rot, rest = x.split([rotary, x.shape[-1] - rotary], -1)
    a, b = rot.split(rotary // 2, -1)
    out = torch.cat([a * cos + (-b) * sin, sin * a + cos * b], -1)
    return torch.cat([out, rest], -1)


def complex_pairs(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    rot, rest = x[..., :rotary], x[..., rotary:]
    z = torch.view_as_complex(rot.float().unflatten(-1, (-1, 2)).contiguous())
    f = torch.complex(cos.float(), sin.float())
    out = torch.view_as_real(z * f).flatten(-2).type_as(x)
    return torch.cat((out, rest), -1)


ROPES: dict[str, Rope] = {
    f.__name__: f for f in (half, rotate_half, interleaved, in_halves, complex_pairs)
}


def backwards(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    return half(x, cos, -sin, rotary)


def sign_flipped(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    a, b = x[..., :rotary].chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin, x[..., rotary:]), -1)


def exchanged(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    return half(x, sin, cos, rotary)


def tail_zero(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    y = half(x, cos, sin, rotary)
    return torch.cat((y[..., :rotary], torch.zeros_like(y[..., rotary:])), -1)


def tail_first(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    y = half(x, cos, sin, rotary)
    return torch.cat((y[..., rotary:], y[..., :rotary]), -1)


def tail_rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """The last elements of the head are rotated, not the first."""
    a, b = x[..., x.shape[-1] - rotary :].chunk(2, -1)
    head = x[..., : x.shape[-1] - rotary]
    return torch.cat((head, a * cos - b * sin, b * cos + a * sin), -1)


def mixed_style(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """Reads neighbours, writes halves."""
    a, b = x[..., :rotary:2], x[..., 1:rotary:2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary:]), -1)


def sin_scaled(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    a, b = x[..., :rotary].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * (sin * 1.5), x[..., rotary:]), -1)


def table_reversed(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    return half(x, cos.flip(-1), sin.flip(-1), rotary)


def second_reversed(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    a, b = x[..., :rotary].chunk(2, -1)
    c, s = cos.flip(-1), sin.flip(-1)
    return torch.cat((a * cos - b * sin, b * c + a * s, x[..., rotary:]), -1)


def next_head(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """The partner comes from the neighbouring head."""
    a, b = x[..., :rotary].chunk(2, -1)
    o, p = x.roll(1, -2)[..., :rotary].chunk(2, -1)
    return torch.cat((a * cos - p * sin, b * cos + o * sin, x[..., rotary:]), -1)


def next_token(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    return half(x, cos.roll(1, 0), sin.roll(1, 0), rotary)


def twice(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    return half(half(x, cos, sin, rotary), cos, sin, rotary)


def last_untouched(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    """One element of the rotated part keeps its value."""
    y = half(x, cos, sin, rotary)
    return torch.cat((y[..., : rotary - 1], x[..., rotary - 1 :]), -1)


ODD_ROPES: dict[str, Rope] = {
    f.__name__: f
    for f in (
        backwards,
        sign_flipped,
        exchanged,
        tail_zero,
        tail_first,
        tail_rotated,
        mixed_style,
        sin_scaled,
        table_reversed,
        second_reversed,
        next_head,
        next_token,
        twice,
        last_untouched,
    )
}
