"""Print the prologue table for this machine."""

from __future__ import annotations

import argparse

import torch

from fusion.backends.triton.bench import prologue


def main() -> int:
    """Exit status 0, or 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m fusion.backends.triton.bench")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(prologue.TOKENS))
    parser.add_argument(
        "--heads",
        nargs="*",
        default=["/".join(map(str, h)) for h in prologue.HEADS],
        help="q/kv/dim, for example 32/8/128",
    )
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="e4m3fn cache")
    parser.add_argument("--warm", action="store_true", help="rotate 8 buffers: partly in L2")
    options = parser.parse_args()
    heads = []
    for text in options.heads:
        hq, hk, d = (int(x) for x in text.split("/"))
        heads.append((hq, hk, d))
    rows = prologue.run(
        heads,
        options.tokens,
        inductor=not options.no_inductor,
        cache_dtype=torch.float8_e4m3fn if options.fp8 else torch.bfloat16,
        sets=8 if options.warm else None,
    )
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
