"""A machine with a GPU still runs CPU models: a kernel is chosen for where the tensors are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusion
from fusion import target as target_module
from fusion.ops import describe_call
from fusion.target import Target
from tests.ops_cases import arguments
from tests.prologue_block import Block, caches, functional, inputs, same_bits

GPU = Target("nvidia", "sm_90", "probed", (("torch", "2.13.0"), ("triton", "3.9.0")))


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a GPU had been found when this process probed its machine."""
    monkeypatch.setattr(target_module, "_probe", lambda: GPU)
    torch._dynamo.reset()
    fusion.reports(clear=True)
    yield
    torch._dynamo.reset()
    fusion.reports(clear=True)


def test_the_cpu_of_a_gpu_machine_is_a_cpu() -> None:
    seen = GPU.for_device("cpu")
    assert (seen.vendor, seen.arch, seen.origin) == ("cpu", "cpu", "probed")
    assert seen.version_text("triton") == "3.9.0", "versions are the machine's"
    assert GPU.for_device("cuda") is GPU
    assert GPU.for_device("meta") is GPU, "tensors without data may stand for any device"
    assert GPU.for_device("mps").vendor == "other"


def test_a_described_machine_stays_what_was_asked_about() -> None:
    described = Target.parse("gfx942", aiter="0.1.20")
    assert described.for_device("cpu") is described


def test_the_gate_of_a_call_on_cpu_tensors(gpu_machine: None) -> None:
    call = describe_call("kv_cache_write", arguments("kv_cache_write"))
    assert call.target.vendor == "cpu"
    assert call.target.version_text("triton") == "3.9.0"


def test_a_cpu_model_compiles_and_runs(gpu_machine: None) -> None:
    block = Block()
    want, got = inputs(block), inputs(block)
    expected = functional(block)(want)
    options = {"inner": "aot_eager", "qk_norm_rope_kv_cache": "required"}
    compiled = torch.compile(functional(block), backend="fusion", options=options)
    with torch.no_grad():
        result = compiled(got)
    for mine, other in zip(result, expected, strict=True):
        assert same_bits(mine, other)
    for mine, other in zip(caches(got), caches(want), strict=True):
        assert same_bits(mine, other)
    (site,) = [
        s
        for g in fusion.reports()[-1].graphs
        for s in g.sites
        if s.pass_name == "qk_norm_rope_kv_cache"
    ]
    assert (site.status, site.kernel) == ("fused", "reference")


def test_explain_for_this_machine_by_name_asks_about_its_gpu(gpu_machine: None) -> None:
    block = Block()
    named = fusion.explain(functional(block), inputs(block), target="sm_90")
    plain = fusion.explain(functional(block), inputs(block))
    kernels = [
        s.kernel
        for report in (named, plain)
        for g in report.graphs
        for s in g.sites
        if s.pass_name == "qk_norm_rope_kv_cache"
    ]
    assert kernels == ["triton", "reference"]
