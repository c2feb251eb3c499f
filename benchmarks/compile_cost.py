"""What fusion adds to a compile, and how it grows with the number of layers.

    python benchmarks/compile_cost.py

Prints, for a small Qwen3 (8 query and 4 KV heads) on the paged cache: the share of the pass in a
cold compile with Inductor (4 layers), and the CPU seconds of the pass at 8, 16, 32 and 64 layers
(captured, not compiled). Cold means empty compile caches.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Exit status 1 where the share is above 5 % or the growth from 32 to 64 above 2.2."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--skip-inductor", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        share = 0.0 if options.skip_inductor else inductor_share()
    spent = {n: pass_seconds(n) for n in options.layers}
    print("layers  CPU seconds of the pass  ms a layer")
    for n, s in spent.items():
        print(f"{n:6d}  {s:23.3f}  {1e3 * s / n:10.1f}")
    growth = spent[64] / spent[32] if {32, 64} <= set(spent) else 0.0
    print(f"growth from 32 to 64 layers: {growth:.2f}")
    return int(share > 0.05 or growth > 2.2)


def decode_step(layers: int) -> tuple[Any, Any]:
    """A model and the inputs of one decode step on the paged cache."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from fusion.integrations.transformers import PagedKVCache

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=512, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation("fusion_paged")
    cache = PagedKVCache.for_model(model, num_blocks=16, block_size=16, layout="packed")
    sequences = [cache.allocate(9), cache.allocate(17)]
    inputs = cache.inputs(sequences, 1)
    return model, inputs


def step(model: Any, inputs: Any) -> Any:
    """Logits of one decode step."""
    from fusion.integrations.transformers import forward_arguments

    return model(**forward_arguments(inputs)).logits


def inductor_share() -> float:
    """The pass's part of a cold compile with Inductor, 4 layers."""
    import torch

    import fusion

    torch.set_grad_enabled(False)
    model, inputs = decode_step(4)
    run = torch.compile(step, backend="fusion", fullgraph=True)
    start = time.perf_counter()
    run(model, inputs)
    total = time.perf_counter() - start
    (graph,) = fusion.reports()[-1].graphs
    mine = graph.times["total"]
    print(
        f"4 layers, Inductor, cold: {total:.1f} s, of which fusion {mine:.2f} s: {mine / total:.1%}"
    )
    return mine / total


def pass_seconds(layers: int) -> float:
    """CPU seconds of the prologue pass on a captured graph."""
    import torch

    import fusion
    from fusion.passes import qk_norm_rope_kv_cache as module

    torch.set_grad_enabled(False)
    model, inputs = decode_step(layers)
    spent: list[float] = []
    original = module.QKNormRopeKVCache.run

    def timed(self: Any, graph: Any, context: Any) -> Any:
        start = time.thread_time()
        try:
            return original(self, graph, context)
        finally:
            spent.append(time.thread_time() - start)

    module.QKNormRopeKVCache.run = timed  # type: ignore[method-assign]
    try:
        report = fusion.explain(step, model, inputs)
    finally:
        module.QKNormRopeKVCache.run = original  # type: ignore[method-assign]
    fusion.expect(report, qk_norm_rope_kv_cache=layers)
    return sum(spent)


if __name__ == "__main__":
    raise SystemExit(main())
