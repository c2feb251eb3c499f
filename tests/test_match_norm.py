"""Reading norms: every spelling, layout, weight and cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion.match.facts import RMSNorm
from fusion.match.norm import read_norm
from tests.match_graphs import Traced, assert_norm_holds, compiled, trace
from tests.norm_spellings import (
    EPS,
    INVERSES,
    MEANS,
    SQUARES,
    WEIGHTS,
    B,
    D,
    H,
    S,
    bf16,
    norm,
    read,
    value,
)


@pytest.mark.parametrize("plain", [False, True], ids=["decomposed", "plain"])
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_casts_and_inverses(weight: str, inverse: str, plain: bool) -> None:
    _, cast, mode = WEIGHTS[weight]
    traced = trace(
        lambda x, w: norm(x, w, weight, inverse), value(B, S, H, D), value(D), plain=plain
    )
    fact = read(traced)
    assert (fact.cast, fact.weight_mode, fact.inv_rms) == (cast, mode, inverse)
    assert fact.x.node.name == "arg0_1"
    assert (fact.weight is None) == (weight == "no weight")
    assert fact.weight is None or fact.weight.name == "arg1_1"
    assert fact.eps == EPS


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("mean", MEANS)
def test_squares_and_means(square: str, mean: str) -> None:
    for plain in (False, True):
        fn = lambda x, w: norm(x, w, square=square, mean=mean)  # noqa: E731
        read(trace(fn, value(B, S, H, D), value(D), plain=plain))


@pytest.mark.parametrize("weight", ["late", "early", "early 1+w", "no weight"])
def test_float32_activations(weight: str) -> None:
    x, w = value(B, S, H, D, dtype=torch.float32), value(D, dtype=torch.float32)
    fact = read(trace(lambda x, w: norm(x, w, weight), x, w))
    assert fact.out_dtype == torch.float32


@pytest.mark.parametrize("weight", ["late", "early", "none"])
def test_float32_weights_with_bfloat16_activations(weight: str) -> None:
    fact = read(
        trace(lambda x, w: norm(x, w, weight), value(B, S, H, D), value(D, dtype=torch.float32))
    )
    assert fact.cast == WEIGHTS[weight][1]
    assert fact.out_dtype == (bf16 if weight == "early" else torch.float32)


@pytest.mark.parametrize("dtype", [bf16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_functional_rms_norm(dtype: torch.dtype, weighted: bool) -> None:
    def fn(x: Any, w: Any) -> Any:
        return F.rms_norm(x, (D,), w if weighted else None, EPS)

    traced = compiled(fn, value(B, S, H, D, dtype=dtype), value(D, dtype=dtype))
    view = traced.view("bshd")
    fact = read_norm(view)
    assert isinstance(fact, RMSNorm)
    assert_norm_holds(traced, fact, view)
    assert fact.eps == pytest.approx(EPS)


def test_eps_none_of_rms_norm() -> None:
    traced = compiled(lambda x, w: F.rms_norm(x, (D,), w), value(B, S, H, D), value(D))
    fact = read_norm(traced.view("bshd"))
    assert isinstance(fact, RMSNorm)
    assert fact.eps == pytest.approx(torch.finfo(torch.float32).eps)


SURVIVORS: dict[str, Callable[[Any, Any], Any]] = {
    "aten.rms_norm": lambda x, w: torch.ops.aten.rms_norm.default(x, [D], w, EPS),
    "aten._fused_rms_norm": lambda x, w: torch.ops.aten._fused_rms_norm.default(x, [D], w, EPS)[0],
}


@pytest.mark.parametrize("name", SURVIVORS)
@pytest.mark.parametrize("weighted", [True, False])
def test_operators_that_survive(name: str, weighted: bool) -> None:
    """CUDA builds keep the operator whole: it is read through its decomposition."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    fakes = torch._subclasses.FakeTensorMode()
    op = getattr(torch.ops.aten, name.split(".")[1]).default
    with fakes:
        x.meta["val"], w.meta["val"] = (
            torch.empty(B, S, H, D, dtype=bf16),
            torch.empty(D, dtype=bf16),
        )
    y = graph.call_function(op, (x, [D], w if weighted else None, EPS))
    with fakes:
        out = torch.empty(B, S, H, D, dtype=bf16)
        y.meta["val"] = out if name == "aten.rms_norm" else (out, torch.empty(B, S, H, 1))
    last = y
    if name != "aten.rms_norm":
        import operator

        last = graph.call_function(operator.getitem, (y, 0))
        last.meta["val"] = out
    z = graph.call_function(torch.ops.aten.permute.default, (last, [0, 2, 1, 3]))
    with fakes:
        z.meta["val"] = out.permute(0, 2, 1, 3)
    graph.output(z)
    traced = Traced(graph, {})
    fact = read_norm(traced.view("bhsd"))
    assert isinstance(fact, RMSNorm), fact
    assert (fact.x.node, fact.weight) == (x, w if weighted else None)
    assert fact.eps == EPS
    assert fact.cast == ("early" if weighted else "late")
    assert y in fact.nodes
    assert last in fact.nodes
    assert z in fact.nodes
    assert not fact.nodes - {y, last, z}


def test_epsilon_as_a_node() -> None:
    for eps in (torch.tensor(1e-5), torch.tensor(1e-5, dtype=torch.float64)):
        traced = trace(lambda x, w, e: norm(x, w, eps=e), value(B, S, H, D), value(D), eps)
        fact = read(traced)
        assert isinstance(fact.eps, torch.fx.Node)

    def cast(x: Any, w: Any, e: Any) -> Any:
        return norm(x, w, eps=e.float())

    fact = read(trace(cast, value(B, S, H, D), value(D), torch.tensor(1e-5, dtype=torch.float64)))
    assert isinstance(fact.eps, torch.fx.Node)
    assert fact.eps.meta["val"].shape == ()


def test_epsilon_may_be_missing() -> None:
    def fn(x: Any, w: Any) -> Any:
        n = x.float()
        return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True))).to(x.dtype)

    assert read(trace(fn, value(B, S, H, D), value(D))).eps == 0.0


def test_dynamic_shapes() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = F.rms_norm(x.view(x.shape[0], x.shape[1], H, D), (D,), w, EPS)
        return y.transpose(1, 2)

    traced = compiled(fn, value(B, S, H * D), value(D), dynamic=True)
    fact = read_norm(traced.view("bhsd"))
    assert isinstance(fact, RMSNorm), fact
    assert all(isinstance(n, torch.SymInt) for n in fact.x.token_sizes)


# --- layouts -----------------------------------------------------------------------------------


def test_norm_before_and_after_the_transposition() -> None:
    before = lambda x, w: norm(x.view(B, S, H, D), w).transpose(1, 2)  # noqa: E731
    after = lambda x, w: norm(x.view(B, S, H, D).transpose(1, 2), w)  # noqa: E731
    for fn, order in ((before, (0, 1, 2, 3)), (after, (0, 2, 1, 3))):
        fact = read(trace(fn, value(B, S, H * D), value(D)), "bhsd")
        assert fact.x.order == order
        assert fact.x.token_sizes == (B, S)


def test_merged_tokens_and_heads() -> None:
    """vLLM norms [T * H, D]; x is the node before it whose axes are apart."""

    def fn(x: Any, w: Any) -> Any:
        return norm(x.view(-1, H, D).reshape(-1, D), w).view(-1, H, D)

    fact = read(trace(fn, value(7, H * D), value(D)), "thd")
    assert not fact.x.merged_heads
    assert fact.x.token_sizes == (7,)

    def merged(x: Any, w: Any) -> Any:
        return norm(x, w).view(-1, H, D)

    fact = read(trace(merged, value(7 * H, D), value(D)), "thd")
    assert fact.x.merged_heads


def test_up_cast_before_the_head_split() -> None:
    """x is cast up while heads and dim are still one axis: x stays the bf16 value."""

    def fn(x: Any, w: Any) -> Any:
        n = x.float().view(B, S, H, D)
        return w * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    assert read(trace(fn, value(B, S, H * D), value(D))).x.node.op == "placeholder"


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 4, 4), (4, 4, 4), (D, D, D), (1, D, 2), (3, 1, D)]
)
def test_equal_sizes_do_not_confuse_axes(sizes: tuple[int, int, int]) -> None:
    b, s, h = sizes
    for dims in ("bshd", "bhsd"):
        shape = (b, s, h, D) if dims == "bshd" else (b, h, s, D)
        read(trace(lambda x, w: norm(x, w), value(*shape), value(D)), dims)


def test_packed_qkv() -> None:
    def fn(x: Any, w: Any) -> Any:
        _, k, _ = x.view(B, S, 8, D).split([4, 2, 2], 2)
        return norm(k, w)

    fact = read(trace(fn, value(B, S, 8 * D), value(D)))
    assert fact.x.heads == 2


def test_weight_by_slice_and_in_other_shapes() -> None:
    read(trace(lambda x, w: norm(x, w[3]), value(B, S, H, D), value(4, D)))
    read(trace(lambda x, w: norm(x, w[:D]), value(B, S, H, D), value(2 * D)))
    read(trace(lambda x, w: norm(x, w.view(1, 1, 1, D)), value(B, S, H, D), value(D)))


def test_a_reversed_weight_is_a_vector_of_its_own() -> None:
    fact = read(trace(lambda x, w: norm(x, w.flip(0)), value(B, S, H, D), value(D)))
    assert fact.weight is not None
    assert fact.weight.op == "call_function"


def test_an_odd_one_plus_w_is_an_opaque_weight() -> None:
    """(1 + w) rounded to bf16, then multiplied in f32: handed in as it is."""

    def fn(x: Any, w: Any) -> Any:
        n = x.float()
        n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)
        return (n * (1 + w).float()).to(x.dtype)

    fact = read(trace(fn, value(B, S, H, D), value(D)))
    assert fact.weight_mode == "w"
    assert fact.weight is not None
    assert fact.weight.op == "call_function"
