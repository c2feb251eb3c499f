"""Reads off a transformers model what each layer keeps: KV heads, or a state of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

# Projections that only attention layers have; the fused ones say nothing about the number of
# heads, which is then the config's.
_KEY = ("k_proj", "key_proj", "k")
_VALUE = ("v_proj", "value_proj", "v")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True)
class KVLayer:
    """The KV cache of one layer: `heads` KV heads, keys of `head_dim` elements, values of
    `head_dim_v`."""

    heads: int
    head_dim: int
    head_dim_v: int


def kv_layers(model: nn.Module) -> tuple[KVLayer | None, ...]:
    """The KV cache of each decoder layer of `model`, by layer index; None for layers without.

    Head numbers come from the modules (output width of k_proj and v_proj, `head_dim`), which may
    differ from layer to layer, and from the config only for fused projections.

    Raises `NotImplementedError` for encoder-decoders and for layers that share another layer's
    cache; `ValueError` where a layer's heads cannot be told, or no layer attends.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError("encoder-decoder models have no paged KV cache here")
    text = config.get_text_config(decoder=True)
    found: dict[int, KVLayer] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            continue
        layer = _layer(name, module, text)
        if layer is None:
            continue
        if index in found:
            raise ValueError(f"two attention modules have layer_idx {index}; pass layers=")
        found[index] = layer
    if not found:
        raise ValueError(
            f"no attention layer with a layer_idx was found in {type(model).__name__}; pass layers="
        )
    count = max(int(getattr(text, "num_hidden_layers", 0)), max(found) + 1)
    return tuple(found.get(i) for i in range(count))


def _layer(name: str, module: nn.Module, config: Any) -> KVLayer | None:
    key, value = _first(module, _KEY), _first(module, _VALUE)
    fused = _first(module, _FUSED)
    if key is None and fused is None:
        if getattr(module, "kv_a_proj_with_mqa", None) is not None:
            raise ValueError(
                f"{name} has latent attention, whose heads are not read off; pass layers="
            )
        return None
    if getattr(module, "is_kv_shared_layer", False):
        raise NotImplementedError(f"{name} shares the KV cache of another layer")
    head_dim = next((d for d in (getattr(module, a, None) for a in _HEAD_DIM) if d), None)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if not isinstance(head_dim, int):
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
    if key is None:
        return KVLayer(int(heads), int(head_dim), int(head_dim))
    width = key.out_features
    width_v = width if value is None else value.out_features
    heads = width // head_dim
    if heads * head_dim != width or width_v % heads:
        raise ValueError(
            f"{name} projects keys to {width} and values to {width_v} elements, which are no whole "
            f"heads of {head_dim}; pass layers="
        )
    return KVLayer(heads, int(head_dim), width_v // heads)


def _first(module: nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module) and (
            name in _FUSED or isinstance(getattr(child, "out_features", None), int)
        ):
            return child
    return None


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """The place of an attention layer in a transformers cache: it keeps nothing, because the
    attention function writes the paged cache itself."""

    is_compileable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        return None


def cache_argument(function: Callable[..., Any]) -> str:
    """The name under which a function of transformers (a model's forward) takes a cache.

    transformers renamed ``past_key_values`` to ``cache`` between 5.17 and 5.24.
    """
    accepted = inspect.signature(function).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def recurrent_cache(model: Any, layers: Sequence[KVLayer | None]) -> DynamicCache | None:
    """A transformers cache with the states of `model`'s recurrent layers and nothing for the
    attention layers, or None where no layer has such a state.

    Raises `NotImplementedError` for layers that attend *and* keep a state.
    """
    cache = DynamicCache(config=model.config)
    states = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    if not any(states):
        return None
    for index, (layer, state) in enumerate(zip(cache.layers, states, strict=True)):
        if not state:
            cache.layers[index] = _PagedLayer()  # type: ignore[no-untyped-call, unused-ignore]
        elif isinstance(layer, CacheLayerMixin) or layers[index] is not None:
            raise NotImplementedError(
                f"layer {index} keeps both a KV cache and a state of its own, which the paged "
                "cache does not support"
            )
    return cache
