"""The attention pass: every call on its own, causal ones untouched, nothing dropped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from fusion.match.attention import _REGISTERED, AttentionRoles, register_attention
from tests.prologue_block import same_bits

NAME = "non_causal_attention"
LIBRARY = torch.library.Library("fusion_test", "DEF")
LIBRARY.define(
    "block_attention(Tensor q, Tensor kc, Tensor vc, Tensor table, Tensor lens, Tensor starts, "
    "int q_max, int k_max, float temperature, float alibi=0.0) -> Tensor"
)


def _foreign(q, kc, vc, table, lens, starts, q_max, k_max, temperature, alibi=0.0):
    return fusion.ops.paged_attention(
        q, kc, vc, table, lens, starts, q_max, k_max, temperature, False
    )


LIBRARY.impl("block_attention", _foreign, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_test::block_attention", lambda q, *rest, **more: torch.empty_like(q), lib=LIBRARY
)


def paged(batch=2, q_len=4, context=21, heads=6, kv_heads=3, dim=16, page=8):
    """Inputs of a drafted block: query, K, V, block table, lengths, starts, maxima, scale."""
    pages = -(-context // page)
    g = torch.Generator().manual_seed(0)
    cache = torch.randn(batch * pages, page, kv_heads, 2 * dim, generator=g)
    table = torch.randperm(batch * pages, generator=g).view(batch, pages).int()
    return (
        torch.randn(batch * q_len, heads, dim, generator=g),
        cache[..., :dim],
        cache[..., dim:],
        table,
        torch.tensor([context, context - 3], dtype=torch.int32),
        (torch.arange(batch + 1) * q_len).int(),
        q_len,
        context,
        dim**-0.5,
    )


def compiled(fn, **options):
    return torch.compile(fn, backend="fusion", options={"inner": "aot_eager", **options})


def sites():
    return [s for s in fusion.reports()[-1].sites if s.pass_name == NAME]


def test_each_call_of_a_graph_is_decided_on_its_own():
    def layers(*args):
        attend = fusion.ops.paged_attention
        return (
            attend(*args, False),
            attend(*args, False, window_left=8),
            attend(*args, True, window_left=8),
            attend(*args, True),
        )

    args = paged()
    for a, b in zip(layers(*args), compiled(layers)(*args), strict=True):
        assert same_bits(a, b)
    found = sites()
    assert [s.status for s in found] == ["fused", "fused", "missed", "missed"]
    assert [s.applicable for s in found] == [True, True, False, False]
    assert {s.reasons[0].code for s in found[2:]} == {"scope.causal"}
    assert "kernel: reference" in found[0].after[0]
    fusion.expect(fusion.reports()[-1], non_causal_attention=2)


def test_every_argument_has_a_home():
    def layer(sinks, k_scale, v_scale, *args):
        return fusion.ops.paged_attention(
            *args, False, window_left=5, window_right=2, softcap=3.0, sinks=sinks,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    args = list(paged())
    args[1], args[2] = args[1].to(torch.float8_e4m3fn), args[2].to(torch.float8_e4m3fn)
    extra = (torch.randn(6), torch.tensor(0.25), torch.tensor(3.0))
    assert same_bits(layer(*extra, *args), compiled(layer)(*extra, *args))
    (site,) = sites()
    assert site.status == "fused"
    assert site.facts["call"]["softcap"] == "3.0"


def test_one_query_token_needs_no_rewrite():
    def layer(*args):
        return fusion.ops.paged_attention(*args, False)

    args = paged(q_len=1)
    assert same_bits(layer(*args), compiled(layer)(*args))
    (site,) = sites()
    assert site.reasons[0].code == "scope.single-query"
    assert not site.applicable


@pytest.fixture
def foreign():
    yield
    _REGISTERED.pop("fusion_test::block_attention", None)


ROLES = AttentionRoles(
    {
        "query": "q", "key_cache": "kc", "value_cache": "vc", "block_table": "table",
        "seq_lens": "lens", "query_start_loc": "starts", "max_query_len": "q_max",
        "max_seq_len": "k_max", "scale": "temperature",
    },
    {"causal": False},
)  # fmt: skip


def test_a_registered_foreign_call_is_translated(foreign):
    register_attention("fusion_test::block_attention", ROLES)

    def layer(*args):
        return torch.ops.fusion_test.block_attention(*args) * 2

    args = paged()
    assert same_bits(layer(*args), compiled(layer)(*args))
    (site,) = sites()
    assert site.status == "fused"
    assert "fusion.paged_attention" in site.after[0]


def test_an_argument_without_a_home_refuses_the_call_by_name(foreign):
    register_attention("fusion_test::block_attention", ROLES)

    def layer(*args):
        return torch.ops.fusion_test.block_attention(*args, 0.5)

    args = paged()
    assert same_bits(layer(*args), compiled(layer)(*args))
    (site,) = sites()
    assert site.status == "refused"
    assert site.reasons[0].code == "gate.argument"
    assert "alibi" in site.reasons[0].message


def test_an_unknown_attention_op_is_named_and_required_raises():
    def layer(*args):
        return torch.ops.fusion_test.block_attention(*args)

    args = paged()
    assert same_bits(layer(*args), compiled(layer)(*args))
    (site,) = sites()
    assert (site.status, site.reasons[0].code) == ("missed", "match.attention-op")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="non_causal_attention is required"):
        compiled(layer, non_causal_attention="required")(*args)


def test_off_leaves_the_call_alone():
    def layer(*args):
        return fusion.ops.paged_attention(*args, False)

    args = paged()
    assert same_bits(layer(*args), compiled(layer, non_causal_attention="off")(*args))
    (site,) = sites()
    assert (site.status, site.reasons[0].code) == ("off", "config.off")


def test_causality_that_is_an_input_is_refused():
    from torch.fx import Graph

    from fusion.match.attention import find_attention

    graph = Graph()
    names = ("q", "k", "v", "table", "lens", "starts", "causal")
    nodes = {n: graph.placeholder(n) for n in names}
    call = graph.call_function(
        torch.ops.fusion.paged_attention.default,
        (*(nodes[n] for n in names[:6]), 4, 21, 0.25, nodes["causal"]),
    )
    call.meta["val"] = torch.empty(8, 6, 16, device="meta")
    graph.output(call)
    (miss,) = find_attention(graph)
    assert miss.reason.code == "match.causal-not-constant"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_on_another_machine_the_portable_kernel_is_named(target):
    def layer(*args):
        return fusion.ops.paged_attention(*args, False)

    args = [
        a.to(torch.bfloat16) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in paged()
    ]
    report = fusion.explain(layer, *args, target=target)
    (site,) = [s for s in report.sites if s.pass_name == NAME]
    assert (site.status, site.kernel) == ("fused", "triton")
    assert [c.kernel for c in site.candidates][:2] == ["aiter", "triton"]


def test_a_foreign_result_of_another_shape_is_refused(foreign):
    library = torch.library.Library("fusion_test_flat", "DEF")
    library.define(
        "block_attention(Tensor q, Tensor kc, Tensor vc, Tensor table, Tensor lens, "
        "Tensor starts, int q_max, int k_max, float temperature) -> Tensor"
    )
    library.impl(
        "block_attention",
        lambda q, *rest: _foreign(q, *rest).flatten(1),
        "CompositeExplicitAutograd",
    )
    torch.library.register_fake(
        "fusion_test_flat::block_attention",
        lambda q, *rest: q.new_empty(q.shape[0], q.shape[1] * q.shape[2]),
        lib=library,
    )
    register_attention("fusion_test_flat::block_attention", ROLES)
    try:

        def layer(*args):
            return torch.ops.fusion_test_flat.block_attention(*args)[:, :8] * 2

        args = paged()
        assert same_bits(layer(*args), compiled(layer)(*args))
        (site,) = sites()
        assert (site.status, site.reasons[0].code) == ("refused", "match.attention-op")
        assert "[8, 96]" in site.reasons[0].have
    finally:
        _REGISTERED.pop("fusion_test_flat::block_attention", None)


def test_a_translated_call_compiles_with_inductor(foreign):
    register_attention("fusion_test::block_attention", ROLES)

    def layer(*args):
        return torch.ops.fusion_test.block_attention(*args) * 2

    args = paged()
    fn = torch.compile(layer, backend="fusion")
    torch.testing.assert_close(fn(*args), layer(*args))
    (site,) = sites()
    assert site.status == "fused"


def test_registering_an_op_changes_the_compile_cache_key(foreign):
    from fusion.build import make_config, make_manager

    before = make_manager(make_config({})).uuid()
    register_attention("fusion_test::block_attention", ROLES)
    after = make_manager(make_config({})).uuid()
    assert before != after
