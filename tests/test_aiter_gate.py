"""AITER's gate: every condition, what it has and needs, and where the value came from."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from fusion.backends.aiter import contract
from fusion.config import Config
from fusion.reason import Reason
from fusion.selection import select
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build, codes, described, refusals
from tests.prologue_cases import Case
from tests.test_aiter_numbers import attention_args

PTS = "qk_norm_rope_kv_cache"


def case_codes(op: str = PTS, *, how: dict[str, Any] | None = None, **change: Any) -> set[str]:
    args, _ = build(dataclasses.replace(G0, op=op, **change))
    return codes(op, args, **(how or {}))


def the(reasons: list[Reason], code: str) -> Reason:
    found = [r for r in reasons if r.code == code]
    assert found, f"no {code} in {[str(r) for r in reasons]}"
    return found[0]


def every_call() -> list[tuple[str, dict[str, Any]]]:
    """One accepted call of each operation, both paths of attention."""
    write, _ = prologue_cases.build(dataclasses.replace(G0, op="kv_cache_write", layout="nhd"))
    return [
        (PTS, build(G0)[0]),
        ("rope_kv_cache", build(dataclasses.replace(G0, op="rope_kv_cache"))[0]),
        ("paged_attention", attention_args()),
        ("paged_attention", attention_args(causal=False)),
        ("kv_cache_write", write),
    ]


@pytest.mark.parametrize("layout", [None, "dense", "shuffle"])
@pytest.mark.parametrize("env_layout", [None, "", "shuffle", "SHUFFLE", "dense"])
@pytest.mark.parametrize("option", [None, True, False])
@pytest.mark.parametrize("env", [None, "", "1", "true", "0", "false"])
def test_truth_table(
    env: str | None, option: bool | None, env_layout: str | None, layout: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Enabled and not shuffled; an option outranks the environment; all operations alike."""
    for name, value in (("FUSION_AITER", env), ("FUSION_KV_LAYOUT", env_layout)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    enabled = option if option is not None else env not in ("0", "false")
    shuffled = layout == "shuffle" if layout else (env_layout or "").lower() == "shuffle"
    config = Config(aiter=option, kv_layout=layout)
    want = set()
    if not enabled:
        want.add("gate.aiter-disabled")
    if shuffled:
        want.add("gate.kv-layout")
    for op, args in every_call():
        assert codes(op, args, config=config) == want, op
    outcomes = KERNELS[PTS].requires.evaluate(described(PTS, every_call()[0][1], config=config))
    switch = next(o for o in outcomes if o.name == "AITER enabled")
    if option is not None:
        assert switch.origin == f"option aiter={option}"
    else:
        assert switch.origin == (f"FUSION_AITER={env}" if env else "FUSION_AITER unset")


@pytest.mark.parametrize("name", ["FUSION_AITER", "FUSION_KV_LAYOUT"])
def test_a_misspelt_switch_closes_the_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "shufle")
    for op, args in every_call():
        reasons = refusals(op, args)
        assert len(reasons) == 1
        assert "shufle" in str(reasons[0])


def test_the_shuffled_layout_closes_the_gate() -> None:
    args, _ = build(dataclasses.replace(G0, layout="shuffle"))
    reason = the(refusals(PTS, args), "gate.kv-layout")
    assert (reason.have, reason.need) == ("SHUFFLE", "NHD (a strided view)")
    # A five-dimensional cache although nobody said so.
    reason = the(refusals(PTS, {**args, "kv_layout": "NHD"}), "gate.kv-layout")
    assert "5 dimensions" in str(reason.have)


@pytest.mark.parametrize(("version", "layout", "need"), [
    ("0.1.11", "nhd", "0.1.12"), ("0.1.12", "nhd", None), ("0.1.15", "nhd", None),
    ("0.1.15", "block_first", "0.1.16"), ("0.1.16", "block_first", None),
    ("0.1.19", "block_first", None), ("0.1.19", "packed", "0.1.19.post1"),
    ("0.1.19", "hnd", "0.1.19.post1"), ("0.1.15", "packed", "0.1.19.post1"),
    ("0.1.19.post1", "packed", None), ("0.1.19.post2", "hnd", None), ("0.1.20", "packed", None),
    ("0.1.20.post1", "static", None), ("0.1.26", "packed", None), ("0.2.0", "packed", "<0.2"),
    ("0.1.20+rocm7.1", "packed", None), ("0.1.19+rocm7.1", "packed", "0.1.19.post1"),
    ("0.1.20rc1", "packed", None), ("0.1.19.post1rc1", "packed", "0.1.19.post1"),
    ("0.1.20.dev3+gabc", "packed", "0.1.19.post1"), ("0.1.20.dev3", "block_first", None),
    ("0.1.19.post2.dev1", "packed", None), ("nightly", "nhd", "0.1.12"),
])  # fmt: skip
def test_releases(version: str, layout: str, need: str | None) -> None:
    args, _ = build(dataclasses.replace(G0, layout=layout))
    reasons = refusals(PTS, args, version=version)
    if need is None:
        assert reasons == []
        return
    assert {r.code for r in reasons} == {"gate.aiter-version"}
    assert any(need in str(r.need) for r in reasons)
    assert all(version in str(r.have) for r in reasons)


def test_the_packed_view_is_named() -> None:
    reason = the(refusals(PTS, build(G0)[0], version="0.1.19"), "gate.aiter-version")
    assert "packed view" in reason.message
    assert reason.have == "0.1.19"
    assert reason.need == ">=0.1.19.post1,<0.2"


def test_not_installed() -> None:
    reasons = refusals(PTS, build(G0)[0], version=None)
    assert {r.code for r in reasons} == {"gate.backend-unavailable"}
    assert the(reasons, "gate.backend-unavailable").have == "not installed"


@pytest.mark.parametrize(("arch", "ok"), [
    ("gfx942", True), ("gfx942:sramecc+:xnack-", True), ("gfx950", True), ("gfx90a", False),
    ("gfx1100", False), ("gfx1201", False), ("gfx1250", False), ("sm_90", False), ("cpu", False),
    ("", False), ("mi300x", False),
])  # fmt: skip
def test_chips(arch: str, ok: bool) -> None:
    for op, args in every_call():
        reasons = refusals(op, args, arch=arch)
        assert (reasons == []) == ok
        if not ok:
            reason = the(reasons, "gate.arch")
            assert reason.need == "gfx942 or gfx950"


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(dim: int) -> None:
    args, _ = build(dataclasses.replace(G0, dim=dim))
    reasons = refusals(PTS, args)
    if dim in (64, 128, 256):
        assert reasons == []
    else:
        reason = the(reasons, "gate.head-dim")
        assert (reason.have, reason.need) == (str(dim), "64 or 128 or 256")
    power = dim in (32, 64, 128, 256)
    assert ("gate.head-dim" in case_codes("rope_kv_cache", dim=dim)) == (not power)
    assert codes("paged_attention", attention_args(dim=dim)) == set()
    assert codes("paged_attention", attention_args(dim=dim, causal=False)) == set()


def test_value_head_size() -> None:
    for op in (PTS, "rope_kv_cache"):
        assert "gate.head-dim" in case_codes(op, dim=128, dim_v=64)
    write = Case(op="kv_cache_write", dim=64, dim_v=32, layout="nhd", cache="bf16")
    assert "gate.head-dim" in codes(write.op, prologue_cases.build(write)[0])


@pytest.mark.parametrize("page", [1, 8, 16, 24, 32, 64, 96, 128])
def test_page_sizes(page: int) -> None:
    power = page & (page - 1) == 0
    for op in (PTS, "rope_kv_cache"):
        assert ("gate.block-size" in case_codes(op, block=page)) == (not power)
    causal = codes("paged_attention", attention_args(page=page))
    # A page as large as the tile is loaded unmasked: NaN behind the last key would come out.
    assert ("gate.block-size" in causal) == (not power or page == 64)
    wide = codes("paged_attention", attention_args(page=page, dim=256))
    assert ("gate.block-size" in wide) == (not power or page in (32, 64))
    assert codes("paged_attention", attention_args(page=page, causal=False)) == set()


def test_qkv_has_to_be_packed() -> None:
    for qkv in ("separate", "transposed", "strided"):
        args, _ = build(dataclasses.replace(G0, qkv=qkv))
        reason = the(refusals(PTS, args), "gate.qkv-packed")
        assert "pack_qkv" in reason.remedy
    args, _ = build(G0)
    swapped = {**args, "key": args["value"], "value": args["key"]}
    assert codes(PTS, swapped) == {"gate.qkv-packed"}
    # Without knowledge of storages the row stride decides.
    call = described(PTS, args)
    tensors = {n: s and dataclasses.replace(s, base=None) for n, s in call.tensors.items()}
    assert KERNELS[PTS].requires.unmet(dataclasses.replace(call, tensors=tensors)) == []
    args, _ = build(dataclasses.replace(G0, qkv="separate"))
    call = described(PTS, args)
    tensors = {n: s and dataclasses.replace(s, base=None) for n, s in call.tensors.items()}
    unmet = KERNELS[PTS].requires.unmet(dataclasses.replace(call, tensors=tensors))
    assert [r.code for r in unmet] == ["gate.qkv-packed"]


def test_symbolic_token_counts_pass_and_symbolic_strides_do_not() -> None:
    call = described(PTS, build(G0)[0])
    tensors = dict(call.tensors)
    for name in ("query", "key", "value", "slot_mapping"):
        spec = tensors[name]
        assert spec is not None
        tensors[name] = dataclasses.replace(spec, shape=(None, *spec.shape[1:]))
    requires = KERNELS[PTS].requires
    assert requires.unmet(dataclasses.replace(call, tensors=tensors)) == []
    cache = tensors["key_cache"]
    assert cache is not None
    tensors["key_cache"] = dataclasses.replace(cache, stride=(None, *cache.stride[1:]))
    unmet = requires.unmet(dataclasses.replace(call, tensors=tensors))
    assert [r.code for r in unmet] == ["gate.cache-stride"]
    tensors["key_cache"] = dataclasses.replace(cache, shape=(8, None, 4, 128))
    unmet = requires.unmet(dataclasses.replace(call, tensors=tensors))
    assert "gate.block-size" in {r.code for r in unmet}


@pytest.mark.parametrize(("change", "code"), [
    ({"dtype": "f16"}, "gate.dtype"), ({"weight": "f32"}, "gate.dtype"),
    ({"weight_k": "f32"}, "gate.dtype"), ({"out_dtype": "f32"}, "gate.dtype"),
    ({"rope_dtype": "f16"}, "gate.dtype"), ({"cache": "f16"}, "gate.cache-dtype"),
    ({"cache": "f32"}, "gate.cache-dtype"), ({"cache": "fn"}, "gate.cache-dtype"),
    ({"full_width": True}, "gate.table"), ({"rotary_dim": 0}, "gate.rotary"),
    ({"rotary_dim": 2}, "gate.rotary"), ({"rotary_dim": 4}, "gate.rotary"),
    ({"dim": 256, "rotary_dim": 24}, "gate.rotary"), ({"eps_tensor": True}, "gate.eps-tensor"),
    ({"norm_cast": "none"}, "gate.argument"),
    ({"norm_cast": "early", "weight_mode": "1+w"}, "gate.argument"),
    ({"cache": "fnuz", "return_key": True}, "gate.argument"),
])  # fmt: skip
def test_each_condition_of_the_prologue(change: dict[str, Any], code: str) -> None:
    reasons = refusals(PTS, build(dataclasses.replace(G0, **change))[0])
    assert code in {r.code for r in reasons}
    assert all(r.have and r.need for r in reasons)


def test_two_epsilons() -> None:
    args, _ = build(G0)
    reason = the(refusals(PTS, {**args, "k_eps": 1e-5}), "gate.argument")
    assert reason.have == "1e-06 for q, 1e-05 for k"


def test_misaligned_and_overlapping_caches() -> None:
    args, _ = build(G0)
    wide = torch.zeros(8, 16, 4, 130, dtype=torch.bfloat16)
    for cache in (wide[..., :128], wide[..., 1:129], wide[:, :, :1, 4:].expand(-1, -1, 4, -1)):
        k = cache[..., :126] if cache.shape[-1] < 128 else cache
        assert "gate.cache-stride" in codes(PTS, {**args, "key_cache": k})
    sparse = torch.zeros(8, 16, 4, 256, dtype=torch.bfloat16)[..., ::2]
    assert "gate.cache-stride" in codes(PTS, {**args, "key_cache": sparse})
    weights = torch.ones(256, dtype=torch.bfloat16)[::2]
    assert codes(PTS, {**args, "q_weight": weights}) == {"gate.argument"}
    assert codes(PTS, {**args, "q_weight": args["q_weight"][None]}) == {"gate.argument"}


def test_a_scale_that_the_graph_computes() -> None:
    args, _ = build(dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0)))
    assert codes(PTS, args) == set()
    call = described(PTS, args, scales_static=False)
    on_device = {
        n: s and dataclasses.replace(s, device="cuda" if "scale" in n else s.device)
        for n, s in call.tensors.items()
    }
    call = dataclasses.replace(call, tensors=on_device)
    reason = the(KERNELS[PTS].requires.unmet(call), "gate.scale-location")
    assert "computed in the graph" in str(reason.have)
    plain, _ = build(dataclasses.replace(G0, scales=(0.25, 3.0)))
    assert codes(PTS, plain, scales_static=False) == set()  # a bf16 cache has no use for it


@pytest.mark.parametrize(("change", "code"), [
    ({"cache": "f16"}, "gate.cache-dtype"), ({"cache": "fnuz"}, "gate.cache-dtype"),
    ({"dtype": "f16", "out_dtype": "f16", "cache": "f16"}, "gate.dtype"),
    ({"rotary_dim": 64}, "gate.rotary"), ({"q_heads": 6}, "gate.argument"),
    ({"out_dtype": "f32"}, "gate.dtype"),
])  # fmt: skip
def test_each_condition_of_the_rope(change: dict[str, Any], code: str) -> None:
    assert code in case_codes("rope_kv_cache", **change)


@pytest.mark.parametrize(("change", "code"), [
    ({"causal": False, "softcap": 3.0}, "gate.argument"),
    ({"causal": False, "sinks": torch.ones(8)}, "gate.argument"),
    ({"causal": False, "cache": torch.float8_e4m3fnuz}, "gate.cache-dtype"),
    ({"causal": False, "rows": (3, 1, 0, 3)}, "gate.argument"),
    ({"cache": torch.float8_e4m3fn}, "gate.cache-dtype"),
    ({"cache": torch.float16}, "gate.cache-dtype"), ({"dtype": torch.float32}, "gate.dtype"),
    ({"heads": 3}, "gate.argument"),
])  # fmt: skip
def test_each_condition_of_attention(change: dict[str, Any], code: str) -> None:
    reasons = refusals("paged_attention", attention_args(**change))
    assert code in {r.code for r in reasons}
    assert all(r.have and r.need for r in reasons)


def test_non_causal_wants_a_newer_release() -> None:
    args = attention_args(causal=False)
    reason = the(refusals("paged_attention", args, version="0.1.15"), "gate.aiter-version")
    assert reason.need == ">=0.1.16,<0.2"
    assert codes("paged_attention", attention_args(), version="0.1.15") == set()


@pytest.mark.parametrize(("layout", "cache", "code"), [
    ("packed", "bf16", "gate.cache-stride"), ("hnd", "bf16", "gate.cache-stride"),
    ("nhd", "fnuz", "gate.cache-dtype"), ("nhd", "f16", "gate.cache-dtype"),
])  # fmt: skip
def test_each_condition_of_the_write(layout: str, cache: str, code: str) -> None:
    case = dataclasses.replace(G0, op="kv_cache_write", layout=layout, cache=cache)
    assert code in codes(case.op, prologue_cases.build(case)[0])


def test_reasons_are_complete() -> None:
    """All unmet conditions at once, not only the first."""
    args, _ = build(dataclasses.replace(G0, dim=80, block=24, qkv="separate", weight="f32"))
    found = codes(PTS, args, version="0.1.19", arch="gfx90a", config=Config(aiter=False))
    assert found >= {
        "gate.aiter-disabled", "gate.arch", "gate.aiter-version", "gate.head-dim",
        "gate.block-size", "gate.qkv-packed", "gate.dtype",
    }  # fmt: skip


def test_selection_takes_aiter_and_has_the_next_in_line() -> None:
    """Qwen3-8B: AITER at 0.1.20; at 0.1.19 and with D = 80 another kernel, with reasons."""
    qwen = dataclasses.replace(G0, q_heads=32, kv_heads=8)
    args, _ = build(qwen)
    chosen = select(described(PTS, args))
    assert chosen.kernel is KERNELS[PTS]
    others = [c.kernel for c in chosen.candidates]
    assert others[0] == "aiter"
    assert len(others) > 1
    for how, code in (
        ({"version": "0.1.19"}, "gate.aiter-version"),
        ({"config": Config(kv_layout="shuffle")}, "gate.kv-layout"),
        ({"config": Config(aiter=False)}, "gate.aiter-disabled"),
    ):
        found = select(described(PTS, args, **how))
        assert found.kernel is not None
        assert found.kernel.name != "aiter"
        assert [r.code for r in found.candidates[0].reasons] == [code]
    narrow, _ = build(dataclasses.replace(qwen, dim=80))
    found = select(described(PTS, narrow))
    assert "gate.head-dim" in [r.code for r in found.candidates[0].reasons]


def test_nothing_of_aiter_is_imported_by_asking() -> None:
    for op, args in every_call():
        KERNELS[op].requires.evaluate(described(op, args))
    assert not [n for n in sys.modules if n == "aiter" or n.startswith("aiter.")]


def test_no_condition_fails_itself() -> None:
    """Whatever the shapes: reasons, never ``internal.error``."""
    bad = torch.zeros(3)
    for op, args in every_call():
        for name, value in args.items():
            if isinstance(value, torch.Tensor):
                for other in (value.double(), value.reshape(-1), value[..., None], bad):
                    found = codes(op, {**args, name: other})
                    assert "internal.error" not in found, f"{op}: {name} as {list(other.shape)}"


def test_every_function_not_used_has_a_reason() -> None:
    assert all(len(text) > 20 for text in contract.NOT_USED.values())
