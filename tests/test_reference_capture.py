"""The reference never waits for the device; on a GPU: results as on the CPU, graph capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusion.ops as ops
from fusion.backends import reference
from fusion.layout import KVCacheLayout
from tests.ops_cases import BLOCK, HK, D, arguments

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("op", ops.OPERATIONS)
def test_no_value_is_read_on_the_host(op: str) -> None:
    # Meta tensors have no values: reading one, or a shape that depends on one, raises.
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(2, device="meta").any())
    for a in cases(op):
        metas = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in a.items()}
        signature = ops.SIGNATURES[op]
        positional, keyword = signature.split(signature.bind((), metas))
        out = getattr(reference, op)(*positional, **keyword)
        for x in (out,) if isinstance(out, Tensor) else out or ():
            assert x.device.type == "meta"


def moved(a: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in a.items()}


def cases(op: str) -> list[dict[str, Any]]:
    out = [arguments(op)]
    if op != "qk_norm_rope":
        scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(3.0)}
        out.append({**arguments(op, dtype=torch.float8_e4m3fn), **scales})
        equal = arguments(op, layout=KVCacheLayout.KV_FIRST, dv=D)
        if "value" in equal:
            equal["value"] = torch.randn(5, HK, D)
        out.append(equal)
    return out


def close(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        torch.testing.assert_close(a.cpu().float(), b.cpu().float(), rtol=1e-4, atol=1e-4)
    elif a is not None:
        for x, y in zip(a, b, strict=True):
            close(x, y)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("op", ops.OPERATIONS)
def test_as_on_the_cpu(op: str) -> None:
    for a in cases(op):
        b = moved(a)
        f = getattr(ops, op)
        want = f(**{**a, "kernel": "reference"})
        close(f(**{**b, "kernel": "reference"}), want)
        for name in ops.SIGNATURES[op].mutated:
            close(b[name], a[name])


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("op", ops.OPERATIONS)
def test_captured_once_replayed_with_other_slots_lengths_and_tables(op: str) -> None:
    cache = {} if op == "qk_norm_rope" else {"dtype": torch.bfloat16}
    a = moved({**arguments(op, **cache), "kernel": "reference"})
    f = getattr(ops, op)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f(**a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # any synchronisation with the host raises here
        out = f(**a)
    if "slot_mapping" in a:
        a["slot_mapping"].copy_(torch.tensor([7, -1, 0, 3 * BLOCK - 1, -1]))
        replays = [a["slot_mapping"].clone(), torch.full_like(a["slot_mapping"], -1)]
        for slots in replays:
            a["slot_mapping"].copy_(slots)
            twin = {**a, **{n: a[n].clone() for n in ("key_cache", "value_cache")}}
            graph.replay()
            want = f(**twin)
            torch.cuda.synchronize()
            for name in ("key_cache", "value_cache"):
                assert torch.equal(a[name].contiguous().view(torch.int16),
                                   twin[name].contiguous().view(torch.int16))  # fmt: skip
            close(out, want)
        return
    if op == "paged_attention":
        a["seq_lens"].copy_(torch.tensor([8, 1], dtype=torch.int32))
        a["block_table"].copy_(torch.tensor([[0, 2], [2, -99]], dtype=torch.int32))
        a["query_start_loc"].copy_(torch.tensor([0, 4, 5], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    close(out, f(**a))
