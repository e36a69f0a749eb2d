"""The cache nodes as a worker uses them. A protocol, so that nothing here depends on how bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.worker.memory import Announcer, Extent
from moonrelay.stubs.v1 import common_pb2, worker_pb2


class Landing(Protocol):
    """Reads whose bytes may still arrive in memory that the caller has given up on."""

    @property
    def pending(self) -> bool: ...

    async def ended(self) -> None: ...


class Restored(Protocol):
    """What the cache gave, and each restored block's checksum where it has one."""

    @property
    def usage(self) -> common_pb2.CacheUsage: ...

    @property
    def xxh3(self) -> Sequence[int | None]: ...


class PromptCache(Announcer, Protocol):
    """Expected losses are return values."""

    def checked_span(self, pool: int, offset: int, length: int) -> common_pb2.Span:
        """A range of our memory with the checksum of what is there now. From any thread."""
        ...

    def landing(self) -> Landing:
        """For one call of `restore`."""
        ...

    async def restore(
        self,
        hit: worker_pb2.CacheHit,
        root: bytes,
        hashes: Sequence[bytes],
        rows: Sequence[Extent],
        state: Extent,
        landing: Any,
    ) -> Restored:
        """All of the hit, or of a shallower alternative, or nothing; what is missing is in `usage.lost`, with why."""
        ...

    async def store(
        self,
        hit: worker_pb2.CacheHit | None,
        root: bytes,
        hashes: Sequence[bytes],
        blocks: Sequence[tuple[int, common_pb2.Span]],
        snapshots: Sequence[tuple[int, Sequence[common_pb2.Span]]],
    ) -> None:
        """Returns when nobody reads the memory any more, or what is read late no longer counts."""
        ...
