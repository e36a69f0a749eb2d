"""Lease calls over a line: the statuses of gRPC, replies in any order, and no caller left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import uvloop
from test_node import until

from cachestore import lines
from cachestore.lines import HEADER, MAGIC, LineClient, LineServer
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc

SOON_S = 5.0


@pytest.fixture(autouse=True, params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test on both loops that processes have: their transports are not of one class."""
    monkeypatch.setattr(asyncio, "run", request.param)


class Servicer(cache_pb2_grpc.CacheNodeServicer):
    """Answers a lease with its own time to live; a root of one byte names something else to do."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.released: list[str] = []
        self.cancelled = 0

    async def Lease(self, request: cache_pb2.LeaseRequest, context: Any) -> cache_pb2.LeaseReply:
        try:
            if request.root == b"w":
                await self.gate.wait()
            if request.root == b"a":
                await context.abort(grpc.StatusCode.NOT_FOUND, "a block is not here")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return cache_pb2.LeaseReply(ttl_ms=request.ttl_ms, lease_id="lease-1", spans=request.snapshot)

    async def Release(self, request: cache_pb2.ReleaseRequest, context: Any) -> cache_pb2.ReleaseReply:
        self.released.append(request.lease_id)
        return cache_pb2.ReleaseReply()


@contextlib.asynccontextmanager
async def served(servicer: Servicer, at_once: Any = None) -> AsyncIterator[tuple[LineServer, int]]:
    server = LineServer(servicer, at_once)
    port = await server.start("127.0.0.1")
    running = asyncio.ensure_future(server.run())
    try:
        yield server, port
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await server.close()


async def lease(
    client: LineClient, root: bytes, ttl_ms: int = 7, timeout_s: float = SOON_S, spans: bytes = b""
) -> Any:
    request = cache_pb2.LeaseRequest(root=root, ttl_ms=ttl_ms, snapshot=spans)
    return await client.call("Lease", request, cache_pb2.LeaseReply, timeout_s)


async def refusal(client: LineClient, root: bytes, timeout_s: float = SOON_S) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lease(client, root, timeout_s=timeout_s)
    return refused.value.code(), refused.value.details()


def test_a_line_answers_as_grpc_does() -> None:
    async def run() -> None:
        servicer = Servicer()
        grpc_server = grpc.aio.server()
        cache_pb2_grpc.add_CacheNodeServicer_to_server(servicer, grpc_server)
        grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
        async with served(servicer) as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub, client = cache_pb2_grpc.CacheNodeStub(channel), LineClient(f"127.0.0.1:{port}")
            good = cache_pb2.LeaseRequest(root=b"x", ttl_ms=9, snapshot=b"s" * 1_000_000)
            assert await stub.Lease(good) == await client.call("Lease", good, cache_pb2.LeaseReply, SOON_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Lease(cache_pb2.LeaseRequest(root=b"a"))
            assert await refusal(client, b"a") == (refused.value.code(), refused.value.details())
            client.tell("Release", cache_pb2.ReleaseRequest(lease_id="l"))
            assert (await lease(client, b"x")).ttl_ms == 7  # replies may overtake each other, requests do not
            assert servicer.released == ["l"]
            client.close()
        await grpc_server.stop(None)

    asyncio.run(run())


def test_what_needs_no_waiting_is_answered_at_once_and_everything_else_by_its_method() -> None:
    def at_once(name: str, request: Any) -> Any:
        return cache_pb2.LeaseReply(lease_id=f"{name} at once") if request.root == b"n" else None

    async def run() -> None:
        async with served(Servicer(), at_once) as (_, port):
            client = LineClient(f"127.0.0.1:{port}")
            slow = asyncio.ensure_future(lease(client, b"w"))
            found = [(await lease(client, root)).lease_id for root in (b"n", b"x", b"n")]
            assert found == ["Lease at once", "lease-1", "Lease at once"] and not slow.done()
            assert (await refusal(client, b"a"))[0] is grpc.StatusCode.NOT_FOUND
            slow.cancel()
            client.close()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_frames_are_the_same_however_the_bytes_are_cut(seed: int) -> None:
    class Frames(lines._Frames):
        def frame(self, word: int, call_id: int, timeout_ms: int, body: bytes) -> None:
            found.append((word, call_id, timeout_ms, body))

    rng, found = random.Random(seed), []
    sent = [(i % 3, i, 7 * i, rng.randbytes(rng.choice([0, 1, 30, 900]))) for i in range(60)]
    stream = b"".join(HEADER.pack(MAGIC, *words, len(body)) + body for *words, body in sent)
    frames, at = Frames(1_000), 0
    while at < len(stream):
        size = rng.choice([1, 3, HEADER.size, 50, 400, 3_000])
        frames.data_received(stream[at : at + size])
        at += size
    assert found == sent


def test_processes_of_one_host_have_a_unix_line_and_others_tcp() -> None:
    async def run() -> None:
        async with served(Servicer()) as (server, port):
            assert server.local
            for address in (f"127.0.0.1:1{server.local}", f"127.0.0.1:{port}/of-another-host"):
                client = LineClient(address)
                assert (await lease(client, b"x", ttl_ms=5)).ttl_ms == 5
                client.close()
        assert (await refusal(LineClient(f"127.0.0.1:1{server.local}"), b"x"))[0] is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_slow_call_holds_up_no_other_and_ends_at_its_deadline() -> None:
    async def run() -> None:
        servicer = Servicer()
        async with served(servicer) as (_, port):
            client = LineClient(f"127.0.0.1:{port}")
            slow = asyncio.ensure_future(lease(client, b"w", ttl_ms=1))
            assert [(await lease(client, b"x", ttl_ms=n)).ttl_ms for n in (2, 3)] == [2, 3]
            assert not slow.done()
            assert (await refusal(client, b"w", timeout_s=0.05))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            servicer.gate.set()
            assert (await slow).ttl_ms == 1
            client.close()

    asyncio.run(run())


def test_a_node_that_goes_ends_every_call_and_is_found_again() -> None:
    async def run() -> None:
        servicer = Servicer()
        async with served(servicer) as (server, port):
            client = LineClient(f"127.0.0.1:{port}")
            await lease(client, b"x")  # there is a connection, so that requests arrive in order
            waiting = [asyncio.ensure_future(refusal(client, b"w")) for _ in range(3)]
            await lease(client, b"x")
            for line in list(server.open):
                line.hang_up()
            assert {code for code, _ in await asyncio.gather(*waiting)} == {grpc.StatusCode.UNAVAILABLE}
            assert (await lease(client, b"x", ttl_ms=4)).ttl_ms == 4  # a new connection
            await until(lambda: servicer.cancelled == 3)  # nobody reads their replies
            client.close()
        assert (await refusal(LineClient(f"127.0.0.1:{port}"), b"x"))[0] is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEADER.pack(MAGIC, 0, 1, 1_000, 2) + b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (HEADER.pack(MAGIC, len(lines.METHODS), 1, 1_000, 0), grpc.StatusCode.UNIMPLEMENTED),
        (HEADER.pack(MAGIC, 0, 1, 1_000, lines.REQUEST_BYTES_MAX + 1), None),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", None),
    ],
)
def test_what_is_no_call_is_refused_or_hung_up_on(sent: bytes, status: grpc.StatusCode | None) -> None:
    async def run() -> bytes:
        async with served(Servicer()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.readexactly(HEADER.size), SOON_S)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b""
            finally:
                writer.close()

    answer = asyncio.run(run())
    assert (HEADER.unpack(answer)[1] if answer else None) == (status and status.value[0])


def test_too_many_calls_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CALLS_MAX", 2)

    async def run() -> None:
        servicer = Servicer()
        async with served(servicer) as (_, port):
            client = LineClient(f"127.0.0.1:{port}")
            held = [asyncio.ensure_future(lease(client, b"w")) for _ in range(2)]
            await asyncio.wait(held, timeout=0.05)
            assert (await refusal(client, b"x"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            servicer.gate.set()
            await asyncio.gather(*held)
            client.close()

    asyncio.run(run())


def test_a_silent_connection_is_given_up_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SILENT_S", 0.02)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            client = LineClient(f"127.0.0.1:{silent.getsockname()[1]}")
            for _ in range(2):
                assert (await refusal(client, b"x", timeout_s=0.05))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
                silent.accept()[0].close()  # a connection for each try
            client.close()

    asyncio.run(run())
