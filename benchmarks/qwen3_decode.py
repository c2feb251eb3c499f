"""A decode step of Qwen3 (real shapes, random weights) with fusion against plain Inductor.

    python benchmarks/qwen3_decode.py [--models 0.6B 8B] [--batches 1 32] [--json FILE]

Both run the same model on the same paged cache with the same attention operation; they differ in
`backend="fusion"` against `backend="inductor"`. A step is captured into one CUDA graph. Printed
for each: microseconds of a replay (both measured in turns), of its kernels by part (profiler), and
of the prologue a layer. Logits of both are compared first.

`--tiny --device cpu` runs the same code on a small model without graphs or profiler, to see that
it works.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusion
from fusion.backend import fusion as fusion_backend  # by function: also in a bare checkout
from fusion.integrations.transformers import PagedKVCache, forward_arguments

SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip


def build(name: str, layers: int | None, device: str) -> Any:
    """Qwen3 with random bf16 weights on the device, on the paged attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = dict(SHAPES[name])
    if layers:
        shape["num_hidden_layers"] = layers
    vocabulary = 151936 if name != "tiny" else 128
    config = Qwen3Config(**shape, vocab_size=vocabulary, max_position_embeddings=40960)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("fusion_paged")
    return model


def cache_for(model: Any, batch: int, context: int) -> tuple[PagedKVCache, Any]:
    """A cache with `batch` sequences of `context` random tokens, and the inputs of one step."""
    blocks = batch * -(-(context + 16) // 16)
    cache = PagedKVCache.for_model(
        model, blocks, 16, layout="packed", max_seq_len=-(-(context + 16) // 16) * 16
    )
    for kv in cache.kv:
        for tensor in (kv,) if isinstance(kv, torch.Tensor) else kv or ():
            tensor.normal_()
    sequences = [cache.allocate(context) for _ in range(batch)]
    inputs = cache.inputs(sequences, 1)
    inputs.token_ids.random_(0, 100)
    return cache, inputs


def compiled_step(model: Any, inputs: Any, backend: str) -> tuple[Any, float]:
    """The compiled step, called once, and the seconds that the first call took."""
    torch._dynamo.reset()

    def step(model: Any, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**forward_arguments(inputs)).logits
        return logits

    compiler: Any = fusion_backend if backend == "fusion" else backend
    run = torch.compile(step, backend=compiler, fullgraph=True, dynamic=False)
    start = time.perf_counter()
    run(model, inputs)
    seconds = time.perf_counter() - start
    print(f"  {backend}: first call {seconds:.1f} s", file=sys.stderr, flush=True)
    return run, seconds


def capture(run: Any, model: Any, inputs: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """One CUDA graph of a step, and its logits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run(model, inputs)
    return graph, logits


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 10) -> float:
    """Microseconds of one of ``replays`` replays in a row.

    In a row, because launching a graph of some hundred nodes takes the host a good part of a
    step: with a wait between replays that time would be measured as the device's.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 9) -> dict[str, float]:
    """Median microseconds of a replay of each graph, measured in turns (clocks drift)."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph))
    return {name: statistics.median(found) for name, found in times.items()}


def category(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name.

    Plain Inductor's prologue is the norm-and-rope kernels (their names list rsqrt with cos or
    neg) and the cache write, which is `prologue_kernel` without q, norm and rope.
    """
    if "prologue_kernel" in kernel:
        return "prologue"
    if "rsqrt" in kernel and ("cos" in kernel or "neg" in kernel):
        return "prologue"
    if "attention" in kernel or "combine" in kernel:
        return "attention"
    if kernel.startswith("triton_"):
        return "other Triton"
    return "matrix products and the rest"


def kernels(graph: torch.cuda.CUDAGraph, replays: int = 3) -> dict[str, tuple[float, float]]:
    """Kernel name -> (launches, microseconds) of one replay, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += 1 / replays
            found[event.name][1] += event.device_time / replays
    return {name: (n, us) for name, (n, us) in found.items()}


def compare(name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both backends on one model and batch size; prints the table and returns the figures."""
    begun = time.perf_counter()
    model = build(name, options.layers, options.device)
    print(f"{name} built in {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    layers = model.config.num_hidden_layers
    result: dict[str, Any] = {"model": name, "batch": batch, "layers": layers}
    logits: dict[str, torch.Tensor] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    kept: list[Any] = []  # caches, inputs and compiled code that the graphs use
    for backend in ("inductor", "fusion"):
        torch.manual_seed(1)
        cache, inputs = cache_for(model, batch, options.context)
        run, seconds = compiled_step(model, inputs, backend)
        figures: dict[str, Any] = {"compile_s": seconds}
        kept += [cache, inputs, run]
        if options.device == "cuda":
            graphs[backend], out = capture(run, model, inputs)
            graphs[backend].replay()
            torch.cuda.synchronize()
            logits[backend] = out.float().clone()
            kept.append(out)
            host = []
            for _ in range(10):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run(model, inputs)
                host.append(time.perf_counter() - start)
            figures["host_us"] = statistics.median(host) * 1e6
        else:
            logits[backend] = run(model, inputs).float()
        if backend == "fusion":
            sites = [s for g in fusion.reports()[-1].graphs for s in g.sites]
            found = collections.Counter(f"{s.pass_name}:{s.status}:{s.kernel}" for s in sites)
            figures["sites"] = dict(found)
        result[backend] = figures
    a, b = logits["inductor"], logits["fusion"]
    result["logits_relative_error"] = float((a - b).norm() / a.norm())
    if graphs:
        add_times(result, graphs, layers)
    print(json.dumps(result), flush=True)
    return result


def add_times(result: dict[str, Any], graphs: dict[str, torch.cuda.CUDAGraph], layers: int) -> None:
    """Step times in turns, kernel times by category, and what follows from them."""
    for backend, us in interleaved(graphs).items():
        result[backend]["step_us"] = us
    for backend, graph in graphs.items():
        spent = kernels(graph)
        parts: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for kernel, (count, us) in spent.items():
            parts[category(kernel)][0] += count
            parts[category(kernel)][1] += us
        result[backend]["kernels_us"] = sum(us for _, us in spent.values())
        result[backend]["launches"] = round(sum(n for n, _ in spent.values()))
        result[backend]["parts"] = {k: (round(n), round(us, 1)) for k, (n, us) in parts.items()}
        for kernel, (count, us) in sorted(spent.items(), key=lambda x: -x[1][1])[:12]:
            print(f"    {backend:9} {us:8.1f} us {count:5.0f} x {category(kernel)}: {kernel[:90]}")
    fused, plain = (result[b]["parts"]["prologue"][1] for b in ("fusion", "inductor"))
    result["prologue_us_a_layer"] = {"fusion": fused / layers, "inductor": plain / layers}
    result["prologue_part_of_inductors"] = fused / plain
    result["step_ratio"] = result["inductor"]["step_us"] / result["fusion"]["step_us"]


def main() -> int:
    """Exit status 1 where a fused step is not faster or the logits differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=["0.6B", "8B"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    models = ["tiny"] if options.tiny else options.models
    results = [compare(m, b, options) for m in models for b in options.batches]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    bad = [r for r in results if r["logits_relative_error"] > 0.05]
    bad += [r for r in results if r.get("step_ratio", 2) < 1]
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
