"""The block allocator: unit tests, and a stateful model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

pytest.importorskip("transformers")

from fusion.integrations.transformers import BlockAllocator, OutOfBlocks


def test_slots_run_through_the_blocks_of_a_sequence() -> None:
    allocator = BlockAllocator(4, 3)
    first = allocator.allocate(2)
    second = allocator.allocate(4)
    assert allocator.append(first, 3).slots == tuple(allocator.slots(first)[2:])
    blocks = allocator.blocks(first)
    assert allocator.slots(first) == tuple(blocks[i // 3] * 3 + i % 3 for i in range(5))
    assert len(allocator.blocks(second)) == 2
    assert allocator.free_blocks == 0


def test_out_of_blocks_says_what_is_missing_and_changes_nothing() -> None:
    allocator = BlockAllocator(3, 4)
    sequence = allocator.allocate(9)
    before = allocator.blocks(sequence), allocator.length(sequence), allocator.sequences
    with pytest.raises(OutOfBlocks, match="needs 2 more, 0 of 3 are free") as caught:
        allocator.append(sequence, 8)
    assert (caught.value.need, caught.value.free) == (2, 0)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    assert (allocator.blocks(sequence), allocator.length(sequence), allocator.sequences) == before
    assert allocator.append(sequence, 3).slots[-1] == allocator.slots(sequence)[-1]


def test_a_fork_copies_a_block_only_when_it_is_written() -> None:
    allocator = BlockAllocator(6, 4)
    parent = allocator.allocate(6)
    child = allocator.fork(parent)
    assert allocator.free_blocks == 4
    full, half = allocator.blocks(parent)
    done = allocator.append(child, 1)
    assert [source for source, _ in done.copies] == [half]
    assert allocator.blocks(child)[0] == full
    assert allocator.blocks(child)[1] == done.copies[0][1] != half
    # The parent is alone with its half block again: no second copy.
    assert allocator.append(parent, 1).copies == ()
    assert allocator.references(full) == 2
    allocator.free(parent)
    assert allocator.references(full) == 1
    allocator.free(child)
    assert allocator.free_blocks == 6


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    allocator = BlockAllocator(6, 4)
    parent = allocator.allocate(8)
    child = allocator.fork(parent)
    assert allocator.append(child, 1).copies == ()
    assert allocator.append(parent, 1).copies == ()
    assert allocator.blocks(parent)[:2] == allocator.blocks(child)[:2]
    assert allocator.blocks(parent)[2] != allocator.blocks(child)[2]


def test_a_copy_that_does_not_fit_is_out_of_blocks() -> None:
    allocator = BlockAllocator(1, 4)
    parent = allocator.allocate(2)
    child = allocator.fork(parent)
    with pytest.raises(OutOfBlocks):
        allocator.append(child, 1)
    assert allocator.blocks(child) == allocator.blocks(parent)
    allocator.free(child)
    assert allocator.append(parent, 1).copies == ()


def test_truncate_returns_blocks_and_protects_shared_ones() -> None:
    allocator = BlockAllocator(5, 4)
    parent = allocator.allocate(8)
    child = allocator.fork(parent)
    allocator.truncate(child, 5)
    assert allocator.free_blocks == 3
    # The second block is full for the parent; the child is about to write into it.
    done = allocator.append(child, 1)
    assert done.copies[0][0] == allocator.blocks(parent)[1]
    with pytest.raises(ValueError, match="cannot be cut to 9"):
        allocator.truncate(child, 9)


def test_the_cost_of_many_counts_shared_blocks_once_too_often_for_nobody() -> None:
    allocator = BlockAllocator(9, 4)
    parent = allocator.allocate(2)
    children = [allocator.fork(parent), allocator.fork(parent)]
    for group, copies in (([parent], 1), (children, 2), ([parent, *children], 2)):
        assert allocator.cost([(s, 1) for s in group]) == copies
    free = allocator.free_blocks
    for sequence in (parent, *children):
        allocator.append(sequence, 1)
    assert free - allocator.free_blocks == 2


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 1)])
def test_sizes_below_one_are_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(blocks, size)


def test_unknown_sequences_are_named() -> None:
    allocator = BlockAllocator(2, 2)
    sequence = allocator.allocate(1)
    allocator.free(sequence)
    with pytest.raises(KeyError, match=f"no sequence {sequence}"):
        allocator.append(sequence, 1)
    with pytest.raises(KeyError):
        allocator.free(sequence)


class AllocatorMachine(RuleBasedStateMachine):
    """Writes a token of its own into every slot that it is given and checks that each sequence
    reads back what it wrote, whatever was forked, truncated and freed in between."""

    sequences = Bundle("sequences")

    @rule(blocks=st.integers(1, 7), size=st.integers(1, 4))
    @precondition(lambda self: not hasattr(self, "allocator"))
    def build(self, blocks: int, size: int) -> None:
        self.allocator = BlockAllocator(blocks, size)
        self.memory: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.tokens = 0

    def state(self) -> object:
        a = self.allocator
        books = {s: (a.blocks(s), a.length(s)) for s in a.sequences}
        return books, a.free_blocks, [a.references(b) for b in range(a.num_blocks)]

    def write(self, sequence: int, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self.tokens += 1
            self.memory[slot] = self.tokens
            self.written[sequence].append(self.tokens)

    @precondition(lambda self: hasattr(self, "allocator"))
    @rule(target=sequences, tokens=st.integers(0, 9))
    def allocate(self, tokens: int) -> int | None:
        before = self.state()
        need = self.allocator.blocks_for(tokens)
        if need > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(tokens)
            assert self.state() == before
            return None
        sequence = self.allocator.allocate(tokens)
        self.written[sequence] = []
        self.write(sequence, self.allocator.slots(sequence))
        return sequence

    @precondition(lambda self: hasattr(self, "allocator"))
    @rule(sequence=sequences, tokens=st.integers(0, 6))
    def append(self, sequence: int | None, tokens: int) -> None:
        if sequence is None or sequence not in self.written:
            return
        before, need = self.state(), self.allocator.cost([(sequence, tokens)])
        free = self.allocator.free_blocks
        if need > free:
            with pytest.raises(OutOfBlocks):
                self.allocator.append(sequence, tokens)
            assert self.state() == before
            return
        done = self.allocator.append(sequence, tokens)
        assert free - self.allocator.free_blocks == need
        size = self.allocator.block_size
        for source, destination in done.copies:
            for offset in range(size):
                if source * size + offset in self.memory:
                    copied = self.memory[source * size + offset]
                    self.memory[destination * size + offset] = copied
        assert len(done.slots) == tokens
        self.write(sequence, done.slots)

    @precondition(lambda self: hasattr(self, "allocator"))
    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int | None) -> int | None:
        if sequence is None or sequence not in self.written:
            return None
        new = self.allocator.fork(sequence)
        self.written[new] = list(self.written[sequence])
        return new

    @precondition(lambda self: hasattr(self, "allocator"))
    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int | None, share: float) -> None:
        if sequence is None or sequence not in self.written:
            return
        length = int(share * self.allocator.length(sequence))
        self.allocator.truncate(sequence, length)
        del self.written[sequence][length:]

    @precondition(lambda self: hasattr(self, "allocator"))
    @rule(sequence=consumes(sequences))
    def free(self, sequence: int | None) -> None:
        if sequence is None or sequence not in self.written:
            return
        self.allocator.free(sequence)
        del self.written[sequence]

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        if not hasattr(self, "allocator"):
            return
        assert set(self.allocator.sequences) == set(self.written)
        for sequence, tokens in self.written.items():
            assert [self.memory[s] for s in self.allocator.slots(sequence)] == tokens

    @invariant()
    def no_block_is_lost_or_counted_wrongly(self) -> None:
        if not hasattr(self, "allocator"):
            return
        a = self.allocator
        used: dict[int, int] = {}
        for sequence in a.sequences:
            blocks = a.blocks(sequence)
            assert len(set(blocks)) == len(blocks) == a.blocks_for(a.length(sequence))
            for block in blocks:
                used[block] = used.get(block, 0) + 1
        assert all(a.references(b) == used.get(b, 0) for b in range(a.num_blocks))
        assert a.free_blocks + len(used) == a.num_blocks


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
