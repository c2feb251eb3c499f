"""Make a program that shows a finding simpler, one field at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from tests.fuzz.program import Layer, Program
from tests.fuzz.run import Result, SkipProgram, run_program


def shrink(program: Program, result: Result, budget: int = 60) -> tuple[Program, Result]:
    """The simplest program found that gives the same kind of finding."""
    progress = True
    while progress and budget > 0:
        progress = False
        for smaller in _simpler(program):
            budget -= 1
            if budget < 0:
                break
            try:
                other = run_program(smaller)
            except (SkipProgram, Exception):
                continue
            if other.finding == result.finding:
                program, result, progress = smaller, other, True
                break
    return program, result


def _simpler(program: Program) -> Iterator[Program]:
    if len(program.layers) > 1:
        for layer in program.layers:
            yield replace(program, layers=(layer,))
    plain = Program()
    for f in fields(Program):
        if f.name not in ("layers", "validate") and getattr(program, f.name) != getattr(
            plain, f.name
        ):
            yield replace(program, **{f.name: getattr(plain, f.name)})
    for i, layer in enumerate(program.layers):
        for simple in _simpler_layer(layer, program.dtype):
            layers = list(program.layers)
            layers[i] = simple
            yield replace(program, layers=tuple(layers))


def _simpler_layer(layer: Layer, dtype: str) -> Iterator[Layer]:
    for extra in layer.extras:
        yield replace(layer, extras=tuple(e for e in layer.extras if e != extra))
    plain = Layer(weight_dtype=dtype, table_dtype=dtype, cache_dtype=dtype)
    if layer.v_dim != layer.dim:
        yield replace(layer, v_dim=layer.dim)
    if layer.rotary != layer.dim:
        yield replace(layer, rotary=layer.dim)
    elif layer.dim != plain.dim:
        yield replace(layer, dim=plain.dim, rotary=plain.dim, v_dim=plain.dim)
    for f in fields(Layer):
        if f.name in ("extras", "dim", "rotary", "v_dim"):
            continue
        if getattr(layer, f.name) != getattr(plain, f.name):
            yield replace(layer, **{f.name: getattr(plain, f.name)})
