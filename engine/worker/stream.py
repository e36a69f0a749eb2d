"""One sequence's events, from the engine's thread to a task of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import EngineEvent, Failed, Finished


class EventStream:
    """Give `emit` to the engine and await `batch`. Holds at most the events of one sequence: its tokens are limited.

    `late` is called, on the loop, with every event that nobody asked for any more after `close`.
    """

    def __init__(self, late: Callable[[EngineEvent], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[EngineEvent] = []
        self._arrived = asyncio.Event()
        self._late = late
        self._closed = False
        self.ended = False  # the engine has sent the last event

    def emit(self, event: EngineEvent) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._push, event)

    async def batch(self) -> list[EngineEvent]:
        """Everything that has come since the last call; waits for the first. Tokens of one step come together."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """No more calls of `batch`; what comes or came meanwhile goes to `late`."""
        self._closed = True
        events, self._events = self._events, []
        for event in events:
            self._late(event)

    def _push(self, event: EngineEvent) -> None:
        self.ended = self.ended or isinstance(event, Finished | Failed)
        if self._closed:
            self._late(event)
            return
        self._events.append(event)
        self._arrived.set()
