"""Rope tables at the edge: each is read as far back as it is one table, and no farther."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.match_graphs import compiled, trace
from tests.rope_spellings import H, S, by_chunks, read, refused, rotate_half, tables, value, wide

R = 32


def _x() -> torch.Tensor:
    return value(S, H, R)


def _cache(*shape: int) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(*(shape or (20, R)))


def _at(*shape: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randint(0, 20, shape or (S,))


def test_cos_and_sin_that_are_two_planes_of_one_table() -> None:
    def fn(x: Any, both: Any) -> Any:
        return by_chunks(x, both[:, None, 0], both[:, None, 1])

    rope = read(trace(fn, _x(), _cache(S, 2, R // 2)), "thd")
    assert [t.node.op for t in (rope.cos, rope.sin)] == ["call_function"] * 2
    assert rope.cos.node is not rope.sin.node and rope.cos.positions is None


def test_one_number_for_all_dims_is_no_table() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return by_chunks(x, c[:, None], s[:, None])

    miss = refused(trace(fn, _x(), _cache(S, 1), _cache(S, 1)), "match.rope-table", "thd")
    assert "one dim each" in miss.reason.message


def test_columns_that_alternate_are_cut_per_token() -> None:
    def fn(x: Any, cache: Any, at: Any) -> Any:
        rows = cache[at][:, None]
        return by_chunks(x, rows[..., ::2], rows[..., 1::2])

    rope = read(trace(fn, _x(), _cache(), _at()), "thd")
    assert rope.cos.positions is None and rope.sin.positions is None
    assert rope.cos.columns == (0, R // 2)


def test_index_select_as_torch_leaves_it() -> None:
    def fn(x: Any, cache: Any, at: Any) -> Any:
        c, s = cache.index_select(0, at)[:, None].chunk(2, -1)
        return by_chunks(x, c, s)

    traced = trace(fn, _x(), _cache(), _at(), plain=True)
    assert traced.named("index_select")
    rope = read(traced, "thd")
    assert rope.cos.positions is not None and rope.cos.positions.op == "placeholder"
    assert rope.sin.columns == (R // 2, R)


@pytest.mark.parametrize("how", ["index_select", "gather", "index", "columns"])
def test_gathers_from_other_tables_than_rows_are_per_token(how: str) -> None:
    def fn(x: Any, cache: Any, at: Any) -> Any:
        if how == "index_select":
            rows = cache.view(20, 1, R).index_select(0, at)
        elif how == "gather":
            rows = cache.view(20, 1, R).gather(0, at[:, None, None].expand(-1, 1, R))
        elif how == "index":
            rows = cache.view(20, 1, R)[at]
        else:
            rows = cache.t().contiguous()[:, at].t()[:, None]
        return by_chunks(x, *rows.chunk(2, -1))

    rope = read(trace(fn, _x(), _cache(), _at(), plain=True), "thd")
    assert rope.cos.positions is None and rope.sin.positions is None
    assert (rope.cos.columns, rope.sin.columns) == ((0, R // 2), (R // 2, R))


def test_positions_put_together_from_two_are_not_followed() -> None:
    def fn(x: Any, cache: Any, first: Any, rest: Any) -> Any:
        c, s = cache[torch.cat((first, rest))][:, None].chunk(2, -1)
        return by_chunks(x, c, s)

    rope = read(trace(fn, _x(), _cache(), _at(2), _at(S - 2)), "thd")
    assert rope.cos.positions is None and rope.cos.columns == (0, R // 2)


def test_positions_are_taken_in_the_order_of_the_tokens() -> None:
    def fn(x: Any, cache: Any, at: Any) -> Any:
        c, s = cache[at.t()][:, :, None].chunk(2, -1)
        return by_chunks(x, c, s)

    rope = read(trace(fn, value(2, S, H, R), _cache(), _at(S, 2)), "bshd")
    assert rope.cos.positions is not None and rope.cos.positions.op == "call_function"
    assert tuple(rope.cos.positions.meta["val"].shape) == (2, S)


def _by_wide(c: Any, s: Any) -> Any:
    return lambda x: x * c[:, None] + rotate_half(x) * s[:, None]


@pytest.mark.parametrize(("steps", "full"), [(3, False), (20, True)])
def test_equal_halves_are_proved_up_to_a_depth(steps: int, full: bool) -> None:
    """Beyond the depth the table is read all the same, in its full width."""

    def half(angle: Any) -> Any:
        for _ in range(steps):
            angle = angle * 1.01
        return angle.cos()

    def fn(x: Any, angle: Any, s: Any) -> Any:
        return _by_wide(torch.cat((half(angle), half(angle)), -1), wide(s))(x)

    rope = read(trace(fn, _x(), *tables(R)), "thd")
    assert rope.cos.full is full and rope.sin.full is False


def test_two_parts_of_one_complex_table_are_no_equal_halves() -> None:
    def fn(x: Any, table: Any, s: Any) -> Any:
        return _by_wide(torch.cat((table.real, table.imag), -1), wide(s))(x)

    rope = read(trace(fn, _x(), torch.complex(*tables(R)), tables(R)[1]), "thd")
    assert rope.cos.full and not rope.sin.full


def test_halves_computed_in_other_precisions_are_not_equal() -> None:
    def fn(x: Any, angle: Any, s: Any) -> Any:
        halves = angle.double().cos().float(), angle.bfloat16().cos().float()
        return _by_wide(torch.cat(halves, -1), wide(s))(x)

    rope = read(trace(fn, _x(), *tables(R)), "thd")
    assert rope.cos.full and not rope.sin.full


@pytest.mark.parametrize("same", [True, False])
def test_halves_gathered_twice(same: bool) -> None:
    def fn(x: Any, c: Any, s: Any, at: Any, other: Any) -> Any:
        second = at if same else other
        cos, sin = (torch.cat((t[at], t[second]), -1) for t in (c, s))
        return _by_wide(cos, sin)(x)

    c, s = _cache(20, R // 2), _cache(20, R // 2) + 1
    rope = read(trace(fn, _x(), c, s, _at(), _at().flip(0)), "thd")
    assert rope.cos.full is rope.sin.full is not same
    assert (rope.cos.positions is not None) is same


def test_a_width_that_is_only_known_to_be_one_number_is_not_cut() -> None:
    """Every second column of a table whose width is symbolic, twice: cutting needs a guard."""

    def fn(x: Any, angle: Any, s: Any) -> Any:
        half = angle[:, ::2]
        return _by_wide(torch.cat((half, half), -1).cos(), wide(s))(x)

    angle = _cache(S, R)
    torch._dynamo.mark_dynamic(angle, 1)
    rope = read(compiled(fn, _x(), angle, tables(R)[1]), "thd")
    assert isinstance(rope.cos.node.meta["val"].shape[1], torch.SymInt)
    assert rope.cos.full and rope.cos.columns == (0, R)
