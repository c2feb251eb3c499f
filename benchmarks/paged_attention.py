"""Paged attention on this GPU: the 108 shapes of a drafted block, with ceilings and peers.

    python benchmarks/paged_attention.py --out results      # the table of docs/
    python benchmarks/paged_attention.py --sweep            # how the selection rule was found

Method: medians of CUDA-graph replays. A graph holds several calls over different block tables
into one large cache, so that caches are cold; blocks are shuffled. Outputs are filled with NaN
before the replay that is checked, and compared with float32 arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusion.backends.triton import paged_attention_tiles as tiles
from fusion.backends.triton.paged_attention import paged_attention
from fusion.target import Target

D = 128
SCALE = D**-0.5
POOL_BYTES = 17_600_000_000
SMALL_BYTES = 4_600_000_000  # cases that fit run in this much of the pool
CUDNN_BYTES = 2**32  # 2**31 elements: what cuDNN's paged kernel may be able to address
COLD_BYTES = 256_000_000  # several times the second-level cache


@dataclass(frozen=True)
class Case:
    """One timed shape. ``page`` tokens a block; ``causal`` verification or non-causal draft."""

    hq: int
    hkv: int
    rows: int
    batch: int
    context: int
    page: int = 16
    causal: bool = False
    ragged: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the call must read at full lengths (bf16)."""
        return self.batch * self.context * self.hkv * D * 2 * 2

    @property
    def group_rows(self) -> int:
        """Query rows that share one KV head."""
        return self.rows * self.hq // self.hkv

    @property
    def flops(self) -> int:
        """Multiply-adds count as two, both matrix products."""
        return 4 * self.batch * self.rows * self.hq * self.context * D

    def __str__(self) -> str:
        extra = (f", page {self.page}" if self.page != 16 else "") + (
            ", causal" if self.causal else "") + (", ragged" if self.ragged else "")  # fmt: skip
        return f"{self.hq}/{self.hkv}, {self.rows}, {self.batch}, {self.context // 1024}k{extra}"


HEADS = ((32, 8), (8, 1), (64, 4))
CASES = [
    Case(hq, hkv, s, b, c * 1024)
    for (hq, hkv), s, b, c in itertools.product(HEADS, (4, 8, 16), (1, 8, 32, 128), (1, 8, 32))
]
DECODE = [
    Case(hq, hkv, s, b, c * 1024, causal=True)
    for (hq, hkv), s, b, c in itertools.product(HEADS, (1, 8), (1, 8, 32, 128), (1, 8, 32))
]
OTHERS = [
    Case(32, 8, 8, 32, 8192, page=64),
    Case(32, 8, 8, 32, 8192, page=1),
    Case(32, 8, 8, 32, 8192, page=48),
    Case(32, 8, 8, 32, 8192, ragged=True),
    Case(64, 4, 16, 32, 8192, page=64),
    Case(64, 4, 16, 32, 8192, ragged=True),
    Case(8, 1, 8, 128, 32768, ragged=True),
]


class Setup:
    """The arguments of a case: one query, several block tables into one pool."""

    def __init__(self, case: Case, pool: torch.Tensor, seed: int = 0, most: int = 64) -> None:
        gen = torch.Generator(device=pool.device).manual_seed(seed)
        self.case = case
        per_block = case.hkv * case.page * 2 * D
        self.cache = pool[: pool.numel() // per_block * per_block].view(
            -1, case.hkv, case.page, 2 * D
        )
        nhd = self.cache.transpose(1, 2)
        self.key, self.value = nhd[..., :D], nhd[..., D:]
        width = -(-case.context // case.page)
        need = case.batch * width
        sets = max(1, min(self.cache.shape[0] // need, -(-COLD_BYTES // case.kv_bytes), most))
        ids = torch.randperm(self.cache.shape[0], generator=gen, device=pool.device)
        self.tables = list(ids[: sets * need].int().view(sets, case.batch, width))
        shape = (case.batch, case.rows, case.hq, D)
        self.query = torch.randn(shape, generator=gen, device=pool.device, dtype=pool.dtype)
        if case.ragged:
            lens = torch.randint(case.rows, case.context + 1, (case.batch,), generator=gen,
                                 device=pool.device)  # fmt: skip
        else:
            lens = torch.full((case.batch,), case.context, device=pool.device)
        self.lens = lens.int()
        self.starts = torch.arange(case.batch + 1, device=pool.device, dtype=torch.int32)
        self.starts *= case.rows

    def ours(self, geometry: tiles.Tiles | None = None) -> list[Callable[[], torch.Tensor]]:
        """Our kernel, one call a table."""
        query = self.query.flatten(0, 1)

        def runner(table: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: paged_attention(
                query, self.key, self.value, table, self.lens, self.starts, self.case.rows,
                self.case.context, SCALE, self.case.causal, geometry=geometry,
            ).view(self.query.shape)  # fmt: skip

        return [runner(table) for table in self.tables]

    def reference(self, index: int) -> torch.Tensor:
        """float32 attention of one table, a few sequences at a time."""
        case = self.case
        out = torch.empty(self.query.shape, device=self.query.device)
        step = max(1, int(1e9 / (case.context * case.hkv * D * 4)))
        j = torch.arange(self.tables[0].shape[1] * case.page, device=out.device)
        i = torch.arange(case.rows, device=out.device)
        for b in range(0, case.batch, step):
            pages = self.tables[index][b : b + step].long()
            n = self.lens[b : b + step, None]
            kv = self.cache[pages].transpose(1, 2).flatten(2, 3)  # [b, Hk, keys, 2D]
            q = self.query[b : b + step].float().unflatten(2, (case.hkv, -1))
            q = q.permute(0, 2, 3, 1, 4)  # [b, Hk, G, S, D]
            scores = q.flatten(2, 3) @ kv[..., :D].float().transpose(-1, -2) * SCALE
            see = (j < n)[:, None, :]
            if case.causal:
                see = see & (j <= (i + n - case.rows)[:, :, None])
            see = see.expand(-1, case.rows, -1)[:, None].repeat(1, 1, case.hq // case.hkv, 1)
            p = scores.masked_fill_(~see, -math.inf).softmax(-1)
            o = (p @ kv[..., D:].float()).unflatten(2, (-1, case.rows))
            out[b : b + step] = o.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out


def measure(
    runs: Sequence[Callable[[], object]], estimate_us: float, budget_us: float = 15_000.0
) -> tuple[float, list[object], torch.cuda.CUDAGraph]:
    """(median microseconds a call, outputs of the captured calls, the graph)."""
    calls = max(len(runs), min(32, int(600 / estimate_us) + 1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [runs[i % len(runs)]() for i in range(calls)]
    graph.replay()
    repeats = max(3, min(25, int(budget_us / (estimate_us * calls))))
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) * 1e3 / calls, outputs, graph


def error_of(setup: Setup, outputs: list[object], graph: torch.cuda.CUDAGraph) -> float:
    """Relative error of the first and last table after a replay into NaN; NaN never passes."""
    for out in outputs:
        assert isinstance(out, torch.Tensor)
        out.fill_(math.nan)
    graph.replay()
    worst = 0.0
    for index in sorted({0, min(len(setup.tables), len(outputs)) - 1}):
        want = setup.reference(index)
        have = outputs[index]
        assert isinstance(have, torch.Tensor)
        error = ((have.float() - want).norm() / want.norm()).item()
        worst = max(worst, error) if error == error else math.inf
    return worst


def estimate_us(case: Case) -> float:
    """A guess that only sets how often to repeat."""
    return 5.0 + max(case.kv_bytes / 4.2e6, case.flops / 4.0e8)


def geometry(case: Case) -> tiles.Tiles:
    """What the selection rule says."""
    return tiles.choose(
        batch=case.batch, kv_heads=case.hkv, group=case.hq // case.hkv, head_dim=D, value_dim=D,
        max_query_len=case.rows, max_seq_len=case.context, itemsize=2, wide=False,
        target=Target.current(),
    )  # fmt: skip


def _warm_one(job: tuple[Case, tiles.Tiles | None]) -> str:
    case, geo = job
    try:
        pool = torch.zeros(case.hkv * case.page * 2 * D * case.batch * 8, device="cuda",
                           dtype=torch.bfloat16)  # fmt: skip
        small = Case(**{**asdict(case), "context": case.page * 8})
        setup = Setup(small, pool, most=1)
        table = torch.zeros(case.batch, -(-case.context // case.page), dtype=torch.int32,
                            device="cuda")  # fmt: skip
        setup.tables = [table]
        setup.case = case
        setup.ours(geo)[0]()
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{case} {geo}: {type(error).__name__}: {error}"[:300]


def warm(jobs: Sequence[tuple[Case, tiles.Tiles | None]], workers: int = 12) -> list[str]:
    """Compile all kernels in parallel (Triton's disk cache carries them over)."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        return [text for text in executor.map(_warm_one, jobs) if text]


def distinct(cases: Sequence[Case]) -> list[tuple[Case, tiles.Tiles | None]]:
    """One case for each kernel that would be compiled."""
    seen: dict[object, tuple[Case, tiles.Tiles | None]] = {}
    for case in cases:
        geo = geometry(case)
        key = (case.hq, case.hkv, case.page, case.causal, geo.rows, geo.keys, geo.warps,
               geo.stages, geo.splits > 1, tiles.next_power_of_2(geo.splits))  # fmt: skip
        seen.setdefault(key, (case, None))
    return list(seen.values())


def make_pool(size: int = POOL_BYTES) -> torch.Tensor:
    """The cache: random bf16, in parts so that the temporary float32 stays small."""
    pool = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    return pool


def run_cases(cases: Sequence[Case], pool: torch.Tensor) -> list[dict[str, object]]:
    """Time our kernel and its floor, by turns (a chip that has just worked hard is slower), and
    check each case."""
    from paged_attention_peers import paged_read

    rows = []
    for case in cases:
        small = case.kv_bytes <= SMALL_BYTES
        setup = Setup(case, pool[: SMALL_BYTES // 2] if small else pool)
        guess = estimate_us(case)
        splits = geometry(case).splits * geometry(case).row_blocks
        floor = [paged_read(setup.key, setup.value, t, setup.lens, splits) for t in setup.tables]
        ours = setup.ours()
        times, floors = [], []
        for _ in range(3):
            us, outputs, graph = measure(ours, guess)
            times.append(us)
            floors.append(measure(floor, guess)[0])
        row: dict[str, object] = {
            **asdict(case),
            "us": statistics.median(times),
            "floor": statistics.median(floors),
            "tiles": str(geometry(case)),
            "error": error_of(setup, outputs, graph),
        }
        del outputs, graph
        torch.cuda.empty_cache() if guess > 1000 else None
        rows.append(row)
    return rows


def run_gather(
    cases: Sequence[Case], rows: Sequence[dict[str, object]], pool: torch.Tensor, deadline: float
) -> None:
    """Time and check gather + SDPA, until the deadline (host clock); into the rows."""
    from paged_attention_peers import gather_sdpa

    for case, row in zip(cases, rows, strict=True):
        if time.monotonic() > deadline:
            return
        setup = Setup(case, pool[: SMALL_BYTES // 2] if case.kv_bytes <= SMALL_BYTES else pool)
        guess = estimate_us(case)
        few = setup.tables if guess < 200 else setup.tables[:1]
        runs = gather_sdpa(setup.query, setup.cache, few, SCALE)
        row["gather"], outputs, graph = measure(runs, guess * 4)
        have, want = outputs[0], setup.reference(0)
        assert isinstance(have, torch.Tensor)
        row["gather_error"] = ((have.float() - want).norm() / want.norm()).item()
        del outputs, graph
        torch.cuda.empty_cache()


def _cudnn_worker(cases: Sequence[Case], sender: Connection) -> None:
    """Sends (index, microseconds and relative error as it comes, the same folded) for each case,
    or (index, what was raised)."""
    from paged_attention_peers import cudnn_paged

    torch.backends.cuda.matmul.allow_tf32 = False
    pool: torch.Tensor | None = None
    for index, case in enumerate(cases):
        try:
            size = CUDNN_BYTES if case.kv_bytes <= CUDNN_BYTES else POOL_BYTES
            if pool is None or pool.numel() * 2 != size:
                pool = make_pool(size)
            setup = Setup(case, pool)
            guess = estimate_us(case)
            few = setup.tables if guess < 200 else setup.tables[:1]
            found: list[float] = []
            for folded in (False, True):
                runs = cudnn_paged(setup.query, setup.key, setup.value, few, setup.lens,
                                   case.context, SCALE, folded)  # fmt: skip
                us, outputs, _ = measure(runs, guess * (2 if folded else 8))
                out = outputs[-1]  # all calls write the same buffer; the last one's table is known
                assert isinstance(out, torch.Tensor)
                want = setup.reference((len(outputs) - 1) % len(few))
                found += [us, ((out.float() - want).norm() / want.norm()).item()]
            sender.send((index, *found))
        except Exception as problem:
            sender.send((index, f"{type(problem).__name__}: {problem}"[:200]))
            if "CUDA" in str(problem) or "cuda" in str(problem):
                return  # after a fault nothing works in this process


def run_cudnn(cases: Sequence[Case], deadline: float) -> dict[Case, list[object]]:
    """cuDNN's paged SDPA by case, in processes of its own: its kernel faults on some shapes, and
    a fault ends a process's CUDA. Small caches first, so that the pool is made twice only."""
    results: dict[Case, list[object]] = {}
    left = sorted(cases, key=lambda c: c.kv_bytes > CUDNN_BYTES)
    context = get_context("spawn")
    while left and time.monotonic() < deadline:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_cudnn_worker, args=(left, sender), daemon=True)
        worker.start()
        sender.close()
        done = 0
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                index, *found = receiver.recv()
                results[left[index]] = found
                done = index + 1
        except EOFError:
            pass
        worker.kill()
        worker.join()
        if done < len(left) and time.monotonic() < deadline and done == 0:
            results[left[0]] = ["the process died"]
            done = 1
        left = left[done:]
    return results


def summary(rows: Sequence[dict[str, object]], read_tbs: float) -> list[str]:
    """The goals of the task, as lines of text."""

    def mean(values: Sequence[float]) -> str:
        return f"{statistics.fmean(values):.3f} ({min(values):.3f}-{max(values):.3f}, " \
               f"{len(values)})" if values else "none"  # fmt: skip

    cases = [Case(**{k: r[k] for k in Case.__dataclass_fields__}) for r in rows]  # type: ignore
    pairs = list(zip(cases, rows, strict=True))
    thin = [(c, r) for c, r in pairs if c.group_rows <= 64]
    lines = [
        "M <= 64 over 1 GB, of the read ceiling: "
        + mean([c.kv_bytes / r["us"] / 1e6 / read_tbs for c, r in thin if c.kv_bytes > 1e9])
    ]
    lines.append(
        "M <= 64, 100 MB to 1 GB, of the paged-read floor: "
        + mean([r["floor"] / r["us"] for c, r in thin if 1e8 < c.kv_bytes <= 1e9])
    )
    lines.append(
        "M <= 64 under 100 MB, us over the floor: "
        + mean([r["us"] - r["floor"] for c, r in thin if c.kv_bytes <= 1e8])
    )
    for m in (128, 256):
        lines.append(
            f"M = {m} over 1 GB, TFLOP/s: "
            + mean(
                [
                    c.flops / r["us"] / 1e6
                    for c, r in pairs
                    if c.group_rows == m and c.kv_bytes > 1e9
                ]
            )
        )
        lines.append(
            f"M = {m}, 100 MB to 1 GB, TFLOP/s: "
            + mean(
                [
                    c.flops / r["us"] / 1e6
                    for c, r in pairs
                    if c.group_rows == m and 1e8 < c.kv_bytes <= 1e9
                ]
            )
        )
    for peer in ("gather", "cudnn", "folded"):
        ratios = [r[peer] / r["us"] for _, r in pairs if r.get(peer)]
        if ratios:
            lines.append(
                f"{peer} / ours: geometric mean {statistics.geometric_mean(ratios):.2f}, "
                f"worst {min(ratios):.2f}, {len(ratios)} cases"
            )
            lines += [
                f"  slower than {peer}: {c} {r['us']:.1f} against {r[peer]:.1f}"
                for c, r in pairs
                if r.get(peer) and r[peer] < r["us"]
            ]
    best = [
        min(r[p] for p in ("gather", "cudnn") if r.get(p)) / r["us"]
        for _, r in pairs
        if r.get("gather") or r.get("cudnn")
    ]
    if best:
        lines.append(f"best peer / ours: geometric mean {statistics.geometric_mean(best):.2f}")
    errors = [r[f"{p}_error"] for p in ("gather", "cudnn", "folded") for _, r in pairs
              if f"{p}_error" in r]  # fmt: skip
    if errors:
        lines.append(f"largest relative error of a peer: {max(errors):.2e}")
    notes = [f"  cuDNN, {c}: {r['cudnn_note']}" for c, r in pairs if "cudnn_note" in r]
    lines += notes
    lines.append(f"largest relative error: {max(r['error'] for _, r in pairs):.2e}")
    return lines  # fmt: skip


def ceilings(pool: torch.Tensor) -> dict[str, float]:
    """Read and copy rates, TB/s."""
    from paged_attention_peers import flat_read

    part = pool[: 2 * 1024**3]
    us = min(measure([flat_read(part)], 1000.0)[0] for _ in range(3))
    read = part.numel() * 2 / us / 1e6
    a, b = pool[: 1 << 30], pool[1 << 30 : 2 << 30]
    keep = b[:1024].clone()
    us = min(measure([lambda: b.copy_(a)], 1000.0)[0] for _ in range(3))
    b[:1024] = keep
    return {"read": read, "copy": 2 * a.numel() * 2 / us / 1e6}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--peers", default="gather,cudnn")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", type=int, default=0, help="sweep from so many rows a KV head")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.sweep:
        from paged_attention_sweep import sweep

        sweep(Path(args.out), deadline, args.rows)
        return
    began = time.monotonic()
    for text in warm(distinct([*CASES, *DECODE, *OTHERS])):
        print("warm:", text)
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    if args.seconds <= 0:
        return
    pool = make_pool()
    rates = ceilings(pool)
    print(rates, flush=True)
    groups: dict[str, list[dict[str, object]]] = {}
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
              "rates": rates, "groups": groups}  # fmt: skip
    peers = args.peers.split(",")
    todo = {"draft": CASES, "decode": DECODE, "others": OTHERS}
    for name, cases in todo.items():
        groups[name] = run_cases(cases, pool)
        Path(args.out, "paged_attention.json").write_text(json.dumps(result, indent=1))
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if "gather" in peers:
        run_gather(CASES, groups["draft"], pool, deadline)
    if "cudnn" in peers:
        found = run_cudnn(CASES, deadline)
        for case, row in zip(CASES, groups["draft"], strict=True):
            told = found.get(case, ["no time left"])
            if len(told) == 1:
                row["cudnn_note"] = told[0]
            else:
                row |= dict(
                    zip(("cudnn", "cudnn_error", "folded", "folded_error"), told, strict=True)
                )
    Path(args.out, "paged_attention.json").write_text(json.dumps(result, indent=1))
    for name, rows in groups.items():
        if name == "others":
            for r in rows:
                case = Case(**{k: r[k] for k in Case.__dataclass_fields__})  # type: ignore
                print(f"{case}: {r['us']:.1f} us, floor {r['floor']:.1f}, error {r['error']:.1e}")
            continue
        print(f"== {name}")
        print("\n".join(summary(rows, rates["read"])), flush=True)
    print(f"whole run {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
