"""Paged attention on this GPU: the 108 shapes of a drafted block, with ceilings and peers.

    python benchmarks/paged_attention.py --out results      # everything; the tables of docs/
    python benchmarks/paged_attention.py --sweep            # how the selection rule was found
    python benchmarks/paged_attention_tables.py results/paged_attention.json   # the tables again

Method: medians of CUDA-graph replays. A graph holds several calls over different block tables
into one large cache, so that caches are cold; blocks are shuffled. Outputs are filled with NaN
before the replay that is checked, and compared with float32 arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from paged_attention_cases import (
    CASES,
    DECODE,
    OTHERS,
    SMALL_BYTES,
    Case,
    Setup,
    distinct,
    error_of,
    estimate_us,
    geometry,
    make_pool,
    measure,
    warm,
)
from paged_attention_tables import paired, summary


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
        from paged_attention_peers import run_gather

        run_gather(CASES, groups["draft"], pool, deadline)
    if "cudnn" in peers:
        from paged_attention_peers import run_cudnn

        found = run_cudnn(CASES, deadline)
        for case, row in zip(CASES, groups["draft"], strict=True):
            row |= found.get(case, {"cudnn_note": "no time left"})
    Path(args.out, "paged_attention.json").write_text(json.dumps(result, indent=1))
    for name, rows in groups.items():
        if name == "others":
            for case, r in paired(rows):
                print(f"{case}: {r['us']:.1f} us, floor {r['floor']:.1f}, error {r['error']:.1e}")
            continue
        print(f"== {name}")
        print("\n".join(summary(rows, rates["read"])), flush=True)
    print(f"whole run {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
