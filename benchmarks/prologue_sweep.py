"""Tile sweep of the Triton prologue on a GPU: where the numbers of `prologue_tiles.py` come from.

Compiles every candidate in parallel first (Triton's cache is shared between processes), checks
random calls of the whole attribute space against the reference, then times each tile (and source
variants of the kernel, text edits listed in VARIANTS) at every shape of docs/performance.md.

    python benchmarks/prologue_sweep.py OUTDIR [seconds]
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import multiprocessing
import pathlib
import random
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TILES = [
    (1, 8, 4), (1, 8, 2), (1, 8, 1), (1, 8, 8), (1, 16, 4), (1, 16, 8), (1, 4, 1), (1, 4, 2),
    (1, 4, 4), (1, 2, 1), (1, 2, 2), (1, 1, 1), (2, 8, 4), (2, 8, 8), (4, 8, 8), (4, 8, 4),
    (2, 4, 2), (2, 4, 4), (4, 4, 4), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 1, 1), (2, 1, 1),
    (4, 1, 2), (8, 1, 2), (8, 1, 4), (8, 1, 8), (16, 1, 4), (1, 32, 8), (2, 16, 8),
]  # fmt: skip
W = ', eviction_policy="evict_last"'
L = "return tl.load(rows + d, mask=mask, other=0.0)"
VARIANTS = {
    "base": [],
    "no-evict-last": [(W, "")],
    "x-evict-first": [(W, ""), (L, L[:-1] + ', eviction_policy="evict_first")')],
    "x-first+store-cs": [
        (W, ""), (L, L[:-1] + ', eviction_policy="evict_first")'),
        ("mask=m)\n            tl.store(rows + i + R // 2, x2.to(dtype), mask=m)",
         'mask=m, cache_modifier=".cs")\n            tl.store(rows + i + R // 2, x2.to(dtype),'
         ' mask=m, cache_modifier=".cs")'),
        ("tl.store(p, x.to(ptr.dtype.element_ty), mask=mask)",
         'tl.store(p, x.to(ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")'),
    ],
}  # fmt: skip
VARIANT_TILES = [(1, 8, 4), (1, 16, 4), (2, 8, 4), (8, 1, 4), (1, 4, 2), (4, 8, 8), (2, 2, 1)]


@functools.cache
def variant_kernel(name: str, folder: str):
    """The kernel with a variant's text edits applied (each edit must match)."""
    source = (ROOT / "backends/triton/prologue_kernel.py").read_text()
    for old, new in VARIANTS[name]:
        assert old in source, (name, old)
        source = source.replace(old, new)
    path = pathlib.Path(folder) / f"kernel_{name.replace('-', '_').replace('+', '_')}.py"
    if not path.exists() or path.read_text() != source:
        path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prologue_kernel


def use(variant: str, folder: str) -> None:
    from fusion.backends.triton import prologue

    prologue.kernel = lambda: variant_kernel(variant, folder)


def warm(job) -> str:
    """Compile one (variant, heads, tile) in a worker process."""
    variant, heads, tile, folder = job
    from fusion.backends.triton.bench import prologue as bench
    from fusion.backends.triton.prologue_tiles import Tile

    use(variant, folder)
    shape = bench.Shape(*heads, 64)
    from fusion.backends.triton import prologue

    args, constant, grid, _ = prologue._prepare(
        bench.inputs(shape, 0), bench._attributes(shape), 1e-6, 1e-6, Tile(*tile, "")
    )
    prologue.kernel().warmup(*args, **constant, grid=grid)
    return ""


def case_job(seed: int) -> str:
    """Check a random case on the device."""
    import torch

    from tests.prologue_cases import check, random_case, runner

    case = random_case(random.Random(seed), small=False)
    with torch.no_grad():
        try:
            check(case, runner(case), "cuda")
        except Exception as error:
            return f"{type(error).__name__} {str(error)[:200]} {case}"
    return ""


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 240
    start = time.time()
    folder = str(out / "src")
    pathlib.Path(folder).mkdir(exist_ok=True)
    from fusion.backends.triton.bench import prologue as bench

    jobs = [("base", h, t, folder) for h in bench.HEADS for t in TILES]
    jobs += [
        (v, h, t, folder) for v in list(VARIANTS)[1:] for h in bench.HEADS for t in VARIANT_TILES
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=context) as pool:
        list(pool.map(warm, jobs, chunksize=4))
        print(f"compiled {len(jobs)} in {time.time() - start:.0f} s", flush=True)
        wrong = [r for r in pool.map(case_job, range(400)) if r]
        print(f"random cases: 400, {len(wrong)} wrong, at {time.time() - start:.0f} s", flush=True)
        for line in wrong[:6]:
            print("  ", line[:700], flush=True)
        (out / "wrong.txt").write_text("\n".join(wrong))
    import torch

    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), torch.__version__)
    log = (out / "sweep.txt").open("w")
    floors = {}
    for h in bench.HEADS:
        for t in bench.TOKENS:
            shape = bench.Shape(*h, t)
            floors[h, t] = [bench.harness.copy_us(*shape.bytes) for _ in range(2)]
    print("copy", {f"{k[0]}@{k[1]}": [round(x, 2) for x in v] for k, v in floors.items()})
    results = {}
    for variant in VARIANTS:
        use(variant, folder)
        for h in bench.HEADS:
            for tile in TILES if variant == "base" else VARIANT_TILES:
                if time.time() - start > limit:
                    continue
                chosen = bench.Tile(*tile, variant)
                for t in bench.TOKENS:
                    us, error = bench.measure(
                        bench.Shape(*h, t), functools.partial(bench.fused, tile=chosen)
                    )
                    results[h, t, tile, variant] = us
                    log.write(f"{h} {t} {tile} {variant} {us:.3f} {error or 'ok'}\n")
                    if error:
                        print("WRONG", h, t, tile, variant, error, flush=True)
    log.close()
    for h in bench.HEADS:
        for t in bench.TOKENS:
            found = sorted(
                (us, tile, v) for (a, b, tile, v), us in results.items() if (a, b) == (h, t)
            )
            floor = min(floors[h, t])
            best = "  ".join(f"{us:.2f} {tile} {v}" for us, tile, v in found[:7])
            print(f"{h} T={t} copy {floor:.2f} best/{found[0][0] / floor:.2f}: {best}")
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
