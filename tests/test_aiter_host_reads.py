"""No adapter reads a value on the host: seen by watching every ATen operation on the CPU.

tests/test_aiter_capture.py proves the same with torch's own alarm where there is a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.backends.aiter import contract, runtime
from tests import prologue_cases
from tests.aiter_cases import G0, KERNELS, build
from tests.test_aiter_numbers import attention_args

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class Watch(TorchDispatchMode):
    """Collects operations that give the host a value, or a shape that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        boolean = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in FORBIDDEN or boolean:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def calls() -> list[tuple[str, dict[str, Any]]]:
    spread = dataclasses.replace(G0, qkv="separate", positions=None, table="f32", slots="int32")
    fp8 = dataclasses.replace(G0, cache="fnuz", scales=(0.25, 3.0), fewer_slots=1)
    rope = dataclasses.replace(G0, op="rope_kv_cache", table="f32", return_key=True)
    write = dataclasses.replace(G0, op="kv_cache_write", layout="nhd", fewer_slots=1)
    return [
        (G0.op, build(G0)[0]), (spread.op, build(spread)[0]), (fp8.op, build(fp8)[0]),
        (rope.op, build(rope)[0]), (write.op, prologue_cases.build(write)[0]),
        ("paged_attention", attention_args(window=(20, -1), rows=(3, 1, 0, 3), tail=2)),
        ("paged_attention", attention_args(causal=False, window=(9, 2))),
    ]  # fmt: skip


def test_no_adapter_reads_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def resolve(function: contract.Function) -> Any:
        called.append(function.name)
        return lambda *a, **k: k["q"] if function is contract.FLASH else None

    monkeypatch.setattr(runtime, "resolve", resolve)
    for op, args in calls():
        with Watch() as watch:
            KERNELS[op].fn(**args)
        assert watch.seen == [], op
    assert set(called) == set(contract.FUNCTIONS)


def test_the_watch_sees() -> None:
    x = torch.tensor([1.0, 0.0])
    with Watch() as watch:
        x[0].item()
        x[x > 0]
        x.nonzero()
    assert watch.seen == ["_local_scalar_dense", "index", "nonzero"]
