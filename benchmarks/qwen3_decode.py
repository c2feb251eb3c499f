"""A decode step of Qwen3 (real shapes, random weights): fusion, plain Inductor, and stock.

    python benchmarks/qwen3_decode.py OUT [--models 0.6B 8B] [--batches 1 32] [--contexts 512 8192]

Ways to run one step, each captured into one CUDA graph:

* `fusion`: `backend="fusion"` on a paged cache (attention implementation `fusion_paged`);
* `plain`: `backend="inductor"`, the same paged cache and the same attention operation;
* `packed`: as `fusion`, after `pack_qkv(model)` (one projection a layer in the place of three);
* `static`: what transformers does by itself: `StaticCache`, SDPA, `backend="inductor"`.

`fusion` and `plain` share a process and are timed in turns, since they differ by a few per cent;
`packed` and `static` run in processes of their own. Processes compile at the same time, as many as
the device's memory holds, and are timed one after another. Logits of `fusion` and `plain` are
compared with those of the eager model. Each process writes one JSON file to the folder OUT:
microseconds of a replay, and of its kernels by part (profiler). The exit status is 1 where a step
with fusion is not the faster one.

`--tiny --device cpu` runs the same code on a small model without graphs or profiler, to see that
it works.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fusion
from fusion.backend import fusion as fusion_backend  # by function: also in a bare checkout
from fusion.integrations.transformers import PagedKVCache, forward_arguments, pack_qkv
from fusion.integrations.transformers.layers import cache_argument

SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip
WEIGHT_GB = {"0.6B": 2.0, "8B": 17.5, "tiny": 0.1}
TOTAL_GB = 118.0  # what processes may hold together; the rest is contexts and fragments


@dataclasses.dataclass(frozen=True)
class Case:
    """One process: a model at one batch size and context, run in one or two of the three ways."""

    model: str
    batch: int
    context: int
    variants: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.model}-b{self.batch}-c{self.context}-{'-'.join(self.variants)}"

    @property
    def gigabytes(self) -> float:
        """Device memory, roughly: weights, cache, and the stock attention's expanded K and V."""
        shape = SHAPES[self.model]
        layer = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2 * self.batch * self.context
        groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
        expanded = 4 * groups if "static" in self.variants else 0
        return WEIGHT_GB[self.model] + layer * (shape["num_hidden_layers"] + expanded) / 1e9


def build(name: str, layers: int | None, device: str) -> Any:
    """Qwen3 with random bf16 weights on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = dict(SHAPES[name])
    if layers:
        shape["num_hidden_layers"] = layers
    vocabulary = 151936 if name != "tiny" else 128
    config = Qwen3Config(**shape, vocab_size=vocabulary, max_position_embeddings=40960)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


Captured = tuple[torch.cuda.CUDAGraph, torch.Tensor]
Step = tuple[Callable[..., torch.Tensor], Any, Callable[[], None]]


def paged_step(model: Any, batch: int, context: int) -> Step:
    """The step on a paged cache of `batch` sequences of `context` random tokens."""
    model.set_attn_implementation("fusion_paged")
    blocks = -(-(context + 16) // 16)
    cache = PagedKVCache.for_model(
        model, batch * blocks, 16, layout="packed", max_seq_len=blocks * 16
    )
    for kv in cache.kv:
        for tensor in (kv,) if isinstance(kv, torch.Tensor) else kv or ():
            tensor.normal_()
    inputs = cache.inputs([cache.allocate(context) for _ in range(batch)], 1)
    inputs.token_ids.random_(0, 100)

    def step(model: Any, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**forward_arguments(inputs)).logits
        return logits

    return step, inputs, lambda: None


def static_step(model: Any, batch: int, context: int) -> Step:
    """The step on transformers' own static cache, and what makes it `context` tokens long again."""
    from transformers import StaticCache

    model.set_attn_implementation("sdpa")
    config = model.config
    length = max(1024, context + 32)  # room for the replays between two resets
    cache = StaticCache(config=config, max_cache_len=length)
    device, heads = model.device, config.num_key_value_heads
    cache.early_initialization(batch, heads, config.head_dim, torch.bfloat16, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    tokens = torch.randint(0, 100, (batch, 1), device=device)
    positions = torch.full((batch, 1), context, device=device)
    name = cache_argument(model.forward)

    def step(model: Any, inputs: Any) -> torch.Tensor:
        tokens, positions, cache = inputs
        extra = {name: cache}
        logits: torch.Tensor = model(
            input_ids=tokens, position_ids=positions, use_cache=True, **extra
        ).logits
        return logits

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)  # it counts every step

    reset()
    return step, (tokens, positions, cache), reset


def capture(run: Callable[[], torch.Tensor]) -> Captured:
    """One CUDA graph of a step, and its logits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    return graph, logits


def replay_us(graph: torch.cuda.CUDAGraph, replays: int, reset: Callable[[], None]) -> float:
    """Microseconds of one of ``replays`` replays in a row, after `reset`.

    In a row, because launching a graph of some hundred nodes takes the host a good part of a
    step: with a wait between replays that time would be measured as the device's.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    reset()
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def interleaved(
    graphs: dict[str, list[Captured]], reset: Callable[[], None], rounds: int = 9
) -> dict[str, list[float]]:
    """Microseconds of a replay of each capture (median of rounds), measured in turns.

    In turns, because clocks drift. Several captures of the same code, because where its buffers
    lie moves a matrix product by up to a fifth.
    """
    times: dict[tuple[str, int], list[float]] = {}
    first = next(iter(graphs.values()))[0][0]
    replays = max(3, min(20, int(60_000 / replay_us(first, 2, reset))))
    for _ in range(rounds):
        for name, captured in graphs.items():
            for i, (graph, _) in enumerate(captured):
                times.setdefault((name, i), []).append(replay_us(graph, replays, reset))
    return {
        name: [statistics.median(times[name, i]) for i in range(len(captured))]
        for name, captured in graphs.items()
    }


Spent = dict[str, tuple[float, float]]
Timeline = list[tuple[float, float, str]]


def category(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name.

    Plain Inductor's prologue is the norm-and-rope kernels (their names list rsqrt with cos or
    neg) and the cache write, which is `prologue_kernel` without q, norm and rope.
    """
    if "prologue_kernel" in kernel:
        return "prologue"
    if "rsqrt" in kernel and ("cos" in kernel or "neg" in kernel):
        return "prologue"
    if "attention_kernel" in kernel or "merge_kernel" in kernel or "fmha" in kernel:
        return "attention"
    if kernel.startswith("triton_"):
        return "other Triton"
    return "matrix products and the rest"


def kernels(graph: torch.cuda.CUDAGraph, layers: int, replays: int = 3) -> tuple[Spent, Timeline]:
    """What one replay runs, from the profiler.

    Kernel name -> (launches, microseconds), and two layers' worth of kernels from the middle of the
    last replay in order: (start, microseconds, name).
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    for event in events:
        found[event.name][0] += 1 / replays
        found[event.name][1] += event.device_time / replays
    last = events[-(len(events) // replays) :]
    middle, width = len(last) // 2, 2 * len(last) // layers
    part = last[middle : middle + width]
    timeline = [
        (round(e.time_range.start - part[0].time_range.start, 2), e.device_time, e.name[:60])
        for e in part
    ]
    return {name: (n, us) for name, (n, us) in found.items()}, timeline


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Compile and capture, wait for the turn where there is one, measure."""
    torch.set_grad_enabled(False)
    result: dict[str, Any] = dataclasses.asdict(case)
    model = build(case.model, options.layers, options.device)
    result["layers"] = model.config.num_hidden_layers
    logits: dict[str, torch.Tensor] = {}
    graphs: dict[str, list[Captured]] = {}
    if "packed" in case.variants:
        pack_qkv(model)
    make = static_step if "static" in case.variants else paged_step
    step, inputs, reset = make(model, case.batch, case.context)
    hold: list[Any] = []  # compiled code that the graphs use
    if "plain" in case.variants:
        logits["eager"] = step(model, inputs).float()
    for variant in case.variants:
        torch._dynamo.reset()
        with_fusion = variant in ("fusion", "packed")
        backend: Any = fusion_backend if with_fusion else "inductor"
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
        begun = time.perf_counter()
        compiled(model, inputs)
        figures: dict[str, Any] = {"compile_s": time.perf_counter() - begun}
        print(f"{case.name} {variant}: {figures['compile_s']:.1f} s", file=sys.stderr, flush=True)

        def run(compiled: Any = compiled) -> torch.Tensor:
            logits: torch.Tensor = compiled(model, inputs)
            return logits

        if options.device == "cuda":
            captures = 1 if variant == "static" else options.captures
            graphs[variant] = [capture(run) for _ in range(captures)]
            graph, out = graphs[variant][-1]
            graph.replay()
            torch.cuda.synchronize()
            hold.append(compiled)
        else:
            out = run()
        logits[variant] = out.float().clone()
        if with_fusion:
            sites = [s for g in fusion.reports()[-1].graphs for s in g.sites]
            found = collections.Counter(f"{s.pass_name}:{s.status}:{s.kernel}" for s in sites)
            figures["sites"] = dict(found)
        result[variant] = figures
    for variant in logits.keys() - {"eager"} if "eager" in logits else ():
        a, b = logits["eager"], logits[variant]
        result[variant]["error_to_eager"] = float((a - b).norm() / a.norm())
    wait_for_turn(case)
    if graphs:
        add_times(result, graphs, reset)
    return result


def add_times(
    result: dict[str, Any], graphs: dict[str, list[Captured]], reset: Callable[[], None]
) -> None:
    """Step times in turns, and kernel times by category."""
    times = interleaved(graphs, reset)
    for variant, captured in graphs.items():
        figures = result[variant]
        figures["step_us"] = statistics.median(times[variant])
        figures["captures_us"] = [round(t, 1) for t in times[variant]]
        reset()
        spent, figures["timeline"] = kernels(captured[-1][0], result["layers"])
        parts: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for kernel, (count, us) in spent.items():
            parts[category(kernel)][0] += count
            parts[category(kernel)][1] += us
        figures["kernels_us"] = sum(us for _, us in spent.values())
        figures["launches"] = round(sum(n for n, _ in spent.values()))
        figures["parts"] = {k: (round(n), round(us, 1)) for k, (n, us) in parts.items()}
        slowest = sorted(spent.items(), key=lambda x: -x[1][1])[:25]
        figures["slowest"] = [(k[:110], round(n), round(us, 1)) for k, (n, us) in slowest]


def wait_for_turn(case: Case) -> None:
    """Say that this process is ready, and wait until the parent lets it measure."""
    folder = os.environ.get("QWEN3_DECODE_TURNS")
    if folder is None:
        return
    (Path(folder) / f"{case.name}.ready").touch()
    while not (Path(folder) / f"{case.name}.go").exists():
        time.sleep(0.05)


def waves(cases: list[Case]) -> list[list[Case]]:
    """Cases in groups that fit into memory together, the largest first."""
    groups: list[list[Case]] = []
    for case in sorted(cases, key=lambda c: -c.gigabytes):
        for group in groups:
            if sum(c.gigabytes for c in group) + case.gigabytes <= TOTAL_GB:
                group.append(case)
                break
        else:
            groups.append([case])
    return groups


def run_wave(cases: list[Case], options: argparse.Namespace) -> None:
    """Each case in a process; all compile at once, then one after another is timed."""
    turns = options.out / "turns"
    turns.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // len(cases))
    environment = os.environ | {
        "QWEN3_DECODE_TURNS": str(turns),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }
    running = {}
    for case in cases:
        spec = json.dumps(dataclasses.asdict(case))
        command = [sys.executable, __file__, str(options.out), "--case", spec]
        command += ["--device", options.device, "--captures", str(options.captures)]
        command += ["--layers", str(options.layers)] if options.layers else []
        running[case] = subprocess.Popen(command, env=environment)
    waiting = dict(running)
    while waiting:
        for case, process in list(waiting.items()):
            if (turns / f"{case.name}.ready").exists() or process.poll() is not None:
                del waiting[case]
        time.sleep(0.2)
    for case, process in running.items():
        (turns / f"{case.name}.go").touch()
        if process.wait() != 0:
            print(f"{case.name} failed", file=sys.stderr, flush=True)
    for file in turns.iterdir():
        file.unlink()
    turns.rmdir()


def summary(results: list[dict[str, Any]]) -> tuple[str, bool]:
    """A table, one line a model, batch and context; and whether every fusion step is fastest."""
    by_key: dict[tuple[str, int, int], dict[str, Any]] = collections.defaultdict(dict)
    for result in results:
        by_key[result["model"], result["batch"], result["context"]].update(result)
    lines = [
        "model batch context | fusion us | plain us (ratio) | packed us (ratio) "
        "| static us (ratio) | prologue us"
    ]
    good = bool(by_key)
    for (model, batch, context), r in sorted(by_key.items()):
        cells = [f"{model} {batch} {context}"]
        fused = r.get("fusion", {}).get("step_us")
        cells.append(f"{fused:.0f}" if fused else "-")
        for other in ("plain", "packed", "static"):
            us = r.get(other, {}).get("step_us")
            cells.append(f"{us:.0f} ({us / fused:.3f})" if us and fused else "-")
            if other != "packed":
                good &= not (us and fused) or us > fused
        parts = [
            r.get(v, {}).get("parts", {}).get("prologue", (0, 0))[1] for v in ("fusion", "plain")
        ]
        if all(parts):
            a, b = parts
            cells.append(
                f"{a:.1f} of {b:.1f} ({a / b:.3f}), saves {(b - a) / r['layers']:.2f} a layer"
            )
        errors = [r.get(v, {}).get("error_to_eager") for v in ("fusion", "plain")]
        if all(e is not None for e in errors):
            cells.append(f"error to eager {errors[0]:.4f}, plain {errors[1]:.4f}")
            good &= errors[0] <= 1.1 * errors[1]
        lines.append(" | ".join(cells))
    return "\n".join(lines), good


def main() -> int:
    """Exit status 1 where a fused step is not faster, the logits differ or a case is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=["0.6B", "8B"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--variants", nargs="*", default=["plain", "fusion", "packed", "static"])
    parser.add_argument("--cases", nargs="*", help="instead: MODEL:BATCH:CONTEXT:VARIANT[+VARIANT]")
    parser.add_argument("--captures", type=int, default=5)
    parser.add_argument("--case", type=json.loads, help="(used by the parent process)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.case:
        case = Case(**{**options.case, "variants": tuple(options.case["variants"])})
        result = run_case(case, options)
        (options.out / f"{case.name}.json").write_text(json.dumps(result, indent=1))
        return 0
    pair = tuple(v for v in ("plain", "fusion") if v in options.variants)
    ways = [w for w in (pair, *((v,) for v in options.variants if v not in pair)) if w]
    cases = [
        Case(model, batch, context, way)
        for model in (["tiny"] if options.tiny else options.models)
        for batch in options.batches
        for context in options.contexts
        for way in ways
    ]
    if options.cases:
        parts = [text.split(":") for text in options.cases]
        cases = [Case(m, int(b), int(c), tuple(v.split("+"))) for m, b, c, v in parts]
    for wave in waves(cases):
        run_wave(wave, options)
    found = [options.out / f"{case.name}.json" for case in cases]
    results = [json.loads(path.read_text()) for path in found if path.exists()]
    table, good = summary(results)
    print(table)
    return int(not good or len(results) < len(cases))


if __name__ == "__main__":
    raise SystemExit(main())
