"""Everything that issue B promises of the Triton prologue, checked on a GPU in one run.

    python benchmarks/prologue_gpu.py OUTDIR SECTION...

Sections: cases sweep table oracle repeat fp8 huge compiled capture sanitizer. Each prints a few
lines; a section that fails prints its traceback and the others go on. Exit status 1 if any failed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import pathlib
import random
import statistics
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

S, N = 3, 0
TILES = [
    (1, 8, 4, S), (1, 8, 2, S), (1, 8, 1, S), (1, 16, 4, S), (1, 16, 2, S), (2, 8, 4, S),
    (4, 8, 4, S), (8, 1, 4, S), (16, 1, 4, S), (8, 1, 2, S), (4, 2, 2, S), (2, 4, 1, S),
    (4, 1, 1, S), (1, 8, 4, N), (8, 1, 4, N), (8, 1, 8, N), (1, 16, 8, N), (1, 4, 4, N),
    (1, 8, 8, N), (4, 1, 4, N),
]  # fmt: skip


def _tile(t):
    from fusion.backends.triton.prologue_tiles import Tile

    return Tile(*t)


def _warm(job) -> None:
    """Compile one kernel in a worker process; Triton's cache on disk is shared."""
    heads, tile, static = job
    from fusion.backends.triton import prologue
    from fusion.backends.triton.bench import prologue as bench

    shape = bench.Shape(*heads, 64)
    args, constant, grid, _ = prologue._prepare(
        bench.inputs(shape, 0), bench._attributes(shape), 1e-6, 1e-6, _tile(tile), static
    )
    prologue.kernel(static).warmup(*args, **constant, grid=grid)


def _case(seed: int) -> str:
    import torch

    from tests.prologue_cases import check, random_case, runner

    case = random_case(random.Random(seed), small=False)
    with torch.no_grad():
        try:
            check(case, runner(case, static=seed % 3 == 0), "cuda")
        except Exception as error:
            return f"{type(error).__name__} {str(error)[:200]} static={seed % 3 == 0} {case}"
    return ""


def pool():
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(14, mp_context=context)


def cases(out) -> None:
    """Random calls of the whole attribute space against the reference."""
    count = 240
    with pool() as workers:
        wrong = [r for r in workers.map(_case, range(1000, 1000 + count)) if r]
    print(f"cases: {count}, wrong {len(wrong)}")
    (out / "wrong.txt").write_text("\n".join(wrong))
    for line in wrong[:5]:
        print("  ", line[:900])
    assert not wrong


def sweep(out) -> None:
    """Every tile at every shape, with the constants of compiled graphs and without."""
    from fusion.backends.triton.bench import prologue as bench

    jobs = [(h, t, s) for h in bench.HEADS for t in TILES for s in (True, False)]
    with pool() as workers:
        list(workers.map(_warm, jobs, chunksize=4))
    lines = []
    for h in bench.HEADS:
        for t in bench.TOKENS:
            shape = bench.Shape(*h, t)
            floor = min(bench.harness.copy_us(*shape.bytes) for _ in range(2))
            found = []
            for tile in TILES:
                for static in (True, False):
                    if t >= 1024 and not (tile[3] and static):
                        continue
                    if t <= 16 and tile[3]:
                        continue
                    us, error = bench.measure(
                        shape, functools.partial(bench.fused, tile=_tile(tile), static=static)
                    )
                    found.append((us, tile, "static" if static else "run-time"))
                    lines.append(f"{shape} {tile} {static} {us:.3f} {error or 'ok'}")
                    assert not error, lines[-1]
            found.sort()
            best = "  ".join(f"{u:.2f} {x} {s}" for u, x, s in found[:6])
            print(f"{shape} copy {floor:.2f} best/{found[0][0] / floor:.3f}: {best}", flush=True)
    (out / "sweep.txt").write_text("\n".join(lines))


HINT_TILES = {
    16: [(1, 8, 4), (1, 16, 8), (1, 16, 4), (1, 8, 8)],
    1: [(4, 1, 4), (8, 1, 4), (8, 1, 8), (16, 1, 4), (4, 2, 2), (2, 4, 1), (2, 8, 4), (4, 1, 2)],
}


def hints(out) -> None:
    """Which hints pay where: 0 none, 1 loads, 2 stores, 3 both; buffers in L2 (8 sets) and not."""
    from fusion.backends.triton.bench import prologue as bench

    def tiles_of(heads):
        return [(*t, m) for t in HINT_TILES[16 if heads[0] > 8 else 1] for m in range(4)]

    with pool() as workers:
        list(
            workers.map(
                _warm, [(h, t, True) for h in bench.HEADS for t in tiles_of(h)], chunksize=4
            )
        )
    lines = []
    for h, tokens in (((32, 8, 128), (128, 512, 1024)), ((64, 8, 128), (128, 1024)),
                      ((8, 1, 128), (128, 512, 1024, 2048))):  # fmt: skip
        for t in tokens:
            shape = bench.Shape(*h, t)
            for sets in (8, None):
                floor = min(bench.harness.copy_us(*shape.bytes, sets) for _ in range(2))
                found = []
                for tile in tiles_of(h):
                    run = functools.partial(bench.fused, tile=_tile(tile))
                    us, error = bench.measure(shape, run, sets=sets)
                    assert not error
                    found.append((us, tile))
                    lines.append(f"{shape} sets {sets} {tile} {us:.3f} copy {floor:.3f}")
                found.sort()
                print(f"{shape} sets {sets} copy {floor:.2f}: " + "  ".join(
                    f"{u:.2f} {x}" for u, x in found[:5]), flush=True)  # fmt: skip
                ours = min(u for u, x in found if x[3] == 0)
                print(f"      no hints best {ours:.2f}", flush=True)
    (out / "hints.txt").write_text("\n".join(lines))


def table(out) -> None:
    """The table of docs/performance.md, as `python -m fusion.backends.triton.bench` prints it."""
    from fusion.backends.triton.bench import prologue as bench

    rows = bench.run(tokens=(1, 8192), inductor=True)
    rows += bench.run(tokens=(16, 128, 1024), inductor=False)
    print("eight rotating sets (calls of a few MB find part of their data in L2):")
    rows += bench.run(tokens=(128, 1024), inductor=False, sets=8)
    (out / "table.txt").write_text("\n".join([bench.HEADER, *map(str, rows)]))
    assert not any(r.error for r in rows)
    high = [str(r.shape) for r in rows if r.to_copy > (1.1 if r.shape.tokens >= 1024 else 1.35)]
    print("over the goal:", high or "none")


def oracle(out) -> None:
    """Root-mean-square error against float64, over that of the unfused chain in bf16."""
    import torch

    from fusion.backends import reference
    from fusion.backends.triton import prologue
    from tests.prologue_cases import Case, build

    worst = 0.0
    for seed in range(12):
        for style in ("half", "interleaved"):
            for cast in ("late", "early"):
                case = Case(
                    tokens=257, q_heads=16, kv_heads=8, dim=128, blocks=40, rope_style=style,
                    norm_cast=cast, outliers=seed % 2 == 1, padding=False, return_key=True,
                    rope_dtype="bf16" if seed % 3 == 0 else "f32", seed=seed,
                )  # fmt: skip
                args, _ = build(case, "cuda")
                exact = {
                    k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
                    for k, v in args.items()
                }
                exact |= {"rope_dtype": torch.float64, "out_dtype": torch.float64}
                names = ("query", "key", "q_weight", "k_weight", "cos", "sin", "positions",
                         "q_eps", "k_eps", "weight_mode", "norm_cast", "inv_rms", "rope_style",
                         "rotary_dim", "rope_dtype", "out_dtype")  # fmt: skip
                want = reference.qk_norm_rope(**{n: exact[n] for n in names})
                plain = reference.qk_norm_rope(**{n: args[n] for n in names})
                fused = prologue.qk_norm_rope(**{n: args[n] for n in names})
                for f, p, w in zip(fused, plain, want, strict=True):
                    ratio = float((f.double() - w).norm() / (p.double() - w).norm())
                    worst = max(worst, ratio)
    print(f"oracle: worst error ratio to the unfused chain {worst:.5f} (96 pairs)")
    assert worst <= 1.05


def repeat(out) -> None:
    """Twenty runs, the same bits, q, k and cache."""
    import torch

    from fusion.backends.triton import prologue
    from tests.prologue_cases import Case, build

    for tokens in (1, 63, 64, 65, 1000, 8192):
        for kv in (1, 8):
            case = Case(tokens=tokens, q_heads=8 * kv if kv == 1 else 32, kv_heads=kv, dim=128,
                        blocks=tokens // 16 + 2, return_key=True, seed=tokens)  # fmt: skip
            first = None
            for _ in range(20):
                args, storage = build(case, "cuda")
                q, k = prologue.qk_norm_rope_kv_cache(**args)
                now = (q, k, storage)
                if first is None:
                    first = now
                same = all(
                    torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                    for a, b in zip(first, now, strict=True)
                )
                assert same, f"T={tokens} Hk={kv}: bits differ"
    print("repeat: 20 runs bit-equal, T in 1, 63, 64, 65, 1000, 8192, 8/1 and 32/8 heads")


def fp8(out) -> None:
    """Bytes of both fp8 formats equal torch's cast, awkward values included; and their time."""
    import torch

    from fusion.backends import reference
    from fusion.backends.triton import cache_write
    from fusion.backends.triton.bench import prologue as bench

    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        x = bits.view(128, 4, 128).cuda()
        wide = torch.randn(128, 4, 128, device="cuda") * torch.logspace(-12, 5, 128, device="cuda")
        different = 0
        for key, value, ks, vs in ((x, wide, 0.25, 3.0), (wide, x, 7.0, 0.01), (x, wide, 1.0, 1.0)):
            pair = []
            for write in (reference.kv_cache_write, cache_write.kv_cache_write):
                cache = torch.full((9, 4, 16, 256), 0x33, dtype=torch.uint8, device="cuda")
                nhd = cache.view(dtype).transpose(1, 2)
                write(key, value, nhd[..., :128], nhd[..., 128:],
                      torch.arange(128, device="cuda"), torch.tensor(ks, device="cuda"),
                      torch.tensor([vs], device="cuda"))  # fmt: skip
                pair.append(cache)
            different += int((pair[0] != pair[1]).sum())
        print(f"fp8: {dtype}: {different} differing bytes of {3 * 2 * x.numel()}")
        assert not different
    one = ((32, 8, 128),)
    rows = bench.run(one, (1, 128, 8192), cache_dtype=torch.float8_e4m3fn)
    rows += bench.run(one, (1, 8192), cache_dtype=torch.float8_e4m3fnuz)
    assert not any(r.error for r in rows)


def huge(out) -> None:
    """A cache of more than 2**31 elements, written in its first and last block."""
    import torch

    from fusion.backends.triton import prologue
    from tests.prologue_cases import Case, build

    case = Case(tokens=9, q_heads=8, kv_heads=4, dim=128, padding=False, return_key=True)
    args, _ = build(case, "cuda")
    blocks = (2**31) // (4 * 16 * 256) + 70
    cache = torch.zeros(blocks, 4, 16, 256, dtype=torch.bfloat16, device="cuda")
    nhd = cache.transpose(1, 2)
    slots = torch.arange(9, device="cuda") + (blocks * 16 - 9)
    slots[0] = 3
    args |= {"key_cache": nhd[..., :128], "value_cache": nhd[..., 128:], "slot_mapping": slots}
    _, k = prologue.qk_norm_rope_kv_cache(**args)
    for i, slot in enumerate(slots.tolist()):
        row = cache[slot // 16, :, slot % 16]
        assert torch.equal(row[:, :128], k[i])
        assert torch.equal(row[:, 128:], args["value"][i])
    touched = int(cache.view(torch.int16).ne(0).any(-1).sum())
    assert touched == 9 * 4, touched
    print(f"huge: {cache.numel()} elements ({cache.numel() / 2**31:.2f} x 2**31), last block right")
    # The same with a block stride far beyond the elements that are there.
    wide = cache.view(-1).as_strided((2, 16, 4, 256), (2**31, 256, 16 * 256, 1))
    args |= {"key_cache": wide[..., :128], "value_cache": wide[..., 128:]}
    args["slot_mapping"] = torch.arange(9, device="cuda") + 18
    _, k = prologue.qk_norm_rope_kv_cache(**args)
    assert torch.equal(wide[1, 2:11, :, :128], k)


def _block(bench, ops, shape, kernel):
    import torch

    def function(qkv, weights, table, positions, cache, slots):
        hq, hk, d = shape.q_heads, shape.kv_heads, shape.dim
        q, k, v = qkv.split([hq * d, hk * d, hk * d], dim=1)
        nhd = cache.transpose(1, 2)
        q, _ = ops.qk_norm_rope_kv_cache(
            q.unflatten(1, (hq, d)), k.unflatten(1, (hk, d)), v.unflatten(1, (hk, d)),
            weights[0], weights[1], table[:, : d // 2], table[:, d // 2 :], positions,
            nhd[..., :d], nhd[..., d:], slots, q_eps=1e-6, k_eps=1e-6, rotary_dim=d,
            rope_dtype=torch.float32, out_dtype=torch.bfloat16, kernel=kernel,
            weight_mode="w", norm_cast="late", inv_rms="rsqrt", rope_style="half",
        )  # fmt: skip
        return q

    return function


def compiled(out) -> None:
    """The op under torch.compile: same bits as eager, launched from generated code; host time."""
    import torch
    from torch._inductor.utils import run_and_get_code

    import fusion.ops as ops
    from fusion.backends.triton.bench import prologue as bench

    torch._inductor.config.force_disable_caches = True

    def make(tokens, dtype=torch.bfloat16):
        shape = bench.Shape(32, 8, 128, tokens, dtype)
        a = bench.inputs(shape, 1)
        arguments = (a["query"]._base, (a["q_weight"], a["k_weight"]), bench._table(128, "cuda"),
                     a["positions"], a["key_cache"]._base, a["slot_mapping"])  # fmt: skip
        return shape, arguments

    for label, dynamic, tokens, dtype in (
        ("static", False, (7,), torch.bfloat16),
        ("dynamic", True, (7, 200, 1000, 2), torch.bfloat16),
        ("fp8", False, (7,), torch.float8_e4m3fn),
        ("fnuz", False, (7,), torch.float8_e4m3fnuz),
    ):
        torch._dynamo.reset()
        shape, _ = make(tokens[0], dtype)
        function = torch.compile(
            _block(bench, ops, shape, "triton"), dynamic=dynamic, fullgraph=True
        )
        sources: list[str] = []
        for t in tokens:
            _, got = make(t, dtype)
            _, want = make(t, dtype)
            if not sources:
                q, sources = run_and_get_code(function, *got)
            else:
                q = function(*got)
            eager = _block(bench, ops, shape, "triton")(*want)
            assert torch.equal(q, eager), (label, t)
            assert torch.equal(got[4].view(torch.uint8), want[4].view(torch.uint8)), (label, t)
        (out / f"code_{label}.py").write_text(sources[0])
        native = "prologue_kernel" in sources[0].split("def call")[-1]
        calls = "torch.ops.fusion" in sources[0].split("def call")[-1]
        print(f"compiled {label}: T {tokens} equal to eager; native {native}, op call {calls}")
        assert native != (label == "fnuz")
    host(out)


def host(out) -> None:
    """Host time of a launch in one compiled graph of many, against Inductor's own kernels.

    "softmax": few arguments. "eight": a kernel of Inductor's with as many pointers as ours.
    """
    import torch
    from torch._inductor.utils import run_and_get_code

    import fusion.ops as ops
    from fusion.backends.triton.bench import prologue as bench

    layers = 32
    shape = bench.Shape(32, 8, 128, 1, torch.bfloat16)
    a = bench.inputs(shape, 1)
    caches = [torch.zeros_like(a["key_cache"]._base) for _ in range(layers)]
    args = (a["query"]._base, (a["q_weight"], a["k_weight"]), bench._table(128, "cuda"),
            a["positions"], caches, a["slot_mapping"])  # fmt: skip

    def stack(kernel):
        one = _block(bench, ops, shape, kernel)

        def function(qkv, weights, table, positions, caches, slots):
            return [one(qkv, weights, table, positions, c, slots) for c in caches]

        return function

    outs = [torch.randn(4096 + 16 * i, 1, device="cuda") for i in range(layers)]
    seven = [[torch.randn(4096 + 16 * i, device="cuda") for _ in range(7)] for i in range(layers)]
    jobs = {
        "fused": (stack("triton"), args),
        "softmax": (lambda outs: [torch.softmax(o.view(1, -1), 1) for o in outs], (outs,)),
        "eight": (lambda rows: [a * b + c * d + e * f + g for a, b, c, d, e, f, g in rows],
                  (seven,)),
    }  # fmt: skip
    ready = {}
    for label, (function, arguments) in jobs.items():
        _, codes = run_and_get_code(torch.compile(function, dynamic=False), *arguments)
        (out / f"host_{label}.py").write_text(codes[0])
        ready[label] = (codes[0].split("def call")[-1].count(".run("), torch.compile(
            function, dynamic=False), arguments, [])  # fmt: skip
    for _ in range(300):  # by turns: the host has other work too
        for _, code, arguments, samples in ready.values():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            code(*arguments)
            samples.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    for label, (launches, _, _, samples) in ready.items():
        low, mid, _ = statistics.quantiles(samples[20:], n=4)
        print(f"host: {label}: {launches} launches, {mid / launches:.2f} us each (median; lower "
              f"quartile {low / launches:.2f})", flush=True)  # fmt: skip


def capture(out) -> None:
    """warmup(), then first use inside a capture: nothing compiles, replay sees new slots."""
    import torch

    from fusion.backends.triton import prologue
    from fusion.backends.triton.bench import prologue as bench

    shape = bench.Shape(40, 8, 96, 33)  # heads that nothing else here compiled
    args = bench.inputs(shape, 5)
    attributes = bench._attributes(shape)
    variants = prologue.warmup(args, attributes, 1e-6, 1e-6)
    prints = []
    import triton

    hooks = triton.knobs.runtime
    hooks.jit_cache_hook = lambda **kw: prints.append(kw.get("fn"))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        q, _ = prologue.launch(args, attributes, 1e-6, 1e-6)
    for tokens in (1, 2, 16, 64, 100, 4096):
        prologue.launch(bench.inputs(bench.Shape(40, 8, 96, tokens), 1), attributes, 1e-6, 1e-6)
    hooks.jit_cache_hook = None
    args["slot_mapping"].copy_(args["slot_mapping"].flip(0).clone())
    bench.poison(args["key_cache"]._base)
    q.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error = bench.verify(args, q, shape)
    print(f"capture: {variants} variants warmed, {len(prints)} compiled later, {error or 'ok'}")
    assert not prints
    assert not error


def sanitizer(out) -> None:
    """compute-sanitizer over a small run."""
    for tool in ("memcheck", "racecheck"):
        done = subprocess.run(
            ["compute-sanitizer", "--tool", tool, sys.executable, __file__, str(out), "small"],
            capture_output=True, text=True, timeout=200,
            env={**__import__("os").environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        text = done.stdout + done.stderr
        (out / f"sanitizer_{tool}.txt").write_text(text)
        summary = [x for x in text.splitlines() if "SUMMARY" in x or "small:" in x]
        print(f"sanitizer {tool}: {summary}")
        assert any("0 errors" in x or "0 hazards" in x for x in summary), text[-2000:]


def small(out) -> None:
    """A few calls of every kind, for compute-sanitizer."""
    import torch

    from tests.prologue_cases import Case, build, runner

    base = Case(tokens=5, q_heads=4, kv_heads=2, blocks=4)
    change = functools.partial(dataclasses.replace, base)
    some = [base, change(dim=80, rotary_dim=30), change(rope_style="interleaved", cache="fn"),
            change(op="rope_kv_cache", tokens=70, blocks=6), change(layout="shuffle"),
            change(op="qk_norm_rope"), change(op="kv_cache_write", cache="fnuz")]  # fmt: skip
    for case in some:
        args, _ = build(case, "cuda")
        runner(case)(**args)
    torch.cuda.synchronize()
    print(f"small: {len(some)} calls")


def main() -> int:
    out = pathlib.Path(sys.argv[1])
    failed = []
    start = time.time()
    for name in sys.argv[2:]:
        begin = time.time()
        try:
            if name != "cases":
                import torch

                torch.set_grad_enabled(False)
            globals()[name](out)
        except Exception:
            failed.append(name)
            text = traceback.format_exc()
            print(f"FAILED {name}\n{text[:1500]}\n...{text[-600:]}")
        print(f"-- {name} {time.time() - begin:.0f} s", flush=True)
    print(f"{time.time() - start:.0f} s in all; failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
