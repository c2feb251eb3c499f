"""The prologue pass end to end: every spelling fuses bit for bit, every look-alike does not."""

from __future__ import annotations

import re

import pytest
import torch

import fusion
from fusion.layout import KVCacheLayout
from tests.prologue_block import NORMS, ROPES, Block, inputs, run, same_bits, variant

FUSED = "qk_norm_rope_kv_cache"


def rotated(x):
    """q, k and v of G0, normed and rotated."""
    q, k, v = x.qkv.split([8 * 32, 4 * 32, 4 * 32], -1)
    q, k, v = q.view(-1, 8, 32), k.view(-1, 4, 32), v.view(-1, 4, 32)
    cos, sin = x.cos_sin[x.positions].chunk(2, -1)
    q, k = (
        ROPES["chunk"](NORMS["late"](t, w, 1e-6), cos, sin, 32)
        for t, w in ((q, x.q_weight), (k, x.k_weight))
    )
    return q, k, v


def fuses(block: Block, operation: str = FUSED, **how) -> None:
    outcome = run(block, **how)
    site = outcome.site
    assert (site.status, site.operation) == ("fused", operation), site.reasons
    assert site.validation["status"] == "passed"
    outcome.assert_equal()


# --- spellings -------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("norm", sorted(set(NORMS) - {"none"}))
def test_norm_and_rope_spellings(norm, rope):
    fuses(variant(norm=norm, rope=rope), unfused=rope == "chunk")


FLAT = ("slots", "index_copy", "scatter", "range")
"""Spellings that view blocks and offsets as one dimension, which not every layout allows."""


@pytest.mark.parametrize(
    ("write", "layout"),
    [
        (write, layout)
        for write in ("op", "block_offset", *FLAT)
        for layout in KVCacheLayout
        if layout.name not in ("SHUFFLE", "HF_STATIC")
        and (write not in FLAT or layout.name in ("NHD", "KV_FIRST"))
    ],
)
def test_cache_write_spellings(write, layout):
    fuses(variant(write=write, layout=layout))


def test_a_complex_table_as_a_graph_input():
    """Llama's own spelling: freqs_cis, rotated by a complex product."""

    def block(x, table):
        q, k, v = x.qkv.split([8 * 32, 4 * 32, 4 * 32], -1)
        q, k, v = q.view(-1, 8, 32), k.view(-1, 4, 32), v.view(-1, 4, 32)
        rows = table[x.positions].unsqueeze(1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) * rows)
            .flatten(-2)
            .to(t.dtype)
            for t in (q, k)
        )
        key, value = x.planes(variant())
        fusion.ops.kv_cache_write(k, v, key, value, x.slots)
        return q, key.float().sum()

    x, y = inputs(variant()), inputs(variant())
    table = torch.polar(torch.ones(64, 16), torch.rand(64, 16) * 6)
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    for a, b in zip(block(x, table), fn(y, table), strict=True):
        assert same_bits(a, b)
    assert same_bits(x.cache, y.cache)
    (site,) = fusion.reports()[-1].sites
    assert (site.status, site.operation) == ("fused", "rope_kv_cache"), site.reasons


@pytest.mark.parametrize("rotary", [8, 16, 32])
@pytest.mark.parametrize("rope", sorted(ROPES))
def test_partial_rotary(rope, rotary):
    fuses(variant(rope=rope, rotary=rotary))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope_dtype", [None, torch.float32])
def test_rounding_points(dtype, rope_dtype):
    fuses(variant(dtype=dtype, rope_dtype=rope_dtype))
    fuses(variant(dtype=dtype, rope_dtype=rope_dtype, norm="early", rope="rotate_half"))


def test_rope_alone_is_the_whole_chain_of_a_model_without_norms():
    fuses(variant(norm="none"), "rope_kv_cache")
    fuses(variant(norm="none", rope="interleaved", rotary=16), "rope_kv_cache")


def test_float32_weights_with_bfloat16_activations():
    fuses(variant(weight_dtype=torch.float32, norm="early"))


def test_each_side_has_its_own_eps():
    fuses(variant(q_eps=1e-6, k_eps=1e-3))


@pytest.mark.parametrize("tokens", [1, 2, 5, 257])
@pytest.mark.parametrize("rotary", [8, 32])
def test_token_counts(tokens, rotary):
    fuses(variant(tokens=tokens, rotary=rotary, blocks=40))


def test_a_token_count_that_equals_other_sizes():
    """Sizes are no identity: T == Hk, T == Hq, T == D, blocks == block size == D."""
    for tokens in (4, 8, 32):
        fuses(variant(tokens=tokens, blocks=32, block_size=32))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_head_counts(kv_heads):
    fuses(variant(heads=24, kv_heads=kv_heads))


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
def test_head_sizes(dim):
    fuses(variant(dim=dim, rope="rotate_half"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_caches_with_their_own_scales(dtype):
    fuses(variant(cache_dtype=dtype))
    fuses(variant(cache_dtype=dtype, layout=KVCacheLayout.KV_FIRST, dtype=torch.float32))


def test_outliers_round_where_the_graph_rounds():
    block = variant(tokens=9)
    x = inputs(block)
    x.qkv[:, ::17] *= 1e3
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    y = inputs(block)
    y.qkv[:, ::17] *= 1e3
    for a, b in zip(block(x), fn(y), strict=True):
        assert same_bits(a, b)
    assert same_bits(x.cache, y.cache)
    assert fusion.reports()[-1].sites[0].status == "fused"


# --- shapes that move ------------------------------------------------------------------------


def prologue(x):
    """G0 with constant head counts (ints of plain objects are symbolic under dynamic=True)."""
    q, k, v = rotated(x)
    key, value = x.planes(variant())
    fusion.ops.kv_cache_write(k, v, key, value, x.slots)
    return q, key.float().sum()


@pytest.mark.parametrize("how", ["dynamic", "mark"])
def test_dynamic_token_counts(how):
    before = len(fusion.reports())
    fn = torch.compile(
        prologue,
        backend="fusion",
        options={"inner": "aot_eager"},
        dynamic=True if how == "dynamic" else None,
    )
    for tokens in (7, 64, 5, 1, 7):
        this = variant(tokens=tokens, blocks=16)
        x, y = inputs(this), inputs(this)
        if how == "mark" and tokens > 1:
            for t in (y.qkv, y.positions, y.slots):
                torch._dynamo.mark_dynamic(t, 0)
        for a, b in zip(prologue(x), fn(y), strict=True):
            assert same_bits(a, b)
        assert same_bits(x.cache, y.cache)
    reports = fusion.reports()[before:]
    # One graph for T > 1, one more for T = 1, which torch specialises.
    assert len(reports) <= 2
    assert [s.reasons for r in reports for s in r.sites if s.status != "fused"] == []


def test_the_pass_adds_no_guard():
    guards = {}
    for mode in ("off", "auto"):
        torch._dynamo.reset()
        x = inputs(variant(tokens=7))
        for t in (x.qkv, x.positions, x.slots):
            torch._dynamo.mark_dynamic(t, 0)
        torch.compile(
            prologue,
            backend="fusion",
            options={"inner": "aot_eager", FUSED: mode},
        )(x)
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        (entry,) = _debug_get_cache_entry_list(prologue.__code__)
        # Dynamo numbers its own names anew in every compile.
        guards[mode] = [re.sub(r"___\d+", "", g) for g in entry.guard_manager.code_parts]
    assert guards["off"] == guards["auto"]


def test_zero_tokens_leave_the_cache_alone_and_the_next_call_works():
    block = variant(norm="late")
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"}, dynamic=True)
    empty = variant(tokens=0)
    x = inputs(empty)
    before = x.cache.clone()
    q, _ = fn(x)
    assert q.shape == (0, 8, 32)
    assert same_bits(x.cache, before)
    a, b = inputs(block), inputs(block)
    for left, right in zip(block(a), fn(b), strict=True):
        assert same_bits(left, right)
    assert same_bits(a.cache, b.cache)


# --- look-alikes -----------------------------------------------------------------------------


def after(stage, change):
    def hook(name, q, k):
        return change(q, k) if name == stage else (q, k)

    return hook


def flipped(q, k):
    """The rotation in the other direction undoes and goes back: not what was written."""
    d = q.shape[-1] // 2
    return torch.cat((q[..., d:], -q[..., :d]), -1), k


LOOK_ALIKES = {
    "extra scale after rope (YaRN twice)": (
        after("rope", lambda q, k: (q, k * 1.2)),
        ("missed", "partial"),
    ),
    "extra scale on q after rope": (after("rope", lambda q, k: (q * 1.2, k)), ("fused",)),
    "clamp after rope": (after("rope", lambda q, k: (q, k.clamp(-1, 1))), ("missed", "partial")),
    "something between norm and rope": (
        after("norm", lambda q, k: (q + 0.25, k + 0.25)),
        ("partial",),
    ),
    "norm on one side only": (after("split", lambda q, k: (q, k)), ("fused",)),
    "q and k swapped in the split": (
        after("split", lambda q, k: (torch.cat((k, k), 1), q[:, ::2])),
        ("fused", "partial"),
    ),
}


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("name", sorted(LOOK_ALIKES))
def test_look_alikes_are_right_or_refused(name, validate):
    hook, allowed = LOOK_ALIKES[name]
    outcome = run(variant(hook=hook), options={"validate": validate})
    assert outcome.site.status in allowed, outcome.site.reasons
    outcome.assert_equal()
    if outcome.site.status != "fused":
        assert outcome.site.reasons[0].node


def bad_rope(sign_a=-1, sign_b=1, swap=False):
    def rope(x, cos, sin, rotary):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if swap:
            cos, sin = sin, cos
        rot, rest = x[..., :rotary], x[..., rotary:]
        a, b = rot.chunk(2, -1)
        first = a * cos - b * sin if sign_a < 0 else a * cos + b * sin
        second = b * cos + a * sin if sign_b > 0 else b * cos - a * sin
        return torch.cat((first, second, rest), -1)

    return rope


def bad_norm(kind):
    def norm(x, w, eps):
        n = x.float()
        if kind == "sum":
            n = n * torch.rsqrt(n.pow(2).sum(-1, keepdim=True) + eps)
        elif kind == "head axis":
            n = n * torch.rsqrt(n.pow(2).mean(-2, keepdim=True) + eps)
        elif kind == "centred":
            n = n * torch.rsqrt((n - n.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + eps)
        elif kind == "abs":
            n = n * torch.rsqrt(n.abs().mean(-1, keepdim=True) + eps)
        elif kind == "eps outside":
            n = n * (torch.rsqrt(n.pow(2).mean(-1, keepdim=True)) + eps)
        return w * n.to(x.dtype)

    return norm


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("rope", "code"),
    [
        (bad_rope(1, -1), "match.rope-sign"),
        (bad_rope(1, 1), "match.rope"),
        (bad_rope(-1, -1), "match.rope"),
    ],
)
def test_rotations_of_another_kind(monkeypatch, rope, code, validate):
    monkeypatch.setitem(ROPES, "bad", rope)
    outcome = run(variant(rope="bad"), options={"validate": validate})
    assert outcome.site.status == "missed"
    assert outcome.site.reasons[0].code.startswith(code)
    # What is named is drawn.
    assert outcome.site.reasons[0].node in {n["name"] for n in outcome.site.nodes}
    assert any(f"%{outcome.site.reasons[0].node} " in line for line in outcome.site.before)
    outcome.assert_equal()


def test_cos_and_sin_exchanged_is_still_right(monkeypatch):
    """Opaque tables: a rotation by the complementary angle is a rotation."""
    monkeypatch.setitem(ROPES, "bad", bad_rope(swap=True))
    outcome = run(variant(rope="bad"))
    assert outcome.site.status == "fused"
    outcome.assert_equal()


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("sum", "match.norm"),
        ("head axis", "match.norm-axis"),
        ("centred", "match.norm"),
        ("abs", "match.norm"),
        ("eps outside", "match.norm"),
    ],
)
def test_norms_of_another_kind_stay_outside(monkeypatch, kind, code, validate):
    monkeypatch.setitem(NORMS, "bad", bad_norm(kind))
    outcome = run(variant(norm="bad"), options={"validate": validate})
    site = outcome.site
    assert (site.status, site.operation) == ("partial", "rope_kv_cache"), site.reasons
    assert site.reasons[0].code.startswith(code)
    assert site.reasons[0].node
    outcome.assert_equal()


# --- the rest of the graph -------------------------------------------------------------------


def test_a_key_that_is_read_elsewhere_is_returned():
    def block(x):
        g0 = variant()
        rotated = {}

        def keep(name, q, k):
            if name == "rope":
                rotated["k"] = k
            return q, k

        from dataclasses import replace

        q, seen = replace(g0, hook=keep)(x)
        return q, seen, rotated["k"] + 1

    x, y = inputs(variant()), inputs(variant())
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    for a, b in zip(block(x), fn(y), strict=True):
        assert same_bits(a, b)
    assert same_bits(x.cache, y.cache)
    (site,) = fusion.reports()[-1].sites
    assert site.status == "fused"


@pytest.mark.parametrize("q_heads", [0, 1])
def test_keys_of_several_layers_are_not_each_others_queries(q_heads):
    """A block drafter's context: each layer writes keys, all rotated alike; queries, if there are
    any, belong to the last layer."""

    def block(q, k0, v0, k1, v1, cache0, cache1, cos, sin, slots):
        def turn(x):
            return ROPES["chunk"](NORMS["late"](x, torch.ones(32), 1e-6), cos, sin, 32)

        fusion.ops.kv_cache_write(turn(k0), v0, cache0[0], cache0[1], slots)
        fusion.ops.kv_cache_write(turn(k1), v1, cache1[0], cache1[1], slots)
        return turn(q) if q_heads else cache1.sum()

    torch.manual_seed(0)
    rows = [torch.randn(5, 4, 32) for _ in range(4)]
    caches = [torch.zeros(2, 2, 8, 4, 32) for _ in range(4)]
    tables = torch.rand(5, 16) * 6
    rest = (tables.cos(), tables.sin(), torch.tensor([3, -1, 9, 0, 12]))
    q = torch.randn(5, q_heads, 32)
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    a = block(q, *rows, *caches[:2], *rest)
    b = fn(q, *rows, *caches[2:], *rest)
    assert same_bits(a, b)
    assert all(map(same_bits, caches[:2], caches[2:]))
    sites = fusion.reports()[-1].sites
    assert [s.reasons[0].code for s in sites if s.reasons] == ["match.no-query"] * (2 - q_heads)
    assert sum(s.status == "fused" for s in sites) == q_heads


def test_the_old_cache_read_between_the_writes_is_refused():
    def block(x):
        key, value = x.planes(variant(write="slots", layout=KVCacheLayout.NHD))
        q, k, v = x.qkv.split([8 * 32, 4 * 32, 4 * 32], -1)
        q, k, v = q.view(-1, 8, 32), k.view(-1, 4, 32), v.view(-1, 4, 32)
        cos, sin = x.cos_sin[x.positions].chunk(2, -1)
        q, k = (
            ROPES["chunk"](NORMS["late"](t, w, 1e-6), cos, sin, 32)
            for t, w in ((q, x.q_weight), (k, x.k_weight))
        )
        key.view(-1, 4, 32)[x.slots] = k
        between = value.float().sum() + key.float().sum()
        value.view(-1, 4, 32)[x.slots] = v + between.to(v.dtype)
        return q, value.float().sum()

    g0 = variant(write="slots", layout=KVCacheLayout.NHD)
    x, y = inputs(g0), inputs(g0)
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    for a, b in zip(block(x), fn(y), strict=True):
        assert same_bits(a, b)
    for a, b in zip(x.cache, y.cache, strict=True):
        assert same_bits(a, b)
    sites = fusion.reports()[-1].sites
    assert sites
    assert all(s.status in ("refused", "missed") for s in sites)
    assert any(r.code.startswith("safety.") and r.node for s in sites for r in s.reasons)


def test_off_and_required():
    outcome = run(variant(), options={"qk_norm_rope_kv_cache": "off"})
    assert outcome.site.status == "off"
    assert outcome.site.reasons[0].code == "config.off"
    outcome.assert_equal()
    hook = after("rope", lambda q, k: (q, k * 1.2))
    with pytest.raises(Exception, match="is required, but 1 site"):
        run(variant(hook=hook), options={"qk_norm_rope_kv_cache": "required"})


def test_a_limit_on_tokens_is_visible():
    outcome = run(variant(tokens=9), options={FUSED: {"max_tokens": 8}})
    assert outcome.site.status == "refused"
    assert outcome.site.reasons[0].code == "profit.token-range"
    assert (outcome.site.reasons[0].have, outcome.site.reasons[0].need) == ("9", "at most 8")


def test_a_check_that_cannot_finish_is_a_refusal():
    outcome = run(variant(), options={"validation_seconds": 0.0})
    assert outcome.site.status == "refused"
    assert outcome.site.reasons[0].code == "match.validation-bound"
    outcome.assert_equal()


def test_validation_catches_what_a_recogniser_gets_wrong(monkeypatch):
    """A recogniser that lies about the style is caught, with the output named."""
    from dataclasses import replace

    from fusion.passes.prologue import chain as module

    honest = module.with_norms

    def lying(c):
        c = honest(c)
        return replace(
            c,
            q_rope=replace(c.q_rope, style="interleaved"),
            k_rope=replace(c.k_rope, style="interleaved"),
        )

    monkeypatch.setattr(module, "with_norms", lying)
    outcome = run(variant())
    assert outcome.site.status == "refused"
    assert outcome.site.reasons[0].code == "match.validation"
    assert outcome.site.validation["max_abs_error"] > 0
    outcome.assert_equal()


# --- no slot write ---------------------------------------------------------------------------


def attend(x, cached=None):
    """The prologue of G0 with torch's own attention instead of a paged cache."""
    q, k, v = (t.transpose(0, 1)[None] for t in rotated(x))
    if cached is not None:
        k, v = torch.cat((cached, k), 2), torch.cat((cached, v), 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("dynamic_cache", [False, True])
def test_without_a_slot_write_norm_and_rope_are_taken(dynamic_cache):
    x = inputs(variant())
    cached = torch.randn(1, 4, 7, 32).to(torch.bfloat16) if dynamic_cache else None
    fn = torch.compile(attend, backend="fusion", options={"inner": "aot_eager"})
    assert same_bits(attend(x, cached=cached), fn(x, cached=cached))
    (site,) = [s for s in fusion.reports()[-1].sites if s.pass_name == FUSED]
    assert (site.status, site.operation) == ("partial", "qk_norm_rope"), site.reasons
    assert site.reasons[0].code == "match.no-cache-write"


def test_a_graph_break_between_rope_and_write_is_named():
    def broken(x):
        q, k, v = rotated(x)
        torch._dynamo.graph_break()
        key, value = x.planes(variant())
        fusion.ops.kv_cache_write(k, v, key, value, x.slots)
        return q, key.float().sum()

    x, y = inputs(variant()), inputs(variant())
    before = len(fusion.reports())
    fn = torch.compile(broken, backend="fusion", options={"inner": "aot_eager"})
    for a, b in zip(broken(x), fn(y), strict=True):
        assert same_bits(a, b)
    assert same_bits(x.cache, y.cache)
    sites = [s for r in fusion.reports()[before:] for s in r.sites if s.pass_name == FUSED]
    codes = {s.reasons[0].code for s in sites}
    assert codes == {"match.no-cache-write", "match.graph-break"}
    torch._dynamo.reset()
    required = torch.compile(
        broken, backend="fusion", options={"inner": "aot_eager", FUSED: "required"}
    )
    with pytest.raises(Exception, match="is required"):
        required(inputs(variant()))


# --- the net under the surgeon ---------------------------------------------------------------


def test_an_operand_that_is_emitted_wrongly_is_caught_and_undone(monkeypatch):
    """cos handed in twice: the facts are right, the emitted nodes are not."""
    from fusion.graph.emit import Emitter

    honest = Emitter.table
    made = []

    def twice(self, table, tokens):
        made.append(honest(self, table, tokens))
        return made[0]

    monkeypatch.setattr(Emitter, "table", twice)
    outcome = run(variant())
    assert outcome.site.status == "refused"
    reason = outcome.site.reasons[0]
    assert reason.code == "match.validation"
    assert "operand sin" in reason.message
    outcome.assert_equal()


# --- codes that other tests do not reach -----------------------------------------------------


def test_a_graph_with_gradients_is_left_alone():
    x = inputs(variant(dtype=torch.float32))
    x.q_weight.requires_grad_()
    fn = torch.compile(attend, backend="fusion", options={"inner": "aot_eager"})
    with torch.enable_grad():
        expected, got = attend(x), fn(x)
        assert same_bits(expected.detach(), got.detach())
        (grad,) = torch.autograd.grad(got.sum(), x.q_weight)
    assert grad.abs().sum() > 0
    sites = fusion.reports()[-1].sites
    assert sites
    assert {s.status for s in sites if s.applicable} == {"off"}
    assert {r.code for s in sites for r in s.reasons} == {"config.training", "scope.not-paged"}


def test_on_a_gpu_the_reference_alone_is_no_reason_to_fuse():
    report = fusion.explain(
        prologue, inputs(variant()), target="sm_90", options={"kernels": ["reference"]}
    )
    (site,) = [s for s in report.sites if s.pass_name == FUSED]
    assert (site.status, site.kernel) == ("refused", None)
    assert site.reasons[0].code == "profit.no-kernel"
    assert site.reasons[0].have == "reference"


def test_a_buffer_that_changes_inside_the_chain_is_named():
    """An exported or hand-made graph may hold an in-place op between the nodes of a chain."""
    from torch.fx import Graph

    from fusion.graph.refusals import refuse_side_effects
    from fusion.graph.surgery import SurgeryError

    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.neg.default, (x,))
    changed = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    last = graph.call_function(torch.ops.aten.neg.default, (first,))
    graph.output(last)
    with pytest.raises(SurgeryError) as caught:
        refuse_side_effects([first, last], last)
    assert caught.value.reason.code == "safety.mutation"
    assert caught.value.reason.node == changed.name


# --- findings of reviews ---------------------------------------------------------------------


def test_a_negative_position_counts_from_the_end_of_the_table():
    block = variant(tokens=6, padding=False)
    x, y = inputs(block), inputs(block)
    for one in (x, y):
        one.positions = torch.tensor([0, 1, -1, 3, -5, 2])
    fn = torch.compile(block, backend="fusion", options={"inner": "aot_eager"})
    for a, b in zip(block(x), fn(y), strict=True):
        assert same_bits(a, b)
    assert same_bits(x.cache, y.cache)
    (site,) = fusion.reports()[-1].sites
    assert site.status == "fused"
    assert site.facts["rope"]["tables"] == "by position"


def test_an_error_in_one_site_stays_with_that_site(monkeypatch):
    from fusion.passes import qk_norm_rope_kv_cache as module

    honest, calls = module.check, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("planted")
        return honest(*args)

    monkeypatch.setattr(module, "check", failing)

    def both(x, other):
        return prologue(x), prologue(other)

    pair = [inputs(variant(), seed) for seed in (0, 1)]
    again = [inputs(variant(), seed) for seed in (0, 1)]
    fn = torch.compile(both, backend="fusion", options={"inner": "aot_eager"})
    for got, want in zip(fn(*again), both(*pair), strict=True):
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b)
    first, second = fusion.reports()[-1].sites
    assert first.status == "fused"
    assert (second.status, second.reasons[0].code) == ("refused", "internal.error")
    assert second.reasons[0].node
    assert "planted" in second.reasons[0].message


def test_a_reused_check_depends_on_every_fact(monkeypatch):
    """A second site of equal structure whose facts lie must not borrow the first one's check."""
    from dataclasses import replace

    from fusion.passes import qk_norm_rope_kv_cache as module

    honest, seen = module.read_chain, []

    def lying(*args):
        chain = honest(*args)
        seen.append(chain)
        if len(seen) == 2:
            write = chain.write
            write = replace(write, key_plane=write.value_plane, value_plane=write.key_plane)
            chain = replace(chain, write=write)
        return chain

    monkeypatch.setattr(module, "read_chain", lying)

    def both(x, other):
        return prologue(x), prologue(other)

    pair = [inputs(variant(), seed) for seed in (0, 1)]
    fn = torch.compile(both, backend="fusion", options={"inner": "aot_eager"})
    fn(*pair)
    first, second = fusion.reports()[-1].sites
    assert first.status == "fused"
    assert (second.status, second.reasons[0].code) == ("refused", "match.validation")
    assert not second.validation["reused"]


def test_a_range_that_was_read_wrongly_is_refused(monkeypatch):
    from dataclasses import replace

    from fusion.passes import qk_norm_rope_kv_cache as module

    honest = module.read_chain

    def lying(*args):
        chain = honest(*args)
        write = replace(chain.write, slots=replace(chain.write.slots, start=7))
        return replace(chain, write=write)

    monkeypatch.setattr(module, "read_chain", lying)
    outcome = run(variant(write="range", layout=KVCacheLayout.NHD))
    assert (outcome.site.status, outcome.site.reasons[0].code) == ("refused", "match.validation")
    outcome.assert_equal()
