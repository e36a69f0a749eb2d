"""The cache nodes as a worker uses them. A protocol, so that nothing here depends on how bytes move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from engine.worker.memory import Announcer, Extent
from moonrelay.stubs.v1 import common_pb2, worker_pb2

NO_DRAFTS: Final[Mapping[int, common_pb2.Span]] = MappingProxyType({})


class Landing(Protocol):
    """Reads whose bytes may still arrive in memory that the caller has given up on."""

    @property
    def pending(self) -> bool: ...

    async def ended(self) -> None: ...


class Restored(Protocol):
    """What the cache gave, and each restored block's checksum (of the target's rows) where it has one. All tokens of
    the hit from `draft_first` on came with the drafter's rows; where none did it is the hit's end. `draft_refused`
    blocks had them, and they could not be had."""

    @property
    def usage(self) -> common_pb2.CacheUsage: ...

    @property
    def xxh3(self) -> Sequence[int | None]: ...

    @property
    def draft_first(self) -> int: ...

    @property
    def draft_refused(self) -> int: ...


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
        *,
        drafter: str = "",
        drafts: Sequence[Extent] = (),
    ) -> Restored:
        """All of the hit, or of a shallower alternative, or nothing; what is missing is in `usage.lost`, with why.

        `rows` and `drafts` have one extent a block: of the target's rows, and of `drafter`'s where there is one.
        """
        ...

    async def store(
        self,
        hit: worker_pb2.CacheHit | None,
        root: bytes,
        hashes: Sequence[bytes],
        blocks: Sequence[tuple[int, common_pb2.Span]],
        snapshots: Sequence[tuple[int, Sequence[common_pb2.Span]]],
        *,
        drafter: str = "",
        drafts: Mapping[int, common_pb2.Span] = NO_DRAFTS,
    ) -> None:
        """`drafts`: the rows of `drafter` by the block's index.

        Returns when nobody reads the memory any more, or what is read late no longer counts."""
        ...
