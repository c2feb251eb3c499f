"""Conditions as data: each outcome word for word, met and unmet, and no condition ever raises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusion.kernel import KernelCall, TensorSpec
from fusion.reason import Reason
from fusion.requires import (
    Absent,
    Arch,
    AttributeIn,
    Check,
    DtypeIn,
    KVLayout,
    MinCapability,
    OnDevice,
    Outcome,
    PackageVersion,
    Requires,
    SameDtype,
    SizeIn,
    UnitLastStride,
    Vendor,
    outcome,
)
from fusion.target import Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def spec(shape, dtype=BF16, stride=None, device="cpu"):
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(tuple(shape), dtype, tuple(stride), device)


def call(target="gfx942", **changes) -> KernelCall:
    tensors = {
        "query": spec((5, 8, 80)),
        "key_cache": spec((4, 16, 2, 80), F16, (5120, 320, 160, 2)),
        "scalar": spec((), F32),
        "thin": spec((3, 1), F32, (1, 7)),
        "symbolic": TensorSpec((None, None), F32, (None, None)),
        "partly": TensorSpec((None, 4), F32, (None, 1)),
        "flat": spec((3, 1, 4), F32, (8, 8, 2)),
        "k_scale": None,
    }
    fields = {
        "op": "kv_cache_write",
        "tensors": tensors,
        "attributes": {"rope_style": "interleaved", "rope_dtype": F32},
        "target": Target.parse(target, aiter="0.1.19", triton="nightly"),
    }
    return KernelCall(**{**fields, **changes})


MET = [
    (Vendor(("cpu", "amd")), ("vendor", "amd (gfx942)", "cpu or amd", "target {origin}")),
    (Arch(("gfx942", "gfx950")), ("arch", "gfx942", "gfx942 or gfx950", "target {origin}")),
    (
        MinCapability(80),
        ("compute capability", "gfx942", "sm_80 or newer", "target {origin}"),
    ),
    (
        PackageVersion("aiter", ">=0.1.19,<0.2"),
        ("aiter version", "0.1.19", ">=0.1.19,<0.2", "target {origin}"),
    ),
    (PackageVersion("aiter", ""), ("aiter version", "0.1.19", "any", "target {origin}")),
    (
        DtypeIn(("query", "key_cache", "k_scale"), (F16, BF16)),
        (
            "dtype of query, key_cache, k_scale",
            "query bfloat16, key_cache float16",
            "float16 or bfloat16",
            "arguments",
        ),
    ),
    (DtypeIn(("k_scale",), (F16,)), ("dtype of k_scale", "absent", "float16", "arguments")),
    (
        SameDtype(("query", "k_scale")),
        ("one dtype for query, k_scale", "query bfloat16", "one dtype", "arguments"),
    ),
    (SameDtype(("k_scale",)), ("one dtype for k_scale", "", "one dtype", "arguments")),
    (
        SizeIn("query", -1, (64, 80), "head size", "gate.head-dim"),
        ("head size", "80", "64 or 80", "shape of query"),
    ),
    (
        SizeIn("query", 0, range(1, 9), "tokens", "gate.head-dim", "1 to 8"),
        ("tokens", "5", "1 to 8", "shape of query"),
    ),
    (
        SizeIn("k_scale", 0, (1,), "scale", "gate.argument"),
        ("scale", "absent", "1", "shape of k_scale"),
    ),
    (
        UnitLastStride(("query", "scalar", "thin", "k_scale", "partly")),
        (
            "unit last stride of query, scalar, thin, k_scale, partly",
            "query 1, thin 7, partly 1",
            "1",
            "strides",
        ),
    ),
    (
        OnDevice(("query", "k_scale"), "cpu"),
        ("device of query, k_scale", "query on cpu", "cpu", "arguments"),
    ),
    (OnDevice(("k_scale",), "cuda"), ("device of k_scale", "absent", "cuda", "arguments")),
    (
        AttributeIn("rope_style", ("half", "interleaved")),
        ("rope_style", "interleaved", "half or interleaved", "arguments"),
    ),
    (AttributeIn("rope_dtype", (F32, BF16)), ("rope_dtype", "float32", "float32 or bfloat16",
                                              "arguments")),
    (AttributeIn("nothing", (None,)), ("nothing", "None", "None", "arguments")),
    (Absent("k_scale"), ("k_scale", "absent", "absent", "arguments")),
    (Absent("never heard of"), ("never heard of", "absent", "absent", "arguments")),
    (KVLayout(("NHD", "SHUFFLE")), ("kv layout", "NHD", "NHD or SHUFFLE", "call")),
    (
        Check("pages", "one", "gate.block-size", lambda c: (True, 1), "the cache"),
        ("pages", "1", "one", "the cache"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "words"), MET, ids=lambda x: type(x).__name__)
def test_what_is_met_says_what_it_saw_and_gives_no_reason(condition, words):
    c = call()
    name, have, need, origin = (w.format(origin=c.target.origin) for w in words)
    assert condition.look(c) == Outcome(name, True, have, need, origin, None)


UNMET = [
    (Vendor(("nvidia", "cpu")), "gate.arch", "amd (gfx942)", "nvidia or cpu",
     "runs on nvidia and cpu only"),
    (Arch(("gfx950",)), "gate.arch", "gfx942", "gfx950", "is not built for gfx942"),
    (PackageVersion("aiter", ">=0.1.19.post1", "gate.aiter-version"), "gate.aiter-version",
     "0.1.19", ">=0.1.19.post1", "aiter 0.1.19"),
    (PackageVersion("aiter", ">=0.1.20"), "gate.backend-unavailable", "0.1.19", ">=0.1.20",
     "aiter 0.1.19"),
    (PackageVersion("torch", "", "gate.aiter-version"), "gate.backend-unavailable",
     "not installed", "any", "torch is not installed"),
    (PackageVersion("triton", ">=3", "gate.aiter-version"), "gate.aiter-version", "nightly",
     ">=3", "triton nightly"),
    (DtypeIn(("query", "key_cache"), (F16, F32)), "gate.dtype", "query bfloat16",
     "float16 or float32", "query has a dtype that the kernel does not take"),
    (DtypeIn(("query", "key_cache"), (F32,), "gate.cache-dtype"), "gate.cache-dtype",
     "query bfloat16, key_cache float16", "float32",
     "query, key_cache has a dtype that the kernel does not take"),
    (SameDtype(("query", "key_cache", "k_scale"), "gate.cache-dtype"), "gate.cache-dtype",
     "query bfloat16, key_cache float16", "one dtype",
     "the kernel wants one dtype for query, key_cache"),
    (SizeIn("query", -1, (64, 128), "head size", "gate.head-dim"), "gate.head-dim", "80",
     "64 or 128", "head size is 80"),
    (SizeIn("query", 1, (64, 128), "heads", "gate.head-dim", "many"), "gate.head-dim", "8",
     "many", "heads is 8"),
    (SizeIn("symbolic", 0, range(99), "tokens", "gate.head-dim", "static"), "gate.head-dim",
     "symbolic", "static", "tokens is symbolic"),
    (UnitLastStride(("query", "key_cache")), "gate.cache-stride", "key_cache 2", "1",
     "key_cache is not contiguous along its last dimension"),
    (UnitLastStride(("symbolic",), "gate.argument"), "gate.argument", "symbolic unknown", "1",
     "symbolic is not contiguous along its last dimension"),
    (UnitLastStride(("flat",)), "gate.cache-stride", "flat 2", "1",
     "flat is not contiguous along its last dimension"),
    (OnDevice(("query", "k_scale"), "cuda"), "gate.device", "query on cpu", "cuda",
     "query must be on cuda"),
    (AttributeIn("rope_style", ("half",)), "gate.argument", "interleaved", "half",
     "rope_style=interleaved has no home in the kernel"),
    (AttributeIn("rope_dtype", (BF16,), "gate.dtype"), "gate.dtype", "float32", "bfloat16",
     "rope_dtype=float32 has no home in the kernel"),
    (Absent("query"), "gate.argument", "bfloat16[5, 8, 80]", "absent",
     "query has no home in the kernel"),
    (Absent("symbolic", "gate.scale-location"), "gate.scale-location", "float32[?, ?]", "absent",
     "symbolic has no home in the kernel"),
    (KVLayout(("SHUFFLE",)), "gate.kv-layout", "NHD", "SHUFFLE",
     "does not address the NHD layout"),
    (Check("pages", "one", "gate.block-size", lambda c: (False, 3)), "gate.block-size", "3", "one",
     "pages is 3"),
    (Check("pages", "one", "gate.block-size", lambda c: (False, 3, "too many")),
     "gate.block-size", "3", "one", "too many"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "code", "have", "need", "message"), UNMET, ids=lambda x: type(x).__name__
)
def test_what_is_not_met_says_both_sides_and_why(condition, code, have, need, message):
    seen = condition.look(call())
    assert not seen.ok
    assert (seen.have, seen.need) == (have, need)
    assert seen.reason == Reason(code, message, have=have, need=need)


@pytest.mark.parametrize(
    ("target", "least", "ok"),
    [
        ("sm_80", 80, True), ("sm_79", 80, False), ("sm_75", 80, False), ("sm_120", 90, True),
        ("sm_90", 120, False), ("gfx942", 999, True), ("cpu", 999, True),
    ],
)  # fmt: skip
def test_capabilities(target, least, ok):
    seen = MinCapability(least).look(call(target))
    assert seen.ok is ok
    if not ok:
        assert seen.reason == Reason(
            "gate.arch", f"needs sm_{least} or newer", have=target, need=f"sm_{least} or newer"
        )


@pytest.mark.parametrize(
    ("target", "ok"), [("gfx942", True), ("gfx803", False), ("gfx9999", False), ("sm_80", True)]
)
def test_chips_of_one_maker(target, ok):
    """Triton's compiler fails for chips that it does not know, at the first call."""
    seen = Arch(("gfx942", "gfx950"), vendor="amd").look(call(target))
    assert (seen.ok, seen.name, seen.have) == (ok, "arch (amd)", target)
    assert seen.ok or seen.reason == Reason(
        "gate.arch", f"is not built for {target}", have=target, need="gfx942 or gfx950"
    )


def test_a_chip_whose_capability_nobody_knows_is_refused():
    other = dataclasses.replace(call().target, vendor="other", arch="tpu")
    assert MinCapability(80).look(dataclasses.replace(call(), target=other)).ok
    strange = dataclasses.replace(call().target, vendor="nvidia", arch="blackwell")
    assert strange.capability is None
    seen = MinCapability(0).look(dataclasses.replace(call(), target=strange))
    assert (seen.ok, seen.have) == (False, "blackwell")


def test_a_development_version_counts():
    """A pre-release satisfies a range that does not name pre-releases."""
    target = Target.parse("gfx942", aiter="0.1.20.dev3")
    c = dataclasses.replace(call(), target=target)
    assert PackageVersion("aiter", ">=0.1.19,<0.2").look(c).ok
    assert not PackageVersion("aiter", ">=0.1.20").look(c).ok


def test_outcomes_are_text():
    seen = outcome("n", False, 3, None, "o", "gate.dtype", "m")
    assert (seen.have, seen.need) == ("3", "None")
    assert seen.reason == Reason("gate.dtype", "m", have="3", need="None")
    assert outcome("n", True, 3, None, "o", "gate.dtype", "m").reason is None


def test_requires_keeps_the_order_and_survives_a_broken_condition():
    class Broken:
        def look(self, call):
            raise KeyError("gone")

        def __repr__(self):
            return "Broken()"

    requires = Requires((Arch(("gfx950",)),)) + (Broken(),)  # noqa: RUF005
    requires = requires + Requires((KVLayout(("NHD",)),))
    assert len(requires.conditions) == 3
    outcomes = requires.evaluate(call())
    assert [o.ok for o in outcomes] == [False, False, True]
    broken = outcomes[1]
    assert (broken.name, broken.have, broken.need, broken.origin) == (
        "Broken()", "KeyError: 'gone'", "", "condition",
    )  # fmt: skip
    assert broken.reason == Reason("internal.error", "condition Broken() raised KeyError: 'gone'")
    assert requires.unmet(call()) == [outcomes[0].reason, broken.reason]
    assert Requires().evaluate(call()) == []


def test_what_is_no_ordinary_error_is_not_swallowed():
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Requires((Check("c", "", "gate.dtype", stop),)).evaluate(call())


def test_conditions_are_data():
    """Equal fields, equal conditions; the code of a check plays no part; nothing is changeable."""
    assert Check("a", "b", "gate.dtype", lambda c: (True, 0)) == Check(
        "a", "b", "gate.dtype", lambda c: (False, 1)
    )
    assert Vendor(("cpu",)) != Vendor(("amd",))
    for condition, *_ in [*MET, *UNMET]:
        assert hash(condition) is not None
        with pytest.raises(dataclasses.FrozenInstanceError):
            condition.anything = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Requires().conditions = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVLayout(("NHD",)).look(call()).ok = False
