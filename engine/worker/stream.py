"""Sequences' events, from the engine's thread to tasks of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.api import EngineEvent, Failed, Finished

LAST = (Finished, Failed)


class Wakeups:
    """One loop's streams that have something for it: all that a step gives, for however many sequences, is one
    wake-up of the loop, which costs a system call on the engine's thread.

    Made on the loop. Nothing is locked: an item is there before the flag is looked at, and the flag is down before
    items are looked at, so none is left lying.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams: deque[EventStream] = deque()
        self._called = False

    def wake(self, stream: EventStream) -> None:
        """On any thread: have the loop call `stream.notice` soon."""
        self._streams.append(stream)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        self._called = False
        while self._streams:
            self._streams.popleft().notice()


class EventStream:
    """Give `emit` to the engine and await `batch`. Holds at most the events of one sequence: its tokens are limited.

    `late` is called, on the loop, with every event that nobody asked for any more after `close`.
    """

    def __init__(self, wakeups: Wakeups, late: Callable[[EngineEvent], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wakeups = wakeups
        self._events: list[EngineEvent] = []  # the engine's thread only appends, the loop takes from the front
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = False  # the next event, whichever it is, is to wake the loop
        self._late = late
        self._closed = False
        self.ended = False  # the engine has sent the last event

    def emit(self, event: EngineEvent) -> None:
        """On the engine's thread."""
        self._events.append(event)
        last = isinstance(event, LAST)
        if self._wanted or last:
            self.ended |= last
            self._wanted = False
            self._wakeups.wake(self)

    async def batch(self, not_before_s: float = 0.0) -> list[EngineEvent]:
        """Everything that has come since the last call; waits for the first. Tokens of one step come together.

        Up to `not_before_s`, a time of the loop's clock, only the last event ends the wait: what comes meanwhile
        costs nobody a wake-up.
        """
        if not_before_s > self._loop.time() and not self.ended:
            await self._wait(not_before_s)
        while not self._events:
            self._wanted = True
            if not self._events:  # else it came before the flag was up
                await self._wait(None)
        self._wanted = False
        return self._take()

    def close(self) -> None:
        """No more calls of `batch`; what comes or came meanwhile goes to `late`."""
        self._closed = self._wanted = True
        self.notice()

    def notice(self) -> None:
        """On the loop: something has come."""
        if self._closed:
            self._wanted = True
            for event in self._take():
                self._late(event)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, until_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        timer = None if until_s is None else self._loop.call_at(until_s, self.notice)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _take(self) -> list[EngineEvent]:
        count = len(self._events)
        events = self._events[:count]
        del self._events[:count]
        return events
