"""Reading ropes: every spelling, layout, table and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.match.facts import Miss
from fusion.match.rope import read_rope
from tests.match_graphs import compiled, trace
from tests.rope_spellings import (
    HALF,
    INTERLEAVED,
    B,
    H,
    S,
    Spelling,
    bf16,
    by_chunks,
    complex_product,
    head_of,
    read,
    refused,
    rotate_half,
    strided,
    tables,
    value,
    wide,
    with_rotate_half,
)


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


# --- symbolic sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4, 5, 32])
def test_marked_dynamic_tokens(tokens: int) -> None:
    """The example token count equals the heads (4) or the head size (32): no matter."""

    def fn(qkv: Any, cache: Any, at: Any) -> Any:
        k = qkv.view(-1, 12, 32)[:, 4:8]
        c, s = cache[at].unsqueeze(-2).chunk(2, -1)
        return head_of(k, by_chunks, 16, c, s)

    torch.manual_seed(0)
    qkv, at = torch.randn(tokens, 12 * 32), torch.randint(0, 20, (tokens,))
    for x in (qkv, at):
        torch._dynamo.mark_dynamic(x, 0)
    traced = compiled(fn, qkv, torch.randn(20, 16), at)
    rope = read(traced, "thd")
    assert isinstance(rope.out.tokens, torch.SymInt)
    assert isinstance(rope.x.token_sizes[0], torch.SymInt)
    assert (rope.x.heads, rope.x.dim, rope.rotary_dim) == (4, 32, 16)
    assert rope.cos.positions is not None


def test_symbolic_heads_or_dims_are_refused() -> None:
    """A head count that only happens to be 4 is no head count."""

    def fn(k: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(k, c, s)

    k = value(6, 4, S, 32)
    torch._dynamo.mark_dynamic(k, 1)
    traced = compiled(fn, k, *tables(32))
    view = traced.view("bhsd")
    fact = read_rope(view)
    assert isinstance(fact, Miss)
    assert "symbolic" in fact.reason.message
