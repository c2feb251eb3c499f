"""What paged attention is compared with: ceilings and the other ways to get the same result.

Every peer is a function of no arguments that enqueues its work on the current stream, so that all
are captured and timed alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import triton
import triton.language as tl
from paged_attention_cases import (
    CUDNN_BYTES,
    POOL_BYTES,
    SCALE,
    SMALL_BYTES,
    Case,
    Setup,
    estimate_us,
    make_pool,
    measure,
)


@triton.jit
def read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sum of BLOCK * STEPS consecutive 4-byte words a program: nothing but reading."""
    base = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    acc = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(STEPS):
        at = base + i * BLOCK + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc))


def flat_read(buffer: torch.Tensor) -> Callable[[], None]:
    """Reads a buffer once: the read ceiling."""
    words = buffer.view(torch.int32)
    programs = triton.cdiv(words.numel(), 4096 * 4)
    out = torch.empty(programs, dtype=torch.int32, device=buffer.device)

    def run() -> None:
        read_kernel[(programs,)](words, out, words.numel(), BLOCK=4096, STEPS=4, num_warps=8)

    return run


@triton.jit(do_not_specialize=["num_splits"])
def paged_read_kernel(
    k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, table_s0, num_splits, s_block, s_token, s_head,
    HK: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same tables and the same grid as the attention; K and V are loaded and added."""
    pid = tl.program_id(0)
    head = pid % HK
    split = (pid // HK) % num_splits
    seq = pid // HK // num_splits
    length = tl.load(lens_ptr + seq)
    tiles = (length + N - 1) // N
    begin = split * tiles // num_splits * N
    end = (split + 1) * tiles // num_splits * N
    table = table_ptr + seq.to(tl.int64) * table_s0
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    pages = tl.load(table + (begin + n) // PAGE, mask=begin + n < end, other=0)
    acc = tl.zeros([N, D], tl.float32)
    base = head * s_head
    for n0 in tl.range(begin, end, N, num_stages=STAGES):
        here = pages
        pages = tl.load(table + (n0 + N + n) // PAGE, mask=n0 + N + n < end, other=0)
        row = here.to(tl.int64) * s_block + ((n0 + n) % PAGE) * s_token + base
        k = tl.load(k_ptr + row[:, None] + d[None, :])
        v = tl.load(v_ptr + row[:, None] + d[None, :])
        acc += k.to(tl.float32) + v.to(tl.float32)
    tl.store(out_ptr + pid * D + d, tl.sum(acc, 0))


def paged_read(
    key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, lens: torch.Tensor,
    splits: int, keys: int = 32, warps: int = 4, stages: int = 4,
) -> Callable[[], None]:  # fmt: skip
    """The paged-read floor over NHD views of a packed cache (K and V of equal strides)."""
    heads, dim = key.shape[2], key.shape[3]
    grid = table.shape[0] * heads * splits
    out = torch.empty(grid, dim, device=key.device)

    def run() -> None:
        paged_read_kernel[(grid,)](
            key, value, table, lens, out, table.stride(0), splits, *key.stride()[:3],
            HK=heads, PAGE=key.shape[1], D=dim, N=keys, STAGES=stages, num_warps=warps,
        )  # fmt: skip

    return run


def gather_sdpa(
    query: torch.Tensor, cache: torch.Tensor, tables: Sequence[torch.Tensor], scale: float
) -> list[Callable[[], torch.Tensor]]:
    """Copy the pages into a dense cache, then torch's SDPA with the group folded into the rows.

    query [B, S, Hq, D], cache packed [blocks, Hk, page, 2D], tables [B, W] each. Folding (possible
    only without a causal mask) is the strongest form: K and V are not repeated for each query
    head. The row numbers of the gather are prepared beforehand and not timed.
    """
    batch, rows, q_heads, dim = query.shape
    _, heads, page, _ = cache.shape
    flat = cache.view(-1, 2 * dim)
    head = torch.arange(heads, device=cache.device)[None, :, None, None]
    offset = torch.arange(page, device=cache.device)
    group = q_heads // heads
    folded = query.view(batch, rows, heads, group, dim).permute(0, 2, 1, 3, 4)

    def runner(table: torch.Tensor) -> Callable[[], torch.Tensor]:
        index = ((table.long()[:, None, :, None] * heads + head) * page + offset).flatten()

        def run() -> torch.Tensor:
            dense = flat.index_select(0, index).view(batch, heads, -1, 2 * dim)
            q = folded.reshape(batch, heads, rows * group, dim)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, dense[..., :dim], dense[..., dim:], scale=scale
            )
            return out.view(batch, heads, rows, group, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)

        return run

    return [runner(table) for table in tables]


_HANDLES: list[object] = []


def cudnn_paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tables: Sequence[torch.Tensor],
    lens: torch.Tensor, max_len: int, scale: float, folded: bool,
) -> list[Callable[[], torch.Tensor]]:  # fmt: skip
    """cuDNN's paged SDPA through its frontend package; ``folded``: rows of a group folded by hand
    into the rows of its KV head (possible only without a causal mask), its strongest form.

    query [B, S, Hq, D]; key, value NHD views; raises whatever the frontend raises where it is
    missing or refuses the graph.
    """
    import cudnn

    if not _HANDLES:
        _HANDLES.append(cudnn.create_handle())
    handle = _HANDLES[0]
    batch, rows, q_heads, dim = query.shape
    heads = key.shape[2]
    group = q_heads // heads
    if folded:
        q = query.view(batch, rows, heads, group, dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(batch, heads, rows * group, dim).contiguous()
    else:
        q = query.transpose(1, 2).contiguous()
    out = torch.empty_like(q)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    all_pages = [table.view(batch, 1, table.shape[1], 1) for table in tables]
    pages = all_pages[0]
    len_q = torch.full((batch, 1, 1, 1), q.shape[2], dtype=torch.int32, device=query.device)
    len_kv = lens.view(batch, 1, 1, 1)

    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    t_q, t_k, t_v = graph.tensor_like(q), graph.tensor_like(k), graph.tensor_like(v)
    t_pk, t_pv = graph.tensor_like(pages), graph.tensor_like(pages)
    t_lq, t_lkv = graph.tensor_like(len_q), graph.tensor_like(len_kv)
    t_o, _ = graph.sdpa(
        name="sdpa", q=t_q, k=t_k, v=t_v, is_inference=True, attn_scale=scale,
        use_causal_mask=False, use_padding_mask=True, seq_len_q=t_lq, seq_len_kv=t_lkv,
        paged_attention_k_table=t_pk, paged_attention_v_table=t_pv,
        paged_attention_max_seq_len_kv=max_len,
    )  # fmt: skip
    t_o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    fixed = {t_q: q, t_k: k, t_v: v, t_lq: len_q, t_lkv: len_kv, t_o: out}

    def runner(pages: torch.Tensor) -> Callable[[], torch.Tensor]:
        pack = {**fixed, t_pk: pages, t_pv: pages}

        def run() -> torch.Tensor:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(pack, workspace, handle=handle)
            if not folded:
                return out.transpose(1, 2)
            return out.view(batch, heads, rows, group, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)

        return run

    return [runner(pages) for pages in all_pages]


def run_gather(
    cases: Sequence[Case], rows: Sequence[dict[str, object]], pool: torch.Tensor, deadline: float
) -> None:
    """Time and check gather + SDPA, until the deadline (host clock); into the rows."""
    for case, row in zip(cases, rows, strict=True):
        if time.monotonic() > deadline:
            return
        setup = Setup(case, pool[: SMALL_BYTES // 2] if case.kv_bytes <= SMALL_BYTES else pool)
        guess = estimate_us(case)
        few = setup.tables if guess < 200 else setup.tables[:1]
        runs = gather_sdpa(setup.query, setup.cache, few, SCALE)
        row["gather"], outputs, graph = measure(runs, guess * 4)
        have, want = outputs[0], setup.reference(0)
        assert isinstance(have, torch.Tensor)
        row["gather_error"] = ((have.float() - want).norm() / want.norm()).item()
        del outputs, graph
        torch.cuda.empty_cache()


def _cudnn_worker(cases: Sequence[Case], sender: Connection) -> None:
    """Sends (index, the fields of its row) for each case: microseconds and relative error as it
    comes and folded, or what was raised."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pool: torch.Tensor | None = None
    for index, case in enumerate(cases):
        try:
            size = CUDNN_BYTES if case.kv_bytes <= CUDNN_BYTES else POOL_BYTES
            if pool is None or pool.numel() * 2 != size:
                pool = make_pool(size)
            setup = Setup(case, pool)
            guess = estimate_us(case)
            few = setup.tables if guess < 200 else setup.tables[:1]
            found: dict[str, object] = {}
            for name, folded in (("cudnn", False), ("folded", True)):
                runs = cudnn_paged(setup.query, setup.key, setup.value, few, setup.lens,
                                   case.context, SCALE, folded)  # fmt: skip
                us, outputs, _ = measure(runs, guess * (2 if folded else 8))
                out = outputs[-1]  # all calls write the same buffer; the last one's table is known
                assert isinstance(out, torch.Tensor)
                want = setup.reference((len(outputs) - 1) % len(few))
                error = ((out.float() - want).norm() / want.norm()).item()
                found |= {name: us, f"{name}_error": error}
            sender.send((index, found))
        except Exception as problem:
            sender.send((index, {"cudnn_note": f"{type(problem).__name__}: {problem}"[:200]}))
            if "CUDA" in str(problem) or "cuda" in str(problem):
                return  # after a fault nothing works in this process


def run_cudnn(cases: Sequence[Case], deadline: float) -> dict[Case, dict[str, object]]:
    """cuDNN's paged SDPA by case, as fields of the case's row, in processes of its own: its kernel
    faults on some shapes, and a fault ends a process's CUDA. Small caches first, so that the pool
    is made twice only."""
    results: dict[Case, dict[str, object]] = {}
    left = sorted(cases, key=lambda c: c.kv_bytes > CUDNN_BYTES)
    context = get_context("spawn")
    while left and time.monotonic() < deadline:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_cudnn_worker, args=(left, sender), daemon=True)
        worker.start()
        sender.close()
        done = 0
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                index, results[left[index]] = receiver.recv()
                done = index + 1
        except EOFError:
            pass
        worker.kill()
        worker.join()
        if done < len(left) and time.monotonic() < deadline and done == 0:
            results[left[0]] = {"cudnn_note": "the process died"}
            done = 1
        left = left[done:]
    return results
