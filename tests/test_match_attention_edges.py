"""Attention at the edge: wrapped calls, torch's own ops, and products that only look like it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusion.match.attention import (
    Attention,
    AttentionRoles,
    find_attention,
    register_attention,
)
from fusion.match.facts import Miss
from tests.cache_cases import graph_of
from tests.match_graphs import trace

_library = torch.library.Library("test_attention_edges", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "into(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float sm_scale=1.0) -> ()"
)
_library.impl("into", lambda *_, **__: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("test_attention_edges::into", lambda *_, **__: None, lib=_library)
register_attention(
    "test_attention_edges::into",
    # No "cap": roles may name an argument that only another release of the op has.
    AttentionRoles({"query": "q", "key": "k", "value": "v", "scale": "sm_scale", "softcap": "cap"}),
)

aten = torch.ops.aten


def _dense() -> tuple[Tensor, ...]:
    return torch.randn(2, 8, 5, 16), torch.randn(2, 8, 9, 16), torch.randn(2, 8, 9, 16)


def _graph(op: Any, *args: Any, **kwargs: Any) -> tuple[Graph, Node]:
    """One call of an op on inputs q, k, v, given as words in ``args``."""
    graph = Graph()
    values = dict(zip("qkv", _dense(), strict=True))
    nodes: dict[str, Node] = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value

    def given(word: Any) -> Any:
        return nodes[word] if isinstance(word, str) else word

    named = {n: given(a) for n, a in kwargs.items()}
    call = graph.call_function(op, tuple(map(given, args)), named)
    call.meta["val"] = (values["q"], values["q"])
    graph.output(call)
    return graph, call


def _one(graph: Graph) -> Attention:
    (fact,) = find_attention(graph)
    assert isinstance(fact, Attention), fact
    return fact


def _reason(graph: Graph) -> Any:
    (fact,) = find_attention(graph)
    assert isinstance(fact, Miss), fact
    return fact.reason


def test_an_op_that_writes_its_result_is_read_inside_its_wrapper() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        torch.ops.test_attention_edges.into(q, k, v, out, 0.5)
        return out * 2

    fact = _one(graph_of(fn, _dense()).graph)
    assert fact.spelling == "registered" and fact.arguments["scale"] == 0.5
    assert fact.arguments["query"].op == "placeholder" and fact.causal is None
    assert "auto_functionalized" in fact.node.name
    assert set(fact.arguments) == {"query", "key", "value", "scale"}


def test_a_result_that_nobody_reads_is_the_call() -> None:
    graph, call = _graph(
        aten._scaled_dot_product_flash_attention_for_cpu.default, "q", "k", "v", 0.0, True
    )
    fact = _one(graph)
    assert fact.result is call and fact.causal is True and not fact.unclaimed


def test_the_backward_of_attention_is_no_call() -> None:
    graph, _ = _graph(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        "q", "q", "k", "v", "q", "q", 0.0, False,
    )  # fmt: skip
    assert find_attention(graph) == []


def test_an_attention_op_of_torch_that_is_not_read() -> None:
    graph, call = _graph(aten._triton_scaled_dot_attention.default, "q", "k", "v")
    reason = _reason(graph)
    assert reason.code == "match.attention-op" and reason.node == call.name
    assert reason.have == "aten::_triton_scaled_dot_attention"


def test_dropout_and_packed_lengths_have_no_home() -> None:
    graph, _ = _graph(
        aten._flash_attention_forward.default, "q", "k", "v", None, None, 5, 9, 0.1, True, False,
        window_size_left=4, seqused_k="k",
    )  # fmt: skip
    fact = _one(graph)
    assert set(fact.unclaimed) == {"dropout_p", "seqused_k"}
    assert fact.arguments["window_left"] == 4 and "window_right" not in fact.arguments
    assert fact.causal is True and not fact.masked


@pytest.mark.parametrize(("kind", "causal"), [(0, False), (1, True), (2, None)])
def test_the_kind_of_mask_of_efficient_attention(kind: int, causal: bool | None) -> None:
    graph, _ = _graph(
        aten._efficient_attention_forward.default,
        "q", "k", "v", None, None, None, None, None, 0.0, kind,
    )  # fmt: skip
    assert _one(graph).causal is causal


def test_causality_that_is_computed_is_a_reason() -> None:
    graph, call = _graph(
        aten._scaled_dot_product_flash_attention_for_cpu.default, "q", "k", "v", 0.0, "q"
    )
    reason = _reason(graph)
    assert reason.code == "match.causal-not-constant" and reason.node == call.name


def test_flex_attention_without_a_scale() -> None:
    def flex_attention(*_: Any) -> None:
        """Stands for the higher-order op, which is found by its name."""

    graph, _ = _graph(flex_attention, "q", "k", "v")
    fact = _one(graph)
    assert fact.spelling == "flex" and "scale" not in fact.arguments and not fact.unclaimed
    assert set(fact.arguments) == {"query", "key", "value"}


def _by_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(16)
    e = (scores - scores.amax(-1, True)).exp()
    return (e / e.sum(-1, True)) @ v


def _by_exp_unshifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.transpose(2, 3)).exp()
    return (e / e.sum(-1, True)) @ v


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3)
    allowed = torch.ones(5, 9, dtype=torch.bool).tril(4)
    return F.softmax(torch.where(allowed, scores, -1e9), -1) @ v


def _with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3)
    sink = v.new_zeros(2, 8, 5, 1)
    return F.softmax(torch.cat((scores, sink), -1), -1)[..., :-1] @ v


@pytest.mark.parametrize("fn", [_by_exp, _by_exp_unshifted, _masked, _with_sinks])
def test_softmax_in_many_words(fn: Any) -> None:
    graph = graph_of(fn, _dense()).graph
    fact = _one(graph)
    assert fact.spelling == "plain" and fact.masked and fact.causal is None
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    found = []
    for name in ("query", "key", "value"):
        node = fact.arguments[name]
        while node.op != "placeholder":
            node = node.all_input_nodes[0]
        found.append(inputs.index(node))
    assert len(set(found)) == 3


def test_softmax_as_one_operator() -> None:
    traced = trace(_with_sinks, *_dense(), plain=True)
    assert traced.named("_softmax")
    fact = _one(traced.graph)
    assert fact.spelling == "plain" and fact.result is fact.node
    assert "bmm" in str(fact.node.target)


def test_scores_of_a_product_with_a_bias_and_of_one_with_a_dtype() -> None:
    def call(graph: Graph, op: Any, *args: Any) -> Node:
        node = graph.call_function(op, args)
        node.meta["val"] = torch.randn(8, 5, 5)
        return node

    graph = Graph()
    q, k, v, bias = (graph.placeholder(n) for n in ("q", "k", "v", "bias"))
    scores = call(graph, aten.baddbmm.default, bias, q, k)
    weights = call(graph, aten._softmax.default, scores, -1, False)
    out = call(graph, aten.bmm.dtype, weights, v, torch.float32)
    graph.output(out)
    fact = _one(graph)
    assert [fact.arguments[n] for n in ("query", "key", "value")] == [q, k, v]
    assert fact.result is out


def _ratio(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q / k[:, :, :5]) @ v.transpose(2, 3)


def _weights_by_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3) / 4) @ v


def _gate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.ones(9, 9), -1) @ v


def _exp_over_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.exp() / k[:, :, :5].relu()) @ v.transpose(2, 3)


@pytest.mark.parametrize("fn", [_ratio, _weights_by_a_number, _gate, _exp_over_another])
def test_products_that_only_look_like_attention(fn: Any) -> None:
    assert find_attention(graph_of(fn, _dense()).graph) == []
