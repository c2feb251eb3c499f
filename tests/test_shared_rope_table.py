"""One cos-sin table a step, shared by all layers that run on AITER."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.backends.aiter import operands
from fusion.backends.aiter.table_op import rope_table
from fusion.ops import dispatch
from fusion.passes import shared_rope_table as passes
from fusion.target import Target
from tests.aiter_cases import standin

pytest.importorskip("transformers")

import fusion
from tests.test_aiter_models import PTS, PagedKVCache, generate, models, pack_qkv

TARGET = Target.parse("gfx942", aiter="0.1.20")


@pytest.fixture
def on_gfx942(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dispatch.describe_call

    def describe(op: str, arguments: Any, **how: Any) -> Any:
        return real(op, arguments, **{**how, "target": TARGET})

    monkeypatch.setattr(Target, "current", classmethod(lambda cls: TARGET))
    monkeypatch.setattr(dispatch, "describe_call", describe)


@pytest.mark.parametrize("positions", [None, torch.tensor([3, 0, 10**6, -5, 1])])
def test_the_operation(positions: Tensor | None) -> None:
    cos, sin = torch.randn(5, 8), torch.randn(5, 8)
    table = rope_table(cos, sin, positions, torch.bfloat16, 4)
    at = torch.arange(5) if positions is None else positions.clamp(0, 4)
    assert torch.equal(table, torch.cat((cos[at], sin[at]), 1).bfloat16())
    assert table.is_contiguous()
    again, _ = operands.joined_table(table[:, :8], table[:, 8:], None, torch.bfloat16, 4)
    assert again.data_ptr() == table.data_ptr()


def test_the_operation_is_well_registered() -> None:
    args = (torch.randn(5, 8), torch.randn(5, 8), torch.arange(5), torch.bfloat16, 4)
    torch.library.opcheck(torch.ops.fusion_aiter.rope_table.default, args)


@pytest.mark.usefixtures("on_gfx942")
@pytest.mark.parametrize("layers", [1, 3])
def test_one_table_for_all_layers(layers: int) -> None:
    """The tables that reach AITER in one step are one and the same memory."""
    model = models.build("qwen3", dtype=torch.bfloat16, layers=layers, head_dim=128)
    model.set_attn_implementation("fusion_paged")
    pack_qkv(model)
    cache = PagedKVCache.for_model(model, num_blocks=8, block_size=16, layout="packed")
    options = {"inner": "aot_eager_decomp", "kernels": ["aiter", "reference"], PTS: "required"}
    with standin() as state:
        generate(
            model, models.prompts((5, 3)), max_new_tokens=1, cache=cache,
            compile={"backend": "fusion", "options": options},
        )  # fmt: skip
        tables = [c[1][3] for c in state.calls if c[0] == "pts"]
    assert len(tables) == layers
    assert len({t.data_ptr() for t in tables}) == 1
    assert tables[0].shape == (8, 128)
    sites = [s for s in fusion.reports()[-1].sites if s.operation == "rope_table"]
    assert [s.facts["calls"] for s in sites] == [layers]


@pytest.mark.usefixtures("on_gfx942")
def test_inductor_keeps_the_halves_together() -> None:
    """Two calls of a compiled function read the table that the operation made, uncopied."""
    from fusion import ops

    def function(
        x: Tensor, w: Tensor, norm: Tensor, angle: tuple[Tensor, Tensor], cache: Tensor, at: Tensor
    ) -> Tensor:
        q, k, v = (p.unflatten(1, (-1, 64)) for p in (x @ w).split((128, 64, 64), dim=-1))
        table = torch.ops.fusion_aiter.rope_table(*angle, None, torch.bfloat16, 0)
        out = q
        for i in range(2):
            out, _ = ops.qk_norm_rope_kv_cache(
                q, k, v, norm, norm, table[:, :32], table[:, 32:], None, cache[i], cache[i + 2],
                at, q_eps=1e-6, k_eps=1e-6, rope_style="half",
                rotary_dim=64, rope_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
                kernel="aiter",
            )  # fmt: skip
        return out

    bf16 = torch.bfloat16
    args = (torch.randn(5, 16).to(bf16), torch.randn(16, 256).to(bf16), torch.ones(64).to(bf16),
            (torch.randn(5, 32), torch.randn(5, 32)), torch.zeros(4, 2, 16, 1, 64).to(bf16),
            torch.arange(5))  # fmt: skip
    with standin() as state:
        got = torch.compile(function, fullgraph=True)(*args)
        tables = [c[1][3].data_ptr() for c in state.calls]
        assert torch.equal(got, function(*args))
    assert len(tables) == 2
    assert len(set(tables)) == 1


def graph_of(shared: bool, kernel: str = "aiter", table: bool = False) -> torch.fx.Graph:
    """Two direct calls, with equal or with different cos."""
    graph = torch.fx.Graph()

    def value(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device="meta")
        return node

    q = value("q", 5, 8, 128)
    joined = value("joined", 5, 128)
    cos = [value(f"cos{i}", 5, 64) for i in range(2)]
    sin = value("sin", 5, 64)
    if table:
        halves = []
        for start in (0, 64):
            args = (joined, 1, start, start + 64)
            halves.append(graph.call_function(torch.ops.aten.slice.Tensor, args))
            halves[-1].meta["val"] = joined.meta["val"][:, start : start + 64]
        cos, sin = [halves[0]] * 2, halves[1]
    for i in range(2):
        graph.call_function(
            torch.ops.fusion.qk_norm_rope_kv_cache.default, (),
            {"query": q, "cos": cos[0 if shared else i], "sin": sin, "positions": None,
             "rope_style": "half", "kernel": kernel},
        )  # fmt: skip
    graph.output(())
    return graph


def test_groups() -> None:
    assert [len(g) for g in passes.groups(graph_of(shared=True))] == [2]
    assert [len(g) for g in passes.groups(graph_of(shared=False))] == [1, 1]
    assert passes.groups(graph_of(shared=True, kernel="triton")) == []
    assert passes.groups(graph_of(shared=True, table=True)) == []


def test_running_twice_changes_nothing_more() -> None:
    graph = graph_of(shared=True)
    (calls,) = passes.groups(graph)
    passes.share(graph, calls)
    graph.lint()
    assert passes.groups(graph) == []
    made = [n for n in graph.nodes if n.target is torch.ops.fusion_aiter.rope_table.default]
    assert len(made) == 1
    assert made[0].meta["val"].shape == (5, 128)
