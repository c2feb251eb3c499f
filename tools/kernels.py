"""``fusion kernels``: the gate, condition by condition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.tools import options as opt
from fusion.tools.console import CommandError, columns, data, packed, write

if TYPE_CHECKING:
    from fusion.kernel import KernelCall
    from fusion.requires import Outcome

SHORT = "The gate: every kernel, every condition, value and origin."
EPILOG = """Examples:

\b
  fusion kernels
  fusion kernels --target gfx942,aiter=0.1.20,rocm=7.1 --op qk_norm_rope_kv_cache
  fusion kernels --target sm_90 --heads 32/8/128 --cache-dtype fp8 --layout hnd"""

#: Inputs of a call that no option names: large enough that nothing is special about them.
_TABLE_ROWS, _BLOCKS, _EPS = 4096, 64, 1e-6
#: What a condition has that was not looked at, since another one decides (backends/aiter/gate.py).
_NOT_LOOKED_AT = "not looked at"


def command(
    target: opt.TargetOption = None,
    op: Annotated[
        str | None, typer.Option("--op", metavar="NAME", help="Only this operation.")
    ] = None,
    kernels: opt.KernelsOption = None,
    option: opt.OptionOption = None,
    heads: Annotated[
        str, typer.Option("--heads", metavar="Q/KV/DIM", help="Query heads, KV heads, head size.")
    ] = "32/8/128",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the call.")] = 16,
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="Dtype of q, k, v.")] = (
        "bf16"
    ),
    cache_dtype: opt.CacheDtypeOption = None,
    layout: opt.LayoutOption = "packed",
    block_size: opt.BlockOption = 16,
    packed_qkv: Annotated[
        bool, typer.Option("--packed-qkv", help="q, k and v are columns of one tensor.")
    ] = False,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write as JSON; - is stdout.")
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Show every kernel of every operation with each of its conditions: whether it holds (ok, NO,
    or -- where it does not apply to this call or was not looked at), what the call has, what the
    kernel needs, and where the value came from. The call is described by
    the options; nothing runs."""
    from fusion import Target
    from fusion.build import make_config
    from fusion.selection import kernels as offered
    from fusion.selection import select

    machine = opt.target_of(target) or Target.current()
    config = make_config(opt.config_of(kernels, option))
    shape = heads_of(heads)
    ops = list(dict.fromkeys(k.op for k in offered()))
    if op is not None and op not in ops:
        raise CommandError(f"--op: no operation is called {op!r}; there are {', '.join(ops)}")
    found: list[dict[str, Any]] = []
    for name in [op] if op is not None else ops:
        arguments = example(
            name,
            *shape,
            tokens,
            opt.dtype_of(dtype),
            opt.dtype_of(cache_dtype, "--cache-dtype"),
            opt.layout_of(layout),
            block_size,
            packed_qkv,
        )
        call = describe(name, arguments, machine, config, packed_qkv)
        chosen = select(call)
        table_rows = []
        for candidate in chosen.candidates:
            kernel = next((k for k in offered(name) if k.name == candidate.kernel), None)
            outcomes = [] if kernel is None else kernel.requires.evaluate(call)
            table_rows.append(
                {
                    "kernel": candidate.kernel,
                    "accepted": candidate.accepted,
                    "conditions": [
                        {
                            "name": o.name,
                            "ok": o.ok,
                            "have": o.have,
                            "need": o.need,
                            "origin": o.origin,
                            "mark": _mark(o),
                        }
                        for o in outcomes
                    ],
                    "reasons": [r.to_dict() for r in candidate.reasons],
                }
            )
        others = [
            k.name for k in offered(name) if k.name not in {c.kernel for c in chosen.candidates}
        ]
        found.append(
            {
                "op": name,
                "call": {n: str(t) for n, t in call.tensors.items() if t is not None},
                "chosen": None if chosen.kernel is None else chosen.kernel.name,
                "kernels": table_rows,
                "not_asked": others,
            }
        )
    if json is not None:
        import json as codec

        whole = {"target": {"arch": machine.arch, "origin": machine.origin}, "ops": found}
        plain = codec.loads(codec.dumps(whole))
        for condition in (c for e in plain["ops"] for k in e["kernels"] for c in k["conditions"]):
            del condition["mark"]  # of the text only
        write(json, codec.dumps(plain, indent=2), overwrite)
    if json != "-":
        data(to_text(found, str(machine), columns()))


def heads_of(text: str) -> tuple[int, int, int]:
    try:
        query, kv, dim = (int(part) for part in text.split("/"))
    except ValueError:
        raise CommandError(f"--heads: {text!r} is not Q/KV/DIM, such as 32/8/128") from None
    if min(query, kv, dim) < 1 or query % kv or dim % 2:
        raise CommandError(
            f"--heads: {text} is no such shape: all positive, Q a multiple of KV, DIM even"
        )
    return query, kv, dim


def example(
    op: str,
    heads: int,
    kv_heads: int,
    dim: int,
    tokens: int,
    dtype: Any,
    cache_dtype: Any,
    layout: Any,
    block_size: int,
    packed_qkv: bool = False,
    device: str = "meta",
) -> dict[str, Any]:
    """Arguments of one call of a canonical operation, by name; tensors are on ``device``."""
    import torch

    from fusion.layout import empty_kv_cache, split_kv_cache

    def make(*size: int, kind: Any = dtype) -> Any:
        return torch.empty(*size, dtype=kind, device=device)

    if packed_qkv:
        qkv = make(tokens, (heads + 2 * kv_heads) * dim)
        parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        query, key, value = (
            p.view(tokens, n, dim) for p, n in zip(parts, (heads, kv_heads, kv_heads), strict=True)
        )
    else:
        query = make(tokens, heads, dim)
        key, value = make(tokens, kv_heads, dim), make(tokens, kv_heads, dim)
    kind = cache_dtype or dtype
    cache = empty_kv_cache(layout, _BLOCKS, block_size, kv_heads, dim, dim, kind, device)
    key_cache, value_cache = split_kv_cache(cache, layout, dim)
    scale = torch.empty((), device=device) if kind.itemsize == 1 else None
    kv_layout = layout.op_layout
    rope = {
        "cos": make(_TABLE_ROWS, dim // 2, kind=torch.float32),
        "sin": make(_TABLE_ROWS, dim // 2, kind=torch.float32),
        "positions": make(tokens, kind=torch.int64),
    }
    norm = {
        "q_weight": make(dim),
        "k_weight": make(dim),
        "q_eps": _EPS,
        "k_eps": _EPS,
        "weight_mode": "w",
        "norm_cast": "late",
        "inv_rms": "rsqrt",
    }
    rotation = {
        "rope_style": "half",
        "rotary_dim": dim,
        "rope_dtype": dtype,
        "out_dtype": dtype,
    }
    write_to = {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "k_scale": scale,
        "v_scale": scale,
        "kv_layout": kv_layout,
    }
    slots = {"slot_mapping": make(tokens, kind=torch.int64)}
    tokens_of = {"query": query, "key": key, "value": value}
    if op == "kv_cache_write":
        return {"key": key, "value": value, **write_to, **slots}
    if op == "rope_kv_cache":
        return {**tokens_of, **rope, **rotation, **write_to, **slots, "return_key": False}
    if op == "qk_norm_rope_kv_cache":
        return {**tokens_of, **norm, **rope, **rotation, **write_to, **slots, "return_key": False}
    if op == "qk_norm_rope":
        return {"query": query, "key": key, **norm, **rope, **rotation}
    if op == "paged_attention":
        return {
            "query": query,
            **write_to,
            "block_table": make(1, _BLOCKS, kind=torch.int32),
            "seq_lens": make(1, kind=torch.int32),
            "query_start_loc": make(2, kind=torch.int32),
            "max_query_len": tokens,
            "max_seq_len": _BLOCKS * block_size,
            "scale": dim**-0.5,
            "causal": False,
            "window_left": -1,
            "window_right": -1,
            "softcap": 0.0,
            "sinks": None,
        }
    raise CommandError(f"no example call is known for operation {op!r} of a plug-in")


def describe(
    op: str, arguments: dict[str, Any], target: Any, config: Any, packed_qkv: bool
) -> KernelCall:
    """The call as the gate sees it on ``target``."""
    from fusion.ops.dispatch import describe_call

    call = describe_call(op, arguments, target=target, config=config)
    shared = {"query", "key", "value"} if packed_qkv else set()
    tensors = {
        name: None
        if spec is None
        else replace(
            spec,
            device=target.device_type,
            base="qkv" if name in shared else name.replace("value_cache", "key_cache"),
        )
        for name, spec in call.tensors.items()
    }
    declared, _ = config.kv_layout_switch()
    layout = "SHUFFLE" if declared == "shuffle" else call.kv_layout
    return replace(call, tensors=tensors, kv_layout=layout)


def to_text(found: list[dict[str, Any]], target: str, width: int) -> str:
    """The gate as text: for each operation the call, then each kernel with its conditions.

    What a kernel is refused for comes first. No line is wider than ``width``, words aside.
    """
    lines = [f"fusion kernels: target {target}"]
    for entry in found:
        lines += ["", f"{entry['op']}: {entry['chosen'] or 'no kernel'} would run"]
        call = [f"{name} {tensor}," for name, tensor in entry["call"].items()]
        call[-1] = call[-1].removesuffix(",")
        lines += packed(call, "  call: ", "    ", width)
        for kernel in entry["kernels"]:
            lines.append(f"  {kernel['kernel']}: {_verdict(kernel)}")
            shown = [_condition(c) for c in sorted(kernel["conditions"], key=lambda c: c["ok"])]
            for mark, pieces in dict.fromkeys(shown):
                lines += packed(pieces, f"    {mark}  ", " " * 10, width)
            known = {(c["have"], c["need"]) for c in kernel["conditions"]}
            for r in kernel["reasons"]:
                if (r["have"], r["need"]) not in known:
                    lines += packed([f"{r['code']}:", r["message"]], "    ", " " * 10, width)
        if entry["not_asked"]:
            lines.append(f"  not asked on this target: {', '.join(entry['not_asked'])}")
    return "\n".join(lines) + "\n"


def _mark(outcome: Outcome) -> str:
    """``NO``, ``ok``, or ``--`` where the condition is not one of this call."""
    if not outcome.ok:
        return "NO"
    absent = outcome.have.startswith("absent") and "absent" not in outcome.need
    looked = outcome.applies and outcome.have != _NOT_LOOKED_AT and not absent
    return "ok" if looked else "--"


def _condition(c: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The mark and the text of a condition, in pieces."""
    origin = f"from {c['origin']}"
    if (c["name"], c["have"]) == (f"({c['need']})", _NOT_LOOKED_AT):
        return c["mark"], (f"of calls that are {c['need']}:", f"{_NOT_LOOKED_AT};", origin)
    have = c["have"] or "absent"
    return c["mark"], (f"{c['name']}:", f"have {have};", f"need {c['need']};", origin)


def _verdict(kernel: dict[str, Any]) -> str:
    conditions = kernel["conditions"]
    unmet = sum(not c["ok"] for c in conditions)
    if kernel["accepted"]:
        return "accepted"
    return f"refused, {unmet} of {len(conditions)} conditions not met" if unmet else "refused"
