"""Faults that other engines had in public: each has a test here that says how it is with us.

``tests/data/open_cases.json`` maps each case (in our own words, source in brackets) to the tests
that try it. The cases below had no test elsewhere.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion
from fusion.match import cache_write
from fusion.match.cache_write import OpRoles, register_cache_write
from tests.prologue_block import NORMS, ROPES, Inputs, inputs, run, same_bits, variant
from tests.test_pass_qk_norm_rope_kv_cache import after, fuses

ROOT = Path(__file__).resolve().parents[1]
CASES = json.loads((ROOT / "tests/data/open_cases.json").read_text())
FUSED = "qk_norm_rope_kv_cache"
HQ, HK, D = 8, 4, 32


def compiled(fn, **options):
    return torch.compile(fn, backend="fusion", options={"inner": "aot_eager", **options})


def equal(fn, *makers):
    """Run eager and fused on equal inputs; all outputs and inputs must have equal bits after."""
    mine, other = [m() for m in makers], [m() for m in makers]
    got, want = compiled(fn)(*mine), fn(*other)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)
    for a, b in zip(mine, other, strict=True):
        for name in ("qkv", "cache") if isinstance(a, Inputs) else ():
            assert same_bits(getattr(a, name), getattr(b, name)), name
    return [s for s in fusion.reports()[-1].sites if s.pass_name == FUSED]


def parts(x, h=HQ, k_h=HK, d=D):
    """q, k and v of a packed row."""
    q, k, v = x.qkv.split([h * d, k_h * d, k_h * d], -1)
    return q.view(-1, h, d), k.view(-1, k_h, d), v.view(-1, k_h, d)


def turn(t, w, cos, sin, rope="chunk", rotary=D):
    return ROPES[rope](NORMS["late"](t, w, 1e-6), cos, sin, rotary)


def write(x, k, v, block=None):
    key, value = x.planes(block or variant())
    fusion.ops.kv_cache_write(k, v, key, value, x.slots)
    return key.float().sum()


def tables(x):
    return x.cos_sin[x.positions].chunk(2, -1)


# --- the table -------------------------------------------------------------------------------


def test_each_case_names_tests_that_exist() -> None:
    for case in CASES:
        for test in case["tests"]:
            file, name = test.split("::")
            found = [n for n in ast.parse((ROOT / file).read_text()).body
                     if isinstance(n, ast.FunctionDef) and n.name == name]  # fmt: skip
            assert len(found) == 1, test
            assert name.startswith("test_") and Path(file).name.startswith("test_")


@pytest.mark.slow
def test_each_case_names_tests_that_are_collected() -> None:
    wanted = {test for case in CASES for test in case["tests"]}
    files = sorted({test.split("::")[0] for test in wanted})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    there = {line.split("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert wanted <= there, sorted(wanted - there)


def test_each_case_is_told_once_with_its_source() -> None:
    assert len(CASES) == 53
    assert len({case["case"] for case in CASES}) == len(CASES)
    for case in CASES:
        assert case["tests"]
        assert "[" in case["case"] and case["case"].endswith("]")
        assert len(set(case["tests"])) == len(case["tests"])


# --- not matching ----------------------------------------------------------------------------

NOISE = {
    "view": lambda t: t.view(t.shape[0], -1).view(t.shape),
    "reshape": lambda t: t.reshape(1, *t.shape).reshape(t.shape),
    "flatten": lambda t: t.flatten(1).unflatten(1, t.shape[1:]),
    "unflatten": lambda t: t.unflatten(2, (2, -1)).flatten(2),
    "redundant pairs": lambda t: t.transpose(0, 1).transpose(0, 1).contiguous()[None].squeeze(0),
}


@pytest.mark.parametrize("stage", ["split", "norm", "rope"])
@pytest.mark.parametrize("noise", sorted(NOISE))
def test_noise_in_shapes_is_looked_through(noise, stage):
    change = NOISE[noise]
    fuses(variant(hook=after(stage, lambda q, k: (change(q), change(k)))))


def test_one_layer_that_no_kernel_takes_leaves_the_others_fused():
    good, odd = variant(), variant(dim=576, kv_heads=1, heads=2)

    def two(x, y):
        return good(x), odd(y)

    report = fusion.explain(
        two, inputs(good), inputs(odd), target="sm_90", options={"kernels": ["triton"]}
    )
    first, second = (s for s in report.sites if s.pass_name == FUSED)
    assert (first.status, first.kernel) == ("fused", "triton")
    assert (second.status, second.reasons[0].code) == ("refused", "gate.head-dim")


@pytest.mark.parametrize("wide", ["q", "k"])
@pytest.mark.parametrize("norm", ["late", "early"])
def test_one_norm_weight_in_float32(wide, norm):
    """The other stays bf16. Multiplied late, one side would come out in f32: right all the same."""

    def block(x):
        q, k, v = parts(x)
        cos, sin = tables(x)
        weights = [w.float() if n == wide else w for n, w in (("q", x.q_weight), ("k", x.k_weight))]
        q, k = (
            ROPES["chunk"](NORMS[norm](t, w, 1e-6), cos, sin, D).to(x.qkv.dtype)
            for t, w in zip((q, k), weights, strict=True)
        )
        return q, write(x, k, v)

    site, *_ = equal(block, lambda: inputs(variant()))
    if norm == "early":
        assert site.status == "fused", site.reasons
    else:
        assert site.status == "missed"
        assert site.reasons[0].code == "match.q-k-differ"
        assert all(d in site.reasons[0].have for d in ("torch.float32", "torch.bfloat16"))


LIBRARY = torch.library.Library("fusion_open", "DEF")
for name, first in (("write_named_out", "out"), ("write_named_key", "key_cache")):
    LIBRARY.define(
        f"{name}(Tensor k, Tensor v, Tensor(a!) {first}, Tensor(b!) other, Tensor at) -> ()"
    )
    LIBRARY.impl(
        name,
        lambda k, v, kc, vc, at: fusion.ops.kv_cache_write(k, v, kc, vc, at),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(f"fusion_open::{name}", lambda *a, **b: None, lib=LIBRARY)


@pytest.mark.parametrize("name", ["out", "key_cache"])
@pytest.mark.parametrize("keywords", [False, True])
def test_names_of_arguments_carry_no_meaning(name, keywords, monkeypatch):
    op = {"out": "write_named_out", "key_cache": "write_named_key"}[name]
    monkeypatch.setattr(cache_write, "_OPS", dict(cache_write._OPS))
    register_cache_write(
        f"fusion_open::{op}",
        OpRoles(key="k", value="v", key_cache=name, value_cache="other", slots="at"),
    )
    call = getattr(torch.ops.fusion_open, op)

    def block(x):
        q, k, v = parts(x)
        cos, sin = tables(x)
        q, k = turn(q, x.q_weight, cos, sin), turn(k, x.k_weight, cos, sin)
        key, value = x.planes(variant())
        if keywords:
            call(at=x.slots, other=value, v=v, k=k, **{name: key})
        else:
            call(k, v, key, value, x.slots)
        return q, key.float().sum()

    if keywords and name == "out":
        # Dynamo breaks the graph at any call with a keyword called `out`: told, and right.
        before = len(fusion.reports())
        equal(block, lambda: inputs(variant()))
        reasons = [r for p in fusion.reports()[before:] for s in p.sites for r in s.reasons]
        assert "match.graph-break" in {r.code for r in reasons}
        return
    (site,) = equal(block, lambda: inputs(variant()))
    assert site.status == "fused", site.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["[S,D]", "[1,S,D]"])
def test_tables_that_the_graph_computes(form, dtype):
    """Hugging Face: cos and sin of position times frequency, doubled, in the model's dtype."""

    def block(x):
        angle = x.positions.float()[:, None] * (10000 ** (-torch.arange(0, D, 2) / D))
        both = torch.cat((angle, angle), -1)
        cos, sin = both.cos().to(dtype), both.sin().to(dtype)
        if form == "[1,S,D]":
            cos, sin = cos[None], sin[None]
        q, k, v = parts(x)

        def rotated(t, w):
            t = NORMS["late"](t, w, 1e-6)
            t = t.transpose(0, 1)[None] if form == "[1,S,D]" else t
            c, s = (c.unsqueeze(1) for c in (cos, sin))
            half = torch.cat((-t[..., D // 2 :], t[..., : D // 2]), -1)
            t = (t * c + half * s).to(x.qkv.dtype)
            return t[0].transpose(0, 1) if form == "[1,S,D]" else t

        q, k = rotated(q, x.q_weight), rotated(k, x.k_weight)
        return q, write(x, k, v)

    (site,) = equal(block, lambda: inputs(variant()))
    assert site.status == "fused", site.reasons


# --- wrong results ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 257, 4096])
@pytest.mark.parametrize("rotary", [8, 16, 32])
def test_partial_rotary_beyond_the_first_head_at_many_tokens(tokens, rotary):
    fuses(variant(tokens=tokens, rotary=rotary, blocks=260))


def test_the_tail_of_a_head_keeps_the_normed_value():
    """rotary_dim 64 of 128, a table of exactly that width; element 64 on is the norm's."""
    block = variant(dim=128, rotary=64, padding=False)
    outcome = run(block)
    assert outcome.site.status == "fused"
    outcome.assert_equal()
    (_, x) = outcome.runs[-1]
    key, _ = x.planes(block)
    _, k, _ = parts(x, d=128)
    normed = NORMS["late"](k, x.k_weight, 1e-6)
    assert same_bits(key.flatten(0, 1)[x.slots][..., 64:], normed[..., 64:])
    assert not same_bits(key.flatten(0, 1)[x.slots][..., :64], normed[..., :64])


@pytest.mark.parametrize("tokens", [3, 5])
def test_three_positions_a_token_are_no_flat_positions(tokens):
    """mrope: each section of the head goes by another row of positions [3, T]; T may be 3."""

    def block(x, positions):
        rows = x.cos_sin[positions]  # [3, T, D]
        cos, sin = rows.chunk(2, -1)
        sections = [8, 4, 4]
        cos, sin = (
            torch.cat([p[i] for i, p in enumerate(t.split(sections, -1))], -1) for t in (cos, sin)
        )
        q, k, v = parts(x)
        return turn(q, x.q_weight, cos, sin), write(x, turn(k, x.k_weight, cos, sin), v)

    g0 = variant(tokens=tokens)
    positions = torch.randint(0, 64, (3, tokens))
    (site,) = equal(block, lambda: inputs(g0), positions.clone)
    assert site.status == "fused", site.reasons
    assert site.facts["rope"]["tables"] != "by position"


@pytest.mark.parametrize("factor", ["table", "q after rope"])
def test_a_yarn_factor_is_neither_lost_nor_applied_twice(factor):
    def block(x):
        cos, sin = tables(x)
        if factor == "table":
            cos, sin = cos * 1.2, sin * 1.2
        q, k, v = parts(x)
        q, k = turn(q, x.q_weight, cos, sin), turn(k, x.k_weight, cos, sin)
        if factor != "table":
            q *= 1.2
        return q, write(x, k, v)

    (site,) = equal(block, lambda: inputs(variant()))
    assert site.status == "fused", site.reasons


def test_tables_past_one_are_taken_as_they_are():
    def make():
        x = inputs(variant())
        x.cos_sin *= 1.2
        assert x.cos_sin.abs().max() > 1.1
        return x

    (site,) = equal(lambda x: variant()(x), make)
    assert site.status == "fused"


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_is_overwritten_is_read_first(inner):
    """The model returns the original qkv, and writes the rotated q into a view of it."""

    def block(x):
        original = x.qkv.clone()
        q, k, v = parts(x)
        cos, sin = tables(x)
        new, k = turn(q, x.q_weight, cos, sin), turn(k, x.k_weight, cos, sin)
        seen = write(x, k, v)
        q.copy_(new)
        return original, new, seen, x.qkv * 2

    # f32, where Inductor rounds where eager does, and whole numbers, so that sums are exact.
    g0 = variant(dtype=torch.float32)
    x, y = inputs(g0), inputs(g0)
    run_ = torch.compile(block, backend="fusion", options={"inner": inner})
    for a, b in zip(run_(x), block(y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.qkv, y.qkv, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.cache, y.cache, rtol=1e-5, atol=1e-5)
    site, *_ = [s for s in fusion.reports()[-1].sites if s.pass_name == FUSED]
    assert site.status == "fused", site.reasons


CUTS = {
    "q[:-1]": lambda q, t: q[:-1],
    "q[0:T]": lambda q, t: q[0:t],
    "expand by 1": lambda q, t: q[None].expand(1, -1, -1, -1)[0],
}


@pytest.mark.parametrize("cut", sorted(CUTS))
def test_only_what_does_nothing_is_looked_through(cut):
    """And the token count stays symbolic: one graph serves every count."""

    def block(x):
        q, k, v = parts(x)
        cos, sin = tables(x)
        q, k = turn(q, x.q_weight, cos, sin), turn(k, x.k_weight, cos, sin)
        return CUTS[cut](q, q.shape[0]), write(x, k, v)

    before, fn = len(fusion.reports()), compiled(block)
    for tokens in (7, 5, 9):
        g0 = variant(tokens=tokens, blocks=16)
        x, y = inputs(g0), inputs(g0)
        for t in (x.qkv, x.positions, x.slots):
            torch._dynamo.mark_dynamic(t, 0)
        for a, b in zip(fn(x), block(y), strict=True):
            assert same_bits(a, b)
        assert same_bits(x.cache, y.cache)
    (report,) = fusion.reports()[before:]
    assert [s.status for s in report.sites if s.pass_name == FUSED] == ["fused"]


def test_splits_along_different_dims_are_different():
    """As many tokens as columns: the same sizes split along 0 and along -1."""
    d, h, k_h = 8, 2, 1
    columns = (h + 2 * k_h) * d
    g0 = variant(heads=h, kv_heads=k_h, dim=d, tokens=columns)

    def block(x):
        sizes = [h * d, k_h * d, k_h * d]
        along_tokens = x.qkv.split(sizes, 0)
        q, k, v = (t.view(columns, -1, d) for t in x.qkv.split(sizes, -1))
        cos, sin = tables(x)
        q, k = (turn(t, w, cos, sin, rotary=d) for t, w in ((q, x.q_weight), (k, x.k_weight)))
        return q, write(x, k, v, g0), *(t.float().sum(0) for t in along_tokens)

    (site,) = equal(block, lambda: inputs(g0))
    assert site.status == "fused", site.reasons


def test_the_same_bits_on_every_call_of_a_compiled_block():
    g0 = variant(tokens=8192, heads=2, kv_heads=1, dim=16, blocks=520)
    fn, first = compiled(lambda x: g0(x)), None
    for _ in range(6):
        x = inputs(g0)
        now = (*fn(x), x.cache)
        first = first or now
        assert all(same_bits(a, b) for a, b in zip(first, now, strict=True))
