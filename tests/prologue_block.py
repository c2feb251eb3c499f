"""The reference block of the prologue tests (G0), in many spellings, and the harness around it.

``Block`` is a paged attention prologue as model code: packed qkv ``[T, (Hq + 2 Hk) * D]``,
per-head RMSNorm, rope by ``cos_sin_cache[positions]``, paged write by slot, and a read of what
was written. Every choice is a field, so a test says only what is odd about its case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.layout import KVCacheLayout, split_kv_cache
from fusion.report import Report, Site

Write = Callable[["Inputs", Tensor, Tensor], None]


@dataclass(frozen=True)
class Block:
    """One prologue. ``hook`` may change q and k between the named stages (for look-alikes)."""

    tokens: int = 5
    heads: int = 8
    kv_heads: int = 4
    dim: int = 32
    rotary: int | None = None
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    blocks: int = 8
    block_size: int = 16
    norm: str = "late"
    rope: str = "chunk"
    rope_dtype: torch.dtype | None = None
    write: str = "op"
    layout: KVCacheLayout = KVCacheLayout.PACKED
    cache_dtype: torch.dtype | None = None
    q_eps: float = 1e-6
    k_eps: float = 1e-6
    padding: bool = True
    hook: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]] | None = field(
        default=None, compare=False
    )

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head."""
        return self.dim if self.rotary is None else self.rotary

    def stage(self, name: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Where a look-alike gets its twist."""
        return (q, k) if self.hook is None else self.hook(name, q, k)

    def __call__(self, x: Inputs) -> tuple[Tensor, ...]:
        """Run the prologue and read the cache, as an attention would."""
        h, k_h, d = self.heads, self.kv_heads, self.dim
        q, k, v = x.qkv.split([h * d, k_h * d, k_h * d], dim=-1)
        q, k, v = q.view(-1, h, d), k.view(-1, k_h, d), v.view(-1, k_h, d)
        q, k = self.stage("split", q, k)
        q, k = (
            NORMS[self.norm](q, x.q_weight, self.q_eps),
            NORMS[self.norm](k, x.k_weight, self.k_eps),
        )
        q, k = self.stage("norm", q, k)
        table = x.cos_sin[x.positions]
        if self.rope_dtype is not None:
            table = table.to(self.rope_dtype)
        cos, sin = table.chunk(2, -1)
        q, k = (ROPES[self.rope](t, cos, sin, self.rotary_dim).to(self.dtype) for t in (q, k))
        q, k = self.stage("rope", q, k)
        WRITES[self.write](self, x, k, v)
        key, value = x.planes(self)
        seen = key.flatten(0, 1)[x.readable].float().sum(0) + value.flatten(0, 1)[
            x.readable
        ].float().sum(0)
        return q, seen


@dataclass
class Inputs:
    """What a block reads and writes."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos_sin: Tensor
    positions: Tensor
    slots: Tensor
    cache: Any
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    readable: Tensor | None = None

    def planes(self, block: Block) -> tuple[Tensor, Tensor]:
        """K and V as NHD views."""
        return split_kv_cache(self.cache, block.layout, block.dim)


def inputs(block: Block, seed: int = 0) -> Inputs:
    """Random inputs; slot 0 and the neighbours of every written slot hold other content."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = block.dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    t, d, kv = block.tokens, block.dim, block.kv_heads
    weight_dtype = block.weight_dtype or block.dtype
    cache_dtype = block.cache_dtype or block.dtype
    shapes = {
        KVCacheLayout.PACKED: (block.blocks, kv, block.block_size, 2 * d),
        KVCacheLayout.KV_FIRST: (2, block.blocks, block.block_size, kv, d),
        KVCacheLayout.BLOCK_FIRST: (block.blocks, 2, block.block_size, kv, d),
    }
    if block.layout in shapes:
        cache: Any = rand(*shapes[block.layout], dtype=cache_dtype)
    else:
        nhd = (block.blocks, block.block_size, kv, d)
        hnd = (block.blocks, kv, block.block_size, d)
        shape = nhd if block.layout is KVCacheLayout.NHD else hnd
        cache = (rand(*shape, dtype=cache_dtype), rand(*shape, dtype=cache_dtype))
    total = block.blocks * block.block_size
    slots = torch.randperm(total, generator=g)[:t]
    readable = slots.clone()
    if block.padding and block.write == "op" and t > 2:
        slots[1] = -1
    angles = torch.rand(64, block.rotary_dim // 2, generator=g) * 6.3
    scales = block.cache_dtype is not None and block.cache_dtype.itemsize == 1
    return Inputs(
        rand(t, (block.heads + 2 * kv) * d),
        rand(d, dtype=weight_dtype),
        rand(d, dtype=weight_dtype),
        torch.cat([angles.cos(), angles.sin()], -1).to(block.rope_dtype or block.dtype),
        torch.randint(0, 64, (t,), generator=g),
        slots,
        cache,
        torch.tensor(0.25) if scales else None,
        torch.tensor(3.0) if scales else None,
        readable,
    )


# --- spellings -------------------------------------------------------------------------------


def _norm(cast: str, inverse: str = "rsqrt", weight: str = "w") -> Callable[..., Tensor]:
    def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
        n = x.float()
        variance = n.pow(2).mean(-1, keepdim=True) + eps
        if inverse == "rsqrt":
            n = n * torch.rsqrt(variance)
        elif inverse == "pow":
            n = n * variance.pow(-0.5)
        else:
            n = n / variance.sqrt()
        if weight == "absent":
            return n.to(x.dtype)
        w = 1.0 + w.float() if weight == "1+w" else w
        if cast == "late":
            return w * n.to(x.dtype)
        return (n * w.float()).to(x.dtype)

    return norm


NORMS: dict[str, Callable[..., Tensor]] = {
    "late": _norm("late"),
    "early": _norm("early"),
    "1+w": _norm("early", weight="1+w"),
    "absent": _norm("late", weight="absent"),
    "pow": _norm("late", "pow"),
    "div": _norm("early", "div"),
    "F.rms_norm": lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps),
    "none": lambda x, w, eps: x,
}


def _half(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    cos, sin = (torch.cat((t, t), -1).unsqueeze(1) for t in (cos, sin))
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot[..., : rotary // 2], rot[..., rotary // 2 :]
    out = rot * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rot, rest = x[..., :rotary], x[..., rotary:]
    a, b = rot[..., ::2], rot[..., 1::2]
    out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def _complex(x: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> Tensor:
    table = torch.complex(cos.float(), sin.float()).unsqueeze(1)
    rot, rest = x[..., :rotary].float(), x[..., rotary:]
    pairs = torch.view_as_complex(rot.unflatten(-1, (-1, 2)).contiguous())
    out = torch.view_as_real(pairs * table).flatten(-2).type_as(x)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


ROPES: dict[str, Callable[..., Tensor]] = {
    "chunk": _half,
    "rotate_half": _rotate_half,
    "interleaved": _interleaved,
    "complex": _complex,
}


def _write_op(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = x.planes(block)
    fusion.ops.kv_cache_write(k, v, key, value, x.slots, x.k_scale, x.v_scale)


def _write_slots(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = (p.view(-1, *p.shape[2:]) for p in x.planes(block))
    key[x.slots], value[x.slots] = k, v


def _write_index_copy(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = (p.view(-1, *p.shape[2:]) for p in x.planes(block))
    key.index_copy_(0, x.slots, k)
    value.index_copy_(0, x.slots, v)


def _write_block_offset(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = x.planes(block)
    page, offset = x.slots // block.block_size, x.slots % block.block_size
    key[page, offset] = k
    value[page, offset] = v


def _write_scatter(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = (p.view(-1, *p.shape[2:]) for p in x.planes(block))
    index = x.slots[:, None, None].expand_as(k)
    key.scatter_(0, index, k)
    value.scatter_(0, index, v)


def _write_range(block: Block, x: Inputs, k: Tensor, v: Tensor) -> None:
    key, value = (p.view(-1, *p.shape[2:]) for p in x.planes(block))
    key[3 : 3 + block.tokens] = k
    value[3 : 3 + block.tokens] = v


WRITES: dict[str, Callable[..., None]] = {
    "op": _write_op,
    "slots": _write_slots,
    "index_copy": _write_index_copy,
    "block_offset": _write_block_offset,
    "scatter": _write_scatter,
    "range": _write_range,
}


# --- harness ---------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What the ways of running one block gave: eager, fused, and unfused where asked for."""

    runs: list[tuple[tuple[Tensor, ...], Inputs]]
    report: Report

    @property
    def site(self) -> Site:
        """The only site of the pass."""
        (site,) = [s for s in self.report.sites if s.pass_name == "qk_norm_rope_kv_cache"]
        return site

    def assert_equal(self) -> None:
        """Outputs and the whole cache are equal, bit for bit, in all of them."""
        eager, *others = self.runs
        assert others
        for other in others:
            for a, b in zip(eager[0], other[0], strict=True):
                assert same_bits(a, b)
            for a, b in zip(caches(eager[1]), caches(other[1]), strict=True):
                assert same_bits(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(width), b.contiguous().view(width))
    )


def caches(x: Inputs) -> tuple[Tensor, ...]:
    """The cache buffers of some inputs."""
    return x.cache if isinstance(x.cache, tuple) else (x.cache,)


def run(
    block: Block,
    *,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    unfused: bool = False,
    **compile_args: Any,
) -> Outcome:
    """Run a block eagerly and fused (inner ``aot_eager``), and compiled without passes if asked."""
    base = {"inner": "aot_eager", **(options or {})}
    chosen: list[dict[str, Any] | None] = [None, base]
    if unfused:
        chosen.insert(1, {**base, "qk_norm_rope_kv_cache": "off"})
    results = []
    before = len(fusion.reports())
    for one in chosen:
        x = copy.deepcopy(inputs(block, seed))
        fn = functional(block)
        if one is not None:
            torch._dynamo.reset()
            fn = torch.compile(fn, backend="fusion", options=one, **compile_args)
        results.append((fn(x), x))
    assert len(fusion.reports()) > before
    return Outcome(results, fusion.reports()[-1])


def functional(block: Block) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """The block as a function of tensors (caches as graph inputs)."""

    def fn(x: Inputs) -> tuple[Tensor, ...]:
        return block(x)

    return fn


def variant(**changes: Any) -> Block:
    """G0 with some fields changed."""
    return replace(Block(), **changes)
