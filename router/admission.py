"""How many requests may be in flight and how many may wait; the rest are told to come back, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar, Literal

from moonrelay.errors import Overloaded

RefusalReason = Literal["queue_full", "queue_timeout"]


class Refused(Overloaded):
    """Not admitted; `reason` is a closed word for clients and metrics."""

    code: ClassVar[str] = "overloaded"

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Admission:
    """Places in flight, and one bounded FIFO in front of them and of full workers.

    Invariants: 0 <= in_flight <= in_flight_max; 0 <= waiting <= queue_len_max; only the head of the line asks full
    workers again, so that a large request is not passed for ever by small ones.
    """

    def __init__(
        self, *, in_flight_max: int, queue_len_max: int, queue_timeout_s: float, room_retry_s: float
    ) -> None:
        self._queue_len_max = queue_len_max
        self._in_flight_max = in_flight_max
        self.queue_timeout_s = queue_timeout_s
        self._room_retry_s = room_retry_s
        self._places = asyncio.Semaphore(in_flight_max)
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()
        self.in_flight = 0
        self.waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in flight for the body's length. Raises: Refused."""
        if self._places.locked():
            with self._waiter():
                await self._within(self._places.acquire(), "a place")
        else:
            await self._places.acquire()  # does not wait
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._places.release()
            self._freed.set()

    @property
    def line_is_empty(self) -> bool:
        return not self._line.locked()

    @asynccontextmanager
    async def head_of_line(self) -> AsyncIterator[None]:
        """For a request that found every worker full: the body runs once those before it have found room.

        Raises: Refused.
        """
        with self._waiter():
            await self._within(self._line.acquire(), "room on a worker")
            try:
                yield
            finally:
                self._line.release()

    async def room(self, until_s: float) -> None:
        """Return when a worker may have room: a request of ours ended, or another router's may have.

        `until_s` is on the loop's clock. Raises: Refused when it is past.
        """
        if asyncio.get_running_loop().time() >= until_s:
            raise Refused("queue_timeout", f"no worker had room in {self.queue_timeout_s:g} s")
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._room_retry_s):
                await self._freed.wait()

    @contextmanager
    def _waiter(self) -> Iterator[None]:
        if self.waiting >= self._queue_len_max:
            raise Refused("queue_full", f"{self.waiting} requests wait already; expected fewer")
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def _within(self, turn: Coroutine[Any, Any, object], what: str) -> None:
        try:
            async with asyncio.timeout(self.queue_timeout_s):
                await turn
        except TimeoutError:
            raise Refused("queue_timeout", f"waited {self.queue_timeout_s:g} s for {what}") from None

    def check(self) -> None:
        """Assert the invariants; run when idle."""
        assert 0 <= self.in_flight <= self._in_flight_max
        assert 0 <= self.waiting <= self._queue_len_max
