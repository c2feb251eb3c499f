"""The adapters of AITER's Triton operations against a real source tree, under the interpreter.

Run with ``make test-aiter-source AITER_SRC=/path/to/aiter``. The interpreter has no bfloat16
arithmetic, so the calls are float16 and float32, which the adapters take as they are; the gate,
which is stricter, is asked in tests/test_aiter_gate.py.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.backends import reference
from fusion.backends.aiter import attention, contract, probe, rope, runtime
from fusion.reason import Reason
from fusion.target import Target
from tests.aiter_cases import G0, build, forget_aiter, rows_with_slot
from tests.aiter_source import real
from tests.test_aiter_numbers import attention_args

pytestmark = pytest.mark.skipif(bool(real.WHY_NOT), reason=real.WHY_NOT or "-")


@pytest.fixture(scope="module", autouse=True)
def _tree() -> Iterator[None]:
    if real.WHY_NOT:
        yield
        return
    forget_aiter()
    with real.tree(), runtime.assume(Target.parse(real.ARCH, aiter=real.release())):
        yield
    forget_aiter()


def figures(record_property: Any, name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error, printed (``-s``) and kept in the report."""
    assert got.shape == want.shape
    error = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    assert error == error, f"{name}: NaN"
    record_property(name, error)
    print(f"{name}: max error {error:.2e}")
    return error


@pytest.mark.parametrize("function", contract.FUNCTIONS.values(), ids=contract.FUNCTIONS)
def test_the_tree_has_the_known_signatures(function: contract.Function) -> None:
    """Read from the source text, so that the HIP operations are covered as well."""
    text = (Path(real.SOURCE) / (function.module.replace(".", "/") + ".py")).read_text()
    found = next(
        n
        for n in ast.parse(text).body
        if isinstance(n, ast.FunctionDef) and n.name == function.name
    )
    names = [a.arg for a in found.args.args]
    required = len(names) - len(found.args.defaults)
    parameters = [
        inspect.Parameter(
            n,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if i < required else None,
        )
        for i, n in enumerate(names)
    ]
    assert not found.args.kwonlyargs
    assert function.check(inspect.Signature(parameters)) is None


@pytest.mark.parametrize("function", [contract.ROPE, contract.UNIFIED, contract.FLASH],
                         ids=lambda f: f.name)  # fmt: skip
def test_the_probe_accepts_the_tree(function: contract.Function) -> None:
    found = probe.function(function)
    assert not isinstance(found, Reason), str(found)


CAUSAL: dict[str, dict[str, Any]] = {
    "mixed": {"rows": (3, 5, 0, 1)},
    "decode": {"rows": (1, 1, 0, 1)},
    "rows of no sequence": {"rows": (2, 1, 0, 3), "tail": 2},
    "window": {"rows": (3, 5, 0, 1), "window": (20, -1)},
    "softcap and sinks": {"rows": (3, 2, 0, 4), "softcap": 5.0, "sinks": torch.linspace(-1, 2, 8)},
    "long": {"lens": (530, 5, 0, 80), "rows": (3, 3, 0, 3)},
    "page 32, head size 80": {"rows": (3, 3, 0, 3), "page": 32, "dim": 80},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "f32"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str, dtype: torch.dtype, record_property: Any) -> None:
    """unified_attention; slots without a key are NaN and pages left of the window are gone."""
    args = attention_args(dtype=dtype, **CAUSAL[name])
    got, want = attention.paged_attention(**args), reference.paged_attention(**args)
    error = figures(record_property, f"unified {name} {dtype}", got, want)
    assert error <= (2e-3 if dtype == torch.float16 else 2e-5)


def test_causal_fp8(record_property: Any) -> None:
    """A 16-bit query over an fp8 cache, each half with its own scale."""
    args = attention_args(
        dtype=torch.float16, cache=torch.float8_e4m3fnuz, rows=(3, 3, 0, 3),
        k_scale=torch.tensor(0.25), v_scale=torch.tensor(3.0),
    )  # fmt: skip
    got, want = attention.paged_attention(**args), reference.paged_attention(**args)
    error = figures(record_property, "unified fp8", got, want)
    assert error <= 2e-3 * float(want.abs().max())


def test_why_a_page_of_the_size_of_the_tile_is_refused() -> None:
    """Its loads are not masked past the last key. When this fails, the gate may be relaxed."""
    got = attention.paged_attention(
        **attention_args(dtype=torch.float16, page=64, rows=(3, 3, 0, 3))
    )
    assert torch.isnan(got).any()


NON_CAUSAL: dict[str, dict[str, Any]] = {
    "block": {},
    "one row": {"rows": (1, 1, 1, 1)},
    "window left": {"window": (20, -1)},
    "window both": {"window": (20, 4)},
    "window (w - 1, 0)": {"window": (7, 0)},
    "ragged": {"rows": (4, 1, 0, 3), "tail": 4},
    "ragged with a window": {"rows": (4, 1, 0, 3), "tail": 4, "window": (9, 2)},
    "page 24, head size 96": {"page": 24, "dim": 96},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "f32"])
@pytest.mark.parametrize("name", NON_CAUSAL)
def test_non_causal(name: str, dtype: torch.dtype, record_property: Any) -> None:
    """flash_attn_with_kvcache over packed views."""
    args = attention_args(dtype=dtype, causal=False, **NON_CAUSAL[name])
    got, want = attention.paged_attention(**args), reference.paged_attention(**args)
    error = figures(record_property, f"flash {name} {dtype}", got, want)
    assert error <= (2e-3 if dtype == torch.float16 else 2e-5)


ROPE: dict[str, dict[str, Any]] = {
    "table": {}, "per token": {"positions": None}, "interleaved": {"rope_style": "interleaved"},
    "full width": {"full_width": True}, "fewer slots": {"fewer_slots": 2, "seed": 3},
    "strided": {"qkv": "strided", "layout": "nhd"},
    "int32": {"positions": "int32", "slots": "int32"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", ROPE)
def test_rope(name: str, dtype: str, record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """fused_qk_rope_reshape_and_cache; AITER's refusal of other caches than bf16 is lifted."""
    import aiter.ops.triton.fusions.fused_kv_cache as module

    torch_dtype = {"f16": torch.float16, "f32": torch.float32}[dtype]
    monkeypatch.setattr(module, "e4m3_dtype", torch_dtype)
    case = dataclasses.replace(
        G0, op="rope_kv_cache", dim=64, dtype=dtype, out_dtype=dtype, rope_dtype=dtype,
        table=dtype, cache=dtype, return_key=True, **ROPE[name],
    )  # fmt: skip
    args, storage = build(case)
    want_args, _ = build(case)
    q, k = rope.rope_kv_cache(**args)
    q_want, k_want = reference.rope_kv_cache(**want_args)
    rows = rows_with_slot(args)
    limit = 4e-3 if dtype == "f16" else 0.0
    assert figures(record_property, f"rope q {name} {dtype}", q, q_want) <= limit
    assert figures(record_property, f"rope k {name} {dtype}", k[rows], k_want[rows]) <= limit
    assert not k[~rows].any()
    expected_args, expected = build(case)
    write = ("value", "key_cache", "value_cache", "slot_mapping")
    reference.kv_cache_write(k, **{n: expected_args[n] for n in write})
    assert torch.equal(storage, expected), "the cache is not a write of the k that was returned"
