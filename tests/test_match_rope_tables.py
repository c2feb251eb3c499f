"""Reading the cos and sin of a rope: per token, by position, half or full width, complex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.match.facts import Miss, Rope
from fusion.match.rope import read_rope
from tests.match_graphs import trace
from tests.rope_spellings import (
    B,
    H,
    S,
    bf16,
    by_chunks,
    gptj,
    read,
    refused,
    rotate_half,
    tables,
    value,
    wide,
    with_rotate_half,
)


def test_table_expanded_over_the_heads() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        c, s = (wide(t).expand(B, H, S, -1) for t in (c, s))
        return x * c + rotate_half(x) * s

    for plain in (False, True):
        rope = read(trace(fn, value(B, H, S, 32), *tables(32), plain=plain))
        assert not rope.cos.full


TABLES: dict[str, Callable[[Any], Any]] = {
    "[S,R]": wide,
    "[1,S,R]": lambda t: wide(t)[None],
    "[1,1,S,R]": lambda t: wide(t)[None, None],
    "[B,1,S,R]": lambda t: wide(t).expand(B, 1, S, -1),
    "[B,1,S,R] own": lambda t: wide(t).expand(B, 1, S, -1) * torch.ones(B, 1, 1, 1),
    "[S,R] cast": lambda t: wide(t.double()).float(),
}


@pytest.mark.parametrize("form", TABLES, ids=str)
def test_table_forms(form: str) -> None:
    build = TABLES[form]

    def fn(x: Any, c: Any, s: Any) -> Any:
        return x * build(c) + rotate_half(x) * build(s)

    rope = read(trace(fn, value(B, H, S, 32), *tables(32)))
    assert not rope.cos.full
    assert rope.cos.columns == rope.sin.columns == (0, 16)


def test_halves_are_equal_because_the_graph_built_them_so() -> None:
    def fn(x: Any, angle: Any) -> Any:
        both = torch.cat((angle, angle), -1)
        c, s = (both.cos() * 1.5).to(x.dtype)[None], (both.sin() * 1.5).to(x.dtype)[None]
        return x * c[:, None] + rotate_half(x) * s[:, None]

    traced = trace(fn, value(B, H, S, 32, dtype=bf16), tables(32)[0])
    rope = read(traced)
    assert not rope.cos.full
    assert rope.cos.node.meta["val"].dtype == bf16


def test_opaque_full_width_tables_stay_full() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return x * c + rotate_half(x) * s

    torch.manual_seed(3)
    rope = read(trace(fn, value(B, H, S, 32), torch.randn(S, 32), torch.randn(S, 32)))
    assert rope.cos.full
    assert rope.sin.full
    assert rope.cos.columns == (0, 32)


def test_halves_of_different_origin_stay_full() -> None:
    """Looks like cat((f, f)), but the second half is another angle."""

    def fn(x: Any, f: Any) -> Any:
        both = torch.cat((f, f * 1.0001), -1)
        return x * both.cos() + rotate_half(x) * both.sin()

    rope = read(trace(fn, value(B, H, S, 32), tables(32)[0]))
    assert rope.cos.full


def test_interleaved_full_width_table_of_a_half_width_one() -> None:
    rope = read(trace(gptj, value(B, H, S, 32), *tables(32)))
    assert not rope.cos.full
    assert rope.cos.node.op == "placeholder"


GATHERS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda cache, at: cache[at],
    "embedding": lambda cache, at: torch.nn.functional.embedding(at, cache),
    "index_select": lambda cache, at: cache.index_select(0, at.flatten()).view(*at.shape, -1),
    "gather": lambda cache, at: cache.gather(
        0, at.flatten()[:, None].expand(-1, cache.shape[-1])
    ).view(*at.shape, -1),
}  # fmt: skip


@pytest.mark.parametrize("form", GATHERS)
@pytest.mark.parametrize("shape", [(7,), (2, 5)], ids=["T", "BS"])
def test_gathered_tables(form: str, shape: tuple[int, ...]) -> None:
    """``cos_sin_cache[positions]``: the cache and the positions are given."""
    torch.manual_seed(0)
    cache, at = torch.randn(20, 32), torch.randint(0, 20, shape)

    def fn(x: Any, cache: Any, at: Any) -> Any:
        c, s = GATHERS[form](cache, at).unsqueeze(-2).chunk(2, -1)
        a, b, rest = x.split([16, 16, 48], -1)
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1)

    traced = trace(fn, value(*shape, H, 80), cache, at)
    rope = read(traced, "thd" if len(shape) == 1 else "bshd")
    for half, entry in enumerate((rope.cos, rope.sin)):
        assert entry.node.name == "arg1_1"
        assert entry.positions is not None
        assert entry.positions.name == "arg2_1"
        assert entry.columns == (16 * half, 16 * half + 16)


def test_cos_and_sin_by_different_positions_are_given_per_token() -> None:
    """The fused op has one argument for positions."""
    torch.manual_seed(0)

    def fn(x: Any, cache: Any, at: Any, other: Any) -> Any:
        c, s = cache[at][:, None, :16], cache[other][:, None, 16:]
        return by_chunks(x, c, s)

    at = torch.randint(0, 20, (2, S))
    rope = read(trace(fn, value(S, H, 32), torch.randn(20, 32), at[0], at[1]), "thd")
    assert rope.cos.positions is None
    assert rope.sin.positions is None


def test_tables_index_the_token_dims_of_x() -> None:
    """Dimensions of size 1 may differ between x and the result; other differences are refused."""

    def ones(x: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(x.view(1, S, 1, H, 32), c[:, None, None], s[:, None, None])

    fact = read_rope(trace(ones, value(S, H, 32), *tables(32)).view("abshd"))
    assert isinstance(fact, Rope)
    assert fact.x.token_sizes == fact.out.token_sizes

    def split(x: Any, c: Any, s: Any) -> Any:
        a, b = x[..., :16].view(B, S, H, 16), x[..., 16:].view(B, S, H, 16)
        c, s = c[:, None], s[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    traced = trace(split, value(B * S, H, 32), *tables(32))
    fact = read_rope(traced.view("bshd"))
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.token-order"


def test_positions_shared_by_sequences_fall_back_to_per_token_tables() -> None:
    torch.manual_seed(0)

    def fn(x: Any, cache: Any, at: Any) -> Any:
        c, s = cache[at].chunk(2, -1)
        return by_chunks(x, c, s)

    rope = read(trace(fn, value(B, H, S, 32), torch.randn(20, 32), torch.randint(0, 20, (S,))))
    assert rope.cos.positions is None
    assert rope.cos.roles == (1, "dim")


def test_complex_table() -> None:
    """Meta's spelling: one complex table, its parts are cos and sin."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        table = torch.complex(c, s)[:, None]
        pairs = torch.view_as_complex(x.float().reshape(S, H, 16, 2))
        return torch.view_as_real(pairs * table).flatten(2).type_as(x)

    c, s = tables(32)
    read(trace(fn, value(S, H, 32, dtype=bf16), c, s), "thd")

    def opaque(x: Any, table: Any) -> Any:
        pairs = torch.view_as_complex(x.float().reshape(S, H, 16, 2))
        return torch.view_as_real(pairs * table[:, None]).flatten(2).type_as(x)

    traced = trace(opaque, value(S, H, 32, dtype=bf16), torch.complex(c, s))
    rope = read(traced, "thd")
    assert (rope.cos.part, rope.sin.part) == ("real", "imag")
    refused(traced, "match.rope-table", "thd")
    assert rope.rope_dtype == torch.float32


def test_mrope_sections_are_one_table_per_token() -> None:
    """Positions [3, T]: the table that rotates is the joined one, never a row of the three."""

    def fn(x: Any, angle: Any) -> Any:
        parts = angle.split([8, 4, 4], -1)
        joined = torch.cat([part[i] for i, part in enumerate(parts)], -1)
        return with_rotate_half(x, joined.cos()[:, None], joined.sin()[:, None])

    for tokens in (3, 7):
        torch.manual_seed(1)
        rope = read(trace(fn, value(tokens, H, 32), torch.randn(3, tokens, 16)), "thd")
        assert rope.cos.positions is None
        assert rope.cos.node.op == "call_function"
