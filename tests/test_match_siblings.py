"""Finding the query's rope beside the key's, and nobody else's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fusion.match.facts import Miss, RMSNorm, Rope
from fusion.match.norm import read_norm
from fusion.match.rope import RopeFinder, find_query_ropes, read_rope
from tests.match_graphs import Traced, assert_rope_holds, compiled, trace
from tests.rope_spellings import (
    Spelling,
    bf16,
    by_chunks,
    gptj,
    head_of,
    strided,
    tables,
    value,
    wide,
    with_rotate_half,
)

B, S, HQ, HK, D = 2, 5, 8, 4, 32


def key(traced: Traced, which: int = 1, dims: str = "bhsd") -> Rope:
    fact = read_rope(traced.view(dims, which))
    assert isinstance(fact, Rope), fact
    return fact


def only(found: list[Rope | Miss]) -> Rope:
    assert len(found) == 1, found
    assert isinstance(found[0], Rope), found[0]
    return found[0]


def attend(q: Any, k: Any) -> Any:
    """Something like attention: mixes tokens and heads, so the next layer depends on it."""
    k = k.repeat_interleave(HQ // HK, 1)
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ k).transpose(1, 2).reshape(B, S, HQ * D)


def layers(count: int, spelling: Spelling = with_rotate_half, rotary: int = D) -> Any:
    """A stack of layers; the results are all keys, then all queries."""

    def fn(x: Any, weights: Any, c: Any, s: Any) -> Any:
        keys, queries = [], []
        for i in range(count):
            qk = (x.reshape(B * S, -1) @ weights[i]).view(B, S, HQ + HK, D)
            q, k = qk[:, :, :HQ].transpose(1, 2), qk[:, :, HQ:].transpose(1, 2)
            q, k = head_of(q, spelling, rotary, c, s), head_of(k, spelling, rotary, c, s)
            keys.append(k)
            queries.append(q)
            x = x + attend(q, k)
        return (*keys, *queries, x)

    return fn


@pytest.mark.parametrize("spelling", [with_rotate_half, by_chunks, strided, gptj])
@pytest.mark.parametrize("rotary", [D, 16])
def test_each_layer_gets_its_own_query(spelling: Spelling, rotary: int) -> None:
    args = (value(B, S, HQ * D), value(3, HQ * D, (HQ + HK) * D) / 16, *tables(rotary))
    traced = trace(layers(3, spelling, rotary), *args)
    finder = RopeFinder(traced.graph)
    for layer in range(3):
        k = key(traced, layer)
        q = only(find_query_ropes(traced.graph, k, finder))
        assert q.out.node is traced.result(3 + layer)
        assert (q.out.heads, q.rotary_dim) == (HQ, rotary)
        assert_rope_holds(traced, q)


def test_query_in_another_layout_than_the_key() -> None:
    """q stays [B, S, H, D], k becomes [B, H, S, D]; and flat tokens against [B, S]."""

    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return (
            with_rotate_half(q, c[:, None], s[:, None]),
            with_rotate_half(k.transpose(1, 2), c, s),
        )

    traced = trace(fn, value(B, S, HQ, D), value(B, S, HK, D), *tables(D))
    q = only(find_query_ropes(traced.graph, key(traced)))
    assert q.out.node is traced.result(0)
    assert_rope_holds(traced, q)

    def flat(q: Any, k: Any, c: Any, s: Any) -> Any:
        c, s = c.expand(B, S, -1), s.expand(B, S, -1)
        q = q.reshape(B * S, HQ, D)
        q = with_rotate_half(q, c.reshape(B * S, 1, -1), s.reshape(B * S, 1, -1))
        return q, with_rotate_half(k.transpose(1, 2), c[:, None], s[:, None])

    traced = trace(flat, value(B, S, HQ, D), value(B, S, HK, D), *tables(D))
    q = only(find_query_ropes(traced.graph, key(traced)))
    assert q.out.token_sizes == (B * S,)


@pytest.mark.parametrize("b", [1, 2, 4, 8])
def test_batch_equal_to_heads(b: int) -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(q, c, s), with_rotate_half(k, c, s)

    traced = trace(fn, value(b, HQ, S, D), value(b, HK, S, D), *tables(D))
    q = only(find_query_ropes(traced.graph, key(traced)))
    assert (q.out.heads, q.out.order) == (HQ, (0, 2, 1, 3))


def test_one_head_each() -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(q, c, s), with_rotate_half(k, c, s)

    traced = trace(fn, value(B, 1, S, D), value(B, 1, S, D), *tables(D))
    k = key(traced)
    assert k.x.node.name == "arg1_1"
    assert only(find_query_ropes(traced.graph, k)).x.node.name == "arg0_1"


@pytest.mark.parametrize("table_first", [False, True])
def test_one_key_head_and_a_packed_table(table_first: bool) -> None:
    """With one head x and cos|sin are told apart by their use, not by their place."""

    def fn(q: Any, k: Any, packed: Any) -> Any:
        c, s = packed[:, None].chunk(2, -1)

        def turn(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            if table_first:
                return torch.cat((c * a - s * b, c * b + s * a), -1)
            return torch.cat((a * c - b * s, b * c + a * s), -1)

        return turn(q), turn(k)

    traced = trace(fn, value(7, HQ, D), value(7, 1, D), value(7, D))
    k = key(traced, 1, "thd")
    assert (k.x.node.name, k.cos.node.name) == ("arg1_1", "arg2_1")
    assert only(find_query_ropes(traced.graph, k)).x.node.name == "arg0_1"


def test_query_and_key_rotated_as_one_value() -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        both = with_rotate_half(torch.cat((q, k), 1), c, s)
        return both[:, :HQ], both[:, HQ:]

    traced = trace(fn, value(B, HQ, S, D), value(B, HK, S, D), *tables(D))
    q = only(find_query_ropes(traced.graph, key(traced)))
    assert (q.out.node, q.x.node.name) == (traced.result(0), "arg0_1")


def test_no_query() -> None:
    """A drafter that computes k only."""
    traced = trace(with_rotate_half, value(B, HK, S, D), *tables(D))
    assert find_query_ropes(traced.graph, key(traced, 0)) == []


def test_separate_gathers_of_the_same_rows() -> None:
    """q and k each gather cos and sin; the rows are the same."""
    torch.manual_seed(0)

    def fn(q: Any, k: Any, cache: Any, at: Any) -> Any:
        def turn(x: Any) -> Any:
            c, s = cache[at].unsqueeze(1).chunk(2, -1)
            return by_chunks(x, c, s)

        return turn(q), turn(k)

    args = (value(7, HQ, D), value(7, HK, D), torch.randn(20, D), torch.randint(0, 20, (7,)))
    traced = trace(fn, *args)
    k = key(traced, 1, "thd")
    q = only(find_query_ropes(traced.graph, k))
    assert (q.cos.node, q.cos.positions) == (k.cos.node, k.cos.positions)
    assert len(traced.named("index")) == 2


def test_other_rows_of_the_table_are_not_the_querys() -> None:
    torch.manual_seed(0)

    def fn(q: Any, k: Any, cache: Any, at: Any, other: Any) -> Any:
        def turn(x: Any, at: Any) -> Any:
            c, s = cache[at].unsqueeze(1).chunk(2, -1)
            return by_chunks(x, c, s)

        return turn(q, other), turn(k, at)

    at = torch.randint(0, 20, (7,))
    traced = trace(fn, value(7, HQ, D), value(7, HK, D), torch.randn(20, D), at, at.flip(0))
    found = find_query_ropes(traced.graph, key(traced, 1, "thd"))
    assert [f.reason.code for f in found if isinstance(f, Miss)] == ["match.token-order"]
    assert not any(isinstance(f, Rope) for f in found)


def test_cos_for_sin_is_not_the_same_rope() -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(q, s, c), with_rotate_half(k, c, s)

    traced = trace(fn, value(B, HQ, S, D), value(B, HK, S, D), *tables(D))
    found = find_query_ropes(traced.graph, key(traced))
    assert not any(isinstance(f, Rope) for f in found)


def test_fewer_query_tokens_than_key_tokens() -> None:
    """A drafter: keys of context and block, queries of the block only."""

    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return with_rotate_half(q, c[-2:], s[-2:]), with_rotate_half(k, c, s)

    traced = trace(fn, value(B, HQ, 2, D), value(B, HK, S, D), *tables(D))
    found = find_query_ropes(traced.graph, key(traced))
    assert not any(isinstance(f, Rope) for f in found)


def test_a_perturbed_query_is_a_near_miss() -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return q * wide(c) - with_rotate_half(q, c * 0, s), with_rotate_half(k, c, s)

    def flipped(q: Any, k: Any, c: Any, s: Any) -> Any:
        a, b = q.chunk(2, -1)
        return q * wide(c) + torch.cat((b, -a), -1) * wide(s), with_rotate_half(k, c, s)

    traced = trace(flipped, value(B, HQ, S, D), value(B, HK, S, D), *tables(D))
    found = find_query_ropes(traced.graph, key(traced))
    assert [f.reason.code for f in found if isinstance(f, Miss)] == ["match.rope-sign"]


def test_the_cast_of_the_result_is_taken_in() -> None:
    def fn(q: Any, k: Any, c: Any, s: Any) -> Any:
        return tuple(with_rotate_half(x.float(), c, s).to(x.dtype) for x in (q, k))

    traced = trace(fn, value(B, HQ, S, D, dtype=bf16), value(B, HK, S, D, dtype=bf16), *tables(D))
    q = only(find_query_ropes(traced.graph, key(traced)))
    assert q.out_dtype == bf16
    assert q.rope_dtype == torch.float32


def qwen3(x: Any, wq: Any, wk: Any, inv: Any) -> Any:
    """The prologue as transformers spells it."""
    b, s, _ = x.shape
    angle = (inv[None, :, None] @ torch.arange(s, device=x.device).float()[None, None]).transpose(
        1, 2
    )
    both = torch.cat((angle, angle), -1)
    c, s_ = (t.to(x.dtype).unsqueeze(1) for t in (both.cos(), both.sin()))

    def norm(v: Any, w: Any) -> Any:
        n = v.float()
        return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + 1e-6)).to(v.dtype)

    def turn(v: Any) -> Any:
        first, second = v.chunk(2, -1)
        return v * c + torch.cat((-second, first), -1) * s_

    q = turn(norm(x[..., : HQ * D].view(b, s, HQ, D), wq).transpose(1, 2))
    k = turn(norm(x[..., HQ * D :].view(b, s, HK, D), wk).transpose(1, 2))
    return q.transpose(1, 2).reshape(b, s, -1), k.transpose(1, 2).reshape(-1, HK, D)


@pytest.mark.parametrize("how", [{}, {"dynamic": True}], ids=["static", "dynamic"])
def test_qwen3_behind_dynamo(how: dict[str, Any]) -> None:
    args = (value(B, S, (HQ + HK) * D, dtype=bf16), value(D, dtype=bf16) + 1, value(D, dtype=bf16),
            value(D // 2))  # fmt: skip
    traced = compiled(qwen3, *args, **how)
    guards = _guards(traced)
    k = key(traced, 1, "thd")
    q = only(find_query_ropes(traced.graph, k))
    for rope, heads in ((k, HK), (q, HQ)):
        assert not rope.cos.full
        assert (rope.out.heads, rope.style) == (heads, "half")
        fact = read_norm(rope.x)
        assert isinstance(fact, RMSNorm)
        assert (fact.cast, fact.x.heads) == ("late", heads)
        assert_rope_holds(traced, rope)
    assert _guards(traced) == guards
    if how:
        assert all(isinstance(n, torch.SymInt) for n in k.out.token_sizes)


def _guards(traced: Traced) -> int:
    from fusion.graph.compat import shape_env_of

    env = shape_env_of(traced.graph)
    return 0 if env is None else len(env.guards)


def test_cost_is_linear_in_layers() -> None:
    spent = []
    for count in (8, 32):
        args = (value(B, S, HQ * D), value(count, HQ * D, (HQ + HK) * D) / 16, *tables(D))
        traced = trace(layers(count), *args)
        started = time.process_time()
        finder = RopeFinder(traced.graph)
        for layer in range(count):
            assert only(finder.siblings(key(traced, layer)))
        spent.append(time.process_time() - started)
    assert spent[1] < 6 * spent[0]
    assert spent[1] < 32 * 0.03


@pytest.mark.parametrize("turned", [False, True])
def test_positions_in_another_shape(turned: bool) -> None:
    """q's rows gathered by positions [B, S], k's by the same ones flat or in another order."""

    def fn(q: Any, k: Any, table: Any, positions: Any) -> Any:
        flat = (positions.t() if turned else positions).reshape(-1) + 1
        cos, sin = (t.unsqueeze(1) for t in table[positions + 1].chunk(2, -1))
        c, s = (t.unsqueeze(1) for t in table[flat].view(B, S, -1).chunk(2, -1))
        return with_rotate_half(q, cos, sin), with_rotate_half(k, c, s)

    positions = torch.arange(B * S).flip(0).view(B, S)
    args = (value(B, HQ, S, D), value(B, HK, S, D), value(40, D), positions)
    traced = trace(fn, *args)
    found = find_query_ropes(traced.graph, key(traced))
    assert [isinstance(f, Rope) for f in found] == [not turned]
