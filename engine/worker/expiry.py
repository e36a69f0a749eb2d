"""Waking a table of deadlines exactly when its next one is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def now_ms() -> int:
    """The monotonic clock that every lease and reservation of this process is counted by."""
    return time.monotonic_ns() // 1_000_000


class Expiry:
    """Calls `due(now_ms)` whenever `next_deadline_ms()` has come. Tell it of every `change` to the table."""

    def __init__(self, next_deadline_ms: Callable[[], int | None], due: Callable[[int], None]) -> None:
        self._next_deadline_ms, self._due = next_deadline_ms, due
        self._changed = asyncio.Event()

    def change(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            deadline = self._next_deadline_ms()
            self._changed.clear()
            try:
                async with asyncio.timeout(None if deadline is None else max(0, deadline - now_ms()) / 1000):
                    await self._changed.wait()
            except TimeoutError:
                self._due(now_ms())

    async def until(self, done: Callable[[], bool]) -> None:
        """Until `done()`, asked again at every change."""
        while not done():
            self._changed.clear()
            await self._changed.wait()
