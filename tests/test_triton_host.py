"""The host side of the Triton kernels: what would be launched, told without launching anything.

Numbers are the interpreter's business (``test_triton_prologue.py``, in a process of its own);
here a stand-in takes the launch, so that the choices on the way to it can be looked at.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion.ops as ops
from fusion.backends.triton import cache_write, lowering, paged_attention, prologue
from fusion.backends.triton import prologue_tiles as tiles
from fusion.graph.lowerings import Decline
from fusion.kernel import TensorSpec
from fusion.target import Target
from tests.attention_probe import Problem
from tests.prologue_cases import Case, build
from tests.test_triton_paged_attention import call as attention_call
from tests.test_triton_prologue_lowering import HK, ROPE, D, generated, launches, tensors

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BF16 = torch.bfloat16

# --- prologue ------------------------------------------------------------------------------------


class Recorder:
    """In the place of the jitted kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.warmed: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launched.append((grid, args, constants))

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self.warmed.append(constants)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(prologue, "kernel", lambda static=False: recorder)
    return recorder


OPS = {
    "qk_norm_rope_kv_cache": prologue.qk_norm_rope_kv_cache,
    "rope_kv_cache": prologue.rope_kv_cache,
    "qk_norm_rope": prologue.qk_norm_rope,
    "kv_cache_write": cache_write.kv_cache_write,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_one_launch_with_outputs_of_the_right_form(kernel: Recorder, op: str, tokens: int) -> None:
    case = Case(op=op, tokens=tokens, out_dtype="f32")
    args, _ = build(case)
    result = OPS[op](**args)
    assert len(kernel.launched) == (1 if tokens else 0)
    if op != "kv_cache_write":
        q, k = result
        keys = tokens if op == "qk_norm_rope" else 0
        assert (q.shape, q.dtype) == ((tokens, 8, 64), torch.float32)
        assert (k.shape, k.dtype) == ((keys, 4, 64), torch.float32)
    else:
        assert result is None
    for grid, _, constants in kernel.launched:
        assert constants["NORM"] == ("norm" in op)
        assert constants["HQ"] == (0 if op == "kv_cache_write" else 8)
        assert grid[0] >= -(-tokens // constants["TT"])


def test_arguments_that_the_kernel_cannot_read_as_they_lie(kernel: Recorder) -> None:
    """fp8 caches go as bytes, heads with a step are copied, epsilons on the host become numbers."""
    case = Case(qkv="strided", cache="fn", scales=(0.5, 2.0), eps_tensor=True)
    args, _ = build(case)
    args["q_eps_tensor"] = torch.tensor(0.25)
    assert args["query"].stride(-1) == 2
    prologue.qk_norm_rope_kv_cache(**args)
    ((_, given, _),) = kernel.launched
    held = [x for x in given if isinstance(x, torch.Tensor)]
    caches = {args[n].data_ptr() for n in ("key_cache", "value_cache")}
    assert {x.dtype for x in held if x.data_ptr() in caches} == {torch.uint8}
    assert not any(x.dtype == FN for x in held)
    assert all(x.stride(-1) == 1 for x in held if x.dim() == 3)
    assert 0.25 in [x for x in given if isinstance(x, float)]


def test_views_of_one_buffer_are_told_by_their_offset(kernel: Recorder) -> None:
    args, _ = build(Case())
    a = prologue.Attributes(True, rotary_dim=64, rope_dtype=torch.float32, out_dtype=torch.float32)
    prologue.launch(args, a, 1e-6, 1e-6, static=True)
    ((_, given, constants),) = kernel.launched
    qkv = args["query"]._base
    assert sum(x is qkv for x in given) == 3
    assert [constants[n] for n in ("q_off", "k_off", "v_off")] == [0, 512, 768]
    assert constants["vc_off"] - constants["kc_off"] == 64


@pytest.mark.parametrize("op", OPS)
def test_every_tile_that_a_call_may_use_is_warmed(kernel: Recorder, op: str) -> None:
    case = Case(op=op, q_heads=32, kv_heads=8, dim=128)
    args, _ = build(case)
    names = {n: args.get(n) for n in prologue.TENSORS}
    attributes = cache_write.attributes(BF16, "NHD")
    assert prologue.warmup(names, attributes) == len(kernel.warmed) > 0
    assert not kernel.launched
    shape = ("HH", "TT", "STREAM", "num_warps")
    warmed = {tuple(c[n] for n in shape) for c in kernel.warmed}
    assert len(warmed) == len(kernel.warmed)
    for tokens in (1, 7, 128, 5000):
        args, _ = build(dataclasses.replace(case, tokens=min(tokens, 128)))
        tile = tiles.choose(names["query"].shape[1] if names["query"] is not None else 0, 8, 128,
                            tokens, hints=prologue.hints())  # fmt: skip
        assert (tile.heads, tile.tokens, tile.stream, tile.warps) in warmed


def test_the_launch_is_on_the_device_of_its_tensors() -> None:
    with FakeTensorMode():
        there = torch.empty(3, device="cuda")
    assert isinstance(prologue._on_device_of(there), torch.cuda.device)
    with prologue._on_device_of(torch.empty(3)) as nothing:
        assert nothing is None


# --- generated code ------------------------------------------------------------------------------


def test_a_prologue_without_a_cache() -> None:
    pytest.importorskip("triton", reason="the kernel's source is copied into generated code")

    def fn(q: Any, k: Any, w: Any, cos: Any, sin: Any, positions: Any) -> Any:
        q, k = ops.qk_norm_rope(q, k, w, w, cos, sin, positions, q_eps=1e-6, k_eps=1e-6, **ROPE)
        return q + 1, k + 1

    q, k = torch.randn(7, 8, D).bfloat16(), torch.randn(7, HK, D).bfloat16()
    table = torch.randn(40, D // 2)
    (arguments,) = launches(
        generated(fn, [q, k, torch.ones(D).bfloat16(), table, table * 2, torch.arange(7)])
    )
    assert arguments[8].startswith("buf") and arguments[9].startswith("buf")
    assert arguments[10:12] == ["-1", "-1"]


def test_no_tokens_no_launch() -> None:
    pytest.importorskip("triton", reason="the kernel's source is copied into generated code")

    def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
        nhd = cache.transpose(1, 2)
        ops.kv_cache_write(key, value, nhd[..., :D], nhd[..., D:], slots)

    rows = torch.randn(0, HK, D).bfloat16()
    assert launches(generated(write, [rows, rows, *tensors(0)[-2:]])) == []


def test_strides_that_are_symbols_are_arguments_of_the_launch() -> None:
    """Rows that lie head by head: from one head to the next it is as far as there are tokens."""
    pytest.importorskip("triton", reason="the kernel's source is copied into generated code")

    def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
        nhd = cache.transpose(1, 2)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        ops.kv_cache_write(key, value, nhd[..., :D], nhd[..., D:], slots)

    rows = torch.randn(HK, 7, D).bfloat16()
    code = generated(write, [rows, rows + 1, *tensors(7)[-2:]], dynamic=True)
    (arguments,) = launches(code)
    assert "prologue_kernel_static" not in code
    assert sum(bool(re.fullmatch(rf"{D}\*s\d+", a)) for a in arguments) == 2


@pytest.mark.parametrize(
    ("arch", "dtype", "declined"),
    [
        ("sm_80", FN, True), ("sm_90", FN, False), ("sm_90", FNUZ, True), ("sm_80", BF16, False),
        ("gfx942", FNUZ, False), ("gfx942", FN, False),
    ],
)  # fmt: skip
def test_fp8_that_a_chip_has_no_pointer_to_is_declined(
    arch: str, dtype: torch.dtype, declined: bool
) -> None:
    cache = mock.Mock()
    cache.get_device.return_value = torch.device("cuda", 0)
    cache.get_dtype.return_value = dtype
    arguments = {"key_cache": cache, "value_cache": None}
    with mock.patch.object(Target, "current", return_value=Target.parse(arch)):
        if declined:
            with pytest.raises(Decline, match=f"no pointer to {dtype} on {arch}"):
                lowering._check(arguments, torch.device("cuda", 0))
        else:
            lowering._check(arguments, torch.device("cuda", 0))


def test_a_cache_that_is_no_view_of_a_buffer_is_declined() -> None:
    """A copy would be written in its place."""
    pytest.importorskip("triton", reason="the kernel's source is copied into generated code")

    def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
        ops.kv_cache_write(key, value, cache, cache + 1, slots)

    rows = torch.randn(7, HK, D).bfloat16()
    with (
        mock.patch.object(lowering.ir, "writable", return_value=None),
        pytest.raises(Exception, match="key_cache is not a strided view of a buffer"),
    ):
        generated(write, [rows, rows, torch.zeros(8, 16, HK, D).bfloat16(), torch.arange(7)])


# --- paged attention -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "native"),
    [
        ("sm_80", ()), ("sm_89", (FN,)), ("sm_90", (FN,)), ("gfx942", (FNUZ,)), ("gfx950", (FN,)),
        ("gfx90a", ()), ("cpu", ()),
    ],
)  # fmt: skip
def test_which_fp8_a_chip_converts_itself(arch: str, native: tuple[torch.dtype, ...]) -> None:
    target = Target.parse(arch)
    assert tuple(d for d in (FN, FNUZ) if paged_attention.native_fp8(d, target)) == native


@pytest.mark.parametrize(
    ("query", "cache", "compute"),
    [
        (BF16, BF16, BF16), (BF16, FN, BF16), (torch.float16, FNUZ, torch.float16),
        (torch.float16, BF16, torch.float32), (BF16, torch.float32, torch.float32),
    ],
)  # fmt: skip
def test_products_are_computed_in_a_dtype_that_holds_both(
    query: torch.dtype, cache: torch.dtype, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert paged_attention.compute_dtype(query, cache) == compute


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What paged attention launches, on an H200, as (positional, keyword) arguments."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def launch(geo: Any, query: Any, *rest: Any, **how: Any) -> Any:
        seen.append(((geo, query, *rest), how))
        return query.new_ones(query.shape[0], query.shape[1], rest[1].shape[3])

    name = "fusion.backends.triton.paged_attention_launch"
    stand_in = ModuleType(name)
    stand_in.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(Target, "current", lambda: Target.parse("sm_90", triton="3.6.0"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return seen


def attend(problem: Problem, **change: Any) -> torch.Tensor:
    positional, keywords = problem.arguments()
    if change:
        at = {"query": 0, "block_table": 3}
        for name, value in change.items():
            positional[at[name]] = value(positional[at[name]])
    return paged_attention.paged_attention(*positional, **keywords)  # type: ignore[arg-type]


def test_what_paged_attention_launches(launched: list[Any]) -> None:
    problem = Problem(query_dtype=BF16, scale=-0.5, window_left=1 << 40, window_right=4,
                      sinks=True, k_scale=0.5, v_scale=0.5)  # fmt: skip
    out = attend(problem)
    assert (out.shape, out.dtype) == ((2, 4, 32), BF16)
    (((_, query, *_), how),) = launched
    assert torch.equal(query, -problem.values["query"])  # the kernel wants a positive scale
    assert how["scale"] == 0.5
    assert (how["window_left"], how["window_right"]) == (2**30, 4)  # 32-bit arithmetic
    assert how["k_scale"] is None and how["v_scale"] is None  # only fp8 caches are scaled
    assert (how["fp8"], how["compute"], how["precision"]) == ("", BF16, "tf32x3")
    assert how["overlap"]
    assert how["max_seq_len"] == problem.arguments()[0][7]


@pytest.mark.parametrize(
    ("arch", "overlaps"), [("sm_80", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)]
)
def test_where_kernels_overlap(arch: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert paged_attention.overlaps(Target.parse(arch)) is overlaps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keys", [16, 8192])
def test_a_kernel_that_is_launched_early_waits(
    overlap: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early launch without the wait in the kernel would read what is not there yet."""
    launch = pytest.importorskip("fusion.backends.triton.paged_attention_launch")
    seen: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: seen.append(options)

    monkeypatch.setattr(launch, "paged_attention_kernel", Kernel())
    monkeypatch.setattr(launch, "merge_kernel", Kernel())
    monkeypatch.setattr(paged_attention, "overlaps", lambda target: overlap)
    monkeypatch.setattr(Target, "current", lambda: Target.parse("sm_90", triton="3.6.0"))
    positional, keywords = Problem(query_dtype=BF16).arguments()
    positional[7] = keys  # max_seq_len decides whether the keys are split
    paged_attention.paged_attention(*positional, **keywords)
    assert len(seen) == (2 if keys > 16 else 1)
    for options in seen:
        assert options["OVERLAP"] is options.get("launch_pdl", False) is overlap


@pytest.mark.parametrize(("dtype", "fp8"), [(FN, ""), (FNUZ, "fnuz")])
def test_bytes_are_decoded_where_the_chip_does_not(
    launched: list[Any], dtype: torch.dtype, fp8: str
) -> None:
    attend(Problem(query_dtype=BF16, cache_dtype=dtype, k_scale=0.5, v_scale=2.0))
    (((_, _, key, value, *_), how),) = launched
    assert how["fp8"] == fp8
    assert key.dtype == value.dtype == (torch.uint8 if fp8 else dtype)
    assert float(how["k_scale"]) == 0.5


def test_strides_of_the_shuffled_layout(launched: list[Any]) -> None:
    attend(Problem(query_dtype=BF16, layout="SHUFFLE", dim=64))
    (((_, _, key, value, *_), how),) = launched
    assert (how["kv_heads"], how["page"], how["x"]) == (2, 16, 8)
    assert how["k_strides"] == [key.stride(i) for i in (0, 3, 1, 2)]
    assert how["v_strides"] == [value.stride(i) for i in (0, 2, 1, 3)]


def test_rows_with_a_step_are_copied(launched: list[Any]) -> None:
    def spread(x: Any) -> Any:
        return torch.stack((x, x), -1)[..., 0]

    problem = Problem(query_dtype=BF16)
    attend(problem, query=spread, block_table=spread)
    (((_, query, _, _, table, *_), _),) = launched
    assert torch.equal(query, problem.values["query"])
    assert query.stride(-1) == table.stride(-1) == 1


def test_nothing_to_attend_launches_nothing(launched: list[Any]) -> None:
    out = attend(Problem(q_lens=(0,), kv_lens=(4,)))
    assert out.shape == (0, 4, 32)
    assert not launched


def test_a_symbolic_size_leaves_the_tiles_to_the_run() -> None:
    call = attention_call(Problem(query_dtype=BF16))
    describe = paged_attention.KERNEL.describe
    assert describe is not None
    assert "keys" in describe(call)["tiles"]
    rest = {**call.attributes, "max_seq_len": None}
    told = describe(dataclasses.replace(call, attributes=rest))
    assert told == {"tiles": "chosen at run time: a size is symbolic"}
    assert isinstance(call.need("query"), TensorSpec)
