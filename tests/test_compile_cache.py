"""What compile caches keep apart, one thing at a time, and what a hit says.

Everything that decides what is rewritten, and by which kernel, changes the key; nothing else
does. The tables below are compared with the code by introspection: a new field of ``Config``, of
``Target``, of ``Kernel`` or of a pass, and a new environment variable that is read anywhere,
fails here until it has a case.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion import store
from fusion.build import make_config, make_manager
from fusion.config import Config
from fusion.discovery import discover
from fusion.graph import foreign
from fusion.match import attention, cache_write
from fusion.ops import dispatch
from fusion.pipeline import PassManager
from fusion.target import Target

ROOT = Path(__file__).resolve().parent.parent
CPU = Target.parse("cpu")


def key(config: Config | None = None, target: Target = CPU, **more: Any) -> str:
    return make_manager(config or Config(), target, **more).uuid()


def fields(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


# --- options ---------------------------------------------------------------------------------

CONFIG: dict[str, list[Any]] = {
    "passes": [
        (("qk_norm_rope_kv_cache", "off"),),
        (("qk_norm_rope_kv_cache", "required"),),
        (("non_causal_attention", "off"),),
    ],
    "pass_options": [(("qk_norm_rope_kv_cache", (("max_tokens", 7),)),)],
    "kernels": [("reference",), ("triton", "reference"), ("reference", "triton")],
    "inner": ["aot_eager", "aot_eager_decomp"],
    "validate": [False],
    "validation_seconds": [0.25],
    "validation_mb": [32.0],
    "numerics": ["exact"],
    "aiter": [True, False],
    "kv_layout": ["shuffle", "dense"],
    "inductor": [(("max_autotune", True),), (("max_autotune", False),)],
}


def test_every_field_of_the_configuration_has_a_case() -> None:
    assert set(CONFIG) == fields(Config)


@pytest.mark.parametrize("name", sorted(CONFIG))
def test_every_option_changes_the_key(name: str) -> None:
    keys = [key(), *(key(Config().replace(**{name: value})) for value in CONFIG[name])]
    assert len(set(keys)) == len(keys)


PASS_OPTIONS: dict[str, dict[str, Any]] = {
    "merge_linears": {},
    "non_causal_attention": {},
    "qk_norm_rope_kv_cache": {"max_tokens": 7},
    "shared_rope_table": {},
}


def test_every_field_of_every_pass_has_a_case() -> None:
    assert {p.name: set(p.options) for p in discover().passes} == {
        name: set(options) for name, options in PASS_OPTIONS.items()
    }


@pytest.mark.parametrize(
    ("name", "option"), [(n, o) for n, options in PASS_OPTIONS.items() for o in options]
)
def test_every_pass_option_changes_the_key(name: str, option: str) -> None:
    value = PASS_OPTIONS[name][option]
    assert key(make_config({name: {option: value}})) != key(make_config({name: "auto"}))
    # ... and not only because the configuration says so: the pass that was built does.
    info = next(p for p in discover().passes if p.name == name)
    one, other = (
        PassManager((p,), Config(), CPU) for p in (info.cls(), info.cls(**{option: value}))
    )
    assert one.uuid() != other.uuid()


# --- environment -----------------------------------------------------------------------------

SWITCHES: dict[str, list[str]] = {
    "FUSION_AITER": ["0", "1"],
    "FUSION_KV_LAYOUT": ["shuffle", "dense"],
    "FUSION_DUMP": ["/somewhere"],  # so that graphs which a cache would answer for are seen
    "TRITON_INTERPRET": ["1"],
}
NO_SWITCHES = {
    "RANK": "names the folder of a dump",
    "NO_COLOR": "how the command line prints",
    "TERM": "how the command line prints",
    "TORCHDYNAMO_VERBOSE": "how much of an error the command line prints",
}


def variables_read() -> set[str]:
    """Every environment variable that is read by name, or named FUSION_*, in fusion's sources."""
    found: set[str] = set()
    for folder in ("fusion", "passes", "backends", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            found.update(re.findall(r"""environ(?:\.get\()?\[?["']([A-Z_]+)["']""", text))
            found.update(re.findall(r"\bgetenv\(.([A-Z_]+)", text))
            found.update(re.findall(r"""["'](FUSION_[A-Z_]+)["'=]""", text))
            found.update(re.findall(r"""["']([A-Z_]+)["'] in os\.environ""", text))
    return found


def test_every_environment_variable_that_is_read_has_a_case() -> None:
    assert variables_read() == {*SWITCHES, *NO_SWITCHES}


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_every_switch_changes_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    keys, prints = [key()], [dispatch.fingerprint()]
    for value in SWITCHES[name]:
        monkeypatch.setenv(name, value)
        keys.append(key())
        prints.append(dispatch.fingerprint())
    assert len(set(keys)) == len(set(prints)) == len(keys)


@pytest.mark.parametrize("name", [*sorted(NO_SWITCHES), "HOME", "CUDA_LAUNCH_BLOCKING"])
def test_other_variables_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(), dispatch.fingerprint()
    monkeypatch.setenv(name, "7")
    assert (key(), dispatch.fingerprint()) == before


# --- target, versions ------------------------------------------------------------------------

TARGET: dict[str, Any] = {
    "vendor": "amd",
    "arch": "gfx942",
    "origin": "probed",
    "versions": (("aiter", "0.1.20"),),
}


def test_every_field_of_the_target_has_a_case() -> None:
    assert set(TARGET) == fields(Target)


@pytest.mark.parametrize("name", sorted(TARGET))
def test_every_field_of_the_target_changes_the_key(name: str) -> None:
    assert key(target=dataclasses.replace(CPU, **{name: TARGET[name]})) != key()


@pytest.mark.parametrize("package", ["torch", "triton", "aiter", "transformers", "rocm", "cuda"])
def test_every_version_changes_the_key(package: str) -> None:
    keys = {key(target=CPU.with_versions(**{package: v})) for v in ("1.0", "1.0.1", "1.0.1.post1")}
    assert len({key(), *keys}) == 4


def test_the_ops_fingerprint_has_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dispatch.fingerprint()
    dispatch._fingerprint.cache_clear()
    monkeypatch.setattr(Target, "current", lambda: CPU.with_versions(torch="9.9"))
    try:
        assert dispatch.fingerprint() != before
    finally:
        dispatch._fingerprint.cache_clear()


# --- registrations ---------------------------------------------------------------------------


def test_what_users_register_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_REGISTRY", dict(foreign._REGISTRY))
    monkeypatch.setattr(attention, "_REGISTERED", dict(attention._REGISTERED))
    monkeypatch.setattr(cache_write, "_OPS", dict(cache_write._OPS))
    seen = [key()]

    def note() -> None:
        seen.append(key())

    foreign.register_op(torch.ops.aten.sinc.default, lambda x: x)
    note()
    foreign.register_op(torch.ops.aten.sinc.default, torch.sin)
    note()
    attention.register_attention(
        "extra::attention", attention.AttentionRoles({"query": "q", "key": "k", "value": "v"})
    )
    note()
    attention.register_attention(
        "extra::attention2", attention.AttentionRoles({"query": "q2", "key": "k", "value": "v"})
    )
    note()
    roles = next(iter(cache_write._OPS.values()))
    cache_write.register_cache_write("extra::write", roles)
    note()
    assert len(set(seen)) == len(seen)


ROLES = {"arguments": {"query": "other"}, "constants": {"causal": False}, "ignored": ("debug",)}


def test_every_role_of_a_registered_operator_changes_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(ROLES) == fields(attention.AttentionRoles)
    roles = attention.AttentionRoles({"query": "q"})
    seen = []
    for changed in (roles, *(dataclasses.replace(roles, **{n: v}) for n, v in ROLES.items())):
        monkeypatch.setattr(attention, "_REGISTERED", {"extra::attention": changed})
        seen.append(key())
    writes = [cache_write.OpRoles()]
    writes += [dataclasses.replace(writes[0], **{n: "other"}) for n in fields(cache_write.OpRoles)]
    for write in writes:
        monkeypatch.setattr(cache_write, "_OPS", {"extra::write": write})
        seen.append(key())
    assert len(set(seen)) == len(seen) == 4 + 9


# --- nothing else ----------------------------------------------------------------------------


def test_nothing_else_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    seen: list[Any] = []
    assert key(observer=seen.append, collector=seen.append) == before
    monkeypatch.chdir(tmp_path)
    random.seed(7)
    torch.manual_seed(7)
    logging.getLogger("fusion").setLevel(logging.DEBUG)
    torch.set_num_threads(torch.get_num_threads())
    assert key() == before
    manager = make_manager(Config(), CPU)
    manager.run(make_fx(lambda x: x.sin() * 2)(torch.ones(3)).graph)
    assert manager.uuid() == before
    logging.getLogger("fusion").setLevel(logging.NOTSET)
    # Options are one configuration in whatever order and spelling they come.
    one = make_config({"numerics": "exact", "validate": False, "kernels": "reference"})
    two = make_config(
        {"kernels": ["reference", "reference"], "validate": False, "numerics": "exact"}
    )
    assert key(one) == key(two) == key(make_config(one))


def test_the_key_of_a_stored_report() -> None:
    """Graph, inputs, pipeline, mode and Inductor's patches; not where the code stands."""

    def stored(text: str = "x.sin()", x: Any = None, *salt: object) -> str:
        gm = make_fx(eval(f"lambda x: {text}"))(torch.ones(3) if x is None else x)
        return store.Key(gm, [x], *salt).digest

    base = stored()
    assert base == stored()
    assert base not in {
        stored("x.cos()"),
        stored("x.sin()", torch.ones(4)),
        stored("x.sin()", torch.ones(3, dtype=torch.float64)),
        stored("x.sin()", None, "other pipeline"),
    }
    with torch.enable_grad():
        assert stored() != base
