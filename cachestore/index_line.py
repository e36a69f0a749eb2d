"""One script of an index over one kept connection: what a lookup waits for, without the client library's share.

A call through redis-py's asyncio client costs 0.15 ms more than the connection itself (a pool, locks, time limits,
retries, each of them coroutines), twice what the lookup's script takes. Here a call is one write and one future;
calls may follow each other before the first is answered, since Redis answers in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from moonrelay.valkey import CALL_TIMEOUT_S, CONNECT_TIMEOUT_S

NO_SCRIPT: Final = "NOSCRIPT"


class ScriptLine:
    """A script that only reads: where the connection is lost under a call, it is made again and asked once more.

    Loop thread only; connects at its first call. `close` it. Through redis-py where the connection needs more than
    a password: TLS, or credentials that change.
    """

    def __init__(self, redis: Redis, text: str) -> None:
        self._text, self._sha = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        pool = redis.connection_pool
        self._to: dict[str, Any] = pool.connection_kwargs
        plain = pool.connection_class in (Connection, UnixDomainSocketConnection)
        self._script = None if plain and not self._to.get("credential_provider") else redis.register_script(text)
        self._line: _Replies | None = None
        self._connecting = asyncio.Lock()

    async def call(self, key: str, *args: Any) -> Any:
        """The script's answer, with one key. Raises what redis-py raises: RedisError, OSError."""
        if self._script is not None:
            return await self._script(keys=[key], args=args)
        line = self._line
        if line is not None and line.open:
            try:
                return await line.send("EVALSHA", self._sha, 1, key, *args)
            except (ConnectionLost, ResponseError) as error:
                # A server that restarted, or one that ends idle connections or forgot the script.
                if isinstance(error, ResponseError) and not str(error).startswith(NO_SCRIPT):
                    raise
        return await self._ask(await self._connect(), key, args)

    def close(self) -> None:
        """Ends what is in progress. A later call connects again."""
        if self._line is not None:
            self._line.end(ConnectionLost("the index is closing"))

    async def _ask(self, line: _Replies, key: str, args: Sequence[Any]) -> Any:
        try:
            return await line.send("EVALSHA", self._sha, 1, key, *args)
        except ResponseError as error:
            if not str(error).startswith(NO_SCRIPT):
                raise
            return await line.send("EVAL", self._text, 1, key, *args)  # which keeps it

    async def _connect(self) -> _Replies:
        async with self._connecting:
            if self._line is None or not self._line.open:
                self._line = await self._open()
            return self._line

    async def _open(self) -> _Replies:
        loop, to = asyncio.get_running_loop(), self._to
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if "path" in to:
                    _, line = await loop.create_unix_connection(_Replies, to["path"])
                else:
                    _, line = await loop.create_connection(
                        _Replies, to.get("host", "localhost"), to.get("port", 6379)
                    )
        except TimeoutError:
            raise RedisTimeout("Redis does not take the connection") from None
        with contextlib.ExitStack() as undo:
            undo.callback(line.end, ConnectionLost("the connection was refused"))
            if to.get("password"):
                await line.send("AUTH", to.get("username") or "default", to["password"])
            if to.get("db"):
                await line.send("SELECT", to["db"])
            undo.pop_all()
        return line


class _Replies(asyncio.Protocol):
    """A connection: futures in the order of what was sent. Silent past the oldest one's deadline, it is given up."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()  # deadline, who waits
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        self._watch: asyncio.TimerHandle | None = None

    def send(self, *words: Any) -> asyncio.Future[Any]:
        """Ask; the reply, or an error of redis-py's, comes by the deadline."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        if self._transport is None or not self.open:
            waiter.set_exception(ConnectionLost("the connection to Redis ended"))
            return waiter
        self._waiting.append((time.monotonic() + CALL_TIMEOUT_S, waiter))
        if self._watch is None:
            self._watch = loop.call_later(CALL_TIMEOUT_S, self._look)
        self._transport.write(hiredis.pack_command(words))
        return waiter

    def end(self, error: RedisError) -> None:
        """Hang up; who still waits gets the error."""
        self.open = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            _settle(self._waiting.popleft()[1], error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by descent
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(ConnectionLost("the connection to Redis ended"))

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                if not self._waiting:
                    raise InvalidResponse("a reply that nobody asked for")
                _settle(self._waiting.popleft()[1], reply)
        except InvalidResponse as error:
            self.end(error)

    def _look(self) -> None:
        """One timer for all calls, whatever became of those who wait: a host that vanished breaks no connection."""
        self._watch = None
        if not self._waiting:
            return
        left_s = self._waiting[0][0] - time.monotonic()
        if left_s <= 0:
            self.end(RedisTimeout("Redis did not answer in time"))
        else:
            self._watch = asyncio.get_running_loop().call_later(left_s, self._look)


def _settle(waiter: asyncio.Future[Any], reply: Any) -> None:
    if waiter.done():  # whoever asked has stopped waiting
        return
    if isinstance(reply, Exception):
        waiter.set_exception(reply)
    else:
        waiter.set_result(reply)
