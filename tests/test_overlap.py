"""Views that meet themselves or each other, in the arrangements that random ones rarely are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.ops.overlap import repeats_itself, share_bytes


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        ((4, 4), (3, 2)),  # 2 * 3 == 3 * 2
        ((2, 4), (3, 2)),  # the smaller one never lands on a 3
        ((3, 2, 2), (5, 3, 2)),  # 5 == 3 + 2
        ((2, 2, 2), (7, 3, 2)),
        ((3, 8), (4, 1)),  # rows that run into each other
        ((3, 4), (4, 1)),
        ((5, 1), (2, 0)),  # nothing is repeated along one element
        ((5, 2), (2, 0)),
    ],
)
def test_repeats_exactly_where_two_indices_give_one_address(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    view = torch.zeros(64).as_strided(sizes, strides)
    found = [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]
    assert repeats_itself(view) == (len(set(found)) < len(found))


def test_what_cannot_be_told_in_bounded_time_is_not_refused() -> None:
    with FakeTensorMode():
        memory = torch.empty(10**6, dtype=torch.uint8)
        sizes, strides = [50] * 8, [2 * p for p in (101, 103, 107, 109, 113, 127, 131, 137)]
        sizes, strides = [2, *sizes], [8001, *strides]  # odd: no sum of even strides reaches it
        assert repeats_itself(memory.as_strided([2, 50], [8001, 202])) is False
        assert repeats_itself(memory.as_strided([50] * 8, strides[1:])) is True  # 202+218 = 206+214
        # The long way that leads nowhere comes first: the bound ends it, and nothing is refused.
        assert repeats_itself(memory.as_strided(sizes, strides)) is False


def test_sizes_that_are_symbols_and_empty_views_are_not_refused() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert repeats_itself(torch.zeros(4).expand(0, 4)) is False
    real = torch.zeros(4, 6)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbolic = mode.from_tensor(real, static_shapes=False)
        assert repeats_itself(symbolic.expand(3, *symbolic.shape)) is False
        assert share_bytes(symbolic, symbolic) is False
