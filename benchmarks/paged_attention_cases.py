"""The timed shapes of paged attention, their arguments, and how a call is timed and checked."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusion.backends.triton import paged_attention_tiles as tiles
from fusion.backends.triton.paged_attention import paged_attention
from fusion.backends.triton.sizes import next_power_of_2
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
               geo.stages, geo.splits > 1, next_power_of_2(geo.splits))  # fmt: skip
        seen.setdefault(key, (case, None))
    return list(seen.values())


def make_pool(size: int = POOL_BYTES) -> torch.Tensor:
    """The cache: random bf16, in parts so that the temporary float32 stays small."""
    pool = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    return pool
