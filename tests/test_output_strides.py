"""A rotated query that the graph returns keeps the strides that a caller saw without fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.graph.strides import reaches_output, restride
from fusion.graph.values import same_strides

T, D, SLOTS = 6, 16, 64


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def arguments(queries: int = 4, written: int = 2) -> tuple[Tensor, ...]:
    """q [T, queries, D], k and v [T, written, D], cos, sin, two caches, slots."""
    torch.manual_seed(0)
    caches = [torch.zeros(SLOTS, written, D) for _ in range(2)]
    slots = torch.randperm(SLOTS)[:T]
    tables = torch.randn(T, 1, D // 2), torch.randn(T, 1, D // 2)
    q, k, v = (torch.randn(T, heads, D) for heads in (queries, written, written))
    return q, k, v, *tables, *caches, slots


def joint(q_at: slice, k_at: slice, give: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """Rotates q and k as one tensor, whose heads they are, and returns what ``give`` makes."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kc: Tensor, vc: Tensor,
        slots: Tensor,
    ) -> Any:  # fmt: skip
        heads = q.shape[1] + k.shape[1]
        places = [*range(heads)[q_at], *range(heads)[k_at]]
        parts = [*q.split(1, 1), *k.split(1, 1)]
        qk = rope(torch.cat([parts[places.index(i)] for i in range(heads)], 1), cos, sin)
        q, k = qk[:, q_at], qk[:, k_at]
        kc[slots], vc[slots] = k, v
        return give(q, k)

    return forward


def compiled(fn: Callable[..., Any], args: tuple[Tensor, ...], inner: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    options: dict[str, Any] = {"inner": inner}
    with torch.no_grad():
        return torch.compile(fn, backend="fusion", fullgraph=True, options=options)(*args)


def assert_like_eager(
    fn: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]], inner: str = "aot_eager"
) -> Any:
    """Bits, strides (one element has none) and caches; returns the only site."""
    eager_args, args = make(), make()
    expected, got = fn(*eager_args), compiled(fn, args, inner)
    for e, g in zip(
        torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(got), strict=True
    ):
        assert torch.equal(e, g)
        assert same_strides(e, g), (e.stride(), g.stride())
    assert all(torch.equal(a, b) for a, b in zip(eager_args, args, strict=True))
    (site,) = fusion.reports()[-1].sites
    return site


GIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda q, k: q,
    "with its key": lambda q, k: (q, k),
    "transposed": lambda q, k: q.transpose(0, 1),
    "flattened": lambda q, k: q.flatten(1),
    "one head": lambda q, k: q[:, 1],
    "a view of a view": lambda q, k: q.unsqueeze(0).transpose(1, 2)[..., :4],
    "computed with": lambda q, k: q * 2,
}


@pytest.mark.parametrize("give", GIVES.values(), ids=GIVES.keys())
def test_a_part_of_a_joint_rope_keeps_its_strides(give: Callable[[Tensor, Tensor], Any]) -> None:
    fn = joint(slice(0, 4), slice(4, 6), give)
    assert assert_like_eager(fn, arguments).status == "fused"


@pytest.mark.parametrize(
    ("q", "k"),
    [(slice(0, 4, 2), slice(1, 4, 2)), (slice(2, 4), slice(0, 2)), (slice(0, 1), slice(1, 2))],
    ids=["every other head", "behind the key", "one head"],
)
def test_other_parts(q: slice, k: slice) -> None:
    heads = len(range(4)[q]), len(range(4)[k])
    fn = joint(q, k, GIVES["itself"])
    assert assert_like_eager(fn, lambda: arguments(*heads)).status == "fused"


def test_through_inductor() -> None:
    fn = joint(slice(0, 4), slice(4, 6), lambda q, k: q)
    eager_args, args = arguments(), arguments()
    expected, got = fn(*eager_args), compiled(fn, args, "inductor")
    assert fusion.reports()[-1].sites[0].status == "fused"
    assert got.stride() == expected.stride() == (96, D, 1)
    torch.testing.assert_close(got, expected)


class Layer(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        for name in ("kc", "vc"):
            self.register_buffer(name, torch.zeros(SLOTS, 2, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, s: Tensor) -> Any:
        return self.fn(q, k, v, cos, sin, self.kc, self.vc, s)


class Layers(torch.nn.Module):
    """Two ordinary layers and one whose output has strides of its own."""

    def __init__(self, odd: Callable[..., Any]) -> None:
        super().__init__()
        plain = joint(slice(0, 3), slice(3, 5), GIVES["computed with"])
        self.layers = torch.nn.ModuleList(Layer(f) for f in (plain, plain, odd))

    def forward(self, q: Tensor, *more: Tensor) -> Any:
        return [layer(q * i, *more) for i, layer in enumerate(self.layers, 1)]


ODD = slice(0, 5, 2), slice(1, 5, 2)
"""Heads 0, 2, 4 of five: 80 between tokens is no multiple of 32 between heads."""


def test_strides_that_no_copy_has_refuse_their_own_layer_only() -> None:
    odd = joint(*ODD, GIVES["transposed"])
    given = arguments(3)
    args = (*given[:5], given[-1])
    first, second, third = fusion.explain(Layers(odd), *args).sites
    assert [first.status, second.status, third.status] == ["fused", "fused", "refused"]
    (reason,) = third.reasons
    assert reason.code == "safety.output-strides"
    assert reason.need == "(80, 32, 1)"
    assert third.layer and third.layer.endswith("layers.2")
    eager, fused = Layers(odd), Layers(odd)
    expected, got = eager(*args), compiled(fused, args)
    assert [t.stride() for t in got] == [t.stride() for t in expected]
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))
    assert all(torch.equal(e, g) for e, g in zip(eager.buffers(), fused.buffers(), strict=True))


def test_such_strides_are_nobodys_business_inside_a_graph() -> None:
    fn = joint(*ODD, GIVES["computed with"])
    assert assert_like_eager(fn, lambda: arguments(3)).status == "fused"


@pytest.mark.parametrize(
    ("size", "stride", "got"),
    [
        ((2, 3, 4), (12, 4, 1), (12, 4, 1)),
        ((2, 3, 4), (1, 2, 6), (1, 2, 6)),
        ((2, 3, 4), (40, 8, 1), (40, 8, 1)),
        ((2, 3, 4), (4, 8, 1), (4, 8, 1)),
        ((2, 3, 4), (1, 5, 30), (1, 5, 30)),
        ((1, 3, 4), (7, 8, 1), (24, 8, 1)),  # one element: any stride will do
        ((2, 3, 4), (12, 4, 2), None),  # gaps between elements
        ((2, 3, 4), (0, 4, 1), None),  # rows in one place
        ((2, 3, 4), (11, 4, 1), None),  # rows that overlap
    ],
)  # fmt: skip
def test_restride(
    size: tuple[int, ...], stride: tuple[int, ...], got: tuple[int, ...] | None
) -> None:
    """Whatever the strides, the values are the same; without gaps only the order is kept."""
    old, value = torch.empty_strided(size, stride), torch.randn(size)

    def run(gaps: bool) -> Tensor:
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["val"] = value

        def call(target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
            node = graph.call_function(target, args, kwargs)
            real = torch.fx.node.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
            node.meta["val"] = target(*real[0], **real[1])
            return node

        graph.output(restride(x, old, call, gaps=gaps))
        graph.lint()
        out: Tensor = GraphModule(torch.nn.Module(), graph)(value)
        return out

    for gaps in (False, True):
        assert torch.equal(run(gaps), value)
    out = run(True)
    if got is not None:
        assert out.stride() == got
    else:
        assert out.stride() != stride
    assert run(False).numel() == run(False).untyped_storage().nbytes() // 4  # nothing is padded


def test_what_reaches_an_output() -> None:
    def fn(x: Tensor) -> Any:
        a, b = x.sin(), x.cos()
        return a.view(2, 2).t(), b * 2, b.clone(), b.split(2)[0].neg()

    graph = make_fx(fn, tracing_mode="fake")(torch.ones(4)).graph
    found = {n.name: reaches_output(n) for n in graph.nodes if n.op == "call_function"}
    assert found["sin"] and found["view"] and found["mul"]
    assert not found["cos"] and not found["split"]
