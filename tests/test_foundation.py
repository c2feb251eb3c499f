"""Floors 1 to 4 that hold no graph: reasons, targets, options, requirements, selection."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

import fusion.reason
from fusion import selection
from fusion.config import Config, ConfigError, env_switch
from fusion.kernel import Kernel, KernelCall, TensorSpec
from fusion.reason import CODES, Reason, UnknownReasonCode, register_code
from fusion.requires import (
    Absent,
    Arch,
    AttributeIn,
    Check,
    DtypeIn,
    KVLayout,
    MinCapability,
    OnDevice,
    PackageVersion,
    Requires,
    SameDtype,
    SizeIn,
    UnitLastStride,
    Vendor,
)
from fusion.target import Target

PASSES = {"qk_norm_rope_kv_cache": ("max_tokens",), "non_causal_attention": ()}


# --- reasons ---------------------------------------------------------------------------------


def test_every_code_has_meaning_and_remedy():
    for code, info in CODES.items():
        assert code == code.lower()
        assert "." in code
        assert info.meaning
        assert info.remedy


def test_an_unknown_code_is_an_error():
    with pytest.raises(UnknownReasonCode):
        Reason("gate.no-such-thing", "x")


def test_a_code_cannot_change_its_meaning(monkeypatch):
    monkeypatch.setattr(fusion.reason, "CODES", dict(CODES))
    register_code("gate.test-only", "a", "b")
    register_code("gate.test-only", "a", "b")
    with pytest.raises(ValueError, match="already registered"):
        register_code("gate.test-only", "something else", "b")


def test_a_reason_survives_the_report():
    reason = Reason(
        "gate.head-dim", "m", have="80", need="64 or 128", node="add_3", source="a.py:1"
    )
    assert Reason.from_dict(reason.to_dict()) == reason
    assert "80" in str(reason)
    assert "add_3" in str(reason)


# --- targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "vendor", "arch"),
    [
        ("cpu", "cpu", "cpu"),
        ("sm_90", "nvidia", "sm_90"),
        ("SM90", "nvidia", "sm_90"),
        ("gfx942:sramecc+:xnack-", "amd", "gfx942"),
        ("gfx90a", "amd", "gfx90a"),
        ("gfx1201", "amd", "gfx1201"),
        ("", "other", "unknown"),
        (None, "other", "unknown"),
        ("potato", "other", "potato"),
    ],
)
def test_target_parse(text, vendor, arch):
    target = Target.parse(text)
    assert (target.vendor, target.arch, target.origin) == (vendor, arch, "parsed")


def test_fp8_follows_the_chip():
    assert Target.parse("gfx942").fp8_dtype == torch.float8_e4m3fnuz
    assert Target.parse("gfx950").fp8_dtype == torch.float8_e4m3fn
    assert Target.parse("sm_90").fp8_dtype == torch.float8_e4m3fn


def test_target_versions_are_pep440_or_none():
    target = Target.parse("gfx942", aiter="0.1.19.post1", rocm="weird build")
    assert str(target.version("aiter")) == "0.1.19.post1"
    assert target.version("rocm") is None
    assert target.version_text("rocm") == "weird build"
    assert target.version("triton") is None
    assert target.with_versions(aiter="0.2").version_text("aiter") == "0.2"


def test_current_target_is_probed_once():
    assert Target.current() is Target.current()
    assert Target.current().version_text("torch") == torch.__version__


# --- options ---------------------------------------------------------------------------------


def test_options_are_checked_by_name():
    with pytest.raises(ConfigError, match="did you mean 'qk_norm_rope_kv_cache'"):
        Config.from_options({"qk_norm_rope_kv_cahce": "required"}, PASSES)
    with pytest.raises(ConfigError, match="off, auto, required"):
        Config.from_options({"qk_norm_rope_kv_cache": "on"}, PASSES)
    with pytest.raises(ConfigError, match="mode, max_tokens"):
        Config.from_options({"qk_norm_rope_kv_cache": {"max_token": 3}}, PASSES)
    with pytest.raises(ConfigError, match="inductor, aot_eager"):
        Config.from_options({"inner": "eager"}, PASSES)
    with pytest.raises(ConfigError, match="validate is True or False"):
        Config.from_options({"validate": "no"}, PASSES)


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": 5},
        {"kernels": [1]},
        {"kv_layout": 5},
        {"inductor": ["max_autotune"]},
        {"validation_seconds": "a"},
        {"validation_mb": float("nan")},
        {"validation_mb": -1},
        "required",
    ],
)
def test_options_of_the_wrong_kind_are_named(options):
    with pytest.raises(ConfigError):
        Config.from_options(options, PASSES)


def test_options_are_read():
    config = Config.from_options(
        {
            "qk_norm_rope_kv_cache": {"mode": "required", "max_tokens": 256},
            "kernels": "triton",
            "inductor": {"max_autotune": True},
        },
        PASSES,
    )
    assert config.mode("qk_norm_rope_kv_cache") == "required"
    assert config.mode("non_causal_attention") == "auto"
    assert config.kernels == ("triton",)
    assert dict(config.inductor) == {"max_autotune": True}
    assert dict(dict(config.pass_options)["qk_norm_rope_kv_cache"]) == {"max_tokens": 256}
    hash(config)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("0", False), ("FALSE", False), ("", None), (None, None)],
)
def test_switches_have_a_value_and_an_origin(monkeypatch, text, value):
    if text is None:
        monkeypatch.delenv("FUSION_AITER", raising=False)
    else:
        monkeypatch.setenv("FUSION_AITER", text)
    switch = env_switch("FUSION_AITER")
    assert switch.value is value
    assert "FUSION_AITER" in switch.origin
    assert Config(aiter=False).aiter_switch().value is False


def test_a_misspelt_switch_is_an_error(monkeypatch):
    monkeypatch.setenv("FUSION_AITER", "ture")
    with pytest.raises(ConfigError, match="ture"):
        env_switch("FUSION_AITER")


# --- requirements ----------------------------------------------------------------------------


def call(target="gfx942", **changes) -> KernelCall:
    tensors = {
        "query": TensorSpec.of(torch.empty(5, 8, 80, dtype=torch.bfloat16)),
        "key_cache": TensorSpec.of(torch.empty(3, 16, 4, 160, dtype=torch.float16)[..., ::2]),
        "k_scale": None,
    }
    fields = {
        "op": "qk_norm_rope_kv_cache",
        "tensors": tensors,
        "attributes": {"rope_style": "interleaved"},
        "target": Target.parse(target, aiter="0.1.19"),
    }
    return KernelCall(**{**fields, **changes})


CONDITIONS = [
    (Vendor(("nvidia",)), "gate.arch", "amd (gfx942)", "nvidia"),
    (Arch(("gfx950",)), "gate.arch", "gfx942", "gfx950"),
    (
        PackageVersion("aiter", ">=0.1.19.post1", "gate.aiter-version"),
        "gate.aiter-version",
        "0.1.19",
        ">=0.1.19.post1",
    ),
    (
        PackageVersion("triton", ">=3.6"),
        "gate.backend-unavailable",
        "not installed",
        ">=3.6",
    ),
    (DtypeIn(("query",), (torch.float16,)), "gate.dtype", "query bfloat16", "float16"),
    (SameDtype(("query", "key_cache")), "gate.dtype", None, "one dtype"),
    (SizeIn("query", -1, (64, 128), "head size", "gate.head-dim"), "gate.head-dim", "80", None),
    (UnitLastStride(("key_cache",)), "gate.cache-stride", "key_cache 2", "1"),
    (OnDevice(("query",), "cuda"), "gate.device", "query on cpu", "cuda"),
    (AttributeIn("rope_style", ("half",)), "gate.argument", "interleaved", "half"),
    (KVLayout(("SHUFFLE",)), "gate.kv-layout", "NHD", "SHUFFLE"),
    (Absent("query"), "gate.argument", None, "absent"),
    (Check("pages", "one", "gate.block-size", lambda c: (False, 3)), "gate.block-size", "3", "one"),
]


@pytest.mark.parametrize(("condition", "code", "have", "need"), CONDITIONS)
def test_an_unmet_condition_says_what_it_has_and_needs(condition, code, have, need):
    (outcome,) = Requires((condition,)).evaluate(call())
    assert not outcome.ok
    assert outcome.reason is not None
    assert outcome.reason.code == code
    if have is not None:
        assert outcome.reason.have == have
    if need is not None:
        assert outcome.reason.need == need


def test_met_conditions_have_no_reason():
    conditions = (
        Vendor(("amd",)),
        Arch(("gfx942",)),
        MinCapability(80),
        DtypeIn(("query", "k_scale"), (torch.bfloat16,)),
        SizeIn("query", -1, range(32, 513), "head size", "gate.head-dim"),
        UnitLastStride(("query",)),
        OnDevice(("query",), "cpu"),
        KVLayout(("NHD",)),
        Absent("k_scale"),
    )
    assert Requires(conditions).unmet(call()) == []
    assert all(o.have for o in Requires(conditions).evaluate(call()))


def test_all_unmet_conditions_are_listed_and_none_raises():
    def broken(_):
        raise ZeroDivisionError("oops")

    requires = Requires(
        (Arch(("gfx950",)), Check("broken", "", "gate.dtype", broken), KVLayout(("SHUFFLE",)))
    )
    codes = [r.code for r in requires.unmet(call())]
    assert codes == ["gate.arch", "internal.error", "gate.kv-layout"]


def test_capability_compares_numbers():
    assert MinCapability(90).look(call("sm_120")).ok
    assert not MinCapability(90).look(call("sm_80")).ok
    assert MinCapability(90).look(call("gfx942")).ok


def test_specs_of_symbolic_shapes_add_no_guard():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        tensor = mode.from_tensor(torch.empty(7, 4, 8), static_shapes=False)
    spec = TensorSpec.of(tensor)
    assert spec.hint(0) == 7
    assert spec.hints == (7, 4, 8)
    assert env.guards == []


def test_contiguity_ignores_dimensions_of_size_one():
    assert TensorSpec.of(torch.empty(1, 4, 8)).contiguous
    assert TensorSpec.of(torch.empty(4, 1, 8).transpose(0, 1)).contiguous
    assert not TensorSpec.of(torch.empty(4, 3, 8).transpose(0, 1)).contiguous
    assert not TensorSpec.of(torch.empty(4, 16)[:, :8]).contiguous


# --- selection -------------------------------------------------------------------------------


def kernel(name: str, *conditions, op: str = "kv_cache_write") -> Kernel:
    return Kernel(name, op, lambda: None, Requires(tuple(conditions)), name)


@pytest.fixture
def registry(monkeypatch):
    """Replace the known backends by stand-ins given as {module name: kernels}."""

    def install(broken=None, **modules):
        names = {}
        for name, kernels in modules.items():
            module = types.ModuleType(f"standin_{name}")
            module.KERNELS = tuple(kernels)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            names[name] = module.__name__
        names.update(broken or {})
        monkeypatch.setattr(selection, "BUILTIN", names)
        selection._load.cache_clear()

    yield install
    monkeypatch.undo()
    selection._load.cache_clear()


def test_the_first_accepted_kernel_is_chosen_and_all_are_listed(registry):
    registry(
        aiter=[kernel("aiter", Arch(("gfx950",)))],
        triton=[kernel("triton")],
        reference=[kernel("reference")],
    )
    found = selection.select(call(op="kv_cache_write"))
    assert found.kernel is not None
    assert found.kernel.name == "triton"
    assert [(c.kernel, c.accepted) for c in found.candidates] == [
        ("aiter", False),
        ("triton", True),
        ("reference", True),
    ]
    assert "gate.arch" in found.table()


def test_on_a_cpu_the_reference_is_preferred(registry):
    registry(triton=[kernel("triton")], reference=[kernel("reference")])
    found = selection.select(call("cpu", op="kv_cache_write"))
    assert found.kernel is not None
    assert found.kernel.name == "reference"


def test_a_named_kernel_that_is_not_there_is_a_reason(registry):
    registry(reference=[kernel("reference")], broken={"triton": "no_such_module_anywhere"})
    config = Config(kernels=("triton", "cutlass"))
    found = selection.select(call(op="kv_cache_write", config=config))
    assert found.kernel is None
    assert [r.code for c in found.candidates for r in c.reasons] == [
        "plugin.broken",
        "gate.backend-unavailable",
    ]
    with pytest.raises(selection.NoKernelError, match="known: reference"):
        selection.find("kv_cache_write", "cutlass")


def test_a_named_kernel_of_another_operation_is_a_reason(registry):
    registry(reference=[kernel("reference")], other=[kernel("writer", op="rope_kv_cache")])
    config = Config(kernels=("writer", "reference"))
    found = selection.select(call(op="kv_cache_write", config=config))
    assert found.kernel is not None and found.kernel.name == "reference"
    (reason,) = found.candidates[0].reasons
    assert (reason.code, reason.need) == ("gate.operation", "one of reference")


def test_two_owners_of_one_name_are_an_error(registry):
    registry(one=[kernel("same")], two=[kernel("same")])
    with pytest.raises(selection.DuplicateBackendError, match="standin_one and standin_two"):
        selection.kernels()


def test_import_works_without_optional_packages_and_is_quick():
    code = """
import sys, time
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "aiter", "transformers"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import torch
start = time.perf_counter()
import fusion
print(time.perf_counter() - start)
fusion.explain, fusion.reports, fusion.expect, fusion.inductor_passes, fusion.verify
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 0.3
