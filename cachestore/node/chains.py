"""Chains of a node's entries, as leases name them: by their deepest block.

A chain that was leased is kept as arrays, since following 2,000 parents through the books costs more than the lease.
What is kept is used only while every entry is where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from cachestore.entries import Key
from cachestore.node.books import Region, Stored
from cachestore.node.states import VISIBLE, State
from cachestore.spans import pack_entry

KEPT_ENTRIES_MAX = 1 << 18  # of all kept chains together; about 120 bytes each


class Books(Protocol):
    """The node's core, as far as it is looked at."""

    def entry(self, key: Key) -> Stored | None: ...


@dataclass(slots=True)
class _Chain:
    """Every entry from where the node's unbroken run begins to one block, shallowest first."""

    entries: list[Stored]
    regions: list[tuple[Region, ...]]  # when `packed` was made
    packed: list[bytes]
    states: list[State]  # when it was last looked at

    def holds(self) -> bool:
        """Whether its entries are still here, where they were. Lists of the same objects compare at once."""
        states = [e.state for e in self.entries]
        if states != self.states:
            if any(state is State.LEAVING for state in states):
                return False
            self.states = states
        return [e.regions for e in self.entries] == self.regions


class Chains:
    """Loop thread only. `pool`: the arena's id, as readers name it."""

    def __init__(self, books: Books, pool: int) -> None:
        self._books, self._pool = books, pool
        self._kept: OrderedDict[Key, _Chain] = OrderedDict()
        self._num_entries = 0

    def find(self, last: Key, first: int, count: int) -> tuple[list[Stored], list[bytes]] | None:
        """Blocks [first, first + count) of the chain that ends with `last`, with each one's packed spans; nothing
        packed of one that is on disk only. None where one of them is not here."""
        chain = self._chain(last)
        if chain is None:
            return None
        skip = len(chain.entries) - count
        if count <= 0 or skip < 0 or chain.entries[skip].offer.depth != first:
            return None
        return chain.entries[skip:], chain.packed[skip:]

    def single(self, key: Key) -> tuple[Stored, bytes] | None:
        """One entry that rests on no chain of its own kind: a snapshot."""
        entry = self._books.entry(key)
        return (entry, self._pack(entry)) if entry is not None and entry.state in VISIBLE else None

    def _chain(self, last: Key) -> _Chain | None:
        """The chain down from `last`: kept, or what is kept of it and its new end."""
        kept = self._use(last)
        if kept is not None:
            return kept
        walked: list[Stored] = []
        at: Key | None = last
        while at is not None and (kept := self._use(at)) is None:
            entry = self._books.entry(at)
            if entry is None or entry.state not in VISIBLE:
                break
            walked.append(entry)
            at = entry.offer.parent
        if not walked:
            return None
        walked.reverse()
        before = kept or _Chain([], [], [], [])
        chain = _Chain(
            [*before.entries, *walked],
            [*before.regions, *(e.regions for e in walked)],
            [*before.packed, *map(self._pack, walked)],
            [*before.states, *(e.state for e in walked)],
        )
        self._keep(last, chain)
        return chain

    def _use(self, last: Key) -> _Chain | None:
        chain = self._kept.get(last)
        if chain is None:
            return None
        if chain.holds() and not self._here(chain.entries[0].offer.parent):
            self._kept.move_to_end(last)
            return chain
        self._drop(last)
        return None

    def _here(self, key: Key | None) -> bool:
        """Whether a chain goes on below its first entry: what was missing there may have come since."""
        entry = self._books.entry(key) if key is not None else None
        return entry is not None and entry.state in VISIBLE

    def _keep(self, last: Key, chain: _Chain) -> None:
        self._kept[last] = chain
        self._num_entries += len(chain.entries)
        while self._num_entries > KEPT_ENTRIES_MAX and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, last: Key) -> None:
        self._num_entries -= len(self._kept.pop(last).entries)

    def _pack(self, entry: Stored) -> bytes:
        return pack_entry(self._pool, [(r.offset, r.length, r.xxh3) for r in entry.regions])
