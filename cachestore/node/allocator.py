"""Pages of one arena, handed out as few contiguous runs as possible. Pure bookkeeping; sizes in bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from moonrelay.errors import InvariantError

PAGE_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous range of the arena, whole pages."""

    offset: int
    length: int


class PageAllocator:
    """First fit for a whole piece; where no gap is large enough, the largest gaps together.

    Entries of a few sizes reuse each other's places, so that splitting is rare; and because it is possible, blocks
    and snapshots of different sizes never strand memory between them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = self.capacity_bytes
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []

    @staticmethod
    def rounded(nbytes: int) -> int:
        """What an allocation of `nbytes` takes."""
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Room for `nbytes`, in order of the bytes to be put there; None where not enough is free."""
        needed = self.rounded(nbytes)
        if needed > self.free_bytes:
            return None
        self.free_bytes -= needed
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                self._take(index, needed)
                return (Extent(offset, needed),) if needed else ()
        taken = []
        for offset, length in sorted(self._free, key=lambda gap: -gap[1]):
            part = min(length, needed)
            self._take(bisect_left(self._free, (offset, length)), part)
            taken.append(Extent(offset, part))
            needed -= part
            if not needed:
                break
        return tuple(taken)

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Give pages back; neighbouring gaps grow together. Raises: InvariantError if any is free already."""
        for extent in extents:
            at = bisect_left(self._free, (extent.offset, 0))
            start, end = extent.offset, extent.offset + extent.length
            if at < len(self._free) and self._free[at][0] < end:
                raise InvariantError(f"{extent} is free already")
            if at and sum(self._free[at - 1]) > start:
                raise InvariantError(f"{extent} is free already")
            if at < len(self._free) and self._free[at][0] == end:
                end += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                start = self._free.pop(at - 1)[0]
            insort(self._free, (start, end - start))
            self.free_bytes += extent.length

    def check(self, used: list[Extent]) -> None:
        """Used and free ranges tile the arena. Raises: InvariantError."""
        ranges = sorted([*self._free, *((e.offset, e.length) for e in used)])
        at = 0
        for offset, length in ranges:
            if offset != at or length <= 0:
                raise InvariantError(f"the arena has a hole or an overlap at {at}, next range at {offset}")
            at += length
        if at != self.capacity_bytes or sum(length for _, length in self._free) != self.free_bytes:
            raise InvariantError("the arena's books do not balance")

    def _take(self, index: int, nbytes: int) -> None:
        offset, length = self._free.pop(index)
        if length > nbytes:
            insort(self._free, (offset + nbytes, length - nbytes))
