"""The adapters never wait for the device, and can be captured into a graph (needs a GPU).

Any GPU will do: AITER's functions are replaced by recorders, for what is proved is what happens
around them. torch's own alarm turns every wait into an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusion.backends.aiter import contract, runtime, scales
from fusion.target import Target
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build
from tests.test_aiter_numbers import attention_args

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def calls() -> list[tuple[str, dict[str, Any]]]:
    write = dataclasses.replace(G0, op="kv_cache_write", layout="nhd", fewer_slots=1)
    fp8 = dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0), fewer_slots=1)
    spread = dataclasses.replace(G0, qkv="separate", positions=None, table="f32", slots="int32")
    rope = dataclasses.replace(G0, op="rope_kv_cache", table="f32", return_key=True)
    windowed = attention_args(device="cuda", window=(20, -1), rows=(3, 3, 0, 3))
    return [
        (fp8.op, build(fp8, "cuda")[0]),
        (spread.op, build(spread, "cuda")[0]),
        (rope.op, build(rope, "cuda")[0]),
        (write.op, prologue_cases.build(write, "cuda")[0]),
        ("paged_attention", windowed),
        ("paged_attention", attention_args(device="cuda", causal=False, window=(9, 2))),
    ]


@pytest.fixture(autouse=True)
def _recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def resolve(function: contract.Function) -> Any:
        return lambda *a, **k: k["q"] if function is contract.FLASH else None

    monkeypatch.setattr(runtime, "resolve", resolve)
    monkeypatch.setattr(scales, "HOST", scales.HostScales())
    with runtime.assume(Target.parse("gfx942", aiter="0.1.20")):
        yield


def test_no_wait_after_the_first_run() -> None:
    made = calls()
    for op, args in made:
        KERNELS[op].fn(**args)  # reads the scales once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op, args in made:
            KERNELS[op].fn(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture() -> None:
    made = calls()
    for op, args in made:
        KERNELS[op].fn(**args)
    for op, args in made:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            KERNELS[op].fn(**args)
        graph.replay()
    torch.cuda.synchronize()


def test_capture_before_any_run_says_what_to_do() -> None:
    op, args = calls()[0]
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(scales.ScaleNotOnHostError, match="once before the capture"),
        torch.cuda.graph(graph),
    ):
        KERNELS[op].fn(**args)
