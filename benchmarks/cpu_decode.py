"""A decode step on the CPU: fusion against plain Inductor, in pairs.

    python benchmarks/cpu_decode.py [--pairs 15] [--steps 40] [--dtype float32]

Both compile the same small Qwen3 on the same paged cache; they differ in the backend alone. A
pair is a block of steps of each, one right after the other; printed is the median of the ratios,
with the logits of both compared first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from compile_cost import decode_step, step

import fusion


def main() -> int:
    """Exit status 1 where the median ratio is above 1.05."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    runs: dict[str, Any] = {}
    logits: dict[str, torch.Tensor] = {}
    for backend in ("inductor", "fusion"):
        torch._dynamo.reset()
        model, inputs = decode_step(options.layers)
        model = model.to(getattr(torch, options.dtype))
        for kv in inputs.cache.kv if hasattr(inputs, "cache") else ():
            if isinstance(kv, torch.Tensor):
                kv.zero_()
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        logits[backend] = compiled(model, inputs)
        runs[backend] = (compiled, model, inputs)
    fusion.expect(fusion.reports()[-1], qk_norm_rope_kv_cache="all")
    torch.testing.assert_close(logits["fusion"], logits["inductor"], rtol=2e-2, atol=2e-2)
    ratios = []
    for _ in range(options.pairs):
        seconds = {}
        for backend, (compiled, model, inputs) in runs.items():
            start = time.perf_counter()
            for _ in range(options.steps):
                compiled(model, inputs)
            seconds[backend] = (time.perf_counter() - start) / options.steps
        ratios.append(seconds["fusion"] / seconds["inductor"])
    median = statistics.median(ratios)
    print(
        f"decode step, {options.layers} layers, {options.dtype}: fusion / inductor = {median:.3f} "
        f"(min {min(ratios):.3f}, max {max(ratios):.3f}, {options.pairs} pairs)"
    )
    return int(median > 1.05)


if __name__ == "__main__":
    raise SystemExit(main())
