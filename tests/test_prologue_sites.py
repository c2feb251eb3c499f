"""Which keys and queries of a whole graph belong together: whose a rope is, and at what cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.match import siblings
from fusion.match.facts import CacheWrite, Miss
from fusion.passes.prologue import chain as chains
from fusion.passes.prologue import loose
from fusion.passes.prologue.chain import Chain
from fusion.passes.qk_norm_rope_kv_cache import read_sites
from tests.cache_cases import graph_of
from tests.prologue_block import same_bits

T, HQ, HK, D, SLOTS = 6, 4, 2, 16, 64
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
write = torch.ops.fusion.kv_cache_write.default


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def norm(x: Tensor) -> Tensor:
    n = x.float()
    return (n * torch.rsqrt(n.pow(2).mean(-1, True) + 1e-6)).to(x.dtype)


def same(x: Tensor) -> Tensor:
    return x


def tables() -> tuple[Tensor, Tensor]:
    return torch.rand(T, 1, D // 2), torch.rand(T, 1, D // 2)


def inputs(cache: torch.dtype = f32) -> tuple[Any, ...]:
    """q, k, v (which share no projection), cos, sin, both caches, slots."""
    torch.manual_seed(0)
    rows = [torch.randn(T, heads, D) for heads in (HQ, HK, HK)]
    caches = [torch.zeros(SLOTS, HK, D, dtype=cache) for _ in range(2)]
    return (*rows, *tables(), *caches, torch.randperm(SLOTS)[:T])


def statuses(fn: Any, cache: torch.dtype, **options: Any) -> list[tuple[str, str | None]]:
    """Compile, compare with eager, and say what became of every site of the pass."""
    torch._dynamo.reset()
    a, b = inputs(cache), inputs(cache)
    compiled = torch.compile(fn, backend="fusion", options={"inner": "aot_eager", **options})
    wants, gots = fn(*a), compiled(*b)
    if isinstance(wants, Tensor):
        wants, gots = (wants,), (gots,)
    assert all(map(same_bits, wants, gots))
    assert all(map(same_bits, a, b))
    sites = fusion.reports()[-1].sites
    return [(s.status, s.operation) for s in sites if s.pass_name == "qk_norm_rope_kv_cache"]


# --- the key itself, in another form --------------------------------------------------------------


@pytest.mark.parametrize("cache", [bf16, f16, torch.float64])
@pytest.mark.parametrize("normed", [False, True])
def test_a_cast_to_the_caches_dtype_without_a_shared_projection(
    cache: torch.dtype, normed: bool
) -> None:
    before = norm if normed else same

    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        kc[slots] = turn(before(k), cos, sin).to(kc.dtype)
        vc[slots] = v.to(vc.dtype)
        return turn(before(q), cos, sin)

    operation = "qk_norm_rope_kv_cache" if normed else "rope_kv_cache"
    assert statuses(fn, cache) == [("fused", operation)]


@pytest.mark.parametrize(
    "form",
    [
        lambda k: k.half(),
        lambda k: k.transpose(0, 1).half(),
        lambda k: k.double().transpose(0, 1),
        lambda k: k.half().float(),
        lambda k: (k.bfloat16().float(), k.half()),
    ],
)
@pytest.mark.parametrize("cache", [f32, bf16])
def test_the_key_in_another_form_is_not_its_query(form: Any, cache: torch.dtype) -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        k = turn(k, cos, sin)
        kc[slots] = k.to(kc.dtype)
        vc[slots] = v.to(vc.dtype)
        return turn(q, cos, sin), form(k)

    ((found, chain),) = read_sites(graph_of(fn, inputs(cache)).graph)
    assert isinstance(found, CacheWrite)
    assert isinstance(chain, Chain), chain
    assert (chain.q_rope.out.heads, chain.k_rope.out.heads) == (HQ, HK)


def test_a_key_alone_has_no_query_in_any_form() -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        k = turn(k, cos, sin)
        kc[slots] = k.to(kc.dtype)
        vc[slots] = v.to(vc.dtype)
        return k.half(), k.transpose(0, 1)

    (site,) = read_sites(graph_of(fn, inputs(bf16)).graph)
    assert isinstance(site[1], Miss)
    assert site[1].reason.code == "match.no-query"


# --- what a fused site already has ----------------------------------------------------------------

USES = {
    "q cast": lambda q, k: (q.to(bf16), q + 1),
    "q moved and cast": lambda q, k: (q.transpose(0, 1).to(bf16), q + 1),
    "q cast twice": lambda q, k: (q.to(bf16), q.to(f16), q.to(bf16).to(f32)),
    "k cast": lambda q, k: (q, k.to(f16), k + 1),
    "k moved": lambda q, k: (q, k.transpose(0, 1), k.transpose(0, 1).to(f16)),
}


@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("cache", [f32, bf16])
def test_other_forms_of_a_fused_q_or_k_are_no_site(use: str, cache: torch.dtype) -> None:
    """With "required" a second site that cannot be fused would be an error."""

    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        kc[slots] = k.to(kc.dtype)
        vc[slots] = v.to(vc.dtype)
        return USES[use](q, k)

    required = {"qk_norm_rope_kv_cache": "required"}
    assert statuses(fn, cache, **required) == [("fused", "rope_kv_cache")]


def test_a_second_key_beside_a_fused_site_is_still_told() -> None:
    """Another key, rotated alike, that no slot write consumes."""

    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        other = turn(v, cos, sin)
        kc[slots] = turn(k, cos, sin)
        vc[slots] = v
        return turn(q, cos, sin), other

    first, second = read_sites(graph_of(fn, inputs()).graph)
    assert isinstance(first[1], Chain)
    assert isinstance(second[1], Miss)
    assert second[1].reason.code == "match.no-cache-write"


# --- nearly a rope, and no slot write -----------------------------------------------------------


def turn_wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, cached: Tensor | None = None) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if cached is not None:
        k, v = torch.cat((cached, k), 2), torch.cat((cached, v), 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("dynamic_cache", [False, True])
def test_a_key_that_is_nearly_a_rope_has_a_site(dynamic_cache: bool) -> None:
    """Its layer must be in the report: without the wrong sign it would be, as a loose key."""

    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        cached = kc[:7].transpose(0, 1)[None] if dynamic_cache else None
        q, k = turn_wrong(norm(q), cos, sin), turn_wrong(norm(k), cos, sin)
        return attend(q, k, v, cached), k

    ((write, miss),) = read_sites(graph_of(fn, inputs()).graph)
    assert write is None and isinstance(miss, Miss)
    assert miss.reason.code == "match.rope-sign"
    assert miss.reason.message == "first half: +sin, needs -sin"
    assert miss.node is not None and str(miss.node.target) == "aten.add.Tensor"
    assert tuple(loose.near_key(miss).node.meta["val"].shape) == (T, HK, D)


def test_the_site_of_a_key_that_is_nearly_a_rope_is_missed() -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        return attend(turn_wrong(q, cos, sin), turn_wrong(k, cos, sin), v)

    assert statuses(fn, f32) == [("missed", None)]


def test_a_key_without_a_rope_has_no_site() -> None:
    def plain(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        return attend(q, k, v)

    def normed(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        return attend(norm(q), norm(k) * cos.mean() + k * sin.mean(), v)

    def gated(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        gate = torch.cat((cos, sin), -1)
        return attend(q, k * gate + v * (1 - gate), v)

    for fn in (plain, normed, gated):
        assert read_sites(graph_of(fn, inputs()).graph) == []


def test_a_wrong_key_that_is_written_is_told_once() -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        q, k = turn_wrong(q, cos, sin), turn_wrong(k, cos, sin)
        kc[slots] = k
        vc[slots] = v
        return attend(q, k, v)

    ((write, miss),) = read_sites(graph_of(fn, inputs()).graph)
    assert isinstance(write, CacheWrite) and isinstance(miss, Miss)
    assert miss.reason.code == "match.rope-sign"


def test_a_rope_that_has_its_site_is_not_told_again_behind_a_factor() -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        q, k = turn(norm(q), cos, sin), turn(norm(k), cos, sin)
        return attend(q, k * 0.5, v), k

    ((_, chain),) = read_sites(graph_of(fn, inputs()).graph)
    assert isinstance(chain, Chain)


def test_a_rope_before_a_factor_is_told() -> None:
    def fn(q, k, v, cos, sin, kc, vc, slots):  # type: ignore[no-untyped-def]
        return attend(turn(q, cos, sin), turn(k, cos, sin) * 0.5, v)

    ((_, miss),) = read_sites(graph_of(fn, inputs()).graph)
    assert isinstance(miss, Miss)
    assert miss.reason.code == "match.rope-form" and "stands after" in miss.reason.message


# --- cost -----------------------------------------------------------------------------------------


def parallel(layers: int, queries: bool) -> torch.fx.Graph:
    """Keys of many layers of one context, all rotated alike, and perhaps a query for each."""

    def fn(rows, cos, sin, caches, slots):  # type: ignore[no-untyped-def]
        rotated = []
        for (q, k, v), (kc, vc) in zip(rows, caches, strict=True):
            write(turn(norm(k), cos, sin), v, kc, vc, slots)
            if queries:
                rotated.append(turn(norm(q), cos, sin))
        return rotated or cos + 1

    rows = [tuple(torch.randn(T, h, D) for h in (HQ, HK, HK)) for _ in range(layers)]
    caches = [tuple(torch.zeros(8, 8, HK, D) for _ in range(2)) for _ in range(layers)]
    return graph_of(fn, (rows, *tables(), caches, torch.arange(T))).graph


@pytest.mark.parametrize("queries", [False, True])
def test_the_ropes_read_grow_with_the_layers_not_their_square(
    monkeypatch: pytest.MonkeyPatch, queries: bool
) -> None:
    read = siblings.read_rope
    calls: Counter[str] = Counter()

    def counted(*args: Any, **how: Any) -> Any:
        calls["read_rope"] += 1
        return read(*args, **how)

    for module in (siblings, chains, loose):
        monkeypatch.setattr(module, "read_rope", counted)
    spent = {}
    for layers in (8, 32):
        graph = parallel(layers, queries)
        calls.clear()
        sites = read_sites(graph)
        spent[layers] = calls["read_rope"]
        assert len(sites) == layers
        assert all(isinstance(chain, Chain) == queries for _, chain in sites)
    assert spent[8] >= 8
    assert spent[32] <= 4 * spent[8]
