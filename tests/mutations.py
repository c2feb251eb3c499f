"""The reference prologue as one function, and single mutations of it for the explanation test.

A mutation changes one thing. Where the change is a line of its own, the line carries the mark
``# <name>``, so that the test knows which line (and node) the report should point at; ``codes``
are the reason codes that say exactly what the mutation is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fusion

T, HQ, HK, D, BLOCKS, BLOCK = 5, 8, 4, 32, 8, 16
EPS = 1e-6


@dataclass(frozen=True)
class Mutation:
    """A change of the prologue: what it is, and the codes that name it."""

    name: str
    about: str
    codes: tuple[str, ...]


@dataclass
class Inputs:
    """What the prologue reads and writes (all bf16, tables included)."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos_sin: Tensor
    positions: Tensor
    other_positions: Tensor
    slots: Tensor
    other_slots: Tensor
    cache: Tensor


def inputs() -> Inputs:
    """Random inputs, always the same."""
    g = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    angles = torch.rand(64, D // 2, generator=g) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    positions = torch.randperm(64, generator=g)
    slots = torch.randperm(BLOCKS * BLOCK, generator=g)
    return Inputs(
        rand(T, (HQ + 2 * HK) * D),
        rand(D),
        rand(D),
        table,
        positions[:T],
        positions[T : 2 * T],
        slots[:T],
        slots[T : 2 * T],
        rand(BLOCKS, BLOCK, HK, 2 * D),
    )


@torch.library.custom_op("fusion_test::opaque_scale", mutates_args=())
def opaque_scale(x: Tensor) -> Tensor:
    """An operator that nobody registered with fusion."""
    return x * 1.0


@opaque_scale.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def norm(x: Tensor, w: Tensor, m: str, side: str) -> Tensor:
    """RMSNorm of each head in f32, weight after the down-cast."""
    if m == f"no norm on {side}":
        return x
    if m == "norm in bf16":
        n = x
    else:
        n = x.float()
    if m == "centred norm":
        n = n - n.mean(-1, keepdim=True)  # centred norm
    if m == "sum for mean":
        v = n.pow(2).sum(-1, keepdim=True)  # sum for mean
    elif m == "mean over heads":
        v = n.pow(2).mean(-2, keepdim=True)  # mean over heads
    elif m == "mean over everything":
        v = n.pow(2).mean((-2, -1), keepdim=True)  # mean over everything
    elif m == "abs for square":
        v = n.abs().mean(-1, keepdim=True)  # abs for square
    elif m == "cube for square":
        v = n.abs().pow(3).mean(-1, keepdim=True)  # cube for square
    elif m == "mean of half the head":
        v = n[..., : D // 2].pow(2).mean(-1, keepdim=True)  # mean of half the head
    elif m == "scaled mean":
        v = n.pow(2).mean(-1, keepdim=True) * 2.0  # scaled mean
    else:
        v = n.pow(2).mean(-1, keepdim=True)
    if m == "eps outside":
        n = n * (torch.rsqrt(v) + 0.5)  # eps outside
    elif m == "eps per head":
        eps = torch.arange(1, x.shape[1] + 1).view(-1, 1) * 0.1
        n = n * torch.rsqrt(v + eps)  # eps per head
    elif m == "root not inverted":
        n = n * torch.sqrt(v + EPS)  # root not inverted
    else:
        n = n * torch.rsqrt(v + EPS)
    if m == "no weight on q" and side == "q":
        return n.to(x.dtype)
    if m == "tanh in the norm":
        n = n.tanh()  # tanh in the norm
    return w * n.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, m: str, side: str) -> Tensor:
    """Half-split rotation."""
    if m == f"no rope on {side}":
        return x
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if m == "partial rope on k" and side == "k":
        x, rest = x[..., : D // 2], x[..., D // 2 :]
        cos, sin = cos[..., : D // 4], sin[..., : D // 4]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    if m == "interleaved k" and side == "k":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    if m == "rope over heads":
        a, b = x.chunk(2, 1)
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)  # rope over heads
    a, b = x.chunk(2, -1)
    if m == "shifted pairs":
        b = b.roll(1, -1)
    if m == "table per head":
        scale = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        cos = cos * scale  # table per head
    if m == "both signs":
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)  # both signs
    if m == "first sign":
        return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)  # first sign
    if m == "second sign":
        return torch.cat((a * cos - b * sin, b * cos - a * sin), -1)  # second sign
    if m == "halves swapped":
        return torch.cat((b * cos + a * sin, a * cos - b * sin), -1)  # halves swapped
    if m == "one product missing":
        return torch.cat((a * cos, b * cos + a * sin), -1)  # one product missing
    if m == "max for sum":
        return torch.cat((a * cos - b * sin, torch.maximum(b * cos, a * sin)), -1)  # max for sum
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def prologue(x: Inputs, m: str) -> tuple[Tensor, ...]:
    """The prologue with one mutation (none for an empty name), and a read of the cache."""
    more: list[Tensor] = []
    q, k, v = x.qkv.split([HQ * D, HK * D, HK * D], -1)
    q, k, v = q.view(-1, HQ, D), k.view(-1, HK, D), v.view(-1, HK, D)
    cos, sin = x.cos_sin[x.positions].chunk(2, -1)
    k_cos, k_sin = cos, sin
    if m == "k at other positions":
        k_cos, k_sin = x.cos_sin[x.other_positions].chunk(2, -1)
    if m == "rope before norm":
        q, k = norm(rope(q, cos, sin, m, "q"), x.q_weight, m, "q"), rope(k, cos, sin, m, "k")
        k = norm(k, x.k_weight, m, "k")
    else:
        q, k = norm(q, x.q_weight, m, "q"), norm(k, x.k_weight, m, "k")
        if m == "added between norm and rope":
            q, k = q + 0.25, k + 0.25  # added between norm and rope
        if m == "opaque op between norm and rope":
            k = opaque_scale(k)  # opaque op between norm and rope
        q, k = rope(q, cos, sin, m, "q"), rope(k, k_cos, k_sin, m, "k")
    if m == "k scaled after rope":
        k = k * 1.25  # k scaled after rope
    if m == "k clamped after rope":
        k = k.clamp(-1, 1)  # k clamped after rope
    if m == "opaque op after rope":
        k = opaque_scale(k)  # opaque op after rope
    if m == "tokens of k reversed":
        k = k.flip(0)  # tokens of k reversed
    if m == "heads of k reversed":
        k = k.flip(1)  # heads of k reversed
    if m == "graph break before the write":
        torch._dynamo.graph_break()
    key, value = x.cache.split([D, D], -1)
    write(x, k, v, key, value, m, more)
    seen = x.cache.flatten(0, 1)[x.slots].float().sum(0)
    return q, seen, *more


def write(
    x: Inputs, k: Tensor, v: Tensor, key: Tensor, value: Tensor, m: str, more: list[Tensor]
) -> None:
    """Slot write of K and V."""
    if m == "no write":
        more.append(k)
        return
    if m in ("K accumulated", "only K written", "cache read between", "V to other slots"):
        page, offset = x.slots // BLOCK, x.slots % BLOCK
        if m == "K accumulated":
            key.index_put_((page, offset), k, accumulate=True)  # K accumulated
            value.index_put_((page, offset), v, accumulate=True)
            return
        key.index_put_((page, offset), k)
        if m == "only K written":
            return
        if m == "cache read between":
            v = v + x.cache.float().sum().to(v.dtype)  # cache read between
        if m == "V to other slots":
            page, offset = x.other_slots // BLOCK, x.other_slots % BLOCK
        value.index_put_((page, offset), v)
        return
    fusion.ops.kv_cache_write(k, v, key, value, x.slots)


MUTATIONS = [
    Mutation("both signs", "rotation in the other direction", ("match.rope-sign",)),
    Mutation("first sign", "one sign of the rotation", ("match.rope-sign",)),
    Mutation("second sign", "the other sign of the rotation", ("match.rope-sign",)),
    # With opaque tables this is the rotation by sin and -cos, whose second half has a wrong sign.
    Mutation("halves swapped", "the halves in the other order", ("match.rope-sign",)),
    Mutation("one product missing", "b * sin left out", ()),
    Mutation("max for sum", "another operator", ()),
    Mutation("shifted pairs", "partner of d is another element", ("match.rope-style",)),
    Mutation("rope over heads", "the rotation runs over heads", ("match.head-dim",)),
    Mutation("partial rope on k", "rotary width of k", ("match.q-k-differ",)),
    Mutation("interleaved k", "rope style of k", ("match.q-k-differ",)),
    Mutation("no rope on k", "k is not rotated", ("match.no-rope",)),
    Mutation("no rope on q", "q is not rotated", ("match.no-query",)),
    Mutation("k at other positions", "tables of other tokens", ("match.token-order",)),
    Mutation("table per head", "cos depends on the head", ("match.rope-table",)),
    Mutation("k scaled after rope", "an extra constant", ()),
    Mutation("k clamped after rope", "an extra operator", ()),
    Mutation("opaque op after rope", "an unknown operator", ("match.opaque-op",)),
    Mutation("tokens of k reversed", "order of the tokens", ("match.token-order",)),
    Mutation("heads of k reversed", "order of the heads", ()),
    Mutation("rope before norm", "order of rope and norm", ("match.norm-order",)),
    Mutation("added between norm and rope", "an extra operator", ()),
    Mutation("opaque op between norm and rope", "an unknown operator", ("match.opaque-op",)),
    Mutation("no norm on q", "q is not normed", ("match.q-k-differ",)),
    Mutation("no norm on k", "k is not normed", ("match.q-k-differ",)),
    Mutation("norm in bf16", "dtype of the norm", ("match.norm-dtype",)),
    Mutation("centred norm", "the mean is taken off", ()),
    Mutation("sum for mean", "another reduction", ()),
    Mutation("mean over heads", "axis of the mean", ("match.norm-axis",)),
    Mutation("mean over everything", "axes of the mean", ("match.norm-over-heads",)),
    Mutation("abs for square", "another power", ()),
    Mutation("cube for square", "another power", ()),
    Mutation("mean of half the head", "part of the axis", ("match.norm-axis",)),
    Mutation("scaled mean", "an extra constant", ()),
    Mutation("eps outside", "place of epsilon", ("match.norm-eps",)),
    Mutation("eps per head", "epsilon is no number", ("match.norm-eps",)),
    Mutation("root not inverted", "another operator", ()),
    Mutation("tanh in the norm", "an extra operator", ()),
    Mutation("no write", "nothing is written", ("match.no-cache-write",)),
    Mutation("only K written", "V is not written", ("match.cache-pair",)),
    Mutation("V to other slots", "V goes elsewhere", ("match.cache-pair",)),
    Mutation("K accumulated", "added instead of written", ("match.cache-write",)),
    Mutation("cache read between", "a read between the writes", ("safety.cache-read-between",)),
    Mutation("graph break before the write", "two graphs", ("match.graph-break",)),
]


def line_of(name: str) -> int | None:
    """The line of this file that carries the mark of a mutation."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    found = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {name}")]
    return found[0] if found else None


def mutated(name: str) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """The prologue with this mutation built in."""

    def run(x: Inputs) -> tuple[Tensor, ...]:
        return prologue(x, name)

    return run


class Layer(torch.nn.Module):
    """One prologue as a module (in this file, so that reports point to its lines)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.run = mutated(name)

    def forward(self, x: Inputs) -> tuple[Tensor, ...]:
        return self.run(x)
