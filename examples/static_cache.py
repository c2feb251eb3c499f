"""transformers' own `generate` with its static cache, only `model.forward` compiled by fusion.

    python examples/static_cache.py                       # small random Qwen3
    python examples/static_cache.py --model DIR --prompt "The sea"

Nothing of the model or of `generate` is changed: the static cache writes key and value into
preallocated tensors `[B, H, S, D]`, and fusion finds norm, rope and that write in the graph.
Prints whether the tokens equal those of the uncompiled model, and fusion's report. The exit
status is 1 where f32 tokens differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fusion


def main(argv: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    args = _arguments(argv)
    torch.manual_seed(0)
    model, ids = _model_and_prompt(args)
    start = time.perf_counter()
    reference = _generate(model, ids, args.max_new_tokens)
    print(f"static cache, eager:           {time.perf_counter() - start:.1f} s")

    model.forward = torch.compile(
        model.forward, backend="fusion", options={"inner": args.inner}, fullgraph=True
    )
    for attempt in ("first", "again"):
        start = time.perf_counter()
        tokens = _generate(model, ids, args.max_new_tokens)
        print(f"static cache, compiled, {attempt}: {time.perf_counter() - start:.1f} s")

    print()
    for row in tokens:
        print(" ".join(map(str, row)))
    for report in fusion.reports():
        print()
        print(report.to_text(), end="")
    equal = tokens == reference
    print()
    print(f"tokens {'equal' if equal else 'not equal'} to the uncompiled model's")
    return 0 if equal or model.dtype is not torch.float32 else 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model with its weights")
    parser.add_argument("--prompt", default="The capital of France is", help="with --model")
    parser.add_argument("--layers", type=int, default=4, help="of the small random model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    return parser.parse_args(argv)


def _model_and_prompt(args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    dtype = getattr(torch, args.dtype)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        ids = AutoTokenizer.from_pretrained(args.model)(args.prompt, return_tensors="pt").input_ids
    else:
        config = Qwen3Config(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            initializer_range=0.08,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        ids = torch.randint(0, config.vocab_size, (2, 11))
    return model.to(args.device).eval(), ids.to(args.device)


@torch.no_grad()
def _generate(model: Any, ids: torch.Tensor, new: int) -> list[list[int]]:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache_implementation="static",
        # Prefill in chunks of (at least) the whole prompt: transformers then allocates the cache
        # before the first forward and not inside of it, where fusion could not see it as a cache.
        prefill_chunk_size=ids.shape[1],
        # transformers would compile decode steps itself on some devices.
        disable_compile=True,
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[ids.shape[1] :].tolist() for row in out]


if __name__ == "__main__":
    sys.exit(main())
