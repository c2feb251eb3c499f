"""Movements at the edge: followed where the place is fixed, otherwise refused (never guessed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph.constants import constant
from fusion.graph.elements import Unreadable
from fusion.graph.moves import is_move, step
from tests.match_graphs import Traced, trace
from tests.test_elements import X, Y, assert_followed, everything

aten = torch.ops.aten


def by_hand(target: Any, *args: Any, **kwargs: Any) -> Traced:
    """A graph of one call whose tensor arguments are its inputs (ops that tracing rewrites)."""
    graph = Graph()
    values: dict[Node, Any] = {}

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(values)}")
            node.meta["val"] = values[node] = value
            return node
        return value

    nodes = [put(a) for a in args]
    call = graph.call_function(target, tuple(nodes), kwargs)
    call.meta["val"] = values[call] = target(*args, **kwargs)
    graph.output(call)
    return Traced(graph, values)


COMPLEX = torch.complex(X, Y)

PLAIN: dict[str, Callable[[], Traced]] = {
    "narrow": lambda: by_hand(aten.narrow.default, X, 1, 2, 3),
    "narrow from the end": lambda: by_hand(aten.narrow.default, X, -1, -3, 2),
    "real part": lambda: by_hand(aten.real.default, COMPLEX),
    "imaginary part": lambda: by_hand(aten.imag.default, COMPLEX),
    "real part of a real value": lambda: by_hand(aten.real.default, X),
    "window with dimensions of one element": lambda: by_hand(
        aten.as_strided_scatter.default, X, Y[:1, :3, :1], [1, 3, 1], [48, 8, 0], 11
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_followed_to_the_element(name: str) -> None:
    traced = PLAIN[name]()
    ends = assert_followed(traced, traced.result(), least=0)
    assert all(e.node.op == "placeholder" for e in ends)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "cast to another dtype": lambda x, y: x.to(torch.float64),
    "roll of the flattened tensor": lambda x, y: x.roll(3),
    "gather by a constant of two dimensions": lambda x, y: x[:, torch.arange(4).view(2, 2)],
    "window on a value that is not dense": lambda x, y: x.transpose(0, 2).as_strided(
        (2, 3), (1, 2)
    ),
    "window beyond the value's own elements": lambda x, y: x[:2].as_strided((3, 4), (48, 8), 40),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    node = trace(REFUSED[name], X, Y, plain=True).result()
    assert step(everything(node)) is None


def test_a_copy_across_dtypes_is_named() -> None:
    node = by_hand(aten.copy.default, X, Y.double()).result()
    with pytest.raises(Unreadable, match="copies across dtypes") as error:
        step(everything(node))
    assert error.value.node is node


SYMBOLIC: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda x, y: x[y.shape[0] :],
    "select": lambda x, y: x.select(0, y.shape[0]),
    "split": lambda x, y: x.split([y.shape[0], x.shape[0] - y.shape[0]])[1],
    "written slice": lambda x, y: torch.slice_scatter(x, y, 0, y.shape[0], 2 * y.shape[0]),
    "written row": lambda x, y: torch.select_scatter(x, y[0], 0, y.shape[0]),
    "cat behind": lambda x, y: torch.cat((y, x)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_place_that_moves_with_a_size_is_no_fixed_place(name: str) -> None:
    """With other sizes the same graph reads other elements: the example does not decide."""
    gm = make_fx(SYMBOLIC[name], tracing_mode="symbolic")(X, Y[:2])
    (result,) = next(n for n in gm.graph.nodes if n.op == "output").args
    assert isinstance(result, Node)
    assert step(everything(result)) is None


def gathered(fn: Callable[[Any], Any]) -> list[list[int] | None]:
    """What is read of the index of every gather of a function's graph."""
    gm = make_fx(fn)(X)
    made = [n.args[1][-1] for n in gm.graph.nodes if n.target is aten.index.Tensor]
    assert made
    return [None if (c := constant(n)) is None else c.tolist() for n in made]


def test_a_table_of_the_module_is_a_constant() -> None:
    order = torch.tensor([3, 1, 2, 0])
    gm = make_fx(lambda x: x[order])(X)
    index = next(n for n in gm.graph.nodes if n.target is aten.index.Tensor)
    held = next(n for n in gm.graph.nodes if n.op == "get_attr")
    assert constant(held).tolist() == order.tolist()  # type: ignore[union-attr]
    assert is_move(index)
    (end,) = step(everything(index)) or []
    assert torch.equal(X[torch.from_numpy(end.index[0].reshape(-1))], gm(X))


BIG = torch.arange(1 << 17) % 8


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[..., torch.randperm(8)],
        lambda x: x[..., torch.arange(1 << 17) % 8],
        lambda x: x[..., BIG],
        lambda x: x[..., torch.arange(0)],
        lambda x: x[..., (x[0, 0] * 0).long()],
    ],
    ids=["random", "large", "large table", "empty", "computed from an input"],
)
def test_no_constant(fn: Callable[[Any], Any]) -> None:
    assert gathered(fn) == [None]


def test_a_table_that_is_no_plain_tensor_of_the_host_is_no_constant() -> None:
    """A parameter may be trained, and a tensor of another device is not read."""
    root = torch.nn.Module()
    root.table = torch.nn.Parameter(torch.arange(4.0))
    root.elsewhere = torch.empty(4, dtype=torch.int64, device="meta")
    graph = Graph()
    nodes = [graph.get_attr(n) for n in ("table", "elsewhere", "nothing")]
    graph.output(tuple(nodes))
    graph.owning_module = root  # type: ignore[assignment]
    assert [constant(n) for n in nodes] == [None, None, None]


def test_what_a_foreign_operator_returns_is_no_constant() -> None:
    """Its result may depend on anything."""
    with torch.library._scoped_library("test_movements", "FRAGMENT") as library:
        library.define("order(int n) -> Tensor")
        library.impl("order", lambda n: torch.arange(n), "CompositeExplicitAutograd")
        op = torch.ops.test_movements.order.default
        traced = by_hand(op, 8)
        assert Interpreter(GraphModule({}, traced.graph)).run().tolist() == list(range(8))
        assert constant(traced.result()) is None
