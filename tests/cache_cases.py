"""KV-cache writes in the spellings of real models, as small functions to compile.

Values are small integers, so that sums are exact in any order and every comparison is bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import fusion.ops  # noqa: F401 - registers the operations

T, HK, D = 5, 4, 8
BLOCKS, PAGE, BATCH, SMAX = 8, 4, 2, 16
write = torch.ops.fusion.kv_cache_write.default

Rewriter = Callable[[torch.fx.Graph], Any]


def ints(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers as f32."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-9, 9, shape, generator=generator).float()


def rows() -> tuple[Tensor, Tensor]:
    """A key and a value ``[T, HK, D]``."""
    return ints(T, HK, D), ints(T, HK, D, seed=1)


def batched() -> tuple[Tensor, Tensor]:
    """A key and a value ``[BATCH, HK, T, D]``."""
    return ints(BATCH, HK, T, D), ints(BATCH, HK, T, D, seed=1)


def slots(*values: int) -> Tensor:
    """A slot mapping; the default has no order and crosses blocks."""
    return torch.tensor(values or (3, 17, 0, 31, 9))


def old(*shape: int) -> Tensor:
    """A cache that already holds something, so that a lost byte is seen."""
    return ints(*shape, seed=7)


@dataclass(frozen=True)
class Case:
    """``fn(*make())`` writes a cache; ``writes`` facts are expected, or a miss with ``code``."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    writes: int = 1
    code: str | None = None
    tokens: tuple[tuple[int, int], ...] = ((0, 0), (1, 0))
    """(argument, dimension) pairs that count tokens, to be marked dynamic."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.fn.__name__


def _packed() -> tuple[Any, ...]:
    return (*rows(), old(2, BLOCKS, PAGE, HK, D), slots())


def _pair() -> tuple[Any, ...]:
    return (*rows(), old(BLOCKS, PAGE, HK, D), old(BLOCKS, PAGE, HK, D), slots())


def _flat() -> tuple[Any, ...]:
    return (*rows(), old(32, HK, D), old(32, HK, D), slots(3, -4, 0, 31, 9))


def _static() -> tuple[Any, ...]:
    caches = old(BATCH, HK, SMAX, D), old(BATCH, HK, SMAX, D)
    return (*batched(), *caches, slots(4, 5, 6, 7, 8))


def op_pair(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Our op on a K/V pair of inputs."""
    write(k, v, kc, vc, s)
    return kc.sum() + vc.sum()


def op_padding(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Our op with rows that are not written (negative slots)."""
    write(k, v, kc, vc, torch.where(s > 9, -1, s))
    return kc.sum() + vc.sum()


def op_unbind(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Our op on the two halves of one buffer."""
    kc, vc = c.unbind(0)
    write(k, v, kc, vc, s)
    return kc.sum() + c.sum()


def op_split(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Our op on the transposed and split views of a packed ``[B, H, N, 2D]`` buffer."""
    kc, vc = c.transpose(1, 2).split(D, -1)
    write(k, v, kc, vc, s)
    return kc.sum() + c.sum()


def op_slice(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Our op on views that are slices of the base (the slice encoding)."""
    write(k, v, c[:BLOCKS], c[BLOCKS:], s)
    return c.sum()


def op_stack(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Three layers on one buffer: a chain of bases."""
    for i in range(3):
        kc, vc = c[i].unbind(0)
        write(k + i, v, kc, vc, s)
        k = k + kc[0, 0] + vc.sum()
    return k


def rows_flat(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """``cache[slots] = k`` with indices that count from the end."""
    kc[s] = k
    vc[s] = v
    return kc.sum() + vc.sum()


def rows_view(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """By slots on flattened halves of one buffer: a chain of scatters."""
    c.view(2, -1, HK, D)[0][s] = k
    c.view(2, -1, HK, D)[1][s] = v
    return c.sum()


def rows_view_copy(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The same with ``index_copy_``."""
    c.view(2, -1, HK, D)[0].index_copy_(0, s, k)
    c.view(2, -1, HK, D)[1].index_copy_(0, s, v)
    return c.sum()


def rows_block_offset(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """By block and offset on views of a packed buffer."""
    kc, vc = c.transpose(1, 2).split(D, -1)
    block, offset = s // PAGE, s % PAGE
    kc[block, offset] = k
    vc[block, offset] = v
    return kc.sum() + vc.sum()


def rows_split_twice(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Slots computed for K and for V, on slices of the last axis."""
    kc, vc = c.split(D, -1)
    kc[s // PAGE, s % PAGE] = k
    vc[s // PAGE, s % PAGE] = v
    return kc.sum()


def rows_head_major(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Block and offset with the head axis between them."""
    kc[s // PAGE, :, s % PAGE] = k
    vc[s // PAGE, :, s % PAGE] = v
    return kc.sum() - vc.sum()


def rows_value_first(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """V is written before K, and K is rotated."""
    vc[s] = v
    kc[s] = torch.cat((-k[..., D // 2 :], k[..., : D // 2]), -1) * 2 + k
    return kc.sum() + vc.sum()


def rows_value_computed(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """V is written before K, and both are computed; only K is rotated."""
    vc[s] = v * 3 - 1
    kc[s] = torch.cat((-k[..., D // 2 :], k[..., : D // 2]), -1) * 2 + k
    return kc.sum() + vc.sum()


def rows_two_token_axes(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Slots ``[1, T]`` and rows ``[1, T, H, D]``."""
    kc[s[None]] = k[None]
    vc[s[None]] = v[None]
    return kc.sum() + vc.sum()


def rows_merged_heads(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Rows of all heads at once, ``[T, H * D]``."""
    c[0].view(-1, HK * D)[s] = k.reshape(-1, HK * D)
    c[1].view(-1, HK * D)[s] = v.reshape(-1, HK * D)
    return c.sum()


def rows_stack(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Three layers by slots on one buffer."""
    for i in range(3):
        c[i, 0].view(-1, HK, D)[s] = k + i
        c[i, 1].view(-1, HK, D)[s] = v
        k = k + c[i, 0, 0, 0] + c[i, 1].sum()
    return k


def rows_read_key(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The new K is read before V is written: harmless, K and V do not overlap."""
    c.view(2, -1, HK, D)[0][s] = k
    a = c[0].sum()
    c.view(2, -1, HK, D)[1][s] = v
    return c.sum() + a


def one_write_cat(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """K and V side by side in one row, one write."""
    c[s // PAGE, s % PAGE] = torch.cat((k, v), -1)
    return c.sum()


def one_write_stack(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """K above V, one write."""
    c.view(2, -1, HK, D)[:, s] = torch.stack((k, v))
    return c.sum()


def static_positions(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """transformers' static cache: ``index_copy_`` on ``[B, H, S, D]``."""
    kc.index_copy_(2, s, k)
    vc.index_copy_(2, s, v)
    return kc.sum() + vc.sum()


def static_scatter(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """``scatter_`` with the position vector expanded over everything else."""
    index = s.view(1, 1, -1, 1)
    kc.scatter_(2, index.expand_as(k), k)
    vc.scatter_(2, index.expand_as(v), v)
    return kc.sum() + vc.sum()


def static_range(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """A range of positions known when compiling."""
    n = k.shape[2]
    kc[:, :, 3 : 3 + n] = k
    vc[:, :, 3 : 3 + n] = v
    return kc.sum() + vc.sum() + s.sum()


def fp8_scaled(k: Tensor, v: Tensor, c: Tensor, s: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    """Each its own scale, saturated."""
    top = torch.finfo(torch.float8_e4m3fn).max
    kq = (k.float() / ks).clamp(-top, top).to(c.dtype)
    vq = (v.float() / vs).clamp(-top, top).to(c.dtype)
    c[0].view(-1, HK, D)[s] = kq
    c[1].view(-1, HK, D)[s] = vq
    return c[0].float().sum()


def _fp8() -> tuple[Any, ...]:
    k, v = (x.bfloat16() * 99 for x in rows())
    cache = old(2, BLOCKS, PAGE, HK, D).to(torch.float8_e4m3fn)
    return k, v, cache, slots(), torch.tensor(0.25), torch.tensor(3.0)


def bad_accumulate(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Adds instead of writing."""
    kc.index_put_((s,), k, accumulate=True)
    vc.index_put_((s,), v, accumulate=True)
    return kc.sum()


def bad_read_between(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The whole buffer is read between the two writes."""
    c.view(2, -1, HK, D)[0][s] = k
    a = c.sum()
    c.view(2, -1, HK, D)[1][s] = v
    return c.sum() + a


def bad_old_value(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The content before the write is returned."""
    before = kc.clone()
    kc[s] = k
    vc[s] = v
    return before * 2, kc.sum() + vc.sum()


def bad_key_only(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """V goes to other slots."""
    kc[s] = k
    vc[s + 1 - 1 * 2] = v
    return kc.sum() + vc.sum()


def bad_copied_view(k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Heads and pages cannot be merged in a head-major buffer: ``reshape`` copies."""
    flat = c.transpose(1, 2).reshape(-1, HK, 2 * D)
    flat[s] = torch.cat((k, v), -1)
    c.copy_(flat.view(BLOCKS, PAGE, HK, 2 * D).transpose(1, 2))
    return c.sum()


def bad_roll(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """A sliding window that moves everything: no slot write at all."""
    kc.copy_(torch.cat((kc[:, :, T:], k), 2))
    vc.copy_(torch.cat((vc[:, :, T:], v), 2))
    return kc.sum() + vc.sum() + s.sum()


def bad_unsaturated(k: Tensor, v: Tensor, c: Tensor, s: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    """Overflow becomes NaN here, but not in the canonical write."""
    c[0].view(-1, HK, D)[s] = (k.float() / ks).to(c.dtype)
    c[1].view(-1, HK, D)[s] = (v.float() / vs).to(c.dtype)
    return k.sum()


def bad_mask(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, s: Tensor) -> Tensor:
    """Rows chosen by a mask."""
    chosen = torch.zeros(32, dtype=torch.bool).index_fill(0, s % 32, True)
    kc[chosen] = k[:1]
    vc[chosen] = v[:1]
    return kc.sum()


def bad_bytes(k: Tensor, v: Tensor, c: Tensor, s: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    """fp8 in a buffer of bytes: no strided view of the buffer has the right dtype."""
    kc, vc = c.view(torch.float8_e4m3fn).unbind(0)
    write(k, v, kc, vc, s, ks, vs)
    return c.sum()


def bad_bytes_rows(k: Tensor, v: Tensor, c: Tensor, s: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    """The same by slots."""
    top = torch.finfo(torch.float8_e4m3fn).max
    for plane, x, scale in ((c[0], k, ks), (c[1], v, vs)):
        q = (x.float() / scale).clamp(-top, top).to(torch.float8_e4m3fn)
        plane.view(-1, HK, D)[s] = q.view(torch.uint8)
    return c.sum()


def _bytes() -> tuple[Any, ...]:
    cache = torch.zeros(2, BLOCKS, PAGE, HK, D, dtype=torch.uint8)
    return (*rows(), cache, slots(), torch.tensor(0.25), torch.tensor(3.0))


_TOKENS_STATIC = ((0, 2), (1, 2))


def _slots_at(index: int, tokens: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return (*tokens, (index, 0))


_ROWS = ((0, 0), (1, 0))
GOOD: tuple[Case, ...] = (
    Case(op_pair, _pair, tokens=_slots_at(4, _ROWS)),
    Case(op_padding, _pair, tokens=_slots_at(4, _ROWS)),
    Case(op_unbind, _packed, tokens=_slots_at(3, _ROWS)),
    Case(
        op_split,
        lambda: (*rows(), old(BLOCKS, HK, PAGE, 2 * D), slots()),
        tokens=_slots_at(3, _ROWS),
    ),
    Case(
        op_slice,
        lambda: (*rows(), old(2 * BLOCKS, PAGE, HK, D), slots()),
        tokens=_slots_at(3, _ROWS),
    ),
    Case(
        op_stack,
        lambda: (*rows(), old(3, 2, BLOCKS, PAGE, HK, D), slots()),
        3,
        tokens=_slots_at(3, _ROWS),
    ),
    Case(rows_flat, _flat, tokens=_slots_at(4, _ROWS)),
    Case(rows_view, _packed, tokens=_slots_at(3, _ROWS)),
    Case(rows_view_copy, _packed, tokens=_slots_at(3, _ROWS)),
    Case(
        rows_block_offset,
        lambda: (*rows(), old(BLOCKS, HK, PAGE, 2 * D), slots()),
        tokens=_slots_at(3, _ROWS),
    ),
    Case(
        rows_split_twice,
        lambda: (*rows(), old(BLOCKS, PAGE, HK, 2 * D), slots(3, -9, 0, 31, 9)),
        tokens=_slots_at(3, _ROWS),
    ),
    Case(
        rows_head_major,
        lambda: (
            *rows(),
            old(BLOCKS, HK, PAGE, D),
            old(BLOCKS, HK, PAGE, D),
            slots(3, -9, 0, 1, 9),
        ),
        tokens=_slots_at(4, _ROWS),
    ),
    Case(rows_value_first, _flat, tokens=_slots_at(4, _ROWS)),
    Case(rows_value_computed, _flat, tokens=_slots_at(4, _ROWS)),
    Case(rows_two_token_axes, _flat, tokens=_slots_at(4, _ROWS)),
    Case(rows_merged_heads, _packed, tokens=_slots_at(3, _ROWS)),
    Case(
        rows_stack,
        lambda: (*rows(), old(3, 2, BLOCKS, PAGE, HK, D), slots()),
        3,
        tokens=_slots_at(3, _ROWS),
    ),
    Case(rows_read_key, _packed, tokens=_slots_at(3, _ROWS)),
    Case(
        one_write_cat,
        lambda: (*rows(), old(BLOCKS, PAGE, HK, 2 * D), slots()),
        tokens=_slots_at(3, _ROWS),
    ),
    Case(one_write_stack, _packed, tokens=_slots_at(3, _ROWS)),
    Case(static_positions, _static, tokens=_slots_at(4, _TOKENS_STATIC)),
    Case(static_scatter, _static, tokens=_slots_at(4, _TOKENS_STATIC)),
    Case(static_range, _static, tokens=_TOKENS_STATIC),
    Case(fp8_scaled, _fp8, tokens=_slots_at(3, _ROWS)),
)

BAD: tuple[Case, ...] = (
    Case(bad_accumulate, _flat, 0, "match.cache-write"),
    Case(bad_read_between, _packed, 0, "safety.cache-read-between"),
    Case(bad_old_value, _flat, 0, "safety.cache-read-between"),
    Case(bad_key_only, _flat, 0, "match.cache-pair"),
    Case(
        bad_copied_view,
        lambda: (*rows(), old(BLOCKS, HK, PAGE, 2 * D), slots()),
        0,
        "match.cache-view",
    ),
    Case(bad_roll, _static, 0, "match.cache-write"),
    Case(bad_unsaturated, _fp8, 0, "match.value"),
    Case(bad_mask, _flat, 0, "match.cache-write"),
    Case(bad_bytes, _bytes, 0, "match.cache-view"),
    Case(bad_bytes_rows, _bytes, 0, "match.cache-view"),
)


def compile_with(
    fn: Callable[..., Any],
    rewriter: Callable[[GraphModule], Any],
    args: tuple[Any, ...],
    dynamic: bool | None = None,
) -> Any:
    """Run ``fn`` once through AOTAutograd with Inductor's decompositions and a graph rewriter."""
    from torch._inductor.decomposition import select_decomp_table

    def compiler(gm: GraphModule, _: Any) -> Any:
        rewriter(gm)
        gm.graph.lint()
        gm.recompile()
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    with torch.no_grad():
        return torch.compile(fn, backend=backend, dynamic=dynamic)(*args)


def graph_of(
    fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool | None = None
) -> GraphModule:
    """The AOT graph of ``fn`` (not rewritten)."""
    found: list[GraphModule] = []
    compile_with(fn, found.append, args, dynamic)
    return found[0]
