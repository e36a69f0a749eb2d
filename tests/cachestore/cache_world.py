"""A cache node in this process or in one of its own, and workers that publish to it and fetch from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
from peer_child import pattern
from tests_cachestore import ROOT as CHECKOUT
from tests_cachestore import soon

from cachestore.arena import Arena
from cachestore.client import CacheClient, FetchReport, Offer, PublishReport
from cachestore.index import CacheIndex, Match
from cachestore.lines import LineServer
from cachestore.node.core import NodeCore
from cachestore.node.edge import CacheNodeEdge
from cachestore.node.intake import Identity, Intake
from cachestore.node.metrics import NodeMetrics
from cachestore.node.replication import Replication
from cachestore.node.states import WITH_FILE, State
from cachestore.node.tiers import DiskTier, Pace
from cachestore.spans import ARENA_POOL
from cachestore.transports import Landing, MemoryFabric, Slice, TransportSet
from moonrelay.membership import Load, Member, Membership
from moonrelay.prefix import prefix_hashes
from moonrelay.stubs.v1 import cache_pb2_grpc
from moonrelay.valkey import connect

BLOCK_TOKENS = 64
BLOCK_BYTES = 10_000  # not a multiple of a page
STATE_PARTS = (30_000, 7_001)
STATE_BYTES = sum(STATE_PARTS)
DRAFT_BYTES = 1_300
ROWS, STATE, DRAFTS = 0, 1, 2  # a worker's pools
BLOCKS_MAX = 32


@dataclass(frozen=True)
class Prompt:
    """A prompt whose cached bytes are decided by its hashes."""

    root: bytes
    tokens: tuple[int, ...]

    @property
    def hashes(self) -> list[bytes]:
        return prefix_hashes(self.root, self.tokens, BLOCK_TOKENS)

    def block(self, index: int) -> bytes:
        return pattern(int.from_bytes(self.hashes[index], "big"), BLOCK_BYTES).tobytes()

    def draft(self, index: int, drafter: str) -> bytes:
        seed = int.from_bytes(self.hashes[index], "big") + int.from_bytes(drafter.encode(), "big")
        return pattern(seed, DRAFT_BYTES).tobytes()

    def state(self, blocks: int) -> bytes:
        return pattern(int.from_bytes(self.hashes[blocks - 1], "big") + 1, STATE_BYTES).tobytes()


def prompt(root: bytes, *runs: tuple[int, int]) -> Prompt:
    """(token id, how many blocks of it) one after the other, and one more token."""
    words = [token for token, blocks in runs for _ in range(blocks * BLOCK_TOKENS)]
    return Prompt(root, (*words, 1))


class Worker:
    """Pools, transports and a cache client, like a prefill worker's."""

    def __init__(self, transports: TransportSet, nodes, redis) -> None:
        self.transports, self.nodes = transports, nodes
        self.rows, self.state = Arena(BLOCKS_MAX * BLOCK_BYTES), Arena(2 * STATE_BYTES)
        self.drafts = Arena(BLOCKS_MAX * DRAFT_BYTES)
        transports.register(ROWS, self.rows.base, self.rows.length)
        transports.register(STATE, self.state.base, self.state.length)
        transports.register(DRAFTS, self.drafts.base, self.drafts.length)
        self.client = CacheClient(transports, nodes)
        self.index = CacheIndex(redis, BLOCK_TOKENS)

    async def close(self) -> None:
        self.index.close()
        await self.client.close()

    def write(self, what: Prompt, blocks: range, snapshots: tuple[int, ...] = ()) -> list[Offer]:
        """Compute them (rows at their index, the state in its slot) and offer them."""
        offers = []
        for i in blocks:
            self.rows.view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] = what.block(i)
            span = self.transports.span(ROWS, i * BLOCK_BYTES, BLOCK_BYTES)
            parent = what.hashes[i - 1] if i else None
            offers.append(Offer(kind="block", prefix_hash=what.hashes[i], depth=i, spans=[span], parent=parent))
        for number, n in enumerate(snapshots):
            at = number * STATE_BYTES
            self.state.view[at : at + STATE_BYTES] = what.state(n)
            spans = [
                self.transports.span(STATE, at, STATE_PARTS[0]),
                self.transports.span(STATE, at + STATE_PARTS[0], STATE_PARTS[1]),
            ]
            offers.append(Offer(kind="snapshot", prefix_hash=what.hashes[n - 1], depth=n, spans=spans))
        return offers

    def with_drafts(self, what: Prompt, offers: list[Offer], drafter: str, blocks: Collection[int]) -> list[Offer]:
        """The offers, with the drafter's rows of these blocks."""
        made = []
        for offer in offers:
            if offer.kind == "block" and offer.depth in blocks:
                at = offer.depth * DRAFT_BYTES
                self.drafts.view[at : at + DRAFT_BYTES] = what.draft(offer.depth, drafter)
                rows = [self.transports.span(DRAFTS, at, DRAFT_BYTES)]
                made.append(replace(offer, drafter=drafter, draft_spans=rows))
            else:
                made.append(offer)
        return made

    async def publish(
        self, node: Member, what: Prompt, blocks: range, snapshots: tuple[int, ...] = (), deadline_s=None
    ) -> PublishReport:
        offers = self.write(what, blocks, snapshots)
        return await self.client.publish(node, what.root, offers, deadline_s or soon())

    async def match(self, what: Prompt) -> Match:
        nodes = self.nodes.members("cachestore")
        return await self.index.match(what.root, what.hashes, len(what.tokens), nodes)

    async def fetch(
        self, what: Prompt, match: Match, landing: Landing | None = None, deadline_s=None, drafter: str = ""
    ) -> FetchReport:
        """Bring the hit into wiped memory; where it claims success, the bytes must be the prompt's."""
        for memory in (self.rows, self.state, self.drafts):
            memory.view[:] = bytes(memory.length)
        blocks = match.tokens // BLOCK_TOKENS
        drafts = [Slice(DRAFTS, i * DRAFT_BYTES, DRAFT_BYTES) for i in range(blocks)] if drafter else []
        rows = [Slice(ROWS, i * BLOCK_BYTES, BLOCK_BYTES) for i in range(blocks)]
        report = await self.client.fetch(
            match.hit(), what.root, what.hashes, rows, Slice(STATE, 0, STATE_BYTES), deadline_s or soon(),
            landing or Landing(), drafter=drafter, draft_into=drafts,
        )  # fmt: skip
        self.check_drafts(what, report, drafter)
        if report.tokens:
            assert report.tokens == match.tokens and report.miss_reason is None
            for i in range(blocks):
                assert bytes(self.rows.view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) == what.block(i)
            assert bytes(self.state.view[:STATE_BYTES]) == what.state(blocks)
        return report

    def check_drafts(self, what: Prompt, report: FetchReport, drafter: str) -> None:
        """Where rows are said to be, there they are."""
        first, end = report.draft_first // BLOCK_TOKENS, report.tokens // BLOCK_TOKENS
        assert report.draft_first <= report.tokens and len(report.draft_xxh3) == end - first
        for i, xxh3 in zip(range(first, end), report.draft_xxh3, strict=True):
            at = i * DRAFT_BYTES
            assert bytes(self.drafts.view[at : at + DRAFT_BYTES]) == what.draft(i, drafter)
            assert xxh3 in (None, self.transports.span(DRAFTS, at, DRAFT_BYTES).xxh3)


class Listed:
    """Members without a Redis behind them."""

    def __init__(self, *members: Member) -> None:
        self.all = list(members)

    def members(self, role: str) -> tuple[Member, ...]:
        return tuple(m for m in self.all if m.role == role)

    def find(self, instance_id: str, epoch: int) -> Member | None:
        return next((m for m in self.all if (m.instance_id, m.epoch) == (instance_id, epoch)), None)


class LocalNode:
    """The node's own core, intake and gRPC service, over in-memory transports, in this process."""

    def __init__(
        self, name: str, epoch: int, fabric: MemoryFabric, redis, dram_bytes: int, disk: Path | None = None,
        disk_bytes: int = 0, others: Listed | None = None, replicate_after: int = 0,
    ) -> None:  # fmt: skip
        self.directory = disk
        self.identity = Identity(instance_id=name, epoch=epoch)
        self.arena = Arena(dram_bytes)
        self.core = NodeCore(dram_bytes, longest_transfer_ms=50, disk_bytes=disk_bytes)
        self.transports = TransportSet.in_memory(name, epoch, fabric)
        self.transports.register(ARENA_POOL, self.arena.base, self.arena.length)
        self.metrics = metrics = NodeMetrics()
        self.intake = Intake(
            self.core, self.transports, CacheIndex(redis), self.identity, metrics, pull_timeout_ms=5_000
        )
        self.bugs: list[BaseException] = []
        self.disk = DiskTier(
            self.core, self.intake.room, self.intake.index,
            lambda offset, length: self.arena.view[offset : offset + length], metrics, disk,
            Pace(lock_wait_s=0.3, pause_s=0.02),
        )  # fmt: skip
        self.work: list[asyncio.Task[None]] = []
        self.client = CacheClient(self.transports, others or Listed())
        self.replication = Replication(
            self.core, self.disk, self.client, others or Listed(), self.identity, metrics, after=replicate_after
        )
        self.edge = CacheNodeEdge(
            self.core, self.intake, self.identity, metrics, self.bugs.append, self.disk, self.replication
        )
        self.lines = LineServer(self.edge, self.edge.at_once)
        self.server = grpc.aio.server()
        cache_pb2_grpc.add_CacheNodeServicer_to_server(self.edge, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> Member:
        await self.disk.open()
        await self.transports.start()
        await self.server.start()
        port = await self.lines.start("127.0.0.1")
        running = (self.disk.run(), self.replication.run(), self.lines.run())
        self.work = [asyncio.ensure_future(each) for each in running]
        return Member(
            instance_id=self.identity.instance_id, role="cachestore", epoch=self.identity.epoch,
            grpc_address=f"127.0.0.1:{self.port}", line_address=f"127.0.0.1:{port}{self.lines.local}",
            peer=self.transports.peer().SerializeToString(),
            load=Load(free_bytes=self.core.stats().free_bytes),
        )  # fmt: skip

    async def close(self) -> None:
        await self.server.stop(None)
        for task in self.work:
            task.cancel()
        for result in await asyncio.gather(*self.work, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        await self.lines.close()
        await self.client.close()
        await self.disk.close()
        self.check_files()
        self.core.check()
        assert not self.bugs

    def check_files(self) -> None:
        """The directory holds what the books say, and at most what was being written or deleted as well."""
        if self.directory is None or self.disk.state != "ready":
            return
        states = {key: self.core.entry(key).state for key in self.core.visible()}
        names = {f"{key.root.hex()}/{key.prefix_hash.hex()}.{key.kind}": state for key, state in states.items()}
        there = {str(path.relative_to(self.directory)) for path in self.directory.glob("*/*")}
        assert {name for name, state in names.items() if state in WITH_FILE - {State.WRITING}} <= there
        stats = self.core.stats().disk
        extra = there - {name for name, state in names.items() if state in WITH_FILE}
        assert stats.num_writing or stats.deleting_bytes or not extra, extra


@dataclass
class LocalWorld:
    fabric: MemoryFabric
    node: LocalNode
    member: Member
    worker: Worker


@contextlib.asynccontextmanager
async def local_world(
    url: str, dram_bytes: int = 4 << 20, disk: Path | None = None, disk_bytes: int = 0
) -> AsyncIterator[LocalWorld]:
    redis, fabric = connect(url), MemoryFabric()
    node = LocalNode("node", time.monotonic_ns(), fabric, redis, dram_bytes, disk, disk_bytes)
    member = await node.start()
    worker = Worker(TransportSet.in_memory("worker", 1, fabric), Listed(member), redis)
    await worker.transports.start()
    try:
        yield LocalWorld(fabric, node, member, worker)
    finally:
        await worker.close()
        await node.close()
        await redis.aclose()


class NodeProcess:
    """`moonrelay cachestore` as an operator runs it."""

    def __init__(self, url: str, cluster: str, directory: Path, *flags: str) -> None:
        self.ready_file = directory / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.log = (directory / "node.log").open("a+")
        command = [sys.executable, "-m", "moonrelay.cli", "cachestore", "--redis-url", url, "--cluster", cluster]
        command += ["--instance-id", "cachestore-0", "--ready-file", str(self.ready_file), *flags]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}
        )

    async def ready(self, membership: Membership, after_epoch: int = 0) -> Member:
        """Wait until the node is a member of this life."""

        def there(now: Membership) -> bool:
            assert self.process.poll() is None, self.output()
            return any(m.epoch > after_epoch for m in now.members("cachestore"))

        assert await membership.wait_for(there, soon(30)), self.output()
        return membership.members("cachestore")[0]

    def info(self) -> dict:
        return json.loads(self.ready_file.read_text())

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()


@contextlib.asynccontextmanager
async def worker_in(url: str, cluster: str, transport: str) -> AsyncIterator[tuple[Worker, Membership]]:
    """A worker with real transports and membership."""
    redis = connect(url)
    membership = Membership(redis, cluster)
    epoch = await membership.next_epoch()
    worker = Worker(TransportSet.open("prefill-0", epoch, transport=transport), membership, redis)
    await worker.transports.start()
    task = asyncio.ensure_future(membership.run())
    try:
        yield worker, membership
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await worker.close()
        await worker.transports.close()
        await redis.aclose()


def untouched(memory: Arena) -> bool:
    return not np.frombuffer(memory.view, dtype=np.uint8).any()
