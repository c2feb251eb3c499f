"""Generate with an unmodified transformers model on a paged KV cache, compiled with fusion.

    python examples/generate_paged.py                       # small random Qwen3, compiled
    python examples/generate_paged.py --no-compile
    python examples/generate_paged.py --config DIR/config.json --layers 4 --dtype bfloat16
    python examples/generate_paged.py --model DIR --prompt "The sea" --prompt "One, two,"

Prints the tokens, whether they equal those of transformers' own eager generation (one prompt at a
time, unpadded), and fusion's report: what was fused in each layer, and where not, why. The exit
status is 1 where f32 tokens differ. (In bf16 another order of additions may turn a near tie.)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fusion
from fusion.integrations.transformers import PagedKVCache, generate, pack_qkv
from fusion.layout import KVCacheLayout


def main(argv: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    args = _arguments(argv)
    torch.manual_seed(0)
    model, tokenizer = _model(args)
    prompts = read_prompts(args, model, tokenizer)
    print(f"{type(model).__name__}: {_describe(model)}")

    start = time.perf_counter()
    reference = transformers_eager(model, prompts, args.max_new_tokens)
    print(f"transformers, eager:  {time.perf_counter() - start:.1f} s")

    model.set_attn_implementation("fusion_paged")
    if args.pack_qkv:
        packed = pack_qkv(model)
        print(f"pack_qkv: {len(packed.packed)} layers packed, skipped: {packed.skipped or 'none'}")
    longest = max(map(len, prompts)) + args.max_new_tokens
    blocks = args.num_blocks or len(prompts) * -(-longest // args.block_size)
    cache = PagedKVCache.for_model(model, blocks, args.block_size, layout=args.layout)
    compile = None
    if args.compile:
        compile = {"backend": "fusion", "options": {"inner": args.inner}}
        print("compiling prefill and decode ...", flush=True)
    steps: dict[str, str] = {}  # graph, step that it was compiled for

    def note(step: str) -> None:
        for report in fusion.reports():
            for graph in report.graphs:
                steps.setdefault(graph.id, step)

    def seen(step: int, _: torch.Tensor) -> None:
        if step == 0:  # what was compiled by now is the prefill
            note("prefill")

    for attempt in ("first", "again"):
        start = time.perf_counter()
        tokens = generate(
            model, prompts, args.max_new_tokens, cache, compile=compile, on_logits=seen
        )
        what = "compiled" if args.compile else "eager"
        print(f"paged, {what}, {attempt}: {time.perf_counter() - start:.1f} s")
        note("decode")
        if not args.compile:
            break

    equal = _compare(prompts, tokens, reference, tokenizer)
    if args.compile:
        for report in fusion.reports():
            print(f"\n--- {steps[report.graphs[0].id]} ---\n")
            print(report.to_text(), end="")
    print()
    print(f"tokens {'equal' if equal else 'not equal'} to transformers' eager generation")
    return 0 if equal or model.dtype is not torch.float32 else 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="a model with its weights")
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a config.json, run with random weights (without: a small Qwen3)",
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the config says")
    parser.add_argument("--dtype", help="dtype, such as bfloat16 (default: float32; the model's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--pack-qkv", action="store_true", help="one GEMM for q, k and v")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="needs --model")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a cache block")
    parser.add_argument("--num-blocks", type=int, help="default: as many as are needed")
    layouts = [m.name for m in KVCacheLayout if m is not KVCacheLayout.HF_STATIC]
    parser.add_argument("--layout", default="PACKED", type=str.upper, choices=layouts)
    args = parser.parse_args(argv)
    if args.prompt and not args.model:
        parser.error("--prompt needs --model, whose tokenizer reads it")
    return args


def _model(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.model:
        config = AutoConfig.from_pretrained(args.model)
    elif args.config:
        config = AutoConfig.from_pretrained(args.config)
    else:
        config = small_qwen3()
    if args.layers:
        config.num_hidden_layers = args.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: args.layers]
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(
            args.model, config=config, dtype=dtype or "auto", attn_implementation="eager"
        )
        return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype or torch.float32, attn_implementation="eager"
    )
    return model.to(args.device).eval(), None


def small_qwen3(layers: int = 4) -> Any:
    """The config of a Qwen3 that compiles in seconds."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.08,
    )


def read_prompts(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[list[int]]:
    """Token ids: of `args.prompt` or of some texts; random ones where there is no tokenizer."""
    if tokenizer is not None:
        texts = args.prompt or ["The capital of France is", "1, 2, 3,", "Once", "def add(a, b):"]
        return [tokenizer(text)["input_ids"] for text in texts]
    vocabulary = model.config.get_text_config().vocab_size
    return [torch.randint(0, vocabulary, (n,)).tolist() for n in (5, 17, 1, 30)]


@torch.no_grad()
def transformers_eager(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of transformers' own generation, one prompt at a time."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def _compare(
    prompts: list[list[int]], tokens: list[list[int]], reference: list[list[int]], tokenizer: Any
) -> bool:
    print()
    for prompt, got, want in zip(prompts, tokens, reference, strict=True):
        shown = repr(tokenizer.decode(got)) if tokenizer else " ".join(map(str, got))
        pairs = zip(got, want, strict=True)
        differ = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        verdict = "equal" if differ is None else f"differs from token {differ} on"
        print(f"prompt of {len(prompt):3} tokens, {verdict}: {shown}")
    return tokens == reference


def _describe(model: Any) -> str:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} query and {heads} KV "
        f"heads, {str(model.dtype).removeprefix('torch.')}, {model.device}"
    )


if __name__ == "__main__":
    sys.exit(main())
