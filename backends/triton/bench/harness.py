"""Timing by CUDA-graph replay: the median over replays of a graph that runs a call many times.

A graph of one tiny kernel costs about as much as its launch, so each graph holds many calls, each
on buffers of its own (together larger than the L2 cache where that is possible), and the time of
a replay is divided by the number of calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

CALLS = 32
REPLAYS = 20
L2_BYTES = 60 << 20


def sets_for(bytes_per_call: int) -> int:
    """How many buffer sets make the calls of a graph miss the cache: 4 to 32 of them."""
    return max(4, min(CALLS, -(-4 * L2_BYTES // max(bytes_per_call, 1))))


def capture(calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """One graph that makes the calls in order, and what they returned (kept alive).

    Each call is made once before, outside the capture, so that nothing compiles inside it.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return graph, outputs


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, replays: int = REPLAYS) -> float:
    """Median microseconds per call over ``replays`` timed replays (after three untimed ones)."""
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event
    marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(replays)]
    for start, stop in marks:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in marks)) * 1e3 / calls


def calls_for(sets: int) -> int:
    """Calls per graph: every set equally often, about `CALLS` in all."""
    return sets * max(1, CALLS // sets)


def copy_us(
    nbytes_read: int, nbytes_written: int, sets: int | None = None, device: str = "cuda"
) -> float:
    """Microseconds of ``Tensor.copy_`` that reads and writes that many bytes in all."""
    half = (nbytes_read + nbytes_written) // 2
    sets = sets or sets_for(2 * half)
    pairs = [
        (torch.randint(0, 255, (half,), dtype=torch.uint8, device=device),
         torch.empty(half, dtype=torch.uint8, device=device))
        for _ in range(sets)
    ]  # fmt: skip
    count = calls_for(sets)

    def one(i: int) -> Callable[[], object]:
        source, target = pairs[i % sets]
        return lambda: target.copy_(source)

    graph, _ = capture([one(i) for i in range(count)])
    return replay_us(graph, count)
