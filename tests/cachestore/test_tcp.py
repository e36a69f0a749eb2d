"""The TCP plane spoken to by hand: what it refuses, what it survives, what it does when too much is asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from test_node import until
from tests_cachestore import soon

from cachestore.arena import Arena
from cachestore.transports import Read, ReadTimeout, Slice, TransportSet, wire
from cachestore.transports.tcp import IN_FLIGHT_MAX, WAITING_MAX
from cachestore.transports.wire import Status
from moonrelay.errors import StaleEpoch, TransferError
from moonrelay.stubs.v1.common_pb2 import Peer

EPOCH, POOL, LENGTH = 77, 3, 100_000


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[TransportSet, Arena]]:
    arena = Arena(LENGTH)
    arena.view[:] = bytes(i % 251 for i in range(LENGTH))
    transports = TransportSet.open("server", EPOCH, transport="tcp")
    transports.register(POOL, arena.base, arena.length)
    await transports.start()
    try:
        yield transports, arena
    finally:
        await transports.close()


def ask(address: str, data: bytes) -> bytes:
    """Send raw bytes, close our sending half, return everything that comes back."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
        return answer


def request(*ranges: tuple[int, int, int], epoch: int = EPOCH, magic: bytes = wire.REQUEST_MAGIC) -> bytes:
    return wire.REQUEST.pack(magic, len(ranges), epoch, 9) + b"".join(wire.RANGE.pack(*r) for r in ranges)


def status(answer: bytes) -> Status:
    return Status(wire.REPLY.unpack(answer[: wire.REPLY.size])[1])


REFUSED = {
    "unknown pool": (request((POOL + 1, 0, 1)), Status.OUT_OF_RANGE),
    "one byte too far": (request((POOL, LENGTH, 1)), Status.OUT_OF_RANGE),
    "one good, one bad": (request((POOL, 0, 10), (POOL, 1 << 63, 10)), Status.OUT_OF_RANGE),
    "wrapping sum": (request((POOL, (1 << 64) - 1, 2)), Status.OUT_OF_RANGE),
    "larger than memory": (request((POOL, 0, (1 << 64) - 1)), Status.OUT_OF_RANGE),
    "another life": (request((POOL, 0, 1), epoch=EPOCH - 1), Status.STALE_EPOCH),
    "no ranges": (request(), Status.MALFORMED),
    "other magic": (request((POOL, 0, 1), magic=b"GET ")[: wire.REQUEST.size], Status.MALFORMED),
    "absurd count": (struct.pack("<4sIQQ", wire.REQUEST_MAGIC, 1 << 31, EPOCH, 0), Status.MALFORMED),
}


def test_requests_outside_the_contract_get_no_bytes_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as (transports, arena):
            address = transports.peer().tcp_address
            for name, (data, expected) in REFUSED.items():
                caplog.clear()
                answer = await asyncio.to_thread(ask, address, data)
                assert status(answer) is expected and len(answer) == wire.REPLY.size, name
                assert any(record.levelno == logging.WARNING for record in caplog.records), name
            for cut in (1, wire.REQUEST.size, wire.REQUEST.size + 3):  # a reader that leaves in the middle
                assert await asyncio.to_thread(ask, address, request((POOL, 0, 1))[:cut]) == b""
            answer = await asyncio.to_thread(ask, address, request((POOL, 5, 10), (POOL, 0, 0), (POOL, 0, 5)))
            assert status(answer) is Status.OK
            assert answer[wire.REPLY.size :] == bytes(arena.view[5:15]) + bytes(arena.view[:5])

    asyncio.run(run())


@contextlib.contextmanager
def impostor(answer: bytes):
    """A server that says the same thing to everybody, then nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            sock, _ = await loop.sock_accept(listener)
            held.append(sock)
            await loop.sock_sendall(sock, answer)

    task = asyncio.ensure_future(run())
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        task.cancel()
        for sock in [listener, *held]:
            sock.close()


WRONG = {
    "not our protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", TransferError),
    "other length": (wire.REPLY.pack(wire.REPLY_MAGIC, 0, 0, 11), TransferError),
    "unknown status": (wire.REPLY.pack(wire.REPLY_MAGIC, 99, 0, 0), TransferError),
    "restarted": (wire.REPLY.pack(wire.REPLY_MAGIC, Status.STALE_EPOCH, 0, 0), StaleEpoch),
    "half the bytes": (wire.REPLY.pack(wire.REPLY_MAGIC, 0, 0, 10) + b"12345", ReadTimeout),
    "nothing": (b"", ReadTimeout),
}


def test_a_wrong_server_is_an_error_and_never_bytes() -> None:
    async def run() -> None:
        async with serving() as (transports, _):
            peer, span = Peer(instance_id="other", epoch=5), transports.span(POOL, 0, 10)
            peer.pools.add(id=POOL, base=1, length=LENGTH)
            for name, (answer, error) in WRONG.items():
                with impostor(answer) as peer.tcp_address:
                    handle = transports.read(peer, [Read(span, (Slice(POOL, 500, 10),))], soon(0.5))
                    with pytest.raises(error):
                        await handle
                    await asyncio.wait_for(handle.ended, 5)
                assert error is not None, name
            peer.tcp_address = "127.0.0.1:1"  # nobody there
            with pytest.raises(TransferError):
                await transports.read(peer, [Read(span, (Slice(POOL, 500, 10),))], soon())

    asyncio.run(run())


def test_what_has_come_counts_while_the_rest_does_not_come_and_an_abort_ends_it() -> None:
    async def run() -> None:
        async with serving() as (transports, arena):
            peer = Peer(instance_id="other", epoch=5)
            peer.pools.add(id=POOL, base=1, length=LENGTH)
            reads = [Read(transports.span(POOL, at, 10), (Slice(POOL, 500 + 2 * at, 10),)) for at in (0, 50)]
            with impostor(wire.REPLY.pack(wire.REPLY_MAGIC, 0, 0, 20) + bytes(arena.view[:12])) as peer.tcp_address:
                handle = transports.read(peer, reads, soon())
                async with asyncio.timeout(5):
                    await until(lambda: handle.verified > 0)
                    assert not handle.settled.done()
                    handle.abort()
                    await handle.ended
                assert handle.verified == 1 and bytes(arena.view[500:510]) == bytes(arena.view[:10])

    asyncio.run(run())


def test_reads_beyond_the_limit_are_refused_at_once_and_the_rest_end_by_their_deadline() -> None:
    async def run() -> None:
        async with serving() as (transports, _):
            peer, span = Peer(instance_id="other", epoch=5), transports.span(POOL, 0, 10)
            peer.pools.add(id=POOL, base=1, length=LENGTH)
            with impostor(b"") as peer.tcp_address:
                limit = IN_FLIGHT_MAX + WAITING_MAX
                handles = [
                    transports.read(peer, [Read(span, (Slice(POOL, 500, 10),))], soon(0.7)) for _ in range(limit + 5)
                ]
                results = await asyncio.gather(*handles, return_exceptions=True)
                assert [type(r) for r in results].count(TransferError) == 5
                assert [type(r) for r in results].count(ReadTimeout) == limit
                async with asyncio.timeout(10):
                    for handle in handles:
                        await handle.ended
            mine = transports.peer()
            report = await transports.read(mine, [Read(span, (Slice(POOL, 500, 10),))], soon())
            assert report.bytes == 10

    asyncio.run(run())
