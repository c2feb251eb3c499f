"""Look-alikes of a rope, one node away: each is refused by the recogniser itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.match.facts import Miss, Rope, TokenView
from fusion.match.rope import read_rope
from tests.match_graphs import trace
from tests.rope_spellings import (
    B,
    H,
    S,
    Spelling,
    bf16,
    by_chunks,
    read,
    refused,
    rotate_half,
    strided,
    tables,
    value,
    wide,
    with_rotate_half,
)


def flipped_rotate_half(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * wide(c) + torch.cat((b, -a), -1) * wide(s)


def flipped_by_sub(x: Any, c: Any, s: Any) -> Any:
    return x * wide(c) - rotate_half(x) * wide(s)


def flipped_chunks(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c + b * s, b * c - a * s), -1)


def flipped_strided(x: Any, c: Any, s: Any) -> Any:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c + b * s, b * c - a * s), -1).flatten(-2)


def both_plus(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((a * c + b * s, b * c + a * s), -1)


def negative_cos(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat((-(a * c) - b * s, a * s - b * c), -1)


def cos_and_sin_swapped(x: Any, c: Any, s: Any) -> Any:
    """Half of the rotation uses cos where sin belongs."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * s + a * c), -1)


@pytest.mark.parametrize(
    "spelling",
    [flipped_rotate_half, flipped_by_sub, flipped_chunks, flipped_strided,
     both_plus, negative_cos],
)  # fmt: skip
def test_other_direction_is_refused(spelling: Spelling) -> None:
    refused(trace(spelling, value(B, H, S, 32), *tables(32)), "match.rope-sign")


def test_a_sign_baked_into_an_opaque_table_is_not_guessed() -> None:
    """roll(x) * signed table: right only if the table's first half is negative."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        return x * c + torch.roll(x, 16, -1) * s

    torch.manual_seed(0)
    traced = trace(fn, value(B, H, S, 32), torch.randn(S, 32), torch.randn(S, 32))
    refused(traced, "match.rope-sign")


def test_conj_table_of_a_flipped_rope_is_right_again() -> None:
    """Two flips cancel: x*c - rot(x)*(-s)."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        return x * wide(c) - rotate_half(x) * wide(-s)

    read(trace(fn, value(B, H, S, 32), *tables(32)))


def test_a_negated_table_is_a_table() -> None:
    """Turning back with the sine negated in the graph: the rope's table is the negated one."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(x, c, -s)

    rope = read(trace(fn, value(B, H, S, 32), *tables(32)))
    assert rope.sin.node.op == "call_function"

    def turned_back(x: Any, c: Any, s: Any) -> Any:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.complex(c, s).conj()).flatten(-2)

    rope = read(trace(turned_back, value(B, H, S, 32), *tables(32)))
    assert (rope.sin.part, rope.sin.node.op) == ("imag", "call_function")


def cross_in_to_half(x: Any, c: Any, s: Any) -> Any:
    """Reads pairs, writes halves."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def cross_half_to_pairs(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def mirrored(x: Any, c: Any, s: Any) -> Any:
    """Element d pairs with D-1-d."""
    return x * wide(c) + torch.flip(x, (-1,)) * torch.cat((-s, s), -1)


def quarters(x: Any, c: Any, s: Any) -> Any:
    """Half-split within each half of the head."""
    y = x.unflatten(-1, (2, -1))
    c2, s2 = wide(c).unflatten(-1, (2, -1)), wide(s).unflatten(-1, (2, -1))
    return (y * c2 + rotate_half(y) * s2).flatten(-2)


def neighbour_head(x: Any, c: Any, s: Any) -> Any:
    """The partner comes from the next head."""
    return x * wide(c) + rotate_half(torch.roll(x, 1, 1)) * wide(s)


def neighbour_token(x: Any, c: Any, s: Any) -> Any:
    return x * wide(c) + rotate_half(torch.roll(x, 1, 2)) * wide(s)


def own_twice(x: Any, c: Any, s: Any) -> Any:
    return x * wide(c) + x * wide(s)


@pytest.mark.parametrize(
    "spelling",
    [cross_in_to_half, cross_half_to_pairs, mirrored, quarters, neighbour_head, neighbour_token,
     own_twice],
)  # fmt: skip
def test_other_pairings_are_refused(spelling: Spelling) -> None:
    refused(trace(spelling, value(B, H, S, 32), *tables(32)), "match.rope-style")


def test_tail_in_front_is_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return torch.cat((x[..., :48], with_rotate_half(x[..., 48:], c, s)), -1)

    miss = refused(trace(fn, value(B, H, S, 80), *tables(32)), "match.head-dim")
    assert miss.reason.have == "32 from 48"


def test_heads_rotated_differently_are_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return torch.cat((with_rotate_half(x[:, :2], c, s), strided(x[:, 2:], c, s)), 1)

    refused(trace(fn, value(B, 4, S, 32), *tables(32)), "match.rope-style")


def test_only_some_heads_rotated_is_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return torch.cat((with_rotate_half(x[:, :2], c, s), x[:, 2:]), 1)

    refused(trace(fn, value(B, 4, S, 32), *tables(32)), "match.rope-style")


def test_tables_that_differ_by_head_are_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return x * c + rotate_half(x) * s

    traced = trace(fn, value(B, H, S, 32), torch.randn(H, S, 32), torch.randn(H, S, 32))
    refused(traced, "match.rope-table")


def test_tables_with_tokens_in_another_order_are_refused() -> None:
    """cos is read for token S-1-s."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        return by_chunks(x, c.flip(0), s)

    fact = read_rope(trace(fn, value(B, H, S, 32), *tables(32)).view("bhsd"))
    # Reversed rows are a table of their own (the flipped copy), never the unflipped one.
    assert isinstance(fact, Rope)
    assert fact.cos.node.op == "call_function"


def test_table_columns_in_another_order_are_a_table_of_their_own() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return by_chunks(x, c.flip(1), s)

    rope = read(trace(fn, value(B, H, S, 32), *tables(32)))
    assert rope.cos.node.op == "call_function"


def test_cos_and_sin_mixed_up_is_refused() -> None:
    fact = read_rope(trace(cos_and_sin_swapped, value(B, H, S, 32), *tables(32)).view("bhsd"))
    assert isinstance(fact, Miss)


AFTER: dict[str, Callable[[Any], Any]] = {
    "scale": lambda k: k * 1.2,
    "scale by a tensor": lambda k: k * torch.full((32,), 1.2),
    "clamp": lambda k: k.clamp(-3, 3),
    "add": lambda k: k + 1.0,
    "add itself": lambda k: k + k,
    "tanh": lambda k: torch.tanh(k),
    "divide": lambda k: k / 3.0,
    "where": lambda k: torch.where(k > 0, k, 0.5 * k),
}


@pytest.mark.parametrize("name", AFTER)
def test_anything_after_the_rope_is_seen(name: str) -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return AFTER[name](with_rotate_half(x, c, s))

    traced = trace(fn, value(B, H, S, 32), *tables(32))
    miss = refused(traced, "match.rope-form")
    assert miss.node is traced.result()


def test_a_third_term_is_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(x, c, s) + x * wide(s)

    refused(trace(fn, value(B, H, S, 32), *tables(32)), "match.rope-form")


def test_no_rope() -> None:
    def fn(x: Any, w: Any) -> Any:
        return (x.view(B * S, -1) @ w).view(B, S, H, 32)

    refused(trace(fn, value(B, S, 16), value(16, H * 32)), "match.no-rope", "bshd")


def test_the_value_is_no_rope() -> None:
    """A lerp is a sum of two products, but not of one source."""

    def fn(x: Any, y: Any, c: Any, s: Any) -> Any:
        return x * wide(c) + y * wide(s)

    traced = trace(fn, value(B, H, S, 32), value(B, H, S, 32), *tables(32))
    refused(traced, "match.rope-form")


def test_norm_after_rope_is_the_wrong_order() -> None:
    def fn(x: Any, w: Any, c: Any, s: Any) -> Any:
        y = with_rotate_half(x, c, s).float()
        return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    traced = trace(fn, value(B, H, S, 32, dtype=bf16), value(32, dtype=bf16), *tables(32, bf16))
    refused(traced, "match.norm-order")


def test_norm_without_rope() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = x.float()
        return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    traced = trace(fn, value(B, H, S, 32, dtype=bf16), value(32, dtype=bf16))
    refused(traced, "match.no-rope")


def test_no_tokens() -> None:
    traced = trace(with_rotate_half, torch.randn(0, H, S, 32), *tables(32))
    view = TokenView(traced.result(), (0, 2, 1, 3), 2, (0, S), 0, H, 32)
    fact = read_rope(view)
    assert isinstance(fact, Miss)
    assert "empty" in fact.reason.message


ROWS, SLOT = "rows: kv_cache_write takes fewer slots than rows", "rows: give the rows that are not"
CUTS: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "last rows": (lambda k: k[:4], "rows", "4 rows", f"6 {ROWS}"),
    "front rows": (lambda k: k[3:], "rows", "3 rows", f"6 {SLOT}"),
    "front rows by split": (lambda k: k.split([2, 4])[1], "rows", "4 rows", f"6 {SLOT}"),
    "every other row": (lambda k: k[::2], "rows", "3 rows", f"6 {SLOT}"),
    "one row": (lambda k: k[2:3], "rows", "1 rows", f"6 {SLOT}"),
    "half of the heads": (lambda k: k[:, 2:], "heads", "2 heads of 32", "all that was rotated"),
    "every other head": (lambda k: k[:, ::2], "heads", "2 heads of 32", "all that was rotated"),
    "all but one head": (lambda k: k[:, :1], "heads", "1 heads of 32", "all that was rotated"),
    "one head of one row": (
        lambda k: k[1:2, 1:2], "a part", "1 heads of 32", "all that was rotated"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CUTS))
def test_what_is_cut_off_is_named(kind: str) -> None:
    """Only rows at the end are a matter of the number of slots."""
    cut, what, have, need = CUTS[kind]

    def fn(k: Any, c: Any, s: Any) -> Any:
        return cut(by_chunks(k, c, s))

    traced = trace(fn, value(6, 4, 32), torch.rand(6, 1, 16), torch.rand(6, 1, 16))
    miss = read_rope(traced.view("thd", 0))
    assert isinstance(miss, Miss)
    assert miss.reason.code == "match.value"
    assert f"cuts {'' if what == 'a part' else 'rotated '}{what}" in miss.reason.message
    assert miss.reason.have == have
    assert str(miss.reason.need).startswith(need)


@pytest.mark.parametrize(
    ("cut", "need"),
    [
        (lambda k: k[:1], f"6 {ROWS}"),  # the whole last sequence
        (lambda k: k[:, :2], f"6 {SLOT}"),  # the end of every sequence
    ],
)
def test_rows_cut_off_every_sequence_are_not_the_last_ones(
    cut: Callable[[Any], Any], need: str
) -> None:
    def fn(k: Any, c: Any, s: Any) -> Any:
        return cut(by_chunks(k, c, s))

    args = (value(2, 3, 4, 32), torch.rand(2, 3, 1, 16), torch.rand(2, 3, 1, 16))
    miss = read_rope(trace(fn, *args).view("bshd", 0))
    assert isinstance(miss, Miss)
    assert miss.reason.code == "match.value"
    assert str(miss.reason.need).startswith(need)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [1, 0, 2, 3]])
def test_rows_in_another_order_are_not_called_cut_off(order: list[int]) -> None:
    def fn(k: Any, c: Any, s: Any) -> Any:
        rotated = by_chunks(k, c, s)
        return torch.stack([rotated[i] for i in order])

    args = (value(6, 4, 32), torch.rand(6, 1, 16), torch.rand(6, 1, 16))
    miss = read_rope(trace(fn, *args).view("thd", 0))
    assert isinstance(miss, Miss)
    assert miss.reason.code == "match.token-order"
