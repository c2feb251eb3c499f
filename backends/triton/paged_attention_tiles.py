"""Which tile sizes and how many splits paged attention runs with: one rule, no tuning at run time.

The rule looks only at what the host knows (head counts and sizes, dtypes, page size, the maxima
of query and key length, the chip), so a captured graph stays right for any lengths and tables
that the device holds at replay. The numbers were measured on an H200: the table is in
``docs/performance-attention.md``, the measurement in ``benchmarks/paged_attention_sweep.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.backends.triton.sizes import next_power_of_2
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

    def __str__(self) -> str:
        return (
            f"{self.rows} rows x {self.keys} keys, {self.warps} warps, {self.stages} stages, "
            f"{self.row_blocks} row block(s), {self.splits} split(s)"
        )


# An H200 has 132 multiprocessors; 128 programs are nearly as many and divide lengths evenly. The
# rule does not ask the device: a captured graph, a report made on another machine and the measured
# table must all name the same geometry.
PROGRAMS = 128
MIN_KEYS = 64
LONG = 2048  # keys of one program; the largest blocks pay from here on
MAX_SPLITS = 256

# Shared memory that one program may plan with, bytes; a little less than the chip has.
_SHARED = {"sm_80": 160_000, "sm_90": 230_000, "sm_100": 230_000, "sm_103": 230_000,
           "gfx950": 150_000}  # fmt: skip
_SHARED_DEFAULT = {"nvidia": 96_000, "amd": 60_000}


def shared_memory(target: Target) -> int:
    """Bytes of shared memory (LDS) that a program may plan with on this chip."""
    return _SHARED.get(target.arch, _SHARED_DEFAULT.get(target.vendor, 60_000))


def _rows_and_splits(total_rows: int, heads: int, keys: int, most_rows: int) -> tuple[int, int]:
    """(rows of a block, splits) for `total_rows` rows on each of `heads` (request, KV head) pairs.

    `keys` is the maximum of the key lengths, `most_rows` what the registers allow.
    """

    def splits(rows: int, programs: int = PROGRAMS) -> int:
        blocks = -(-total_rows // rows)
        return max(1, programs // (heads * blocks))

    smallest = min(64, most_rows)
    rows = max(smallest, min(most_rows, next_power_of_2(total_rows)))
    # A large block fills a multiprocessor by itself and is slow to start and to merge. Where the
    # keys must be split, two small blocks finish earlier, although each of them reads K and V again
    # (from the L2); more than two only where few keys are left for each.
    if rows > smallest and splits(rows) > 1 and (total_rows <= 128 or keys < LONG * splits(rows)):
        rows = smallest
    found = splits(rows)
    # Two small programs fit one multiprocessor: twice the splits, if each keeps enough keys to
    # make up for its partial result, which is as large as K and V of `rows` keys.
    twice = splits(rows, 2 * PROGRAMS)
    if rows <= 64 and keys >= (max(768, 32 * total_rows) if total_rows <= rows else 256) * twice:
        found = twice
    tiles = -(-keys // MIN_KEYS)  # one for each of the first 16 splits, two for each of more
    return rows, max(1, min(found, max(min(16, tiles), -(-tiles // 2)), MAX_SPLITS))


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
    shuffled: bool = False,
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
        shuffled: AITER's shuffled layout; its V needs more address registers.

    The reasoning, in order:

    1. *Rows.* ``M = max_query_len * group`` rows share a KV head; one block of them reads K and V
       once; where the keys are split, two blocks that share a multiprocessor are better than one of
       128. Hopper's matrix instruction takes 64 rows by one group of four warps, which keeps
       each row's maximum and sum within a warp: fewer rows are padded to 64, since the wasted
       arithmetic is free where memory is the limit (8 to 10 % faster than blocks of 16 or 32).
       Chips without it use blocks of 16 and 32. The f32 accumulator (rows x columns) must stay
       in registers: at most 256 rows of 128 columns on NVIDIA, 128 on AMD, fewer of wider heads.
    2. *Keys.* 64: enough bytes in flight, few registers (128 leave the compiler none for 128 rows:
       5 to 12 % slower); 32 where all programs, two of 64 rows a multiprocessor, start and end
       together, since the last tile of each is not overlapped with anything (2 %). Wide heads and
       float32 take 32 or 16.
    3. *Warps.* Four for 64 rows, eight for 128, sixteen for 256.
    4. *Splits.* About one program for each multiprocessor, two of the small ones where every
       split keeps 768 keys, and 32 for each row. More only enlarge the merge.
    """
    block_d = max(16, next_power_of_2(head_dim))
    block_dv = max(16, next_power_of_2(value_dim))
    widest = max(block_d, block_dv)
    total_rows = max(1, max_query_len) * group
    amd = target.vendor == "amd"
    wgmma = target.vendor == "nvidia" and (target.capability or 0) >= 90

    if wide:
        most = 16
    elif widest <= 128:
        most = 64 if shuffled else 256 if wgmma else 128
    else:
        most = 64 if widest <= 256 and not amd else 32
    if not wgmma:  # small blocks exist: use the smallest that holds all rows
        most = min(most, max(16, next_power_of_2(total_rows)))
    rows, splits = _rows_and_splits(total_rows, max(1, batch * kv_heads), max_seq_len, most)

    keys = 64 if widest <= 128 else 32 if widest <= 256 else 16
    together = splits == 1 and PROGRAMS < batch * kv_heads * -(-total_rows // rows) <= 2 * PROGRAMS
    if wide:
        keys = 32 if widest <= 128 else 16
    elif wgmma and rows == 64 and together and max_seq_len <= LONG:
        keys = min(keys, 32)
    warps = {16: 4, 32: 4, 64: 4, 128: 8, 256: 16}[rows]
    if widest > 128 and (wide or rows >= 32):
        warps = 8
    if shuffled and rows == 64:
        warps = 8
    stages = 2 if amd else 3
    # AMD keeps the query in registers and stages-1 tiles in LDS; NVIDIA all of it in shared memory
    tiles = (stages - 1) if amd else stages
    extra = 0 if amd else rows * block_d * itemsize
    budget = shared_memory(target)
    while tiles * keys * (block_d + block_dv) * itemsize + extra > budget and keys > 16:
        keys //= 2
    return Tiles(rows, keys, warps, stages, splits, -(-total_rows // rows), block_d, block_dv)


@dataclass(frozen=True)
class MergeTiles:
    """Geometry of the merge: ``rows`` (token, head) rows a program, ``chunk`` splits at a time."""

    rows: int
    block_s: int
    chunk: int
    warps: int


def merge_tiles(splits: int, block_dv: int) -> MergeTiles:
    """How the partial results of `splits` splits (``block_dv`` columns each) are summed.

    The merge is nothing but latency. One warp needs no exchange through shared memory and was
    fastest on an H200 wherever a row fits its registers (4096 numbers); two where it does not, with
    at most 8192 numbers in flight.
    """
    block_s = next_power_of_2(splits)
    warps = 1 if block_s * block_dv <= 4096 else 2
    rows = max(1, 1024 * warps // (block_s * block_dv))
    return MergeTiles(rows, block_s, min(block_s, max(1, 8192 // block_dv)), warps)
