"""Operators of other libraries: read through a registered decomposition, refused by name else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusion.graph import foreign
from fusion.match.facts import Miss, RMSNorm, Rope
from fusion.match.foreign import register_op
from fusion.match.norm import read_norm
from fusion.match.rope import find_query_ropes, read_rope
from tests.match_graphs import Traced, compiled, trace

T, HQ, HK, D = 7, 8, 4, 32
EPS = 1e-6
bf16 = torch.bfloat16


def plain_norm(x: Any, weight: Any, eps: float) -> Any:
    n = x.float()
    return (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def plain_rope(q: Any, k: Any, cache: Any, positions: Any) -> tuple[Any, Any]:
    c, s = cache[positions].unsqueeze(1).chunk(2, -1)

    def turn(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    return turn(q), turn(k)


@torch.library.custom_op("match_test::norm", mutates_args=())
def norm_op(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return plain_norm(x, weight, eps)


@torch.library.custom_op("match_test::rope", mutates_args=())
def rope_op(
    q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_rope(q, k, cache, positions)


@torch.library.custom_op("match_test::rope_in_place", mutates_args=("q", "k"))
def rope_in_place_op(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor
) -> None:
    new = plain_rope(q, k, cache, positions)
    q.copy_(new[0])
    k.copy_(new[1])


norm_op.register_fake(lambda x, weight, eps: torch.empty_like(x))
rope_op.register_fake(lambda q, k, cache, positions: (torch.empty_like(q), torch.empty_like(k)))
OPS = torch.ops.match_test


@pytest.fixture
def registered() -> Iterator[None]:
    register_op(OPS.norm, plain_norm)
    register_op(OPS.rope.default, plain_rope)
    register_op(
        OPS.rope_in_place, lambda positions, q, k, cache: plain_rope(q, k, cache, positions)
    )
    yield
    for packet in (OPS.norm, OPS.rope, OPS.rope_in_place):
        foreign._REGISTRY.pop(packet.default)


def block(norm: Any, rope: Any) -> Any:
    def fn(qkv: Any, wq: Any, wk: Any, cache: Any, positions: Any) -> Any:
        q, k, _ = qkv.view(T, HQ + 2 * HK, D).split([HQ, HK, HK], 1)
        q, k = norm(q, wq, EPS), norm(k, wk, EPS)
        return rope(q, k, cache, positions)

    return fn


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    qkv, cache = torch.randn(T, (HQ + 2 * HK) * D), torch.randn(20, D)
    return (qkv.to(bf16), torch.randn(D).to(bf16), torch.randn(D).to(bf16), cache.to(bf16),
            torch.randint(0, 20, (T,)))  # fmt: skip


def chains(traced: Traced) -> list[tuple[Rope, RMSNorm]]:
    k = read_rope(traced.view("thd", 1))
    assert isinstance(k, Rope), k
    (q,) = find_query_ropes(traced.graph, k)
    assert isinstance(q, Rope), q
    found = []
    for rope, heads in ((q, HQ), (k, HK)):
        norm = read_norm(rope.x)
        assert isinstance(norm, RMSNorm), norm
        assert rope.out.heads == norm.x.heads == heads
        found.append((rope, norm))
    return found


@pytest.mark.parametrize(("norm_is_op", "rope_is_op"), itertools.product((False, True), repeat=2))
def test_four_combinations(registered: None, norm_is_op: bool, rope_is_op: bool) -> None:
    norm, rope = OPS.norm if norm_is_op else plain_norm, OPS.rope if rope_is_op else plain_rope
    traced = trace(block(norm, rope), *inputs())
    for which, (turned, normed) in enumerate(chains(traced)):
        assert turned.out.node is traced.result(which)
        assert turned.cos.positions is not None
        assert (turned.cos.node.name, turned.cos.positions.name) == ("arg3_1", "arg4_1")
        assert (turned.cos.columns, turned.sin.columns) == ((0, 16), (16, 32))
        assert normed.weight is not None
        assert normed.weight.name == f"arg{1 + which}_1"
        assert (normed.cast, normed.eps) == ("early", EPS)
        graph = set(traced.graph.nodes)
        assert turned.nodes <= graph
        assert normed.nodes <= graph
        assert any("match_test" in str(n.target) for n in turned.nodes) == rope_is_op
        assert any("match_test" in str(n.target) for n in normed.nodes) == norm_is_op


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views of qkv"])
def test_an_op_that_rotates_in_place(registered: None, version: int, views: bool) -> None:
    """vLLM's rotary op writes q and k; AOTAutograd wraps it (both versions of the wrapper)."""
    from torch._inductor import config

    def rope(q: Any, k: Any, cache: Any, positions: Any) -> Any:
        OPS.rope_in_place(positions, q, k, cache)
        return q * 1, k * 1

    def fn(qkv: Any, wq: Any, wk: Any, cache: Any, positions: Any) -> Any:
        if not views:
            return block(plain_norm, rope)(qkv, wq, wk, cache, positions)
        q, k, _ = (qkv * 2).split([HQ * D, HK * D, HK * D], 1)
        q, k = q.view(T, HQ, D), k.view(T, HK, D)
        OPS.rope_in_place(positions, q, k, cache)
        return q + 0, k + 0

    with config.patch(enable_auto_functionalized_v2=version == 2):
        traced = compiled(fn, *inputs())
    assert traced.named("auto_functionalized")
    k = read_rope(_before_noop(traced, 1))
    if views and version == 2:
        # The op works on the packed tensor: no node of the graph holds the key alone.
        assert isinstance(k, Miss)
        assert k.reason.code == "match.token-order", k.reason
        return
    assert isinstance(k, Rope), k
    assert k.out.heads == HK
    assert any("auto_functionalized" in str(n.target) for n in k.nodes)
    assert k.cos.positions is not None
    if not views:
        assert isinstance(read_norm(k.x), RMSNorm)


def _before_noop(traced: Traced, which: int) -> Any:
    """The result, or what it is a no-op of."""
    from tests.match_graphs import view_of

    node = traced.result(which)
    if "mul" in str(node.target) or "add" in str(node.target):
        node = node.all_input_nodes[0]
    return view_of(node, "thd")


def test_an_unregistered_rope_is_refused_by_name() -> None:
    traced = trace(block(plain_norm, OPS.rope), *inputs())
    fact = read_rope(traced.view("thd", 1))
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.opaque-op"
    assert fact.reason.have == "match_test.rope.default"


def test_an_unregistered_norm_is_refused_by_name() -> None:
    traced = trace(block(OPS.norm, plain_rope), *inputs())
    k = read_rope(traced.view("thd", 1))
    assert isinstance(k, Rope)
    fact = read_norm(k.x)
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.opaque-op"
    assert fact.reason.have == "match_test.norm.default"


def test_an_unregistered_op_inside_the_rotation() -> None:
    def rope(q: Any, k: Any, cache: Any, positions: Any) -> Any:
        c, s = cache[positions].unsqueeze(1).chunk(2, -1)

        def turn(x: Any) -> Any:
            turned = OPS.norm(x, cache[0], EPS)
            a, b = x.chunk(2, -1)
            u, v = turned.chunk(2, -1)
            return torch.cat((a * c - v * s, b * c + u * s), -1)

        return turn(q), turn(k)

    traced = trace(block(plain_norm, rope), *inputs())
    fact = read_rope(traced.view("thd", 1))
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.opaque-op"


def test_an_opaque_projection_is_no_norm() -> None:
    """A quantised GEMM by a custom op: there is no norm, and nothing is opaque about that."""

    @torch.library.custom_op("match_test::gemm", mutates_args=())
    def gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    gemm.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))

    def fn(x: Any, weight: Any, cache: Any, positions: Any) -> Any:
        y = torch.ops.match_test.gemm(x, weight).view(T, HK, D)
        return plain_rope(y, y, cache, positions)[1]

    traced = trace(fn, torch.randn(T, 48), torch.randn(48, HK * D), torch.randn(20, D),
                   torch.randint(0, 20, (T,)))  # fmt: skip
    k = read_rope(traced.view("thd"))
    assert isinstance(k, Rope)
    fact = read_norm(k.x)
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.no-norm"


def test_a_decomposition_that_fails_leaves_the_op_opaque(registered: None) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("not today")

    register_op(OPS.rope, broken)
    traced = trace(block(plain_norm, OPS.rope), *inputs())
    fact = read_rope(traced.view("thd", 1))
    assert isinstance(fact, Miss)


def test_a_wrong_decomposition_is_read_as_it_stands(registered: None) -> None:
    """Registered with the other direction: refused for its sign, not waved through by name."""

    def flipped(q: Any, k: Any, cache: Any, positions: Any) -> Any:
        c, s = cache[positions].unsqueeze(1).chunk(2, -1)

        def turn(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            return torch.cat((a * c + b * s, b * c - a * s), -1)

        return turn(q), turn(k)

    register_op(OPS.rope, flipped)
    traced = trace(block(plain_norm, OPS.rope), *inputs())
    fact = read_rope(traced.view("thd", 1))
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.rope-sign"


def test_the_graph_is_not_touched(registered: None) -> None:
    traced = trace(block(OPS.norm, OPS.rope), *inputs())
    before, metas = str(traced.graph), [set(n.meta) for n in traced.graph.nodes]
    chains(traced)
    assert str(traced.graph) == before
    assert [set(n.meta) for n in traced.graph.nodes] == metas


def test_a_triton_kernel_in_the_middle_is_named() -> None:
    """A user-defined Triton kernel is a higher-order operator: opaque."""
    import operator

    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    from tests.match_graphs import view_of

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        triton_kernel_wrapper_functional, (), {"kernel_idx": 0, "kwargs": {"x": x}}
    )
    y = graph.call_function(operator.getitem, (call, "x"))
    for node in (x, y):
        node.meta["val"] = torch.empty(T, HK, D)
    call.meta["val"] = {"x": y.meta["val"]}
    graph.output(y)
    fact = read_rope(view_of(y, "thd"))
    assert isinstance(fact, Miss)
    assert fact.reason.code == "match.opaque-op"
    assert fact.reason.node == call.name
