"""Long chains, and chains that use each value twice: reading them costs as much as they are long.

A value used twice at each of forty steps is reached on 2**40 ways. Whoever follows the ways and not
the nodes never ends, and a compilation that never ends is fatal. Where the time is up, the pass
fails inside (``internal.error``), which no case expects.
"""

from __future__ import annotations

import contextlib
import math
import operator
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion.graph.constants import constant
from fusion.graph.structure import structure
from fusion.layout import KVCacheLayout
from tests.prologue_block import Block, Inputs, run, variant

STEPS = 40
Chain = Callable[[Tensor], Tensor]


class TimeIsUp(Exception):
    """The chain was followed along its ways."""


@contextlib.contextmanager
def seconds(limit: float) -> Iterator[None]:
    """Raise in the code under test after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit, 1.0)  # again: a pass swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def halves_of_twice(t: Tensor) -> Tensor:
    for _ in range(STEPS):
        t = (t + t) * 0.5 if t.is_floating_point() else (t + t) // 2
    return t


def chosen(t: Tensor) -> Tensor:
    for _ in range(STEPS):
        t = torch.where(t == t, t, t)
    return t


def scaled(t: Tensor) -> Tensor:
    for _ in range(4 * STEPS):
        t = t * 1.01
    return t


def cut_and_joined(t: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    for _ in range(STEPS):
        t = torch.cat([t[..., :half], t[..., half:]], -1)
    return t


def turned(t: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    for _ in range(STEPS):
        t = t * 0.5 + torch.cat([-t[..., half:], t[..., :half]], -1) * 0.5
    return t


def paired(t: Tensor) -> Tensor:
    for _ in range(STEPS):
        left, right = t.unflatten(-1, (-1, 2)).unbind(-1)
        t = torch.stack([left, right], -1).flatten(-2)
    return t


INTEGER: list[Chain] = [halves_of_twice, chosen]
FLOAT: list[Chain] = [*INTEGER, scaled, cut_and_joined, turned, paired]


class Changed(Block):
    """A block of which one input goes through a chain first."""

    field = ""
    chain: Chain = staticmethod(scaled)

    def __call__(self, x: Inputs) -> tuple[Tensor, ...]:
        return super().__call__(replace(x, **{self.field: self.chain(getattr(x, self.field))}))


def status(block: Block) -> str:
    """What became of the site, within the time; whatever it was, the numbers are eager's."""
    with seconds(60.0):
        outcome = run(block)
    outcome.assert_equal()
    assert not {"internal.error"} & {reason.code for reason in outcome.site.reasons}
    assert outcome.report.to_text()
    return outcome.site.status


def changed(field: str, chain: Chain, **fields: object) -> Block:
    kind = type("Changed", (Changed,), {"field": field, "chain": staticmethod(chain)})
    return kind(**fields)


@pytest.mark.parametrize("chain", INTEGER)
@pytest.mark.parametrize("write", ["op", "slots", "index_copy", "block_offset", "scatter"])
def test_slots(write: str, chain: Chain) -> None:
    layout = KVCacheLayout.PACKED if write == "op" else KVCacheLayout.NHD
    assert status(changed("slots", chain, write=write, layout=layout)) == "fused"


@pytest.mark.parametrize("chain", INTEGER)
def test_positions(chain: Chain) -> None:
    assert status(changed("positions", chain)) == "fused"


@pytest.mark.parametrize("chain", FLOAT)
@pytest.mark.parametrize("stage", ["split", "norm", "rope"])
def test_between_the_steps_of_a_prologue(stage: str, chain: Chain) -> None:
    def hook(name: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (chain(q), chain(k)) if name == stage else (q, k)

    only_moves = chain in (cut_and_joined, paired)
    found = status(variant(hook=hook))
    if stage == "rope":
        assert found == ("fused" if only_moves else "missed")
    else:
        assert found in (("fused", "partial") if only_moves else ("fused",))


@pytest.mark.parametrize("chain", FLOAT)
@pytest.mark.parametrize("field", ["cos_sin", "q_weight"])
def test_operands(field: str, chain: Chain) -> None:
    assert status(changed(field, chain)) in ("fused", "partial")


def test_a_constant_is_computed_node_by_node() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.arange.default, (4,))
    node.meta["val"] = torch.arange(4)
    for _ in range(50):
        node = graph.call_function(torch.ops.aten.bitwise_or.Tensor, (node, node))
        node.meta["val"] = torch.arange(4)
    with seconds(20.0):
        value = constant(node)
    assert value is not None
    assert value.tolist() == [0, 1, 2, 3]
    outer = graph.placeholder("x")
    outer.meta["val"] = torch.arange(4)
    mixed = graph.call_function(torch.ops.aten.bitwise_or.Tensor, (node, outer))
    mixed.meta["val"] = torch.arange(4)
    assert constant(mixed) is None


def test_equal_chains_have_one_structure_and_others_another() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def chain(start: torch.fx.Node, last: int, steps: int = 2000) -> torch.fx.Node:
        node = start
        for _ in range(steps):
            node = graph.call_function(torch.ops.aten.add.Tensor, (node, node))
        return graph.call_function(torch.ops.aten.add.Tensor, (node, last))

    with seconds(20.0):
        same = {structure(chain(x, 1)), structure(chain(x, 1))}
        others = [structure(chain(*a)) for a in ((y, 1), (x, 2), (x, 1, 1999))]
    assert len(same) == 1
    assert len({*same, *others}) == 4
    assert structure(3) != structure(3.0)
    assert structure(None) == structure(None)
    assert structure([x, (x, 1)]) == structure([x, (x, 1)]) != structure([x, (y, 1)])
    powers = [graph.call_function(f, (x, 2)) for f in (math.pow, operator.pow)]
    assert structure(powers[0]) != structure(powers[1])
    empty = [graph.call_function(torch.ops.aten.empty.memory_format, ([2],)) for _ in range(2)]
    assert structure(empty[0]) != structure(empty[1])
    empty[0].meta["val"] = torch.zeros(2, dtype=torch.int64)
    assert constant(empty[0]) is None
    random = [graph.call_function(torch.ops.aten.rand.default, ([2],)) for _ in range(2)]
    assert structure(random[0]) != structure(random[1])
