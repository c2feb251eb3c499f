"""Which tile the prologue kernel uses, and why.

A program handles ``tokens`` x ``heads`` rows of one kind (q, k or v). Measured on an H200 (see
docs/performance.md); the rule has few parts so that it can be explained and predicted:

* Many heads (16 or more of q): one token and a group of heads, so that cos, sin and the weights
  are read once per program and neighbouring programs read neighbouring memory.
* Few heads: groups of heads would leave lanes idle; a program takes one head and several tokens.

Nothing is tuned at run time. The choice depends on the shapes that are static in a model (heads,
head size) and on a coarse class of the token count, never on the exact token count.
"""

from __future__ import annotations

from dataclasses import dataclass

MANY_HEADS = 16
SMALL_BATCH = 64


@dataclass(frozen=True)
class Tile:
    """Rows of one program (``tokens`` x ``heads``) and its warps, with the rule that chose it."""

    tokens: int
    heads: int
    warps: int
    why: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.heads} heads, {self.warps} warps ({self.why})"


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def choose(q_heads: int, kv_heads: int, head_dim: int, tokens: int | None) -> Tile:
    """The tile for a call.

    Args:
        q_heads, kv_heads: heads of q (0 where there is no q) and of k and v.
        head_dim: elements of a head; larger of q/k and v.
        tokens: token count, or an example of it, or None where it is not known.
    """
    heads = max(q_heads, kv_heads)
    many = heads >= MANY_HEADS
    rows = 8 if head_dim <= 256 else 4
    if many:
        return Tile(1, min(rows, power_of_two(heads)), 4, "many heads: one token per program")
    if tokens is not None and tokens < SMALL_BATCH:
        return Tile(1, min(rows, power_of_two(heads)), 4, "few heads, few tokens")
    return Tile(rows, 1, 4, "few heads: one head, several tokens per program")


def choices(q_heads: int, kv_heads: int, head_dim: int) -> tuple[Tile, ...]:
    """Every tile that :func:`choose` can give for these heads, whatever the token count."""
    found = {choose(q_heads, kv_heads, head_dim, t) for t in (1, SMALL_BATCH, None)}
    return tuple(sorted(found, key=lambda t: (t.tokens, t.heads, t.warps)))
