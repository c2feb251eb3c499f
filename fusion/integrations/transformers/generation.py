"""Greedy generation on a paged cache: what the examples and tests need, not a serving engine."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from fusion.integrations.transformers.attention import NAME
from fusion.integrations.transformers.cache import PagedKVCache
from fusion.integrations.transformers.inputs import PagedInputs
from fusion.integrations.transformers.layers import cache_argument

_Steps = tuple[Callable[..., Tensor], Callable[..., Tensor]]
_numbers = itertools.count()


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    cache: PagedKVCache,
    compile: Mapping[str, Any] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    *,
    on_logits: Callable[[int, Tensor], None] | None = None,
) -> list[list[int]]:
    """Greedy decoding of all `prompts` (token ids, any lengths) as one batch.

    Returns the new tokens of each prompt, at most `max_new_tokens`, ending with the first of
    `eos_token_id` where one comes. `compile=None` runs eagerly; a mapping is handed to
    `torch.compile` (`{"backend": "fusion", ...}`), with `fullgraph=True` unless it says
    otherwise. Prefill and decode are compiled apart and kept with the model, so that each is
    compiled once, and a second time when the shapes change (`dynamic=None`).

    `on_logits(step, logits)` sees the logits `[B, vocabulary]` of every step; rows that are over
    hold numbers without meaning, and the tensor may be overwritten by the next step.

    The blocks for all prompts and new tokens must be free at the start
    (:class:`~fusion.integrations.transformers.allocator.OutOfBlocks`, nothing changed), so that
    a generation never stops half-way; all of them are freed at the end. Raises `ValueError` for an
    empty prompt and where the model is not on attention implementation "fusion_paged".
    """
    tokens = [[int(t) for t in prompt] for prompt in prompts]
    _check(model, tokens, max_new_tokens)
    if not tokens or max_new_tokens == 0:
        return [[] for _ in tokens]
    stop = _stop_tokens(eos_token_id)
    # The last token is returned but never fed back.
    cache.check_fits([len(prompt) + max_new_tokens - 1 for prompt in tokens])
    prefill, decode = _steps(model, compile)
    state = _prepare_state(model, cache, len(tokens))
    sequences: list[int | None] = [cache.allocate() for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    try:
        lengths = [len(prompt) for prompt in tokens]
        inputs = cache.inputs(sequences, lengths, padded=cache.recurrent, max_query_len=None)
        inputs.token_ids.copy_(_prompt_ids(tokens, cache.recurrent))
        mask = _padding_mask(tokens, cache) if cache.recurrent else None
        logits = prefill(model, inputs, state, mask)
        for step in range(max_new_tokens):
            if on_logits is not None:
                on_logits(step, logits)
            newest = logits.argmax(-1)
            for row, token in enumerate(newest.tolist()):
                sequence = sequences[row]
                if sequence is None:
                    continue
                outputs[row].append(token)
                if token in stop:
                    cache.free(sequence)
                    sequences[row] = None
            if step + 1 == max_new_tokens or all(s is None for s in sequences):
                break
            inputs = cache.inputs(sequences, 1, padded=cache.recurrent)
            inputs.token_ids.copy_(newest.view(inputs.token_ids.shape))
            logits = decode(model, inputs, state, None)
    finally:
        for sequence in sequences:
            if sequence is not None:
                cache.free(sequence)
    return outputs


def _check(model: Any, prompts: list[list[int]], max_new_tokens: int) -> None:
    implementation = model.config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f"the model's attention implementation is {implementation!r}; call "
            f"model.set_attn_implementation({NAME!r}) first"
        )
    if any(not prompt for prompt in prompts):
        raise ValueError(f"prompt {next(i for i, p in enumerate(prompts) if not p)} is empty")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")


def _stop_tokens(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)


def _prompt_ids(prompts: list[list[int]], padded: bool) -> Tensor:
    width = max(map(len, prompts))
    if padded:
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    else:
        rows = [[token for prompt in prompts for token in prompt]]
    return torch.tensor(rows, dtype=torch.int64)


def _padding_mask(prompts: list[list[int]], cache: PagedKVCache) -> Tensor:
    # [B, S], False on the left padding: recurrent layers must not see it.
    width = max(map(len, prompts))
    rows = [[False] * (width - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(rows, device=cache.device)


class _CompiledSteps:
    """Compiled prefill and decode of one model, by compile options; lives in the model's
    attributes and is neither copied nor pickled with it."""

    def __init__(self) -> None:
        self.items: list[tuple[dict[str, Any], _Steps]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledSteps:
        return _CompiledSteps()

    def __reduce__(self) -> tuple[type[_CompiledSteps], tuple[()]]:
        return _CompiledSteps, ()


def _steps(model: Any, options: Mapping[str, Any] | None) -> _Steps:
    if options is None:
        return _make_steps(model)
    wanted = {"fullgraph": True, **options}
    kept = model.__dict__.setdefault("_fusion_steps", _CompiledSteps())
    for used, steps in kept.items:
        if used == wanted:
            return cast(_Steps, steps)
    prefill, decode = _make_steps(model)
    number = next(_numbers)
    compiled = (
        torch.compile(_own_code(prefill, number), **wanted),
        torch.compile(_own_code(decode, number), **wanted),
    )
    kept.items.append((wanted, compiled))
    return compiled


def _own_code(function: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
    # Dynamo keeps compiled graphs, recompile counts and the sizes it has seen by code object and
    # by name: two models that share one would make each other's shapes dynamic and use up each
    # other's recompiles.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def _make_steps(model: Any) -> _Steps:
    """Two functions `(model, inputs, state, mask) -> logits [B, V]`, so that the shapes of prefill
    do not make those of decode dynamic. The model is an argument, because then Dynamo names its
    layers as the user does."""
    state_name = cache_argument(model.forward)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(model: Any, inputs: PagedInputs, state: Any, mask: Tensor | None) -> Tensor:
        if state is not None:
            # Left padded: the newest token of every row is in the last column.
            extra = {state_name: state, "attention_mask": mask}
            return _logits(model, inputs, **extra)[:, -1]
        if keeps:
            return _logits(model, inputs, logits_to_keep=inputs.last_rows)[0]
        return _logits(model, inputs)[0, inputs.last_rows]

    def decode(model: Any, inputs: PagedInputs, state: Any, mask: Tensor | None) -> Tensor:
        extra = {} if state is None else {state_name: state}
        logits = _logits(model, inputs, **extra)
        return logits.reshape(-1, logits.shape[-1])

    return prefill, decode


def _logits(model: Any, inputs: PagedInputs, **extra: Any) -> Tensor:
    logits: Tensor = model(**forward_arguments(inputs), **extra).logits
    return logits


def forward_arguments(inputs: PagedInputs) -> dict[str, Any]:
    """The keyword arguments with which a model on `fusion_paged` is called for `inputs`.

    For those who call the model, or `fusion.explain`, themselves. `inputs.token_ids` must have been
    filled; models with recurrent layers also need their cache and the padding mask.
    """
    return {
        "input_ids": inputs.token_ids,
        "position_ids": inputs.positions,
        "paged_kv": inputs,
        "use_cache": False,
        "return_dict": True,
    }


def _prepare_state(model: Any, cache: PagedKVCache, rows: int) -> Any:
    """The states of the recurrent layers for `rows` rows, zeroed, or None.

    transformers allocates them in the first forward. That is done here, eagerly, in a forward
    that writes nothing, so that the compiled steps find them at their final address.
    """
    state, fresh = cache.state(model, rows)
    if state is None:
        return None
    if fresh:
        _, decode = _make_steps(model)
        inputs = cache.inputs([None] * rows, 1, padded=True)
        inputs.token_ids.zero_()
        decode(model, inputs, state, None)
    state.reset()
    return state
