"""What a worker keeps of finished prompts and turns in its own pools: the device tier's book.

Pure. Blocks and slots are numbers here; `engine.worker.memory` holds them and gives them back. A kept block is named
by its prefix hash, which names every token before it and, through its root, tenant and fingerprint; it rests on the
block before it, so what is kept is a forest, and every path in it can begin a reservation as it is.

Order of eviction: least recently used, from the deep end. Using a block uses all that it rests on, and they count as
used after it; so the oldest block is always one that nothing rests on. Snapshots have an order of their own, by when
they were made or restored: slots are the scarcer budget, and blocks without a snapshot still save a transfer. The
cache nodes weigh value per byte; here memory changes hands within minutes, and a conversation's next turn is recency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moonrelay.errors import InvariantError


@dataclass(slots=True, eq=False)
class _Kept:
    hash: bytes
    root: bytes
    block: int
    parent: _Kept | None
    children: int = 0
    xxh3: int | None = None
    drafted: bool = False  # it holds the drafter's rows too
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Blocks that a reservation may begin with, in token order, with their checksums where known; and the slot of the
    snapshot at their end (None: rows alone were asked for). From block `drafted_from` on all hold the drafter's rows.
    """

    blocks: tuple[int, ...]
    xxh3: tuple[int | None, ...]
    slot: int | None
    drafted_from: int = 0


@dataclass(slots=True, kw_only=True)
class Evicted:
    """No longer kept: what to give back, and by root what to withdraw from the index."""

    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    block_hashes: dict[bytes, list[bytes]] = field(default_factory=dict)
    snapshot_hashes: dict[bytes, list[bytes]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.slots)


class Bundles:
    """See the module. Limits are the most that is kept, not what is set aside: 0 keeps nothing."""

    def __init__(self, *, blocks_max: int, slots_max: int) -> None:
        self.blocks_max, self.slots_max = blocks_max, slots_max
        self._kept: dict[bytes, _Kept] = {}  # least recently used first
        self._slots: dict[int, _Kept] = {}  # by slot; least recently used first

    @property
    def blocks(self) -> Iterable[int]:
        return (kept.block for kept in self._kept.values())

    @property
    def slots(self) -> Iterable[int]:
        return self._slots.keys()

    @property
    def num_blocks(self) -> int:
        return len(self._kept)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def find(self, hashes: Sequence[bytes], *, state: bool) -> Found | None:
        """The deepest of a prompt's blocks here; with `state` the deepest that has a snapshot. Uses what it finds."""
        path = self._path(hashes)
        while state and path and path[-1].slot is None:
            path.pop()
        if not path:
            return None
        self._use(path)
        slot = path[-1].slot if state else None
        if slot is not None:
            self._slots[slot] = self._slots.pop(slot)
        cold = [index for index, kept in enumerate(path) if not kept.drafted]
        return Found(
            blocks=tuple(k.block for k in path),
            xxh3=tuple(k.xxh3 for k in path),
            slot=slot,
            drafted_from=cold[-1] + 1 if cold else 0,
        )

    def depth(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are here."""
        return len(self._path(hashes))

    def keep(
        self,
        root: bytes,
        hashes: Sequence[bytes],
        first: int,
        blocks: Sequence[tuple[int, int | None]],
        drafted_from: int = 0,
    ) -> None:
        """Add `blocks` (number, checksum) as those of hashes[first:]; the ones before are kept already. Those from
        index `drafted_from` on hold the drafter's rows."""
        path = self._path(hashes)
        if len(path) != first or len(blocks) != len(hashes) - first:
            raise InvariantError(f"{len(path)} blocks of a chain are kept, not {first}")
        parent = path[-1] if path else None
        for index, (prefix_hash, (block, xxh3)) in enumerate(zip(hashes[first:], blocks, strict=True), first):
            kept = _Kept(
                hash=prefix_hash, root=root, block=block, parent=parent, xxh3=xxh3, drafted=index >= drafted_from
            )
            if parent is not None:
                parent.children += 1
            self._kept[prefix_hash] = parent = kept
            path.append(kept)
        self._use(path)

    def keep_snapshot(self, prefix_hash: bytes, slot: int) -> bool:
        """Add the snapshot after a kept block; False where there is one already, or no such block."""
        kept = self._kept.get(prefix_hash)
        if kept is None or kept.slot is not None:
            return False
        kept.slot = slot
        self._slots[slot] = kept
        return True

    def learn(self, prefix_hash: bytes, xxh3: int) -> None:
        """The checksum of a block, if it is still kept."""
        if (kept := self._kept.get(prefix_hash)) is not None:
            kept.xxh3 = xxh3

    def trim(self) -> Evicted:
        """Down to the limits."""
        over = self.evict(
            blocks=len(self._kept) - self.blocks_max,
            slots=len(self._slots) - self.slots_max,
            free_block=lambda _: True,
            free_slot=lambda _: True,
        )
        assert over is not None
        return over

    def evict(
        self, *, blocks: int, slots: int, free_block: Callable[[int], bool], free_slot: Callable[[int], bool]
    ) -> Evicted | None:
        """Give up as many blocks and slots; only those count that nobody else holds (`free_*`). Others go only where
        what they rest on could not go before them.

        None, and nothing is given up, where there are not so many.
        """
        chosen = self._choose(blocks, free_block, busy_too=False)
        if sum(free_block(kept.block) for kept in chosen) < blocks:
            chosen = self._choose(blocks, free_block, busy_too=True)
        freed_blocks = sum(free_block(kept.block) for kept in chosen)
        freed_slots = sum(kept.slot is not None and free_slot(kept.slot) for kept in chosen)
        bare: list[_Kept] = []
        going = {kept.hash for kept in chosen}
        for slot, kept in self._slots.items():
            if freed_slots >= slots:
                break
            if kept.hash not in going and free_slot(slot):
                bare.append(kept)
                freed_slots += 1
        if freed_blocks < blocks or freed_slots < slots:
            return None
        out = Evicted()
        for kept in (*bare, *chosen):
            self._forget_snapshot(kept, out)
        for kept in chosen:
            self._forget(kept, out)
        return out

    def check(self) -> None:
        """Raises: InvariantError where the forest or the orders do not hold."""
        children: dict[bytes, int] = {}
        for kept in self._kept.values():
            if kept.parent is not None:
                if self._kept.get(kept.parent.hash) is not kept.parent:
                    raise InvariantError("a kept block rests on one that is gone")
                children[kept.parent.hash] = children.get(kept.parent.hash, 0) + 1
        if any(kept.children != children.get(kept.hash, 0) for kept in self._kept.values()):
            raise InvariantError("kept blocks miscount what rests on them")
        if {k.slot for k in self._kept.values() if k.slot is not None} != set(self._slots):
            raise InvariantError("kept snapshots and their blocks disagree")
        if len(set(self.blocks)) != len(self._kept):
            raise InvariantError("a block is kept under two names")
        seen: set[bytes] = set()
        for kept in self._kept.values():
            if kept.parent is not None and kept.parent.hash in seen:
                raise InvariantError("a block is older than one that rests on it")
            seen.add(kept.hash)

    def _choose(self, blocks: int, free_block: Callable[[int], bool], *, busy_too: bool) -> list[_Kept]:
        """The oldest, each before what it rests on, until `blocks` of them are free."""
        fallen: dict[bytes, int] = {}  # hash -> children that go
        chosen: list[_Kept] = []
        for kept in self._kept.values():
            if blocks <= 0:
                break
            free = free_block(kept.block)
            if kept.children == fallen.get(kept.hash, 0) and (free or busy_too):
                chosen.append(kept)
                blocks -= free
                if kept.parent is not None:
                    fallen[kept.parent.hash] = fallen.get(kept.parent.hash, 0) + 1
        return chosen

    def _path(self, hashes: Sequence[bytes]) -> list[_Kept]:
        path = []
        for prefix_hash in hashes:
            kept = self._kept.get(prefix_hash)
            if kept is None:
                break
            path.append(kept)
        return path

    def _use(self, path: Sequence[_Kept]) -> None:
        for kept in reversed(path):
            self._kept[kept.hash] = self._kept.pop(kept.hash)

    def _forget(self, kept: _Kept, out: Evicted) -> None:
        del self._kept[kept.hash]
        if kept.parent is not None:
            kept.parent.children -= 1
        out.blocks.append(kept.block)
        out.block_hashes.setdefault(kept.root, []).append(kept.hash)

    def _forget_snapshot(self, kept: _Kept, out: Evicted) -> None:
        if kept.slot is not None:
            del self._slots[kept.slot]
            out.slots.append(kept.slot)
            out.snapshot_hashes.setdefault(kept.root, []).append(kept.hash)
            kept.slot = None
