"""Which entries go when room is needed. Pure; O(log n) an entry, whatever else is held. DESIGN.md: "Retention".

What is kept or lost is a snapshot, with the blocks that only it needs. Its worth is

    expected hits per second (`HitDensity`) x blocks of work that a hit saves / bytes that its going would free

An entry goes only when nothing rests on it and nothing pins it, so that pinning a chain's deepest entry is enough for
the whole chain. Blocks that no snapshot stands on are of use to nobody and go before anything else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from cachestore.density import OCTAVES, Class, HitDensity, octave_end_s
from cachestore.entries import SNAPSHOT, Key, Offer
from cachestore.runs import Runs
from moonrelay.errors import InvariantError

GHOSTS_MAX = 16_384  # snapshots that left and are still watched: a few MB, and some cachefuls of time
Rank = tuple[int, float]  # restored entries, then blocks without a snapshot, then snapshots by worth
RESTORED, ORPHAN, WORTH = range(3)
# How a snapshot came to be: at its prompt's end, where another prompt had left a known one, or on the way.
END, BRANCH, INNER = range(3)


@dataclass(slots=True, eq=False)
class Life:
    """A snapshot's time since it was made or last hit; it may be a ghost's. `kind`: what it is counted as."""

    key: Key
    role: int
    used: bool = False
    kind: Class = ()
    since_ms: int = 0
    octave: int = 0
    turn: int = 0  # how often it began anew; voids older appointments


@dataclass(slots=True, eq=False)
class Tracked:
    """An entry as retention sees it."""

    offer: Offer
    nbytes: int
    life: Life | None = None  # snapshots
    pins: int = 0
    shown: bool = False
    since: int = 0  # its turn among all that were ever shown
    restored: bool = False
    ticket: int = 0  # its valid place in the queue; 0: it stands nowhere


class Retention:
    """Order of leaving among entries that are landing (never leave) or shown."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tracked] = {}
        self._children: Counter[Key] = Counter()  # entries resting on a key, itself here or not
        self._runs = Runs()
        self._density = HitDensity()
        self._ghosts: OrderedDict[Key, Life] = OrderedDict()  # by the block that the snapshot followed
        self._queue: list[tuple[Rank, int, Tracked]] = []  # what could go; void where the ticket is another
        self._due: list[tuple[int, int, int, Life]] = []  # (ms, number, turn): when a life reaches its next octave
        self._now_ms = 0
        self._count = 0

    def advance(self, now_ms: int) -> None:
        """Time has passed, on the clock of the node."""
        self._now_ms = max(now_ms, self._now_ms)
        while self._due and self._due[0][0] <= self._now_ms:
            _, _, turn, life = heappop(self._due)
            if turn == life.turn and life.octave < OCTAVES - 1:
                life.octave += 1
                self._density.enter(life.kind, life.octave)
                self._appoint(life)
                self._stand(self._kept.get(life.key))

    def add(self, offer: Offer, nbytes: int) -> None:
        """`nbytes` were given to an entry that is landing."""
        kept = self._kept[offer.key] = Tracked(offer, nbytes)
        if offer.parent is not None:
            self._children[offer.parent] += 1
        if offer.key.kind != SNAPSHOT:
            self._runs.add_block(offer, nbytes)
        elif offer.parent is not None:
            self._runs.add_snapshot(offer.key, offer.parent)
            before = self._ghosts.pop(offer.parent, None)
            if before is not None:
                before.turn += 1
            kept.life = Life(offer.key, self._role(offer.parent), used=before is not None and before.used)

    def show(self, key: Key) -> None:
        """It has landed: it may go from now on."""
        kept = self._kept[key]
        self._count += 1
        kept.shown, kept.since = True, self._count
        if kept.life is not None:
            self._begin(kept.life)
            self._tell_above(kept)
        self._stand(kept)

    def resize(self, key: Key, nbytes: int) -> None:
        """The entry, a block, takes so many bytes from now on."""
        kept = self._kept[key]
        kept.nbytes = nbytes
        self._runs.resize_block(key, nbytes)

    def drop(self, key: Key) -> None:
        """It is not here any more, or did not come. At any time, whatever rests on it."""
        self._stand(self._take(key))

    def _take(self, key: Key) -> Tracked | None:
        """Drop it; what it rested on, if that is here, has yet to stand."""
        kept = self._kept.pop(key)
        kept.ticket = 0
        parent = kept.offer.parent
        if kept.life is not None and parent is not None:
            self._leave(kept, kept.life, parent)
        elif kept.life is None:
            self._runs.drop_block(key)
        if parent is None:
            return None
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        return self._kept.get(parent)

    def restore(self, offer: Offer, nbytes: int) -> None:
        """It was to go and could not: it is the first to go next time."""
        life = self._ghosts.get(offer.parent) if offer.parent is not None else None
        self.add(offer, nbytes)
        kept = self._kept[offer.key]
        kept.shown = kept.restored = True
        if kept.life is not None and life is not None:
            kept.life = life
            self._appoint(life)
        self._stand(kept)

    def passed(self, offers: Iterable[Offer]) -> None:
        """A prompt with these blocks was computed: the deepest snapshot among them that left would have been hit."""
        ghosts = [ghost for offer in offers if (ghost := self._ghosts.get(offer.key)) is not None]
        if ghosts:
            self._hit(ghosts[-1])

    def hit(self, keys: Iterable[Key]) -> None:
        """These snapshots are used; what else is named is used with them."""
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None and kept.shown and kept.life is not None:
                kept.restored = False
                self._hit(kept.life)
                self._stand(kept)

    def pin(self, key: Key) -> None:
        """It stays until as many calls of `unpin`."""
        self._kept[key].pins += 1

    def unpin(self, key: Key) -> None:
        self._kept[key].pins -= 1
        self._stand(self._kept[key])  # it may have been hit meanwhile

    def victims(self, nbytes: int, protect: Iterable[Key] = ()) -> list[Key]:
        """The least worthy entries of `nbytes` together, or as much as can be had; they are dropped.

        Never one that is pinned, that another entry rests on, or that `protect` rests on.
        """
        protected = [key for key in protect if key in self._kept]
        for key in protected:
            self.pin(key)
        found: list[Key] = []
        freed, orphan = 0, None
        while freed < nbytes and (least := orphan or self._pop()) is not None:
            freed += least.nbytes
            found.append(least.offer.key)
            above = self._take(least.offer.key)
            orphan = None
            if above is not None and not above.restored and self._may_go(above):
                orphan = above  # a block, and nothing stands on it any more: it goes next
            else:
                self._stand(above)
        self._stand(orphan)
        for key in protected:
            self.unpin(key)
        return found

    def check(self, *, here: Mapping[Key, int], shown: Set[Key], pins: Counter[Key]) -> None:
        """These entries are held, with their bytes, these of them may be shown, and so often each is pinned.

        Raises: InvariantError.
        """
        if {key: kept.nbytes for key, kept in self._kept.items()} != here:
            raise InvariantError("retention and the node disagree about what is here, or about its bytes")
        if {key for key, kept in self._kept.items() if kept.shown} != shown:
            raise InvariantError("retention and the node disagree about what is here")
        if self._children != Counter(k.offer.parent for k in self._kept.values() if k.offer.parent is not None):
            raise InvariantError("children miscounted")
        standing = {kept.offer.key for _, ticket, kept in self._queue if ticket == kept.ticket}
        for key, kept in self._kept.items():
            if kept.pins != pins[key] or (key in standing) != bool(kept.ticket):
                raise InvariantError(f"{key.kind}: {kept.pins} pins, place {kept.ticket} in the queue")
            if self._may_go(kept) and not kept.ticket:
                raise InvariantError(f"{key.kind}: may go and stands nowhere")
        self._runs.check(
            {k: kept.offer.parent for k, kept in self._kept.items() if k.kind != SNAPSHOT},
            {k: kept.offer.parent for k, kept in self._kept.items() if kept.life and kept.offer.parent},
        )

    # A snapshot's life.

    def _role(self, block: Key) -> int:
        """Of a snapshot that is being added: told by what stood there before."""
        if not self._runs.goes_on(block):
            return END
        kept = self._kept.get(block)
        return BRANCH if kept is not None and kept.shown else INNER

    def _kind(self, life: Life, block: Key) -> Class:
        """Its class: how it came to be, whether prompts went on from it since, whether it was ever hit."""
        return (life.role, int(self._runs.goes_on(block)), int(life.used))

    def _begin(self, life: Life) -> None:
        block = self._kept[life.key].offer.parent if life.key in self._kept else None
        if block is not None:
            life.kind = self._kind(life, block)
        life.since_ms, life.octave = self._now_ms, 0
        self._density.enter(life.kind, 0)
        self._appoint(life)

    def _hit(self, life: Life) -> None:
        self._density.hit(life.kind, life.octave)
        life.used = True
        self._begin(life)

    def _appoint(self, life: Life) -> None:
        """The next octave is entered in time."""
        life.turn += 1
        self._count += 1
        due_ms = life.since_ms + int(1000 * octave_end_s(life.octave))
        heappush(self._due, (due_ms, self._count, life.turn, life))
        if len(self._due) > 4 * (len(self._ghosts) + len(self._kept)) + 64:
            self._due = [entry for entry in self._due if entry[2] == entry[3].turn]
            heapify(self._due)

    def _tell_above(self, kept: Tracked) -> None:
        """The next shallower snapshot has been passed by a prompt that goes on: it is another class from now on."""
        above = self._above(kept)
        if above is not None and above.shown and above.life is not None and above.offer.parent is not None:
            kind = self._kind(above.life, above.offer.parent)
            if kind != above.life.kind:
                above.life.kind = kind
                self._density.enter(kind, above.life.octave)
                self._stand(above)

    def _leave(self, kept: Tracked, life: Life, block: Key) -> None:
        """A snapshot goes: who would have hit it will hit the one above, if it was the last of its chain."""
        above = self._above(kept)
        last = not self._runs.goes_on(block)
        self._runs.drop_snapshot(block)
        life.turn += 1
        if not kept.shown:
            return
        if last and above is not None and above.shown and above.life is not None:
            above.life.kind = life.kind
            if life.since_ms > above.life.since_ms:
                above.life.since_ms, above.life.octave = life.since_ms, life.octave
                self._appoint(above.life)
            self._stand(above)
        self._ghosts[block] = life
        self._appoint(life)
        if len(self._ghosts) > GHOSTS_MAX:
            self._ghosts.popitem(last=False)[1].turn += 1

    def _above(self, kept: Tracked) -> Tracked | None:
        """The next shallower snapshot of its chain."""
        run = self._runs.at(kept.offer.parent) if kept.offer.parent is not None else None
        at = run.above if run is not None else None
        while at is not None and at.snapshot is None:
            at = at.above
        return self._kept.get(at.snapshot) if at is not None and at.snapshot is not None else None

    # The queue.

    def _rank(self, kept: Tracked) -> Rank:
        if kept.restored:
            return (RESTORED, -self._count)
        run = self._runs.at(kept.offer.parent) if kept.life is not None and kept.offer.parent is not None else None
        if run is None or kept.life is None:
            return (ORPHAN, kept.since)
        saves_from, nbytes = run.worth()
        saved = max(0, kept.offer.depth - saves_from)
        return (WORTH, self._density.density(kept.life.kind, kept.life.octave) * saved / (nbytes + kept.nbytes))

    def _may_go(self, kept: Tracked) -> bool:
        return kept.shown and not kept.pins and kept.offer.key not in self._children

    def _stand(self, kept: Tracked | None) -> None:
        """Take a place in the queue, a new one if it had one."""
        if kept is None or not self._may_go(kept):
            return
        self._count += 1
        kept.ticket = self._count
        heappush(self._queue, (self._rank(kept), kept.ticket, kept))
        if len(self._queue) > 4 * len(self._kept) + 64:
            self._queue = [place for place in self._queue if place[1] == place[2].ticket]
            heapify(self._queue)

    def _pop(self) -> Tracked | None:
        """The least worthy entry that may go, out of the queue."""
        while self._queue:
            rank, ticket, kept = heappop(self._queue)
            if ticket != kept.ticket:
                continue
            kept.ticket = 0
            if not self._may_go(kept):
                continue  # it stands again when that changes
            if rank[0] == WORTH and self._queue and self._rank(kept) > max(rank, self._queue[0][0]):
                self._stand(kept)  # worth more since, because of others
                continue
            return kept
        return None
