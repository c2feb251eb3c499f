"""Reading ropes: every spelling, and look-alikes one node away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.match.facts import Miss, Rope, TokenView
from fusion.match.rope import read_rope
from tests.match_graphs import Traced, assert_rope_holds, trace

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
    fact = read_rope(traced.view(dims))
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


@pytest.mark.parametrize("plain", [False, True], ids=["decomposed", "plain"])
@pytest.mark.parametrize("dtype", [bf16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("spelling", HALF + INTERLEAVED, ids=lambda f: f.__name__)
def test_every_spelling_is_read(spelling: Spelling, dtype: torch.dtype, plain: bool) -> None:
    style = "half" if spelling in HALF else "interleaved"
    for dim, rotary in ((32, 32), (80, 32)):
        c, s = tables(rotary, dtype)
        traced = trace(
            lambda x, c, s, r=rotary: head_of(x, spelling, r, c, s),
            value(B, H, S, dim, dtype=dtype), c, s, plain=plain,
        )  # fmt: skip
        rope = read(traced)
        assert (rope.style, rope.rotary_dim) == (style, rotary)
        assert rope.out.heads == H
        assert rope.out.dim == dim
        assert rope.out_dtype == dtype
        assert rope.x.node.op == "placeholder"
        assert rope.rope_dtype == (torch.float32 if spelling is complex_product else dtype)


# --- layouts -----------------------------------------------------------------------------------


def layout(dims: str) -> tuple[tuple[int, ...], str]:
    """Sizes of a layout word, and the shape that lets ``[S, R/2]`` tables broadcast to it."""
    size = {"b": B, "s": S, "h": H, "t": S, "d": 32}
    return tuple(size[c] for c in dims), "".join("s" if c in "st" else "1" for c in dims[:-1])


@pytest.mark.parametrize("dims", ["bhsd", "bshd", "thd", "htd", "sbhd", "shbd", "td", "bsd"])
@pytest.mark.parametrize("spelling", [with_rotate_half, strided])
def test_layouts(dims: str, spelling: Spelling) -> None:
    shape, where = layout(dims)

    def fn(x: Any, c: Any, s: Any) -> Any:
        sizes = [S if w == "s" else 1 for w in where]
        return spelling(x, c.view(*sizes, -1), s.view(*sizes, -1))

    rope = read(trace(fn, value(*shape), *tables(32)), dims)
    assert rope.out.heads == (H if "h" in dims else 1)
    assert rope.cos.roles[-1] == "dim"


EQUAL = [(1, 1, 1), (1, 4, 4), (4, 4, 4), (2, 32, 3), (32, 32, 32), (2, 1, 3), (1, 5, 1), (3, 5, 1)]


@pytest.mark.parametrize("sizes", EQUAL)
def test_equal_sizes_do_not_confuse_axes(sizes: tuple[int, int, int]) -> None:
    """(B, S, H): a size is no identity; D is 32."""
    b, s, h = sizes
    angle = torch.arange(s)[:, None] * 10 ** (-torch.arange(16) / 32) + 0.3

    def fn(x: Any, c: Any, s_: Any) -> Any:
        return with_rotate_half(x.transpose(1, 2), c, s_).transpose(1, 2).reshape(b * s, h, 32)

    traced = trace(fn, value(b, s, h, 32), angle.cos(), angle.sin())
    rope = read(traced, "thd")
    assert (rope.out.heads, rope.out.dim) == (h, 32)


def test_written_key_is_settled_before_its_views() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        k = with_rotate_half(x.view(B, S, H, 32).transpose(1, 2), c, s)
        return k.transpose(1, 2).contiguous().view(B * S, H * 32).view(-1, H, 32)

    rope = read(trace(fn, value(B, S, H * 32), *tables(32)), "thd")
    assert rope.out.token_sizes == (B, S)
    assert rope.x.token_sizes == (B, S)
    assert rope.cos.roles == (1, "dim")


def test_the_key_may_be_a_slice_of_one_joint_rope() -> None:
    """q and k rotated as one tensor: the key's x is the k part."""

    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        both = with_rotate_half(torch.cat((q, k), 1), c, s)
        return both[:, 8:], both[:, :8]

    traced = trace(fn, value(B, 8, S, 32), value(B, 4, S, 32), *tables(32))
    rope = read(traced)
    assert (rope.x.heads, rope.x.node.name) == (4, "arg1_1")


def test_packed_qkv_by_slices() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        q, k = x[..., : 8 * 32], x[..., 8 * 32 : 12 * 32]
        k = k.view(B, S, 4, 32).transpose(1, 2)
        return head_of(k, with_rotate_half, 16, c, s), q

    rope = read(trace(fn, value(B, S, 16 * 32), *tables(16)))
    assert (rope.rotary_dim, rope.x.heads, rope.x.dim) == (16, 4, 32)


def test_three_part_cat() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        a, b, rest = x.split([16, 16, 48], -1)
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1)

    assert read(trace(fn, value(B, H, S, 80), *tables(32))).rotary_dim == 32


def test_tail_may_be_cut_from_another_view() -> None:
    """The tail comes from the value before a transposition, the rotated part from after it."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        y = x.transpose(1, 2)
        rest = x[..., 32:].transpose(1, 2)
        return torch.cat((with_rotate_half(y[..., :32], c, s), rest), -1)

    rope = read(trace(fn, value(B, S, H, 80), *tables(32)))
    assert rope.x.node.op == "placeholder"


def test_permuted_heads_are_rotated_after_the_permutation() -> None:
    """DeepSeek's trick: interleaved weights, half-split rope. x is the permuted value."""

    def fn(x: Any, c: Any, s: Any) -> Any:
        x = x.view(B, H, S, 16, 2).transpose(4, 3).reshape(B, H, S, 32)
        return with_rotate_half(x, c, s)

    rope = read(trace(fn, value(B, H, S, 32), *tables(32)))
    assert rope.style == "half"
    assert rope.x.node.op == "call_function"


# --- tables ------------------------------------------------------------------------------------

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

    rope = read(trace(opaque, value(S, H, 32, dtype=bf16), torch.complex(c, s)), "thd")
    assert (rope.cos.part, rope.sin.part) == ("real", "imag")
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


# --- dtypes ------------------------------------------------------------------------------------


def test_rope_in_float32_of_bfloat16() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(x.float(), c, s).to(x.dtype)

    rope = read(trace(fn, value(B, H, S, 32, dtype=bf16), *tables(32)))
    assert (rope.rope_dtype, rope.out_dtype) == (torch.float32, bf16)
    assert rope.x.node.op == "placeholder"


def test_promotion_inside_the_product() -> None:
    """x in bf16 times f32 tables: the product is in f32 without a cast node on x."""
    for plain in (False, True):
        rope = read(
            trace(with_rotate_half, value(B, H, S, 32, dtype=bf16), *tables(32), plain=plain)
        )
        assert (rope.rope_dtype, rope.out_dtype) == (torch.float32, torch.float32)


def test_tail_keeps_its_dtype_rules() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        turned = with_rotate_half(x[..., :16].float(), c, s).to(x.dtype)
        return torch.cat((turned, x[..., 16:]), -1)

    rope = read(trace(fn, value(B, H, S, 32, dtype=bf16), *tables(16)))
    assert rope.rotary_dim == 16


def test_products_rounded_before_a_wider_sum_are_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        c, s = wide(c), wide(s)
        return ((x * c).float() + (rotate_half(x) * s).float()).to(x.dtype)

    refused(trace(fn, value(B, H, S, 32, dtype=bf16), *tables(32, bf16)), "match.dtype")


def test_a_result_rounded_twice_is_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(x, c, s).to(bf16).to(torch.float16)

    refused(trace(fn, value(B, H, S, 32), *tables(32)), "match.dtype")


def test_integers_are_refused() -> None:
    x = torch.randint(0, 9, (B, H, S, 32))
    refused(trace(with_rotate_half, x, *(t.long() for t in tables(32))), "match.dtype")


def test_addcmul_rounds_once_and_is_refused() -> None:
    def fn(x: Any, c: Any, s: Any) -> Any:
        return torch.addcmul(x * wide(c), rotate_half(x), wide(s))

    for dtype in (torch.float32, bf16):
        traced = trace(fn, value(B, H, S, 32, dtype=dtype), *tables(32, dtype), plain=True)
        miss = refused(traced, "match.rope-form")
        assert miss.node is traced.result()


# --- look-alikes -------------------------------------------------------------------------------


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
