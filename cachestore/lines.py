"""Calls to a cache node over one kept socket: what a get waits for, without gRPC's share.

The messages and statuses are gRPC's own (`cache.proto`), and a servicer answers both: only the way differs. A unary
grpc.aio call costs about 0.6 ms between two processes whatever it carries, a line 0.1 ms, and a lease is asked for
before every fetch.

Where both are processes of one host the socket is a Unix one, of half the cost of TCP through the loopback; the
address names it after a slash.

A frame, little-endian: magic, method (in a reply: the status), call id, timeout in ms, length, then the message
(where the status is not OK: its words). Replies come in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from moonrelay.errors import SettingsError
from moonrelay.stubs.v1 import cache_pb2

HEADER: Final = struct.Struct("<HHIII")
MAGIC: Final = 0x4D4C
REQUEST_BYTES_MAX: Final = 4 << 20
REPLY_BYTES_MAX: Final = 8 << 20  # every span of the longest lease, drafter rows among them, is 4 MiB
CALLS_MAX: Final = 256  # in progress on one connection
CONNECT_TIMEOUT_S: Final = 1.0
SILENT_S: Final = 1.0  # a call that timed out after nothing was heard for so long: the connection may be dead
METHODS: Final[tuple[tuple[str, type[Message], type[Message]], ...]] = (
    ("Lease", cache_pb2.LeaseRequest, cache_pb2.LeaseReply),
    ("Renew", cache_pb2.RenewRequest, cache_pb2.RenewReply),
    ("Release", cache_pb2.ReleaseRequest, cache_pb2.ReleaseReply),
)
NUMBER: Final = {name: number for number, (name, _, _) in enumerate(METHODS)}
OK: Final[int] = grpc.StatusCode.OK.value[0]
STATUS: Final = {code.value[0]: code for code in grpc.StatusCode}
R = TypeVar("R", bound=Message)


class _Frames(asyncio.Protocol):
    """Cuts what arrives into frames. A peer that breaks the form is hung up on."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting = bytearray()
        self._frame_bytes = 0  # of the one that is waiting, once its header is there
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by descent

    def data_received(self, data: bytes) -> None:
        if self._waiting:
            self._waiting += data
            if len(self._waiting) < self._frame_bytes:
                return
            data = bytes(self._waiting)
            self._waiting.clear()
        at, self._frame_bytes = 0, 0
        while len(data) - at >= HEADER.size:
            magic, word, call_id, timeout_ms, length = HEADER.unpack_from(data, at)
            if magic != MAGIC or length > self._bytes_max:
                self.hang_up()
                return
            end = at + HEADER.size + length
            if len(data) < end:
                self._frame_bytes = end - at
                break
            self.frame(word, call_id, timeout_ms, data[at + HEADER.size : end])
            at = end
        self._waiting += data[at:]

    def send(self, word: int, call_id: int, timeout_ms: int, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(HEADER.pack(MAGIC, word, call_id, timeout_ms, len(body)) + body)

    def close(self) -> None:
        """End the connection once what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    def frame(self, word: int, call_id: int, timeout_ms: int, body: bytes) -> None:
        raise NotImplementedError


# -- the node's side -----------------------------------------------------------------------------------------------


class _Aborted(Exception):  # how a servicer's abort leaves its method; never leaves this module
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class _Context:
    """As much of gRPC's context as the servicer's methods use."""

    def __init__(self, timeout_ms: int) -> None:
        self._end_s = time.monotonic() + timeout_ms / 1000

    def time_remaining(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Aborted(code, details)


class LineServer:
    """Serves a `CacheNodeServicer`'s lease calls beside gRPC: listening from `start`, answering while `run` runs.

    `at_once`, where there is one, is asked first, with a method's name and request: its reply needs no task and no
    turn of the loop. None means that the method has to be asked; it must not raise.
    """

    def __init__(self, servicer: Any, at_once: Callable[[str, Any], Message | None] | None = None) -> None:
        self.servicer, self.at_once = servicer, at_once
        self.group: asyncio.TaskGroup | None = None
        self.open: set[_ServerLine] = set()
        self.local = ""  # the name of the socket for processes of this host, after a slash, where there is one
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`; returns it. Raises: SettingsError."""
        loop = asyncio.get_running_loop()
        try:
            self._servers.append(await loop.create_server(lambda: _ServerLine(self), host, 0))
        except OSError as error:
            raise SettingsError(f"listen: no line on {host}: {error}") from None
        name = secrets.token_hex(8)
        with contextlib.suppress(OSError):  # a system without nameless sockets has TCP
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(_local(name))
            self._servers.append(await loop.create_unix_server(lambda: _ServerLine(self), sock=listening))
            self.local = f"/{name}"
        return int(self._servers[0].sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Until cancelled; a servicer's bug ends it."""
        try:
            async with asyncio.TaskGroup() as self.group:
                await asyncio.Event().wait()
        finally:
            self.group = None

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for line in list(self.open):
            line.hang_up()
        for server in self._servers:
            await server.wait_closed()


class _ServerLine(_Frames):
    def __init__(self, owner: LineServer) -> None:
        super().__init__(REQUEST_BYTES_MAX)
        self._owner = owner
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.open.discard(self)
        for call in self._calls:
            call.cancel()

    def pause_writing(self) -> None:
        """A reader that does not take its replies is not asked for more requests."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()

    def frame(self, word: int, call_id: int, timeout_ms: int, body: bytes) -> None:
        if self._owner.group is None:
            self._refuse(call_id, grpc.StatusCode.UNAVAILABLE, "this node is starting or leaving")
        elif word >= len(METHODS):
            self._refuse(call_id, grpc.StatusCode.UNIMPLEMENTED, f"no method {word}")
        elif len(self._calls) >= CALLS_MAX:
            self._refuse(call_id, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{CALLS_MAX} calls are in progress")
        else:
            name, request_type, _ = METHODS[word]
            try:
                request = request_type.FromString(body)
            except DecodeError:
                self._refuse(call_id, grpc.StatusCode.INVALID_ARGUMENT, f"not a {request_type.DESCRIPTOR.name}")
                return
            reply = self._owner.at_once(name, request) if self._owner.at_once is not None else None
            if reply is not None:
                self.send(OK, call_id, 0, reply.SerializeToString())
                return
            call = self._owner.group.create_task(self._answer(name, call_id, timeout_ms, request))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, name: str, call_id: int, timeout_ms: int, request: Message) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                reply = await getattr(self._owner.servicer, name)(request, _Context(timeout_ms))
        except _Aborted as aborted:
            self._refuse(call_id, aborted.code, str(aborted))
        except TimeoutError:
            self._refuse(call_id, grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed")
        else:
            self.send(OK, call_id, 0, reply.SerializeToString())

    def _refuse(self, call_id: int, code: grpc.StatusCode, details: str) -> None:
        self.send(code.value[0], call_id, 0, details.encode())


# -- the caller's side ---------------------------------------------------------------------------------------------


_Waiter = asyncio.Future[tuple[int, bytes]]


class _Ask(NamedTuple):
    call_id: int
    method: int
    body: bytes
    timeout_s: float


class _ClientLine(_Frames):
    def __init__(self) -> None:
        super().__init__(REPLY_BYTES_MAX)
        self.waiting: dict[int, tuple[float, _Waiter]] = {}  # deadline, who waits
        self.open = True
        self.heard_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._watch_s = 0.0  # when it looks

    def ask(self, call_id: int, method: int, body: bytes, timeout_s: float) -> _Waiter:
        """The reply's status and body, or TimeoutError. Whoever stops waiting takes its call out of `waiting`."""
        waiter: _Waiter = self._loop.create_future()
        deadline_s = time.monotonic() + timeout_s
        self.waiting[call_id] = deadline_s, waiter
        if self._watch is None or deadline_s < self._watch_s:
            self._look_at(deadline_s, timeout_s)
        self.send(method, call_id, max(1, int(timeout_s * 1000)), body)
        return waiter

    def _look_at(self, deadline_s: float, timeout_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch, self._watch_s = self._loop.call_later(max(0.0, timeout_s), self._look), deadline_s

    def _look(self) -> None:
        """One timer for all calls, of which most have had their answer when it is due."""
        self._watch, now_s = None, time.monotonic()
        for deadline_s, waiter in self.waiting.values():
            if deadline_s <= now_s and not waiter.done():
                waiter.set_exception(TimeoutError())
        left = [deadline_s for deadline_s, waiter in self.waiting.values() if not waiter.done()]
        if left:
            self._look_at(min(left), min(left) - now_s)

    def frame(self, word: int, call_id: int, timeout_ms: int, body: bytes) -> None:
        self.heard_s = time.monotonic()
        found = self.waiting.pop(call_id, None)  # None: whoever asked has stopped waiting
        if found is not None and not found[1].done():
            found[1].set_result((word, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._watch is not None:
            self._watch.cancel()
        for _, waiter in self.waiting.values():
            if not waiter.done():
                waiter.set_result((grpc.StatusCode.UNAVAILABLE.value[0], b"the connection ended"))
        self.waiting.clear()


class LineClient:
    """One node's line; connects at its first call and again after a loss. Loop thread only."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._line: _ClientLine | None = None
        self._connecting = asyncio.Lock()
        self._ids = itertools.count()

    def call(self, name: str, request: Message, reply_type: type[R], timeout_s: float) -> Coroutine[Any, Any, R]:
        """To be awaited for the reply; where there is a connection the request is on its way before that.

        Raises: grpc.aio.AioRpcError, with the status and words that the same call over gRPC would have.
        """
        ask = _Ask(next(self._ids) & 0xFFFF_FFFF, NUMBER[name], request.SerializeToString(), timeout_s)
        line, began_s = self._line, time.monotonic()
        if line is None or not line.open:
            return self._reply(None, ask, None, reply_type, began_s)
        return self._reply(line, ask, line.ask(*ask), reply_type, began_s)

    async def _reply(
        self, line: _ClientLine | None, ask: _Ask, waiter: _Waiter | None, reply_type: type[R], began_s: float
    ) -> R:
        try:
            if line is None or waiter is None:
                line = await self._connect(ask.timeout_s)
                left_s = ask.timeout_s - (time.monotonic() - began_s)
                waiter = line.ask(ask.call_id, ask.method, ask.body, left_s)
            try:
                status, body = await waiter
            finally:
                line.waiting.pop(ask.call_id, None)
        except TimeoutError:
            self._doubt(began_s)
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed") from None
        except OSError as error:
            raise _error(grpc.StatusCode.UNAVAILABLE, f"{self._address}: {error}") from None
        if status != OK:
            raise _error(STATUS.get(status, grpc.StatusCode.UNKNOWN), body.decode(errors="replace"))
        reply: R = reply_type()
        try:
            reply.ParseFromString(body)
        except DecodeError:
            raise _error(grpc.StatusCode.INTERNAL, f"not a {reply_type.DESCRIPTOR.name}") from None
        return reply

    def tell(self, name: str, request: Message) -> None:
        """A call whose answer nobody waits for; lost where there is no connection now."""
        if self._line is not None and self._line.open:
            self._line.send(NUMBER[name], next(self._ids) & 0xFFFF_FFFF, 1_000, request.SerializeToString())

    def close(self) -> None:
        """Ends what is in progress; what was told before is still sent."""
        if self._line is not None:
            self._line.close()

    def _doubt(self, began_s: float) -> None:
        """A host that vanished breaks no connection: one that stays silent is replaced."""
        line = self._line
        if line is not None and time.monotonic() - max(began_s, line.heard_s) > SILENT_S:
            line.open = False  # at once: the next call makes a new one
            line.hang_up()

    async def _connect(self, timeout_s: float) -> _ClientLine:
        async with asyncio.timeout(timeout_s), self._connecting:
            if self._line is None or not self._line.open:
                address, _, local = self._address.partition("/")
                host, _, port = address.rpartition(":")
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._line = await _connect_here(local) if local else None
                    if self._line is None:
                        loop = asyncio.get_running_loop()
                        _, self._line = await loop.create_connection(_ClientLine, host, int(port))
            return self._line


def _local(name: str) -> str:
    """In the kernel's own name space: no file to leave behind; only processes of this host see it."""
    return f"\0moonrelay-line-{name}"


async def _connect_here(name: str) -> _ClientLine | None:
    """None where no process of this host has a line of this name."""
    here = socket.socket(socket.AF_UNIX)
    try:
        here.setblocking(False)
        here.connect(_local(name))
        _, line = await asyncio.get_running_loop().create_unix_connection(_ClientLine, sock=here)
    except OSError:
        here.close()
        return None
    return line


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
