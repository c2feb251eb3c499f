"""Every attention call of a graph is found, and its arguments are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion.ops  # noqa: F401 - registers the operations
from fusion.match.attention import (
    Attention,
    AttentionRoles,
    find_attention,
    register_attention,
)
from fusion.match.facts import Miss
from tests.cache_cases import graph_of

_library = torch.library.Library("test_attention", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "foreign_attn(Tensor q, Tensor pages_k, Tensor pages_v, Tensor table, Tensor lens, "
    "Tensor starts, float sm_scale, int mode=0, Tensor? alibi=None, float cap=0.0) -> Tensor"
)
_library.impl("foreign_attn", lambda q, *_, **__: q.clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "test_attention::foreign_attn", lambda q, *_, **__: torch.empty_like(q), lib=_library
)
_library.define("strange_attention(Tensor q) -> Tensor")
_library.impl("strange_attention", lambda q: q.clone(), "CompositeExplicitAutograd")
torch.library.register_fake(
    "test_attention::strange_attention", lambda q: torch.empty_like(q), lib=_library
)

ROLES = AttentionRoles(
    {
        "query": "q", "key_cache": "pages_k", "value_cache": "pages_v", "block_table": "table",
        "seq_lens": "lens", "query_start_loc": "starts", "scale": "sm_scale", "softcap": "cap",
    },
    constants={"causal": False},
    ignored=frozenset({"mode"}),
)  # fmt: skip
register_attention("test_attention::foreign_attn", ROLES)


def _dense() -> tuple[Tensor, ...]:
    return torch.randn(2, 8, 5, 16), torch.randn(2, 8, 9, 16), torch.randn(2, 8, 9, 16)


def _paged() -> tuple[Tensor, ...]:
    return (
        torch.randn(5, 8, 16),
        torch.randn(6, 4, 4, 16),
        torch.randn(6, 4, 4, 16),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.tensor([4, 6], dtype=torch.int32),
        torch.tensor([0, 2, 5], dtype=torch.int32),
    )


def _find(fn: Any, args: tuple[Tensor, ...]) -> list[Attention | Miss]:
    return find_attention(graph_of(fn, args).graph)


def _one(fn: Any, args: tuple[Tensor, ...]) -> Attention:
    (fact,) = _find(fn, args)
    assert isinstance(fact, Attention), fact
    return fact


def test_each_paged_call_has_its_own_causality_and_window() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
        call = torch.ops.fusion.paged_attention
        q = call(q, k, v, table, lens, starts, 3, 6, 0.25, False)
        q = call(q, k, v, table, lens, starts, 3, 6, 0.25, False, 8)
        return call(q, k, v, table, lens, starts, 3, 6, 0.25, True, softcap=2.0)

    facts = _find(fn, _paged())
    assert all(isinstance(f, Attention) and f.spelling == "paged" for f in facts)
    said = [(f.causal, f.arguments["window_left"], f.arguments["softcap"]) for f in facts]  # type: ignore[union-attr]
    assert said == [(False, -1, 0.0), (False, 8, 0.0), (True, -1, 2.0)]
    first = facts[0]
    assert isinstance(first, Attention)
    assert first.arguments["query"].op == "placeholder" and not first.unclaimed
    assert first.result is first.node


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_in_its_backend_spelling(causal: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5) * 2

    fact = _one(fn, _dense())
    assert fact.spelling == "sdpa" and fact.causal is causal
    assert fact.arguments["scale"] == 0.5
    assert [fact.arguments[n].op for n in ("query", "key", "value")] == ["placeholder"] * 3
    assert fact.result is not fact.node and fact.result.meta["val"].shape == (2, 8, 5, 16)


def test_a_mask_hides_causality() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    fact = _one(fn, _dense())
    assert fact.causal is None and fact.masked and "mask" in fact.unclaimed


def test_attention_spelled_out() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(5, 9).masked_fill(torch.ones(5, 9).triu(5) > 0, float("-inf"))
        scores = (q @ k.transpose(2, 3)) * 0.25 + mask
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    fact = _one(fn, _dense())
    assert fact.spelling == "plain" and fact.causal is None
    assert fact.arguments["value"].meta["val"].shape[-1] == 16


def test_an_mlp_with_a_softmax_gate_is_no_attention() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(x * 2, -1) @ w + F.softmax(x.relu(), -1).sum()

    assert _find(fn, (torch.randn(4, 8), torch.randn(8, 8))) == []


def test_a_registered_op_names_what_has_no_home() -> None:
    foreign = torch.ops.test_attention.foreign_attn

    def fn(*a: Tensor) -> Tensor:
        return foreign(foreign(*a, 0.5, 3, cap=1.5), *a[1:], 0.5, 0, a[0])

    first, second = _find(fn, _paged())
    assert isinstance(first, Attention) and isinstance(second, Attention)
    assert first.spelling == "registered" and first.causal is False
    assert first.arguments["scale"] == 0.5 and first.arguments["softcap"] == 1.5
    assert not first.unclaimed
    assert set(second.unclaimed) == {"alibi"}


def test_an_unregistered_attention_op_is_a_reason() -> None:
    (miss,) = _find(lambda q: torch.ops.test_attention.strange_attention(q), (torch.randn(3),))
    assert isinstance(miss, Miss) and miss.reason.code == "match.attention-op"
    assert miss.reason.have == "test_attention::strange_attention"


def test_causality_that_is_a_node_is_a_reason() -> None:
    def fn(*a: Tensor) -> Tensor:
        return torch.ops.fusion.paged_attention(*a, 3, 6, 0.25, False)

    graph = graph_of(fn, _paged()).graph
    call = next(n for n in graph.nodes if "paged_attention" in str(n.target))
    flag = next(n for n in graph.nodes if n.op == "placeholder")
    call.update_arg(9, flag)
    (miss,) = find_attention(graph)
    assert isinstance(miss, Miss) and miss.reason.code == "match.causal-not-constant"


def test_registration_is_checked() -> None:
    with pytest.raises(ValueError, match="colour"):
        AttentionRoles({"query": "q", "colour": "c"})
    register_attention("test_attention::foreign_attn", ROLES)
    with pytest.raises(ValueError, match="already registered"):
        register_attention("test_attention::foreign_attn", AttentionRoles({"query": "q"}))


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    fact = _one(lambda q, k, v: flex_attention(q, k, v, scale=0.5), _dense())
    assert fact.spelling == "flex" and fact.arguments["scale"] == 0.5 and fact.masked
