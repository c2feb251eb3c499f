"""Times many tile geometries on a few shapes: where the numbers of the selection rule come from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from paged_attention import Case, D, Setup, estimate_us, geometry, make_pool, measure, warm

from fusion.backends.triton.paged_attention_tiles import Tiles

# rows sharing a KV head -> (rows, keys, warps, stages)
TRIED: dict[int, list[tuple[int, int, int, int, bool]]] = {
    16: [(16, 64, 2, 3, False), (16, 64, 4, 3, False), (64, 64, 4, 3, False),
         (16, 128, 4, 3, False), (16, 32, 2, 4, False)],
    32: [(32, 64, 4, 3, False), (64, 64, 4, 3, False), (32, 64, 2, 3, False),
         (64, 128, 4, 2, False)],
    64: [(64, 64, 4, 3, False), (64, 64, 4, 3, True), (64, 64, 4, 2, False),
         (64, 128, 4, 2, False)],
    128: [(128, 64, 8, 3, False), (128, 64, 8, 3, True), (64, 64, 4, 3, False),
          (64, 64, 4, 3, True), (128, 64, 8, 4, True), (128, 64, 8, 2, True)],
    256: [(256, 32, 16, 3, False), (256, 32, 8, 3, False), (256, 32, 8, 3, True),
          (128, 64, 8, 3, False), (128, 64, 8, 3, True), (64, 64, 4, 3, False),
          (128, 64, 8, 4, True), (256, 64, 8, 2, False)],
}  # fmt: skip
SHAPES = [(1, 1), (1, 8), (1, 32), (8, 1), (8, 8), (8, 32), (32, 1), (32, 8), (128, 8), (128, 1)]
HEADS = [(32, 8, 4), (32, 8, 8), (32, 8, 16), (8, 1, 16), (64, 4, 16), (8, 1, 4), (64, 4, 8),
         (8, 1, 8), (64, 4, 4)]  # fmt: skip
PROGRAMS = (64, 96, 128, 192, 264, 396)


def candidates(case: Case) -> list[Tiles]:
    """Every tile of the table, each with a few numbers of splits."""
    found = []
    for rows, keys, warps, stages, ahead in TRIED[case.group_rows]:
        blocks = -(-case.group_rows // rows)
        programs = case.batch * case.hkv * blocks
        splits = {max(1, min(p // programs, case.context // 64)) for p in PROGRAMS}
        found += [Tiles(rows, keys, warps, stages, s, blocks, D, D, ahead) for s in sorted(splits)]
    return found


def short(g: Tiles) -> str:
    """rows x keys, warps, stages (A: scores one tile ahead) / splits."""
    return f"{g.rows}x{g.keys},{g.warps},{g.stages}{'A' if g.ahead else ''}/{g.splits}"


def sweep(out: Path, deadline: float) -> None:
    """Print the best geometries of each shape beside what the rule says; all times as JSON."""
    began = time.monotonic()
    cases = [Case(hq, hkv, s, b, c * 1024) for hq, hkv, s in HEADS for b, c in SHAPES]
    jobs = {}
    for case in cases:
        for geo in [geometry(case), *candidates(case)]:
            key = (case.hq, case.hkv, geo.rows, geo.keys, geo.warps, geo.stages, geo.ahead,
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
        result.append({"case": str(case), "rule": rule[0], "times": [
            (us, g.rows, g.keys, g.warps, g.stages, g.splits, g.ahead) for us, g in times]})
        best = "  ".join(f"{us:.1f} {short(g)}" for us, g in times[:3])
        print(f"{case}: rule {rule[0]:.1f} {short(rule[1])} | {best}", flush=True)
    (out / "sweep.json").write_text(json.dumps(result))
    torch.cuda.synchronize()
    print(f"sweep {time.monotonic() - began:.0f} s")
