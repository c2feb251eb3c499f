"""Run a program eagerly, fused and unfused, and say what is wrong with the difference."""

from __future__ import annotations

import hashlib
import linecache
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fusion
from fusion.backend import fusion as compile_with_fusion
from tests.fuzz import spellings
from tests.fuzz.program import DTYPES, Layer, Program

PASS = "qk_norm_rope_kv_cache"
NAMES = {**spellings.NORMS, **spellings.ODD_NORMS}
ROPE_NAMES = {**spellings.ROPES, **spellings.ODD_ROPES}


class SkipProgram(Exception):
    """Eager itself refuses this program."""


@dataclass
class Result:
    """What became of one program. ``finding`` is None where all is well."""

    finding: str | None = None
    detail: str = ""
    statuses: list[tuple[str, str | None, str]] = field(default_factory=list)
    structure: str = ""


@dataclass
class Inputs:
    """Arguments by name, and the whole buffers that they are views of."""

    x: dict[str, Tensor]
    buffers: dict[str, Tensor]


def compiled_function(program: Program) -> Callable[..., Any]:
    """The program's own function, with source lines that tracebacks and reports can show."""
    text = program.source()
    name = f"<program {hashlib.sha1(text.encode()).hexdigest()[:8]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {
        "torch": torch,
        "fusion": fusion,
        "seen": spellings.seen,
        "norms": NAMES,
        "ropes": ROPE_NAMES,
    }
    exec(compile(text, name, "exec"), scope)
    fn: Callable[..., Any] = scope["program"]
    return fn


def make_inputs(program: Program, tokens: int | None = None) -> Inputs:
    """Random inputs of a program, the same for the same seed."""
    t = program.tokens if tokens is None else tokens
    g = torch.Generator().manual_seed(program.seed)
    lead = (t,) if program.batch == 0 else (program.batch, t)
    total = math.prod(lead)
    x: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    x["positions"] = torch.randint(0, 64, lead, generator=g)
    for i, m in enumerate(program.layers):
        _layer(program, m, i, x, buffers, g, lead, total)
    return Inputs(x, {**buffers, **{n: v for n, v in x.items() if n not in buffers}})


def _layer(
    program: Program,
    m: Layer,
    i: int,
    x: dict[str, Tensor],
    buffers: dict[str, Tensor],
    g: torch.Generator,
    lead: tuple[int, ...],
    total: int,
) -> None:
    def rand(*shape: int, dtype: str = program.dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(DTYPES[dtype])

    widths = m.heads * m.dim, m.kv_heads * m.dim, m.kv_heads * m.v_dim
    if m.qkv == "three":
        for name, width in zip("qkv", widths, strict=True):
            x[f"{name}{i}"] = rand(*lead, width)
    else:
        x[f"qkv{i}"] = rand(*lead, sum(widths))
    x[f"qw{i}"], x[f"kw{i}"] = (rand(m.dim, dtype=m.weight_dtype) for _ in "qk")
    angles = torch.rand(64, m.rotary // 2, generator=g) * 6.3
    cos, sin = (f(angles).to(DTYPES[m.table_dtype]) for f in (torch.cos, torch.sin))
    if m.table == "gather":
        x[f"table{i}"] = torch.cat([cos, sin], -1)
    elif m.table == "two tables":
        x[f"cos{i}"], x[f"sin{i}"] = cos, sin
    elif m.table == "angles":
        x[f"freq{i}"] = torch.rand(m.rotary // 2, generator=g)
    else:
        cos, sin = cos[x["positions"]], sin[x["positions"]]
        if m.table == "one row" and len(lead) == 2:
            cos, sin = cos[:1], sin[:1]
        if m.table == "full":  # both halves of a full-width table differ
            cos, sin = (torch.cat([c, c.flip(-1)], -1) for c in (cos, sin))
        x[f"cos{i}"], x[f"sin{i}"] = cos, sin
    if m.write == "hf":
        x[f"slots{i}"] = torch.randperm(m.block_size, generator=g)[: lead[-1]]
    else:
        x[f"slots{i}"] = _slots(m, total, g)
    x[f"ks{i}"], x[f"vs{i}"] = torch.tensor(0.25), torch.tensor(3.0)
    _cache(program, m, i, x, buffers, rand)


def _slots(m: Layer, total: int, g: torch.Generator) -> Tensor:
    room = m.blocks * m.block_size
    slots = torch.randperm(room, generator=g)[:total]
    if m.slots == "boundary" and total:
        slots = torch.arange(room - total, room).flip(0)
    elif m.slots == "padded":
        slots[1::3] = -1
        if m.write != "op":  # a negative index wraps: one row only, for it must be unique
            slots = torch.arange(total)
            slots[:1] = -1
    elif m.slots == "all padding" and m.write == "op":
        slots = torch.full((total,), -1)
    elif m.slots == "short":
        slots = slots[: total // 2]
    elif m.slots == "int32" and m.write == "op":
        slots = slots.int()
    elif m.slots == "strided":
        slots = torch.stack([slots, slots], -1)[:, 0]
    return slots


def _cache(
    program: Program, m: Layer, i: int, x: dict[str, Tensor], buffers: dict[str, Tensor], rand: Any
) -> None:
    b, n, h, d, e = m.blocks, m.block_size, m.kv_heads, m.dim, m.v_dim
    dtype = m.cache_dtype

    def keep(name: str, buffer: Tensor, view: Tensor | None = None) -> None:
        buffers[name] = buffer
        x[name] = buffer if view is None else view

    if m.cache == "nhd":
        keep(f"key{i}", rand(b, n, h, d, dtype=dtype))
        keep(f"value{i}", rand(b, n, h, e, dtype=dtype))
    elif m.cache == "hnd":
        keep(f"key{i}", rand(b, h, n, d, dtype=dtype))
        keep(f"value{i}", rand(b, h, n, e, dtype=dtype))
    elif m.cache == "packed":
        keep(f"cache{i}", rand(b, h, n, d + e, dtype=dtype))
    elif m.cache == "kv_first":
        keep(f"cache{i}", rand(2, b, n, h, d, dtype=dtype))
    elif m.cache == "block_first":
        keep(f"cache{i}", rand(b, 2, n, h, d, dtype=dtype))
    elif m.cache == "stack":
        if i == 0:
            keep("cache0", rand(len(program.layers), 2, b, n, h, d, dtype=dtype))
    elif m.cache == "halves":  # two inputs that share a storage
        whole = rand(2, b, n, h, d, dtype=dtype)
        keep(f"key{i}", whole, whole[0])
        keep(f"value{i}", whole, whole[1])
    else:  # pools: foreign block strides and storage offsets, bytes around that are not ours
        for name, size in (("key", d), ("value", e)):
            pool = rand(3 + b * (n * h * size + 5), dtype=dtype)
            strides = (n * h * size + 5 if n * b > 1 else 1, h * size, size, 1)
            keep(f"{name}{i}", pool, pool.as_strided((b, n, h, size), strides, 3))


def run_program(program: Program) -> Result:
    """Compare eager, fused and, where these differ, unfused.

    Raises :class:`SkipProgram` where eager cannot run the program.
    """
    result = Result()
    fn = compiled_function(program)
    eager = []
    for tokens in _calls(program):
        inputs = make_inputs(program, tokens)
        try:
            eager.append((fn(inputs.x), inputs))
        except Exception as error:
            raise SkipProgram(f"{type(error).__name__}: {error}") from error
    before = len(fusion.reports())
    try:
        fused = _compiled(program, fn, {}, result)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            _compiled(program, fn, {PASS: "off"}, Result())
        except Exception as same:
            if type(same) is type(error):
                raise SkipProgram(f"torch.compile: {type(error).__name__}: {error}") from same
        return Result("crash", text, structure=result.structure)
    sites = [s for r in fusion.reports()[before:] for s in r.sites if s.pass_name == PASS]
    result.statuses = [
        (s.status, s.operation, s.reasons[0].code if s.reasons else "") for s in sites
    ]
    difference = _difference(eager, fused)
    if difference is not None:
        unfused = _compiled(program, fn, {PASS: "off"}, Result())
        ours = _difference(unfused, fused)
        if ours is not None and (program.inner == "aot_eager"):
            result.finding, result.detail = "wrong bits", f"{ours} (eager: {difference})"
            return result
        if ours is None:
            difference = None
    reasons = [r for s in sites for r in s.reasons]
    codes = ["internal.error", "match.validation-bound", "match.validation"]
    for code in codes:
        found = [r for r in reasons if r.code == code]
        if found:
            result.finding, result.detail = code, str(found[0])
    if not sites:
        result.finding, result.detail = "silent", "no site in any graph"
    return result


def _calls(program: Program) -> list[int]:
    return [program.tokens] + ([] if program.again is None else [program.again])


def _compiled(
    program: Program, fn: Callable[..., Any], options: dict[str, Any], result: Result
) -> list[tuple[Any, Inputs]]:
    torch._dynamo.reset()
    base = {
        "inner": program.inner,
        "validate": program.validate,
        "validation_seconds": 20.0,
        "validation_mb": 1024.0,
        **options,
    }

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        result.structure += structure_of(gm)
        return compile_with_fusion(gm, example_inputs, options=base)

    compiled = torch.compile(fn, backend=backend, dynamic=program.dynamic == "dynamic" or None)
    out = []
    for tokens in _calls(program):
        inputs = make_inputs(program, tokens)
        if program.dynamic == "mark":
            for name, value in inputs.x.items():
                flat = program.batch == 0 or name.startswith("slots")
                if name.rstrip("01") in ("qkv", "q", "k", "v", "positions", "slots"):
                    dim = 0 if flat else 1
                    if value.shape[dim] > 1:
                        torch._dynamo.maybe_mark_dynamic(value, dim)
        out.append((compiled(inputs.x), inputs))
    return out


def structure_of(gm: torch.fx.GraphModule) -> str:
    """A digest of a graph's operators and edges: sizes and names left out."""
    index = {n: i for i, n in enumerate(gm.graph.nodes)}
    text = "".join(
        f"{n.op}{n.target if n.op != 'placeholder' else ''}{[index[a] for a in n.all_input_nodes]}"
        for n in gm.graph.nodes
    )
    return hashlib.sha1(text.encode()).hexdigest()[:12]


def _difference(left: list[Any], right: list[Any]) -> str | None:
    for call, ((a, ins), (b, others)) in enumerate(zip(left, right, strict=True)):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            if (why := _bits(one, other)) is not None:
                return f"call {call}, output {i}: {why}"
        for name in ins.buffers:
            if (why := _bits(ins.buffers[name], others.buffers[name])) is not None:
                return f"call {call}, buffer {name}: {why}"
    return None


def _bits(a: Tensor, b: Tensor) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    differ = a.contiguous().view(width) != b.contiguous().view(width)
    if a.dtype.is_floating_point:
        differ &= ~(a.isnan() & b.isnan())
    if not differ.any():
        return None
    return f"{int(differ.sum())} of {differ.numel()} elements differ"
