"""Spellings of cache writes at the edge: read right, or refused with the reason and the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

import fusion.ops  # noqa: F401 - registers the operations
from fusion.match.cache_write import OpRoles, find_cache_writes, register_cache_write
from fusion.match.facts import CacheWrite, Miss
from tests.cache_cases import (
    BATCH,
    BLOCKS,
    HK,
    PAGE,
    D,
    T,
    _flat,
    _pair,
    _static,
    graph_of,
    ints,
    old,
    rows,
    slots,
    write,
)  # fmt: skip

_library = torch.library.Library("test_cache_edges", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str) -> None:
    name = schema.split("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, lambda *_, **__: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"test_cache_edges::{name}", lambda *_, **__: None, lib=_library)


_define("flat_rows(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor s) -> ()")
_define("maybe(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!)? vc, Tensor s) -> ()")
for _name in ("flat_rows", "maybe"):
    register_cache_write(
        f"test_cache_edges::{_name}",
        OpRoles("k", "v", "kc", "vc", "s", k_scale=None, v_scale=None, layout=None),
    )


def _facts(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[CacheWrite | Miss]:
    return find_cache_writes(graph_of(fn, args).graph)


@dataclass(frozen=True)
class Refused:
    """``fn(*make())`` is refused with ``code``; the message holds ``words``, at a node ``at``."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    code: str
    words: str
    at: str
    count: int = 2


def heads_of_k_and_v_differ(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s] = k
    vc[s] = v[:, :2]
    return kc.sum()


def caches_of_unequal_length(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s] = k
    vc[s] = v
    return kc.sum()


def one_position_by_number(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[:, :, 3] = k[:, :, 0]
    vc[:, :, 3] = v[:, :, 0]
    return kc.sum() + s.sum()


def scatter_of_a_number(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, s.view(1, 1, -1, 1).expand_as(k), 0.0)
    return kc.sum()


def scatter_index_of_each_head(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    index = s.view(1, 1, -1, 1) + torch.arange(HK).view(1, -1, 1, 1)
    kc.scatter_(2, index.expand_as(k), k)
    return kc.sum()


def scatter_index_of_each_row(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, s.view(BATCH, 1, -1, 1).expand_as(k), k)
    return kc.sum()


def scatter_along_the_dim(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """The vector runs along the head dimension, not along the positions."""
    kc.scatter_(2, s.expand(BATCH, HK, T, D), k)
    return kc.sum()


def scatter_one_position_a_sequence(
    k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor
) -> Tensor:
    """A decode step: one token a sequence, each at a position of its own."""
    kc.scatter_(2, s[:, None, None, None].expand(-1, HK, 1, D), k[:, :, :1])
    return kc.sum()


def scatter_of_a_given_index(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, s, k)
    return kc.sum()


def scatter_index_put_together(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, torch.stack((s, s % 7)).view(BATCH, 1, T, 1).expand_as(k), k)
    return kc.sum()


def scatter_transposed(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, (s + 1).expand(BATCH, HK, D, T).transpose(2, 3), k)
    return kc.sum()


def scatter_of_some_heads(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.scatter_(2, s.view(1, 1, -1, 1).expand(BATCH, HK - 1, T, D), k)
    return kc.sum()


def every_second_position(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[:, :, 0 : 2 * T : 2] = k
    vc[:, :, 0 : 2 * T : 2] = v
    return kc.sum() + s.sum()


def a_block_an_offset_and_a_head(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s[:, None] // PAGE, s[:, None] % PAGE, torch.arange(HK)[None]] = k
    return kc.sum()


def one_slot_without_an_axis(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc.index_put_((s.max(),), k[0])
    return kc.sum()


def one_row_for_all_slots(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s] = k[:1]
    vc[s] = v[:1]
    return kc.sum()


def a_number_for_all_slots(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s] = 0.0
    return kc.sum()


def a_cache_of_numbers(k: Tensor, kc: Tensor, s: Tensor) -> Tensor:
    kc[s // PAGE, s % PAGE] = k
    return kc.sum()


def a_cache_with_too_many_axes(k: Tensor, kc: Tensor, s: Tensor) -> Tensor:
    kc[s] = k
    return kc.sum()


def positions_of_each_sequence(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[:, :, s.view(1, -1)] = k[:, :, None]
    vc[:, :, s.view(1, -1)] = v[:, :, None]
    return kc.sum()


def dim_before_the_slots(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[..., s] = k
    vc[..., s] = v
    return kc.sum()


def rows_of_an_op_without_heads(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    torch.ops.test_cache_edges.flat_rows(k.flatten(1), v.flatten(1), kc, vc, s)
    return kc.sum()


def an_op_without_a_value_cache(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    torch.ops.test_cache_edges.maybe(k, v, kc, None, s)
    return kc.sum()


def an_op_writes_a_copy(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The copy is laid out in another way than the cache that it came from."""
    copied = c.transpose(1, 2).contiguous()
    write(k, v, copied[0], copied[1], s)
    return copied.sum()


def written_elsewhere(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """What is put into the K plane is a V plane with new rows."""
    c[0] = c[1].index_put((s,), k)
    return c.sum()


def half_of_a_write_is_kept(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """A write to both planes, of which one is kept."""
    c[0] = c.index_put((torch.arange(2)[:, None], s), torch.stack((k, v)))[0]
    return c.sum()


def a_write_is_overwritten_by_an_older_plane(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    plane = c[0].index_put((s,), k)
    c.index_put_((torch.zeros_like(s), s), v)
    c[0] = plane
    return c.sum()


def through_a_copy_put_back_in_part(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """``reshape`` copies here; a piece of the copy is put back."""
    flat = c[:BLOCKS].transpose(1, 2).reshape(-1, HK, 2 * D)
    flat = flat.index_put((s,), torch.cat((k, v), -1))
    c[:BLOCKS] = flat.view(BLOCKS, PAGE, HK, 2 * D).transpose(1, 2)
    return c.sum()


def _plane_pair() -> tuple[Any, ...]:
    return (*rows(), old(2, 32, HK, D), slots())


def _symbolic_heads() -> tuple[Any, ...]:
    args = _flat()
    for tensor in args[:4]:
        torch._dynamo.mark_dynamic(tensor, 1)
    return args


def symbolic_heads(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    kc[s] = k
    vc[s] = v
    return kc.sum()


def _lengths_unknown() -> tuple[Any, ...]:
    k, v, kc, vc, s = _pair()
    block, offset = s // PAGE, s % PAGE
    mark_unbacked(block, 0)
    mark_unbacked(offset, 0)
    return k, v, kc, vc, block, offset


def index_lengths_unknown(
    k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, block: Tensor, offset: Tensor
) -> Tensor:
    kc[block, offset] = k
    vc[block, offset] = v
    return kc.sum()


def _wide_static() -> tuple[Any, ...]:
    k, v, kc, vc, _ = _static()
    return k, v, kc, vc, slots(*range(BATCH * T))


REFUSED = (
    Refused(heads_of_k_and_v_differ, lambda: (*rows(), old(32, HK, D), old(32, 2, D), slots()),
            "match.cache-pair", "no second one", "index_put"),
    Refused(caches_of_unequal_length, lambda: (*rows(), old(32, HK, D), old(64, HK, D), slots()),
            "match.cache-pair", "no second one", "index_put"),
    Refused(one_position_by_number, _static,
            "match.cache-write", "aten::select_scatter", "select_scatter"),
    Refused(scatter_of_a_number, _static, "match.cache-write", "of a constant", "scatter", 1),
    Refused(scatter_index_of_each_head, _static,
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_index_of_each_row, _wide_static,
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_along_the_dim, lambda: (*_static()[:4], slots(*range(D))),
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_one_position_a_sequence, lambda: (*_static()[:4], slots(3, 4)),
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_of_a_given_index,
            lambda: (*_static()[:4], torch.arange(T).view(-1, 1).expand(BATCH, HK, T, D).clone()),
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_index_put_together, _static,
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_transposed, _static,
            "match.cache-write", "differs between heads", "scatter", 1),
    Refused(scatter_of_some_heads, _static,
            "match.cache-write", "does not write whole rows", "scatter", 1),
    Refused(every_second_position, _static, "match.cache-write", "have a step", "slice_scatter"),
    Refused(a_block_an_offset_and_a_head, _pair,
            "match.cache-write", "more than a block and an offset", "index_put", 1),
    Refused(one_slot_without_an_axis, _flat,
            "match.cache-write", "one slot per token", "index_put", 1),
    Refused(index_lengths_unknown, _lengths_unknown,
            "match.cache-write", "one slot per token", "index_put"),
    Refused(one_row_for_all_slots, _flat, "match.value", "is broadcast", ""),
    Refused(a_number_for_all_slots, _flat, "match.value", "is broadcast", "", 1),
    Refused(a_cache_of_numbers, lambda: (ints(T), old(BLOCKS, PAGE), slots()),
            "match.cache-write", "no head and dim axes", "index_put", 1),
    Refused(a_cache_with_too_many_axes,
            lambda: (ints(T, 2, 2, HK, D), old(32, 2, 2, HK, D), slots()),
            "match.cache-write", "no head and dim axes", "index_put", 1),
    Refused(positions_of_each_sequence, _static,
            "match.cache-write", "differ by sequence", "index_put"),
    Refused(dim_before_the_slots,
            lambda: (ints(HK, D, T), ints(HK, D, T), old(HK, D, 32), old(HK, D, 32), slots()),
            "match.cache-view", "is not contiguous", "index_put"),
    Refused(symbolic_heads, _symbolic_heads, "match.value", "are not constants", "arg"),
    Refused(rows_of_an_op_without_heads, _pair,
            "match.value", "not [tokens, heads, dim]", "", 1),
    Refused(an_op_without_a_value_cache, _pair,
            "match.cache-write", "called without a cache", "auto_functionalized", 1),
    Refused(an_op_writes_a_copy,
            lambda: (*rows(), old(2, PAGE, BLOCKS, HK, D), slots()),
            "match.cache-view", "not a plain strided view", "", 1),
    Refused(written_elsewhere, _plane_pair, "match.cache-view", "not a plain strided one",
            "select_scatter"),
    Refused(half_of_a_write_is_kept, _plane_pair, "match.cache-view", "not a plain strided one",
            "select_scatter"),
    Refused(a_write_is_overwritten_by_an_older_plane, _plane_pair,
            "match.cache-view", "not a plain strided one", "select_scatter", 3),
    Refused(through_a_copy_put_back_in_part,
            lambda: (*rows(), old(2 * BLOCKS, HK, PAGE, 2 * D), slots()),
            "match.cache-view", "not a plain strided one", "view", 1),
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.fn.__name__)
def test_a_write_at_the_edge_is_refused_with_its_reason(case: Refused) -> None:
    facts = _facts(case.fn, case.make())
    assert all(isinstance(f, Miss) for f in facts), facts
    said = [f.reason for f in facts if isinstance(f, Miss) and f.reason.code == case.code]
    assert said and len(facts) == case.count, facts
    assert case.words in said[0].message, facts
    assert said[0].node is not None and said[0].node.startswith(case.at), facts
