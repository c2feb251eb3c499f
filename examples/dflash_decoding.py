"""The loop of greedy speculative decoding: draft, verify, accept, take back, repeat.

Target and drafter each have a paged cache, in which a sequence has the same length whenever a round
begins: all tokens but the newest. In a round, for a block of S tokens,

* the drafter's cache gets the context of the tokens that the round before accepted, and S slots for
  the block, which are given back as soon as the block is drafted;
* the target's cache gets S slots for the block, and those of rejected tokens are given back.

All rounds have the same shapes, also when rows are over, so that each step is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from dflash_drafter import DFlashDrafter, PagedAttend, features_of
from torch import Tensor, nn

import fusion
from fusion.integrations.transformers import PagedInputs, PagedKVCache, forward_arguments

# The compiled steps. Models are arguments, so that Dynamo names layers as the user does.


def prefill(target: Any, layers: Sequence[int], inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Read the prompts; the first new token of each `[B]` and the features `[1, T, n*H]`."""
    out = target(**forward_arguments(inputs), output_hidden_states=True)
    return out.logits[0, inputs.last_rows].argmax(-1), features_of(out.hidden_states, layers)


def draft(
    drafter: DFlashDrafter,
    embed: nn.Module,
    head: nn.Module,
    features: Tensor,
    feature_positions: Tensor,
    feature_slots: Tensor,
    inputs: PagedInputs,
) -> Tensor:
    """Add features to the drafter's context and draft one block: `[B, block - 1]` tokens."""
    attend = PagedAttend(inputs, feature_slots)
    # The bare weight: some targets' embedding modules also scale, which the drafter does itself.
    block = F.embedding(inputs.token_ids, embed.weight)
    out = drafter(block, inputs.positions, features, feature_positions, attend)
    # The first token of each block is known.
    return head(out.view(-1, drafter.block_size, out.shape[-1])[:, 1:]).argmax(-1)


def verify(target: Any, layers: Sequence[int], inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """What the target says after each token of the blocks `[T]`, and the features."""
    out = target(**forward_arguments(inputs), output_hidden_states=True)
    return out.logits[0].argmax(-1), features_of(out.hidden_states, layers)


def accept(drafted: Sequence[int], said: Sequence[int]) -> list[int]:
    """The new tokens of one sequence: the drafted ones that the target says too, and one more.

    `drafted` are the K tokens after the block's first one, `said` what the target says after
    each of the K+1 tokens of the block.
    """
    agreed = 0
    while agreed < len(drafted) and drafted[agreed] == said[agreed]:
        agreed += 1
    return [*drafted[:agreed], said[agreed]]


@dataclass
class Result:
    """New tokens of each prompt, and how many tokens each of its rounds gave."""

    tokens: list[list[int]]
    rounds: list[list[int]]


@dataclass
class Step:
    """A function, compiled or not, and the reports of its compilations."""

    name: str
    run: Callable[..., Any]
    reports: list[fusion.Report] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        """Run it, and keep what fusion has to say if this compiled something."""
        out = self.run(*args)
        self.reports += fusion.reports(clear=True)
        return out


class Speculator:
    """Target and drafter with their caches, and the loop around them.

    The caches have room for `rows` sequences of `longest` tokens (prompt and new ones) in pages of
    `page_size`. `compile` holds arguments of `torch.compile`; None runs eagerly. The target must be
    on attention implementation "fusion_paged".
    """

    def __init__(
        self,
        target: Any,
        drafter: DFlashDrafter,
        rows: int,
        longest: int,
        page_size: int = 16,
        layout: str = "packed",
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.embed, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        # A round writes a whole block, also where only one token is missing.
        pages = rows * -(-(longest + drafter.block_size) // page_size)
        self.target_cache, self.drafter_cache = (
            PagedKVCache.for_model(model, pages, page_size, layout=layout)
            for model in (target, drafter)
        )

        # transformers prepares to record hidden states in the first forward that asks for them,
        # which Dynamo cannot trace: a forward that writes nothing.
        nothing = self.target_cache.inputs([None], 1)
        with torch.no_grad():
            target(**forward_arguments(nothing), output_hidden_states=True)

        def step(name: str, function: Callable[..., Any]) -> Step:
            if compile is not None:
                function = torch.compile(function, fullgraph=True, **compile)
            return Step(name, function)

        fusion.reports(clear=True)
        self.prefill = step("target, reading the prompts", prefill)
        self.draft = step("drafter, adding context and drafting a block", draft)
        self.verify = step("target, verifying a block", verify)

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order of a round."""
        return self.prefill, self.draft, self.verify

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Result:
        """`new_tokens` (at least one) tokens for each prompt, as plain greedy decoding says."""
        size, layers = self.drafter.block_size, self.drafter.target_layers
        rows: list[int | None] = [self.target_cache.allocate() for _ in prompts]
        drafts: list[int | None] = [self.drafter_cache.allocate() for _ in prompts]
        lengths = [len(p) for p in prompts]
        inputs = self.target_cache.inputs(rows, lengths, max_query_len=None)
        _fill(inputs.token_ids, [t for p in prompts for t in p])
        first, features = self.prefill(self.target, layers, inputs)
        result = Result([[t] for t in first.tolist()], [[] for _ in prompts])
        fresh = lengths  # tokens of each row that the drafter has no context of yet
        share = lengths  # tokens of each row in `features`
        while True:
            self._retire(rows, drafts, result, new_tokens)
            if all(row is None for row in rows):
                return result
            slots = self._context_slots(drafts, fresh, share)
            newest = [tokens[-1] for tokens in result.tokens]
            drafted = self._draft(drafts, features, inputs.positions, slots, newest)

            # Features and positions of the round before are used up: new ones take their place.
            inputs = self.target_cache.inputs(rows, [size] * len(rows), max_query_len=size)
            blocks = [[token, *d] for token, d in zip(newest, drafted, strict=True)]
            _fill(inputs.token_ids, [t for block in blocks for t in block])
            said, features = self.verify(self.target, layers, inputs)
            fresh, share = [], [size] * len(rows)
            for index, (row, answer) in enumerate(
                zip(rows, said.view(-1, size).tolist(), strict=True)
            ):
                new = accept(drafted[index], answer)
                fresh.append(len(new))
                if row is None:
                    continue
                # The block's first token and the accepted ones stay. The one more is not in the
                # cache yet: it begins the next block.
                before = self.target_cache.allocator.length(row) - size
                self.target_cache.truncate(row, before + len(new))
                new = new[: new_tokens - len(result.tokens[index])]
                result.tokens[index] += new
                result.rounds[index].append(len(new))

    def _draft(
        self,
        drafts: list[int | None],
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        newest: Sequence[int],
    ) -> list[list[int]]:
        """Draft a block behind each row's `newest` token; none of it stays in the cache."""
        size, mask = self.drafter.block_size, self.drafter.mask_token_id
        inputs = self.drafter_cache.inputs(drafts, [size] * len(drafts), max_query_len=size)
        _fill(inputs.token_ids, [t for n in newest for t in (n, *[mask] * (size - 1))])
        # Prompts are longer than blocks: one graph for any number of features. (The cache uses its
        # positions tensor again, where another graph reads it: a copy is marked.)
        positions = positions.clone()
        for tensor, axis in ((features, 1), (positions, 1), (slots, 0)):
            torch._dynamo.mark_dynamic(tensor, axis)
        drafted = self.draft(
            self.drafter, self.embed, self.head, features, positions, slots, inputs
        )
        for sequence in drafts:
            if sequence is not None:
                length = self.drafter_cache.allocator.length(sequence)
                self.drafter_cache.truncate(sequence, length - size)
        rows: list[list[int]] = drafted.tolist()
        return rows

    def _context_slots(
        self, drafts: list[int | None], fresh: Sequence[int], share: Sequence[int]
    ) -> Tensor:
        """Room in the drafter's cache for the first `fresh` of each row's `share` features; the
        rest belongs to rejected tokens and is written nowhere."""
        slots: list[int] = []
        for sequence, new, all_ in zip(drafts, fresh, share, strict=True):
            kept = () if sequence is None else self.drafter_cache.append(sequence, new)
            slots += [*kept, *[-1] * (all_ - len(kept))]
        return torch.tensor(slots, device=self.drafter_cache.device)

    def _retire(
        self, rows: list[int | None], drafts: list[int | None], result: Result, new_tokens: int
    ) -> None:
        """Free what has all its tokens. The row stays in the batch, so that shapes do."""
        for index, tokens in enumerate(result.tokens):
            row, sequence = rows[index], drafts[index]
            if row is not None and sequence is not None and len(tokens) >= new_tokens:
                self.target_cache.free(row)
                self.drafter_cache.free(sequence)
                rows[index] = drafts[index] = None


def _fill(target: Tensor, values: Sequence[int]) -> None:
    target.copy_(torch.tensor(values).view(target.shape))
