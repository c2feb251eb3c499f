"""Living in a compiler: modes of autograd, graph breaks, devices, zero tokens, recompiles.

The table of what is tested where stands in ``test_robustness.py``. Inductor is used where Inductor
is the point; everything else runs through ``inner="aot_eager"`` and is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.graph.capture import own_code
from fusion.layout import KVCacheLayout
from fusion.registry import REGISTRY
from tests.ops_cases import arguments
from tests.prologue_block import (
    NORMS,
    ROPES,
    WRITES,
    Block,
    Inputs,
    caches,
    functional,
    inputs,
    same_bits,
    variant,
)

FUSED = "qk_norm_rope_kv_cache"
EAGER = {"inner": "aot_eager"}


@pytest.fixture(autouse=True)
def _empty_registry() -> Any:
    REGISTRY.clear()
    yield
    REGISTRY.clear()


def prologue(**changes: Any) -> tuple[Callable[[Inputs], Any], Block]:
    """A function with code of its own, so that Dynamo's caches of the tests stay apart."""
    block = variant(**changes)
    return own_code(functional(block)), block


def compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    options = {**EAGER, **more.pop("options", {})}
    return torch.compile(function, backend="fusion", options=options, **more)


def compare(fn: Callable[..., Any], block: Block, seed: int = 0) -> None:
    """The compiled function against the eager block: outputs and every cache byte."""
    mine, theirs = inputs(block, seed), inputs(block, seed)
    for a, b in zip(fn(mine), block(theirs), strict=True):
        assert same_bits(a.detach(), b.detach())
    for a, b in zip(caches(mine), caches(theirs), strict=True):
        assert same_bits(a, b)


def statuses(name: str = FUSED) -> list[list[str]]:
    return [[s.status for s in r.sites if s.pass_name == name] for r in fusion.reports()]


# --- autograd --------------------------------------------------------------------------------

MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad enabled, nobody wants any": torch.enable_grad,
}


@pytest.mark.parametrize("name", sorted(MODES))
def test_inference_is_inference_however_it_is_said(name: str) -> None:
    fn, block = prologue()
    with MODES[name]():
        compare(compiled(fn, fullgraph=True), block)
    assert statuses() == [["fused"]]


def test_one_function_in_all_modes_one_after_the_other() -> None:
    """Tensors made inside inference mode are no ordinary tensors; each mode has its own graph."""
    fn, block = prologue()
    run = compiled(fn)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            compare(run, block)
    assert all(s == ["fused"] for s in statuses())


def test_weights_with_gradients_are_left_alone_only_while_gradients_are_on() -> None:
    fn, block = prologue(dtype=torch.float32)
    run = compiled(fn)

    def with_gradients() -> Inputs:
        x = inputs(block)
        x.q_weight.requires_grad_()
        return x

    with torch.enable_grad():
        x, y = with_gradients(), with_gradients()
        (got, _), (want, _) = run(x), block(y)
        got.sum().backward()
        want.sum().backward()
    assert x.q_weight.grad is not None
    torch.testing.assert_close(x.q_weight.grad, y.q_weight.grad)
    assert same_bits(x.cache, y.cache)
    assert same_bits(run(with_gradients())[0], got.detach())
    report_of_training, report_of_inference = fusion.reports()
    assert {s.status for s in report_of_training.sites if s.applicable} == {"off"}
    codes = {r.code for s in report_of_training.sites for r in s.reasons if s.applicable}
    assert codes == {"config.training"}
    assert [s.status for s in report_of_inference.sites if s.applicable] == ["fused"]


def test_required_says_that_a_graph_with_gradients_is_not_for_it() -> None:
    fn, block = prologue(dtype=torch.float32)
    x = inputs(block)
    x.q_weight.requires_grad_()
    with torch.enable_grad(), pytest.raises(Exception, match=r"(?s)is required.*config\.training"):
        compiled(fn, options={FUSED: "required"})(x)


# --- graph breaks, full graphs ---------------------------------------------------------------


@pytest.mark.parametrize("write", ["slots", "index_copy", "op"])
def test_a_break_between_rope_and_write(write: str) -> None:
    """Two graphs; the first still fuses norm and rope, the second names the break."""
    block = variant(write=write, layout=KVCacheLayout.NHD)
    put = WRITES[write]

    def broken(x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v = x.qkv.view(-1, 16, 32).split([8, 4, 4], dim=1)
        q, k = NORMS["late"](q, x.q_weight, 1e-6), NORMS["late"](k, x.k_weight, 1e-6)
        cos, sin = x.cos_sin[x.positions].chunk(2, -1)
        q, k = ROPES["chunk"](q, cos, sin, 32), ROPES["chunk"](k, cos, sin, 32)
        torch._dynamo.graph_break()
        put(block, x, k, v)
        return q, v

    x, y = inputs(block), inputs(block)
    for a, b in zip(compiled(broken)(x), broken(y), strict=True):
        assert same_bits(a, b)
    for a, b in zip(caches(x), caches(y), strict=True):
        assert same_bits(a, b)
    first, second = ([s for s in r.sites if s.pass_name == FUSED] for r in fusion.reports())
    assert [(s.status, s.operation) for s in first] == [("partial", "qk_norm_rope")]
    assert first[0].reasons[0].code == "match.no-cache-write"
    assert {(s.status, s.reasons[0].code) for s in second} == {("missed", "match.graph-break")}
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"(?s)is required.*match\.no-cache-write"):
        compiled(broken, options={FUSED: "required"})(inputs(block))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="graph_break"):
        compiled(broken, fullgraph=True)(inputs(block))


@pytest.mark.parametrize("write", sorted(WRITES))
def test_fullgraph(write: str) -> None:
    fn, block = prologue(write=write, layout=KVCacheLayout.NHD)
    compare(compiled(fn, fullgraph=True, options={FUSED: "required"}), block)
    assert statuses() == [["fused"]]


# --- devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", fusion.ops.OPERATIONS)
def test_operations_on_the_meta_device_give_shapes(op: str) -> None:
    a = arguments(op)
    call = getattr(fusion.ops, op)
    want = call(**a)
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in a.items()}
    got = call(**on_meta)
    pairs = [(got, want)] if isinstance(got, Tensor) else zip(got or (), want or (), strict=True)
    for g, w in pairs:
        assert g.device.type == "meta"
        assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride())


def test_a_model_on_the_meta_device_compiles() -> None:
    fn, block = prologue()
    x = inputs(block)
    for name, value in vars(x).items():
        if isinstance(value, Tensor):
            setattr(x, name, value.to("meta"))
    q, seen = compiled(fn)(x)
    assert (q.device.type, q.shape, seen.device.type) == ("meta", (5, 8, 32), "meta")
    (report,) = fusion.reports()
    assert all(s.status in ("fused", "refused") for s in report.sites if s.applicable)


@pytest.mark.parametrize("op", fusion.ops.OPERATIONS)
def test_arguments_on_two_devices_are_named(op: str) -> None:
    a = arguments(op)
    name = "query" if "query" in a else "value"
    a[name] = a[name].to("meta")
    with pytest.raises((ValueError, RuntimeError), match=r"(on (meta|cpu), .* is|meta.*cpu)"):
        getattr(fusion.ops, op)(**a)


@pytest.mark.parametrize("arch", ["xpu", "sm_50", "", "potato"])
def test_a_chip_that_no_kernel_knows_is_a_reason(arch: str) -> None:
    fn, block = prologue()
    report = fusion.explain(fn, inputs(block), target=arch)
    (site,) = [s for s in report.sites if s.pass_name == FUSED]
    if site.status != "fused":
        assert site.kernel is None
        codes = {r.code for c in site.candidates for r in c.reasons}
        assert "gate.arch" in codes
    else:  # nothing is known of it, so it is taken for something that runs plain torch
        assert site.kernel == "reference"


# --- zero tokens, recompiles, one graph for many sizes ---------------------------------------


def test_sizes_dtypes_and_zero_tokens_recompile_and_stay_right() -> None:
    """One function, called with whatever comes: every graph is fused and in the report once."""
    layout = KVCacheLayout.NHD
    fn = compiled(own_code(lambda x, b: b(x)))
    seen = []
    for tokens, dtype in (
        (5, torch.bfloat16), (0, torch.bfloat16), (7, torch.bfloat16), (1, torch.bfloat16),
        (9, torch.float32), (12, torch.bfloat16), (0, torch.float32), (7, torch.bfloat16),
    ):  # fmt: skip
        block = variant(layout=layout, tokens=tokens, dtype=dtype)
        compare(lambda x, block=block: fn(x, block), block, seed=tokens)
        seen.append(len(fusion.reports()))
    ids = [r.graphs[0].id for r in fusion.reports()]
    assert len(set(ids)) == len(ids) == seen[-1]
    assert seen[-1] == seen[-2]  # a size that was there before compiles nothing
    for report in fusion.reports():
        (site,) = [s for s in report.sites if s.pass_name == FUSED]
        if site.status != "fused":  # the graph for zero tokens
            assert (site.applicable, site.reasons[0].code) == (False, "scope.no-tokens")
    assert [s.status for r in fusion.reports() for s in r.sites if s.applicable].count("fused") >= 4


@pytest.mark.parametrize("write", sorted(WRITES))
def test_a_graph_for_zero_tokens_is_no_miss(write: str) -> None:
    fn, block = prologue(write=write, layout=KVCacheLayout.NHD, tokens=0)
    compare(compiled(fn, options={FUSED: "required"}), block)
    (report,) = fusion.reports()
    assert [s.reasons[0].code for s in report.sites if s.pass_name == FUSED] == ["scope.no-tokens"]
    assert not any(s.near_miss for s in report.sites)


def test_zero_tokens_through_inductor_poison_nothing() -> None:
    fn, block = prologue(dtype=torch.float32, tokens=0)
    run = torch.compile(fn, backend="fusion")
    x = inputs(block)
    before = x.cache.clone()
    q, _ = run(x)
    assert q.shape[0] == 0
    assert same_bits(x.cache, before)
    some = variant(dtype=torch.float32, tokens=5)
    mine, theirs = inputs(some), inputs(some)
    for a, b in zip(run(mine), some(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.cache, theirs.cache, rtol=1e-5, atol=1e-5)
    assert statuses() == [["missed"], ["fused"]]
