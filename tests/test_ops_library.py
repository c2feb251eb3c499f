"""The operations as torch.library citizens: opcheck, autograd, fakes, plain errors, selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fusion.ops as ops
from fusion.backends import reference
from fusion.layout import KVCacheLayout
from fusion.selection import NoKernelError
from tests.ops_cases import BLOCK, DV, HK, HQ, D, arguments

OPS = list(ops.OPERATIONS)
WRITERS = [op for op in OPS if "cache" in op]


def call(op: str, a: dict[str, Any], **more: Any) -> Any:
    return getattr(ops, op)(**{**a, **more})


def variants(op: str) -> list[dict[str, Any]]:
    out = [arguments(op), arguments(op, tokens=0), arguments(op, tokens=1)]
    if op != "qk_norm_rope":
        one = torch.tensor(0.5)
        out.append({**arguments(op, dtype=torch.float8_e4m3fn), "k_scale": one, "v_scale": one * 3})
    if "rope" in op:
        out.append({**arguments(op, table=True), "out_dtype": torch.bfloat16})
    if op in ("rope_kv_cache", "qk_norm_rope_kv_cache"):
        out.append({**arguments(op), "return_key": True})
    return out


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck(op: str, dynamic: bool) -> None:
    for a in variants(op):
        tests = ["test_autograd_registration", "test_faketensor"]
        if a.get("key_cache", torch.empty(0)).dtype != torch.float8_e4m3fn:
            # These compare and clone arguments, which torch cannot do for fp8.
            tests.append("test_schema")
            tests.append("test_aot_dispatch_dynamic" if dynamic else "test_aot_dispatch_static")
        positional, keyword = ops.SIGNATURES[op].split(ops.SIGNATURES[op].bind((), a))
        torch.library.opcheck(ops.OVERLOADS[op], positional, keyword, test_utils=tests)


@pytest.mark.parametrize("op", OPS)
def test_op_is_the_reference_on_the_cpu(op: str) -> None:
    for a in variants(op):
        mine = {k: v.clone() if isinstance(v, Tensor) else v for k, v in a.items()}
        got = call(op, a)
        want = getattr(reference, op)(**mine)
        for name in ops.SIGNATURES[op].mutated:
            assert torch.equal(a[name].contiguous().view(torch.uint8),
                               mine[name].contiguous().view(torch.uint8))  # fmt: skip
        if op == "paged_attention":
            got, want = (got,), (want,)
        for x, y in zip(got or (), want or (), strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.parametrize("op", OPS)
def test_inference_only_says_so(op: str) -> None:
    a = arguments(op)
    name = "query" if "query" in a else "key"
    a[name] = a[name].detach().requires_grad_()
    with (
        torch.enable_grad(),
        pytest.raises(RuntimeError, match=f"inference only.*{name!r}"),
    ):
        call(op, a)
    with torch.no_grad():
        call(op, a)
    with torch.inference_mode():
        call(op, a)


def test_the_cache_write_is_recorded_as_an_in_place_change() -> None:
    a = arguments("kv_cache_write")
    before = a["key_cache"]._version, a["value_cache"]._version
    call("kv_cache_write", a)
    assert a["key_cache"]._version > before[0]
    assert a["value_cache"]._version > before[1]


@pytest.mark.parametrize("op", OPS)
def test_symbolic_tokens_add_no_guard(op: str) -> None:
    env = ShapeEnv()
    a = arguments(op, tokens=7)
    with FakeTensorMode(shape_env=env) as mode:
        tokens = None
        fakes: dict[str, Any] = {}
        for name, value in a.items():
            if not isinstance(value, Tensor):
                fakes[name] = value
                continue
            if value.dim() == 0 or value.shape[0] != 7:
                fakes[name] = mode.from_tensor(value)
                continue
            context = StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (value.dim() - 1)
            )
            fakes[name] = mode.from_tensor(value, symbolic_context=context)
            tokens = fakes[name].shape[0]
        guards = len(env.guards)
        out = call(op, fakes)
    assert isinstance(tokens, torch.SymInt)
    assert len(env.guards) == guards
    if op != "kv_cache_write":
        first = out if op == "paged_attention" else out[0]
        assert isinstance(first.shape[0], torch.SymInt)
        assert tuple(first.shape[1:]) == (HQ, DV if op == "paged_attention" else D)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("kv_cache_write", {"key": torch.zeros(5, HK * D)}, r"key is of shape \[5, 96\].*3-dim"),
    ("kv_cache_write", {"value": torch.zeros(4, HK, DV)}, "dimension 0 of value.*is 4.*must be 5"),
    ("kv_cache_write", {"key": torch.zeros(5, HK, D, dtype=torch.int32)}, "key is torch.int32"),
    ("kv_cache_write", {"slot_mapping": torch.zeros(6, dtype=torch.int64)}, "slot_mapping.*length"),
    ("kv_cache_write", {"slot_mapping": torch.zeros(5)}, "slot_mapping is torch.float32"),
    ("kv_cache_write", {"key_cache": torch.zeros(3, HK, BLOCK, D)}, "dimension 2 of key_cache"),
    ("kv_cache_write", {"key_cache": torch.zeros(3, BLOCK, D, HK).mT}, "last stride of key_cache"),
    ("kv_cache_write", {"key_cache": torch.zeros(2, BLOCK, HK, D)}, "as in value_cache"),
    ("kv_cache_write", {"value_cache": torch.zeros(1, BLOCK, HK, DV).expand(3, -1, -1, -1)},
     "value_cache is expanded"),
    ("kv_cache_write", {"key_cache": torch.zeros(3, BLOCK, HK, D).to(torch.float8_e5m2)},
     "key_cache is torch.float8_e5m2"),
    ("kv_cache_write", {"k_scale": torch.ones(3)}, r"k_scale is of shape \[3\]"),
    ("kv_cache_write", {"kv_layout": "HND"}, "kv_layout is 'HND'.*'NHD' or 'SHUFFLE'"),
    ("qk_norm_rope", {"rotary_dim": 15}, "rotary_dim is 15.*even"),
    ("qk_norm_rope", {"rotary_dim": 64}, "rotary_dim is 64.*D = 32"),
    ("qk_norm_rope", {"cos": torch.zeros(5, 12)}, "width of cos.*8 or 16"),
    ("qk_norm_rope", {"sin": torch.zeros(9, 8)}, "dimension 0 of sin.*positions"),
    ("qk_norm_rope", {"positions": torch.zeros(3, 5, dtype=torch.int64)}, "positions is of shape"),
    ("qk_norm_rope", {"q_weight": torch.zeros(HQ * D)}, "q_weight.*per head"),
    ("qk_norm_rope", {"k_eps_tensor": torch.zeros(1)}, "k_eps_tensor.*0-dim"),
    ("qk_norm_rope", {"rope_style": "neox"}, "'neox'.*'half' or 'interleaved'"),
    ("qk_norm_rope", {"norm_cast": "mid"}, "norm_cast is 'mid'"),
    ("rope_kv_cache", {"key": torch.zeros(5, HK, D // 2)}, "dimension 2 of key.*as in query"),
    ("rope_kv_cache", {"rope_dtype": torch.int32}, "rope_dtype is torch.int32"),
    ("paged_attention", {"query": torch.zeros(5, 4, D)}, "a multiple of the 3 KV heads"),
    ("paged_attention", {"query_start_loc": torch.zeros(2, dtype=torch.int32)}, "plus one"),
    ("paged_attention", {"sinks": torch.zeros(4)}, "dimension 0 of sinks"),
    ("paged_attention", {"softcap": -1.0}, "softcap is -1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "message"), BAD)
def test_errors_name_the_argument_what_it_is_and_what_it_must_be(
    op: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(op, {**arguments(op), **change})


def test_the_same_words_while_tracing() -> None:
    a = {**arguments("kv_cache_write"), "value": torch.zeros(4, HK, DV)}
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match="dimension 0 of value"),
    ):
        call("kv_cache_write", a)


@pytest.mark.parametrize("op", WRITERS)
def test_shuffled_caches(op: str) -> None:
    if op == "paged_attention":
        a = arguments(op)
    a = arguments(op, layout=KVCacheLayout.SHUFFLE)
    with pytest.raises(ValueError, match="key_cache"):
        call(op, a)
    call(op, a, kv_layout="SHUFFLE")


@pytest.mark.parametrize("op", OPS)
def test_unknown_kernel_names_those_that_exist(op: str) -> None:
    call(op, arguments(op), kernel="reference")
    with pytest.raises(NoKernelError, match=r"no kernel named 'refrence'.*reference"):
        call(op, arguments(op), kernel="refrence")
