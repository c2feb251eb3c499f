"""Pieces of a graph run small: the result is the function's own on the small inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion.match.region import Input, Region, RegionError, dims_of, regroup
from tests.match_graphs import Traced, trace

T, H, D = 6, 4, 8
#: Tokens in the small run.
FEW = 2
Function = Callable[..., Any]


def _given(shape: tuple[int, ...] = (T, H, D)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)


def _positions(*shape: int, below: int = FEW) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(0, below, shape)


def _run(
    traced: Traced, args: list[Tensor], small: list[Tensor], result: Node, **how: Any
) -> Tensor:
    """The value of ``result`` where the graph's inputs are small; their sizes may differ."""
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    given: dict[Node, Input] = {}
    for node, big, little in zip(inputs, args, small, strict=True):
        cut = {i: m for i, (n, m) in enumerate(zip(big.shape, little.shape, strict=True)) if n != m}
        given[node] = Input(dims_of(big.shape, cut), little)
    values, dims = Region.between(inputs, [result]).run(given, **how)
    sizes = [math.prod(s for _, s in factors) for factors in dims[result]]
    assert sizes == list(values[result].shape)
    done: Tensor = values[result]
    return done


def _few(tensor: Tensor, dim: int = 0) -> Tensor:
    return tensor.narrow(dim, 0, FEW).clone()


FOLLOWED: dict[str, Function] = {
    "views": lambda x: x.reshape(-1, D).view(-1, H * D).view(-1, H, 2, D // 2),
    "slices": lambda x: x[: x.shape[0]][:, 1:, ::2],
    "sum": lambda x: x.sum(1),
    "mean of two": lambda x: x.mean((1, -1)),
    "amax of all": lambda x: x.amax(),
    "variance": lambda x: x.var(1),
    "stack": lambda x: torch.stack((x, -x), 1),
    "squeeze of nothing": lambda x: x[:, :1].squeeze(0).squeeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1) * x[:, 1:2].squeeze(),
    "unbind": lambda x: torch.unbind(x, 1)[2] + x.split(1, 1)[0][:, 0],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, H, 4, 2)) * 2.0),
    "a number": lambda x: x * torch.full((), 2.5),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_sizes_are_followed_through_operators(name: str) -> None:
    fn, x = FOLLOWED[name], _given()
    traced = trace(fn, x, plain=True)
    assert torch.equal(_run(traced, [x], [_few(x)], traced.result()), fn(_few(x)))


GATHERS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "embedding": (lambda t, at: torch.nn.functional.embedding(at, t), (T, 3)),
    "index_select": (lambda t, at: t.index_select(0, at), (T,)),
    "index_select behind": (lambda t, at: t.t().index_select(1, at), (T,)),
    "index": (lambda t, at: t[at], (T, 3)),
    "two indices": (lambda t, at: t[at, at + 1], (T, 3)),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_has_the_sizes_of_its_index(name: str) -> None:
    fn, shape = GATHERS[name]
    table, at = _given((20, 16)), _positions(*shape)
    traced = trace(fn, table, at, plain=True)
    have = _run(traced, [table, at], [table, _few(at)], traced.result())
    assert torch.equal(have, fn(table, _few(at)))


def test_an_expand_that_makes_the_token_count_is_told_apart_from_a_constant() -> None:
    """A size made out of nothing may be the token count, or a number that equals it."""

    def fn(x: Tensor) -> Tensor:
        return x[:1].expand(x.shape[0], H, D)

    x = _given()
    traced = trace(fn, x, plain=True)
    one = x[:1].clone()
    node = traced.result()
    row = node.all_input_nodes[0]
    region = Region.between([row], [node])
    given = {row: Input(dims_of((1, H, D)), one)}
    for constant, rows in ((False, FEW), (True, T)):
        how: dict[str, Any] = {"constant": lambda *_: True} if constant else {}
        values, _ = region.run(given, widen={T: FEW}, **how)
        assert torch.equal(values[node], one.expand(rows, H, D))
    assert region.guesses({T: FEW}, lambda *_: False) == (node,)
    assert region.guesses({T: FEW}, lambda *_: True) == ()


REFUSED: dict[str, tuple[Function, str]] = {
    "part of the tokens": (lambda x: x[1:], "a slice of the token"),
    "one token": (lambda x: x[1], "an index into the token"),
    "tokens apart": (lambda x: x.unbind(0)[0], "an index into the token"),
    "tokens in groups": (lambda x: x.view(2, -1, H, D), "cuts a token"),
    "tokens and heads mixed": (lambda x: x.view(-1, 8, D), "cuts a token"),
    "a fixed size": (lambda x: x + torch.full((T, 1, 1), 2.0), "of a fixed size"),
    "reversed": (lambda x: x.flatten()[: T * D].view(T, D), "a slice of the token"),
    "a gram matrix": (lambda x: x[:, 0] @ x[:, 0].t(), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_token_count_is_refused_where_it_stands(name: str) -> None:
    fn, words = REFUSED[name]
    x = _given()
    traced = trace(fn, x, plain=True)
    with pytest.raises(RegionError, match=words) as caught:
        _run(traced, [x], [_few(x)], traced.result())
    assert caught.value.node in set(traced.graph.nodes)


def test_indices_that_stand_apart_or_differ_in_rank_are_refused() -> None:
    table, at = _given((5, 6, 7)), _positions(T)

    def apart(t: Tensor, at: Tensor) -> Tensor:
        return t[at, :, at]

    def ranks(t: Tensor, at: Tensor) -> Tensor:
        return t[at, at[:, None]]

    for fn, words in ((apart, "stand apart"), (ranks, "unequal rank")):
        traced = trace(fn, table, at, plain=True)
        with pytest.raises(RegionError, match=words) as caught:
            _run(traced, [table, at], [table, _few(at)], traced.result())
        assert caught.value.node is traced.result()


def test_what_was_not_read_is_named() -> None:
    x = _given()
    traced = trace(lambda x, y: x + y, x, x)
    first, second = (n for n in traced.graph.nodes if n.op == "placeholder")
    with pytest.raises(RegionError, match=f"also depends on {second.name}") as caught:
        Region.between([first], [traced.result()])
    assert caught.value.node is second


def test_calls_of_modules_and_values_that_are_missing_are_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    called = graph.call_module("norm", (x,))
    constant = graph.get_attr("weight")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (called, constant))
    loose = graph.call_function(torch.ops.aten.mul.Tensor, (x, constant))
    for node in (x, called, product, loose):
        node.meta["val"] = _given()
    given = {x: Input(dims_of((T, H, D)), _given())}
    for result, at, words in ((product, called, "call_module"), (loose, constant, "no value")):
        with pytest.raises(RegionError, match=words) as caught:
            Region.between([x], [result]).run(given)
        assert caught.value.node is at


def test_an_operator_that_fails_on_the_small_sizes_is_named() -> None:
    x = _given()
    traced = trace(lambda x: x[:, 3:4] * 2, x, plain=True)
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    bad = {inputs[0]: Input(dims_of((T, H, D)), torch.ones(T))}
    with pytest.raises(RegionError, match="IndexError") as caught:
        Region.between(inputs, [traced.result()]).run(bad)
    assert caught.value.node is not None and "slice" in str(caught.value.node.target)


def test_a_complex_product_must_round_each_product_and_the_sum() -> None:
    """Torch's kernel may fuse a multiply and an add: refused exactly where it does."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))

    for width in range(1, 10):
        x, y = _given((T, width, 2)), _given((width, T, 2)).transpose(0, 1).contiguous() * 3 + 1
        (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
        rounded = torch.stack((a * c - b * d, a * d + b * c), -1)
        traced = trace(fn, x, y, plain=True)
        if torch.equal(fn(x, y), rounded):
            assert torch.equal(_run(traced, [x, y], [x, y], traced.result()), rounded)
            continue
        with pytest.raises(RegionError, match="rounding of a complex product") as caught:
            _run(traced, [x, y], [x, y], traced.result())
        assert caught.value.node is not None and "mul" in str(caught.value.node.target)


def test_one_token_that_is_more_in_the_small_run_must_keep_its_dimension() -> None:
    one, few = _given((1, H, D)), _given((FEW, H, D))
    traced = trace(lambda x: x.squeeze(0), one, plain=True)
    with pytest.raises(RegionError, match="only dropped") as caught:
        _run(traced, [one], [few], traced.result())
    assert caught.value.node is traced.result()


@pytest.mark.parametrize("shape", [(4,), (6, 2)])
def test_a_view_to_another_number_of_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RegionError, match="view"):
        regroup(dims_of((6,), {0: FEW}), shape)
    with pytest.raises(RegionError, match="cannot be followed"):
        regroup(dims_of((2, 5)), (2,))
