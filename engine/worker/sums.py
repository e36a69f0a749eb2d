"""Checksums of one reservation's blocks, each made once, off the event loop."""

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
