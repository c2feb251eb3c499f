"""Reading graphs element by element: every data movement, held against the values it moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from fusion.graph.constants import constant
from fusion.graph.elements import (
    Ref,
    Unreadable,
    along,
    arguments,
    collapse,
    depends,
    exact_cast,
    intersect,
    operand,
    partition,
    same_size,
    sample,
    shape_of,
    zero,
)
from fusion.graph.moves import is_move, step
from fusion.graph.reshaping import reshape_index
from fusion.graph.shapes import example, pinned
from fusion.match.trail import assemble, trails
from tests.match_graphs import Traced, trace


def everything(node: Node) -> Ref:
    """All elements of a node, one grid axis per dimension."""
    shape = shape_of(node)
    rank = len(shape)
    labels = tuple(np.arange(n) for n in shape)
    return Ref(node, tuple(along(labels[i], i, rank) for i in range(rank)), labels)


def pick(traced: Traced, ref: Ref) -> torch.Tensor:
    """The values of the referenced elements, over the grid of their labels."""
    value = traced.values[ref.node]
    if ref.part is not None:
        value = getattr(value, ref.part)
    grid = [len(x) for x in ref.labels]
    at = [torch.from_numpy(np.broadcast_to(i, grid).copy()) for i in ref.index]
    return value[tuple(at)]


def assert_followed(traced: Traced, node: Node, least: int = 1) -> list[Ref]:
    """Every sample, followed as far as it goes, has the value it had at ``node``."""
    start = everything(node)
    found = trails(start, set(), negate=False, exact=False)
    values = traced.values[node]
    covered = 0
    for trail in found:
        at = torch.meshgrid(*(torch.from_numpy(x.copy()) for x in trail.labels), indexing="ij")
        want = values[tuple(at)]
        assert torch.equal(pick(traced, trail.end.ref), want)
        covered += want.numel()
        assert len(trail.hops) > least
    assert covered == values.numel()
    return [t.end.ref for t in found]


X = torch.arange(4 * 6 * 8).reshape(4, 6, 8).float()
Y = -torch.arange(4 * 6 * 8).reshape(4, 6, 8).float() - 1

MOVES: dict[str, Callable[[Any, Any], Any]] = {
    "view": lambda x, y: x.view(2, 2, 48),
    "view to more": lambda x, y: x.view(4, 3, 2, 2, 2, 2),
    "view across": lambda x, y: x.view(8, 24),
    "view with ones": lambda x, y: x.view(4, 1, 6, 1, 8, 1),
    "reshape of a permuted value": lambda x, y: x.permute(2, 0, 1).reshape(16, 12),
    "flatten": lambda x, y: x.flatten(1),
    "unflatten": lambda x, y: x.unflatten(-1, (2, 4)),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "transpose": lambda x, y: x.transpose(-1, 0),
    "t": lambda x, y: x[0].t(),
    "unsqueeze": lambda x, y: x.unsqueeze(-2),
    "squeeze": lambda x, y: x[:, :1].squeeze(1),
    "squeeze all": lambda x, y: x[:1, :1].squeeze(),
    "squeeze some": lambda x, y: x[:1, :1].squeeze((0, 1)),
    "squeeze nothing": lambda x, y: x.squeeze(1),
    "expand": lambda x, y: x[:, :1].expand(3, 4, 6, 8),
    "repeat": lambda x, y: x.repeat(2, 1, 3),
    "repeat more dims": lambda x, y: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x, y: x.repeat_interleave(3, -1),
    "slice": lambda x, y: x[1:3, :, 2:-1],
    "strided slice": lambda x, y: x[:, ::2, 1::3],
    "narrow": lambda x, y: x.narrow(1, 2, 3),
    "select": lambda x, y: x[2, :, -1],
    "select of a negative index": lambda x, y: x.select(0, -2),
    "split": lambda x, y: x.split(3, -1)[2],
    "split with sizes": lambda x, y: x.split([1, 4, 3], -1)[1],
    "chunk": lambda x, y: x.chunk(3, 1)[1],
    "unbind": lambda x, y: x.unbind(1)[3],
    "flip": lambda x, y: x.flip((0, 2)),
    "roll": lambda x, y: x.roll((1, -3), (0, 2)),
    "index by a constant": lambda x, y: x[:, torch.arange(5, -1, -2)],
    "index_select": lambda x, y: x.index_select(2, torch.arange(8) // 3),
    "clone": lambda x, y: x.transpose(0, 1).contiguous(),
    "cat": lambda x, y: torch.cat((x, y, x), 1),
    "cat of slices": lambda x, y: torch.cat((x[..., 4:], y[..., :2], x[..., :1]), -1),
    "stack": lambda x, y: torch.stack((x, y), -1),
    "stack and flatten": lambda x, y: torch.stack((x, y), -1).flatten(-2),
    "cat of a reshape": lambda x, y: torch.cat((x.view(4, 48), y.view(4, 48)), 1).view(4, 12, 8),
    "written slice": lambda x, y: torch.slice_scatter(x, y[..., :3], -1, 2, 5),
    "written strided slice": lambda x, y: torch.slice_scatter(x, y[..., ::2], -1, 1, 8, 2),
    "written row": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2),
    "copied": lambda x, y: torch.ops.aten.copy(x, y[:1]),
    "written strided window": lambda x, y: torch.as_strided_scatter(
        x, y[:2, :3, 0], (2, 3), (48, 8), 11
    ),
    "strided": lambda x, y: x.as_strided((3, 5), (48, 2), 7),
    "complex and back": lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(4, 6, 4, 2))),
    "complex of two": lambda x, y: torch.view_as_real(torch.complex(x, y)),
    "cast that changes nothing": lambda x, y: x.transpose(0, 1).to(torch.float32, copy=True),
}


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "decomposed"])
@pytest.mark.parametrize("name", MOVES)
def test_every_movement_is_followed_to_its_source(name: str, plain: bool) -> None:
    traced = trace(lambda x, y: MOVES[name](x, y), X, Y, plain=plain)
    ends = assert_followed(traced, traced.result(), least=0)
    assert all(e.node.op == "placeholder" for e in ends)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chains_of_movements(data: st.DataObject) -> None:
    """Random chains of shape-keeping moves, followed in one go."""
    steps = data.draw(st.lists(st.sampled_from(sorted(CHAIN)), min_size=1, max_size=5))

    def fn(x: Any, y: Any) -> Any:
        for name in steps:
            x = CHAIN[name](x, y)
        return x.clone()

    traced = trace(fn, X, Y, plain=True)
    ends = assert_followed(traced, traced.result())
    assert all(e.node.op == "placeholder" for e in ends)


CHAIN: dict[str, Callable[[Any, Any], Any]] = {
    "turn": lambda x, y: x.permute(2, 0, 1).reshape(4, 6, 8),
    "roll": lambda x, y: x.roll(3, 1),
    "swap halves": lambda x, y: torch.cat((x[..., 4:], x[..., :4]), -1),
    "interleave": lambda x, y: torch.stack((x[..., :4], y[..., 4:]), -1).flatten(-2),
    "view": lambda x, y: x.reshape(8, 3, 8).reshape(4, 6, 8),
    "flip": lambda x, y: x.flip(0),
    "scatter": lambda x, y: torch.slice_scatter(x, y[:, 1:4], 1, 2, 5),
    "rows": lambda x, y: torch.cat((y[:1], x[1:]), 0),
}


def test_what_computes_is_no_movement() -> None:
    traced = trace(
        lambda x, y: (x + y, x.cumsum(0), torch.sort(x)[0], x[y.long()[0, 0]]), X, Y.abs() * 0
    )
    for which in range(4):
        node = traced.result(which)
        assert step(everything(node)) is None
        assert not is_move(node)


def test_operands_undo_broadcasting() -> None:
    traced = trace(lambda x, y: x[:, :1] * y[0, :, 0][:, None] + x[0, 0], X, Y)
    node = traced.result()
    ref = everything(node)
    left, right = (operand(ref, n) for n in node.all_input_nodes)
    assert torch.equal(pick(traced, left) + pick(traced, right), traced.values[node])


def test_labels_survive_a_split() -> None:
    traced = trace(lambda x, y: torch.cat((x, y), -1), X, Y)
    parts = step(everything(traced.result()))
    assert parts is not None
    assert [list(p.labels[-1]) for p in parts] == [list(range(8)), list(range(8, 16))]
    joined = assemble([(p.labels, p.index) for p in parts], everything(traced.result()).labels)
    assert joined is not None
    assert list(joined[-1].reshape(-1)) == [*range(8), *range(8)]
    assert assemble([(parts[0].labels, parts[0].index)], everything(traced.result()).labels) is None
    assert intersect(parts[0].labels, parts[1].labels) is None


def test_partition_of_a_key_that_depends_on_two_axes() -> None:
    labels = (np.arange(3), np.arange(4))
    key = (labels[0][:, None] + labels[1][None]) % 2
    boxes = partition(labels, key)
    seen = np.full((3, 4), -1)
    for box, value in boxes:
        seen[np.ix_(*box)] = value
    assert (seen == key).all()


def test_samples() -> None:
    assert list(sample(5)) == [0, 1, 2, 3, 4]
    big = sample(1_000_000)
    assert {0, 1, 999_999} <= set(big.tolist())
    assert len(big) < 9


def test_collapse_and_depends() -> None:
    array = np.broadcast_to(np.arange(4)[:, None], (4, 5)).copy()
    assert collapse(array).shape == (4, 1)
    assert depends(collapse(array)) == {0}
    assert depends(zero(3)) == frozenset()


def test_exact_casts() -> None:
    assert exact_cast(torch.bfloat16, torch.float32)
    assert exact_cast(torch.float16, torch.float64)
    assert not exact_cast(torch.float32, torch.bfloat16)
    assert not exact_cast(torch.bfloat16, torch.float16)
    assert not exact_cast(torch.float8_e4m3fn, torch.float32)


def test_arguments_by_name_or_position() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(torch.ops.aten.slice.Tensor, (x, -1, 2), {"end": 5})
    two = graph.call_function(torch.ops.aten.slice.Tensor, (x,), {"dim": -1, "start": 2, "end": 5})
    assert arguments(one) == arguments(two)
    assert arguments(one)["step"] == 1


def test_constants() -> None:
    traced = trace(
        lambda x: x[..., (torch.arange(8) * 3) % 8].sum() + x[..., x[0, 0].long() * 0].sum(), X
    )
    indices = [n.args[1][-1] for n in traced.graph.nodes if n.target is torch.ops.aten.index.Tensor]
    assert [None if (c := constant(n)) is None else list(c) for n in indices] == [
        [0, 3, 6, 1, 4, 7, 2, 5],
        None,
    ]


def symbolic() -> tuple[Any, Any]:
    """Two symbols with the same example value."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)
    from torch._dynamo.source import ConstantSource

    def make(name: str) -> Any:
        source = ConstantSource(name)
        symbol = env.create_symbol(4, source)
        return env.create_symintnode(symbol, hint=4, source=source)

    return make("a"), make("b")


def test_symbolic_sizes_with_one_example_value_stay_apart() -> None:
    a, b = symbolic()
    guards = len(a.node.shape_env.guards)
    assert same_size(a, a)
    assert same_size(a * b, b * a)
    assert not same_size(a, b)
    assert not same_size(a, 4)
    index = (along(np.arange(4), 0, 2), along(np.arange(4), 1, 2))
    kept = reshape_index(index, (a, 4), (a, 4), 2)
    assert all(x is y for x, y in zip(kept, index, strict=True))
    flat = reshape_index(index, (a, b), (a * b,), 2)
    assert depends(flat[0]) == {0, 1}
    assert len(a.node.shape_env.guards) == guards


def test_unknown_sizes_are_unreadable() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    with pytest.raises(Unreadable):
        shape_of(node)
    node.meta["val"] = torch.empty(0, 3)
    with pytest.raises(Unreadable, match="empty"):
        shape_of(node)


def test_cost_does_not_grow_with_tokens() -> None:
    """A million tokens are followed as fast as a hundred (on fake tensors)."""
    from tests.rope_spellings import with_rotate_half

    times = []
    for tokens in (100, 1_000_000):
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        from fusion.match.facts import Rope
        from fusion.match.rope import read_rope
        from tests.match_graphs import view_of

        with FakeTensorMode():
            args = (
                torch.empty(tokens, 8, 64),
                torch.empty(tokens, 1, 32),
                torch.empty(tokens, 1, 32),
            )
        graph = make_fx(torch.func.functionalize(lambda *a: with_rotate_half(*a)))(*args).graph
        (out,) = next(n for n in graph.nodes if n.op == "output").args
        view = view_of(out, "thd")
        assert isinstance(read_rope(view), Rope)
        spent = []
        for _ in range(5):
            started = time.process_time()
            read_rope(view)
            spent.append(time.process_time() - started)
        times.append(min(spent))
    assert times[1] < 3 * times[0] + 0.005
    assert times[1] < 0.05


def test_a_size_that_guards_leave_one_value() -> None:
    """``pinned`` knows what a guard fixed, and nothing more; it asks without guarding."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(8, ConstantSource("s"), DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=8)
    half = (size + 1) // 2
    assert (pinned(4), pinned(size), pinned(size // 3)) == (4, None, None)
    assert not env.guards
    assert bool(half == 4)  # as a broadcast would
    guards = len(env.guards)
    assert (pinned(half), pinned(size)) == (4, None)
    assert pinned(half * 2) is None or pinned(half * 2) == 8
    assert len(env.guards) == guards
    assert pinned(env.create_unbacked_symint()) is None


def test_example_sizes_are_read_in_one_way() -> None:
    """A backed symbol has its example, an unbacked one none; the gate reads the same."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from fusion.kernel import TensorSpec

    env = ShapeEnv()
    symbol = env.create_symbol(6, ConstantSource("n"), DimDynamic.DYNAMIC)
    size, unknown = env.create_symintnode(symbol, hint=6), env.create_unbacked_symint()
    assert [example(s) for s in (3, size, size * 2, unknown, None)] == [3, 6, 12, None, None]
    with torch._subclasses.FakeTensorMode(shape_env=env):
        made = torch.empty_strided((size, 2, 3), (6, 3, 1))
    assert TensorSpec.of(made).hints == (6, 2, 3)
    assert TensorSpec.of(made).shape == (None, 2, 3)
    assert not env.guards
