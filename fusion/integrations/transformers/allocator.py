"""Which blocks of a paged KV cache belong to which sequence.

Pure bookkeeping on Python integers: no tensor is touched here. A *block* holds `block_size`
consecutive tokens of one sequence in every layer; a *slot* is `block * block_size + offset`.
Sequences that were forked share their blocks by reference count. A shared block that is full is
never written again and stays shared; a shared block that is written next is copied first
(copy-on-write), which the caller is told through :attr:`Append.copies`.

Every method either does all of its work or raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a request needs. Nothing was changed.

    `need` and `free` are numbers of blocks.
    """

    def __init__(self, need: int, free: int, total: int, what: str) -> None:
        self.need, self.free, self.total = need, free, total
        super().__init__(
            f"the paged KV cache is out of blocks: {what} needs {need} more, {free} of {total} "
            "are free; free a sequence or build the cache with a larger num_blocks"
        )


@dataclass(frozen=True)
class Append:
    """What one `append` did.

    `slots` are the slots of the new tokens in order; `copies` lists `(source, destination)`
    blocks whose contents must be copied before those slots are written.
    """

    slots: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass
class _Sequence:
    blocks: list[int]
    length: int


class BlockAllocator:
    """Hands out the blocks `0 .. num_blocks-1`, each holding `block_size` tokens.

    Raises `ValueError` for sizes below one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: the block that was freed last is the warmest one.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def free_blocks(self) -> int:
        """How many blocks no sequence uses."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of all living sequences, oldest first."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """The number of tokens of `sequence`; `KeyError` for an unknown id (as everywhere)."""
        return self._get(sequence).length

    def blocks(self, sequence: int) -> tuple[int, ...]:
        """The blocks of `sequence` in token order."""
        return tuple(self._get(sequence).blocks)

    def references(self, block: int) -> int:
        """How many sequences use `block`."""
        return self._references[block]

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens of one sequence occupy."""
        return -(-tokens // self.block_size)

    def allocate(self, tokens: int = 0) -> int:
        """Start a sequence with room for `tokens` tokens; returns its id.

        Raises :class:`OutOfBlocks` (and starts nothing) where they do not fit.
        """
        sequence = self._next
        self._sequences[sequence] = _Sequence([], 0)
        try:
            self.append(sequence, tokens)
        except Exception:
            del self._sequences[sequence]
            raise
        self._next += 1
        return sequence

    def cost(self, requests: Sequence[tuple[int, int]]) -> int:
        """How many free blocks appending to several sequences takes, copies included.

        `requests` are pairs `(sequence, tokens)`, each sequence at most once. The last of the
        sequences that share a block keeps it, so that this may be less than the sum.
        """
        need = 0
        writers: dict[int, int] = {}
        for sequence, tokens in requests:
            state = self._get(sequence)
            if tokens < 0:
                raise ValueError(f"tokens must not be negative, got {tokens}")
            need += self.blocks_for(state.length + tokens) - len(state.blocks)
            if tokens and self._writes_shared(state):
                writers[state.blocks[-1]] = writers.get(state.blocks[-1], 0) + 1
        return need + sum(
            min(count, self._references[block] - 1) for block, count in writers.items()
        )

    def append(self, sequence: int, tokens: int = 1) -> Append:
        """Make `sequence` longer by `tokens` tokens.

        Raises :class:`OutOfBlocks`, leaving everything as it was, where the pool is too small.
        """
        state = self._get(sequence)
        need = self.cost([(sequence, tokens)])
        if need > len(self._free):
            what = f"appending {tokens} tokens to sequence {sequence} of {state.length}"
            raise OutOfBlocks(need, len(self._free), self.num_blocks, what)
        copies: list[tuple[int, int]] = []
        if tokens and self._writes_shared(state):
            old, new = state.blocks[-1], self._take()
            self._references[old] -= 1
            state.blocks[-1] = new
            copies.append((old, new))
        start, state.length = state.length, state.length + tokens
        while len(state.blocks) < self.blocks_for(state.length):
            state.blocks.append(self._take())
        return Append(self._slots(state, start), tuple(copies))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of `sequence` from `length` on (rejected drafts, say).

        Raises `ValueError` where `length` is not between zero and the present length.
        """
        state = self._get(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(
                f"sequence {sequence} has {state.length} tokens: it cannot be cut to {length}"
            )
        keep = self.blocks_for(length)
        for block in state.blocks[keep:]:
            self._drop(block)
        del state.blocks[keep:]
        state.length = length

    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens, sharing all blocks. Takes no block."""
        state = self._get(sequence)
        for block in state.blocks:
            self._references[block] += 1
        new, self._next = self._next, self._next + 1
        self._sequences[new] = _Sequence(list(state.blocks), state.length)
        return new

    def free(self, sequence: int) -> None:
        """End `sequence`; its blocks go back to the pool unless another one shares them."""
        state = self._get(sequence)
        for block in reversed(state.blocks):
            self._drop(block)
        del self._sequences[sequence]

    def slots(self, sequence: int, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The slots of the tokens `start .. stop-1` of `sequence`."""
        return self._slots(self._get(sequence), start, stop)

    def _slots(self, state: _Sequence, start: int, stop: int | None = None) -> tuple[int, ...]:
        size = self.block_size
        stop = state.length if stop is None else min(stop, state.length)
        return tuple(state.blocks[i // size] * size + i % size for i in range(start, stop))

    def _writes_shared(self, state: _Sequence) -> bool:
        # Only a block that is not full yet is written by the next token.
        return state.length % self.block_size != 0 and self._references[state.blocks[-1]] > 1

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)

    def _get(self, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise KeyError(f"no sequence {sequence} in this cache (was it freed?)") from None
