"""What is read off modules of unusual shape, and the places of attention layers in a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="reads transformers models")

from fusion.integrations.transformers import KVLayer, kv_layers  # noqa: E402
from fusion.integrations.transformers.layers import recurrent_cache  # noqa: E402
from tests import models  # noqa: E402


class Attention(nn.Module):
    """One attention layer with the given projections and attributes."""

    def __init__(self, index: int, projections: dict[str, int], **attributes: Any) -> None:
        super().__init__()
        self.layer_idx = index
        for name, width in projections.items():
            setattr(self, name, nn.Linear(32, width))
        for name, value in attributes.items():
            setattr(self, name, value)


def model(*layers: Attention, **config: Any) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList(layers)
    text = SimpleNamespace(**{"hidden_size": 32, "num_attention_heads": 4, **config})
    made.config = SimpleNamespace(get_text_config=lambda decoder: text)  # type: ignore[assignment]
    return made


SEPARATE = {"k_proj": 16, "v_proj": 16}


@pytest.mark.parametrize(
    ("layer", "config", "expected"),
    [
        (Attention(0, SEPARATE), {}, KVLayer(2, 8, 8)),  # hidden_size / num_attention_heads
        (Attention(0, SEPARATE), {"head_dim": 4}, KVLayer(4, 4, 4)),
        (Attention(0, SEPARATE, head_dim=16), {"head_dim": 4}, KVLayer(1, 16, 16)),
        (Attention(0, {"k_proj": 16, "v_proj": 24}), {}, KVLayer(2, 8, 12)),
        (Attention(0, {"k_proj": 16}), {}, KVLayer(2, 8, 8)),  # V is K
        (Attention(0, {"qkv_proj": 96}), {}, KVLayer(4, 8, 8)),
        (Attention(0, {"qkv_proj": 64}), {"num_key_value_heads": 2}, KVLayer(2, 8, 8)),
    ],
)
def test_heads_of_one_layer(layer: Attention, config: dict[str, Any], expected: KVLayer) -> None:
    assert kv_layers(model(layer, **config)) == (expected,)


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ((Attention(0, SEPARATE), Attention(0, SEPARATE)), ValueError, "two attention modules"),
        ((Attention(0, {"kv_a_proj_with_mqa": 16}),), ValueError, "latent attention"),
        ((Attention(0, SEPARATE, is_kv_shared_layer=True),), NotImplementedError, "shares the KV"),
        ((Attention(0, {"k_proj": 12, "v_proj": 12}),), ValueError, "no whole heads of 8"),
        ((Attention(0, {"k_proj": 16, "v_proj": 9}),), ValueError, "no whole heads of 8"),
    ],
    ids=["twice", "latent", "shared", "keys", "values"],
)
def test_what_cannot_be_told_is_an_error(
    layers: tuple[Attention, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kv_layers(model(*layers))


def test_a_layer_without_attention_has_no_cache() -> None:
    found = kv_layers(model(Attention(0, {"in_proj": 8}), Attention(1, SEPARATE)))
    assert found == (None, KVLayer(2, 8, 8))


def test_places_of_attention_layers_keep_nothing() -> None:
    """transformers may ask them anything that it asks a cache layer; the pages hold the rows."""
    lfm2 = models.build("lfm2", layers=2)
    cache = recurrent_cache(lfm2, kv_layers(lfm2))
    assert cache is not None
    place = cache.layers[1]
    key, value = torch.randn(2, 1, 4, 3, 8)
    assert cache.update(key, value, 1)[0] is key
    place.lazy_initialization(key, value)
    assert place.is_initialized
    assert cache.get_seq_length(1) == 0
    assert place.get_max_length() == -1
    assert place.get_mask_sizes(5) == (5, 0)
    cache.reset()
    assert cache.get_seq_length(1) == 0
    with pytest.raises(NotImplementedError, match="layer 0 keeps both"):
        recurrent_cache(lfm2, [KVLayer(2, 8, 8)] * 2)
    assert recurrent_cache(models.build("llama", layers=1), [KVLayer(2, 8, 8)]) is None
