"""Reading norms: every spelling, and look-alikes one node away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion.match.facts import Miss, RMSNorm
from fusion.match.norm import read_norm
from tests.match_graphs import Traced, assert_norm_holds, compiled, trace

B, S, H, D = 2, 5, 3, 32
EPS = 1e-6
bf16 = torch.bfloat16


def value(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def read(traced: Traced, dims: str = "bshd") -> RMSNorm:
    view = traced.view(dims)
    fact = read_norm(view)
    assert isinstance(fact, RMSNorm), fact
    assert_norm_holds(traced, fact, view)
    return fact


def refused(traced: Traced, code: str, dims: str = "bshd") -> Miss:
    fact = read_norm(traced.view(dims))
    assert isinstance(fact, Miss), fact
    assert fact.reason.code == code, fact.reason
    assert any(n.name == fact.reason.node for n in traced.graph.nodes)
    return fact


SQUARES: dict[str, Callable[[Any], Any]] = {
    "pow": lambda n: n.pow(2),
    "product": lambda n: n * n,
    "square": torch.square,
}
INVERSES: dict[str, Callable[[Any, Any], Any]] = {
    "rsqrt": lambda n, v: n * torch.rsqrt(v),
    "pow": lambda n, v: n * torch.pow(v, -0.5),
    "div": lambda n, v: n / torch.sqrt(v),
    "recip": lambda n, v: n * (1 / torch.sqrt(v)),
}
MEANS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda q: q.mean(-1, keepdim=True),
    "sum / D": lambda q: q.sum(-1, keepdim=True) / q.shape[-1],
    "mean, unsqueezed": lambda q: q.mean(-1).unsqueeze(-1),
}
# name: (function of (n, w, x), cast, mode)
WEIGHTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str, str]] = {
    "late": (lambda n, w, x: w * n.to(x.dtype), "late", "w"),
    "early": (lambda n, w, x: (n * w).to(x.dtype), "early", "w"),
    "early, cast": (lambda n, w, x: (n * w.float()).to(x.dtype), "early", "w"),
    "early 1+w": (lambda n, w, x: (n * (1 + w.float())).to(x.dtype), "early", "1+w"),
    "late 1+w": (lambda n, w, x: (w + 1) * n.to(x.dtype), "late", "1+w"),
    "none": (lambda n, w, x: n * w.float(), "none", "w"),
    "none 1+w": (lambda n, w, x: (1.0 + w.float()) * n, "none", "1+w"),
    "no weight": (lambda n, w, x: n.to(x.dtype), "late", "w"),
}


def norm(x: Any, w: Any, weight: str = "late", inverse: str = "rsqrt", square: str = "pow",
         mean: str = "mean", eps: Any = EPS) -> Any:  # fmt: skip
    """One spelling of a norm over the last axis."""
    n = x.float()
    v = MEANS[mean](SQUARES[square](n)) + eps
    return WEIGHTS[weight][0](INVERSES[inverse](n, v), w, x)


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


# --- look-alikes -------------------------------------------------------------------------------


def like(body: Callable[[Any, Any, Any], Any], *extra: torch.Tensor, plain: bool = False) -> Traced:
    """A norm-like function of (n = x.float(), w, x)."""
    return trace(
        lambda x, w, *more: body(x.float(), w, x, *more), value(B, S, H, D), value(D), *extra,
        plain=plain,
    )  # fmt: skip


def late(n: Any, inv: Any, w: Any, x: Any) -> Any:
    return w * (n * inv).to(x.dtype)


def test_wrong_axis() -> None:
    for axis in (0, 1, 2):
        traced = like(
            lambda n, w, x, a=axis: late(n, torch.rsqrt(n.pow(2).mean(a, True) + EPS), w, x)
        )
        refused(traced, "match.norm-axis")


@pytest.mark.parametrize("shape", [(1, D, 2, D), (2, 3, D, D), (D, 2, 2, D)])
def test_wrong_axis_of_the_right_size(shape: tuple[int, ...]) -> None:
    """The reduced axis has D elements too, but they are not the head's."""
    for axis in (0, 1, 2):
        if shape[axis] != D:
            continue
        traced = trace(
            lambda x, w, a=axis: late(
                x.float(), torch.rsqrt(x.float().pow(2).mean(a, True) + EPS), w, x
            ),
            value(*shape), value(D),
        )  # fmt: skip
        refused(traced, "match.norm-axis")


def test_mean_of_another_head() -> None:
    def body(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n.roll(1, 2).pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body), "match.norm-axis")


def test_mean_of_another_value() -> None:
    def body(n: Any, w: Any, x: Any, y: Any) -> Any:
        return late(n, torch.rsqrt(y.float().pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body, value(B, S, H, D)), "match.norm-axis")


def test_mean_of_permuted_dims_is_refused() -> None:
    """The same set in another order: another sum in floating point."""

    def body(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n.flip(-1).pow(2).mean(-1, True) + EPS), w, x)

    refused(like(body), "match.norm-axis")


def test_norm_over_all_heads() -> None:
    def fn(x: Any, w: Any) -> Any:
        return norm(x, w).view(B, S, H, D).transpose(1, 2)

    traced = trace(fn, value(B, S, H * D), value(H * D))
    miss = refused(traced, "match.norm-over-heads", "bhsd")
    assert (miss.reason.have, miss.reason.need) == (str(H * D), str(D))

    def two_axes(x: Any, w: Any) -> Any:
        n = x.float()
        return w * (n * torch.rsqrt(n.pow(2).mean((-1, -2), True) + EPS)).to(x.dtype)

    refused(trace(two_axes, value(B, S, H, D), value(D)), "match.norm-over-heads")


def test_norm_over_part_of_the_head() -> None:
    def fn(x: Any, w: Any) -> Any:
        return norm(x.view(B, S, H, 2, D // 2), w).view(B, S, H, D)

    fact = read_norm(trace(fn, value(B, S, H, D), value(D // 2)).view("bshd"))
    assert isinstance(fact, Miss)
    assert fact.reason.code in ("match.head-dim", "match.norm-axis")

    def prefix(n: Any, w: Any, x: Any) -> Any:
        return late(n, torch.rsqrt(n[..., :16].pow(2).mean(-1, True) + EPS), w, x)

    refused(like(prefix), "match.head-dim")


FORMS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "sum for mean": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).sum(-1, True) + EPS), w, x),
        "match.norm-form"),
    "mean divided again": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) / 2 + EPS), w, x),
        "match.norm-form"),
    "sum / (D - 1)": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).sum(-1, True) / (D - 1) + EPS), w, x),
        "match.norm-form"),
    "cube": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(4).mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "abs": (
        lambda n, w, x: late(n, torch.rsqrt(n.abs().mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "amax": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).amax(-1, True) + EPS), w, x),
        "match.norm-form"),
    "variance": (
        lambda n, w, x: late(n, torch.rsqrt(n.var(-1, keepdim=True) + EPS), w, x),
        "match.norm-form"),
    "mean of products of two values": (
        lambda n, w, x: late(n, torch.rsqrt((n * (n + 1)).mean(-1, True) + EPS), w, x),
        "match.norm-form"),
    "epsilon as a bound": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True).clamp(min=EPS)), w, x),
        "match.norm-eps"),
    "epsilon outside the root": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True)) + EPS, w, x),
        "match.norm-form"),
    "epsilon beside the root": (
        lambda n, w, x: w * (n / (n.pow(2).mean(-1, True).sqrt() + EPS)).to(x.dtype),
        "match.norm-form"),
    "mean subtracted": (
        lambda n, w, x: late(
            n - n.mean(-1, True), torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x),
        "match.norm-axis"),
    "epsilon per dim": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + w[:1]), w, x),
        "match.norm-eps"),
    "squares in bf16": (
        lambda n, w, x: late(n, torch.rsqrt(x.pow(2).float().mean(-1, True) + EPS), w, x),
        "match.norm-dtype"),
    "all in bf16": (
        lambda n, w, x: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS)), "match.norm-dtype"),
    "to another 16-bit dtype": (
        lambda n, w, x: (n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS)).to(torch.float16),
        "match.norm-dtype"),
    "weight by head": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS),
                             w.expand(H, D) * torch.arange(1, H + 1)[:, None].to(w.dtype), x),
        "match.norm-form"),
    "scaled after": (
        lambda n, w, x: 1.2 * late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x),
        "match.norm-order"),
    "clamped after": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x).clamp(-1, 1),
        "match.norm-order"),
    "biased after": (
        lambda n, w, x: late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x) + w,
        "match.norm-order"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_look_alikes(name: str) -> None:
    body, code = FORMS[name]
    for plain in (False, True):
        refused(like(body, plain=plain), code)


def test_mixed_float32_and_float64_are_refused() -> None:
    def mean_in_double(n: Any, w: Any, x: Any) -> Any:
        v = n.pow(2).mean(-1, True, dtype=torch.float64) + EPS
        return (n * torch.rsqrt(v)).to(x.dtype)

    refused(like(mean_in_double), "match.norm-dtype")

    def all_double(n: Any, w: Any, x: Any) -> Any:
        n = n.double()
        return late(n, torch.rsqrt(n.pow(2).mean(-1, True) + EPS), w, x)

    refused(like(all_double), "match.norm-dtype")

    def double_weight(n: Any, w: Any, x: Any) -> Any:
        return (n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS) * w.double()).to(x.dtype)

    refused(like(double_weight), "match.norm-dtype")


def test_float64_stays_float64() -> None:
    x, w = value(B, S, H, D, dtype=torch.float64), value(D, dtype=torch.float64)
    fn = lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS))  # noqa: E731
    assert read(trace(fn, x, w)).out_dtype == torch.float64


def test_layer_norm_and_l2_norm() -> None:
    layer = trace(lambda x, w: F.layer_norm(x, (D,), w), value(B, S, H, D), value(D))
    assert isinstance(read_norm(layer.view("bshd")), Miss)
    plain = trace(lambda x, w: F.layer_norm(x, (D,), w), value(B, S, H, D), value(D), plain=True)
    refused(plain, "match.norm-form")

    def by_vector_norm(n: Any, w: Any, x: Any) -> Any:
        return late(n, 1 / (torch.linalg.vector_norm(n, dim=-1, keepdim=True) + EPS), w, x)

    for plain_ in (False, True):
        fact = read_norm(like(by_vector_norm, plain=plain_).view("bshd"))
        assert isinstance(fact, Miss)


def test_weight_times_inverse_first_rounds_elsewhere() -> None:
    """n * (inv * w) is not (n * inv) * w in floating point."""

    def body(n: Any, w: Any, x: Any) -> Any:
        inv = torch.rsqrt(n.pow(2).mean(-1, True) + EPS)
        return (n * (inv * w.float())).to(x.dtype)

    assert isinstance(read_norm(like(body).view("bshd")), Miss)

    def other(n: Any, w: Any, x: Any) -> Any:
        inv = torch.rsqrt(n.pow(2).mean(-1, True) + EPS)
        return ((n * w.float()) * inv).to(x.dtype)

    assert isinstance(read_norm(like(other).view("bshd")), Miss)


@pytest.mark.parametrize("name", ["projection", "bias", "input", "clamp"])
def test_no_norm(name: str) -> None:
    def fn(x: Any, w: Any, b: Any) -> Any:
        y = x.view(B * S, -1) @ w
        y = y + b if name == "bias" else y.clamp(-8, 8) if name == "clamp" else y
        return (x if name == "input" else y).view(B, S, H, D)

    args = (value(B, S, H * D), value(H * D, H * D), value(H * D))
    refused(trace(fn, *args), "match.no-norm")


def test_residual_norm_before_the_projection_is_not_the_qk_norm() -> None:
    def fn(x: Any, w: Any, p: Any) -> Any:
        return (norm(x, w).view(B * S, -1) @ p).view(B, S, H, D)

    traced = trace(fn, value(B, S, H * D), value(H * D), value(H * D, H * D))
    refused(traced, "match.no-norm")
