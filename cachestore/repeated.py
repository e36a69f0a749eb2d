"""Something done periodically for as long as something else is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Repeated:
    """Calls after a period, and again a period after each call has ended, until `stop`. Costs a timer until then."""

    def __init__(self, period_s: float, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._period_s, self._call = period_s, call
        self._timer = asyncio.get_running_loop().call_later(period_s, self._start)
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await self._call()
            await asyncio.sleep(self._period_s)
