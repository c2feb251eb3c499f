"""Threads, configurations, other people's passes and CUDA graphs in one process.

The table of what is tested where stands in ``test_robustness.py``.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.graph.capture import own_code
from fusion.layout import KVCacheLayout, split_kv_cache
from tests.ops_cases import arguments
from tests.prologue_block import (
    Inputs,
    caches,
    inputs,
    run,
    same_bits,
    variant,
)
from tests.test_robustness_compile import (
    FUSED,
    _empty_registry,
    compiled,
    statuses,
)
from tests.toy_passes import DropBias, SinToCos, use_passes

__all__ = ["_empty_registry"]


# --- threads, configurations -----------------------------------------------------------------


def test_threads_compile_different_models_at_once() -> None:
    """As many sites as a model has layers tell the reports apart; one model must not fuse."""
    kinds: list[dict[str, Any]] = [
        {},
        {"norm": "early", "rope": "rotate_half", "layout": KVCacheLayout.NHD, "write": "slots"},
        {"norm": "none", "dtype": torch.float32, "layout": KVCacheLayout.BLOCK_FIRST},
        {
            "rope": "interleaved",
            "rotary": 16,
            "write": "index_copy",
            "layout": KVCacheLayout.KV_FIRST,
        },
        {"hook": lambda name, q, k: (q, k.clamp(-1, 1)) if name == "rope" else (q, k)},
    ]
    errors: list[BaseException] = []
    start = threading.Barrier(len(kinds))

    def work(layers: int, kind: dict[str, Any]) -> None:
        try:
            block = variant(**kind)

            def model(*xs: Inputs) -> list[Any]:
                return [block(x) for x in xs]

            with torch.no_grad():
                mine = [inputs(block, i) for i in range(layers)]
                theirs = [inputs(block, i) for i in range(layers)]
                start.wait()
                got = compiled(own_code(model))(*mine)
                for a, b in zip(got, model(*theirs), strict=True):
                    assert all(same_bits(p, q) for p, q in zip(a, b, strict=True))
                for x, y in zip(mine, theirs, strict=True):
                    assert all(same_bits(p, q) for p, q in zip(caches(x), caches(y), strict=True))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(layers, kind)) for layers, kind in enumerate(kinds, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(statuses(), key=len) == [
        ["fused"],
        ["fused"] * 2,
        ["fused"] * 3,
        ["fused"] * 4,
        ["partial"] * 5,
    ]
    operations = {len(r.sites): {s.operation for s in r.sites if s.applicable} for r in ours()}
    assert operations[3] == {"rope_kv_cache"}
    assert operations[5] == {"qk_norm_rope"}


def ours() -> list[fusion.Report]:
    """The reports with the sites of the prologue pass alone."""
    from dataclasses import replace

    found = []
    for report in fusion.reports():
        (graph,) = report.graphs
        sites = tuple(s for s in graph.sites if s.pass_name == FUSED)
        found.append(replace(report, graphs=(replace(graph, sites=sites),)))
    return found


def test_threads_compile_through_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    use_passes(monkeypatch, DropBias)
    errors: list[BaseException] = []

    def work(layers: int) -> None:
        try:
            with torch.no_grad():
                model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
                x = torch.randn(3, 4)
                y = torch.compile(model, backend="fusion")(x)
                for layer in model:
                    x = x @ layer.weight.T
                torch.testing.assert_close(y, x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(map(len, statuses("drop_bias"))) == [1, 2, 3]


def test_two_configurations_of_one_function_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its own code: neither is answered from the other's."""
    use_passes(monkeypatch, SinToCos)

    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    x = torch.randn(3)
    on, off = compiled(function), compiled(function, options={"sin_to_cos": "off"})
    for _ in range(3):
        assert torch.equal(on(x), x.cos() * 2)
        assert torch.equal(off(x), x.sin() * 2)
    assert statuses("sin_to_cos") == [["fused"], ["off"]]
    modes = [dict(r.config["passes"]) for r in fusion.reports()]
    assert modes == [{}, {"sin_to_cos": "off"}]


def test_a_refusal_under_one_configuration_is_not_remembered_for_another() -> None:
    """Validations are shared by equal configurations only."""
    block = variant()
    assert run(block, options={"validation_seconds": 0.0}).site.reasons[0].code == (
        "match.validation-bound"
    )
    assert run(block).site.status == "fused"
    assert run(block, options={"validation_seconds": 0.0}).site.status == "refused"


# --- other people's passes -------------------------------------------------------------------


class Recorder:
    """Somebody's pass of any hook: it counts its calls and adds no change."""

    def __init__(self, key: str | None = None) -> None:
        self.calls = 0
        self.key = key

    def __call__(self, *graph: Any) -> None:
        self.calls += 1

    def uuid(self) -> str | None:
        return self.key


HOOKS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_post_pass")


def linear() -> tuple[torch.nn.Module, Tensor]:
    return torch.nn.Linear(4, 4), torch.randn(3, 4)


def unbiased(model: Any, x: Tensor) -> Tensor:
    return x @ model.weight.T


@pytest.mark.parametrize("where", ["configuration", "options", "list"])
def test_every_custom_pass_that_is_there_runs_and_stays(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    use_passes(monkeypatch, DropBias)
    recorders = {hook: Recorder() for hook in HOOKS}
    model, x = linear()
    installed: dict[str, Any] = dict(recorders)
    if where == "list":
        monkeypatch.setattr("fusion.graph.compat.is_graph_pass", lambda v: hasattr(v, "uuid"))
        installed[HOOKS[0]] = [recorders[HOOKS[0]]]
    before = {hook: getattr(config, hook) for hook in HOOKS}
    if where == "options":
        # Inductor checks the types of options: what is no pass of its own is told to it by class.
        CustomGraphPass.register(Recorder)
        y = torch.compile(model, backend="fusion", options={"inductor": installed})(x)
    else:
        with config.patch(installed):
            y = torch.compile(model, backend="fusion")(x)
            assert {hook: getattr(config, hook) for hook in HOOKS} == installed
    torch.testing.assert_close(y, unbiased(model, x))
    assert {hook: r.calls for hook, r in recorders.items()} == dict.fromkeys(HOOKS, 1)
    assert {hook: getattr(config, hook) for hook in HOOKS} == before
    assert statuses("drop_bias") == [["fused"]]


def test_the_error_of_another_pass_is_its_own_and_the_hook_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import config

    use_passes(monkeypatch, DropBias)

    def theirs(graph: Any) -> None:
        raise ArithmeticError("of another library")

    model, x = linear()
    with config.patch(post_grad_custom_pre_pass=theirs):
        with pytest.raises(Exception, match="of another library"):
            torch.compile(model, backend="fusion")(x)
        assert config.post_grad_custom_pre_pass is theirs
    assert config.post_grad_custom_pre_pass is None
    assert fusion.reports() == []
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="fusion")(x), unbiased(model, x))


# --- CUDA graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{"mode": "reduce-overhead"}, {"options": {"inductor": {"triton.cudagraphs": True}}}],
    ids=["mode", "option"],
)
def test_cuda_graphs_mean_nothing_on_a_cpu(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_passes(monkeypatch, DropBias)
    model, x = linear()
    run = torch.compile(model, backend="fusion", **more)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(run(x), unbiased(model, x))
    assert statuses("drop_bias") == [["fused"]]
    torch.compiler.reset()  # asks the backend to drop its CUDA-graph trees


class Decoder(torch.nn.Module):
    """A block whose cache and tables are buffers: CUDA graphs may write where it stays put."""

    def __init__(self, block: Any, device: str) -> None:
        super().__init__()
        self.block, x = block, inputs(block)
        for name in ("q_weight", "k_weight", "cos_sin", "readable"):
            self.register_buffer(name, getattr(x, name).to(device))
        for index, part in enumerate(caches(x)):
            self.register_buffer(f"cache{index}", part.to(device))

    def forward(self, qkv: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        parts = (self.cache0, self.cache1) if hasattr(self, "cache1") else self.cache0
        x = Inputs(
            qkv, self.q_weight, self.k_weight, self.cos_sin, positions, slots, parts,
            None, None, self.readable,
        )  # fmt: skip
        out: Tensor = self.block(x)[0] * 2
        return out


def decode_steps(block: Any, device: str, more: dict[str, Any], tolerance: float) -> None:
    """Decoding with slots, positions and token counts that change at every step, against eager.

    Two graphs take turns, and in the end everything is reset and compiled anew.
    """
    mine, eager = Decoder(block, device), Decoder(block, device)
    step = torch.compile(mine, backend="fusion", fullgraph=True, **more)
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        if number == 6:
            torch.compiler.reset()
        torch.compiler.cudagraph_mark_step_begin()
        tokens = (4, 7)[number % 2]
        qkv = torch.randn(tokens, 16 * block.dim, generator=generator)
        slots = torch.randperm(128, generator=generator)[:tokens]
        slots[number % tokens] = -1
        positions = torch.randint(0, 64, (tokens,), generator=generator)
        given = (qkv.to(device, block.dtype), slots.to(device), positions.to(device))
        got, want = step(*given).clone(), eager(*given)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for a, b in zip(mine.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert len(statuses()) >= 2
    assert all(s == ["fused"] for s in statuses())


@pytest.mark.parametrize("layout", [KVCacheLayout.PACKED, KVCacheLayout.NHD])
def test_decoding_with_new_slots_at_every_step(layout: KVCacheLayout) -> None:
    more = {"options": {"inner": "aot_eager", FUSED: "required"}}
    decode_steps(variant(layout=layout, dim=64, tokens=4), "cpu", more, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", [KVCacheLayout.PACKED, KVCacheLayout.NHD])
@pytest.mark.parametrize(
    "more",
    [
        {"mode": "reduce-overhead"},
        {"options": {FUSED: "required", "inductor": {"triton.cudagraphs": True}}},
    ],
    ids=["mode", "option"],
)
def test_cuda_graph_trees_replay_with_new_slots(
    more: dict[str, Any], layout: KVCacheLayout
) -> None:
    """Recorded once, then replayed: the cache is written where the slots of *this* step say."""
    from torch._dynamo.utils import counters

    counters.clear()
    decode_steps(variant(layout=layout, dim=64, tokens=4), "cuda", more, 2e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0  # or nothing was recorded at all
    kernels = {s.kernel for r in fusion.reports() for s in r.sites if s.pass_name == FUSED}
    assert kernels <= {"triton", "aiter"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_operations_replay_in_a_graph_that_the_user_captured() -> None:
    """Every op under ``torch.cuda.graph``: no synchronisation, and replay reads new slots."""
    a = {
        k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments("kv_cache_write").items()
    }
    base = torch.zeros(3, 3, 4, 48, device="cuda")
    a["key_cache"], a["value_cache"] = split_kv_cache(base, "packed", 32, 16)
    fusion.ops.kv_cache_write(**a)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fusion.ops.kv_cache_write(**a)
    base.zero_()
    a["slot_mapping"].copy_(torch.tensor([11, -1, 0, 5, -1], device="cuda"))
    graph.replay()
    written = base.abs().sum((1, 3)).flatten().nonzero().flatten().tolist()
    assert written == [0, 5, 11]
