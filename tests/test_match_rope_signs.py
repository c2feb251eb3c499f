"""A wrong sign of a rotation: the node and the line that give it, and which elements have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.graph.elements import op_name
from fusion.graph.provenance import source_of
from fusion.match.facts import Miss
from fusion.match.rope import read_rope
from tests.match_graphs import compiled
from tests.rope_spellings import B, H, S, tables, value, wide

FIRST = "first half: +sin, needs -sin"
SECOND = "second half: -sin, needs +sin"
OTHER_WAY = f"rotates the other way: {FIRST}; {SECOND}"


def chunks_first(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    first = a * c + b * s  # wrong
    second = b * c + a * s
    return torch.cat((first, second), -1)


def chunks_second(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    first = a * c - b * s
    second = b * c - a * s  # wrong
    return torch.cat((first, second), -1)


def chunks_both(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    first = a * c + b * s  # wrong
    second = b * c - a * s
    return torch.cat((first, second), -1)


def chunks_with_neg(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    minus = -a  # wrong
    first = a * c - b * s
    second = b * c + minus * s
    return torch.cat((first, second), -1)


def cos_negated(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    own = -(a * c)  # wrong
    first = own - b * s
    second = b * c + a * s
    return torch.cat((first, second), -1)


def half_without_neg(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    turned = torch.cat((b, a), -1)  # wrong
    return x * wide(c) + turned * wide(s)


def half_with_two(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    minus = -a  # wrong
    turned = torch.cat((-b, minus), -1)
    return x * wide(c) + turned * wide(s)


def half_negates_the_other(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    turned = torch.cat((b, -a), -1)  # wrong
    return x * wide(c) + turned * wide(s)


def half_subtracted(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    turned = torch.cat((-b, a), -1)
    return x * wide(c) - turned * wide(s)  # wrong


def strided_first(x: Any, c: Any, s: Any) -> Any:
    a, b = x[..., ::2], x[..., 1::2]
    first = a * c + b * s  # wrong
    second = b * c + a * s
    return torch.stack((first, second), -1).flatten(-2)


def strided_both(x: Any, c: Any, s: Any) -> Any:
    a, b = x[..., ::2], x[..., 1::2]
    first = a * c + b * s  # wrong
    second = b * c - a * s
    return torch.stack((first, second), -1).flatten(-2)


EVEN = "even elements: +sin, needs -sin"
ODD = "odd elements: -sin, needs +sin"


@pytest.mark.parametrize(
    ("spelling", "op", "message"),
    [
        (chunks_first, "aten.add.Tensor", FIRST),
        (chunks_second, "aten.sub.Tensor", SECOND),
        (chunks_both, "aten.add.Tensor", OTHER_WAY),
        (chunks_with_neg, "aten.neg.default", SECOND),
        (cos_negated, "aten.neg.default", "first half: -cos, needs +cos"),
        (half_without_neg, "aten.cat.default", FIRST),
        (half_with_two, "aten.neg.default", SECOND),
        (half_negates_the_other, "aten.neg.default", OTHER_WAY),
        (half_subtracted, "aten.sub.Tensor", OTHER_WAY),
        (strided_first, "aten.add.Tensor", EVEN),
        (strided_both, "aten.add.Tensor", f"rotates the other way: {EVEN}; {ODD}"),
    ],
)
def test_the_node_that_gives_the_wrong_sign_is_named(
    spelling: Callable[..., Any], op: str, message: str
) -> None:
    traced = compiled(spelling, value(B, H, S, 32), *tables(32))
    miss = read_rope(traced.view("bhsd"))
    assert isinstance(miss, Miss)
    assert (miss.reason.code, miss.reason.message) == ("match.rope-sign", message)
    assert miss.node is not None and miss.reason.node == miss.node.name
    assert op_name(miss.node) == op
    lines, start = inspect.getsourcelines(spelling)
    (wrong,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong")]
    source = source_of(miss.node)
    assert source is not None and source.split(":")[-1] == str(wrong)
