"""Making room in a node's memory: for what is published, and for what comes back from disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from cachestore.entries import Key
from cachestore.node.core import NodeCore
from cachestore.node.index_writer import IndexWriter
from moonrelay.errors import RequestTooLarge

TRIES = 3  # somebody else may take the room that was just made


class Room:
    def __init__(self, core: NodeCore, index: IndexWriter) -> None:
        self._core, self._index = core, index

    async def make(self, missing: Callable[[], int], protect: Iterable[Key]) -> None:
        """Let go of what `missing()` says is lacking, as far as that can be had; memory of what is nowhere else is
        free only once the index was told. Raises: RequestTooLarge, Unavailable."""
        kept = list(protect)
        for _ in range(TRIES):
            wanted = missing()
            if not wanted:
                return
            stats = self._core.stats()
            if wanted > stats.capacity_bytes - stats.free_bytes:
                raise RequestTooLarge(f"{wanted} bytes more are needed than this node has")
            victims = self._core.victims(wanted, int(time.monotonic() * 1000), kept)
            self._index.note(self._core.take_moved())
            if not victims:
                return
            await self._index.withdraw(victims)
