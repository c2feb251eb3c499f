"""A DFlash drafter on a paged cache: the model, loading one, and training one on the spot.

DFlash (https://arxiv.org/abs/2602.06036) drafts a whole block of tokens in one forward. The block
is one known token and masks, `[t, mask, mask, ...]`, embedded by the *target*; the target's output
head reads the drafted tokens off its last states. The drafter knows the text before the block only
through *features*: hidden states of a few target layers, concatenated and projected by `fc`. In
every layer the keys and values of the context are projected from these features (they are the same
for all layers), those of the block from the block's own states, and queries exist for the block
alone:

    context = rms_norm(fc(features))
    attention(q(block), [k(context), k(block)], [v(context), v(block)])

No query is masked from later tokens of its block: attention is not causal, except in layers that
say so. Parameter names and config fields are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from fusion.integrations.transformers import PagedInputs, write_kv
from fusion.integrations.transformers.attention import paged_attention_forward

Pair: TypeAlias = tuple[Tensor, Tensor]
Attend: TypeAlias = "Callable[[DFlashAttention, Tensor, Pair, Pair], Tensor]"
"""(layer, queries of the block, its key and value, key and value of new context) to
`[1, T, Hq, D]`; queries, keys and values are `[1, heads, tokens, D]`."""


class DFlashAttention(nn.Module):
    """One attention layer. `is_causal` and `sliding_window` (None: the whole context) are its own:
    a token of a layer with a window sees fewer than `sliding_window` positions to either side."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window: int | None = config.sliding_window if sliding else None
        # What a checkpoint does not say was trained so: windows look back only.
        causal = setting(config, "is_causal", setting(config, "causal", None))
        self.is_causal = sliding if causal is None else bool(causal)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, block: Tensor, rope: Pair, context: Tensor, context_rope: Pair, attend: Attend
    ) -> Tensor:
        """`block [1, T, H]` attends to the context and to itself; so many states come out."""
        query = _rotate(self.q_norm(self._heads(self.q_proj(block))), rope)
        pairs = self.key_value(block, rope), self.key_value(context, context_rope)
        out: Tensor = self.o_proj(attend(self, query, *pairs).flatten(2))
        return out

    def key_value(self, x: Tensor, rope: Pair) -> Pair:
        """Key and value of `x [1, T, H]`, each `[1, Hk, T, D]`."""
        key = _rotate(self.k_norm(self._heads(self.k_proj(x))), rope)
        return key, self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


def _rotate(x: Tensor, rope: Pair) -> Tensor:
    x, (cos, sin) = x.transpose(1, 2), rope
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


class DFlashLayer(nn.Module):
    """Attention and MLP, each behind a norm, as in Qwen3."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, block: Tensor, *rest: Any) -> Tensor:
        """`block [1, T, H]`; the rest is for :class:`DFlashAttention`."""
        block = block + self.self_attn(self.input_layernorm(block), *rest)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class DFlashDrafter(Qwen3PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """The drafter. It has no embedding and no output head of its own: the target's are used."""

    config_class = Qwen3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.block_size = int(setting(config, "block_size", 16))
        self.mask_token_id = int(setting(config, "mask_token_id"))
        self.target_layers = tuple(setting(config, "target_layer_ids"))
        self.embedding_scale = float(setting(config, "input_embedding_scale", 1.0))
        self.fc = nn.Linear(
            len(self.target_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in layers)
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        features: Tensor,
        feature_positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """States `[1, T, H]` of the block's tokens.

        `block [1, T, H]` are the target's embeddings of `[t, mask, ...]`, all sequences in one
        row; `features [1, C, n*H]` belong to tokens whose context is not in the cache yet.
        `positions [1, T]` and `feature_positions [1, C]` count from the start of each sequence.
        """
        block = block * self.embedding_scale
        context = self.hidden_norm(self.fc(features))
        rope = self.rotary_emb(block, positions)
        context_rope = self.rotary_emb(context, feature_positions)
        for layer in self.layers:
            block = layer(block, rope, context, context_rope, attend)
        out: Tensor = self.norm(block)
        return out

    def describe(self) -> str:
        """The attention of each layer, in words."""
        kinds = [
            ("causal" if a.is_causal else "non-causal")
            + ("" if a.sliding_window is None else f" window {a.sliding_window}")
            for a in (layer.self_attn for layer in self.layers)
        ]
        return (
            f"{len(kinds)} layers ({', '.join(kinds)}), blocks of {self.block_size}, "
            f"reads target layers {', '.join(map(str, self.target_layers))}"
        )


def features_of(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Features `[1, T, n*H]`: what the target's `layers` put out (transformers'
    `hidden_states`, whose first entry is the embedding)."""
    return torch.cat([hidden_states[i + 1] for i in layers], -1)


class PagedAttend:
    """Attention of the compiled drafter: everything goes through the paged cache.

    The context's keys and values are written to `slots [C]` (-1: nothing is), the block's to
    the newest slots of `paged_kv`, and the block's queries see all of the sequence.
    """

    def __init__(self, paged_kv: PagedInputs, slots: Tensor) -> None:
        self.paged_kv, self.slots = paged_kv, slots

    def __call__(self, layer: DFlashAttention, query: Tensor, own: Pair, context: Pair) -> Tensor:
        write_kv(layer, *context, self.paged_kv, self.slots)
        window = layer.sliding_window
        if window is not None and not layer.is_causal:
            # transformers' windows to both sides reach one position further than DFlash's.
            window -= 1
        return paged_attention_forward(
            layer,
            query,
            *own,
            sliding_window=window,
            is_causal=layer.is_causal,
            paged_kv=self.paged_kv,
        )[0]


class DenseAttend:
    """The same by the formula, with a mask: many blocks of one text at once, for training.

    `starts [A]` are the positions of the first tokens of A blocks of `size` tokens. A block sees
    itself and the context left of its start, which is the first C positions of the text.
    """

    def __init__(self, starts: Tensor, size: int, context: int) -> None:
        block = (starts[:, None] + torch.arange(size, device=starts.device)).flatten()
        number = torch.arange(len(starts), device=starts.device).repeat_interleave(size)
        before = torch.arange(context, device=starts.device)
        self.positions = block
        self._distance = block[:, None] - torch.cat((before, block))
        sees = before < starts.repeat_interleave(size)[:, None]
        self._visible = torch.cat((sees, number[:, None] == number), 1)

    def __call__(self, layer: DFlashAttention, query: Tensor, own: Pair, context: Pair) -> Tensor:
        mask, window = self._visible, layer.sliding_window
        if layer.is_causal:
            mask = mask & (self._distance >= 0)
        if window is not None:
            mask = mask & (self._distance.abs() < window)
        key, value = (torch.cat(parts, 2) for parts in zip(context, own, strict=True))
        out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return out.transpose(1, 2)


def random_drafter(target: Any, block_size: int) -> DFlashDrafter:
    """A small random drafter that fits `target`: three non-causal layers, one with a window."""
    text = target.config.get_text_config()
    deepest = text.num_hidden_layers - 1
    heads = text.num_attention_heads
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=2 * text.hidden_size,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=2 * block_size,
        max_position_embeddings=text.max_position_embeddings,
        initializer_range=text.initializer_range,
        is_causal=False,
        block_size=block_size,
        dflash_config={
            "mask_token_id": text.vocab_size - 1,
            "target_layer_ids": sorted({0, deepest // 2, max(deepest - 1, 0)}),
        },
    )
    return DFlashDrafter(config).to(target.device).eval()


def load_drafter(folder: Path, dtype: torch.dtype, device: str) -> DFlashDrafter:
    """The drafter in `folder`, as published for Qwen3 and the like.

    Raises `ValueError` for what is no such drafter: another model type, no `target_layer_ids` or
    `mask_token_id`, or weights that are missing, of another shape or too many (DFlash 2's
    convolutions, say).
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder of a model: it has no config.json")
    config = Qwen3Config.from_pretrained(folder)
    absent = [n for n in ("target_layer_ids", "mask_token_id") if setting(config, n) is None]
    kind = Qwen3Config.get_config_dict(folder)[0].get("model_type")
    if kind != "qwen3":
        absent.insert(0, f"model_type qwen3 (it is {kind})")
    if absent:
        raise ValueError(f"the config in {folder} is no DFlash drafter's: no {', '.join(absent)}")
    model, info = DFlashDrafter.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in `info`, and refused with the rest
    )
    wrong = {kind: sorted(map(str, info[kind])) for kind in info if kind.endswith("_keys")}
    wrong = {kind: keys for kind, keys in wrong.items() if keys}
    if wrong:
        raise ValueError(f"the weights in {folder} are not those of a DFlash drafter: {wrong}")
    drafter: DFlashDrafter = model.to(device).eval()
    return drafter


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A field of the drafter's config, where `dflash_config` goes before the top level."""
    inner = getattr(config, "dflash_config", None) or {}
    value = inner.get(name, getattr(config, name, None))
    return default if value is None else value


@torch.enable_grad()
def distil(
    drafter: DFlashDrafter, target: Any, texts: Sequence[tuple[list[int], int]], steps: int
) -> tuple[float, float]:
    """Train `drafter` for `steps` steps to say after every token what the target said.

    `texts` are token ids with the length of the prompt that they begin with; blocks start at the
    prompt's end and later. Returns the first and the last loss (nats a token).
    """
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    lessons = [_lesson(drafter, target, embed, *text) for text in texts]
    drafter.requires_grad_(True)
    # The target's embedding and head stay as they are.
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 1))
    losses = []
    for _ in range(steps):
        loss = torch.stack([_loss(drafter, head, *lesson) for lesson in lessons]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    drafter.requires_grad_(False)
    return (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))


@torch.no_grad()
def _lesson(
    drafter: DFlashDrafter, target: Any, embed: nn.Module, tokens: list[int], prompt: int
) -> tuple[Tensor, Tensor, DenseAttend, Tensor]:
    ids = torch.tensor([tokens], device=target.device)
    states = target(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    features = features_of(states, drafter.target_layers)
    starts = torch.arange(prompt, len(tokens) - 1, device=ids.device)
    size = drafter.block_size
    attend = DenseAttend(starts, size, len(tokens))
    # What lies behind the end of the text teaches nothing.
    padded = F.pad(ids[0], (0, size), value=-100)
    labels = padded[attend.positions].view(-1, size)
    block = torch.full_like(labels, drafter.mask_token_id)
    block[:, 0] = labels[:, 0]
    # Trained in f32, whatever the target's dtype.
    block_in = F.embedding(block.flatten()[None], embed.weight).float()
    return block_in, features.float(), attend, labels[:, 1:].flatten()


def _loss(
    drafter: DFlashDrafter,
    head: nn.Module,
    block: Tensor,
    features: Tensor,
    attend: DenseAttend,
    labels: Tensor,
) -> Tensor:
    before = torch.arange(features.shape[1], device=features.device)[None]
    out = drafter(block, attend.positions[None], features, before, attend)
    drafted = out.view(-1, drafter.block_size, out.shape[-1])[:, 1:].flatten(0, 1)
    return F.cross_entropy(head(drafted.to(head.weight.dtype)).float(), labels)
