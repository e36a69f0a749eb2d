"""Checksums of one reservation's blocks, each made once, off the event loop.

A handoff reads whole blocks. The cache stores the target's rows and the drafter's beside each other, so that a worker
with another drafter, or none, can use the former: each part has a checksum of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine.worker.memory import Extent, Holding
from moonrelay.stubs.v1 import common_pb2

Checked = Callable[[Sequence[Extent]], Awaitable[list[common_pb2.Span]]]


class BlockSums:
    """Spans by the block's index in the reservation. A block is hashed only when it is full, or changes no more."""

    def __init__(self, holding: Holding, checked: Checked) -> None:
        self._holding, self._checked = holding, checked
        self._spans: dict[int, common_pb2.Span] = {}
        self._lock = asyncio.Lock()

    def know(self, index: int, xxh3: int) -> None:
        """What a verified transfer, or an earlier owner, has hashed already."""
        self._spans[index] = common_pb2.Span(**self._holding.rows(index, index + 1)[0]._asdict(), xxh3=xxh3)

    def known(self, index: int) -> int | None:
        span = self._spans.get(index)
        return None if span is None else span.xxh3

    async def spans(self, first: int, end: int) -> list[common_pb2.Span]:
        """Blocks [first, end); none of them may change any more."""
        async with self._lock:
            missing = [index for index in range(first, end) if index not in self._spans]
            if missing:
                extents = [self._holding.rows(index, index + 1)[0] for index in missing]
                self._spans.update(zip(missing, await self._checked(extents), strict=True))
        return [self._spans[index] for index in range(first, end)]

    async def parts(
        self, first: int, end: int, drafted_from: int
    ) -> tuple[list[tuple[int, common_pb2.Span]], dict[int, common_pb2.Span]]:
        """What is stored of blocks [first, end): the target's rows by the block's index, and the drafter's rows of
        those from `drafted_from` on."""
        indices = range(first, end)
        if not self._holding.draft_bytes:
            return list(zip(indices, await self.spans(first, end), strict=True)), {}
        drafted = range(min(max(first, drafted_from), end), end)
        extents = [*self._holding.target_rows(first, end), *self._holding.draft_rows(drafted.start, end)]
        spans = await self._checked(extents)
        return list(zip(indices, spans, strict=False)), dict(zip(drafted, spans[len(indices) :], strict=True))
