"""The book of kept bundles, against a naive one, in any order of keeping, using and evicting."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.worker.bundles import Bundles
from moonrelay.errors import InvariantError

ROOT = b"r" * 16
CHAINS = ["".join(c) for c in ("aaaaaa", "aaabbb", "aaab", "abcd", "ba", "bab", "c")]


def hashes_of(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


@dataclass
class Naive:
    """Kept names with what they hold, and two lists, oldest first."""

    blocks: dict[bytes, int] = field(default_factory=dict)
    slots: dict[bytes, int] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    slot_order: list[bytes] = field(default_factory=list)

    def path(self, hashes: list[bytes]) -> list[bytes]:
        depth = next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))
        return hashes[:depth]

    def use(self, path: list[bytes]) -> None:
        self.order = [h for h in self.order if h not in path] + path[::-1]

    def leaf(self, name: bytes) -> bool:
        return not any(other[:-1] == name for other in self.blocks)


class Book(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book, self.naive = Bundles(blocks_max=9, slots_max=4), Naive()
        self.next_block, self.next_slot = 0, 0
        self.busy_blocks: set[int] = set()
        self.busy_slots: set[int] = set()

    @rule(text=st.sampled_from(CHAINS), depths=st.sets(st.integers(1, 6)))
    def keep(self, text: str, depths: set[int]) -> None:
        hashes = hashes_of(text)
        first = self.book.depth(hashes)
        assert first == len(self.naive.path(hashes))
        new = []
        for name in hashes[first:]:
            new.append((self.next_block, self.next_block * 7))
            self.naive.blocks[name] = self.next_block
            self.next_block += 1
        self.book.keep(ROOT, hashes, first, new)
        self.naive.use(hashes)
        for depth in sorted(depths):
            if depth <= len(hashes):
                added = self.book.keep_snapshot(hashes[depth - 1], self.next_slot)
                assert added == (hashes[depth - 1] not in self.naive.slots)
                if added:
                    self.naive.slots[hashes[depth - 1]] = self.next_slot
                    self.naive.slot_order.append(hashes[depth - 1])
                self.next_slot += 1

    @rule(text=st.sampled_from(CHAINS), state=st.booleans())
    def find(self, text: str, state: bool) -> None:
        path = self.naive.path(hashes_of(text))
        while state and path and path[-1] not in self.naive.slots:
            path.pop()
        found = self.book.find(hashes_of(text), state=state)
        assert (found is None) == (not path)
        if found is None:
            return
        assert found.blocks == tuple(self.naive.blocks[h] for h in path)
        assert found.xxh3 == tuple(block * 7 for block in found.blocks)
        assert found.slot == (self.naive.slots[path[-1]] if state else None)
        self.naive.use(path)
        if state:
            self.naive.slot_order.remove(path[-1])
            self.naive.slot_order.append(path[-1])

    @rule(blocks=st.integers(0, 4), slots=st.integers(0, 2))
    def evict(self, blocks: int, slots: int) -> None:
        self._evict(blocks, slots, self.busy_blocks, self.busy_slots)

    @rule()
    def trim(self) -> None:
        over = len(self.naive.blocks) - 9, len(self.naive.slots) - 4
        want = self._expected(*over, set(), set())
        self._took(self.book.trim(), want)

    @precondition(lambda self: self.naive.blocks)
    @rule(data=st.data())
    def somebody_begins_or_stops_using(self, data: st.DataObject) -> None:
        self.busy_blocks ^= {data.draw(st.sampled_from(sorted(self.naive.blocks.values())))}
        if self.naive.slots:
            self.busy_slots ^= {data.draw(st.sampled_from(sorted(self.naive.slots.values())))}

    @invariant()
    def holds(self) -> None:
        self.book.check()
        assert set(self.book.blocks) == set(self.naive.blocks.values())
        assert set(self.book.slots) == set(self.naive.slots.values())

    def _evict(self, blocks: int, slots: int, busy_blocks: set[int], busy_slots: set[int]) -> None:
        out = self.book.evict(
            blocks=blocks, slots=slots,
            free_block=lambda b: b not in busy_blocks, free_slot=lambda s: s not in busy_slots,
        )  # fmt: skip
        self._took(out, self._expected(blocks, slots, busy_blocks, busy_slots))

    def _expected(self, blocks: int, slots: int, busy_blocks: set[int], busy_slots: set[int]):
        """Names of blocks and snapshots that go, taken out one at a time; None where there are too few."""
        for take_busy in (False, True):
            left, gone, want = Naive(dict(self.naive.blocks)), [], blocks
            for name in self.naive.order:
                busy = self.naive.blocks[name] in busy_blocks
                if want > 0 and left.leaf(name) and (take_busy or not busy):
                    del left.blocks[name]
                    gone.append(name)
                    want -= not busy
            if want <= 0:
                break
        freed = sum(n in self.naive.slots and self.naive.slots[n] not in busy_slots for n in gone)
        bare = []
        for name in self.naive.slot_order:
            if freed < slots and name not in gone and self.naive.slots[name] not in busy_slots:
                bare.append(name)
                freed += 1
        return None if want > 0 or freed < slots else (gone, bare)

    def _took(self, out, want) -> None:
        assert (out is None) == (want is None)
        if want is None:
            return
        gone, bare = want
        snapshots = bare + [name for name in gone if name in self.naive.slots]
        assert out.blocks == [self.naive.blocks[name] for name in gone]
        assert out.slots == [self.naive.slots[name] for name in snapshots]
        assert out.block_hashes.get(ROOT, []) == gone and out.snapshot_hashes.get(ROOT, []) == snapshots
        for name in gone:
            del self.naive.blocks[name]
        for name in snapshots:
            del self.naive.slots[name]
        self.naive.order = [n for n in self.naive.order if n not in gone]
        self.naive.slot_order = [n for n in self.naive.slot_order if n not in snapshots]


Book.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBook = Book.TestCase


def test_a_chain_is_kept_only_where_it_goes_on():
    book = Bundles(blocks_max=9, slots_max=9)
    with pytest.raises(InvariantError):
        book.keep(ROOT, hashes_of("abc"), 1, [(1, None), (2, None)])
    book.keep(ROOT, hashes_of("abc"), 0, [(0, None), (1, None), (2, None)])
    with pytest.raises(InvariantError):
        book.keep(ROOT, hashes_of("abc"), 0, [(3, None), (4, None), (5, None)])
    assert not book.keep_snapshot(b"abd", 1)


def test_drafter_rows_are_known_block_by_block():
    book = Bundles(blocks_max=8, slots_max=2)
    hashes = hashes_of("abcd")
    book.keep(b"r", hashes[:3], 0, [(0, None), (1, None), (2, None)], drafted_from=2)
    assert book.find(hashes, state=False).drafted_from == 2
    assert book.find(hashes[:2], state=False).drafted_from == 2  # of two none has them
    book.keep(b"r", hashes, 3, [(3, None)], drafted_from=0)
    assert book.find(hashes, state=False).drafted_from == 2
    book.keep(b"r", hashes_of("xy"), 0, [(4, None), (5, None)])
    assert book.find(hashes_of("xy"), state=False).drafted_from == 0
