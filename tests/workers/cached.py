"""A cache node beside both workers, in one process: real index, real Valkey, the node's own core and service."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator

import grpc

from cachestore.arena import Arena
from cachestore.index import CacheIndex, Match
from cachestore.node.core import NodeCore
from cachestore.node.edge import CacheNodeEdge
from cachestore.node.intake import Identity, Intake
from cachestore.node.metrics import NodeMetrics
from cachestore.spans import ARENA_POOL
from cachestore.transports import MemoryFabric, TransportSet
from moonrelay.membership import Member
from moonrelay.prefix import prefix_hashes
from moonrelay.stubs.v1 import cache_pb2_grpc, worker_pb2
from moonrelay.valkey import connect
from tests.workers.world import Prefilled, World, prefill_request, running, tokens_of, until

roots = (number.to_bytes(16, "big") for number in itertools.count(1))


class CacheNode:
    """The node's own core, intake and service in this process; also the list of nodes that workers see."""

    def __init__(self, url: str, fabric: MemoryFabric) -> None:
        self.redis = connect(url)
        self.index = CacheIndex(self.redis, 64)
        identity = Identity(instance_id="cachestore-0", epoch=time.monotonic_ns())
        self.arena = Arena(64 << 20)
        self.core = NodeCore(64 << 20, longest_transfer_ms=50)
        self.transports = TransportSet.in_memory("cachestore-0", identity.epoch, fabric)
        self.transports.register(ARENA_POOL, self.arena.base, self.arena.length)
        intake = Intake(self.core, self.transports, self.index, identity, NodeMetrics(), pull_timeout_ms=5_000)
        self.bugs: list[BaseException] = []
        edge = CacheNodeEdge(self.core, intake, identity, NodeMetrics(), self.bugs.append)
        self.server = grpc.aio.server()
        cache_pb2_grpc.add_CacheNodeServicer_to_server(edge, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self._member = Member(
            instance_id="cachestore-0", role="cachestore", epoch=identity.epoch, grpc_address=f"127.0.0.1:{port}"
        )

    async def start(self) -> None:
        await self.transports.start()
        await self.server.start()

    def members(self, role: str) -> tuple[Member, ...]:
        peer = self.transports.peer().SerializeToString()
        known = Member(**{**{f: getattr(self._member, f) for f in self._member.__struct_fields__}, "peer": peer})
        return (known,) if role == "cachestore" else ()

    def find(self, instance_id: str, epoch: int) -> Member | None:
        return next((m for m in self.members("cachestore") if (m.instance_id, m.epoch) == (instance_id, epoch)), None)

    async def match(self, prompt: list[int], root: bytes) -> Match:
        hashes = prefix_hashes(root, prompt, 64)
        return await self.index.match(root, hashes, len(prompt), self.members("cachestore"))

    async def close(self) -> None:
        await self.server.stop(None)
        self.index.close()
        await self.redis.aclose()
        assert not self.bugs


@contextlib.asynccontextmanager
async def cached_world(
    valkey,
    make_engine,
    backend,
    *,
    publish_inflight_max: int = 2,
    kept_share: float = 0.0,
    snapshot_dtype: str = "fp32",
    **how,
) -> AsyncIterator[tuple[World, CacheNode]]:
    nodes: list[CacheNode] = []

    async def prepare(world: World) -> None:
        nodes.append(CacheNode(valkey.url, world.fabric))
        await nodes[0].start()
        world.nodes = nodes[0]
        world.publish_inflight_max, world.kept_share = publish_inflight_max, kept_share
        world.snapshot_dtype = snapshot_dtype

    try:
        async with running(make_engine, backend, prepare=prepare, **how) as world:
            yield world, nodes[0]
    finally:
        for node in nodes:
            await node.close()


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=length)


async def stored(world: World, prompt: list[int], root: bytes, *cuts: int) -> Prefilled:
    """Prefill cold, storing blocks and snapshots, and wait until they can be found; the handoff is let go."""
    ready = await world.prefilled(prefill_request(prompt, root=root, snapshot_at=cuts, store=True))
    await world.prefill_stub.ReleaseHandoff(
        worker_pb2.ReleaseHandoffRequest(handoff_id=ready.opened.handoff_id, fence=ready.opened.fence)
    )
    await until(lambda: world.prefill.prompts.num_background == 0)
    return ready


async def continued(world: World, request: worker_pb2.PrefillRequest) -> tuple[Prefilled, list[int]]:
    reservation_id = await world.reserve(list(request.prompt_ids), request.sampling.max_tokens)
    ready = await world.prefilled(request)
    rest = await tokens_of(world.adopt(request, reservation_id, ready.opened))
    return ready, [ready.first_token.id, *rest]
