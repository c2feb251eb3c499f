"""What the tests of the command line name as SOURCE."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tests.mutations import Inputs, Layer, inputs, mutated


class Layers(nn.Module):
    """Prologues in a row, one for each mutation (none for an empty name)."""

    def __init__(self, *mutations: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(m) for m in mutations)

    def forward(self, xs: list[Inputs]) -> list[Any]:
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


def _call(*mutations: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Layers(*mutations), ([inputs() for _ in mutations],), {}


def good() -> Any:
    """Two layers that fuse."""
    return _call("", "")


def one() -> Any:
    """One layer that fuses."""
    return _call("")


def mixed() -> Any:
    """A layer that fuses, one that is missed, one that is fused in part."""
    return _call("", "second sign", "mean over heads")


def noisy() -> Any:
    """A layer that fuses, its output with noise on it."""

    class Net(Layers):
        def forward(self, xs: list[Inputs]) -> list[Any]:
            q, *rest = super().forward(xs)[0]
            return [q + torch.rand_like(q), *rest]

    return Net(""), ([inputs()],), {}


def counting() -> Any:
    """A model that gives another value each time, whatever the random numbers."""
    counter = itertools.count()

    @torch.compiler.disable
    def net(x: torch.Tensor) -> torch.Tensor:
        return x + next(counter)

    return net, (torch.ones(3),), {}


def exported() -> Any:
    """An exported program of one prologue on plain tensors."""
    x = inputs()

    class Net(nn.Module):
        def forward(self, qkv: torch.Tensor, cache: torch.Tensor) -> Any:
            y = Inputs(qkv, x.q_weight, x.k_weight, x.cos_sin, x.positions, x.positions,
                       x.slots, x.slots, cache)  # fmt: skip
            return mutated("")(y)

    return torch.export.export(Net(), (x.qkv, x.cache))


def raising() -> Any:
    """A source that fails by itself."""
    raise RuntimeError("no such checkpoint")


def shapeless() -> Any:
    """A source that returns the wrong thing."""
    return nn.Linear(2, 2), 3


def misfit() -> Any:
    """A model that fails when it is called."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 5)

    return Net(), (torch.ones(2, 2),), {}


NOTHING = 0
