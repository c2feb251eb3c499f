"""Graphs as data: what is written down and read back is the same graph, for readers and passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import fusion
from fusion.build import make_config, make_manager
from fusion.layout import KVCacheLayout
from fusion.match.attention import Attention, find_attention
from fusion.report import Site
from fusion.target import Target
from tests.listing import ListingError, dump, load, post_grad
from tests.prologue_block import Block, Inputs, functional, inputs, variant

PASS = "qk_norm_rope_kv_cache"


def captured(block: Block, x: Inputs | None = None, *, dynamic: bool | None = None) -> GraphModule:
    """The one graph of a block."""
    x = inputs(block) if x is None else x
    (graph,) = fusion.capture(functional(block), x, dynamic=dynamic)
    return graph.gm


def site_of(gm: GraphModule, target: str | None = None) -> Site:
    """The prologue site that the pipeline sees in a graph."""
    machine = Target.parse(target, torch="2.13.0", triton="3.9.0") if target else None
    manager = make_manager(make_config({}), machine, phase="explain")
    (site,) = [s for s in manager.run(gm.graph).sites if s.pass_name == PASS]
    return site


def compared(listing: Any, seen: dict[int, int] | None = None) -> Any:
    """A listing with its storages numbered as they come."""
    seen = {} if seen is None else seen
    if isinstance(listing, dict):
        if "storage" in listing:
            number = seen.setdefault(listing["storage"], len(seen))
            listing = {**listing, "storage": number}
        return {k: compared(v, seen) for k, v in listing.items()}
    return [compared(v, seen) for v in listing] if isinstance(listing, list) else listing


NHD = variant(layout=KVCacheLayout.NHD, padding=False)
CASES: dict[str, tuple[Block, str, str]] = {
    "custom op, packed": (Block(), "static", "fused"),
    "custom op, every size dynamic": (Block(), "dynamic", "missed"),
    "custom op, tokens dynamic": (Block(), "marked", "fused"),
    "custom op, K first": (variant(layout=KVCacheLayout.KV_FIRST), "static", "fused"),
    "index_put": (replace(NHD, write="slots"), "static", "fused"),
    "scatter, tokens dynamic": (replace(NHD, write="scatter"), "marked", "fused"),
    "complex": (variant(rope="complex"), "static", "fused"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_survives_the_round_trip(name: str) -> None:
    """Every node, argument, size, stride and line of code; and the passes see the same."""
    block, sizes, status = CASES[name]
    x = inputs(block)
    if sizes == "marked":
        for tensor in (x.qkv, x.positions, x.slots, x.readable):
            assert tensor is not None
            torch._dynamo.mark_dynamic(tensor, 0)
    gm = captured(block, x, dynamic=True if sizes == "dynamic" else None)
    listing = json.loads(json.dumps(dump(gm)))
    again = load(listing)
    assert compared(json.loads(json.dumps(dump(again)))) == compared(listing)
    assert bool(listing["symbols"]) == (sizes != "static")
    one, other = site_of(gm), site_of(again)
    assert one.status == other.status == status, (one, other)
    assert (one.kernel, one.source, one.facts) == (other.kernel, other.source, other.facts)
    assert one.reasons == other.reasons


def test_storages_stay_shared() -> None:
    """Views of one cache are views of one storage again."""

    def fn(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cache[1:].view(-1), cache.clone()

    (graph,) = fusion.capture(fn, torch.zeros(3, 4))
    again = load(dump(graph.gm))
    values = {n.op + str(n.target): n.meta["val"] for n in again.graph.nodes if "val" in n.meta}
    base, view, copy = (
        next(v for k, v in values.items() if part in k)
        for part in ("placeholder", "slice", "clone")
    )
    assert base.untyped_storage()._cdata == view.untyped_storage()._cdata
    assert base.untyped_storage()._cdata != copy.untyped_storage()._cdata
    assert view.storage_offset() == 4


def test_constants_and_odd_numbers() -> None:
    """Small constants keep their values, infinities their sign; nested tuples stay tuples."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, float("-inf")) * torch.tensor([1.0, 2.5, float("inf")])

    (graph,) = fusion.capture(fn, torch.zeros(2, 3))
    again = load(json.loads(json.dumps(dump(graph.gm))))
    x = torch.tensor([[1.0, -1.0, 2.0], [0.5, 3.0, -2.0]])
    assert torch.equal(again(x)[0], fn(x))


def test_an_operator_that_is_not_here_is_declared() -> None:
    listing = dump(captured(variant(norm="none", rope="chunk")))
    text = json.dumps(listing)
    assert "op:fusion.kv_cache_write.default" not in text or listing["schemas"]
    listing["schemas"] = {"elsewhere.twice.default": "elsewhere::twice(Tensor x) -> Tensor"}
    one: dict[str, Any] = {
        "name": "twice",
        "op": "call_function",
        "target": "op:elsewhere.twice.default",
    }
    one |= {"args": [{"node": listing["nodes"][0]["name"]}]}
    listing["nodes"].insert(len(listing["nodes"]) - 1, one)
    gm = load(listing)
    (node,) = [n for n in gm.graph.nodes if n.name == "twice"]
    assert str(node.target) == "elsewhere.twice.default"


def test_what_cannot_be_read_is_named() -> None:
    listing = dump(captured(Block()))
    with pytest.raises(ListingError, match="format 0"):
        load({**listing, "format": 0})
    listing["nodes"][-2]["target"] = "op:aten.no_such_thing.default"
    listing["nodes"][-2]["op"] = "call_function"
    with pytest.raises(ListingError, match=r"aten\.no_such_thing"):
        load(listing)


def test_graphs_are_taken_where_passes_run() -> None:
    """Behind Inductor's own clean-up, without making code."""
    block = variant(norm="F.rms_norm")
    (listing,) = post_grad(functional(block), inputs(block), run=False)
    gm = load(json.loads(json.dumps(listing)))
    assert any("auto_functionalized_v2" in str(n.target) for n in gm.graph.nodes)
    assert site_of(gm).status == "fused"


def test_the_file_stands_alone() -> None:
    """It is copied to machines where fusion is not installed."""
    path = Path(__file__).with_name("listing.py")
    code = (
        "import runpy, sys; sys.modules['fusion'] = None; "
        f"m = runpy.run_path({str(path)!r}); import torch; "
        "gm = torch.fx.symbolic_trace(lambda x: x + 1); print(len(m['dump'](gm)['nodes']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "3"


# --- graphs as a CUDA build leaves them -----------------------------------------------------------


def on_cuda(listing: Any) -> Any:
    """The same listing, said of a GPU."""
    if isinstance(listing, dict):
        return {k: "cuda:0" if k == "device" else on_cuda(v) for k, v in listing.items()}
    return [on_cuda(v) for v in listing] if isinstance(listing, list) else listing


def edited(listing: Any, norm: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Any:
    """A listing in which every call of ``listing_tests::norm`` is spelled by ``norm``."""
    made: list[dict[str, Any]] = []
    for node in listing["nodes"]:
        made += norm(node) if node["target"] == "op:listing_tests.norm.default" else [node]
    schemas = {k: v for k, v in listing["schemas"].items() if "listing_tests" not in k}
    return {**listing, "nodes": made, "schemas": schemas}


@torch.library.custom_op("listing_tests::norm", mutates_args=())
def _norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    raise NotImplementedError


@_norm.register_fake
def _(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def fused_rms_norm(node: dict[str, Any]) -> list[dict[str, Any]]:
    """``_fused_rms_norm(x, [D], w, eps)[0]``: y, and rstd ``[..., 1]`` in f32 that nobody reads."""
    x, w, eps = node["args"]
    y = node["val"]
    shape = [*y["shape"][:-1], 1]
    rstd = {"dtype": "float32", "shape": shape, "stride": [shape[1], 1, 1], "device": "cpu"}
    rstd |= {"storage": 9000 + y["storage"], "bytes": 4 * shape[0] * shape[1]}
    whole = {**node, "name": node["name"] + "_pair"}
    whole["target"] = "op:aten._fused_rms_norm.default"
    whole["args"] = [x, {"list": [y["shape"][-1]]}, w, eps]
    whole["val"] = {"tuple": [y, rstd]}
    taken = {**node, "target": "py:_operator.getitem"}
    taken["args"] = [{"node": whole["name"]}, 0]
    return [whole, taken]


def rms_norm(node: dict[str, Any]) -> list[dict[str, Any]]:
    """``rms_norm(x, [D], w, eps)``, as a table without decompositions leaves it."""
    x, w, eps = node["args"]
    args = [x, {"list": [node["val"]["shape"][-1]]}, w, eps]
    return [{**node, "target": "op:aten.rms_norm.default", "args": args}]


@pytest.mark.parametrize("spelling", [fused_rms_norm, rms_norm])
@pytest.mark.parametrize("weight", [None, torch.float32])
def test_norm_operators_of_a_cuda_build(
    spelling: Callable[..., Any], weight: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole norm as one operator: read, checked and fused for a GPU that is not here."""
    from tests import prologue_block

    monkeypatch.setitem(
        prologue_block.NORMS, "survivor", lambda x, w, eps: torch.ops.listing_tests.norm(x, w, eps)
    )
    gm = captured(variant(norm="survivor", weight_dtype=weight))
    listing = on_cuda(edited(json.loads(json.dumps(dump(gm))), spelling))
    site = site_of(load(listing), "sm_90")
    assert (site.status, site.kernel) == ("fused", "triton"), site
    assert site.facts["norm"]["cast"] == "early"
    assert site.validation is not None and site.validation["status"] == "passed"


# What torch's GPU backends leave of F.scaled_dot_product_attention: op, arguments behind q, k, v.
ATTENTION: dict[str, list[Any]] = {
    "_scaled_dot_product_flash_attention.default": [0.0, True, False],
    "_scaled_dot_product_efficient_attention.default": [None, False, 0.0, True],
    "_scaled_dot_product_cudnn_attention.default": [None, False, 0.0, True, False],
    "_scaled_dot_product_fused_attention_overrideable.default": [None, 0.0, True],
    "_scaled_dot_product_attention_math.default": [None, 0.0, True],
    "_flash_attention_forward.default": [None, None, 5, 5, 0.0, True, False],
    "_efficient_attention_forward.default": [None, None, None, None, None, 0.0, 1],
    "_cudnn_attention_forward.default": [None, None, None, 5, 5, False, 0.0, True],
}


@pytest.mark.parametrize("op", ATTENTION)
def test_attention_operators_of_a_cuda_build(op: str) -> None:
    """They are attention calls that read no paged cache, in the words of every other call."""
    tensor = {"dtype": "bfloat16", "shape": [1, 8, 5, 64], "stride": [2560, 320, 64, 1]}
    tensor |= {"device": "cuda:0"}
    nodes: list[dict[str, Any]] = [
        {"name": n, "op": "placeholder", "target": n, "args": [], "val": tensor} for n in "qkv"
    ]
    inputs = [{"node": n} for n in "qkv"]
    call = {"name": "call", "op": "call_function", "target": f"op:aten.{op}"}
    nodes.append({**call, "args": inputs + ATTENTION[op], "val": {"tuple": [tensor, tensor]}})
    taken = {"name": "out", "op": "call_function", "target": "py:_operator.getitem"}
    nodes.append({**taken, "args": [{"node": "call"}, 0], "val": tensor})
    out = {"name": "output", "op": "output", "target": "output"}
    nodes.append({**out, "args": [{"tuple": [{"node": "out"}]}]})
    listing = {"format": 1, "symbols": {}, "schemas": {}, "constants": {}, "modules": {}}
    gm = load({**listing, "traces": [], "nodes": nodes})
    (fact,) = find_attention(gm.graph)
    assert isinstance(fact, Attention), fact
    assert (fact.spelling, fact.causal, dict(fact.unclaimed)) == ("sdpa", True, {})
    assert fact.result.name == "out"
    manager = make_manager(make_config({}), Target.parse("sm_90"), phase="explain")
    (site,) = manager.run(gm.graph).sites
    assert (site.status, [r.code for r in site.reasons]) == ("missed", ["scope.not-paged"])
