"""Small seeded random transformers models, for tests and examples.

Every model is a causal language model with 8 query heads and 4 KV heads (GPT-J has no grouped
queries: 8 and 8), hidden size 256, vocabulary 512 and a handful of layers. The dimensions are
small but of the real kind: `head_dim` is a power of two, experts and partial rotary widths are
there where the architecture has them, windows are short enough that a short prompt crosses them.

Weights come from a seed. Norm weights, biases and sinks are *not* left at their initial ones and
zeros, because a test with those cannot see a weight that was forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HQ, HK = 8, 4
HIDDEN = 256
VOCAB = 512
WINDOW = 12

_Build = Callable[[int, dict[str, Any]], tuple[Any, Any]]


def _common(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_hidden_layers": layers,
        "num_attention_heads": HQ,
        "num_key_value_heads": HK,
        "max_position_embeddings": 1024,
        "initializer_range": 0.08,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


def _qwen3(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM, Qwen3Config(**{**_common(layers), "head_dim": 64, **over})


def _qwen3_moe(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {"head_dim": 64, "moe_intermediate_size": 96, "num_experts": 4}
    options |= {"num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**_common(layers), **options, **over})


def _lfm2(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    # Every second layer is a short convolution: it has no KV cache.
    kinds = ["conv" if i % 2 == 0 else "full_attention" for i in range(layers)]
    return Lfm2ForCausalLM, Lfm2Config(**{**_common(layers), "layer_types": kinds, **over})


def _glm4_moe(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    options = {"head_dim": 64, "use_qk_norm": True, "partial_rotary_factor": 0.5}
    options |= {"moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2}
    options |= {"first_k_dense_replace": 1, "attention_bias": True}
    return Glm4MoeForCausalLM, Glm4MoeConfig(**{**_common(layers), **options, **over})


def _gemma3(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    # sliding, full, sliding, full, ...
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    options = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW}
    options |= {"layer_types": kinds}
    return Gemma3ForCausalLM, Gemma3TextConfig(**{**_common(layers), **options, **over})


def _gemma2(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    options = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW}
    options |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    return Gemma2ForCausalLM, Gemma2Config(**{**_common(layers), **options, **over})


def _llama(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig(**{**_common(layers), "head_dim": 64, **over})


def _qwen2(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM, Qwen2Config(**{**_common(layers), **over})


def _mistral(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import MistralConfig, MistralForCausalLM

    options = {"head_dim": 64, "sliding_window": WINDOW}
    return MistralForCausalLM, MistralConfig(**{**_common(layers), **options, **over})


def _phi3(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Phi3Config, Phi3ForCausalLM

    # One fused qkv_proj that the model cuts by slices; three quarters of each head rotate.
    options = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024}
    return Phi3ForCausalLM, Phi3Config(**{**_common(layers), **options, **over})


def _gptj(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import GPTJConfig, GPTJForCausalLM

    options = {
        "vocab_size": VOCAB,
        "n_positions": 1024,
        "n_embd": HIDDEN,
        "n_layer": layers,
        "n_head": HQ,
        "rotary_dim": 16,
        "n_inner": 384,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return GPTJForCausalLM, GPTJConfig(**{**options, **over})


def _olmo2(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM, Olmo2Config(**{**_common(layers), **over})


def _hunyuan(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    config = HunYuanDenseV1Config(**{**_common(layers), "head_dim": 64, **over})
    return HunYuanDenseV1ForCausalLM, config


def _gpt_oss(layers: int, over: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import GptOssConfig, GptOssForCausalLM

    options = {"head_dim": 32, "sliding_window": WINDOW, "num_local_experts": 4}
    # YaRN, so that cos and sin carry an attention factor above one.
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0}
    rope |= {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32}
    options |= {"num_experts_per_tok": 2, "rope_parameters": rope}
    return GptOssForCausalLM, GptOssConfig(**{**_common(layers), **options, **over})


_BUILDERS: dict[str, _Build] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "lfm2": _lfm2,
    "glm4_moe": _glm4_moe,
    "gemma3": _gemma3,
    "gemma2": _gemma2,
    "llama": _llama,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "phi3": _phi3,
    "gptj": _gptj,
    "olmo2": _olmo2,
    "hunyuan": _hunyuan,
    "gpt_oss": _gpt_oss,
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)


def config(name: str, layers: int = 4, **overrides: Any) -> Any:
    """The transformers config of a small model `name` (one of `NAMES`)."""
    return _BUILDERS[name](layers, overrides)[1]


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    layers: int = 4,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **overrides: Any,
) -> Any:
    """A seeded random causal LM of architecture `name`, in eval mode, on eager attention.

    `overrides` are put over the config's fields. Weights depend on `seed` (and the
    architecture), not on `dtype`: they are drawn in f32 and cast.
    """
    model_class, cfg = _BUILDERS[name](layers, overrides)
    cfg._attn_implementation = "eager"
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(cfg)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 or parameter.shape[-1] == 1:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise, alpha=0.2)
    finally:
        torch.set_rng_state(state)
    return model.to(dtype=dtype, device=device).eval().requires_grad_(False)


def prompts(lengths: tuple[int, ...] = (5, 17, 1, 30), seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths (the defaults cross block and window borders)."""
    generator = torch.Generator().manual_seed(seed + 100)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def eager_greedy(
    model: Any, batch: list[list[int]], max_new_tokens: int, eos_token_id: int | None = None
) -> list[list[int]]:
    """What transformers' own eager `generate` says: greedy, one prompt at a time, unpadded.

    Returns the new tokens of each prompt. The model's attention implementation is put to
    "eager" for the call and restored.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rows: list[list[int]] = []
        for prompt in batch:
            ids = torch.tensor([prompt], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                pad_token_id=0,
            )
            rows.append(out[0, len(prompt) :].tolist())
        return rows
    finally:
        model.set_attn_implementation(before)
