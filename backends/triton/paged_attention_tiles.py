"""Which tile sizes and how many splits paged attention runs with: one rule, no tuning at run time.

The rule looks only at what the host knows (head counts and sizes, dtypes, page size, the maxima
of query and key length, the chip), so a captured graph stays right for any lengths and tables
that the device holds at replay. The numbers were measured on an H200: the table is in
``docs/performance-attention.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.target import Target


@dataclass(frozen=True)
class Tiles:
    """Launch geometry. ``rows`` x ``keys`` is the tile of one loop step."""

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int
    row_blocks: int
    block_d: int
    block_dv: int
    ahead: bool = False

    def __str__(self) -> str:
        return (
            f"{self.rows}x{self.keys} keys, {self.warps} warps, {self.stages} stages, "
            f"{self.row_blocks} row block(s), {self.splits} split(s)"
        )


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


# Shared memory that one program may use, bytes; a margin is kept for reductions.
_SHARED = {"sm_80": 160_000, "sm_90": 220_000, "sm_100": 220_000, "gfx950": 150_000}
_SHARED_DEFAULT = {"nvidia": 96_000, "amd": 60_000}


def shared_memory(target: Target) -> int:
    """Bytes of shared memory (LDS) that a program may plan with on this chip."""
    return _SHARED.get(target.arch, _SHARED_DEFAULT.get(target.vendor, 60_000))


def choose(
    *,
    batch: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    max_query_len: int,
    max_seq_len: int,
    itemsize: int,
    wide: bool,
    target: Target,
) -> Tiles:
    """The launch geometry of one call.

    Args:
        batch: number of requests.
        kv_heads, group: KV heads, and query heads for each of them.
        head_dim, value_dim: D and Dv.
        max_query_len, max_seq_len: host-known maxima. A larger sequence on the device stays
            right (the splits divide what is really there), only less evenly spread.
        itemsize: bytes of a cache element after decoding into shared memory.
        wide: arithmetic in float32 (float32 queries or caches).
        target: the chip.

    The reasoning, in order:

    1. *Rows.* ``M = max_query_len * group`` rows share a KV head. One row block as large as M (a
       power of two, 16 to 256) reads K and V once. More than 128 value columns halve it, since
       the f32 accumulator (rows x columns) must stay within the register file; f32 arithmetic
       and AMD's 512 registers a lane cap it too.
    2. *Keys.* 32 keys for 16 rows, else 64: enough bytes in flight with few registers. Large head
       sizes halve it until ``stages`` tiles of K and V fit into shared memory.
    3. *Warps.* One warp for 8 to 16 rows (two for 16 rows, four from 32 on, eight at 128, sixteen
       at 256): each warp group then owns 64 rows of a wgmma.
    4. *Splits.* The grid should have about two programs for each multiprocessor (one where M >=
       128: a program fills it). Fewer splits than that leave bandwidth unused at small batch;
       more only enlarge the combine. A split has at least ``_MIN_KEYS`` keys.
    """
    block_d = max(16, next_power_of_2(head_dim))
    block_dv = max(16, next_power_of_2(value_dim))
    total_rows = max(1, max_query_len) * group
    amd = target.vendor == "amd"

    rows = min(256, max(16, next_power_of_2(total_rows)))
    cap = 256
    if wide:
        cap = 32
    elif amd:
        cap = 128
    cap = min(cap, max(16, 256 * 128 // max(block_d, block_dv)))
    rows = min(rows, cap)

    keys = 32 if rows == 16 or wide else 64
    warps = {16: 2, 32: 4, 64: 4, 128: 8, 256: 16}[rows]
    if block_dv > 128 and rows <= 64:
        warps = 4 if rows < 64 else 8
    stages = {16: 4, 32: 3, 64: 3, 128: 3, 256: 3}[rows]
    if amd:
        warps = min(warps, 8)
        stages = 2
    tile_bytes = (block_d + block_dv) * itemsize
    query_bytes = rows * block_d * itemsize
    budget = shared_memory(target)
    while stages * keys * tile_bytes + query_bytes > budget and (stages > 2 or keys > 16):
        if stages > 2:
            stages -= 1
        else:
            keys //= 2

    row_blocks = -(-total_rows // rows)
    programs = max(1, batch * kv_heads * row_blocks)
    wanted = PROGRAMS_WIDE if rows >= 128 else PROGRAMS_NARROW
    splits = max(1, wanted // programs)
    splits = max(1, min(splits, -(-max_seq_len // MIN_KEYS), MAX_SPLITS))
    return Tiles(rows, keys, warps, stages, splits, row_blocks, block_d, block_dv)


# An H200 has 132 multiprocessors. The rule does not ask the device how many there are: a captured
# graph, a report made on another machine and the measured table must all name the same geometry.
PROGRAMS_NARROW = 264
PROGRAMS_WIDE = 132
MIN_KEYS = 128
MAX_SPLITS = 128
