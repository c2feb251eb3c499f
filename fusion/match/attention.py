"""Find every attention call of a graph and say which argument is which.

:func:`find_attention` reads ``fusion::paged_attention``, scaled-dot-product attention in the
backend ops that torch leaves in a graph, FlexAttention, attention spelled out as
matmul-softmax-matmul, and foreign ops that :func:`register_attention` describes. A call is
looked at on its own: causality and window are per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.graph import functional
from fusion.match import cache_view as cv
from fusion.match.facts import Miss
from fusion.reason import Reason

aten = torch.ops.aten

CANONICAL = (
    "query", "key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc",
    "max_query_len", "max_seq_len", "scale", "causal", "window_left", "window_right", "softcap",
    "sinks", "k_scale", "v_scale", "kv_layout",
)  # fmt: skip
"""Argument names of ``fusion::paged_attention`` that a foreign op's arguments can stand for."""


@dataclass(frozen=True)
class AttentionRoles:
    """Which argument of a foreign op is which argument of ``paged_attention``.

    ``arguments`` maps canonical names (see :data:`CANONICAL`, and ``key`` and ``value`` for ops
    that take rows instead of a cache) to the op's own argument names, ``constants`` gives
    canonical arguments that the op fixes. Arguments of the op named in ``ignored`` change no
    result. Any other argument that is not at its default has no home: see
    :attr:`Attention.unclaimed`.
    """

    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = {*self.arguments, *self.constants} - {*CANONICAL, "key", "value"}
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(unknown))}: not an argument of paged_attention; "
                f"these are: {', '.join(CANONICAL)}, key, value"
            )


@dataclass(frozen=True)
class Attention:
    """One attention call.

    ``spelling``: ``paged`` (our op), ``sdpa``, ``flex``, ``plain`` (matmul, softmax, matmul) or
    ``registered``. ``arguments`` holds nodes and constants by canonical name; what the call
    does not say is absent. ``causal`` is None where a mask decides. ``unclaimed`` are arguments
    of the op that are not at their default and that no canonical argument stands for.
    ``result`` is the node that holds the output.
    """

    node: Node
    op: str
    spelling: str
    arguments: Mapping[str, Any] = field(hash=False)
    causal: bool | None
    result: Node
    unclaimed: Mapping[str, Any] = field(hash=False, default_factory=dict)

    @property
    def masked(self) -> bool:
        """Whether a mask or score function takes part, which only running it would show."""
        return "mask" in self.unclaimed or self.spelling in ("flex", "plain")


_REGISTERED: dict[str, AttentionRoles] = {}


def register_attention(name: str, roles: AttentionRoles) -> None:
    """Teach fusion a foreign attention op (``"namespace::name"``).

    Registering the same roles twice is harmless; other roles for a known name raise
    ``ValueError``.
    """
    if _REGISTERED.setdefault(name, roles) != roles:
        raise ValueError(f"{name} is already registered with {_REGISTERED[name]}")


def registered() -> tuple[tuple[str, str], ...]:
    """What :func:`register_attention` was told, sorted: it decides what is rewritten."""
    return tuple(sorted((name, _text(roles)) for name, roles in _REGISTERED.items()))


def _text(roles: AttentionRoles) -> str:
    parts = (sorted(roles.arguments.items()), sorted(map(repr, roles.constants.items())))
    return repr((*parts, sorted(roles.ignored)))


def find_attention(graph: Graph) -> list[Attention | Miss]:
    """All attention calls of a graph, in graph order. Never changes the graph; linear."""
    found: list[Attention | Miss] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        fact = _read(node)
        if fact is not None:
            found.append(fact)
    return found


def _read(node: Node) -> Attention | Miss | None:
    wrapped = functional.is_auto_functionalized(node)
    target: Any = functional.mutable_op(node) if wrapped else node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        return _flex(node) if getattr(target, "__name__", "") == "flex_attention" else None
    name: str = schema.name
    if name == "fusion::paged_attention":
        return _described(node, name, "paged", {n: n for n in CANONICAL}, {}, frozenset({"kernel"}))
    if name in _REGISTERED:
        roles = _REGISTERED[name]
        return _described(node, name, "registered", roles.arguments, roles.constants, roles.ignored)
    if name.startswith("aten::"):
        return _sdpa(node, name) if "attention" in name else _plain(node, name)
    namespace, bare = name.split("::", 1)
    if namespace != "prims" and ("attention" in bare.lower() or "attn" in bare.lower()):
        reason = Reason(
            "match.attention-op", f"{name} is not registered", have=name,
            need="fusion.match.attention.register_attention", node=node.name,
        )  # fmt: skip
        return Miss(reason, node)
    return None


def _given(node: Node) -> dict[str, Any]:
    """Arguments by name, of a call or of a functional wrapper around one."""
    if functional.is_auto_functionalized(node):
        return functional.plain_kwargs(node)
    return cv.arguments(node)


def _described(
    node: Node,
    name: str,
    spelling: str,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    ignored: frozenset[str],
) -> Attention | Miss:
    given = _given(node)
    found = dict(constants)
    for canonical, own in arguments.items():
        if own in given:
            found[canonical] = given.pop(own)
    causal = found.get("causal")
    if isinstance(causal, (Node, torch.SymBool)):
        reason = Reason(
            "match.causal-not-constant", "causal is not a constant of the graph",
            have=str(causal), need="True or False", node=node.name,
        )  # fmt: skip
        return Miss(reason, node)
    defaults = _defaults(node)
    unclaimed = {
        k: v for k, v in given.items()
        if k not in ignored and not (k in defaults and _is(v, defaults[k])) and v is not None
    }  # fmt: skip
    known = causal if isinstance(causal, bool) else None
    return Attention(node, name, spelling, found, known, _result(node), unclaimed)


def _defaults(node: Node) -> dict[str, Any]:
    target: Any = node.target
    if functional.is_auto_functionalized(node):
        target = functional.mutable_op(node)
    return {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}


def _is(a: Any, b: Any) -> bool:
    """Equal constants of one type; nodes equal nothing (no guard is added)."""
    return type(a) is type(b) and not isinstance(a, Node) and bool(a == b)


def _result(node: Node) -> Node:
    """The first output where the op has several."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return node
    first = [u for u in node.users if cv.is_getitem(u) and u.args[1] == 0]
    return first[0] if first else node


_SDPA = {
    "aten::scaled_dot_product_attention",
    "aten::_cudnn_attention_forward",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
}


_EXTRAS = (
    "alibi_slopes", "block_table", "seqused_k", "seqlen_k", "window_size", "q_descale",
    "k_descale", "v_descale", "dropout_mask",
)  # fmt: skip
"""Arguments of torch's own attention ops that change results and have no canonical name."""


def _sdpa(node: Node, name: str) -> Attention | Miss | None:
    """torch's own attention ops; ``mask`` is unclaimed where there is one."""
    if "backward" in name:
        return None
    if name not in _SDPA:
        reason = Reason("match.attention-op", f"{name} is not read", have=name, node=node.name)
        return Miss(reason, node)
    a = cv.arguments(node)
    names = {"query": "query", "key": "key", "value": "value", "scale": "scale"}
    names |= {"window_left": "window_size_left", "window_right": "window_size_right"}
    found = {c: a[own] for c, own in names.items() if a.get(own) is not None}
    mask = a.get("attn_mask", a.get("attn_bias", a.get("bias")))
    unclaimed: dict[str, Any] = {} if mask is None else {"mask": mask}
    if _is_positive(a.get("dropout_p")):
        unclaimed["dropout_p"] = a["dropout_p"]
    for extra in _EXTRAS:
        if a.get(extra) is not None:
            unclaimed[extra] = a[extra]
    causal: Any = a.get("is_causal")
    if name == "aten::_efficient_attention_forward":
        causal = {0: False, 1: True}.get(a["custom_mask_type"])
    if isinstance(causal, Node):
        reason = Reason("match.causal-not-constant", "is_causal is a node", node=node.name)
        return Miss(reason, node)
    known = None if mask is not None and not causal else causal
    return Attention(node, name, "sdpa", found, known, _result(node), unclaimed)


def _is_positive(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, (int, float)) and value > 0)


def _flex(node: Node) -> Attention:
    """``flex_attention(query, key, value, score_mod, block_mask, scale, options, …)``."""
    names = ("query", "key", "value")
    found = dict(zip(names, node.args, strict=False))
    if len(node.args) > 5:
        found["scale"] = node.args[5]
    extra = dict(zip(("score_mod", "block_mask"), node.args[3:5], strict=False))
    return Attention(node, "flex_attention", "flex", found, None, _result(node), extra)


_PRODUCTS = {"aten::bmm", "aten::matmul", "aten::mm", "aten::baddbmm"}
_THROUGH = {
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::expand", "aten::clone",
    "aten::_to_copy", "prims::convert_element_type", "aten::alias", "aten::contiguous",
    "aten::permute", "aten::transpose", "aten::unsqueeze", "aten::squeeze", "aten::slice",
}  # fmt: skip
_SCORES = {*_THROUGH, "aten::mul", "aten::div", "aten::add", "aten::where", "aten::tanh",
           "aten::masked_fill", "aten::sub", "aten::cat", "aten::fill"}  # fmt: skip


def _plain(node: Node, name: str) -> Attention | None:
    """``softmax(q @ k.T) @ v`` spelled out, seen from the second product."""
    if name not in _PRODUCTS or name == "aten::baddbmm":
        return None
    left, right = _factors(node)
    scores = _softmax_input(_back(left, _THROUGH))
    if scores is None:
        return None
    product = _back(scores, _SCORES)
    if cv.op_name(product) not in _PRODUCTS:
        return None
    query, key = _factors(product)
    found = {"query": query, "key": key, "value": right}
    return Attention(node, "softmax", "plain", found, None, node)


def _factors(product: Node) -> tuple[Node, Node]:
    """What is multiplied: ``baddbmm`` adds to its first argument, others may name a dtype."""
    first = 1 if cv.op_name(product) == "aten::baddbmm" else 0
    left, right = list(cv.arguments(product).values())[first : first + 2]
    return left, right


def _back(node: Node, through: set[str], depth: int = 40) -> Node:
    """Walk up first arguments through ops that keep a value in place."""
    while depth and node.op == "call_function" and cv.op_name(node) in through and node.args:
        first = node.args[0]
        parts = list(first) if isinstance(first, (tuple, list)) else list(node.args)
        options = [a for a in parts if isinstance(a, Node)]
        if cv.op_name(node) == "aten::where":
            options = [n for n in options[1:] if _large(n)] or options
        node = max(options, key=_rank)
        depth -= 1
    return node


def _rank(node: Node) -> int:
    """Scores are the operand that is still computed from a product: the largest, roughly."""
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) and node.op == "call_function" else -1


def _large(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _softmax_input(node: Node) -> Node | None:
    """What a softmax (one op, or exp over its sum) is taken of."""
    name = cv.op_name(node) if node.op == "call_function" else ""
    source: Any = None
    if name in ("aten::_softmax", "aten::softmax", "aten::_safe_softmax"):
        source = node.args[0]
    elif name == "aten::div" and all(isinstance(a, Node) for a in node.args[:2]):
        top, bottom = node.args[:2]
        assert isinstance(top, Node) and isinstance(bottom, Node)
        if cv.op_name(top) == "aten::exp" and cv.op_name(bottom) == "aten::sum":
            shifted = top.args[0]
            source = shifted
            if isinstance(shifted, Node) and cv.op_name(shifted) == "aten::sub":
                source = shifted.args[0]
    return source if isinstance(source, Node) else None
