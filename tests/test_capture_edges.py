"""Capturing what is not a plain module: callables, odd results, models that cannot be copied."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

import fusion
from fusion.graph.capture import CaptureError, from_export

aten = torch.ops.aten


def targets(captured: Any) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


class Scaled:
    """A callable that is no module."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.by


def power(x: torch.Tensor, *, by: int) -> torch.Tensor:
    return x.sin() * by


@pytest.mark.parametrize(
    "function", [Scaled(3.0), functools.partial(power, by=3), torch.sin], ids=["object", "partial",
                                                                                "built in"]
)  # fmt: skip
def test_anything_that_can_be_called(function: Any) -> None:
    (captured,) = fusion.capture(function, torch.ones(3))
    assert aten.sin.default in targets(captured)


def test_what_cannot_be_called_is_an_error() -> None:
    with pytest.raises(CaptureError, match="int is not something that can be called"):
        fusion.capture(3, torch.ones(3))


def test_a_model_that_cannot_be_copied_is_captured_in_place() -> None:
    class Locked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()  # cannot be copied
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + self.seen

    model = Locked()
    (captured,) = fusion.capture(model, torch.ones(3))
    assert aten.sin.default in targets(captured)
    assert torch.equal(model.seen, torch.zeros(3))
    assert type(model.seen) is torch.Tensor


def test_a_copy_that_computes_something_computes_it() -> None:
    """Objects may copy themselves with tensor operations of their own."""

    class Shifted:
        def __init__(self, table: torch.Tensor) -> None:
            self.table = table

        def __deepcopy__(self, memo: Any) -> Shifted:
            return Shifted(self.table[1:])

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + self.table

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = Shifted(torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shift(x)

    model = Model()
    (captured,) = fusion.capture(model, torch.ones(3))
    add = next(n for n in captured.graph.nodes if n.target is aten.add.Tensor)
    assert [tuple(n.meta["val"].shape) for n in add.all_input_nodes] == [(3,), (3,)]
    assert model.shift.table.shape == (4,)


def test_graphs_behind_results_that_are_no_tensors() -> None:
    """A size is among the results of the first graph; the second one is found all the same."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] * 2
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() * n

    first, second = fusion.capture(fn, torch.ones(3), dynamic=True)
    assert aten.sin.default in targets(first)
    assert aten.cos.default in targets(second)


@pytest.fixture
def program() -> Any:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x) + torch.ones(3, device=x.device)

    return torch.export.export(Model(), (torch.ones(3),))


def test_an_exported_program_of_another_machine(program: Any) -> None:
    (captured,) = fusion.capture(program, device="cuda")
    values = [n.meta["val"] for n in captured.graph.nodes if "val" in n.meta]
    assert values
    assert {v.device for v in values} == {torch.device("cuda", 0)}
    made = [n.kwargs["device"] for n in captured.graph.nodes if "device" in n.kwargs]
    assert made == [torch.device("cuda", 0)] * len(made)
    assert made


def test_an_exported_program_may_stay_undecomposed(program: Any) -> None:
    assert aten.silu.default in targets(from_export(program, decompose=False))
    (decomposed,) = fusion.capture(program)
    assert aten.silu.default not in targets(decomposed)
