"""The prologue kernel under Triton's interpreter; run by ``test_triton_prologue.py`` in a process
of its own (``tests.triton_interpreter`` must be imported before triton)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import tests.triton_interpreter  # isort: skip  # noqa: F401  (sets TRITON_INTERPRET)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.backends import reference
from fusion.backends.triton import cache_write, prologue
from fusion.backends.triton.prologue_tiles import Tile
from tests.prologue_cases import Case, build, check, random_case, runner

EXAMPLES = int(os.environ.get("PROLOGUE_EXAMPLES", "40"))
change = dataclasses.replace


class Drawn:
    """A random.Random whose choices hypothesis makes, so that failures shrink."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def choice(self, items: Any) -> Any:
        return self._draw(st.sampled_from(list(items)))

    def randrange(self, stop: int) -> int:
        return self._draw(st.integers(0, stop - 1))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return random_case(Drawn(draw))


@settings(max_examples=EXAMPLES)
@given(cases(), st.booleans())
def test_whole_attribute_space(case: Case, static: bool) -> None:
    check(case, runner(case, static))


BASE = Case(dim=32, q_heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "case",
    [
        change(BASE, tokens=0),
        change(BASE, tokens=0, op="kv_cache_write"),
        change(BASE, tokens=1, padding=False),
        change(BASE, tokens=19, q_heads=2, kv_heads=1),
        change(BASE, fewer_slots=5),
        change(BASE, q_heads=20, kv_heads=4, return_key=True),
        change(BASE, layout="padded", cache="fn", scales=(0.25, 3.0), outliers=True),
        change(BASE, layout="padded", cache="fnuz", scales=(0.25, 3.0), outliers=True),
        change(BASE, layout="shuffle", cache="fn", rope_style="interleaved"),
        change(BASE, qkv="strided", dim_v=48),
        change(BASE, dim=96, rotary_dim=50, full_width=True, rope_style="interleaved"),
        change(BASE, eps_tensor=True, weight="f32", weight_k=None, norm_cast="early"),
        change(BASE, op="rope_kv_cache", rope_dtype="bf16", table="bf16"),
    ],
    ids=str,
)
def test_named_cases(case: Case) -> None:
    check(case, runner(case))


@pytest.mark.parametrize("tile", [Tile(1, 8, 4), Tile(8, 1, 4, 3), Tile(4, 2, 4, 1), Tile(2, 4, 4)])
def test_any_tile_gives_the_same_bits(tile: Tile) -> None:
    case = change(BASE, tokens=11, q_heads=6, kv_heads=3, op="rope_kv_cache")
    args, storage = build(case)
    kept = {"rope_style": "half", "rotary_dim": 32, "rope_dtype": torch.float32}
    a = prologue.Attributes(norm_cast="none", out_dtype=torch.bfloat16, **kept)
    tensors = {n: args.get(n) for n in prologue.TENSORS}
    q, _ = prologue.launch(tensors, a, tile=tile)
    want, expected = build(case)
    q_want, _ = reference.rope_kv_cache(**want)
    assert torch.equal(q, q_want)
    assert torch.equal(storage, expected)


def test_slots_of_the_issue() -> None:
    """Slot -1 writes nothing: not the last slot, not slot 0."""
    args, storage = build(change(BASE, op="kv_cache_write"))
    args["slot_mapping"] = torch.tensor([0, -1, 5, -1, -1])
    before = storage.clone()
    cache_write.kv_cache_write(**args)
    caches = args["key_cache"], args["value_cache"]
    for cache, rows in zip(caches, (args["key"], args["value"]), strict=True):
        assert torch.equal(cache[0, 0], rows[0])
        assert torch.equal(cache[0, 5], rows[2])
    # One token is 2 heads x (K and V) x 32 elements x 2 bytes.
    assert int((storage != before).sum()) <= 2 * 2 * 2 * 32 * 2
    rows = storage.view(8, 2, 16, 128)
    untouched = [i for i in range(16) if i not in (0, 5)]
    assert torch.equal(rows[:, :, untouched], before.view(8, 2, 16, 128)[:, :, untouched])


def test_offsets_beyond_32_bits() -> None:
    """A block stride and a token stride whose products pass 2**31 elements."""
    args, _ = build(change(BASE, op="kv_cache_write", padding=False))
    flat = torch.empty(
        2**31 + 4096, dtype=torch.bfloat16
    )  # pages that are not touched cost nothing
    big = flat.as_strided((2, 16, 2, 64), (2**31, 128, 64, 1))
    args |= {"key_cache": big[..., :32], "value_cache": big[..., 32:]}
    args["slot_mapping"] = torch.arange(16, 21)
    wide = flat.as_strided((5, 2, 32), (2**29 + 64, 32, 1), 3000)
    for t in range(5):
        wide[t] = args["key"][t]
    args["key"] = wide
    cache_write.kv_cache_write(**args)
    assert torch.equal(big[1, :5, :, :32], wide)
    assert torch.equal(big[1, :5, :, 32:], args["value"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_every_bf16_value_to_fp8(dtype: torch.dtype) -> None:
    """All 65536 bit patterns, NaN, infinities and subnormals included, as torch casts them."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).view(16, 32, 128)
    stored = []
    for write in (reference.kv_cache_write, cache_write.kv_cache_write):
        cache = torch.full((1, 16, 32, 256), 0x33, dtype=torch.uint8)
        view = cache.view(dtype)
        slots = torch.arange(16)
        write(x, x, view[..., :128], view[..., 128:], slots, None, torch.tensor(0.7))
        stored.append(cache)
    assert torch.equal(*stored)


def test_same_bits_again() -> None:
    first = None
    for _ in range(3):
        args, storage = build(change(BASE, tokens=9, return_key=True))
        q, k = prologue.qk_norm_rope_kv_cache(**args)
        now = (q, k, storage)
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def test_error_against_float64_is_that_of_the_unfused_chain() -> None:
    """Outlier channels of 1e3, bf16: not above 1.05 times the unfused error."""
    names = ("query", "key", "q_weight", "k_weight", "cos", "sin", "positions", "q_eps", "k_eps",
             "norm_cast", "rope_style", "rotary_dim", "rope_dtype", "out_dtype")  # fmt: skip
    for style, cast in (("half", "late"), ("interleaved", "early")):
        case = change(BASE, tokens=9, dim=64, outliers=True, rope_style=style, norm_cast=cast)
        args, _ = build(case)
        args = {n: args[n] for n in names}
        exact = {
            n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for n, x in args.items()
        } | {"rope_dtype": torch.float64, "out_dtype": torch.float64}
        want = reference.qk_norm_rope(**exact)
        plain = reference.qk_norm_rope(**args)
        fused = prologue.qk_norm_rope(**args)
        for f, p, w in zip(fused, plain, want, strict=True):
            assert (f.double() - w).norm() <= 1.05 * (p.double() - w).norm()


@pytest.mark.parametrize("given", ["numbers", "tensors"])
def test_each_side_has_its_own_epsilon(given: str) -> None:
    """Activations so small that epsilon decides; f32, where a wrong one cannot hide."""
    case = change(BASE, dtype="f32", weight="f32", out_dtype="f32", cache="f32", return_key=True)
    results = []
    for op in (prologue.qk_norm_rope_kv_cache, reference.qk_norm_rope_kv_cache):
        args, storage = build(case)
        args["query"], args["key"] = args["query"] * 1e-2, args["key"] * 1e-2
        if given == "numbers":
            args |= {"q_eps": 1e-3, "k_eps": 1e-1}
        else:
            args |= {"q_eps_tensor": torch.tensor(1e-3), "k_eps_tensor": torch.tensor(1e-1)}
        results.append((*op(**args), storage.view(torch.float32)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, equal_nan=True)
