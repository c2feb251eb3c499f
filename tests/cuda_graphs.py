"""Write down what a CUDA build of torch makes of models, for tests on machines without a GPU.

    python -m tests.cuda_graphs OUT

compiles small models on the GPU, writes the graphs at the passes' hook as JSON (see
`tests.listing`) and prints what the passes say of each on that machine. The files under
`tests/data/cuda_graphs` were made so; `tests/test_cuda_graphs.py` reads them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fusion
from fusion.backend import fusion as fusion_backend
from fusion.integrations.transformers import PagedKVCache, forward_arguments
from fusion.integrations.transformers.layers import cache_argument
from tests import models
from tests.listing import post_grad

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def paged(name: str) -> Made:
    """Two layers of a transformers model, one decode step of three sequences, paged cache."""
    model = models.build(name, torch.bfloat16, layers=2, device="cuda")
    model.set_attn_implementation("fusion_paged")
    cache = PagedKVCache.for_model(model, 24, 8)
    step = cache.inputs([cache.allocate(5) for _ in range(3)], 1)
    step.token_ids.random_(0, 50)
    return (lambda model, step: model(**forward_arguments(step)).logits), (model, step)


def static(name: str) -> Made:
    """The same on transformers' own static cache, with whatever SDPA this build chooses."""
    from transformers import StaticCache

    model = models.build(name, torch.bfloat16, layers=2, device="cuda")
    model.set_attn_implementation("sdpa")
    config = model.config
    cache = StaticCache(config=config, max_cache_len=64)
    heads, dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(2, heads, dim, torch.bfloat16, model.device)
    tokens = torch.randint(0, 50, (2, 1), device="cuda")
    positions = torch.full((2, 1), 7, device="cuda")
    key = cache_argument(model.forward)

    def step(model: Any, tokens: Any, positions: Any, cache: Any) -> torch.Tensor:
        extra = {key: cache}
        logits: torch.Tensor = model(
            input_ids=tokens, position_ids=positions, use_cache=True, **extra
        ).logits
        return logits

    return step, (model, tokens, positions, cache)


class RMSNormBlock(torch.nn.Module):
    """A prologue of torch's own modules: nn.RMSNorm on q and k, rope, index_put, SDPA."""

    def __init__(self, heads: int = 8, kv_heads: int = 4, dim: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = torch.nn.Linear(256, (heads + 2 * kv_heads) * dim, bias=False)
        self.q_norm, self.k_norm = (torch.nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x: Any, cos: Any, sin: Any, cache: Any, slots: Any) -> Any:
        heads, kv, dim = self.heads, self.kv_heads, self.dim
        q, k, v = self.qkv(x).split((heads * dim, kv * dim, kv * dim), -1)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv, dim), v.reshape(-1, kv, dim)
        q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = cos[:, None], sin[:, None]

        def rotate(y: Any) -> Any:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k = rotate(q), rotate(k)
        cache[0].view(-1, kv, dim)[slots] = k
        cache[1].view(-1, kv, dim)[slots] = v
        keys, values = (c.view(1, -1, kv, dim).transpose(1, 2) for c in (cache[0], cache[1]))
        return F.scaled_dot_product_attention(
            q[None].transpose(1, 2), keys, values, enable_gqa=True
        )


def rms_norm_block() -> Made:
    """`RMSNormBlock` in bf16, five tokens."""
    model = RMSNormBlock().to("cuda", torch.bfloat16).eval()
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    cos, sin = (torch.randn(5, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache = torch.zeros(2, 8, 16, 4, 64, device="cuda", dtype=torch.bfloat16)
    return model, (x, cos, sin, cache, torch.arange(3, 8, device="cuda"))


MAKERS: dict[str, Callable[[], Made]] = {
    "qwen3-paged": lambda: paged("qwen3"),
    "llama-paged": lambda: paged("llama"),
    "gemma3-paged": lambda: paged("gemma3"),
    "qwen3-static": lambda: static("qwen3"),
    "rms-norm-block": rms_norm_block,
}


def main() -> int:
    """Write every listing; exit status 1 where a model did not compile."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    failed = False
    for name, make in MAKERS.items():
        try:
            function, arguments = make()
            graphs = post_grad(function, *arguments, run=False, dynamic=False)
            text = json.dumps({"torch": torch.__version__, "graphs": graphs})
            (out / f"{name}.json").write_text(text)
            ops = sorted({str(n["target"]) for g in graphs for n in g["nodes"]})
            print(f"{name}: {len(text)} bytes; {[o for o in ops if 'norm' in o or 'dot' in o]}")
            torch._dynamo.reset()
            function, arguments = make()
            torch.compile(function, backend=fusion_backend, dynamic=False)(*arguments)
            for site in (s for g in fusion.reports()[-1].graphs for s in g.sites):
                codes = [r.code for r in site.reasons]
                print(f"    {site.pass_name} {site.status} {site.operation} {site.kernel} {codes}")
        except Exception as error:
            failed = True
            print(f"{name}: {type(error).__name__}: {error}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
