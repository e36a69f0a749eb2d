"""Our own registered memory: ranges given once, before start, and kept for the life of the process."""

from __future__ import annotations

from cachestore.arena import ask_for_huge_pages
from cachestore.checksum import checksum, memory_view
from moonrelay.errors import InvariantError
from moonrelay.stubs.v1.common_pb2 import Pool, Span


class Pools:
    def __init__(self) -> None:
        self._bases: dict[int, int] = {}
        self._views: dict[int, memoryview] = {}
        self._frozen = False

    def register(self, pool_id: int, base: int, length: int) -> None:
        """Offer [base, base + length) as a pool; the caller keeps the memory alive until the process ends.

        Pages of it that are not touched yet may become huge ones, which pulls need to be fast.
        Raises: InvariantError after start (peers' metadata is a snapshot), for a taken id or an empty range.
        """
        if self._frozen or pool_id in self._bases or length <= 0 or base <= 0:
            raise InvariantError(f"pool {pool_id} at {base:#x}+{length}: registered late, twice or empty")
        self._bases[pool_id] = base
        self._views[pool_id] = memory_view(base, length)
        ask_for_huge_pages(base, length)

    def freeze(self) -> None:
        self._frozen = True

    def describe(self) -> list[Pool]:
        return [Pool(id=i, base=base, length=len(self._views[i])) for i, base in self._bases.items()]

    def holds(self, pool: int, offset: int, length: int) -> bool:
        """Whether the range lies inside a registered pool: the one bounds check of every transport."""
        view = self._views.get(pool)
        return view is not None and offset >= 0 and length >= 0 and offset + length <= len(view)

    def view(self, pool: int, offset: int, length: int) -> memoryview:
        """The bytes themselves, no copy. Raises: InvariantError outside the registered pools."""
        if not self.holds(pool, offset, length):
            raise InvariantError(f"pool {pool} offset {offset} length {length} is outside registered memory")
        return self._views[pool][offset : offset + length]

    def address(self, pool: int, offset: int) -> int:
        return self._bases[pool] + offset

    def span(self, pool: int, offset: int, length: int) -> Span:
        """A span of our own memory with the checksum of the bytes there now."""
        return Span(pool=pool, offset=offset, length=length, xxh3=checksum(self.view(pool, offset, length)))
