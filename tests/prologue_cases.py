"""Random calls of the prologue operations, and the check that a kernel does them right.

Shared by the interpreter tests on the CPU and the checks on a GPU. Every buffer that a kernel may
write is poisoned first, and the caches are compared as whole storages: what a call must not touch
has to keep its bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.backends import reference

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CACHE_DTYPES = {**DTYPES, "fn": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call in words; defaults are Qwen3 with a packed cache."""

    op: str = "qk_norm_rope_kv_cache"
    tokens: int = 5
    q_heads: int = 8
    kv_heads: int = 4
    dim: int = 64
    dim_v: int | None = None
    dtype: str = "bf16"
    qkv: str = "packed"  # packed | separate | transposed | strided
    weight: str | None = "bf16"
    weight_k: str | None = "same"
    weight_mode: str = "w"
    norm_cast: str = "late"
    inv_rms: str = "rsqrt"
    rope_style: str = "half"
    rotary_dim: int | None = None
    rope_dtype: str = "f32"
    out_dtype: str = "bf16"
    table: str = "f32"
    positions: str | None = "int64"
    full_width: bool = False
    cache: str = "bf16"
    layout: str = "packed"  # packed | nhd | hnd | kv_first | block_first | static | shuffle
    block: int = 16
    blocks: int = 8
    slots: str = "int64"
    fewer_slots: int = 0
    padding: bool = True
    scales: tuple[float, float] | None = None
    return_key: bool = False
    eps_tensor: bool = False
    outliers: bool = False
    seed: int = 0


def caches(case: Case, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(storage, key view, value view) of a poisoned cache; storage is a flat byte tensor."""
    dtype = CACHE_DTYPES[case.cache]
    size = dtype.itemsize
    d, dv = case.dim, case.dim_v or case.dim
    b, n, h = case.blocks, case.block, case.kv_heads
    x = 16 // size
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "packed": ((b, h, n, d + dv),),
        "nhd": ((b, n, h, d), (b, n, h, dv)),
        "hnd": ((b, h, n, d), (b, h, n, dv)),
        "static": ((b, h, n, d), (b, h, n, dv)),
        "kv_first": ((2, b, n, h, d),),
        "block_first": ((b, 2, n, h, d),),
        "padded": ((b, 3, n, h, d + dv),),
        "shuffle": ((b, h, d // x, n, x), (b, h, n // x, dv, x)),
    }
    total = sum(int(torch.Size(s).numel()) for s in shapes[case.layout]) * size
    storage = torch.randint(0, 120, (total,), generator=generator, dtype=torch.uint8)
    storage = storage.to(device)
    tensors, at = [], 0
    for shape in shapes[case.layout]:
        count = int(torch.Size(shape).numel()) * size
        tensors.append(storage[at : at + count].view(dtype).view(shape))
        at += count
    first = tensors[0]
    if case.layout == "packed":
        nhd = first.transpose(1, 2)
        return storage, nhd[..., :d], nhd[..., d:]
    if case.layout == "padded":
        return storage, first[:, 1, ..., :d], first[:, 1, ..., d:]
    if case.layout == "kv_first":
        return storage, first[0], first[1]
    if case.layout == "block_first":
        return storage, first[:, 0], first[:, 1]
    if case.layout in ("hnd", "static"):
        return storage, first.transpose(1, 2), tensors[1].transpose(1, 2)
    return storage, first, tensors[1]


def _qkv(case: Case, g: torch.Generator) -> list[Tensor]:
    t, d, dv = case.tokens, case.dim, case.dim_v or case.dim
    dtype = DTYPES[case.dtype]
    sizes = [(case.q_heads, d), (case.kv_heads, d), (case.kv_heads, dv)]
    if case.qkv == "packed":
        flat = torch.randn(t, sum(h * e for h, e in sizes), generator=g)
        flat = flat.to(dtype)
        parts = flat.split([h * e for h, e in sizes], dim=1)
        out = [p.unflatten(1, s) for p, s in zip(parts, sizes, strict=True)]
    elif case.qkv == "transposed":
        out = [torch.randn(h, t, e, generator=g).to(dtype).transpose(0, 1) for h, e in sizes]
    elif case.qkv == "strided":
        out = [torch.randn(t, h, 2 * e, generator=g).to(dtype)[..., ::2] for h, e in sizes]
    else:
        out = [torch.randn(t, h, e, generator=g).to(dtype) for h, e in sizes]
    if case.outliers:
        for x in out:
            x[..., 1].mul_(1e3)
    return out


def _spread(x: Tensor, device: str) -> Tensor:
    """The tensor on the device with its strides (``Tensor.to`` may make it dense)."""
    base = x if x._base is None else x._base
    return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def build(case: Case, device: str = "cpu") -> tuple[dict[str, Any], Tensor | None]:
    """Arguments of the call by name (without ``kernel``), and the cache's storage."""
    g = torch.Generator().manual_seed(case.seed)
    query, key, value = (_spread(x, device) for x in _qkv(case, g))
    storage, key_cache, value_cache = caches(case, device, g)
    capacity = case.blocks * case.block
    count = max(case.tokens - case.fewer_slots, 0)
    slots = torch.randperm(capacity, generator=g)[:count].to(
        torch.int32 if case.slots == "int32" else torch.int64
    )
    if case.padding and count > 1:
        slots[torch.rand(count, generator=g) < 0.3] = -1
    args: dict[str, Any] = {"query": query, "key": key, "value": value}
    if case.op == "kv_cache_write":
        del args["query"]
    elif "cache" not in case.op:
        del args["value"]
    rotary = case.dim if case.rotary_dim is None else case.rotary_dim
    if "norm" in case.op:
        for name, kind in (("q_weight", case.weight), ("k_weight", case.weight_k)):
            kind = case.weight if kind == "same" else kind
            w = torch.randn(case.dim, generator=g) * 0.3
            if case.weight_mode == "w":
                w = w + 1
            args[name] = None if kind is None else w.to(DTYPES[kind]).to(device)
    if "rope" in case.op:
        width = rotary if case.full_width else rotary // 2
        rows = 40 if case.positions else case.tokens
        table = torch.randn(rows, 2 * width, generator=g).to(DTYPES[case.table]).to(device)
        args["cos"], args["sin"] = table[:, :width], table[:, width:]
        args["positions"] = None
        if case.positions:
            pos = torch.randint(0, rows, (case.tokens,), generator=g)
            if "cache" in case.op:
                # A padding row may carry any position: it must not be used as an index.
                pos[:count][slots < 0] = 10**6
            args["positions"] = pos.to(getattr(torch, case.positions)).to(device)
    if "cache" in case.op:
        scale = [None, None]
        if case.scales is not None:
            scale = [torch.tensor(case.scales[0]), torch.tensor([case.scales[1]])]
            scale = [s.to(device) for s in scale]
        args |= {
            "key_cache": key_cache, "value_cache": value_cache,
            "slot_mapping": slots.to(device), "k_scale": scale[0], "v_scale": scale[1],
        }  # fmt: skip
    if "norm" in case.op:
        args |= {
            "q_eps": 1e-6, "k_eps": 1e-5, "weight_mode": case.weight_mode,
            "norm_cast": case.norm_cast, "inv_rms": case.inv_rms,
        }  # fmt: skip
        if case.eps_tensor:
            args["q_eps_tensor"] = torch.tensor(1e-3, dtype=torch.float64, device=device)
            args["k_eps_tensor"] = torch.tensor(2e-3, dtype=torch.float32, device=device)
    if "rope" in case.op:
        args |= {
            "rope_style": case.rope_style, "rotary_dim": rotary,
            "rope_dtype": DTYPES[case.rope_dtype], "out_dtype": DTYPES[case.out_dtype],
        }  # fmt: skip
    if "cache" in case.op:
        args["kv_layout"] = "SHUFFLE" if case.layout == "shuffle" else "NHD"
        if "rope" in case.op:
            args["return_key"] = case.return_key
    return args, storage if "cache" in case.op else None


def close(name: str, got: Tensor, want: Tensor, ulps: float, scale: Tensor | float) -> None:
    """Equal up to ``ulps`` units of the output dtype at the size of the operands ``scale``."""
    assert got.shape == want.shape, f"{name}: shape {got.shape} for {want.shape}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype} for {want.dtype}"
    assert got.is_contiguous(), f"{name}: not contiguous"
    error = (got.double() - want.double()).abs()
    bound = ulps * torch.finfo(got.dtype).eps * scale
    bad = ~(error <= bound)
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {bad.numel()} differ, worst {error.max():.3g}"
    )


def check(case: Case, run: Callable[..., Any], device: str = "cpu") -> None:
    """Run ``run(**arguments)`` on the case and compare with the reference.

    * q and k: equal to the reference to the bit if there is no norm; else the reduction order may
      differ in the last bit of f32, which may move a rounding: a few units of the coarsest dtype
      in the chain, of the largest operand of the sum.
    * caches: the whole storage equals a reference write of *the k that was returned* and v.
    """
    args, storage = build(case, device)
    if case.op == "kv_cache_write":
        expected_args, expected = build(case, device)
        reference.kv_cache_write(**expected_args)
        run(**args)
        assert storage is not None
        assert torch.equal(storage, expected), "cache bytes differ"
        return
    if storage is not None:
        args["return_key"] = True
    q, k = run(**args)
    want_args, _ = build(case, device)
    if storage is not None:
        want_args["return_key"] = True
    q_want, k_want = getattr(reference, case.op)(**want_args)
    if "norm" not in case.op:
        assert torch.equal(q, q_want), f"q differs: {(q.double() - q_want.double()).abs().max()}"
        assert torch.equal(k, k_want), f"k differs: {(k.double() - k_want.double()).abs().max()}"
    else:
        coarsest = max(
            torch.finfo(DTYPES[d]).eps for d in (case.dtype, case.rope_dtype, case.out_dtype)
        )
        ulps = 3 * coarsest / torch.finfo(q.dtype).eps
        for name, got, want in (("q", q, q_want), ("k", k, k_want)):
            scale = want.double().abs().amax(-1, keepdim=True).clamp(min=1.0) * 2
            close(name, got, want, ulps, scale)
    if storage is None:
        return
    expected_args, expected = build(case, device)
    write = ("value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale",
             "kv_layout")  # fmt: skip
    reference.kv_cache_write(k, **{n: expected_args[n] for n in write})
    different = int((storage != expected).sum())
    assert not different, f"{different} cache bytes differ"
    if not case.return_key:
        again, storage2 = build(case, device)
        q2, k2 = run(**again)
        assert k2.shape == (0, case.kv_heads, case.dim)
        assert k2.dtype == k.dtype
        assert torch.equal(q2, q)
        assert torch.equal(storage2, storage)


def random_case(rng: Any, small: bool = True) -> Case:
    """A case from the whole attribute space; ``rng`` is a ``random.Random`` (or hypothesis')."""
    pick = rng.choice
    op = pick(["qk_norm_rope_kv_cache"] * 3 + ["rope_kv_cache", "qk_norm_rope", "kv_cache_write"])
    kv_heads = pick([1, 2] if small else [1, 2, 3, 4])
    dim = pick([32, 48, 64, 80, 128] + ([] if small else [96, 112, 192, 256, 320, 512]))
    cache = pick(["bf16", "bf16", "f16", "f32", "fn", "fnuz"])
    layout = pick(["packed", "nhd", "hnd", "static", "kv_first", "block_first", "padded",
                   "shuffle"])  # fmt: skip
    dim_v = pick([None, None, dim // 2, 32, 40])
    if layout in ("kv_first", "block_first"):
        dim_v = None
    block = pick([1, 8, 16, 24, 32, 64])
    if layout == "shuffle":
        dim_v = pick([None, 32])
        block = 16
    tokens = pick([1, 2, 5] if small else [1, 5, 63, 64, 65, 300])
    rotary = pick([None, None, dim // 4 // 2 * 2, dim // 2 // 2 * 2, dim - 2, 0, 2])
    weight = pick([None, "bf16", "f32", "f16"])
    dtype = pick(["bf16", "bf16", "f16", "f32"])
    return Case(
        op=op, tokens=tokens, kv_heads=kv_heads, dim=dim,
        q_heads=kv_heads * pick([1, 2, 3] if small else [1, 2, 3, 5, 8]),
        dim_v=dim_v, dtype=dtype, qkv=pick(["packed", "separate", "transposed", "strided"]),
        weight=weight, weight_k=pick(["same", "same", "f32", None]),
        weight_mode=pick(["w", "1+w"]), norm_cast=pick(["late", "early", "none"]),
        inv_rms=pick(["rsqrt", "pow", "div", "recip"]),
        rope_style=pick(["half", "interleaved"]), rotary_dim=rotary,
        rope_dtype=pick(["f32", "bf16", "f16"]), out_dtype=pick([dtype, dtype, "f32", "bf16"]),
        table=pick(["f32", "bf16", "f16"]), positions=pick([None, "int32", "int64"]),
        full_width=pick([False, True]), cache=cache, layout=layout, block=block,
        blocks=max(4, -(-tokens // block) + 2), slots=pick(["int32", "int64"]),
        fewer_slots=pick([0, 0, 1, 3]), padding=pick([True, False]),
        scales=pick([None, (0.25, 3.0), (0.01, 17.0)]), return_key=pick([True, False]),
        eps_tensor=pick([False, False, True]), outliers=pick([False, False, True]),
        seed=rng.randrange(1 << 20),
    )  # fmt: skip


def runner(case: Case, static: bool = False) -> Callable[..., Any]:
    """The Triton function for the case's operation; ``static``: as in compiled graphs."""
    from fusion.backends.triton import cache_write, prologue

    if static:
        tensors = prologue.TENSORS

        def run(**args: Any) -> Any:
            kept = {n: x for n, x in args.items() if n not in tensors}
            eps = kept.pop("q_eps", 0.0), kept.pop("k_eps", 0.0)
            kept.pop("inv_rms", None)
            if case.op == "kv_cache_write":
                a = cache_write.attributes(args["key"].dtype, args["kv_layout"])
            else:
                kept.setdefault("return_key", case.op == "qk_norm_rope")
                kept.setdefault("norm_cast", "none")
                a = prologue.Attributes(norm="norm" in case.op, **kept)
            named = {n: args.get(n) for n in tensors}
            return prologue.launch(named, a, *eps, static=True)

        return run
    if case.op == "kv_cache_write":
        return cache_write.kv_cache_write
    return getattr(prologue, case.op)
