"""The prologue kernel compiled for chips that are not here: no spills, shared memory in limits.

Nothing runs: Triton's compiler goes down to the machine code of each target. What the code needs
stands in it: register and spill counts in AMD's assembly, stack and local memory in NVIDIA's
resource report.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess

import pytest
import torch

from fusion.backends.triton import prologue
from fusion.backends.triton import prologue_plan as plan
from fusion.backends.triton import prologue_tiles as tiles
from fusion.backends.triton.prologue_plan import Attributes, Operand

triton = pytest.importorskip("triton", reason="the compiler under test")

TARGETS = {
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
    "gfx950": ("hip", "gfx950", 64, 160 << 10),
    "gfx1100": ("hip", "gfx1100", 32, 64 << 10),
    "gfx1201": ("hip", "gfx1201", 32, 64 << 10),
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
}
"""Backend, arch, threads of a warp, bytes of shared memory (LDS) that a program may have."""

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
FP8 = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 2}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    """Really compile, whatever an earlier run left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def dense(dtype: torch.dtype, *shape: int) -> Operand:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.insert(0, stride[0] * n)
    return Operand(dtype, shape, tuple(stride))


def call(heads=(32, 8), dim=128, dim_v=None, dtype=torch.bfloat16, cache=torch.bfloat16,
         table=torch.float32, weight=torch.bfloat16, scales=False):  # fmt: skip
    """Packed qkv, packed cache, cos|sin table with positions."""
    hq, hk = heads
    dv = dim_v or dim
    row = (hq + hk) * dim + hk * dv
    page = (hk * 16 * (dim + dv), dim + dv, 16 * (dim + dv), 1)
    half = Operand(table, (4096, dim // 2), (dim, 1))
    return {
        "query": Operand(dtype, (64, hq, dim), (row, dim, 1)),
        "key": Operand(dtype, (64, hk, dim), (row, dim, 1)),
        "value": Operand(dtype, (64, hk, dv), (row, dv, 1)),
        "q_weight": dense(weight, dim),
        "k_weight": dense(weight, dim),
        "cos": half,
        "sin": half,
        "positions": dense(torch.int64, 64),
        "key_cache": Operand(cache, (999, 16, hk, dim), page),
        "value_cache": Operand(cache, (999, 16, hk, dv), page),
        "slot_mapping": dense(torch.int64, 64),
        "k_scale": dense(torch.float32) if scales else None,
        "v_scale": dense(torch.float32) if scales else None,
    }


def compile_for(target: str, operands, a: Attributes, tile: tiles.Tile, static: bool):
    """Triton's compiled kernel (assembly texts and metadata) for a target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = prologue.kernel(static)
    operands = {n: operands.get(n) for n in plan.TENSORS}
    constants = plan.constants(operands, a)
    constants |= {"HH": tile.heads, "TT": tile.tokens, "STREAM": tile.stream}
    for which in ("K", "V"):
        cache = operands["key_cache" if which == "K" else "value_cache"]
        constants[f"{which}_FP8"] = FP8.get(cache.dtype, 0) if cache is not None else 0
    numbers = plan.numbers(operands, a, 1e-6, 1e-6)
    if static:
        constants |= {n: x for n, x in numbers.items() if n not in plan.RUN_TIME}
        constants |= dict.fromkeys(plan.VIEWS, 64)
        numbers = {n: numbers[n] for n in plan.RUN_TIME}
    out = torch.bfloat16 if a.out_dtype is None else a.out_dtype
    outputs = {"q_out_ptr": out, "k_out_ptr": out if a.return_key else None}
    types = {n: None if x is None else x.dtype for n, x in operands.items()}
    pointers = plan.pointers(types, outputs)
    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in pointers and pointers[name] is None:
            signature[name], values[(i,)] = "constexpr", None
        elif name in pointers:
            dtype = torch.uint8 if pointers[name] in FP8 else pointers[name]
            signature[name] = POINTERS[dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif name in ("q_eps", "k_eps"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in plan.RUN_TIME and numbers[name] % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    backend, arch, warp, _ = TARGETS[target]
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(
        source, target=GPUTarget(backend, arch, warp), options={"num_warps": tile.warps}
    )


def check_resources(target: str, made, tmp_path) -> None:
    """Raises AssertionError if registers spill or shared memory is over the limit."""
    limit = TARGETS[target][3]
    assert made.metadata.shared <= limit
    if target.startswith("gfx"):
        text = made.asm["amdgcn"]
        for kind in ("vgpr_spill_count", "sgpr_spill_count"):
            assert re.findall(rf"\.{kind}:\s*(\d+)", text) == ["0"], kind
        assert re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text) == ["0"]
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = next(pathlib.Path(triton.__file__).parent.rglob("nvidia/bin/cuobjdump"))
    report = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    used = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report))
    assert used["STACK"] == used["LOCAL"] == "0", report


BF16 = Attributes(True, rotary_dim=128, out_dtype=torch.bfloat16)
AWKWARD = Attributes(
    True, "1+w", "early", "interleaved", 60, torch.bfloat16, torch.bfloat16, return_key=True
)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(target, tmp_path):
    tile = tiles.choose(32, 8, 128, None, hints=target.startswith("sm"))
    made = compile_for(target, call(), BF16, tile, static=True)
    check_resources(target, made, tmp_path)
    assert made.metadata.shared == 0  # rows lie within warps, nothing goes through LDS


@pytest.mark.parametrize("target", ["gfx942", "gfx1201", "sm_80", "sm_90"])
def test_awkward_call_compiles_without_spills(target, tmp_path):
    """Interleaved partial rope, head size 80, fp8 cache with scales, few heads."""
    fp8 = torch.float8_e4m3fnuz if target == "gfx942" else torch.float8_e4m3fn
    operands = call((6, 2), 80, 48, cache=fp8, scales=True)
    operands["cos"] = operands["sin"] = Operand(torch.bfloat16, (4096, 60), (60, 1))
    made = compile_for(target, operands, AWKWARD, tiles.choose(6, 2, 80, 4096), static=False)
    check_resources(target, made, tmp_path)


def test_hot_path_moves_wide_words():
    """The halves of a head go as 8-byte words (4 bf16), v, cos and sin as 16-byte ones."""
    made = compile_for("sm_90", call(), BF16, tiles.choose(32, 8, 128, 1), static=True)
    loads = re.findall(r"ld\.global[\w:.]*?\.((?:v\d\.)?b\d+) ", made.asm["ptx"])
    # q and k: two halves of x and of the weight each, cos and sin each; v. Positions and slots are
    # 8-byte scalars, which Triton 3.6 loads once for each register.
    assert loads.count("v2.b32") == 8
    assert loads.count("v4.b32") == 5
    assert set(loads) == {"v2.b32", "v4.b32", "b64"}
    assert "bar.sync" not in made.asm["ptx"]


def test_products_are_not_contracted_into_sums():
    """Each product of the rotation is rounded by itself, so the sums stay additions."""
    plain = Attributes(False, norm_cast="none", rotary_dim=128, out_dtype=torch.bfloat16)
    made = compile_for("sm_90", call(weight=torch.float32), plain, tiles.choose(8, 2, 128, 1), True)
    text = made.asm["ptx"]
    # Per element of a pair: four products, written as fma with 0, and two sums.
    products = len(re.findall(r"fma\.rn\.f32 ", text))
    sums = len(re.findall(r"(?:add|sub)(?:\.rn)?\.f32 ", text))
    assert products == 2 * sums > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_whole_space_compiles_without_spills(target, tmp_path):
    hints = target.startswith("sm")
    for dim, style, many in itertools.product(
        (32, 80, 96, 128, 192, 256, 320, 512), ("half", "interleaved"), (False, True)
    ):
        for cache, tokens in ((torch.bfloat16, 1), (torch.float8_e4m3fn, None)):
            heads = (32, 8) if many else (8, 1)
            a = Attributes(
                True, "w", "late", style, dim // 4 * 2, torch.float32, torch.bfloat16, many
            )
            operands = call(heads, dim, cache=cache, scales=True)
            operands["cos"] = operands["sin"] = Operand(
                torch.float32, (4096, dim // 4), (dim // 2, 1)
            )
            tile = tiles.choose(*heads, dim, tokens, hints=hints)
            made = compile_for(target, operands, a, tile, static=many)
            check_resources(target, made, tmp_path)
