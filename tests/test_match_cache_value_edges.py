"""What is written, at the edge: fp8 rows, and K and V put together in one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.match.cache_write import find_cache_writes
from fusion.match.facts import CacheWrite, Miss
from tests.cache_cases import BLOCKS, HK, PAGE, D, T, graph_of, ints, old, rows, slots

FP8 = torch.float8_e4m3fn
TOP = torch.finfo(FP8).max
Quantize = Callable[[Tensor, Tensor], Tensor]


def _facts(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[CacheWrite | Miss]:
    return find_cache_writes(graph_of(fn, args).graph)


def _fp8(quantize: Quantize, dtype: torch.dtype = torch.bfloat16) -> list[CacheWrite | Miss]:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
        c[0][s] = quantize(k, ks)
        c[1][s] = quantize(v, vs)
        return c[0].float().sum()

    k, v = rows()
    scales = torch.tensor(0.25), torch.tensor(3.0)
    return _facts(fn, (k.to(dtype), v.to(dtype), old(2, 32, HK, D).to(FP8), slots(), *scales))


SATURATED: dict[str, tuple[Quantize, bool, bool]] = {
    # (spelling, whether the rows are the inputs themselves, whether the scale is read)
    "no scale": (lambda x, s: x.float().clamp(-TOP, TOP).to(FP8), True, False),
    "two clamps": (lambda x, s: (x.float() / s).clamp(min=-TOP).clamp(max=TOP).to(FP8), True, True),
    "scale of one": (lambda x, s: (x.float() / s.view(1)).clamp(-TOP, TOP).to(FP8), True, True),
    "scale of a head": (
        lambda x, s: (x.float() / s.expand(HK, 1)).clamp(-TOP, TOP).to(FP8), False, False,
    ),
    "scale in 16 bits": (
        lambda x, s: (x.float() / s.bfloat16()).clamp(-TOP, TOP).to(FP8), False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SATURATED)
def test_saturated_rows_and_their_scale(name: str) -> None:
    quantize, whole, scaled = SATURATED[name]
    (fact,) = _fp8(quantize)
    assert isinstance(fact, CacheWrite), fact
    assert (fact.key.node.op == "placeholder") is whole
    assert (fact.k_scale is not None) is (fact.v_scale is not None) is scaled
    # What the write does not do itself stays in the chain: the rows are the quotient.
    assert whole or "div" in str(fact.key.node.target)


UNSATURATED: dict[str, tuple[Quantize, str]] = {
    "another limit": (lambda x, s: (x.float() / s).clamp(-240, 240).to(FP8), "without saturating"),
    "a limit that is a tensor": (
        lambda x, s: (x.float() / s).clamp(s - TOP, s + TOP).to(FP8), "without saturating",
    ),
    "one side": (lambda x, s: (x.float() / s).clamp(max=TOP).to(FP8), "without saturating"),
    "converted, then moved": (
        lambda x, s: x.float().clamp(-TOP, TOP).to(FP8).view(T, HK, D), "right before the write",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSATURATED)
def test_rows_that_are_not_saturated_as_the_write_does(name: str) -> None:
    quantize, words = UNSATURATED[name]
    facts = _fp8(quantize)
    assert len(facts) == 2
    for fact in facts:
        assert isinstance(fact, Miss) and fact.reason.code == "match.value"
        assert words in fact.reason.message and fact.reason.node is not None


def test_rows_that_are_given_in_fp8() -> None:
    first, _ = _fp8(lambda x, s: x, FP8)
    assert isinstance(first, Miss) and first.reason.code == "match.value"
    assert first.node is not None and first.reason.node == first.node.all_input_nodes[-1].name


def _by_block(joined: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c[s // PAGE, s % PAGE] = joined(k, v)
        return c.sum()

    return fn


def _by_plane(joined: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
        c[:, s] = joined(k, v)
        return c.sum()

    return fn


def _paged(heads: int = HK, dim: int = D) -> tuple[Any, ...]:
    return old(BLOCKS, PAGE, heads, dim), slots()


NOT_PACKED: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "three": (
        _by_block(lambda k, v: torch.cat((k, v, k), -1)), lambda: (*rows(), *_paged(dim=3 * D)),
    ),
    "heads after heads": (
        _by_block(lambda k, v: torch.cat((k, v), 1)), lambda: (*rows(), *_paged(2 * HK)),
    ),
    "tokens after tokens": (
        _by_block(lambda k, v: torch.cat((k, v)).view(T, HK, D)),
        lambda: (ints(3, HK * D), ints(2, HK * D), *_paged()),
    ),
    "a view of something else": (
        _by_block(lambda k, v: (k * v).view(T, HK, D)),
        lambda: (ints(T, HK * D), ints(T, HK * D), *_paged()),
    ),
    "a plane after none": (
        _by_plane(lambda k, v: torch.cat((k, v))),
        lambda: (ints(0, T, HK, D), ints(2, T, HK, D), old(2, 32, HK, D), slots()),
    ),
    "planes after planes": (
        _by_plane(lambda k, v: torch.cat((k, v))),
        lambda: (ints(1, T, HK, D), ints(2, T, HK, D), old(3, 32, HK, D), slots()),
    ),
    "tokens in planes": (
        _by_plane(lambda k, v: torch.cat((k, v), 1)),
        lambda: (ints(2, 3, HK, D), ints(2, 2, HK, D), old(2, 32, HK, D), slots()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_PACKED)
def test_rows_that_are_not_one_k_and_one_v(name: str) -> None:
    fn, make = NOT_PACKED[name]
    (miss,) = _facts(fn, make())
    assert isinstance(miss, Miss) and miss.reason.code == "match.cache-pair"
    assert miss.reason.node is not None and miss.reason.node.startswith("index_put")


def test_a_packed_row_in_fp8_is_not_taken_apart() -> None:
    def fn(k: Tensor, v: Tensor, c: Tensor, s: Tensor, scale: Tensor) -> Tensor:
        both = torch.cat((k, v), -1).float() / scale
        c[s // PAGE, s % PAGE] = both.clamp(-TOP, TOP).to(FP8)
        return c.float().sum()

    cache = old(BLOCKS, PAGE, HK, 2 * D).to(FP8)
    (miss,) = _facts(fn, (*rows(), cache, slots(), torch.tensor(0.5)))
    assert isinstance(miss, Miss) and miss.reason.code == "match.cache-pair"


def test_a_k_plane_and_a_v_plane_one_after_the_other() -> None:
    fn = _by_plane(lambda k, v: torch.cat((k[None], v[None])))
    (fact,) = _facts(fn, (*rows(), old(2, 32, HK, D), slots()))
    assert isinstance(fact, CacheWrite), fact
    assert fact.key.token_sizes == (1, T) and fact.slots.batch is None
    offsets = fact.key_plane.storage_offset, fact.value_plane.storage_offset
    assert offsets == (0, 32 * HK * D)


def test_packed_widths_that_may_differ_from_run_to_run() -> None:
    def split(x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> Tensor:
        n = y.shape[0]
        c[s // PAGE, s % PAGE] = torch.cat((x[..., n:], x[..., :n]), -1)
        return c.sum()

    x, y = ints(T, HK, 2 * D), ints(D - 1)
    torch._dynamo.mark_dynamic(y, 0)
    (miss,) = _facts(split, (x, y, *_paged(dim=2 * D)))
    assert isinstance(miss, Miss) and miss.reason.code == "match.cache-pair"


def test_packed_widths_that_are_symbols_for_one_number() -> None:
    """A sum elsewhere has left the symbolic width a single value."""

    def fn(x: Tensor, y: Tensor, c: Tensor, s: Tensor) -> Tensor:
        half = x[..., ::2]
        both = torch.cat((half, half * 2), -1)
        c[s // PAGE, s % PAGE] = both
        return c.sum() + (half + y).sum()

    x = ints(T, HK, 2 * D)
    torch._dynamo.mark_dynamic(x, 2)
    (fact,) = _facts(fn, (x, ints(D), *_paged(dim=2 * D)))
    assert isinstance(fact, CacheWrite), fact
    assert isinstance(fact.key.node.meta["val"].shape[-1], torch.SymInt)
    assert (fact.key.dim, fact.value.dim) == (D, D)
    assert all(type(n) is int for n in (fact.key.dim, *fact.value_plane.size[2:]))
