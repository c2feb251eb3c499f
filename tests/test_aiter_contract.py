"""Every call that the adapters make binds to the real signature, at every supported release.

The signatures come from ``data/aiter_contract.json``, extracted from AITER's sources at 19 tags.
A renamed, added or reordered parameter there makes these tests fail.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from packaging.version import Version

from fusion.backends.aiter import contract, gate, probe, prologue_requires, runtime
from fusion.backends.aiter.contract import Function
from fusion.target import Target
from tests.aiter_cases import CONTRACT, G0, KERNELS, TAGS, build, refusals
from tests.test_aiter_numbers import attention_args


def signature_at(data: dict[str, Any], name: str, tag: str) -> inspect.Signature | None:
    """The signature of a function at a tag, as the JSON has it; None where it does not exist."""
    order = [*data["tags"], "snapshot"]
    at = order.index(tag)
    for entry in data["ops"][name]["signature_history"]:
        if order.index(entry["from"]) <= at <= order.index(entry["to"]):
            return inspect.Signature([
                inspect.Parameter(
                    p["name"],
                    getattr(inspect.Parameter, p["kind"]),
                    default=inspect.Parameter.empty if p["required"] else p["default"],
                )
                for p in entry["params"]
            ])  # fmt: skip
    return None


def supported(function: Function) -> list[str]:
    return [tag for tag in TAGS if Version(tag) >= function.first]


def check_tables(data: dict[str, Any]) -> None:
    """Our table of signatures against the JSON, parameter by parameter."""
    for name, function in contract.FUNCTIONS.items():
        for tag in [*supported(function), "snapshot"]:
            real = signature_at(data, name, tag)
            assert real is not None, f"{name} does not exist at {tag}"
            version = Version("0.1.20.post1") if tag == "snapshot" else Version(tag)
            ours = function.parameters(version)
            theirs = tuple(
                p.name + ("" if p.default is p.empty else "=") for p in real.parameters.values()
            )
            assert ours == theirs, f"{name} at {tag}"
            assert function.check(real) is None, f"{name} at {tag}"


def test_tables_agree() -> None:
    check_tables(CONTRACT)
    paths = {n: op["import_path"] for n, op in CONTRACT["ops"].items()}
    for name, function in contract.FUNCTIONS.items():
        source = CONTRACT["ops"][name]["source_path"].removesuffix(".py").replace("/", ".")
        assert function.module == source, f"{name}: {paths[name]}"
        assert CONTRACT["ops"][name]["call_style"] == (
            "positional" if function.positional else "keyword"
        )
    assert set(contract.NOT_USED) <= set(CONTRACT["unused"])


Call: TypeAlias = "tuple[Function, tuple[Any, ...], dict[str, Any], dict[str, Any]]"
"""The function, what it was called with, and the arguments of the operation."""


class Recorder:
    """Stands in for AITER's functions: records each call and writes nothing."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.given: dict[str, Any] = {}

    def resolve(self, function: Function) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((function, args, kwargs, self.given))
            return kwargs["q"] if function is contract.FLASH else None

        return call


def all_calls() -> list[tuple[str, dict[str, Any]]]:
    write = {k: build(G0)[0][k] for k in ("key", "value", "slot_mapping")}
    nhd, _ = build(dataclasses.replace(G0, layout="nhd"))
    write |= {k: nhd[k] for k in ("key_cache", "value_cache")}
    return [
        ("qk_norm_rope_kv_cache", build(G0)[0]),
        ("qk_norm_rope_kv_cache", nhd),
        ("qk_norm_rope_kv_cache", {**build(G0)[0], "return_key": True}),
        (
            "qk_norm_rope_kv_cache",
            build(dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0), layout="nhd"))[0],
        ),
        ("rope_kv_cache", build(dataclasses.replace(G0, op="rope_kv_cache"))[0]),
        ("rope_kv_cache", build(dataclasses.replace(G0, op="rope_kv_cache", return_key=True))[0]),
        ("paged_attention", attention_args(sinks=torch.ones(8), softcap=2.0)),
        ("paged_attention", attention_args(causal=False)),
        ("kv_cache_write", write),
    ]


def record(version: str) -> list[Call]:
    """What the adapters call at a release, for every call that the gate accepts there."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "resolve", recorder.resolve)
        with runtime.assume(Target.parse("gfx942", aiter=version)):
            for op, args in all_calls():
                if refusals(op, args, version=version) == []:
                    recorder.given = args
                    KERNELS[op].fn(**args)
    return recorder.calls


def check_calls(data: dict[str, Any], tag: str) -> set[str]:
    """Bind every recorded call to the JSON's signature and look at what landed where."""
    seen = set()
    for function, args, kwargs, given in record(tag.removeprefix("v")):
        real = signature_at(data, function.name, tag)
        assert real is not None, f"{function.name} does not exist at {tag}"
        bound = real.bind(*args, **kwargs).arguments
        assert list(function.passes) == [n for n in function.passes if n in bound]
        assert bool(args) == function.positional
        assert bool(kwargs) != function.positional
        _MEANING[function.name](bound)
        for ours, theirs in _SAME[function.name].items():
            assert bound[theirs].data_ptr() == given[ours].data_ptr(), f"{theirs} is not {ours}"
        seen.add(function.name)
    return seen


def _pts(a: dict[str, Any]) -> None:
    tokens, heads, kv_heads, dim = 5, 8, 4, 128
    assert a["qkv"].shape == (tokens, (heads + 2 * kv_heads) * dim)
    assert a["qw"].shape == a["kw"].shape == (dim,)
    assert a["cos_sin"].shape == (40, dim)
    assert a["positions"].shape == (tokens,)
    assert a["positions"].dtype == torch.int64
    numbers = ("num_tokens", "num_heads_q", "num_heads_k", "num_heads_v", "head_size")
    assert [a[n] for n in numbers] == [tokens, heads, kv_heads, kv_heads, dim]
    assert a["is_neox_style"] is True
    assert a["eps"] == 1e-6
    assert a["q_out"].shape == (tokens, heads, dim)
    assert a["q_out"].is_contiguous()
    assert a["k_cache"].shape == a["v_cache"].shape == (8, 16, kv_heads, dim)
    assert a["slot_mapping"].shape == (tokens,)
    for name in ("per_tensor_k_scale", "per_tensor_v_scale"):
        assert a[name].device.type == "cpu"
        assert a[name].dtype == torch.float32
    assert (a["k_out"] is not None) == a["return_kv"]
    assert a["v_out"] is None
    assert a["use_shuffle_layout"] is False
    fp8 = a["k_cache"].dtype == torch.float8_e4m3fnuz
    assert (a["block_size"], a["x"], a["rotary_dim"]) == (16, 16 if fp8 else 8, dim)
    scales = [float(a[n]) for n in ("per_tensor_k_scale", "per_tensor_v_scale")]
    assert scales == ([0.25, 3.0] if fp8 else [1.0, 1.0])


def _rope(a: dict[str, Any]) -> None:
    assert a["q"].shape == a["q_out"].shape == (5, 8, 128)
    assert a["k"].shape == a["v"].shape == a["k_out"].shape == (5, 4, 128)
    assert a["key_cache"].shape == a["value_cache"].shape
    assert a["slot_mapping"].shape == a["pos"].shape == (5,)
    assert a["cos"].shape == a["sin"].shape == (40, 64)
    flags = ("is_neox", "flash_layout", "apply_scale", "output_zeros")
    assert [a[n] for n in flags] == [True, True, False, False]
    assert a["k_scale"] is a["v_scale"] is None


def _unified(a: dict[str, Any]) -> None:
    assert a["out"].shape == a["q"].shape
    assert a["causal"] is True
    assert a["window_size"] == (-1, -1)
    assert (a["max_seqlen_q"], a["max_seqlen_k"], a["softcap"]) == (3, 80, 2.0)
    assert a["cu_seqlens_q"].shape == (5,)
    assert a["seqused_k"].shape == (4,)
    assert a["block_table"].dtype == torch.int32
    assert a["sinks"].shape == (8,)
    assert a["q_descale"] is a["k_descale"] is a["v_descale"] is None


def _flash(a: dict[str, Any]) -> None:
    assert a["q"].shape == (4, 3, 8, 64)
    assert a["causal"] is False
    assert a["window_size"] == (-1, -1)
    assert a["cache_seqlens"].shape == (4,)
    assert a["page_table"].shape[0] == 4
    assert a["softmax_scale"] == 0.125


def _write(a: dict[str, Any]) -> None:
    assert a["key"].shape == a["value"].shape == (5, 4, 128)
    assert a["key_cache"].shape == a["value_cache"].shape == (8, 16, 4, 128)
    assert a["slot_mapping"].dtype == torch.int64
    assert a["kv_cache_dtype"] == "auto"
    assert a["k_scale"].dtype == a["v_scale"].dtype == torch.float32


_MEANING: dict[str, Callable[[dict[str, Any]], None]] = {
    contract.PTS.name: _pts, contract.ROPE.name: _rope, contract.UNIFIED.name: _unified,
    contract.FLASH.name: _flash, contract.WRITE.name: _write,
}  # fmt: skip


@pytest.mark.parametrize("tag", TAGS)
def test_every_call_binds(tag: str) -> None:
    seen = check_calls(CONTRACT, tag)
    assert seen == {n for n, f in contract.FUNCTIONS.items() if f.first <= Version(tag)}


_CACHES = {"key_cache": "key_cache", "value_cache": "value_cache"}
_SAME: dict[str, dict[str, str]] = {
    contract.PTS.name: {"query": "qkv", "q_weight": "qw", "k_weight": "kw", "cos": "cos_sin",
                        "key_cache": "k_cache", "value_cache": "v_cache"},
    contract.ROPE.name: {"query": "q", "key": "k", "value": "v", "cos": "cos", "sin": "sin",
                         "slot_mapping": "slot_mapping", **_CACHES},
    contract.UNIFIED.name: {"query": "q", "key_cache": "k", "value_cache": "v", "sinks": "sinks",
                            "seq_lens": "seqused_k", "query_start_loc": "cu_seqlens_q"},
    contract.FLASH.name: {"key_cache": "k_cache", "value_cache": "v_cache",
                          "seq_lens": "cache_seqlens", "block_table": "page_table"},
    contract.WRITE.name: {"key": "key", "value": "value", "slot_mapping": "slot_mapping",
                          **_CACHES},
}  # fmt: skip
"""Arguments of the operation that must arrive, as the very memory, under AITER's names."""


MUTATIONS: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "renamed": lambda p: p[3].update(name="other"),
    "first two swapped": lambda p: p.insert(0, p.pop(1)),
    "last to the front": lambda p: p.insert(0, p.pop()),
    "caches swapped": lambda p: _swap(p, ("k_cache", "key_cache", "k")),
    "scales swapped": lambda p: _swap(p, ("per_tensor_k_scale", "k_scale", "k_descale")),
    "a new one in the middle": lambda p: p.insert(
        5, {"name": "new", "kind": "POSITIONAL_OR_KEYWORD", "required": True}
    ),
    "one gone": lambda p: p.pop(4),
}  # fmt: skip


def _swap(params: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Exchange the first parameter of these names with the one behind it."""
    at = min(i for i, p in enumerate(params) if p["name"] in names)
    params.insert(at, params.pop(at + 1))


ERRORS = (AssertionError, TypeError, AttributeError, KeyError, ValueError)


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize("name", contract.FUNCTIONS)
def test_a_changed_signature_is_noticed(name: str, kind: str) -> None:
    data = copy.deepcopy(CONTRACT)
    MUTATIONS[kind](data["ops"][name]["signature_history"][-1]["params"])
    with pytest.raises(ERRORS):
        check_tables(data)
    function = contract.FUNCTIONS[name]
    if not function.positional:  # by keyword the order is of no consequence
        return
    if (name, kind) != (contract.WRITE.name, "scales swapped"):  # both are the same dummy
        with pytest.raises(ERRORS):
            check_calls(data, "v0.1.20")
    if kind != "last to the front" or name != contract.PTS.name:  # that is no Python signature
        real = signature_at(data, name, "v0.1.20")
        assert real is not None
        reason = function.check(real)
        assert reason is not None
        assert reason.code == "gate.aiter-callable"


def test_a_trailing_default_is_harmless() -> None:
    """A newer release may grow a parameter with a default; a required one is refused."""
    for function in contract.FUNCTIONS.values():
        real = signature_at(CONTRACT, function.name, "v0.1.20")
        assert real is not None
        more = [*real.parameters.values()]
        grown = inspect.Parameter("grown", inspect.Parameter.KEYWORD_ONLY, default=None)
        assert function.check(real.replace(parameters=[*more, grown])) is None
        wanted = grown.replace(default=inspect.Parameter.empty)
        reason = function.check(real.replace(parameters=[*more, wanted]))
        assert reason is not None
        assert "grown" in reason.message


def test_a_signature_that_shows_nothing_is_refused() -> None:
    def opaque(*args: Any, **kwargs: Any) -> None: ...

    for function in contract.FUNCTIONS.values():
        reason = function.check(inspect.signature(opaque))
        assert reason is not None
        assert reason.code == "gate.aiter-callable"


@pytest.mark.parametrize(("text", "contains"), [
    ("0.1.20", "0.1.20"), ("0.1.20+rocm7.1", "0.1.20+rocm7.1"), ("0.1.20rc1", "0.1.20rc1"),
    ("0.1.19.post1", "0.1.19.post1"), ("0.1.20.dev3", "0.1.19"), ("0.1.20.dev3+g12ab", "0.1.19"),
    ("0.1.19.post2.dev4", "0.1.19.post1"), ("0.1.19.post1.dev4+gabc", "0.1.19"),
    ("0.1.27.dev1", "0.1.20"), ("0.1.5.dev1", "0"),
])  # fmt: skip
def test_a_development_version_counts_as_the_release_before(text: str, contains: str) -> None:
    assert contract.proven(Version(text)) == Version(contains)


def test_the_limits_are_those_of_the_contract() -> None:
    """One source of truth: our constants against the contract's machine-readable words."""
    pts = CONTRACT["ops"][contract.PTS.name]
    assert list(prologue_requires.HEAD_SIZES) == pts["constraints"]["head_size"]
    assert Version(pts["packed_kv_view_min_version"]) == contract.FREE_STRIDES
    ranges = [entry["range"].split("..")[0] for entry in pts["behaviour_history"]]
    assert Version(ranges[1]) == contract.BLOCK_STRIDE == contract.HOST_SCALES
    assert Version(ranges[2]) == contract.FREE_STRIDES
    assert gate.ARCHS == ("gfx942", "gfx950")
    assert probe.function.cache_parameters()["maxsize"] is not None
