"""What a token view may be: rows of merged heads, and moved heads that no view expresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.graph.elements import along
from fusion.match.facts import Miss, RMSNorm, TokenView
from fusion.match.norm import read_norm
from fusion.match.views import frame_of, view_at
from tests.match_graphs import Traced, assert_norm_holds, trace
from tests.norm_spellings import EPS, read, value

T, H, D = 5, 3, 32


def _normed(x: Any) -> Any:
    n = x.float()
    return (n * torch.rsqrt(n.pow(2).mean(-1, True) + EPS)).to(x.dtype)


def _view(traced: Traced, order: tuple[int, ...], tokens: int, **how: Any) -> TokenView:
    node = traced.result()
    sizes = tuple(node.meta["val"].shape[d] for d in order[:tokens])
    return TokenView(node, order, tokens, sizes, T, how.pop("heads", H), D, **how)


def test_rows_that_merge_tokens_and_heads() -> None:
    traced = trace(_normed, value(T * H, D))
    view = _view(traced, (0, 1), 1, merged_heads=True)
    fact = read_norm(view)
    assert isinstance(fact, RMSNorm), fact
    assert_norm_holds(traced, fact, view)
    assert fact.x.merged_heads and fact.x.node.op == "placeholder"
    assert (fact.x.heads, fact.x.dim, fact.x.tokens) == (H, D, T)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 2, D), (3, 1, 1)])
def test_a_view_that_does_not_describe_its_node_is_a_miss(
    tokens: int, heads: int, dim: int
) -> None:
    """Too few heads for the elements, or no dimension left for them."""
    traced = trace(_normed, value(T, H, D))
    node = traced.result()
    sizes = tuple(node.meta["val"].shape[:tokens])
    fact = read_norm(TokenView(node, (0, 1, 2), tokens, sizes, T, heads, dim))
    assert isinstance(fact, Miss), fact
    assert fact.reason.node == node.name


MOVED: dict[str, Callable[[Any], Any]] = {
    "heads reversed": lambda x: x.flip(1),
    "dims reversed": lambda x: x.flip(2),
    "tokens reversed": lambda x: x.flip(0),
    "one head for all": lambda x: x[:, :1].expand(-1, H, -1),
    "heads and dims mixed": lambda x: x.transpose(1, 2).reshape(T, H, D),
    "tokens and dims mixed": lambda x: x.permute(2, 1, 0).reshape(T, H, D),
    "heads inside the dims": lambda x: x.reshape(T, D, H).transpose(1, 2),
    "half a head each": lambda x: x.reshape(T, 2 * H, D // 2).reshape(T, 2, H, D // 2)
    .transpose(1, 2).reshape(T, H, D),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_the_input_is_the_farthest_node_that_is_rows_of_heads(name: str) -> None:
    """What was moved so that no view says it is read where it has been moved already."""
    move = MOVED[name]
    traced = trace(lambda x: _normed(move(x)), value(T, H, D, dtype=torch.float32))
    fact = read(traced, "thd")
    turned = name == "heads inside the dims"
    assert (fact.x.node.op == "call_function") or turned
    assert fact.x.heads == H and fact.x.dim == D


def _at(
    index: Callable[..., tuple[Any, ...]], *shape: int, heads: int = H, merged: bool = False
) -> TokenView | None:
    """The view of an input of a shape, whose element at ``index(token, head, dim)`` is wanted."""
    traced = trace(lambda x, y: (_normed(x), y + 1), value(T, heads, D), value(*shape))
    sizes = (T, heads, D)
    frame, ref = frame_of(TokenView(traced.result(0), (0, 1, 2), 1, (T,), T, heads, D))
    axes = [along(ref.labels[i], i, frame.rank) for i in range(3)]
    assert frame.extents == sizes[:1]
    node = traced.result(1).all_input_nodes[0]
    return view_at(frame, node, index(*axes), ref.labels, merged=merged)


def test_elements_in_an_order_that_is_a_permutation_are_a_view() -> None:
    view = _at(lambda t, h, d: (h, d, t), H, D, T)
    assert view is not None and view.order == (2, 0, 1)
    assert (view.token_sizes, view.heads, view.dim) == ((T,), H, D)


def test_one_head_has_any_dimension_that_the_tokens_leave() -> None:
    view = _at(lambda t, h, d: (h, t, d), 1, T, D, heads=1)
    assert view is not None and view.order == (1, 0, 2) and view.token_dims == 1


NO_VIEWS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "one token for all": lambda t, h, d: (t[:1] * 0, h, d),
    "heads reversed": lambda t, h, d: (t, H - 1 - h, d),
    "dims reversed": lambda t, h, d: (t, h, D - 1 - d),
    "tokens reversed": lambda t, h, d: (T - 1 - t, h, d),
    "no head": lambda t, h, d: (t, t % H, d),
    "tokens and dims mixed": lambda t, h, d: (t, h, (d + t) % D),
    "heads and dims mixed": lambda t, h, d: (t, h, (d + h) % D),
    "tokens and heads mixed": lambda t, h, d: ((t + h) % T, h, d),
    "two heads": lambda t, h, d: (h, h, d),
}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", NO_VIEWS)
def test_elements_in_another_order_are_no_view(name: str, merged: bool) -> None:
    assert _at(NO_VIEWS[name], T, H, D, merged=merged) is None


def test_a_node_with_more_elements_is_no_view() -> None:
    assert _at(lambda t, h, d: (t, h, d), T + 1, H, D) is None
