"""pack_qkv: one weight for three projections, under the old checkpoint names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from fusion.integrations.transformers import PagedKVCache, generate, pack_qkv, unpack_qkv
from fusion.integrations.transformers.packing import PackedLinear, PackedSlice
from fusion.passes.merge_linears import PRODUCTS, merge_linears
from tests import models

UNPACKED = ("phi3",)  # has one qkv_proj by itself


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", models.NAMES)
def test_eager_results_and_state_dict_stay_as_they_were(name: str) -> None:
    model = models.build(name, layers=2)
    ids = torch.tensor(models.prompts((7,)))
    before, names = weights(model), list(model.state_dict())
    want = model(input_ids=ids, use_cache=False).logits
    result = pack_qkv(model)
    assert len(result.packed) == (0 if name in UNPACKED else 1 if name == "lfm2" else 2)
    assert result.skipped == {}
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
    after = model.state_dict()
    assert set(after) == set(names)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert pack_qkv(model).packed == ()
    assert unpack_qkv(model) == result.packed
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    assert not any(isinstance(m, (PackedLinear, PackedSlice)) for m in model.modules())
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)


def test_one_parameter_holds_the_three() -> None:
    model = models.build("qwen3", layers=1)
    attention = model.model.layers[0].self_attn
    pack_qkv(model)
    names = [
        name for name, _ in attention.named_parameters() if "proj" not in name or "qkv" in name
    ]
    assert "qkv_packed.weight" in names
    assert not any(name.startswith(("q_proj", "k_proj", "v_proj")) for name in names)
    packed = attention.qkv_packed.weight
    assert packed.shape == (models.HQ * 64 + 2 * models.HK * 64, models.HIDDEN)
    assert attention.k_proj.out_features == models.HK * 64
    view = model.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    assert view.data_ptr() == packed[models.HQ * 64 :].data_ptr()


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # without and with biases
def test_checkpoints_load_after_packing_too(name: str) -> None:
    source = models.build(name, layers=2, seed=3)
    target = models.build(name, layers=2, seed=4)
    pack_qkv(target)
    missing, unexpected = target.load_state_dict(source.state_dict())
    assert missing == unexpected == []
    got = target.state_dict()
    assert all(torch.equal(got[key], value) for key, value in source.state_dict().items())
    # One entry alone changes only its own rows.
    key = "model.layers.1.self_attn.k_proj.weight"
    before = weights(target)
    target.load_state_dict({key: torch.ones_like(got[key])}, strict=False)
    after = target.state_dict()
    assert [k for k in before if not torch.equal(before[k], after[k])] == [key]


def test_save_pretrained_round_trip(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = models.build("qwen3", layers=1)
    want = weights(model)
    pack_qkv(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    got = again.state_dict()
    assert set(got) == set(want)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_bias_of_some_projections_is_filled_with_zeros() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 6, bias=True)
            self.k_proj = nn.Linear(8, 4, bias=False)
            self.v_proj = nn.Linear(8, 4, bias=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    block, x = Block(), torch.randn(3, 8)
    want, names = block(x), set(block.state_dict())
    assert pack_qkv(block).packed == ("",)
    assert set(block.state_dict()) == names
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for outputs in (block(x), compiled(x)):
        for got, expected in zip(outputs, want, strict=True):
            torch.testing.assert_close(got, expected)
    unpack_qkv(block)
    assert block.k_proj.bias is None
    assert all(torch.equal(a, b) for a, b in zip(block(x), want, strict=True))


def test_projections_that_are_no_plain_linears_are_left_and_named() -> None:
    model = models.build("llama", layers=3)

    class Scaled(nn.Linear):
        pass

    layers = model.model.layers
    layers[0].self_attn.k_proj = Scaled(models.HIDDEN, models.HK * 64, bias=False)
    layers[1].self_attn.v_proj.register_forward_hook(lambda *_: None)
    result = pack_qkv(model)
    assert result.packed == ("model.layers.2.self_attn",)
    assert result.skipped == {
        "model.layers.0.self_attn": "k_proj is a Scaled, not a plain nn.Linear",
        "model.layers.1.self_attn": "v_proj has hooks",
    }


def test_copies_are_packed_on_their_own() -> None:
    model = models.build("llama", layers=1)
    pack_qkv(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.qkv_packed.weight.zero_()
    x = torch.randn(1, models.HIDDEN)
    assert not twin.model.layers[0].self_attn.q_proj(x).any()
    assert model.model.layers[0].self_attn.q_proj(x).any()
    key = "model.layers.0.self_attn.v_proj.weight"
    assert not twin.state_dict()[key].any()
    assert model.state_dict()[key].any()
    model.to(torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gptj"])  # mm, addmm, no grouped queries
def test_the_compiled_graph_has_one_projection_per_layer(name: str) -> None:
    from torch._dynamo.backends.common import aot_autograd

    model = models.build(name, layers=1)
    model.set_attn_implementation("fusion_paged")
    if model.config._attn_implementation != "fusion_paged":
        pytest.skip(f"this transformers' {name} has no exchangeable attention function")
    prompts = models.prompts((5, 9))
    want = models.eager_greedy(model, prompts, 4)
    pack_qkv(model)
    cache = PagedKVCache.for_model(model, 8, 8)
    seen: list[tuple[int, int]] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        before = count(gm)
        merge_linears(gm.graph)
        gm.graph.lint()
        gm.recompile()
        seen.append((before, count(gm)))
        return gm

    torch._dynamo.reset()
    got = generate(model, prompts, 4, cache, {"backend": aot_autograd(fw_compiler=compiler)})
    assert got == want
    assert len(seen) == 2
    assert all(before - after == 2 for before, after in seen)


def count(gm: Any) -> int:
    return sum(node.target in PRODUCTS for node in gm.graph.nodes)
