"""Why something was not done: every "no" in fusion is a :class:`Reason`, never a bare ``False``.

The codes live here, each with one line of meaning and one of remedy, because both the
documentation (``docs/reasons.md``) and the command line are generated from this table.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class CodeInfo:
    """What a reason code means and what the reader can do about it."""

    meaning: str
    remedy: str


CODES: dict[str, CodeInfo] = {}


class UnknownReasonCode(KeyError):
    """A reason was built with a code that nobody registered."""


def register_code(code: str, meaning: str, remedy: str) -> str:
    """Add a reason code (third-party kernels and passes bring their own).

    Returns the code. Registering the same text twice is harmless; changing the
    meaning of an existing code raises ``ValueError``, because readers rely on it.
    """
    info = CodeInfo(meaning, remedy)
    if CODES.setdefault(code, info) != info:
        raise ValueError(f"reason code {code!r} is already registered: {CODES[code].meaning}")
    return code


@dataclass(frozen=True)
class Reason:
    """One unmet condition.

    ``code`` is a registered word, ``message`` a sentence about this very case, ``have`` and
    ``need`` the two sides of the comparison, ``node`` the FX node in the way and ``source``
    the line of model code it came from.
    """

    code: str
    message: str
    have: str | None = None
    need: str | None = None
    node: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise UnknownReasonCode(f"{self.code!r} is not a registered reason code")

    @property
    def remedy(self) -> str:
        """What the reader can do about it (the code's own remedy)."""
        return CODES[self.code].remedy

    def at(self, node: str | None, source: str | None = None) -> Reason:
        """The same reason, pinned to a graph node."""
        return replace(self, node=node, source=source or self.source)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping with every field."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Reason:
        """The inverse of :meth:`to_dict`; unknown codes (of a plug-in not loaded) are kept."""
        if data["code"] not in CODES:
            register_code(data["code"], "from a report of another installation", "see that report")
        known: dict[str, Any] = {k: data.get(k) for k in cls.__dataclass_fields__}
        return cls(**known)

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        said = (("have", self.have), ("need", self.need))
        known = [f"{word} {value}" for word, value in said if value is not None]
        if known:
            text += f" ({', '.join(known)})"
        if self.node:
            text += f" [{self.node}]"
        return text


# code: (meaning, remedy). Sorted by prefix. Keep sentences short: they are table cells.
_BUILTIN: dict[str, tuple[str, str]] = {
    "cache.no-report": (
        "no pass of fusion ran after the compile cache asked for the key: a hit, a failed compile, "
        "or nothing to compile",
        "clear the compile cache (TORCHINDUCTOR_CACHE_DIR) to see the sites of a hit",
    ),
    "config.off": ("the pass is switched off in the options", "set the pass to auto or required"),
    "config.training": (
        "the graph computes gradients; fusion is for inference",
        "compile under torch.no_grad() or torch.inference_mode()",
    ),
    "gate.aiter-callable": (
        "the installed AITER lacks the function, or its signature is another one",
        "install an AITER release listed in docs/aiter.md",
    ),
    "gate.aiter-disabled": (
        "AITER is switched off",
        "set FUSION_AITER=1 or options={'aiter': True}",
    ),
    "gate.aiter-probe": ("importing AITER failed", "see `fusion doctor` for the import error"),
    "gate.aiter-version": (
        "the installed AITER is too old for this call",
        "install the AITER version named under need",
    ),
    "gate.arch": (
        "the kernel does not run on this chip",
        "use a chip named under need, or another kernel",
    ),
    "gate.argument": (
        "the kernel has no home for this argument",
        "leave the argument at its default, or use a kernel that takes it",
    ),
    "gate.backend-unavailable": (
        "the kernel's package is missing or broken here",
        "install the package named under need; for another machine, name it in the target "
        "(gfx942,aiter=0.1.20)",
    ),
    "gate.block-size": ("the kernel does not take this page size", "use a block size under need"),
    "gate.cache-dtype": (
        "the kernel does not store this cache dtype",
        "use a cache dtype named under need",
    ),
    "gate.cache-stride": (
        "the kernel cannot address a cache with these strides",
        "use a cache layout named under need",
    ),
    "gate.device": (
        "the kernel does not run on this device",
        "move the model or use another kernel",
    ),
    "gate.dtype": ("the kernel does not take these dtypes", "use the dtypes named under need"),
    "gate.eps-tensor": (
        "the norm's epsilon is a tensor in this graph; the kernel wants a number",
        "set torch._dynamo.config.specialize_float=True, or use a kernel that takes it",
    ),
    "gate.head-dim": (
        "the kernel does not take this head size",
        "use a kernel without this limit (triton)",
    ),
    "gate.kv-layout": (
        "the kernel does not take this KV-cache layout",
        "use a layout named under need",
    ),
    "gate.operation": (
        "the named kernel does not implement this operation",
        "name a kernel under need as well, or leave the preference to fusion",
    ),
    "gate.qkv-packed": (
        "the kernel wants q, k and v as one packed tensor",
        "call fusion.integrations.transformers.pack_qkv(model)",
    ),
    "gate.rotary": ("the kernel does not take this rotary width or style", "see have and need"),
    "gate.rounding": (
        "kernel and graph round at different points, and numerics forbids it",
        "spell the rope in real numbers, or set numerics='tolerant' if it is 'exact'",
    ),
    "gate.scale-location": (
        "the kernel wants the fp8 scales on another device",
        "keep a copy of the scales where the kernel wants them",
    ),
    "gate.table": (
        "the kernel wants cos and sin in another form",
        "see have and need",
    ),
    "gate.token-range": (
        "the kernel does not take this number of tokens",
        "see have and need",
    ),
    "internal.error": (
        "fusion met an unexpected error and left the graph as it was",
        "please report it with the text of the error",
    ),
    "match.attention-op": (
        "the attention op is not one that fusion knows",
        "register it with fusion.match.attention.register_attention",
    ),
    "match.cache-pair": (
        "one of K and V is written to the cache without the other in the same way",
        "write K and V with the same slots",
    ),
    "match.cache-view": (
        "the written cache is reached through a view that is not a plain strided one",
        "keep the head dimension contiguous and write through plain views, or through "
        "fusion.ops.kv_cache_write on a cache in one of its layouts",
    ),
    "match.cache-write": (
        "a write to a mutated buffer was seen but is not a slot write",
        "write with kv_cache_write, index_put or index_copy by slots",
    ),
    "match.capture": (
        "the model could not be traced beyond this graph",
        "see the error; what comes later in the model is not in the report",
    ),
    "match.causal-not-constant": (
        "causality reaches the attention call as a graph input",
        "pass causal as a Python bool",
    ),
    "match.dtype": ("the chain computes in a dtype that fusion does not read", "see have and need"),
    "match.graph-break": (
        "rope and cache write are in different graphs",
        "remove the graph break between them",
    ),
    "match.head-dim": (
        "the reduction or rotation does not cover one head",
        "see have and need",
    ),
    "match.no-cache-write": (
        "no slot write to a KV cache follows this rope",
        "use a static or paged cache instead of a dynamic one, allocated before the graph runs "
        "(transformers' StaticCache: early_initialization, or one eager step)",
    ),
    "match.no-norm": (
        "there is no QK norm before the rope",
        "nothing to do: rope is the whole chain",
    ),
    "match.no-query": (
        "no query chain shares cos and sin with the written key",
        "check that q and k are rotated in the same graph with the same cos and sin",
    ),
    "match.no-rope": (
        "the written key does not come from a rotary embedding",
        "nothing to fuse here unless the model should rotate its keys",
    ),
    "match.norm-axis": (
        "the mean of the norm does not run over the head dimension",
        "normalise over the last (head) dimension",
    ),
    "match.norm-dtype": (
        "the norm is not computed in float32",
        "compute the norm in float32",
    ),
    "match.norm-eps": (
        "the norm's epsilon was not understood",
        "add a constant to the mean square",
    ),
    "match.norm-form": (
        "the value before the rope looks like a norm but is not an RMSNorm",
        "see the node",
    ),
    "match.norm-order": (
        "rope runs before the norm, or something stands between them",
        "not this fusion: norm must come before rope",
    ),
    "match.norm-over-heads": (
        "the norm runs over all heads together, before the head split",
        "nothing to do: rope and write are fused, the norm is left alone",
    ),
    "match.opaque-op": (
        "an operator that nobody registered stands in the chain",
        "write it in plain torch, or register its decomposition",
    ),
    "match.q-k-differ": (
        "the chains of q and k differ in an attribute that the kernel shares",
        "see have and need",
    ),
    "match.rope-form": ("the value is not a rotary embedding that fusion reads", "see the node"),
    "match.rope-sign": (
        "the rotation has the sign of the other direction",
        "check the sign of rotate_half",
    ),
    "match.rope-style": (
        "the pairing of rotated elements is neither half-split nor interleaved",
        "use half-split or interleaved rope",
    ),
    "match.rope-table": (
        "cos and sin do not depend on token and dimension as a rope table does",
        "see the node",
    ),
    "match.token-order": (
        "the tokens of q, k, v and the slots are not in one common order",
        "see the node",
    ),
    "match.validation": (
        "the replaced nodes and the canonical operation give different numbers",
        "please report it: the graph was left as it was",
    ),
    "match.validation-bound": (
        "the check of the rewrite could not be run, or not with the time and memory allowed",
        "where a limit is named, raise validation_seconds or validation_mb; else keep tokens and "
        "blocks of the cache in dimensions of their own, or pass validate=False",
    ),
    "match.value": ("the written value is not one row per token and head", "see the node"),
    "plugin.broken": ("a plug-in could not be loaded", "see the error, or uninstall the plug-in"),
    "profit.no-kernel": (
        "only the reference kernel could run this on a GPU, which Inductor would beat",
        "see the candidates for what refused",
    ),
    "profit.token-range": (
        "fusing is expected to be slower for this number of tokens",
        "raise max_tokens of the pass",
    ),
    "safety.aliased-input": (
        "an input of the fused operation may alias the cache",
        "pass tensors that do not overlap the cache",
    ),
    "safety.cache-read-between": (
        "the cache is read between the writes, or its old value is read later",
        "read the cache before both writes or after them",
    ),
    "safety.cycle": (
        "an input of the fused operation depends on its result",
        "compute q before the attention that reads the new cache",
    ),
    "safety.mutation": (
        "an input of the chain is mutated between its use and the write",
        "mutate it before or after the prologue",
    ),
    "safety.output-strides": (
        "a rotated query or key is a graph output with strides that only its old storage gives",
        "return a contiguous copy of it (.contiguous())",
    ),
}

_BUILTIN |= {
    "scope.causal": (
        "the call is causal, which any paged kernel serves",
        "nothing to do",
    ),
    "scope.no-tokens": (
        "the graph computes no token, so there is nothing to fuse",
        "nothing to do",
    ),
    "scope.not-paged": (
        "the attention does not read a paged cache",
        "nothing to do, or read the cache with fusion.ops.paged_attention",
    ),
    "scope.single-query": (
        "there is one query token per sequence, for which causality means nothing",
        "nothing to do",
    ),
}

for _code, (_meaning, _remedy) in _BUILTIN.items():
    register_code(_code, _meaning, _remedy)

BUILTIN: frozenset[str] = frozenset(CODES)
"""The codes of fusion itself, which the documentation lists (plug-ins register their own)."""
