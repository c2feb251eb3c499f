"""AITER under a transformers model: what explain says, and a compiled run on the stand-in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import fusion
from fusion.integrations.transformers import PagedKVCache, generate, pack_qkv
from fusion.integrations.transformers.generation import forward_arguments
from fusion.ops import dispatch
from fusion.target import Target
from tests import models
from tests.aiter_cases import standin

PTS = "qk_norm_rope_kv_cache"


def qwen3(*, packed: bool = True, head_dim: int = 128) -> tuple[Any, PagedKVCache]:
    model = models.build("qwen3", dtype=torch.bfloat16, layers=1, head_dim=head_dim)
    model.set_attn_implementation("fusion_paged")
    if packed:
        pack_qkv(model)
    cache = PagedKVCache.for_model(model, num_blocks=8, block_size=16, layout="packed")
    return model, cache


def explained(model: Any, cache: PagedKVCache, options: Any = None, **versions: str) -> Any:
    """The prologue's site for an MI300X with a working Triton."""
    inputs = cache.inputs([cache.allocate() for _ in range(2)], [5, 3], max_query_len=None)
    inputs.token_ids.zero_()
    target = Target.parse("gfx942:sramecc+:xnack-", triton="3.6.0", **versions)
    report = fusion.explain(model, target=target, options=options, **forward_arguments(inputs))
    (site,) = [s for s in report.sites if s.operation == PTS]
    return site


def test_explain_takes_aiter() -> None:
    site = explained(*qwen3(), aiter="0.1.20")
    assert (site.status, site.kernel) == ("fused", "aiter")
    assert [(c.kernel, c.accepted) for c in site.candidates][:2] == [
        ("aiter", True), ("triton", True)
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "how", "code", "have", "need"), [
    ({"packed": False}, {"aiter": "0.1.20"}, "gate.qkv-packed", "tensors of their own", "packed"),
    ({}, {"aiter": "0.1.19"}, "gate.aiter-version", "0.1.19", ">=0.1.19.post1"),
    ({}, {"aiter": "0.1.20", "options": {"kv_layout": "shuffle"}}, "gate.kv-layout", "SHUFFLE",
     "NHD"),
    ({"head_dim": 80}, {"aiter": "0.1.20"}, "gate.head-dim", "80", "64 or 128 or 256"),
    ({}, {"aiter": "0.1.20", "options": {"aiter": False}}, "gate.aiter-disabled", "off", "on"),
    ({}, {"aiter": "0.1.20", "options": {"numerics": "exact"}}, "gate.rounding", "rounding",
     "rounding points"),
    ({}, {}, "gate.backend-unavailable", "not installed", "amd-aiter"),
])  # fmt: skip
def test_explain_refuses_with_both_sides(
    model: dict[str, Any], how: dict[str, Any], code: str, have: str, need: str
) -> None:
    site = explained(*qwen3(**model), **how)
    assert (site.status, site.kernel) == ("fused", "triton")
    aiter = site.candidates[0]
    assert (aiter.kernel, aiter.accepted) == ("aiter", False)
    reason = next(r for r in aiter.reasons if r.code == code)
    if code != "gate.rounding":
        assert {r.code for r in aiter.reasons} == {code}
    assert have in str(reason.have)
    assert need in str(reason.need)
    if code == "gate.qkv-packed":
        assert "pack_qkv" in reason.remedy


def run(compile: dict[str, Any] | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of two steps, and the cache."""
    model, cache = qwen3()
    logits: list[torch.Tensor] = []
    generate(
        model, models.prompts((5, 3)), max_new_tokens=2, cache=cache, compile=compile,
        on_logits=lambda _, x: logits.append(x.clone()),
    )  # fmt: skip
    (buffer,) = [t for kv in cache.kv for t in ([kv] if isinstance(kv, torch.Tensor) else kv)]
    return logits, buffer


def test_a_compiled_model_runs_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode of Qwen3 as they would run on an MI300X: one launch a layer and step."""
    want, want_cache = run(None)
    target, real = Target.parse("gfx942", aiter="0.1.20"), dispatch.describe_call

    def describe(op: str, arguments: Any, **how: Any) -> Any:
        return real(op, arguments, **{**how, "target": target})

    monkeypatch.setattr(Target, "current", classmethod(lambda cls: target))
    monkeypatch.setattr(dispatch, "describe_call", describe)
    options = {"inner": "aot_eager_decomp", "kernels": ["aiter", "reference"], PTS: "required"}
    with standin() as state:
        got, cache = run({"backend": "fusion", "options": options})
        launches = Counter(call[0] for call in state.calls)
        copied = [c for c in state.calls if c[0] == "pts" and c[1][0].shape[0] != c[1][5]]
    assert launches["pts"] == 2
    assert not copied
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.08)
    torch.testing.assert_close(cache.float(), want_cache.float(), rtol=0.03, atol=0.06)
