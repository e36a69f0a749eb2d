"""Our side of the cache bench: a real cache node, a real Valkey's index, and a client as the workers have one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("UCX_MODULES", "^efa")

import numpy as np
from cache_loads import LEASE_BLOCKS, READ_SIZES, Load

from cachestore.arena import Arena
from cachestore.client import CacheClient, Offer
from cachestore.index import CacheIndex
from cachestore.transports import Landing, Read, Slice, TransportSet, nixl_agent
from cachestore.transports.plan import GROUP_BYTES
from moonrelay.children import dying_with_parent
from moonrelay.membership import Member, Membership
from moonrelay.stubs.v1 import cache_pb2
from moonrelay.stubs.v1.common_pb2 import Peer, Span
from moonrelay.valkey import connect

SOURCE, LANDING = 0, 1
SOURCE_BYTES, LANDING_BYTES = 64 << 20, 256 << 20  # the landing pool is walked: no side works in its last-level cache
PAGE = 4_096
BLOCK_TOKENS = 64
NODE_BYTES = 640 << 20
DEADLINE_S = 30.0
READ_PLACES = 16


class Unverified:
    """Stands in for the transport's verifier in the bench alone: what a pull costs without checksums."""

    seconds = 0.0

    def __init__(self, *_: object) -> None:
        pass

    def landed(self, _: object) -> None:
        pass


class Ours:
    """One client and the cluster it reads from."""

    name = "moonrelay"

    def __init__(self, url: str, cluster: str) -> None:
        self._redis = connect(url)
        self.membership = Membership(self._redis, cluster)
        self.index = CacheIndex(self._redis, BLOCK_TOKENS)
        self.source, self.landing = Arena(SOURCE_BYTES), Arena(LANDING_BYTES)
        self.scratch = Arena(LANDING_BYTES)  # the memcpy's source
        for arena, seed in ((self.source, 1), (self.scratch, 2), (self.landing, 3)):
            words = np.frombuffer(arena.view, np.uint64)
            words[:] = np.random.default_rng(seed).integers(0, 1 << 62, len(words))
        self._chains: dict[Load, tuple[bytes, list[list[bytes]]]] = {}
        self._at = 0

    async def open(self) -> None:
        self.transports = TransportSet.open("bench", await self.membership.next_epoch())
        self.transports.register(SOURCE, self.source.base, self.source.length)
        self.transports.register(LANDING, self.landing.base, self.landing.length)
        await self.transports.start()
        self.client = CacheClient(self.transports, self.membership)
        self._beats = asyncio.create_task(self.membership.run())
        found = await self.membership.wait_for(lambda m: bool(m.members("cachestore")), time.monotonic() + DEADLINE_S)
        assert found, "the cache node did not join"

    async def close(self) -> None:
        self._beats.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beats
        self.index.close()
        await self.client.close()
        await self.transports.close()
        await self._redis.aclose()

    @property
    def node(self) -> Member:
        return self.membership.members("cachestore")[0]

    async def put(self, load: Load) -> None:
        root = secrets.token_bytes(16)
        chains = [[secrets.token_bytes(16) for _ in range(load.values)] for _ in range(load.sets)]
        for hashes in chains:
            await self._publish(root, hashes, load.value_bytes)
        self._chains[load] = (root, chains)

    async def _publish(self, root: bytes, hashes: list[bytes], value_bytes: int) -> None:
        offers, last = [], len(hashes) - 1
        spans = [
            self.transports.span(SOURCE, (i * value_bytes) % (SOURCE_BYTES - PAGE), value_bytes)
            for i in range(len(hashes))
        ]
        for depth, (name, span) in enumerate(zip(hashes, spans, strict=True)):
            parent = hashes[depth - 1] if depth else None
            offers.append(Offer(kind="block", prefix_hash=name, depth=depth, spans=[span], parent=parent))
        state = self.transports.span(SOURCE, SOURCE_BYTES - PAGE, PAGE)
        offers.append(Offer(kind="snapshot", prefix_hash=hashes[last], depth=last + 1, spans=[state]))
        report = await self.client.publish(self.node, root, offers, time.monotonic() + DEADLINE_S)
        assert report.stored == len(offers), report

    def _room(self, nbytes: int) -> int:
        """Where the next bytes land: the pool is walked round and round."""
        at = 0 if self._at + nbytes > LANDING_BYTES else self._at
        self._at = at + nbytes
        return at

    def memcpy(self, nbytes: int) -> float:
        at = self._room(nbytes)
        began = time.perf_counter()
        ctypes.memmove(self.landing.base + at, self.scratch.base + at, nbytes)
        return time.perf_counter() - began

    async def get(self, load: Load, index: int) -> float:
        """Seconds from a prompt's hashes to its verified bytes: lookup, lease, read, verify. The lease's release is
        under way when this ends, and runs into the next get's time."""
        root, chains = self._chains[load]
        hashes, size = chains[index], load.value_bytes
        at = self._room(load.bytes + PAGE)
        rows = [Slice(LANDING, at + i * size, size) for i in range(load.values)]
        state = Slice(LANDING, at + load.bytes, PAGE)
        landing = Landing()
        began = time.perf_counter()
        match = await self.index.match(
            root, hashes, load.values * BLOCK_TOKENS + 1, self.membership.members("cachestore")
        )
        hit = match.hit()
        assert hit is not None, match
        report = await self.client.fetch(hit, root, hashes, rows, state, time.monotonic() + DEADLINE_S, landing)
        seconds = time.perf_counter() - began
        assert report.miss_reason is None, report
        return seconds

    def same_bytes(self, load: Load) -> bool:
        """Whether the last get's first value is what was published."""
        at, size = self._at - load.bytes - PAGE, load.value_bytes
        return bytes(self.landing.view[at : at + size]) == bytes(self.source.view[:size])

    async def read(self, peer: Peer, span: Span, verified: bool) -> tuple[float, float, str]:
        """Seconds of one pull by the transport's own clock and as the event loop sees it; and which transport."""
        at = self._room(span.length)
        read = Read(span, (Slice(LANDING, at, span.length),))
        with contextlib.nullcontext() if verified else mock.patch.object(nixl_agent, "Verifier", Unverified):
            began = time.perf_counter()
            report = await self.transports.read(peer, [read], time.monotonic() + DEADLINE_S)
            awaited = time.perf_counter() - began
        overlapped = span.length > GROUP_BYTES  # then the pull's seconds hold the verifying
        return report.pull_seconds + report.verify_seconds * (not overlapped), awaited, report.transport

    async def put_long(self) -> tuple[bytes, list[bytes]]:
        """A chain of 2,000 small blocks with a snapshot at its end."""
        root, hashes = secrets.token_bytes(16), [secrets.token_bytes(16) for _ in range(LEASE_BLOCKS)]
        await self._publish(root, hashes, PAGE)
        return root, hashes

    async def lookup(self, root: bytes, hashes: list[bytes]) -> Any:
        nodes = self.membership.members("cachestore")
        match = await self.index.match(root, hashes, len(hashes) * BLOCK_TOKENS + 1, nodes)
        hit = match.hit()
        assert hit is not None and hit.tokens == len(hashes) * BLOCK_TOKENS, match
        return hit

    async def lease(self, root: bytes, hashes: list[bytes]) -> None:
        """Lease the whole chain on its node, and give the lease back, which travels with the next one."""
        chain = cache_pb2.Chain(last=hashes[-1], first_block=0, count=len(hashes))
        request = cache_pb2.LeaseRequest(
            root=root, node_epoch=self.node.epoch, snapshot=hashes[-1], ttl_ms=5_000, chains=[chain]
        )
        self.client.release(self.node, await self.client.lease(self.node, request, DEADLINE_S))


@contextlib.asynccontextmanager
async def source_process() -> AsyncIterator[tuple[Peer, dict[int, list[Span]]]]:
    """A process whose pool is read without a cache's protocol: the transports alone."""
    command = dying_with_parent(sys.executable, __file__, "--source")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        made = json.loads(await asyncio.to_thread(process.stdout.readline))
        spans = {int(n): [Span.FromString(bytes.fromhex(s)) for s in found] for n, found in made["spans"].items()}
        yield Peer.FromString(bytes.fromhex(made["peer"])), spans
    finally:
        process.stdin.close()
        process.wait(timeout=30)


async def serve_source() -> None:
    arena = Arena(LANDING_BYTES)
    np.frombuffer(arena.view, np.uint64)[:] = np.random.default_rng(0).integers(0, 1 << 62, LANDING_BYTES // 8)
    transports = TransportSet.open("bench-source", 1)
    transports.register(0, arena.base, LANDING_BYTES)
    await transports.start()
    step = LANDING_BYTES // READ_PLACES
    spans = {
        size: [transports.span(0, i * step, size).SerializeToString().hex() for i in range(READ_PLACES)]
        for size in READ_SIZES
    }
    print(json.dumps({"peer": transports.peer().SerializeToString().hex(), "spans": spans}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await transports.close()


@contextlib.contextmanager
def cache_node(url: str, cluster: str, log: Path) -> Any:
    command = dying_with_parent(
        sys.executable, "-m", "moonrelay", "cachestore", "--redis-url", url, "--cluster", cluster,
        "--instance-id", "cachestore-0", "--dram-bytes", str(NODE_BYTES),
    )  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__" and "--source" in sys.argv:
    asyncio.run(serve_source())
