"""Paged-attention calls for tests: poisoned problems, a float64 oracle, and a probe that tells a
kernel that is really non-causal from one that only says so.

A kernel here is any function with the arguments of ``fusion::paged_attention`` (without
``kernel``). Nothing in this file imports Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

NO_PAGE = 1 << 22  # a table entry that no cache has: following it is a fault


@dataclass
class Problem:
    """Everything that describes one call; :meth:`arguments` draws the tensors.

    The cache holds NaN (fp8: the NaN byte) wherever no row may look: page tails, free pages,
    keys left of every window. Table entries past the end or left of the window are out of range.
    """

    q_lens: tuple[int, ...] = (2,)
    kv_lens: tuple[int, ...] = (10,)
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dim_v: int | None = None
    page: int = 16
    layout: str = "NHD"
    query_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    rows_before: int = 0
    rows_after: int = 0
    query_strided: bool = False
    max_seq_len: int | None = None
    seed: int = 0
    device: str = "cpu"
    extra_blocks: int = 2
    values: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, b: int) -> Tensor:
        """[q_len, kv_len] bool: which key of request b each row sees."""
        n, kv = self.q_lens[b], self.kv_lens[b]
        pos = torch.arange(n)[:, None] + kv - n
        j = torch.arange(kv)[None, :]
        see = torch.ones(n, kv, dtype=torch.bool)
        if self.causal:
            see &= j <= pos
        if self.window_left >= 0:
            see &= j >= pos - self.window_left
        if self.window_right >= 0:
            see &= j <= pos + self.window_right
        return see

    def arguments(self) -> tuple[list[object], dict[str, object]]:
        """Positional and keyword arguments of the call; keys and values stay in ``values``."""
        gen = torch.Generator().manual_seed(self.seed)
        dim_v = self.dim_v or self.dim
        cache_dtype = self.cache_dtype or self.query_dtype
        per_seq = [-(-n // self.page) for n in self.kv_lens]
        width = max([*per_seq, 1]) + 1
        blocks = sum(per_seq) + self.extra_blocks
        free = torch.randperm(blocks, generator=gen).tolist()
        table = torch.full((len(self.q_lens), width), NO_PAGE, dtype=torch.int64)
        table[1::2, :] = -5
        shape = (blocks, self.page, self.kv_heads)
        key = torch.full((*shape, self.dim), math.nan)
        value = torch.full((*shape, dim_v), math.nan)
        for b, kv in enumerate(self.kv_lens):
            seen = self.visible(b).any(0).nonzero().flatten().tolist()
            for j in range(seen[0], seen[-1] + 1) if seen else ():
                at = j // self.page
                if not 0 <= table[b, at] < blocks:
                    table[b, at] = free.pop()
                slot = (int(table[b, at]), j % self.page)
                key[slot] = torch.randn(self.kv_heads, self.dim, generator=gen)
                value[slot] = torch.randn(self.kv_heads, dim_v, generator=gen)
            del kv
        key, value = key.to(cache_dtype), value.to(cache_dtype)
        tokens = self.rows_before + sum(self.q_lens) + self.rows_after
        if self.query_strided:
            wide = torch.randn(tokens, self.q_heads + 3, self.dim + 8, generator=gen)
            query = wide.to(self.query_dtype)[:, 1 : self.q_heads + 1, : self.dim]
        else:
            query = torch.randn(tokens, self.q_heads, self.dim, generator=gen)
            query = query.to(self.query_dtype)
        starts = [self.rows_before]
        for n in self.q_lens:
            starts.append(starts[-1] + n)
        self.values = {"query": query, "key": key, "value": value, "table": table}
        if self.sinks:
            self.values["sinks"] = torch.randn(self.q_heads, generator=gen)
        k_cache, v_cache = lay_out(key, value, self.layout, self.device)
        to = {"device": self.device, "dtype": self.index_dtype}
        positional: list[object] = [
            query.to(self.device), k_cache, v_cache, table.to(**to),
            torch.tensor(self.kv_lens).to(**to), torch.tensor(starts).to(**to),
            max([*self.q_lens, 1]), self.max_seq_len or max([*self.kv_lens, 1]),
            self.scale_value, self.causal, self.window_left, self.window_right, self.softcap,
            self.values["sinks"].to(self.device) if self.sinks else None,
            None if self.k_scale is None else torch.tensor(self.k_scale, device=self.device),
            None if self.v_scale is None else torch.tensor(self.v_scale, device=self.device),
        ]  # fmt: skip
        return positional, {"kv_layout": "SHUFFLE" if self.layout == "SHUFFLE" else "NHD"}

    @property
    def scale_value(self) -> float:
        """The softmax scale, 1/sqrt(D) unless given."""
        return self.dim**-0.5 if self.scale is None else self.scale

    def oracle(self) -> Tensor:
        """float64, row by row, in plain torch; call :meth:`arguments` first."""
        query, key, value = (self.values[n].double() for n in ("query", "key", "value"))
        table = self.values["table"]
        out = torch.zeros(query.shape[0], self.q_heads, value.shape[3], dtype=torch.float64)
        group = self.q_heads // self.kv_heads
        t = self.rows_before
        for b, n in enumerate(self.q_lens):
            see = self.visible(b)
            for i in range(n):
                keys = see[i].nonzero().flatten()
                if len(keys):
                    page = table[b, keys // self.page]
                    k = key[page, keys % self.page] * (self.k_scale or 1.0)
                    v = value[page, keys % self.page] * (self.v_scale or 1.0)
                    k, v = (x.repeat_interleave(group, 1) for x in (k, v))  # [keys, Hq, .]
                    s = torch.einsum("hd,jhd->hj", query[t + i], k) * self.scale_value
                    if self.softcap > 0:
                        s = self.softcap * torch.tanh(s / self.softcap)
                    if self.sinks:
                        s = torch.cat([s, self.values["sinks"].double()[:, None]], 1)
                    p = s.softmax(1)[:, : len(keys)]
                    out[t + i] = torch.einsum("hj,jhd->hd", p, v)
            t += n
        return out

    def check(self, fn: Callable[..., Tensor], tolerance: float | None = None) -> Tensor:
        """Run fn and compare with the oracle; the difference is relative to the largest value."""
        positional, keywords = self.arguments()
        have = fn(*positional, **keywords)
        want = self.oracle()
        assert have.shape == want.shape
        assert have.dtype == self.query_dtype
        if tolerance is None:
            tolerance = {torch.float32: 2e-5, torch.float16: 2e-3}.get(self.query_dtype, 1.6e-2)
        error = (have.double().cpu() - want).abs()
        bound = tolerance * max(1.0, float(want.abs().max()) if want.numel() else 1.0)
        assert not error.numel() or float(error.max()) <= bound, f"{error.max():.2e} in {self}"
        blank = [*range(self.rows_before), *range(len(want) - self.rows_after, len(want))]
        assert not have[blank].any(), f"rows of no request are not zero in {self}"
        return have


LAYOUTS = ("NHD", "HND", "PACKED", "KV_FIRST", "BLOCK_FIRST", "PADDED")


def lay_out(key: Tensor, value: Tensor, layout: str, device: str) -> tuple[Tensor, Tensor]:
    """Key and value [blocks, block, Hk, D] as views of a cache of that layout.

    PADDED: K and V in buffers of their own, with different strides and NaN between.
    """
    blocks, page, heads, dim = key.shape
    dim_v = value.shape[3]
    if layout == "SHUFFLE":
        x = 16 // key.element_size()
        bits = torch.uint8 if key.element_size() == 1 else key.dtype
        k = key.view(bits).view(blocks, page, heads, dim // x, x).permute(0, 2, 3, 1, 4)
        v = value.view(bits).view(blocks, page // x, x, heads, dim_v).permute(0, 3, 1, 4, 2)
        return tuple(t.contiguous().view(key.dtype).to(device) for t in (k, v))
    if layout == "NHD":
        return key.to(device), value.to(device)
    nan = {"fill_value": math.nan, "dtype": torch.float32}
    if layout == "HND":
        shells = [torch.full((blocks, heads, page, n), **nan) for n in (dim, dim_v)]
        shells = [s.to(key.dtype).to(device) for s in shells]
        views = [s.transpose(1, 2) for s in shells]
    elif layout == "PACKED":
        shell = torch.full((blocks, heads, page, dim + dim_v), **nan).to(key.dtype).to(device)
        nhd = shell.transpose(1, 2)
        views = [nhd[..., :dim], nhd[..., dim:]]
    elif layout == "PADDED":
        views = [
            torch.full((blocks, page + 1, heads + pad, n + 8 * pad), **nan)
            .to(key.dtype).to(device)[:, :page, pad:, 8 * pad :]
            for pad, n in ((1, dim), (2, dim_v))
        ]  # fmt: skip
    else:
        assert dim == dim_v, "one tensor for both halves needs equal head sizes"
        axis = 0 if layout == "KV_FIRST" else 1
        size = [blocks, page, heads, dim]
        size.insert(axis, 2)
        shell = torch.full(size, **nan).to(key.dtype).to(device)
        views = [shell.select(axis, 0), shell.select(axis, 1)]
    for view, data in zip(views, (key, value), strict=True):
        view.copy_(data)
    return views[0], views[1]


def sees_keys(
    fn: Callable[..., Tensor],
    q_len: int = 2,
    kv_len: int = 10,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads: tuple[int, int] = (2, 1),
    page: int = 16,
) -> list[list[int]]:
    """Which keys each query row of one request really sees.

    All queries are zero, so every visible key has the same weight, and V is one-hot by position:
    element j of a row's output is not zero exactly if the row sees key j. The smallest telling
    case is q_len 2 and kv_len 10, where row 0 of a non-causal kernel sees ten keys and that of a
    causal one nine.
    """
    dim = max(16, 1 << (kv_len - 1).bit_length())
    blocks = -(-kv_len // page) + 1
    key = torch.zeros(blocks, page, heads[1], dim)
    value = torch.zeros(blocks, page, heads[1], dim)
    table = torch.arange(blocks, 0, -1)[None] - 1
    for j in range(kv_len):
        value[table[0, j // page], j % page, :, j] = 1.0
    query = torch.zeros(q_len, heads[0], dim)
    out = fn(
        query.to(device, dtype), key.to(device, dtype), value.to(device, dtype),
        table.to(device, torch.int32), torch.tensor([kv_len], dtype=torch.int32, device=device),
        torch.tensor([0, q_len], dtype=torch.int32, device=device), q_len, kv_len, 1.0, causal,
        window_left, window_right, 0.0, None, None, None, kv_layout="NHD",
    )  # fmt: skip
    return [out[i, 0, :kv_len].float().cpu().nonzero().flatten().tolist() for i in range(q_len)]


def assert_non_causal(fn: Callable[..., Tensor], **keywords: object) -> None:
    """Raise AssertionError unless every row of fn sees every key when ``causal=False``."""
    for q_len, kv_len in ((2, 10), (5, 5), (3, 40)):
        seen = sees_keys(fn, q_len, kv_len, causal=False, **keywords)
        assert seen == [list(range(kv_len))] * q_len, (
            f"causal=False with {q_len} queries and {kv_len} keys: the rows see {seen}"
        )
