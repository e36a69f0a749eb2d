"""Drafter rows in a node's books: a part of a block's entry that may be missing, and that newer rows replace.

Nothing here ever makes a block unusable. Rows get memory beside a block that is in memory already, and leave with it.
Those that are replaced stay until whoever was told of them has finished: leases older than the replacement, and a
file's write that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachestore.entries import BLOCK, DraftOffer, Key
from cachestore.node.allocator import Extent
from cachestore.node.books import DraftRows, Region, Stored
from cachestore.node.ledger import Ledger
from cachestore.node.states import IN_MEMORY
from cachestore.spans import ARENA_POOL, pack_entry
from moonrelay.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAdmission:
    """What became of offered drafter rows. `new` have memory; `refused`: no room, no block, or others are landing."""

    new: tuple[Key, ...] = ()
    already_there: tuple[Key, ...] = ()
    refused: tuple[Key, ...] = ()


class DraftLedger(Ledger):
    """Taking in drafter rows for blocks that are in memory."""

    def missing_draft_bytes(self, offers: Iterable[DraftOffer]) -> int:
        """How much more must be free for all rows that would be taken."""
        return self._missing(offer.nbytes for offer in offers if self._takes(offer))

    def admit_drafts(self, offers: Iterable[DraftOffer]) -> DraftAdmission:
        """Give memory to the rows of every block that has none, or another drafter's, as far as there is room."""
        new: list[Key] = []
        already: list[Key] = []
        refused: list[Key] = []
        for offer in offers:
            entry = self._entries.get(offer.key)
            if entry is not None and entry.draft is not None and _same(entry.draft, offer):
                already.append(offer.key)
            elif not self._takes(offer) or (extents := self._pages.allocate(offer.nbytes)) is None:
                refused.append(offer.key)
            else:
                self._drafts_landing[offer.key] = (offer, extents)
                new.append(offer.key)
        return DraftAdmission(new=tuple(new), already_there=tuple(already), refused=tuple(refused))

    def draft_extents(self, key: Key) -> tuple[Extent, ...]:
        """Where rows that were admitted are to land."""
        return self._drafts_landing[key][1]

    def commit_draft(self, key: Key, regions: Sequence[Region]) -> bool:
        """The rows are there and verified; False where their block left memory meanwhile, and they with it."""
        offer, extents = self._drafts_landing.pop(key)
        if sum(r.length for r in regions) != offer.nbytes:
            raise InvariantError("drafter rows: their regions do not add up to their bytes")
        entry = self._entries.get(key)
        if entry is None or entry.state not in IN_MEMORY:
            self._pages.free(extents)
            return False
        self._set_draft(entry, _rows(offer.drafter, extents, regions))
        return True

    def abort_drafts(self, keys: Iterable[Key]) -> None:
        """The rows did not come, and nothing can land any more."""
        for key in keys:
            self._pages.free(self._drafts_landing.pop(key)[1])

    def quarantine_drafts(self, keys: Iterable[Key]) -> int:
        """The rows did not come, but our own read may still write there; free with `release_quarantine`."""
        number = self._leases.next_fence()
        self._quarantine[number] = tuple(e for key in keys for e in self._drafts_landing.pop(key)[1])
        return number

    def drop_draft(self, key: Key) -> None:
        """An entry's rows in memory went bad."""
        entry = self._entries.get(key)
        if entry is not None and entry.state in IN_MEMORY:
            self._set_draft(entry, None)

    def _bring_draft(self, entry: Stored, regions: Sequence[Region]) -> bool:
        """An entry came from disk, and its rows with it; False where they did not, and are not to be used."""
        draft = entry.draft
        if draft is None:
            return True
        if regions:
            entry.draft = _rows(draft.drafter, draft.extents, regions)
            return True
        entry.draft = None
        self._pages.free(draft.extents)
        self._retention.resize(entry.offer.key, entry.nbytes)
        self._file_anew(entry)
        return False

    def _takes(self, offer: DraftOffer) -> bool:
        entry = self._entries.get(offer.key)
        if entry is None or entry.state not in IN_MEMORY or entry.offer.key.kind != BLOCK:
            return False
        if offer.key in self._drafts_landing:
            return False
        return entry.draft is None or not _same(entry.draft, offer)


def _same(rows: DraftRows, offer: DraftOffer) -> bool:
    """Another length under the same name is another drafter's work."""
    return (rows.drafter, rows.nbytes) == (offer.drafter, offer.nbytes)


def _rows(drafter: str, extents: tuple[Extent, ...], regions: Sequence[Region]) -> DraftRows:
    packed = pack_entry(ARENA_POOL, [(r.offset, r.length, r.xxh3) for r in regions])
    return DraftRows(drafter, extents, tuple(regions), packed)
