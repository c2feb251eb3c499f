"""Times many tile geometries on a few shapes: where the numbers of the selection rule come from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from paged_attention_cases import Case, D, Setup, estimate_us, geometry, make_pool, measure, warm

from fusion.backends.triton.paged_attention_tiles import Tiles

# rows sharing a KV head -> (rows, keys, warps, stages)
TRIED: dict[int, list[tuple[int, int, int, int]]] = {
    16: [(16, 64, 2, 3), (16, 64, 4, 3), (64, 64, 4, 3), (16, 128, 4, 3), (16, 32, 2, 4)],
    32: [(32, 64, 4, 3), (64, 64, 4, 3), (32, 64, 2, 3), (64, 128, 4, 2)],
    64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 4), (64, 128, 4, 2)],
    128: [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3)],
    256: [
        (256, 64, 16, 3),
        (256, 64, 16, 4),
        (256, 32, 16, 4),
        (256, 64, 8, 3),
        (256, 32, 8, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
    ],
}
SHAPES = [(1, 1), (1, 8), (1, 32), (8, 1), (8, 8), (8, 32), (32, 1), (32, 8), (128, 8), (128, 1)]
HEADS = [(32, 8, 4), (32, 8, 8), (32, 8, 16), (8, 1, 16), (64, 4, 16), (8, 1, 4), (64, 4, 8),
         (8, 1, 8), (64, 4, 4)]  # fmt: skip
PROGRAMS = (64, 128, 256)


def candidates(case: Case) -> list[Tiles]:
    """Every tile of the table, each with a few numbers of splits."""
    found = []
    for rows, keys, warps, stages in TRIED[case.group_rows]:
        blocks = -(-case.group_rows // rows)
        programs = case.batch * case.hkv * blocks
        splits = {max(1, min(p // programs, case.context // 64)) for p in PROGRAMS}
        found += [Tiles(rows, keys, warps, stages, s, blocks, D, D) for s in sorted(splits)]
    return found


def short(g: Tiles) -> str:
    """rows x keys, warps, stages / splits."""
    return f"{g.rows}x{g.keys},{g.warps},{g.stages}/{g.splits}"


def sweep(out: Path, deadline: float, least_rows: int = 0) -> None:
    """Print the best geometries of each shape beside what the rule says; all times as JSON."""
    began = time.monotonic()
    cases = [Case(hq, hkv, s, b, c * 1024) for hq, hkv, s in HEADS for b, c in SHAPES
             if s * hq // hkv >= least_rows]  # fmt: skip
    jobs = {}
    for case in cases:
        for geo in [geometry(case), *candidates(case)]:
            key = (case.hq, case.hkv, geo.rows, geo.keys, geo.warps, geo.stages,
                   geo.splits > 1 and (geo.splits - 1).bit_length())  # fmt: skip
            jobs.setdefault(key, (case, geo))
    for text in warm(list(jobs.values()), 14):
        print("warm:", text)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    if deadline - began < 1:  # --seconds 0: compile only
        return
    pool = make_pool(4_600_000_000)
    result = []
    for case in cases:
        if time.monotonic() > deadline:
            print("deadline: the remaining shapes were not timed")
            break
        setup = Setup(case, pool)
        times = []
        for geo in dict.fromkeys([geometry(case), *candidates(case)]):
            try:
                times.append((measure(setup.ours(geo), estimate_us(case), 6000.0)[0], geo))
            except Exception as error:
                print(case, geo, type(error).__name__, str(error)[:100])
        rule = times[0]
        times.sort(key=lambda pair: pair[0])
        result.append(
            {
                "case": str(case),
                "rule": rule[0],
                "times": [(us, g.rows, g.keys, g.warps, g.stages, g.splits) for us, g in times],
            }
        )
        best = "  ".join(f"{us:.1f} {short(g)}" for us, g in times[:3])
        print(f"{case}: rule {rule[0]:.1f} {short(rule[1])} | {best}", flush=True)
    (out / "sweep.json").write_text(json.dumps(result))
    torch.cuda.synchronize()
    print(f"sweep {time.monotonic() - began:.0f} s")
