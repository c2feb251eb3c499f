"""The attention function `fusion_paged` for unmodified transformers models.

Importing this module registers it (and its mask function) with transformers. A model switched to
it by `model.set_attn_implementation("fusion_paged")` must be called with the keyword argument
`paged_kv=` (:class:`~fusion.integrations.transformers.inputs.PagedInputs`), which transformers
hands through to every attention layer.

Each layer writes its keys and values with `fusion::kv_cache_write` and reads the cache with
`fusion::paged_attention`. The graph holds tensors only: a layer is known by its cache tensor,
never by a name or number in an operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import fusion.ops  # noqa: F401  (registers the operations)
from fusion.layout import split_kv_cache

if TYPE_CHECKING:
    from fusion.integrations.transformers.inputs import PagedInputs

NAME = "fusion_paged"


class PagedAttentionError(ValueError):
    """The model asks for something that paged attention cannot give, or was called wrongly."""


@dataclass(frozen=True)
class WindowMask:
    """Stands where a sliding-window mask would be, so that a layer which gets one and does not
    pass its window is noticed rather than given full attention. `window` counts the query."""

    window: int


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | WindowMask | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    paged_kv: PagedInputs | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write `key` and `value` to the layer's paged cache, then attend over it.

    Shapes as transformers gives them: `query [B, Hq, S, D]`, `key [B, Hk, S, D]`,
    `value [B, Hk, S, Dv]`; the `B*S` tokens belong to sequences as `paged_kv.query_start_loc`
    says. Returns `[B, S, Hq, Dv]` in the dtype of `query` and no weights.

    `sliding_window` counts the query itself, as everywhere in transformers; `s_aux [Hq]` is one
    sink logit per head; `softcap` and `scaling` are numbers. Raises
    :class:`PagedAttentionError` for a mask tensor, a position bias, dropout, a missing
    `paged_kv` and a layer that the cache was not built for.
    """
    if paged_kv is None:
        raise PagedAttentionError(
            f"attention implementation {NAME!r} needs paged_kv= in the model's call "
            "(cache.inputs(...), or use fusion.integrations.transformers.generate)"
        )
    if isinstance(attention_mask, WindowMask):
        if attention_mask.window != sliding_window:
            raise PagedAttentionError(
                f"{type(module).__name__} gets a mask of window {attention_mask.window} but passes "
                f"sliding_window={sliding_window}: {NAME!r} cannot tell which one is meant"
            )
    elif attention_mask is not None:
        raise PagedAttentionError(
            f"{NAME!r} has no place for a mask tensor, and one of shape "
            f"{list(attention_mask.shape)} was given: causality, window and lengths come from "
            "the layer and from paged_kv"
        )
    if position_bias is not None:
        raise PagedAttentionError(f"{NAME!r} has no place for a position_bias")
    if dropout:
        raise PagedAttentionError(f"{NAME!r} is for inference: call model.eval() (dropout is set)")
    batch, _, length, head_dim = query.shape
    key_cache, value_cache = write_kv(module, key, value, paged_kv)
    query = _tokens(query)
    causal = _is_causal(module, is_causal)
    # transformers' masks: causal sees the query and the sliding_window-1 keys before it; a layer
    # that sees both sides reaches sliding_window keys to either.
    reach = -1 if sliding_window is None else sliding_window - int(causal)
    out = torch.ops.fusion.paged_attention(
        query,
        key_cache,
        value_cache,
        paged_kv.block_table,
        paged_kv.seq_lens,
        paged_kv.query_start_loc,
        length if paged_kv.max_query_len is None else paged_kv.max_query_len,
        paged_kv.max_seq_len,
        head_dim**-0.5 if scaling is None else scaling,
        causal,
        reach,
        -1 if causal else reach,
        0.0 if softcap is None else softcap,
        s_aux,
        paged_kv.k_scale,
        paged_kv.v_scale,
        kv_layout=paged_kv.layout.op_layout,
    )
    return out.view(batch, length, out.shape[1], out.shape[2]), None


def write_kv(
    module: torch.nn.Module,
    key: Tensor,
    value: Tensor,
    paged_kv: PagedInputs,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write `key [B, Hk, S, D]` and `value [B, Hk, S, Dv]` to the cache of layer
    `module.layer_idx`; returns its key and value views.

    `slot_mapping [B*S]` (int64, -1 writes nothing) says where to, by default the slots of
    `paged_kv`. For layers whose keys come without queries: a DFlash drafter's, whose context is
    projected from hidden states of the target. Raises :class:`PagedAttentionError` for a layer
    that the cache was not built for.
    """
    kv = paged_kv.kv[_layer_index(module, len(paged_kv.kv))]
    if kv is None:
        raise PagedAttentionError(
            f"layer {module.layer_idx} attends, but the cache was built without this layer"
        )
    key_cache, value_cache = split_kv_cache(kv, paged_kv.layout, key.shape[-1], value.shape[-1])
    torch.ops.fusion.kv_cache_write(
        _tokens(key),
        _tokens(value),
        key_cache,
        value_cache,
        paged_kv.slot_mapping if slot_mapping is None else slot_mapping,
        paged_kv.k_scale,
        paged_kv.v_scale,
        kv_layout=paged_kv.layout.op_layout,
    )
    return key_cache, value_cache


def _tokens(x: Tensor) -> Tensor:
    # [B, H, S, D] -> [B*S, H, D]; a view where transformers only transposed a projection.
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _layer_index(module: torch.nn.Module, layers: int) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or not 0 <= index < layers:
        raise PagedAttentionError(
            f"{type(module).__name__} has layer_idx {index!r}; the cache was built for layers "
            f"0 to {layers - 1}"
        )
    return index


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    if is_causal is not None:
        return bool(is_causal)
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True)) and bool(getattr(config, "is_causal", True))


def paged_mask(*args: Any, **kwargs: Any) -> WindowMask | None:
    """Build no mask tensor, and refuse the kinds that the operation could not express.

    Called by transformers' mask helpers with keyword arguments. Plain causal and bidirectional
    masks become None, sliding-window masks a :class:`WindowMask`. Chunked attention and masks
    that a model combines from its own functions would be lost without a trace, so they raise
    :class:`PagedAttentionError`.
    """
    config = kwargs.get("config")
    if kwargs.get("use_vmap"):
        raise PagedAttentionError(
            f"{NAME!r} cannot apply this model's own mask function (an or_mask_function or "
            "and_mask_function on top of the causal mask)"
        )
    local, chunk = kwargs.get("local_size"), getattr(config, "attention_chunk_size", None)
    if local is not None and chunk is not None and local == chunk:
        raise PagedAttentionError(f"{NAME!r} cannot apply chunked attention (chunks of {chunk})")
    return None if local is None else WindowMask(local)


def register() -> None:
    """Register `fusion_paged` with transformers. Importing this module does it; repeating is
    harmless."""
    AttentionInterface.register(NAME, paged_attention_forward)
    AttentionMaskInterface.register(NAME, paged_mask)


register()
