"""Attention that must not be causal is bound to a kernel that really is not.

A block-drafting speculative decoder (DFlash) lets every drafted token see the whole context *and
the whole block*. The usual paged kernel is causal, whatever it is told. This pass looks at every
attention call on its own, since causality and window are per layer::

    fusion.paged_attention(..., causal=False, kernel="auto")

becomes::

    fusion.paged_attention(..., causal=False, kernel="triton")

with the first kernel whose requirements hold for the *exact* arguments of this call. Causal calls
and calls with one query token per sequence (for which causality means nothing) are left alone.
Calls of a foreign attention op that was registered with
:func:`fusion.match.attention.register_attention` are translated; an argument that has no home in
``paged_attention`` refuses the call by that argument's name. Nothing is ever dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fusion import ops
from fusion.graph.provenance import source_of
from fusion.kernel import KernelCall
from fusion.match.attention import CANONICAL, Attention, find_attention
from fusion.match.facts import Miss
from fusion.pipeline import Context
from fusion.reason import Reason
from fusion.report import Site
from fusion.selection import Selection, select

OPERATION = "paged_attention"
_REQUIRED = CANONICAL[:10]


@dataclass(frozen=True)
class NonCausalAttention:
    """The pass. It has no options."""

    name: ClassVar[str] = "non_causal_attention"
    order: ClassVar[int] = 200

    def run(self, graph: Graph, context: Context) -> list[Site]:
        """Bind every non-causal call; one site per attention call of the graph."""
        return [self._site(found, context) for found in find_attention(graph)]

    def _site(self, found: Attention | Miss, context: Context) -> Site:
        if isinstance(found, Miss):
            return context.site("missed", found.node, reasons=(_pinned(found.reason, found.node),))
        alone = _left_alone(found)
        if alone is not None:
            return context.site(
                "missed", found.node, reasons=(alone,), facts=_facts(found), applicable=False
            )
        if not context.rewrite:
            code = "config.training" if context.training else "config.off"
            reason = Reason(code, "the pass may not rewrite this graph")
            return context.site("off", found.node, operation=OPERATION, reasons=(reason,))
        homeless = _homeless(found)
        if homeless:
            return self._refused(found, context, homeless)
        call = kernel_call(found, context)
        selection = select(call)
        kernel = selection.kernel
        elsewhere = found.spelling != "paged" and call.target.device_type != "cpu"
        if kernel is None or (kernel.name == "reference" and elsewhere):
            return self._refused(found, context, selection.refusals, selection)
        value = _result_value(found, context)
        different = _difference(value, found.result.meta["val"])
        if different is not None:
            return self._refused(found, context, (different,), selection)
        before = found.node.format_node() or found.node.name
        after = _bind(found, kernel.name, value)
        return context.site(
            "fused",
            found.node,
            operation=OPERATION,
            kernel=kernel.name,
            candidates=selection.candidates,
            facts=_facts(found),
            nodes=_nodes(found),
            before=(before,),
            after=(after.format_node() or after.name,),
        )

    def _refused(
        self,
        found: Attention,
        context: Context,
        reasons: tuple[Reason, ...],
        selection: Selection | None = None,
    ) -> Site:
        pinned = tuple(_pinned(r, found.node) for r in reasons)
        return context.site(
            "refused",
            found.node,
            operation=OPERATION,
            reasons=pinned,
            candidates=selection.candidates if selection is not None else (),
            facts=_facts(found),
            nodes=_nodes(found),
            depth=5,
        )


def kernel_call(found: Attention, context: Context) -> KernelCall:
    """Describe a call for the gate (fake tensors; symbolic sizes are None)."""
    arguments = {**_defaults(), **found.arguments}
    values = {n: _value(a) for n, a in arguments.items() if n in CANONICAL}
    return ops.describe_call(OPERATION, values, target=context.target, config=context.config)


def _left_alone(found: Attention) -> Reason | None:
    """Why a call is none of this pass's business."""
    if found.spelling not in ("paged", "registered"):
        return Reason("scope.not-paged", "the call does not read a paged cache", have=found.op)
    if found.causal:
        return Reason("scope.causal", "the call is causal", have="causal=True")
    if found.arguments.get("max_query_len") == 1:
        return Reason("scope.single-query", "one query token sees all keys either way")
    return None


def _homeless(found: Attention) -> tuple[Reason, ...]:
    """Arguments that paged_attention has no place for, and ones that it needs and lacks."""
    reasons = [
        Reason("gate.argument", f"{name} has no home in paged_attention", have=_text(value))
        for name, value in found.unclaimed.items()
    ]
    reasons += [
        Reason("gate.argument", f"the call does not say its {name}", have="absent", need=name)
        for name in _REQUIRED
        if name not in found.arguments and name != "causal"
    ]
    return tuple(reasons)


def _result_value(found: Attention, context: Context) -> Any:
    """The fake result of our operation for a call's arguments."""
    if found.spelling == "paged":
        return found.result.meta["val"]
    values = {n: _value(a) for n, a in found.arguments.items() if n in CANONICAL}
    mode = context.fake_mode
    with mode if mode is not None else contextlib.nullcontext(), torch.no_grad():
        return torch.ops.fusion.paged_attention.default(**{**values, "causal": False})


def _difference(new: Any, old: Any) -> Reason | None:
    """What the result of a foreign call has that ours has not."""

    def text(value: Any) -> str:
        return f"{value.dtype}{list(value.shape)}, strides {list(value.stride())}"

    if text(new) == text(old):
        return None
    message = "the call's result is laid out differently from that of paged_attention"
    return Reason("match.attention-op", message, have=text(old), need=text(new))


_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")
"""Metadata that says where a node came from; the rest belongs to the old operator."""


def _bind(found: Attention, kernel: str, value: Any) -> Node:
    """Name the kernel on the call; a foreign call becomes one of ours first."""
    node = found.node
    if found.spelling == "paged":
        node.kwargs = {**node.kwargs, "kernel": kernel}
        return node
    graph = node.graph
    order = [n for n in CANONICAL if n in found.arguments]
    with graph.inserting_before(node):
        new = graph.call_function(
            torch.ops.fusion.paged_attention.default,
            kwargs={**{n: found.arguments[n] for n in order}, "causal": False, "kernel": kernel},
        )
    new.meta = {k: v for k, v in node.meta.items() if k in _KEPT} | {"val": value}
    found.result.replace_all_uses_with(new)
    if found.result is not node:
        graph.erase_node(found.result)
    graph.erase_node(node)
    return new


def _defaults() -> Mapping[str, Any]:
    schema = torch.ops.fusion.paged_attention.default._schema
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _text(value: Any) -> str:
    return value.name if isinstance(value, Node) else str(value)


def _facts(found: Attention) -> dict[str, Any]:
    named = ("causal", "window_left", "window_right", "softcap", "scale", "max_query_len")
    facts = {n: _text(found.arguments[n]) for n in named if n in found.arguments}
    return {"op": found.op, "spelling": found.spelling, "call": facts}


def _nodes(found: Attention) -> tuple[Mapping[str, Any], ...]:
    node = found.node
    return (
        {"name": node.name, "target": str(node.target), "fact": "attention",
         "source": source_of(node)},
    )  # fmt: skip


def _pinned(reason: Reason, node: Node | None) -> Reason:
    return reason if node is None else reason.at(reason.node or node.name, source_of(node))


PASS = NonCausalAttention
