"""``fusion bench``: kernels against a copy of the same bytes and against unfused code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.tools.console import MISSED, CommandError, data, talk, working
from fusion.tools.kernels import heads_of

if TYPE_CHECKING:
    from fusion.backends.triton.bench.prologue import Shape

SHORT = "A kernel against a copy and against unfused code, here."
EPILOG = """Examples:

\b
  fusion bench
  fusion bench --heads 32/8/128 --tokens 1 --tokens 128
  fusion bench --op kv_cache_write --tokens 16

\b
Exit status: 0, 1 where a kernel gave a wrong result, 2 usage or internal error."""

_OPS = ("qk_norm_rope_kv_cache", "kv_cache_write")
_HEADER = ("op", "shape", "kernel", "us", "copy us", "unfused us", "faster", "check")


def command(
    op: Annotated[
        str, typer.Option("--op", metavar="NAME", help="The operation to measure.")
    ] = _OPS[0],
    heads: Annotated[
        list[str] | None,
        typer.Option("--heads", metavar="Q/KV/DIM", help="Heads and head size. Repeatable."),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Tokens. Repeatable.")
    ] = None,
    unfused: Annotated[
        bool, typer.Option("--unfused/--no-unfused", help="Measure unfused code too.")
    ] = True,
) -> None:
    """Measure an operation on this machine, shape by shape: microseconds, the time of a copy of
    the same bytes (the floor), and the time of unfused code. Every measured result is checked
    against the reference. On a GPU the Triton kernel is measured under graph replay, against
    Inductor; without one the reference kernel runs on one thread of the CPU, against eager torch,
    which shows that the command works and not how fast fusion is."""
    import torch

    if op not in _OPS:
        raise CommandError(f"--op: {op!r} is not measured; there are {', '.join(_OPS)}")
    shapes = [heads_of(text) for text in heads or ["32/8/128", "8/1/128"]]
    counts = tokens or [1, 16, 128, 1024]
    if torch.cuda.is_available() and op == _OPS[0]:
        from fusion.backends.triton.bench import prologue

        rows = prologue.run(shapes, counts, inductor=unfused, report=data)
        wrong = any(row.error for row in rows)
    else:
        if torch.cuda.is_available():
            talk(f"note: {op} is measured on the CPU")
        else:
            talk("note: no GPU; the reference kernel is measured on the CPU")
        wrong = _on_cpu(op, shapes, counts, unfused)
    if wrong:
        raise typer.Exit(MISSED)


def _on_cpu(op: str, shapes: list[tuple[int, int, int]], counts: list[int], unfused: bool) -> bool:
    import torch

    from fusion.backends.triton.bench.prologue import Shape
    from fusion.tools.console import table

    rows: list[tuple[str, ...]] = [_HEADER]
    wrong = False
    with torch.no_grad(), _one_thread():
        for heads in shapes:
            for count in counts:
                shape = Shape(*heads, count)
                with working(f"{op} {shape}"):
                    row, bad = _measure(op, shape, unfused)
                rows.append(row)
                wrong |= bad
    data("\n".join(table(rows, indent="")))
    return wrong


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch uses one thread: on shared cores a wait for a second one takes longest."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(op: str, shape: Shape, unfused: bool) -> tuple[tuple[str, ...], bool]:
    """One row, and whether the result was wrong."""
    import torch

    import fusion
    from fusion.backends.triton.bench import prologue

    args = prologue.inputs(shape, 0, "cpu")
    if op == "kv_cache_write":
        wanted = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        call = {n: args[n] for n in wanted}

        def fused() -> Any:
            return fusion.ops.kv_cache_write(**call, kernel="reference")

        def plain() -> None:
            slots = args["slot_mapping"]
            block, offset = slots // prologue.BLOCK, slots % prologue.BLOCK
            args["key_cache"][block, offset] = args["key"]
            args["value_cache"][block, offset] = args["value"]

        size = 2 * args["key"].numel() * args["key"].element_size()
    else:
        attributes: dict[str, Any] = {
            "rope_style": "half",
            "q_eps": prologue.EPS,
            "k_eps": prologue.EPS,
            "rotary_dim": shape.dim,
            "rope_dtype": torch.float32,
            "out_dtype": torch.bfloat16,
        }

        def fused() -> Any:
            return fusion.ops.qk_norm_rope_kv_cache(**args, **attributes, kernel="reference")

        def plain() -> None:
            prologue.unfused(args, shape)

        size = sum(shape.bytes) // 2
    error = _check(op, args, fused, plain, shape)
    source = torch.empty(size, dtype=torch.uint8)
    floor = _microseconds(source.clone)
    mine = _microseconds(fused)
    other = _microseconds(plain) if unfused else None
    faster = "-" if other is None else f"{other / mine:.2f}x"
    shown = "-" if other is None else f"{other:.1f}"
    row = (
        op, str(shape), "reference", f"{mine:.1f}", f"{floor:.1f}", shown, faster, error or "ok"
    )  # fmt: skip
    return row, bool(error)


def _check(
    op: str, args: dict[str, Any], fused: Callable[[], Any], plain: Callable[[], Any], shape: Shape
) -> str:
    """Empty where the kernel wrote what unfused code writes."""
    import torch

    from fusion.backends.triton.bench import prologue

    cache = args["key_cache"]._base
    if op != "kv_cache_write":
        return prologue.verify(args, fused()[0], shape)
    fused()
    found = cache.clone()
    prologue.poison(cache)
    plain()
    return "" if torch.equal(found.view(torch.uint8), cache.view(torch.uint8)) else "cache differs"


def _microseconds(function: Callable[[], Any]) -> float:
    """Median of up to 20 calls or a fifth of a second, after 3 untimed calls or more (50 ms)."""
    begun, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - begun < 0.05:
        function()
        calls += 1
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 20 and (len(times) < 3 or time.perf_counter() - begun < 0.2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
