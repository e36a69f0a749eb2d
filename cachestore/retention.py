"""Which entries go when room is needed. Pure; O(log n) an entry, whatever else is held.

An entry goes only when nothing rests on it and nothing pins it, so that pinning or using a chain's deepest entry is
enough for the whole chain: a parent takes over its last child's recency when that child goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from heapq import heappop, heappush

from cachestore.entries import Key, Offer
from moonrelay.errors import InvariantError


@dataclass(slots=True, eq=False)
class _Kept:
    offer: Offer
    nbytes: int
    used: int = 0  # when, on a clock that counts uses
    pins: int = 0
    shown: bool = False
    queued: bool = False


class Retention:
    """Order of leaving among entries that are landing (never leave) or shown."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._children: Counter[Key] = Counter()  # entries resting on a key, itself here or not
        self._queue: list[tuple[int, int, _Kept]] = []  # what could go; at most once, maybe used or dropped since
        self._clock = 0
        self._pushes = 0
        self._oldest = 0

    def add(self, offer: Offer, nbytes: int) -> None:
        """`nbytes` were given to an entry that is landing."""
        self._kept[offer.key] = _Kept(offer, nbytes)
        if offer.parent is not None:
            self._children[offer.parent] += 1

    def show(self, key: Key) -> None:
        """It has landed: it may go from now on."""
        kept = self._kept[key]
        kept.shown = True
        kept.used = self._tick()
        self._enqueue(key)

    def drop(self, key: Key) -> None:
        """It is not here any more, or did not come."""
        kept = self._kept.pop(key)
        parent = kept.offer.parent
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        if parent in self._kept:
            self._kept[parent].used = max(self._kept[parent].used, kept.used)
            self._enqueue(parent)

    def restore(self, offer: Offer, nbytes: int) -> None:
        """It was to go and could not: it is the first to go next time."""
        self.add(offer, nbytes)
        kept = self._kept[offer.key]
        self._oldest -= 1
        kept.shown, kept.used = True, self._oldest
        self._enqueue(offer.key)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark entries, and so what they rest on, as used now; the deeper, the sooner they go again."""
        here = [kept for key in keys if (kept := self._kept.get(key)) is not None and kept.shown]
        for kept in sorted(here, key=lambda k: k.offer.rank, reverse=True):
            kept.used = self._tick()

    def pin(self, key: Key) -> None:
        """It stays until as many calls of `unpin`."""
        self._kept[key].pins += 1

    def unpin(self, key: Key) -> None:
        self._kept[key].pins -= 1
        self._enqueue(key)

    def victims(self, nbytes: int, protect: Iterable[Key] = ()) -> list[Key]:
        """Least recently used entries of `nbytes` together, or as much as can be had; they are dropped.

        Never one that is pinned, that another entry rests on, or that `protect` rests on.
        """
        protected = [key for key in protect if key in self._kept]
        for key in protected:
            self.pin(key)
        found: list[Key] = []
        freed = 0
        while freed < nbytes and (oldest := self._pop()) is not None:
            freed += self._kept[oldest].nbytes
            self.drop(oldest)
            found.append(oldest)
        for key in protected:
            self.unpin(key)
        return found

    def check(self, *, here: Set[Key], shown: Set[Key], pins: Counter[Key]) -> None:
        """These entries are held, these of them may be shown, and so often each is pinned. Raises: InvariantError."""
        if self._kept.keys() != here or {key for key, kept in self._kept.items() if kept.shown} != shown:
            raise InvariantError("retention and the node disagree about what is here")
        if self._children != Counter(k.offer.parent for k in self._kept.values() if k.offer.parent is not None):
            raise InvariantError("children miscounted")
        queued = Counter(kept.offer.key for _, _, kept in self._queue if self._kept.get(kept.offer.key) is kept)
        for key, kept in self._kept.items():
            if kept.pins != pins[key] or queued[key] != kept.queued or (self._may_go(key) and not kept.queued):
                raise InvariantError(f"{key.kind}: {kept.pins} pins, {queued[key]} times in the queue")

    def _may_go(self, key: Key) -> bool:
        kept = self._kept[key]
        return kept.shown and not kept.pins and key not in self._children

    def _enqueue(self, key: Key) -> None:
        kept = self._kept[key]
        if not kept.queued and self._may_go(key):
            kept.queued = True
            self._pushes += 1
            heappush(self._queue, (kept.used, self._pushes, kept))

    def _pop(self) -> Key | None:
        """The least recently used entry that may go, out of the queue."""
        while self._queue:
            used, _, kept = heappop(self._queue)
            key = kept.offer.key
            kept.queued = False
            if self._kept.get(key) is not kept:
                continue
            if used == kept.used and self._may_go(key):
                return key
            self._enqueue(key)  # used since, or not to go now: then it comes back when that changes
        return None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
