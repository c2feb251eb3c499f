"""Promise 4: no buffer of the size of the cache, in generated code and in memory."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.prologue_block import WRITES, inputs, same_bits, variant

MEASURE = """
import sys, torch
sys.path.insert(0, {root!r})
from fusion.layout import KVCacheLayout
from tests.prologue_block import Inputs, inputs, variant
import fusion

torch.set_grad_enabled(False)

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

def reset():
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")

block = variant(write={write!r}, layout=KVCacheLayout[{layout!r}], dtype=torch.float32,
                blocks=16384, block_size=16, dim=32)
x = inputs(variant(write={write!r}, layout=KVCacheLayout[{layout!r}], dtype=torch.float32, dim=32))
# Only the number of blocks (8) is made large; random numbers of that size would take minutes.
x.cache = torch.ones([16384 if s == 8 else s for s in x.cache.shape])
size = x.cache.numel() * x.cache.element_size()

def step(x):
    q, k, v = x.qkv.split([8 * 32, 4 * 32, 4 * 32], -1)
    q, k, v = q.view(-1, 8, 32), k.view(-1, 4, 32), v.view(-1, 4, 32)
    from tests.prologue_block import NORMS, ROPES, WRITES
    cos, sin = x.cos_sin[x.positions].chunk(2, -1)
    q, k = (ROPES["chunk"](NORMS["late"](t, w, 1e-6), cos, sin, 32)
            for t, w in ((q, x.q_weight), (k, x.k_weight)))
    WRITES[{write!r}](block, x, k, v)
    return q

options = {{"inner": "aot_eager", "qk_norm_rope_kv_cache": "required"}}
fn = torch.compile(step, backend="fusion", options=options)
fn(x)
reset()
before = peak()
for _ in range(3):
    fn(x)
print(size, peak() - before)
"""


@pytest.mark.parametrize(
    ("write", "layout"),
    [("op", "PACKED"), ("slots", "KV_FIRST"), ("block_offset", "PACKED"), ("scatter", "KV_FIRST")],
)
def test_peak_memory_of_a_step_does_not_grow_with_the_cache(write, layout):
    root = str(__import__("pathlib").Path(__file__).resolve().parents[1])
    code = MEASURE.format(root=root, write=write, layout=layout)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    size, grown = map(int, done.stdout.split())
    assert size >= 256 * 2**20
    assert grown < 8 * 2**20


@pytest.mark.parametrize("write", ["op", "block_offset"])
def test_generated_code_allocates_no_cache(write):
    block = variant(write=write, dtype=torch.float32, blocks=64)
    x, y = inputs(block), inputs(block)

    def step(x):
        from tests.prologue_block import NORMS, ROPES

        q, k, v = x.qkv.split([8 * 32, 4 * 32, 4 * 32], -1)
        q, k, v = q.view(-1, 8, 32), k.view(-1, 4, 32), v.view(-1, 4, 32)
        cos, sin = x.cos_sin[x.positions].chunk(2, -1)
        q, k = (
            ROPES["chunk"](NORMS["late"](t, w, 1e-6), cos, sin, 32)
            for t, w in ((q, x.q_weight), (k, x.k_weight))
        )
        WRITES[write](block, x, k, v)
        return q

    expected = step(x)
    fn = torch.compile(step, backend="fusion", options={"qk_norm_rope_kv_cache": "required"})
    got, (code,) = run_and_get_code(fn, y)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(y.cache, x.cache)
    untouched = ~torch.isin(
        torch.arange(64 * 16).view(64, 1, 16, 1), x.slots[x.slots >= 0]
    ).expand_as(y.cache)
    assert same_bits(y.cache[untouched], x.cache[untouched])
    cache = x.cache.numel()
    for sizes in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", code):
        numel = torch.Size([int(s) for s in sizes.split(",") if s.strip()]).numel()
        assert numel < cache // 4, f"a buffer of {sizes} in the generated code"
