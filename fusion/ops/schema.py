"""Schemas of the canonical operations, and how their arguments are called and ordered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

NAMESPACE = "fusion"

_NORM = (
    "float q_eps, float k_eps, Tensor? q_eps_tensor=None, Tensor? k_eps_tensor=None, "
    'str weight_mode="w", str norm_cast="late", str inv_rms="rsqrt"'
)
_ROPE = 'str rope_style="half", int rotary_dim, ScalarType rope_dtype, ScalarType out_dtype'
_WRITE = (
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "Tensor? k_scale=None, Tensor? v_scale=None"
)
_LAST = 'str kv_layout="NHD", str kernel="auto"'

SCHEMAS: Mapping[str, str] = {
    "kv_cache_write": f"(Tensor key, Tensor value, {_WRITE}, *, {_LAST}) -> ()",
    "paged_attention": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
        "Tensor seq_lens, Tensor query_start_loc, SymInt max_query_len, SymInt max_seq_len, "
        "float scale, bool causal, int window_left=-1, int window_right=-1, float softcap=0.0, "
        "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
        f"*, {_LAST}) -> Tensor"
    ),
    "qk_norm_rope_kv_cache": (
        "(Tensor query, Tensor key, Tensor value, Tensor? q_weight, Tensor? k_weight, "
        f"Tensor cos, Tensor sin, Tensor? positions, {_WRITE}, *, {_NORM}, {_ROPE}, "
        f"bool return_key=False, {_LAST}) -> (Tensor, Tensor)"
    ),
    "rope_kv_cache": (
        "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? positions, "
        f"{_WRITE}, *, {_ROPE}, bool return_key=False, {_LAST}) -> (Tensor, Tensor)"
    ),
    "qk_norm_rope": (
        "(Tensor query, Tensor key, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
        f'Tensor? positions, *, {_NORM}, {_ROPE}, str kernel="auto") -> (Tensor, Tensor)'
    ),
}

OPERATIONS = tuple(SCHEMAS)
REQUIRED: Mapping[str, tuple[str, ...]] = {
    op: tuple(re.findall(r"Tensor(?:\(\w!\))? (\w+)", text)) for op, text in SCHEMAS.items()
}
"""The tensors that an operation cannot do without (the dispatcher lets None pass for them)."""
MUTATED: Mapping[str, tuple[str, ...]] = {
    op: tuple(re.findall(r"Tensor\(\w!\) (\w+)", text)) for op, text in SCHEMAS.items()
}
"""The arguments that an operation writes."""


def opaque_schema(op: str) -> str:
    """The schema of the overload ``opaque``: the same arguments, all positional.

    Inductor's fallback takes the operator itself by the keyword ``kernel``, so a call that is to
    stay a call must not carry an argument of that name by keyword (torch 2.13,
    ``FallbackKernel.create``). Only :mod:`fusion.graph.lowerings` makes such calls.
    """
    return re.sub(r'=("[^"]*"|[^,)]*)', "", SCHEMAS[op]).replace("*, ", "")


class Signature:
    """Names, order and defaults of an operation's arguments, read from its schema."""

    def __init__(self, op: str, schema: torch.FunctionSchema) -> None:
        self.op = op
        arguments = schema.arguments
        self.positional = tuple(a.name for a in arguments if not a.kwarg_only)
        self.keyword = tuple(a.name for a in arguments if a.kwarg_only)
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.mutated = tuple(
            a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name; the dispatcher leaves out those that equal their default."""
        return {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}

    def split(self, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a kernel's ``fn`` (no ``kernel``)."""
        return (
            tuple(bound[name] for name in self.positional),
            {name: bound[name] for name in self.keyword if name != "kernel"},
        )
