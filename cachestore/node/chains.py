"""Chains of a node's entries, as leases name them: by their deepest block.

A chain that was leased is kept as arrays, since following 2,000 parents through the books costs more than the lease.
What is kept is used only while every entry is where it was.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cachestore.entries import Key
from cachestore.node.books import Region, Stored
from cachestore.node.states import VISIBLE, State
from cachestore.spans import pack_entry

KEPT_ENTRIES_MAX = 1 << 18  # of all kept chains together; about 150 bytes each


class Books(Protocol):
    """The node's core, as far as it is looked at. `moves` changes when an entry leaves or goes elsewhere."""

    @property
    def moves(self) -> int: ...

    def entry(self, key: Key) -> Stored | None: ...


class Found(NamedTuple):
    """Entries with each one's packed spans, nothing packed of one that is on disk only; `spans`: all of them packed,
    nothing where one is on disk only. Not to be changed."""

    entries: list[Stored]
    packed: list[bytes]
    spans: bytes


@dataclass(slots=True)
class _Chain:
    """Every entry from where the node's unbroken run begins to one block, shallowest first."""

    found: Found
    regions: list[tuple[Region, ...]]  # when they were packed
    states: list[State]  # when it was last looked at
    moves: int  # of the books, then

    first_parent: Key | None  # of the shallowest

    def holds(self, moves: int) -> bool:
        """Whether its entries are still here, where they were. Lists of the same objects compare at once."""
        if moves == self.moves:
            return True
        states = [e.state for e in self.found.entries]
        if states != self.states:
            if any(state is State.LEAVING for state in states):
                return False
            self.states = states
        if [e.regions for e in self.found.entries] != self.regions:
            return False
        self.moves = moves
        return True


class Chains:
    """Loop thread only. `pool`: the arena's id, as readers name it."""

    def __init__(self, books: Books, pool: int) -> None:
        self._books, self._pool = books, pool
        self._kept: OrderedDict[Key, _Chain] = OrderedDict()
        self._num_entries = 0

    def find(self, last: Key, first: int, count: int) -> Found | None:
        """Blocks [first, first + count) of the chain that ends with `last`. None where one of them is not here."""
        chain = self._kept.get(last)
        if chain is not None and chain.first_parent is None and chain.moves == self._books.moves:
            self._kept.move_to_end(last)  # as most often: nothing has moved, and there is nothing above it
        else:
            chain = self._chain(last)
        if chain is None:
            return None
        entries, packed, _ = chain.found
        skip = len(entries) - count
        if count <= 0 or skip < 0 or entries[skip].offer.depth != first:
            return None
        return _joined(entries[skip:], packed[skip:]) if skip else chain.found

    def single(self, key: Key) -> Found | None:
        """One entry that rests on no chain of its own kind: a snapshot."""
        entry = self._books.entry(key)
        if entry is None or entry.state not in VISIBLE:
            return None
        packed = self._pack(entry)
        return Found([entry], [packed], packed)

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
        before = kept or _Chain(Found([], [], b""), [], [], 0, walked[0].offer.parent)
        chain = _Chain(
            _joined([*before.found.entries, *walked], [*before.found.packed, *map(self._pack, walked)]),
            [*before.regions, *(e.regions for e in walked)],
            [*before.states, *(e.state for e in walked)],
            self._books.moves,
            before.first_parent,
        )
        self._keep(last, chain)
        return chain

    def _use(self, last: Key) -> _Chain | None:
        chain = self._kept.get(last)
        if chain is None:
            return None
        if chain.holds(self._books.moves) and not self._here(chain.first_parent):
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
        self._num_entries += len(chain.found.entries)
        while self._num_entries > KEPT_ENTRIES_MAX and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, last: Key) -> None:
        self._num_entries -= len(self._kept.pop(last).found.entries)

    def _pack(self, entry: Stored) -> bytes:
        return pack_entry(self._pool, [(r.offset, r.length, r.xxh3) for r in entry.regions])


def _joined(entries: list[Stored], packed: list[bytes]) -> Found:
    return Found(entries, packed, b"" if b"" in packed else b"".join(packed))
