"""Chains of blocks as runs: no run has a snapshot or a branch inside, only at its end. Pure.

What a snapshot alone keeps alive, and which snapshot stands above it, is then read off a few runs, not off thousands
of blocks. Entries may come in any order; what comes before the block that it rests on waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachestore.entries import Key, Offer
from moonrelay.errors import InvariantError


@dataclass(slots=True, eq=False)
class Block:
    """`place` counts along the chain, so that a block's index in its run needs no search."""

    key: Key
    parent: Key | None
    depth: int
    nbytes: int
    place: int
    run: Run


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks. `above` ends where this begins; `below` goes on from its end, in order of coming."""

    above: Run | None = None
    blocks: list[Block] = field(default_factory=list)
    nbytes: int = 0
    below: dict[Run, None] = field(default_factory=dict)
    snapshot: Key | None = None

    @property
    def end(self) -> Block:
        return self.blocks[-1]

    def worth(self) -> tuple[int, int]:
        """Of the snapshot at this run's end: the depth in blocks from which it saves work, that of the next
        shallower snapshot; and the bytes of blocks that would be of no use without it."""
        at, nbytes, alone = self, 0, not self.below
        while True:
            if alone:
                nbytes += at.nbytes
            if at.above is None:
                return at.blocks[0].depth, nbytes
            at = at.above
            if at.snapshot is not None:
                return at.end.depth + 1, nbytes
            alone = alone and len(at.below) == 1


class Runs:
    """Adding or taking at an end costs O(1); a split moves the shorter half."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self._waiting: dict[Key, dict[Run, None]] = {}  # runs that rest on a key that is not here
        self._early: dict[Key, Key] = {}  # snapshots by a block that is not here

    def add_block(self, offer: Offer, nbytes: int) -> None:
        parent = self._blocks.get(offer.parent) if offer.parent is not None else None
        above = self._cut_after(parent) if parent is not None else None
        if above is not None and not above.below and above.snapshot is None:
            run = above
        else:
            run = Run(above)
            self._hang(run, offer.parent)
        place = parent.place + 1 if parent is not None else 0
        block = Block(offer.key, offer.parent, offer.depth, nbytes, place, run)
        self._blocks[offer.key] = block
        run.blocks.append(block)
        run.nbytes += nbytes
        run.snapshot = self._early.pop(offer.key, None)
        for child in self._waiting.pop(offer.key, ()):
            child.above = run
            run.below[child] = None

    def drop_block(self, key: Key) -> None:
        block = self._blocks[key]
        run = self._cut_after(block)
        if run.snapshot is not None:
            self._early[key], run.snapshot = run.snapshot, None
        for child in run.below:
            child.above = None
            self._waiting.setdefault(key, {})[child] = None
        run.below = {}
        del self._blocks[key]
        run.blocks.pop()
        run.nbytes -= block.nbytes
        if not run.blocks:
            self._unhang(run, block.parent)

    def resize_block(self, key: Key, nbytes: int) -> None:
        block = self._blocks[key]
        block.run.nbytes += nbytes - block.nbytes
        block.nbytes = nbytes

    def add_snapshot(self, key: Key, block: Key) -> None:
        """After `block`."""
        if block in self._blocks:
            self._cut_after(self._blocks[block]).snapshot = key
        else:
            self._early[block] = key

    def drop_snapshot(self, block: Key) -> None:
        """The one after `block`."""
        if block in self._blocks:
            self._blocks[block].run.snapshot = None
        else:
            del self._early[block]

    def at(self, block: Key) -> Run | None:
        """The run that holds the block; where a snapshot follows the block, it is the run's last one."""
        return self._blocks[block].run if block in self._blocks else None

    def goes_on(self, block: Key) -> bool:
        """Whether blocks rest on this one."""
        run = self.at(block)
        return run is not None and (bool(run.below) or run.end.key != block)

    def check(self, blocks: dict[Key, Key | None], snapshots: dict[Key, Key]) -> None:
        """`blocks` to their parents, `snapshots` to their blocks: as they are held. Raises: InvariantError."""
        runs = {block.run for block in self._blocks.values()}
        found: dict[Key, Key | None] = {}
        for run in runs:
            above = run.above.end.key if run.above is not None else None
            parents = [above, *(block.key for block in run.blocks)]
            found |= {block.key: parent for block, parent in zip(run.blocks, parents, strict=False)}
            if any(child.above is not run for child in run.below) or run.nbytes != sum(b.nbytes for b in run.blocks):
                raise InvariantError("runs are linked one way only, or their bytes miscounted")
        if found != {key: parent if parent in blocks else None for key, parent in blocks.items()}:
            raise InvariantError("runs and blocks disagree")
        held = {run.snapshot: run.end.key for run in runs if run.snapshot is not None}
        if held | {key: block for block, key in self._early.items()} != snapshots:
            raise InvariantError("runs and snapshots disagree")

    def _cut_after(self, block: Block) -> Run:
        """The run that ends with this block, cut off from what goes on if need be."""
        run = block.run
        count = block.place - run.blocks[0].place + 1
        if count == len(run.blocks):
            return run
        if 2 * count <= len(run.blocks):
            upper, lower = Run(run.above), run
            self._unhang(run, run.blocks[0].parent)
            moved, run.blocks = run.blocks[:count], run.blocks[count:]
            self._move(moved, run, upper)
            self._hang(upper, moved[0].parent)
        else:
            upper, lower = run, Run(run, below=run.below, snapshot=run.snapshot)
            for child in lower.below:
                child.above = lower
            run.snapshot = None
            moved, run.blocks = run.blocks[count:], run.blocks[:count]
            self._move(moved, run, lower)
        upper.below, lower.above = {lower: None}, upper
        return upper

    @staticmethod
    def _move(blocks: list[Block], source: Run, target: Run) -> None:
        target.blocks = blocks
        target.nbytes = sum(block.nbytes for block in blocks)
        source.nbytes -= target.nbytes
        for block in blocks:
            block.run = target

    def _hang(self, run: Run, parent: Key | None) -> None:
        """Below the run above, or among those that wait for `parent`."""
        if run.above is not None:
            run.above.below[run] = None
        elif parent is not None:
            self._waiting.setdefault(parent, {})[run] = None

    def _unhang(self, run: Run, parent: Key | None) -> None:
        if run.above is not None:
            del run.above.below[run]
        elif parent is not None:
            del self._waiting[parent][run]
            if not self._waiting[parent]:
                del self._waiting[parent]
