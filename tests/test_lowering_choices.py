"""What becomes of a call under Inductor where its kernel's lowering cannot do it. Nothing runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fusion.ops as ops
from fusion.backends.triton import lowering
from fusion.graph import lowerings
from fusion.graph.lowerings import Decline
from tests.test_triton_prologue_lowering import HK, D, generated

OVERLOAD = ops.OVERLOADS["kv_cache_write"]
OPAQUE = torch.ops.fusion.kv_cache_write.opaque


@torch.library.custom_op("test_lowering_choices::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


unknown.register_fake(lambda x: torch.empty_like(x))


def code_of(monkeypatch: pytest.MonkeyPatch, lower: Any) -> str:
    """Inductor's code for one write of rows, with this lowering in place."""
    monkeypatch.setattr(lowering, "LOWERINGS", {"kv_cache_write": lower})

    def write(key: Any, value: Any, cache: Any, at: Any) -> Any:
        nhd = cache.transpose(1, 2)
        ops.kv_cache_write(key, value, nhd[..., :D], nhd[..., D:], at)
        return key + 1

    rows = torch.randn(7, HK, D)
    cache = torch.zeros(8, HK, 16, 2 * D)
    return generated(write, [rows, rows + 1, cache, torch.arange(7)])


def dispatched(choose: Any) -> Any:
    return lowerings._dispatcher(OVERLOAD, OPAQUE, choose)


def failing(error: Exception) -> Any:
    def lower(*args: Any, **kwargs: Any) -> Any:
        raise error

    return lower


@pytest.mark.parametrize(
    ("choose", "level", "said"),
    [
        (failing(ValueError("no such kernel")), logging.WARNING, "no kernel chosen for fusion"),
        (lambda *_: failing(Decline("an odd layout")), logging.INFO, "stays a call: an odd layout"),
        (lambda *_: failing(KeyError("private")), logging.WARNING, "failed; it stays a call"),
        (lambda *_: None, logging.DEBUG, ""),
    ],
    ids=["nothing chosen", "declined", "broken", "none of its own"],
)
def test_the_call_stays_and_the_log_says_why(
    choose: Any,
    level: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, lowerings.__name__):
        code = code_of(monkeypatch, dispatched(choose))
    assert "torch.ops.fusion.kv_cache_write.opaque" in code
    records = [r for r in caplog.records if r.name == lowerings.__name__]
    assert [r.levelno for r in records] == ([level] if said else [])
    assert all(said in r.getMessage() for r in records)


def test_a_lowering_of_its_own_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    code = code_of(monkeypatch, dispatched(lambda *_: lambda *a, **k: seen.append(k)))
    assert "torch.ops.fusion" not in code.split("def call")[-1]
    assert seen == [{"kv_layout": "NHD"}]  # all arguments are given, but for the kernel's name


def inlined(function: Any) -> Any:
    def lower(key: Any, value: Any, *rest: Any, **_: Any) -> None:
        fakes, _kwargs = lowerings.examples()
        lowerings.inline(function, [key], [fakes[0]])

    return lower


def branches(x: Any) -> Any:
    return x * 2 if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (branches, "cannot trace: "),
        (lambda x: unknown(x) + 1, "Inductor has no lowering for .*unknown"),
    ],
    ids=["data-dependent", "unknown operator"],
)
def test_what_cannot_be_inlined_is_declined(
    function: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match=why) as caught:
        code_of(monkeypatch, inlined(function))
    assert "Decline" in str(caught.value) or isinstance(caught.value, Decline)


def test_what_layers_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(x: Any) -> tuple[Any, ...]:
        from torch._inductor.lowering import lowerings as table

        made.append(x)
        return (table[torch.ops.aten.neg.default](x),)

    def lower(
        key: Any, value: Any, kc: Any, vc: Any, slot_mapping: Any, *_: Any, **__: Any
    ) -> None:
        names = {lowerings.once(slot_mapping, "negated", make)[0].get_name() for _ in range(2)}
        assert len(names) == 1
        assert lowerings.once(slot_mapping, "other", make)[0].get_name() not in names

    code_of(monkeypatch, lower)
    assert len(made) == 2
