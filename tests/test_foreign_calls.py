"""Calls of other libraries' operators, entered: the inner graph gives what the call gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph import compat, foreign
from fusion.graph.functional import arg_views
from fusion.graph.storage import root_of
from tests.match_graphs import Traced, compiled

_library = torch.library.Library("test_foreign_calls", "DEF")  # type: ignore[no-untyped-call]
_library.define("bump(Tensor(a!) x, Tensor(b!)? y, Tensor by, Tensor again, int times) -> ()")
_library.define("bumps(Tensor(a!) x, Tensor by, float scale) -> Tensor")
OPS = torch.ops.test_foreign_calls


def bump(x: Tensor, y: Tensor | None, by: Tensor, again: Tensor, times: int) -> None:
    x.add_(by * times + again)
    if y is not None:
        y.mul_(3)


def bumps(x: Tensor, by: Tensor, scale: float) -> Tensor:
    x.add_(by * scale)
    return by - 1


_library.impl("bump", bump, "CompositeExplicitAutograd")
_library.impl("bumps", bumps, "CompositeExplicitAutograd")
torch.library.register_fake("test_foreign_calls::bump", lambda *a: None, lib=_library)
torch.library.register_fake(
    "test_foreign_calls::bumps", lambda x, by, scale: torch.empty_like(by), lib=_library
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    def plain_bump(x: Any, y: Any, by: Any, again: Any, times: Any) -> tuple[Any, ...]:
        return x + (by * times + again), None if y is None else y * 3

    foreign.register_op(OPS.bump, plain_bump)
    foreign.register_op(OPS.bumps, lambda x, by, scale: (by - 1, x + by * scale))
    yield
    for packet in (OPS.bump, OPS.bumps):
        foreign._REGISTRY.pop(packet.default)


def wrapper(traced: Traced) -> Node:
    (node,) = traced.named("auto_functionalized")
    return node


def entered(traced: Traced) -> None:
    """The inner graph, run on the call's own arguments, gives the call's results, to the bit."""
    node = wrapper(traced)
    results = foreign.expansion(node)
    assert results is not None
    module = next(r for r in results if r is not None).graph.owning_module
    assert module is not None
    interpreter = Interpreter(module, garbage_collect_values=False)
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    interpreter.run(*(traced.values[foreign.outer(n)] for n in given))
    want = traced.values[node]
    assert len(results) == len(want)
    compared = 0
    for have, value in zip(results, want, strict=True):
        if have is not None:
            assert torch.equal(interpreter.env[have], value)
            compared += 1
            assert foreign.owner(have) is node
    assert compared


X, BY = torch.arange(24.0).view(4, 6), torch.full((4, 2), 0.5)

VIEWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "the tensor itself": ("base", lambda x: x[:, :2].clone()),
    "another view of all of it": ("alias", lambda x: (x[:, :2] + 1).view(2, 4).view(4, 2)),
    "columns of it": ("slice", lambda x: (x + 1)[:, 2:4]),
    "a strided window": ("strided", lambda x: (x + 1)[:, ::3]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_written_view_is_put_back_where_it_lies(name: str) -> None:
    kind, view = VIEWS[name]

    def fn(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        part = view(x)
        result = OPS.bumps(part, by, 4.0)
        return part * 2, result

    traced = compiled(fn, X.clone(), BY)
    found = arg_views(wrapper(traced))["x"]
    assert found is not None
    assert found.kind == kind
    entered(traced)


def test_an_optional_argument_that_is_written_and_one_that_is_read_twice() -> None:
    def both(x: Tensor, y: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x * 1, y * 1
        OPS.bump(x, y, by, by, 2)
        return x + 1, y + 1

    def one(x: Tensor, by: Tensor) -> Tensor:
        x = x * 1
        OPS.bump(x, None, by, by, 2)
        return x + 1

    traced = compiled(both, BY + 1, BY + 2, BY)
    entered(traced)
    traced = compiled(one, BY + 1, BY)
    assert arg_views(wrapper(traced))["y"] is None
    entered(traced)


def test_sizes_are_entered_by_their_example_values() -> None:
    def fn(x: Tensor, by: Tensor) -> Tensor:
        x = x * 1
        OPS.bump(x, None, by, by, x.shape[0])
        return x + 1

    entered(compiled(fn, BY + 1, BY, dynamic=True))


def test_a_view_that_begins_at_a_symbol_stays_opaque() -> None:
    """Where it lies differs from call to call: no fixed element of the base is written."""

    def fn(x: Tensor, by: Tensor) -> Tensor:
        part = (x + 1)[by.shape[0] :]
        OPS.bumps(part, by, 4.0)
        return part * 2

    x, by = torch.arange(16.0).view(8, 2), torch.ones(4, 2)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(by, 0)
    traced = compiled(fn, x, by)
    assert foreign.is_registered(wrapper(traced))
    assert foreign.expansion(wrapper(traced)) is None


# --- metadata ----------------------------------------------------------------------------------


def test_a_reshape_of_something_unknown_owns_its_storage() -> None:
    """Where metadata is missing nothing is taken for a view."""
    graph = Graph()
    held = graph.get_attr("table")
    flat = graph.call_function(torch.ops.aten.reshape.default, (held, [-1]))
    flat.meta["val"] = torch.ones(6)
    assert root_of(flat).node is flat
    held.meta["val"] = torch.ones(2, 3)
    assert root_of(flat).node is held
    held.meta["val"] = torch.ones(3, 2).t()  # its reshape copies
    assert root_of(flat).node is flat


def test_the_environment_of_symbols_is_found_where_it_is() -> None:
    plain = make_fx(lambda x: x + 1)(torch.ones(3))
    for node in plain.graph.nodes:
        node.meta["val"] = torch.ones(3)
    assert compat.fake_mode_of(plain.graph) is None
    assert compat.shape_env_of(plain.graph) is None
    symbolic = make_fx(lambda n: n * 2, tracing_mode="symbolic")(5)
    size = next(iter(symbolic.graph.nodes)).meta["val"]
    assert compat.fake_mode_of(symbolic.graph) is None
    assert compat.shape_env_of(symbolic.graph) is size.node.shape_env
    fake = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3, 4))
    mode = compat.fake_mode_of(fake.graph)
    assert mode is not None
    assert compat.shape_env_of(fake.graph) is mode.shape_env
