"""The fused prologue against a copy of the same bytes and against plain Inductor.

Inputs as in docs/performance.md: packed qkv in bf16, bf16 weights (Qwen3: late), f32 cos|sin
table, packed cache ``[blocks, Hkv, 16, 2 * D]``, shuffled slots. Every timed configuration is
checked in the same run: outputs and caches are poisoned, the timed graph is replayed, and all of
it is compared with the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.backends import reference
from fusion.backends.triton import prologue
from fusion.backends.triton.bench import harness
from fusion.backends.triton.prologue_plan import Attributes
from fusion.backends.triton.prologue_tiles import Tile, choose

HEADS = ((32, 8, 128), (64, 8, 128), (8, 1, 128))
TOKENS = (1, 16, 128, 1024, 8192)
BLOCK = 16
TABLE_ROWS = 8192
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Heads of q and of k/v, head size, tokens; optionally an fp8 cache."""

    q_heads: int
    kv_heads: int
    dim: int
    tokens: int
    cache_dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> tuple[int, int]:
        """Fewest bytes read and written: q, k, v once, the table rows; q, the cache rows."""
        rows = self.q_heads + 2 * self.kv_heads
        read = self.tokens * (2 * self.dim * rows + 4 * self.dim)
        item = self.cache_dtype.itemsize
        written = self.tokens * self.dim * (2 * self.q_heads + 2 * item * self.kv_heads)
        return read, written

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}/{self.dim} T={self.tokens}"


@dataclass(frozen=True)
class Row:
    """One measured shape. ``inductor_us`` is None where it was not asked for."""

    shape: Shape
    tile: str
    us: float
    copy_us: float
    inductor_us: float | None
    error: str

    @property
    def to_copy(self) -> float:
        """Time over that of a copy of the same bytes."""
        return self.us / self.copy_us

    @property
    def to_inductor(self) -> float | None:
        """How many times faster than plain Inductor."""
        return None if self.inductor_us is None else self.inductor_us / self.us

    def __str__(self) -> str:
        faster = "-" if self.to_inductor is None else f"{self.to_inductor:.2f}x"
        plain = "-" if self.inductor_us is None else f"{self.inductor_us:.1f}"
        return (
            f"{self.shape!s:22} {self.us:8.2f} {self.copy_us:8.2f} {self.to_copy:6.2f} "
            f"{plain:>8} {faster:>7}  {self.error or 'ok':8} {self.tile}"
        )


HEADER = (
    f"{'shape':22} {'us':>8} {'copy':>8} {'/copy':>6} {'inductor':>8} {'faster':>7}  "
    f"{'check':8} tile"
)


def inputs(shape: Shape, seed: int, device: str = "cuda") -> dict[str, Any]:
    """Arguments of ``qk_norm_rope_kv_cache`` for a shape, caches filled with a known pattern."""
    g = torch.Generator(device).manual_seed(seed)
    hq, hk, d, t = shape.q_heads, shape.kv_heads, shape.dim, shape.tokens
    qkv = torch.randn(t, (hq + 2 * hk) * d, generator=g, device=device).bfloat16()
    q, k, v = torch.split(qkv, [hq * d, hk * d, hk * d], dim=1)
    blocks = -(-t // BLOCK) + 3
    cache = torch.empty(blocks, hk, BLOCK, 2 * d, device=device, dtype=shape.cache_dtype)
    poison(cache)
    nhd = cache.transpose(1, 2)
    return {
        "query": q.view(t, hq, d),
        "key": k.view(t, hk, d),
        "value": v.view(t, hk, d),
        "q_weight": (1 + 0.2 * torch.randn(d, generator=g, device=device)).bfloat16(),
        "k_weight": (1 + 0.2 * torch.randn(d, generator=g, device=device)).bfloat16(),
        "cos": _table(d, device)[:, : d // 2],
        "sin": _table(d, device)[:, d // 2 :],
        "positions": torch.randint(0, TABLE_ROWS, (t,), generator=g, device=device),
        "key_cache": nhd[..., :d],
        "value_cache": nhd[..., d:],
        "slot_mapping": torch.randperm(blocks * BLOCK, generator=g, device=device)[:t],
    }


@functools.lru_cache(maxsize=4)
def _table(dim: int, device: str) -> Tensor:
    angle = torch.arange(TABLE_ROWS)[:, None] * 1e6 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([angle.cos(), angle.sin()], 1).float().to(device)


def poison(x: Tensor) -> None:
    """Fill a buffer with bytes that no right result has (a finite number in each dtype)."""
    x.view(torch.uint8).fill_(0x5B)


def _attributes(shape: Shape) -> Attributes:
    return Attributes(True, rotary_dim=shape.dim, out_dtype=torch.bfloat16)


def fused(
    args: dict[str, Any], shape: Shape, tile: Tile | None = None, static: bool = True
) -> Tensor:
    """One call of the Triton kernel, by default as compiled graphs use it; the rotated q."""
    return prologue.launch(args, _attributes(shape), EPS, EPS, tile, static)[0]


def unfused(args: dict[str, Any], shape: Shape) -> Tensor:
    """The same in plain torch, as a model writes it; compiled by Inductor for comparison."""
    cos, sin = args["cos"][args["positions"]], args["sin"][args["positions"]]

    def norm_rope(x: Tensor, w: Tensor) -> Tensor:
        n = x.float()
        n = n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS)
        y = (w * n.to(x.dtype)).float()
        a, b = y.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    q = norm_rope(args["query"], args["q_weight"])
    k = norm_rope(args["key"], args["k_weight"])
    slots = args["slot_mapping"]
    block, offset = slots // BLOCK, slots % BLOCK
    args["key_cache"][block, offset] = k
    args["value_cache"][block, offset] = args["value"]
    return q


def verify(args: dict[str, Any], q: Tensor, shape: Shape) -> str:
    """Empty if q and the whole cache are right after a call, else what differs."""
    fresh = dict(args)
    whole = args["key_cache"]._base
    expected = torch.empty_like(whole)
    poison(expected)
    nhd = expected.transpose(1, 2)
    fresh["key_cache"], fresh["value_cache"] = nhd[..., : shape.dim], nhd[..., shape.dim :]
    want, _ = reference.qk_norm_rope_kv_cache(
        **fresh, q_eps=EPS, k_eps=EPS, rotary_dim=shape.dim, rope_dtype=torch.float32,
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    # Another order of the sum may move one rounding of the norm: two bf16 units of a row's top.
    for name, got, ref in (("q", q, want), ("k", args["key_cache"], fresh["key_cache"])):
        top = ref.float().abs().amax(-1, keepdim=True)
        step = 0.13 if ref.dtype.itemsize == 1 else 0.016
        bad = ~((got.float() - ref.float()).abs() <= step * top)
        if bad.any():
            return f"{name}: {int(bad.sum())} wrong"
    a, b = args["value_cache"].float(), fresh["value_cache"].float()
    return "" if torch.equal(a, b) else f"v: {int((a != b).sum())} wrong"


def measure(
    shape: Shape,
    function: Callable[[dict[str, Any], Shape], Tensor],
    check: bool = True,
    sets: int | None = None,
) -> tuple[float, str]:
    """(microseconds, error) of a function of (arguments, shape) under graph replay."""
    sets = sets or harness.sets_for(sum(shape.bytes))
    args = [inputs(shape, seed) for seed in range(sets)]
    count = harness.calls_for(sets)
    graph, outputs = harness.capture(
        [functools.partial(function, args[i % sets], shape) for i in range(count)]
    )
    error = ""
    if check:
        for q in outputs:
            assert isinstance(q, Tensor)
            q.fill_(float("nan"))
        for a in args:
            poison(a["key_cache"]._base)
        graph.replay()
        torch.cuda.synchronize()
        for i, q in enumerate(outputs):
            assert isinstance(q, Tensor)
            error = error or verify(args[i % sets], q, shape)
    return harness.replay_us(graph, count), error


def compiled(shape: Shape) -> Callable[[dict[str, Any], Shape], Tensor]:
    """`unfused`, compiled by Inductor for exactly this shape."""
    torch._dynamo.reset()
    function: Callable[[dict[str, Any], Shape], Tensor] = torch.compile(
        unfused, dynamic=False, fullgraph=True
    )
    function(inputs(shape, 0), shape)
    return function


def run(
    heads: Iterable[tuple[int, int, int]] = HEADS,
    tokens: Sequence[int] = TOKENS,
    *,
    inductor: bool = True,
    cache_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    sets: int | None = None,
    report: Callable[[str], None] | None = print,
) -> list[Row]:
    """Measure and check every shape; prints a line each through ``report``.

    ``sets`` fixes how many buffer sets rotate; by default as many as it takes to miss the L2
    cache. With 8, calls of a few MB find part of their data there.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the prologue benchmark needs a GPU; torch sees none")
    rows = []
    if report:
        report(HEADER)
    for hq, hk, d in heads:
        for t in tokens:
            shape = Shape(hq, hk, d, t, cache_dtype)
            chosen = tile or choose(hq, hk, d, t)
            us, error = measure(shape, functools.partial(fused, tile=chosen), sets=sets)
            floor = harness.copy_us(*shape.bytes, sets)
            plainly = inductor and cache_dtype == torch.bfloat16  # index_put wants one dtype
            plain = measure(shape, compiled(shape), check=False, sets=sets)[0] if plainly else None
            rows.append(Row(shape, str(chosen), us, floor, plain, error))
            if report:
                report(str(rows[-1]))
    return rows
