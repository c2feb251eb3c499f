"""Argument checks of the canonical operations, in plain words.

They run on real tensors (each eager call) and on fake ones (each trace). With symbolic sizes only
what is certainly wrong is refused and no guard is added; the real sizes are checked at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion.graph.storage import storage_id
from fusion.layout import shuffle_width
from fusion.ops.overlap import repeats_itself, share_bytes
from fusion.ops.schema import MUTATED, REQUIRED

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
INTEGERS = (torch.int32, torch.int64)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "weight_mode": ("w", "1+w"),
    "norm_cast": ("late", "early", "none"),
    "inv_rms": ("rsqrt", "pow", "div", "recip"),
    "rope_style": ("half", "interleaved"),
    "kv_layout": ("NHD", "SHUFFLE"),
}

Arguments = Mapping[str, Any]


def _certain(condition: Any) -> bool:
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(str(s) for s in tensor.shape) + "]"


def _fail(op: str, name: str, have: object, need: object) -> None:
    raise ValueError(f"fusion.ops.{op}: {name} is {have}, but it must be {need}")


def _rank(op: str, name: str, tensor: Tensor, rank: int, form: str) -> None:
    if tensor.dim() != rank:
        _fail(op, name, f"of shape {_shape(tensor)}", f"{rank}-dimensional, {form}")


def _size(op: str, name: str, tensor: Tensor, dim: int, want: Any, what: str) -> None:
    if _certain(tensor.shape[dim] != want):
        _fail(op, f"dimension {dim} of {name} (shape {_shape(tensor)})", tensor.shape[dim],
              f"{want}, {what}")  # fmt: skip


def _dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        _fail(op, name, tensor.dtype, _names(allowed))


def _devices(op: str, a: Arguments, anchor: str) -> None:
    """All tensors on one device; one-element scales and eps may stay on the CPU."""
    want = a[anchor].device
    for name, value in a.items():
        if not isinstance(value, Tensor) or value.device == want:
            continue
        if value.dim() == 0 and value.device.type == "cpu":
            continue
        _fail(op, name, f"on {value.device}", f"on {want}, where {anchor} is")


def _choices(op: str, a: Arguments) -> None:
    for name, allowed in CHOICES.items():
        if name in a and a[name] not in allowed:
            _fail(op, name, repr(a[name]), " or ".join(map(repr, allowed)))


def _cache(op: str, a: Arguments, heads: Any, dim_k: Any, dim_v: Any) -> None:
    """Key and value cache: rank, heads, head dims, strides, equal geometry, scales."""
    shuffled = a["kv_layout"] == "SHUFFLE"
    key, value = a["key_cache"], a["value_cache"]
    for name, cache, dim, letter in (
        ("key_cache", key, dim_k, "D"),
        ("value_cache", value, dim_v, "Dv"),
    ):
        _dtype(op, name, cache, (*FLOATS, *FP8))
        if not shuffled:
            _rank(op, name, cache, 4, f"a view [num_blocks, block_size, heads, {letter}]")
            _size(op, name, cache, 2, heads, "the number of KV heads")
            _size(op, name, cache, 3, dim, f"the head dim {letter}")
            if cache.shape[3] != 1 and cache.stride(3) != 1:
                _fail(op, f"last stride of {name}", cache.stride(3), "1 (it is never copied)")
        else:
            x = shuffle_width(cache.dtype)
            form = "D/x, block, x" if name == "key_cache" else "block/x, Dv, x"
            _rank(op, name, cache, 5, f"[num_blocks, heads, {form}] for kv_layout SHUFFLE")
            _size(op, name, cache, 1, heads, "the number of KV heads")
            _size(op, name, cache, 4, x, "16 bytes of elements")
            if name == "key_cache":
                if _certain(cache.shape[2] * x != dim):
                    _fail(op, "dimension 2 of key_cache", cache.shape[2], f"D/x = {dim}/{x}")
            else:
                _size(op, name, cache, 3, dim, "the head dim Dv")
        block = cache.shape[1 if not shuffled else 3 if name == "key_cache" else 2]
        if _certain(block == 0):
            _fail(op, f"the block size of {name} (shape {_shape(cache)})", 0, "at least 1")
    pairs = [(0, key.shape[0], value.shape[0])]
    if shuffled:
        pairs.append((3, key.shape[3], value.shape[2] * value.shape[4]))
    else:
        pairs.append((1, key.shape[1], value.shape[1]))
    for dim, have, want in pairs:
        if _certain(have != want):
            _fail(
                op,
                f"dimension {dim} of key_cache (shape {_shape(key)})",
                have,
                f"{want}, as in value_cache (shape {_shape(value)})",
            )
    for name in ("k_scale", "v_scale"):
        scale = a[name]
        if scale is not None:
            _dtype(op, name, scale, FLOATS)
            if scale.dim() > 1 or (scale.dim() == 1 and _certain(scale.shape[0] != 1)):
                _fail(op, name, f"of shape {_shape(scale)}", "one number (shape [] or [1])")


def _written(op: str, a: Arguments) -> None:
    """What every op that writes a cache shares: key, value, slots, the caches themselves."""
    key, value, slots = a["key"], a["value"], a["slot_mapping"]
    for name in ("key_cache", "value_cache"):
        _once(op, name, a[name])
    _rank(op, "key", key, 3, "[tokens, KV heads, D]")
    _rank(op, "value", value, 3, "[tokens, KV heads, Dv]")
    _dtype(op, "key", key, FLOATS)
    _dtype(op, "value", value, FLOATS)
    _size(op, "value", value, 0, key.shape[0], "the number of tokens, as in key")
    _size(op, "value", value, 1, key.shape[1], "the number of KV heads, as in key")
    _rank(op, "slot_mapping", slots, 1, "[N], one slot per token")
    _dtype(op, "slot_mapping", slots, INTEGERS)
    if _certain(slots.shape[0] > key.shape[0]):
        _fail(op, "slot_mapping", f"of length {slots.shape[0]}",
              f"at most as long as key has tokens ({key.shape[0]})")  # fmt: skip
    _cache(op, a, key.shape[1], key.shape[2], value.shape[2])
    both = a["key_cache"], a["value_cache"]
    if storage_id(both[0]) == storage_id(both[1]) and share_bytes(*both):
        _fail(op, "value_cache", "in memory that key_cache has a part of",
              "apart from key_cache: both are written")  # fmt: skip


def _once(op: str, name: str, cache: Tensor) -> None:
    """No two elements of a cache at one address."""
    strides = list(cache.stride())
    expanded = any(
        _certain(s > 1) and t == 0
        for s, t in zip(cache.shape, strides, strict=True)
        if isinstance(t, int)
    )
    if expanded or repeats_itself(cache):
        how = "expanded" if expanded else "overlapping itself"
        _fail(op, name, f"{how} (shape {_shape(cache)}, strides {strides})",
              "memory in which every element exists once, because it is written")  # fmt: skip


def read_of_written(op: str, a: Arguments) -> tuple[str, ...]:
    """Names of the arguments that are read and have bytes in a cache that the call writes.

    Reads come first, so these must be copied before anything is written: kernels read and write in
    no particular order. Views of one buffer that interleave (a key beside the cache in a pool) do
    not count. Arguments in different storages are taken to be apart.
    """
    written = MUTATED[op]
    if not written:
        return ()
    tensors = {name: v for name, v in a.items() if isinstance(v, Tensor)}
    storage = {name: storage_id(tensor) for name, tensor in tensors.items()}
    return tuple(
        name
        for name, tensor in tensors.items()
        if name not in written
        and any(storage[name] == storage[w] and share_bytes(tensors[w], tensor) for w in written)
    )


def _query_key(op: str, a: Arguments) -> None:
    query, key = a["query"], a["key"]
    _rank(op, "query", query, 3, "[tokens, query heads, D]")
    _rank(op, "key", key, 3, "[tokens, KV heads, D]")
    _dtype(op, "query", query, FLOATS)
    _dtype(op, "key", key, FLOATS)
    _size(op, "key", key, 0, query.shape[0], "the number of tokens, as in query")
    _size(op, "key", key, 2, query.shape[2], "the head dim D, as in query")


def _norm(op: str, a: Arguments) -> None:
    dim = a["query"].shape[2]
    for name in ("q_weight", "k_weight"):
        weight = a[name]
        if weight is not None:
            _dtype(op, name, weight, FLOATS)
            _rank(op, name, weight, 1, "[D]")
            _size(op, name, weight, 0, dim, "the head dim D (the norm is per head)")
    for name in ("q_eps_tensor", "k_eps_tensor"):
        eps = a[name]
        if eps is not None:
            _dtype(op, name, eps, FLOATS)
            _rank(op, name, eps, 0, "one number")
    for name in ("q_eps", "k_eps"):
        eps = a[name]
        if _certain(eps < 0) or eps != eps:
            _fail(op, name, eps, "at least 0 (it is added to the mean square)")


def _rope(op: str, a: Arguments) -> None:
    query, positions, width = a["query"], a["positions"], a["rotary_dim"]
    dim = query.shape[2]
    if width < 0 or width % 2 or _certain(width > dim):
        _fail(op, "rotary_dim", width, f"even and between 0 and the head dim D = {dim}")
    if positions is not None:
        _rank(op, "positions", positions, 1, "[tokens]")
        _dtype(op, "positions", positions, INTEGERS)
        _size(op, "positions", positions, 0, query.shape[0], "the number of tokens, as in query")
    for name in ("cos", "sin"):
        table = a[name]
        first = "tokens" if positions is None else "max_pos"
        _rank(op, name, table, 2, f"[{first}, rotary_dim/2 or rotary_dim]")
        _dtype(op, name, table, FLOATS)
        if _certain(table.shape[1] != width) and _certain(table.shape[1] != width // 2):
            _fail(op, f"width of {name} (shape {_shape(table)})", table.shape[1],
                  f"{width // 2} or {width} (rotary_dim/2 or rotary_dim)")  # fmt: skip
        if positions is None:
            _size(op, name, table, 0, query.shape[0],
                  "the number of tokens (or give positions, and a table)")  # fmt: skip
        elif _certain(table.shape[0] == 0) and _certain(query.shape[0] > 0):
            _fail(op, name, f"of shape {_shape(table)}", "a table with at least one row")
    for name in ("rope_dtype", "out_dtype"):
        if a[name] not in FLOATS:
            _fail(op, name, a[name], _names(FLOATS))


def _attention(op: str, a: Arguments) -> None:
    query, table = a["query"], a["block_table"]
    _rank(op, "query", query, 3, "[tokens, query heads, D]")
    _dtype(op, "query", query, FLOATS)
    for name, rank, form in (
        ("block_table", 2, "[sequences, blocks]"),
        ("seq_lens", 1, "[sequences]"),
        ("query_start_loc", 1, "[sequences + 1]"),
    ):
        _rank(op, name, a[name], rank, form)
        _dtype(op, name, a[name], INTEGERS)
    batch = a["seq_lens"].shape[0]
    _size(op, "block_table", table, 0, batch, "the number of sequences, as in seq_lens")
    _size(op, "query_start_loc", a["query_start_loc"], 0, batch + 1,
          "the number of sequences plus one")  # fmt: skip
    shuffled = a["kv_layout"] == "SHUFFLE"
    key, value = a["key_cache"], a["value_cache"]
    rank = 5 if shuffled else 4
    form = "for kv_layout " + a["kv_layout"]
    _rank(op, "key_cache", key, rank, form)
    _rank(op, "value_cache", value, rank, form)
    heads = key.shape[1] if shuffled else key.shape[2]
    _cache(op, a, heads, query.shape[2], value.shape[3])
    if _certain(heads == 0) or _certain(query.shape[1] % heads != 0):
        _fail(op, f"dimension 1 of query (shape {_shape(query)})", query.shape[1],
              f"a multiple of the {heads} KV heads")  # fmt: skip
    if a["sinks"] is not None:
        _rank(op, "sinks", a["sinks"], 1, "[query heads]")
        _dtype(op, "sinks", a["sinks"], FLOATS)
        _size(op, "sinks", a["sinks"], 0, query.shape[1], "the number of query heads")
    for name in ("max_query_len", "max_seq_len"):
        if _certain(a[name] < 0):
            _fail(op, name, a[name], "at least 0")
    if not a["softcap"] >= 0:
        _fail(op, "softcap", a["softcap"], "0 (none) or positive")


def out_of_range(op: str, a: Arguments, error: IndexError) -> IndexError:
    """The error of a kernel that met an index outside the cache, naming the argument it is of.

    Indices are values, which no check reads (that would wait for the device), so only a kernel
    on the CPU can find one; where it did, reading them again costs nothing.
    """
    cache = a["key_cache"]
    blocks, size = cache.shape[0], cache.shape[3 if a["kv_layout"] == "SHUFFLE" else 1]
    if "slot_mapping" in a:
        name, slots = "slot_mapping", a["slot_mapping"]
        wrong = slots[slots >= blocks * size]  # a negative one is padding
        told = f"below {blocks * size}: the cache has {blocks} blocks of {size}"
    else:
        name, table = "block_table", a["block_table"]
        columns = torch.arange(table.shape[1], device=table.device)
        read = columns < -(-a["seq_lens"][:, None] // size)  # beyond, a table may hold anything
        wrong = table[read & ((table >= blocks) | (table < 0))]
        told = f"from 0 to {blocks - 1}: the cache has {blocks} blocks"
    if wrong.numel() and blocks:
        return IndexError(f"fusion.ops.{op}: {name} holds {int(wrong[0])}, but it must be {told}")
    return IndexError(f"fusion.ops.{op}: {error}")


def check(op: str, arguments: Arguments) -> None:
    """Checks a call of a canonical operation.

    Args:
        op: its name, such as ``"kv_cache_write"``.
        arguments: every argument by name.

    Raises:
        TypeError: names the first argument that is missing (None).
        ValueError: names the first argument that does not fit, what it is and what it must be.
    """
    for name in REQUIRED[op]:
        if not isinstance(arguments[name], Tensor):
            raise TypeError(
                f"fusion.ops.{op}: {name} is {arguments[name]!r}, but it must be a tensor"
            )
    _choices(op, arguments)
    if op == "paged_attention":
        _attention(op, arguments)
        _devices(op, arguments, "query")
        return
    if op != "kv_cache_write":
        _query_key(op, arguments)
        _rope(op, arguments)
    if op in ("qk_norm_rope_kv_cache", "qk_norm_rope"):
        _norm(op, arguments)
    if op != "qk_norm_rope":
        _written(op, arguments)
    _devices(op, arguments, "key")
