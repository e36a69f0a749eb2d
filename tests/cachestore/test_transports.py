"""One suite for every transport: what a read promises, whoever moves the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from tests_cachestore import LENGTH, POOL, MemoryPeer, ProcessPeer, Reader, soon

from cachestore.checksum import checksum
from cachestore.transports import ChecksumMismatch, Landing, MemoryFabric, Read, ReadTimeout, Slice
from moonrelay.errors import InvariantError, StaleEpoch, TransferError
from moonrelay.stubs.v1.common_pb2 import Span

TRANSPORTS = ("memory", "tcp", "nixl")


@contextlib.asynccontextmanager
async def world(transport: str, *epochs: int) -> AsyncIterator[tuple[Reader, list]]:
    """A reader and peers of one instance id, one per epoch."""
    fabric = MemoryFabric()
    reader = Reader(transport, fabric)
    await reader.transports.start()
    peers: list = []
    for epoch in epochs:
        peers.append(await start_peer(transport, fabric, epoch))
    try:
        yield reader, peers
    finally:
        await reader.transports.close()
        for peer in peers:
            peer.close()


async def start_peer(transport: str, fabric: MemoryFabric, epoch: int):
    if transport == "memory":
        peer = MemoryPeer(fabric, "peer", epoch)
        await peer.start()
        return peer
    return await asyncio.to_thread(ProcessPeer, transport, "peer", epoch)


def whole(span: Span, offset: int = 0) -> Read:
    return Read(span, (Slice(1, offset, span.length),))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_read_promises(transport: str) -> None:
    """Bytes, refusals and altered bytes, on one peer that stays usable throughout."""

    async def run() -> None:
        async with world(transport, 11) as (reader, [peer]):
            opened = await reader.transports.connect(peer.peer, soon())
            assert (opened.transport, opened.bytes, opened.note) == (transport, 0, None)
            await bytes_arrive(transport, reader, peer)
            await scattered_bytes_arrive(reader, peer)
            await many_at_once(reader, peer)
            await bad_reads_are_refused(reader, peer)
            await altered_bytes_are_refused(reader, peer)
            await bytes_arrive(transport, reader, peer)

    asyncio.run(run())


async def bytes_arrive(transport: str, reader: Reader, peer) -> None:
    for offset, length in ((4099, 1), (8192, 64 << 10), (12345, (9 << 20) + 3), (LENGTH - 5, 5), (77, 0)):
        for at_once in (False, True):
            read = whole(peer.bytes.span(offset, length), 13)
            handle = reader.transports.read(peer.peer, [read], soon(), at_once=at_once)
            report = await handle
            assert handle.ended.done()
            assert (report.transport, report.bytes, report.note) == (transport, length, None)
            assert reader.landed(13, length) == peer.bytes.data[offset : offset + length].tobytes()
            reader.memory[13 : 13 + length] = 0


async def scattered_bytes_arrive(reader: Reader, peer) -> None:
    """Many spans at once; adjacent, apart, empty, and one that lands in three places."""
    reads, expected = [], []
    at = 0
    for index, length in enumerate([300, 0, 70_000, 70_000, (5 << 20) + 1] * 30):
        offset = (index * 999_983) % (LENGTH - length)
        span = peer.bytes.span(offset, length)
        third = length // 3
        parts = [third, 0, length - third] if index % 7 == 0 else [length]
        into = []
        for part in parts:
            into.append(Slice(1, at, part))
            at += part + (index % 2) * 11
        reads.append(Read(span, tuple(into)))
        expected.append((into, peer.bytes.data[offset : offset + length].tobytes()))
        if at > 12 << 20:
            break
    await reader.transports.read(peer.peer, reads, soon())
    for into, want in expected:
        assert b"".join(reader.landed(s.offset, s.length) for s in into) == want


async def many_at_once(reader: Reader, peer) -> None:
    spans = [peer.bytes.span(index * 8191, 4096) for index in range(64)]
    handles = [
        reader.transports.read(peer.peer, [whole(span, index * 4096)], soon()) for index, span in enumerate(spans)
    ]
    await asyncio.gather(*handles)
    for index, span in enumerate(spans):
        assert checksum(reader.landed(index * 4096, 4096)) == span.xxh3


async def bad_reads_are_refused(reader: Reader, peer) -> None:
    good = peer.bytes.span(0, 64)
    for pool, offset, length in ((POOL, LENGTH - 63, 64), (POOL, 1 << 60, 64), (POOL + 1, 0, 64)):
        handle = reader.transports.read(
            peer.peer, [Read(Span(pool=pool, offset=offset, length=length), (Slice(1, 0, length),))], soon()
        )
        with pytest.raises(TransferError):
            await handle
        assert handle.ended.done()
    for into in (Slice(1, LENGTH - 63, 64), Slice(2, 0, 64), Slice(1, 0, 63)):
        with pytest.raises(InvariantError):
            reader.transports.read(peer.peer, [Read(good, (into,))], soon())


async def altered_bytes_are_refused(reader: Reader, peer) -> None:
    await asyncio.to_thread(peer.alter_first_byte)
    try:
        for length in (1, 9 << 20):
            handle = reader.transports.read(
                peer.peer,
                [whole(peer.bytes.span(64, 64)), whole(peer.bytes.span(0, length), 64)],
                soon(),
                at_once=True,
            )
            with pytest.raises(ChecksumMismatch):
                await handle
            assert handle.ended.done() and handle.verified == 1
    finally:
        await asyncio.to_thread(peer.alter_first_byte)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_peer_is_an_error_at_once_and_a_restarted_one_is_another(transport: str) -> None:
    async def run() -> None:
        async with world(transport, 21) as (reader, peers):
            [first] = peers
            await reader.transports.read(first.peer, [whole(first.bytes.span(0, 1000))], soon())
            big = reader.transports.read(first.peer, [whole(first.bytes.span(0, LENGTH - 1))], soon(30))
            await asyncio.to_thread(first.kill)
            # Killed in the middle: whole and verified, or refused; never in between, never hanging.
            with contextlib.suppress(TransferError):
                await big
                assert reader.memory[: LENGTH - 1].tobytes() == first.bytes.data[:-1].tobytes()
            assert big.ended.done()
            started = time.monotonic()
            with pytest.raises(TransferError):
                await reader.transports.read(first.peer, [whole(first.bytes.span(0, 1000))], soon(30))
            assert time.monotonic() - started < 5
            fabric = first.fabric if transport == "memory" else MemoryFabric()
            peers.append(await start_peer(transport, fabric, 22))
            second = peers[-1]
            await reader.transports.read(second.peer, [whole(second.bytes.span(5, 1000))], soon())
            assert reader.landed(0, 1000) == second.bytes.data[5:1005].tobytes()
            with pytest.raises(StaleEpoch):
                await reader.transports.read(first.peer, [whole(first.bytes.span(0, 1000))], soon())

    asyncio.run(run())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_peer_costs_the_deadline_and_no_memory_is_touched_after_the_end(transport: str) -> None:
    async def run() -> None:
        async with world(transport, 31) as (reader, [peer]):
            await reader.transports.read(peer.peer, [whole(peer.bytes.span(0, 10))], soon())
            peer.stop()
            landing = Landing()
            handle = landing.add(reader.transports.read(peer.peer, [whole(peer.bytes.span(0, 8 << 20))], soon(0.3)))
            if transport == "nixl":  # the kernel copies from a stopped process as well
                await handle
            else:
                with pytest.raises(ReadTimeout) as caught:
                    await handle
                assert caught.value.ended is handle.ended
            task = asyncio.ensure_future(
                landing.add(reader.transports.read(peer.peer, [whole(peer.bytes.span(0, 64))], soon(5)))
            )
            await asyncio.wait([task], timeout=0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            peer.resume()
            async with asyncio.timeout(10):
                await landing.ended()
            assert not landing.pending

    asyncio.run(run())
