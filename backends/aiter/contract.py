"""What AITER's functions look like, by version: names, order, defaults, import paths.

Read from the sources of ROCm/aiter at its release tags v0.1.10 to v0.1.20.post1 and at commit
e4048607a (2026-08-22); ``tests/test_aiter_contract.py`` compares this table, parameter by
parameter, with the machine-readable contract in ``tests/data/aiter_contract.json``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from fusion.reason import Reason

OLDEST = Version("0.1.10")
"""First release whose import paths are the ones below."""

LIMIT = Version("0.2")
"""Nothing is known of releases from here on."""

_FINAL_RELEASES = tuple(Version(f"0.1.{n}") for n in range(5, 21))
"""Final releases (no post releases) that are known to exist, in order."""

HOST_SCALES = Version("0.1.16")
"""From here on the pts operation dereferences its scales on the host, and aborts on misuse."""

BLOCK_STRIDE = Version("0.1.16")
"""From here on the stride between blocks is free (PR 3492, 3640)."""

FREE_STRIDES = Version("0.1.19.post1")
"""From here on token and head strides are free, too (PR 4312); no signature changed with it."""


def proven(version: Version) -> Version:
    """The release that a version surely contains.

    A development version counts as the release before it: ``0.1.20.dev3`` is three commits after
    some 0.1.19, which may be three commits too few. Release candidates, post releases and local
    labels (``0.1.20+rocm7.1``) count as packaging orders them.
    """
    if not version.is_devrelease:
        return version
    if version.post is not None:
        base = ".".join(map(str, version.release))
        return Version(base if version.post <= 1 else f"{base}.post{version.post - 1}")
    older = [v for v in _FINAL_RELEASES if v.release < version.release]
    return older[-1] if older else Version("0")


@dataclass(frozen=True)
class Function:
    """One function of AITER.

    ``signatures`` lists ``(first version, parameters)`` in order; a parameter is its name, with a
    trailing ``=`` where it has a default. ``positional`` says how the adapter calls it: by position
    (pybind argument names are absent or differ from the Python stub) or by keyword. ``passes`` are
    the names that the adapter passes, in order.
    """

    name: str
    module: str
    first: Version
    positional: bool
    passes: tuple[str, ...]
    signatures: tuple[tuple[Version, tuple[str, ...]], ...]

    def parameters(self, version: Version) -> tuple[str, ...]:
        """The parameters at a version (those of the newest known one for a newer version)."""
        version = proven(version)
        found = self.signatures[0][1]
        for start, parameters in self.signatures:
            if start <= version:
                found = parameters
        return found

    def check(self, signature: inspect.Signature) -> Reason | None:
        """Whether the adapter's call binds to a real signature and means the same there."""
        actual = list(signature.parameters.values())
        names = [p.name for p in actual]
        text = f"{self.name}({', '.join(names)})"
        if self.positional:
            by_position = [
                p.name for p in actual if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ][: len(self.passes)]
            if tuple(by_position) != self.passes:
                return Reason(
                    "gate.aiter-callable",
                    f"the parameters of {self.name} are not in the known order",
                    have=text,
                    need=", ".join(self.passes),
                )
        else:
            missing = [
                n
                for n in self.passes
                if n not in names
                or signature.parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY
            ]
            if missing:
                return Reason(
                    "gate.aiter-callable",
                    f"{self.name} has no parameter {', '.join(missing)}",
                    have=text,
                    need=", ".join(self.passes),
                )
        unfilled = [
            p.name
            for p in actual
            if p.name not in self.passes
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if unfilled:
            return Reason(
                "gate.aiter-callable",
                f"{self.name} wants {', '.join(unfilled)}, which fusion does not know",
                have=text,
                need=", ".join(self.passes),
            )
        return None


def _function(
    name: str, module: str, first: str, positional: bool, passes: str, **signatures: str
) -> Function:
    """``signatures`` maps ``v0_1_12`` to space-separated parameters."""
    table = tuple(
        (Version(key.removeprefix("v").replace("_", ".")), tuple(text.split()))
        for key, text in signatures.items()
    )
    return Function(name, module, Version(first), positional, tuple(passes.split()), table)


_PTS = (
    "qkv qw kw cos_sin positions num_tokens num_heads_q num_heads_k num_heads_v head_size "
    "is_neox_style eps q_out k_cache v_cache slot_mapping per_tensor_k_scale per_tensor_v_scale "
    "k_out v_out return_kv use_shuffle_layout block_size x"
)

PTS = _function(
    "fused_qk_norm_rope_cache_pts_quant_shuffle",
    "aiter.ops.fused_qk_norm_rope_cache_quant",
    # 0.1.11 has the function without rotary_dim: the width of the rotation would be implied.
    "0.1.12",
    True,
    _PTS + " rotary_dim",
    v0_1_11=_PTS,
    v0_1_12=_PTS + " rotary_dim=",
)

_ROPE = (
    "q k v key_cache value_cache slot_mapping pos cos sin k_scale v_scale is_neox flash_layout "
    "apply_scale= offs= q_out= k_out= output_zeros= zeros_out="
)

ROPE = _function(
    "fused_qk_rope_reshape_and_cache",
    "aiter.ops.triton.fusions.fused_kv_cache",
    "0.1.10",
    False,
    "q k v key_cache value_cache slot_mapping pos cos sin k_scale v_scale is_neox flash_layout "
    "apply_scale q_out k_out output_zeros",
    v0_1_7=_ROPE,
    v0_1_16=_ROPE + " upcast_operand=",
)

_UNIFIED = (
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size "
    "block_table softcap q_descale k_descale v_descale"
)

UNIFIED = _function(
    "unified_attention",
    "aiter.ops.triton.attention.unified_attention",
    "0.1.10",
    False,
    _UNIFIED + " sinks",
    v0_1_7=_UNIFIED + " alibi_slopes= output_scale= qq_bias= sinks=",
    v0_1_16=_UNIFIED
    + " q_scales= alibi_slopes= output_scale= qq_bias= sinks= shuffled_kv_cache= skip_reduce=",
)

FLASH = _function(
    "flash_attn_with_kvcache",
    "aiter.ops.triton.attention.mha_v3",
    # Before 0.1.16 the block stride was taken for dense, and the length was read on the host.
    "0.1.16",
    False,
    "q k_cache v_cache cache_seqlens softmax_scale causal window_size page_table",
    v0_1_8="q k_cache v_cache k= v= qv= cache_seqlens= softmax_scale= causal= window_size= "
    "attention_chunk= softcap= num_splits= pack_gqa= sm_margin= q_descale= k_descale= v_descale= "
    "max_seqlen_q= return_softmax_lse= page_table= cache_batch_idx= cache_leftpad= rotary_cos= "
    "rotary_sin= rotary_seqlens= cu_seqlens_q= cu_seqlens_k_new=",
)

WRITE = _function(
    "reshape_and_cache_flash",
    "aiter.ops.cache",
    "0.1.10",
    True,
    "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
    v0_1_5="key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
)

FUNCTIONS: Mapping[str, Function] = {f.name: f for f in (PTS, ROPE, UNIFIED, FLASH, WRITE)}

NOT_USED: Mapping[str, str] = {
    "fused_qk_norm_rope_cache_quant_shuffle": (
        "computes its own scale per token and head, writes 5-D shuffled caches only, and rewrites "
        "q and k in place: no operation of fusion means that"
    ),
    "fused_qk_norm_rope_cache_block_quant_shuffle": (
        "computes its own scale per block, rescales older tokens, and writes shuffled caches only"
    ),
    "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle": "three positions a token (mrope)",
    "fused_qkv_split_qk_norm_rope_cache": (
        "its norm is (1 + w); w - 1 in the weight's dtype is not the weight"
    ),
    "reshape_and_cache": "writes the 5-D shuffled cache, for which the gate is closed",
    "paged_attention_v1": "one token a sequence; strides are read from K only",
    "pa_fwd_asm": "shuffled caches only, softmax scale fixed",
    "paged_attention_common": "shuffled caches only, one token a sequence",
}
"""Functions of AITER that fit none of fusion's operations, with the reason."""
