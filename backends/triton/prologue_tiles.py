"""Which tile the prologue kernel uses, and why.

A program handles ``tokens`` x ``heads`` rows of one kind (q, k or v). The rule has few parts, so
that it can be explained and predicted (figures: docs/performance.md):

* Many heads (16 or more): one token and eight heads, so that cos, sin and the weights are read
  once per program and neighbouring programs read neighbouring memory.
* Few heads: a group of heads would leave programs half empty; a program takes one head of
  several tokens.
* Streaming hints. Stores let their lines leave L2 first once a call moves `STORE_BYTES`; loads
  too (they are read once) from `LOAD_BYTES` on. They gain 5 to 12 % there; below, they cost as
  much, because what a small call reads was written by the projection just before and is in L2.

Nothing is tuned at run time. The choice depends on what is static in a model (heads, head size)
and on the class of the token count, never on the exact count: a model needs at most three variants.
"""

from __future__ import annotations

from dataclasses import dataclass

MANY_HEADS = 16
STORE_BYTES = 2 << 20
LOAD_BYTES = 8 << 20


@dataclass(frozen=True)
class Tile:
    """Rows of one program (``tokens`` x ``heads``), its warps, streaming hints (0 none, 2 on
    stores, 3 on loads too), and the rule that chose it."""

    tokens: int
    heads: int
    warps: int
    stream: int = 0
    why: str = ""

    def __str__(self) -> str:
        hints = {2: ", streaming stores", 3: ", streaming"}.get(self.stream, "")
        why = f" ({self.why})" if self.why else ""
        return f"{self.tokens} tokens x {self.heads} heads, {self.warps} warps{hints}{why}"


def choose(
    q_heads: int, kv_heads: int, head_dim: int, tokens: int | None, *, hints: bool = True
) -> Tile:
    """The tile for a call.

    Args:
        q_heads, kv_heads: heads of q (0 where there is no q) and of k and v.
        head_dim: elements of a head; the larger of q/k and v.
        tokens: token count, or an example of it, or None where it is not known (a large one is
            assumed: that class loses least where it does not fit).
        hints: False where streaming hints are not to be used (measured on NVIDIA only).
    """
    heads = max(q_heads, kv_heads)
    count = 1 << 20 if tokens is None else tokens
    moved = 4 * head_dim * (q_heads + 2 * kv_heads) * count  # two bytes read, two written
    stream = 0
    if hints and moved >= STORE_BYTES:
        stream = 3 if moved >= LOAD_BYTES else 2
    rows = 8 if head_dim <= 256 else 4
    if heads >= MANY_HEADS:
        return Tile(1, rows, 4, stream, "many heads: one token a program")
    return Tile(
        rows if moved >= STORE_BYTES else rows // 2,
        1,
        4,
        stream,
        "few heads: one head of several tokens",
    )


def choices(q_heads: int, kv_heads: int, head_dim: int, *, hints: bool = True) -> tuple[Tile, ...]:
    """Every tile that :func:`choose` can give for these heads, whatever the token count."""
    row = 4 * head_dim * (q_heads + 2 * kv_heads)
    edges = (1, STORE_BYTES // row + 1, None)
    found = {choose(q_heads, kv_heads, head_dim, t, hints=hints) for t in edges}
    return tuple(sorted(found, key=lambda t: (t.tokens, t.heads, t.stream)))
