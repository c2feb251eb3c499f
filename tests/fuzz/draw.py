"""Random programs. ``choose(name, options)`` picks one option; the first is the simplest.

The same generator serves hypothesis (which shrinks towards the first options) and the long runs
(a plain ``random.Random``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz import spellings
from tests.fuzz.program import FLAT, Layer, Program

Choose = Callable[[str, Sequence[Any]], Any]

EXTRAS = (
    "return k",
    "k read",
    "return v",
    "return normed q",
    "return normed k",
    "return raw k",
    "return qkv",
    "return cache view",
    "cache read before",
    "q copied back",
    "qkv zeroed",
    "qkv zeroed between",
    "slots changed after",
    "positions changed after",
    "cache scaled after",
    "weight changed between",
)
ODD = (
    *(f"q norm {n}" for n in (*spellings.ODD_NORMS, "early", "no_norm", "unweighted", "uncast")),
    *(f"k norm {n}" for n in (*spellings.ODD_NORMS, "early", "no_norm", "unweighted", "uncast")),
    *(f"q rope {n}" for n in (*spellings.ODD_ROPES, "interleaved")),
    *(f"k rope {n}" for n in (*spellings.ODD_ROPES, "interleaved")),
    "q and k from swapped slices",
    "v is the raw key",
    "heads of k reversed",
    "rope before norm",
    "k times 1.2 after rope",
    "q times 1.2 after rope",
    "k clamped",
    "k rounded through f16",
    "k rounded through bf16",
    "k rolled",
    "k uses q's weight",
    "something between norm and rope",
    "other cos for k",
    "k positions shifted",
    "table times 1.2",
    "slots shifted",
    "k and v exchanged",
    "k written to both",
    "tokens of k reversed",
    "one token fewer",
    "cache read between",
    "slots changed between",
    "v has other slots",
    "written twice",
)


def draw_program(choose: Choose) -> Program:
    """One random program."""
    batch = choose("batch", (0, 0, 2, 3, 1))
    dtype = choose("dtype", ("bf16", "f32", "f16"))
    first = _layer(choose, dtype, batch)
    layers = [first]
    if choose("layers", (1, 1, 1, 2)) == 2:
        if first.cache == "stack":
            layers.append(first)
        else:
            layers.append(_layer(choose, dtype, batch, stack=False))
    small = (5, 4, 1, 2, 3, 7, 8, 0, 16, 33, 300)
    tokens = choose("tokens", small)
    if choose("coincidence", (False, False, True)):
        tokens = choose("equal to", (first.kv_heads, first.dim, first.heads, first.rotary // 2))
    hf = any(m.write == "hf" for m in layers)
    dynamic = choose("dynamic", ("static", "static", "mark", "dynamic"))
    again = choose("again", (None, None, None, None, 9, 1, 6))
    total = max(tokens, again or 0) * max(batch, 1)
    layers = [_roomy(m, total, max(tokens, again or 0)) for m in layers]
    if batch == 0:
        order = "bshd"
    else:
        order = choose("order", ("bshd", "bhsd-early", "bhsd-late"))
    if hf and order == "bshd":
        order = "bhsd-late"
    return Program(
        tuple(layers),
        tokens,
        batch,
        order,
        dtype,
        dynamic,
        again,
        choose("validate", (True, True, False)),
        "aot_eager",
        choose("seed", range(8)),
    )


def _roomy(m: Layer, total: int, longest: int) -> Layer:
    """Enough slots for the tokens, at the drawn block size where possible."""
    from dataclasses import replace

    if m.write == "hf":
        return replace(m, block_size=max(m.block_size, longest))
    blocks = m.blocks
    if blocks * m.block_size < total:
        blocks = -(-total // m.block_size) + 1
    return replace(m, blocks=blocks)


def _layer(choose: Choose, dtype: str, batch: int, stack: bool = True) -> Layer:
    kv_heads = choose("kv_heads", (4, 3, 1, 2, 5, 6, 7, 8, 9))
    heads = kv_heads * choose("group", (2, 1, 3, 4))
    dim = choose("dim", (16, 8, 12, 24, 32, 40, 64, 80, 128, 10, 100, 256))
    rotary = dim
    if choose("partial", (False, False, True)):
        rotary = 2 * choose("rotary", range(1, dim // 2 + 1))
    caches = ("nhd", "packed", "kv_first", "hnd", "block_first", "halves", "pool", "stack")
    cache = choose("cache", caches if stack else caches[:-1])
    equal = cache in ("kv_first", "block_first", "halves", "stack")
    qkv = choose("qkv", ("split", "slices", "three", "heads", "groups"))
    v_dim = dim
    if not equal and qkv not in ("heads", "groups"):
        v_dim = choose("v_dim", (dim, dim, dim, 8, 20))
    writes = ["op", "op", "block_offset", "block_heads_offset"]
    if cache in FLAT and cache != "pool":
        writes += ["index", "index_copy", "scatter", "index_put_"]
    if batch:
        writes += ["hf"]
    write = choose("write", writes)
    odd = choose("odd", ODD) if choose("is odd", (False, True)) else ""
    extras = {choose("extra", EXTRAS) for _ in range(choose("extras", (0, 1, 0, 2, 3)))}
    cache_dtype = dtype
    if choose("other cache dtype", (False, False, False, True)):
        cache_dtype = choose("cache_dtype", ("e4m3fn", "e4m3fnuz", "f32", "bf16"))
        if cache_dtype.startswith("e4") and write != "op":
            cache_dtype = "bf16"
    blocks = choose("blocks", (4, 1, 2, 3, 8, 16))
    rope = choose("rope", tuple(spellings.ROPES))
    tables = ("gather", "two tables", "per token", "angles", "one row")
    if rope == "rotate_half":
        tables += ("full",)
    return Layer(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=v_dim,
        rotary=rotary,
        qkv=qkv,
        norm=choose("norm", tuple(spellings.NORMS)),
        q_eps=1e-6,
        k_eps=choose("k_eps", (1e-6, 1e-3, 0.1)),
        weight_dtype=choose("weight_dtype", (dtype, dtype, "f32")),
        rope=rope,
        table=choose("table", tables),
        table_dtype=choose("table_dtype", (dtype, "f32")),
        cache=cache,
        cache_dtype=cache_dtype,
        blocks=batch if write == "hf" else blocks,
        block_size=choose("block_size", (8, 1, 3, 16, 5, 100, 2)),
        write=write,
        slots=choose(
            "slots", ("random", "padded", "short", "boundary", "all padding", "int32", "strided")
        ),
        odd=odd,
        extras=tuple(sorted(extras)),
    )


def random_program(rng: random.Random) -> Program:
    """A program from a plain random generator."""
    return draw_program(lambda _, options: rng.choice(options))
