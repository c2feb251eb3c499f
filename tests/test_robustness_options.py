"""Wrong options are refused by name, at every door, before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch

import fusion
from fusion import selection
from fusion.build import make_config, make_manager
from fusion.config import Config, ConfigError
from fusion.target import Target
from tests.prologue_block import run, variant
from tests.toy_passes import SinToCos, use_passes

FUSED = "qk_norm_rope_kv_cache"
CPU = Target.parse("cpu")


# --- wrong options ---------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    ({FUSED: {"max_tokens": 0}}, "max_tokens is 0, it must be at least 1, or None"),
    ({FUSED: {"max_tokens": -3}}, "max_tokens is -3"),
    ({FUSED: {"max_tokens": "8"}}, r"max_tokens is '8', not int \| None"),
    ({FUSED: {"max_tokens": True}}, "max_tokens is True"),
    ({FUSED: {"max_tokens": 8.0}}, "max_tokens is 8.0"),
    ({FUSED: {"max_tokens": [8]}}, r"max_tokens is \[8\]"),
    ({FUSED: {"mode": ["auto"]}}, "Valid: off, auto, required"),
    ({FUSED: {3: 4}}, f"option of {FUSED} '3'"),
    ({FUSED: None}, "Valid: off, auto, required"),
    ({"kernels": ["tritn"]}, "unknown kernel 'tritn'; did you mean 'triton'.*Valid: aiter"),
    ({"kernels": ["reference", ""]}, "unknown kernel ''"),
    ({"kernels": "auto"}, "unknown kernel 'auto'"),
    ({"kernels": {"triton": 1}}, "kernels is a kernel's name or a list"),
    ({"inductor": {"max_autotuned": True}}, "unknown option of inductor.*did you mean 'max_auto"),
    ({"inductor": {"max_autotune": "yes"}}, "max_autotune"),
    ({"inductor": {3: True}}, "inductor maps names of options to values, not 3"),
    ({"numerics": None}, "unknown numerics 'None'"),
    ({"inner": ["inductor"]}, "unknown inner"),
    ({"aiter": "yes"}, "aiter is True, False or None"),
    ({"validation_mb": True}, "validation_mb is a number"),
    ([("inner", "aot_eager")], "options is a mapping"),
    (Config(passes=((FUSED, "always"),)), "Valid: off, auto, required"),
    (Config(passes=(("no_such_pass", "auto"),)), "unknown pass 'no_such_pass'"),
    (Config(pass_options=((FUSED, (("max_token", 3),)),)), "did you mean 'max_tokens'"),
    (Config(kernels=("tritn",)), "unknown kernel 'tritn'"),
    (Config(inner="outer"), "unknown inner 'outer'"),
    (Config(validate=1), "validate is True or False"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=lambda v: repr(v)[:40])
def test_wrong_options_are_refused_by_name(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){text}"):
        make_manager(make_config(options), CPU)


def test_wrong_options_are_refused_at_every_door() -> None:
    wrong, right = {"kernels": ["tritn"]}, "unknown kernel 'tritn'"
    with pytest.raises(ConfigError, match=right):
        fusion.explain(lambda x: x, torch.ones(2), options=wrong)
    with pytest.raises(ConfigError, match=right):
        fusion.inductor_passes(wrong)
    with pytest.raises(ConfigError, match=right):
        fusion.verify(lambda x: x, torch.ones(2), options=wrong)
    with pytest.raises(Exception, match=right):
        torch.compile(lambda x: x + 1, backend="fusion", options=wrong)(torch.ones(2))


@pytest.mark.parametrize("name", ["FUSION_AITER", "FUSION_KV_LAYOUT"])
def test_a_switch_that_nobody_can_read_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "shufle")
    with pytest.raises(ConfigError, match=rf"{name}=.?shufle"):
        make_manager(Config(), CPU)


@dataclasses.dataclass(frozen=True)
class Plugged(SinToCos):
    """A plug-in's pass with options of every kind."""

    flag: bool = False
    ratio: float = 1.0
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    limit: int | str | None = None


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("flag", [True], [1, "yes", None]),
        ("ratio", [0.5, 2], ["2", True, None]),
        ("kind", ["a", "b"], ["c", 1]),
        ("names", [["x"], ("x",)], []),  # what it takes for a collection is its own business
        ("limit", [3, "all", None], [2.5, True, []]),
        ("skip", ["x"], [None, 3]),
    ],
)
def test_the_options_of_a_plug_in_are_checked_by_their_types(
    name: str, right: list[Any], wrong: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_passes(monkeypatch, Plugged)
    for value in right:
        (made,) = make_manager(make_config({"sin_to_cos": {name: value}}), CPU).passes
        assert getattr(made, name) == value
    for value in wrong:
        with pytest.raises(ConfigError, match=f"options of pass sin_to_cos: {name} is "):
            make_manager(make_config({"sin_to_cos": {name: value}}), CPU)


def test_options_that_cannot_be_hashed_are_fine() -> None:
    """Inductor has options that are lists and mappings."""
    options = {"inductor": {"post_grad_fusion_options": {}}, "inner": "aot_eager"}
    outcome = run(variant(), options=options)
    outcome.assert_equal()
    assert outcome.site.status == "fused"


def test_a_kernel_of_another_operation_is_no_error() -> None:
    """One list serves all operations: a kernel that offers only some of them is reported."""
    known = {op: {k.name for k in selection.kernels(op)} for op in fusion.ops.OPERATIONS}
    partly = set.union(*known.values()) - set.intersection(*known.values())
    for name in partly:
        make_config({"kernels": [name]})
    assert make_config({"kernels": ["reference", "triton", "reference"]}).kernels == (
        "reference",
        "triton",
    )
