"""Greedy speculative decoding with a DFlash drafter, target and drafter compiled with fusion.

    python examples/dflash.py                          # small random Qwen3, drafter trained here
    python examples/dflash.py --train-steps 0          # a drafter that knows nothing
    python examples/dflash.py --target DIR --drafter DIR --dtype bfloat16

Both models live in one process on paged caches. A round drafts a block in one non-causal forward,
verifies it in one causal forward of the target, accepts the longest prefix that the target agrees
with and one token more, and takes back what was rejected. Prompts of different lengths run as one
batch, each at its own pace.

Prints the tokens, whether they equal the target's plain greedy decoding (transformers' eager
generation, one prompt at a time, one token at a time), how many tokens a round gave, and fusion's
report. The exit status is 1 where f32 tokens differ: speculation must not change the answer.

In bf16 every token still is the target's first choice after the tokens before it, but a forward of
a whole block adds up in another order than one of a single token, so that a near tie may turn and
the texts part there. It is printed how near the tie was; where it was none (more than a few
roundings apart), the exit status is 1.

How many tokens a round gives says nothing about DFlash here: the small drafter is trained in
seconds on the target's own answers to all prompts but the last, so that drafts are accepted and
rejected in one batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from dflash_decoding import Result, Speculator, Step
from dflash_drafter import DFlashDrafter, distil, load_drafter, random_drafter
from generate_paged import read_prompts, small_qwen3, transformers_eager

from fusion.layout import KVCacheLayout
from fusion.render import summary
from fusion.tools.console import data, table


def main(argv: list[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    args = _arguments(argv)
    torch.manual_seed(0)
    target, tokenizer = _target(args)
    prompts = read_prompts(args, target, tokenizer)
    print(f"target   {type(target).__name__}: {_describe(target)}")

    start = time.perf_counter()
    plain = transformers_eager(target, prompts, args.max_new_tokens)
    print(f"plain greedy decoding, transformers eager: {time.perf_counter() - start:.1f} s")
    drafter = _drafter(args, target, prompts, plain)
    print(f"drafter  {type(drafter).__name__}: {drafter.describe()}")

    target.set_attn_implementation("fusion_paged")
    longest = max(map(len, prompts)) + args.max_new_tokens
    compile = {"backend": "fusion", "options": {"inner": args.inner}} if args.compile else None
    pair = Speculator(
        target, drafter, len(prompts), longest, args.page_size, args.layout, compile=compile
    )
    if compile:
        print("compiling three graphs ...", flush=True)
    for attempt in ("first", "again"):
        start = time.perf_counter()
        result = pair.generate(prompts, args.max_new_tokens)
        what = "compiled" if args.compile else "eager"
        print(f"speculative, {what}, {attempt}: {time.perf_counter() - start:.1f} s")
        if not args.compile:
            break

    for step in pair.steps:
        for report in step.reports:
            print(f"\n--- {step.name} ---\n")
            # A real model has too many layers for a line each.
            data(report.to_text(all_sites=not args.target))
    right = _print_tokens(prompts, result, plain, target, tokenizer)
    if args.compile:
        _print_sites(pair.steps)
    _print_rounds(result)
    equal = result.tokens == plain
    print(f"tokens {'equal' if equal else 'not equal'} to plain greedy decoding of the target")
    if right and not equal:
        print("(where they part there was a near tie, which another order of additions turned)")
    return 0 if right else 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="a transformers model (without: a small Qwen3)"
    )
    parser.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="its drafter, in the format of z-lab's DFlashDraftModel for Qwen3-like models: "
        "config.json of model_type qwen3 with block_size and dflash_config (mask_token_id, "
        "target_layer_ids), weights fc, hidden_norm, layers, norm. The target's embedding, head "
        "and hidden size are used. Other formats (DFlash 2, own vocabularies) are refused. "
        "Without: a small one, trained here",
    )
    parser.add_argument("--block-size", type=int, default=8, help="of the small drafter")
    parser.add_argument(
        "--train-steps", type=int, default=12, help="of the small drafter; 0 leaves it random"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the small target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="needs --target")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a cache block")
    layouts = [m.name for m in KVCacheLayout if m is not KVCacheLayout.HF_STATIC]
    parser.add_argument("--layout", default="PACKED", type=str.upper, choices=layouts)
    args = parser.parse_args(argv)
    if args.prompt and not args.target:
        parser.error("--prompt needs --target, whose tokenizer reads it")
    if args.drafter and not args.target:
        parser.error("--drafter needs --target: a drafter belongs to one target")
    if args.block_size < 2 or args.max_new_tokens < 1:
        parser.error("--block-size must be at least 2 and --max-new-tokens at least 1")
    return args


def _target(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype, options = getattr(torch, args.dtype), {"attn_implementation": "eager"}
    tokenizer = None
    if args.target:
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    else:
        config = small_qwen3(args.layers)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    return model.to(args.device).eval().requires_grad_(False), tokenizer


def _drafter(
    args: argparse.Namespace, target: Any, prompts: list[list[int]], plain: list[list[int]]
) -> DFlashDrafter:
    if args.drafter:
        try:
            drafter = load_drafter(args.drafter, target.dtype, args.device)
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from error
    else:
        drafter = random_drafter(target, args.block_size)
        texts = [(p + new, len(p)) for p, new in zip(prompts, plain, strict=True)]
        taught = texts[:-1] or texts
        start = time.perf_counter()
        loss = distil(drafter, target, taught, args.train_steps)
        took = time.perf_counter() - start
        print(
            f"drafter trained on what the target says to {len(taught)} of {len(texts)} prompts: "
            f"{args.train_steps} steps, {took:.1f} s, loss {loss[0]:.2f} to {loss[1]:.2f}"
        )
        drafter = drafter.to(target.dtype)
    text = target.config.get_text_config()
    if drafter.config.hidden_size != text.hidden_size:
        raise SystemExit(
            f"the drafter has hidden size {drafter.config.hidden_size}, the target "
            f"{text.hidden_size}: they do not belong together"
        )
    if max(drafter.target_layers) >= text.num_hidden_layers:
        raise SystemExit(
            f"the drafter reads layers {list(drafter.target_layers)}, the target has "
            f"{text.num_hidden_layers}: they do not belong together"
        )
    return drafter


def _print_tokens(
    prompts: list[list[int]], result: Result, plain: list[list[int]], target: Any, tokenizer: Any
) -> bool:
    """Print them; whether all are right: equal, or in low precision parted by a near tie."""
    right = True
    print()
    rows = zip(prompts, result.tokens, plain, result.rounds, strict=True)
    for prompt, got, want, rounds in rows:
        shown = repr(tokenizer.decode(got)) if tokenizer else " ".join(map(str, got))
        pairs = zip(got, want, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        verdict = "equal"
        if at is not None:
            ours, theirs, close = _logits(target, prompt + want[:at], got[at], want[at])
            verdict = f"differs from token {at} on (logits {ours:.4f} and {theirs:.4f})"
            right = right and close and target.dtype is not torch.float32
        print(f"prompt of {len(prompt):3} tokens, {len(rounds):2} rounds, {verdict}: {shown}")
    return right


@torch.no_grad()
def _logits(target: Any, before: list[int], got: int, want: int) -> tuple[float, float, bool]:
    """The logits of two tokens after `before`, by one eager forward, and whether they are but a
    few roundings of the model's dtype apart."""
    implementation = target.config._attn_implementation
    target.set_attn_implementation("eager")
    ids = torch.tensor([before], device=target.device)
    logits = target(input_ids=ids, use_cache=False).logits[0, -1].float()
    target.set_attn_implementation(implementation)
    a, b = logits[got].item(), logits[want].item()
    few = 4 * torch.finfo(target.dtype).eps * logits.abs().max().item()
    return a, b, abs(a - b) <= few


def _print_sites(steps: Sequence[Step]) -> None:
    """What became of every attention call and every prologue, and how each call attends."""
    rows = []
    for step in steps:
        sites = [site for report in step.reports for site in report.sites]
        for title, name in (
            ("attention", "non_causal_attention"),
            ("prologue", "qk_norm_rope_kv_cache"),
        ):
            counts = Counter(_outcome(s) for s in sites if s.pass_name == name)
            for text, count in counts.items():
                rows.append((step.name, title, f"{count} {text}"))
    # Say once what is the same as in the line above.
    shown = [rows[0], *(_fresh(row, above) for above, row in pairwise(rows))] if rows else []
    print()
    data("\n".join(table(shown)))


def _outcome(site: Any) -> str:
    text = summary(site) if site.applicable else "left alone"
    if any(reason.code == "match.no-query" for reason in site.reasons):
        text += " (keys of the context come without queries)"
    call = site.facts.get("call")
    if call is None:
        return text
    windows = [call.get(side, "-1") for side in ("window_left", "window_right")]
    kind = "causal" if call.get("causal") == "True" else "non-causal"
    return kind + ("" if windows == ["-1", "-1"] else f", window {'/'.join(windows)}") + f": {text}"


def _fresh(row: tuple[str, ...], above: tuple[str, ...]) -> tuple[str, ...]:
    same = [row[: i + 1] == above[: i + 1] for i in range(len(row))]
    return tuple("" if known else cell for known, cell in zip(same, row, strict=True))


def _print_rounds(result: Result) -> None:
    gave = [n for rounds in result.rounds for n in rounds]
    if not gave:
        return
    counts = ", ".join(f"{gave.count(n)} x {n}" for n in sorted(set(gave)))
    print()
    print(f"tokens a round: {sum(gave) / len(gave):.2f} on average ({counts})")


def _describe(model: Any) -> str:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} query and {heads} KV "
        f"heads, {str(model.dtype).removeprefix('torch.')}, {model.device}"
    )


if __name__ == "__main__":
    sys.exit(main())
