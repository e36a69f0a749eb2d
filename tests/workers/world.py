"""Real prefill and decode workers in one process: real engines, real gRPC, real transports; no cache, no Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from cachestore.client import Nodes
from cachestore.prompt_cache import WorkerCache
from cachestore.transports import MemoryFabric, TransportSet
from decode.core import ReaderTable
from decode.edge import DecodeEdge
from decode.held import HeldBlocks, NothingHeld
from decode.metrics import ReaderMetrics
from decode.owners import Owners
from decode.reader import Identity, Reader
from engine.engine import Engine
from engine.worker.memory import Memory
from engine.worker.metrics import WorkerMetrics
from engine.worker.prompt import PromptRunner
from engine.worker.service import Gate, Server
from engine.worker.timing import Timing
from model.batch import Backend
from moonrelay.prefix import Fingerprint, prefix_hashes
from moonrelay.stubs.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill.core import HandoffTable
from prefill.edge import PrefillEdge
from prefill.metrics import HandoffMetrics
from prefill.parts import PART_BYTES

TIMING = Timing(transfer_floor_ms=2_000, transfer_min_bytes_per_s=50_000_000, lease_floor_ms=6_000)
FINGERPRINT = Fingerprint(
    model="tiny", weights_revision="w", tokenizer_revision="t", row_dtype="float32", snapshot_dtype="float32",
    layout_version="1", numerics_version="torch", block_tokens=64,
)  # fmt: skip
ROOT = bytes(16)
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "seed": 7, "max_tokens": 6}


def unexpected(bug: BaseException) -> None:
    raise AssertionError("a worker broke an invariant") from bug


@dataclass
class Half:
    """What both workers have."""

    engine: Engine
    memory: Memory
    metrics: WorkerMetrics
    prompts: PromptRunner
    transports: TransportSet
    server: Server
    gate: Gate
    address: str
    fatal: list[BaseException] = field(default_factory=list)

    @property
    def drafter(self) -> str:
        return self.engine.drafter.drafter_id if self.engine.drafter is not None else ""

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


class Prefilled:
    """What a prefill's events said: the first token, the cache's account, and the handoff's own fields."""

    def __init__(
        self,
        opened: worker_pb2.HandoffOpened,
        first: worker_pb2.FirstToken,
        handoff: worker_pb2.HandoffReady,
        manifest: worker_pb2.Manifest | None,
    ) -> None:
        self.opened = opened
        self.first_token, self.cache = first.token, first.cache
        self.manifest, self.finish_reason = manifest, handoff.finish_reason
        self.HasField = handoff.HasField


class World:
    """Made by `running`."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        make_engine: Callable[..., Engine],
        backend: Backend,
        timing: Timing,
        reservation_ttl_ms: int,
    ) -> None:
        self._group, self._make_engine, self._backend = group, make_engine, backend
        self._tasks: list[asyncio.Task[None]] = []
        self.fabric = MemoryFabric()
        self.epochs: dict[str, int] = {}
        self.nodes: Nodes | None = None  # cache nodes for both workers, set before `start`
        self.timing, self.reservation_ttl_ms = timing, reservation_ttl_ms
        self.publish_inflight_max = 2
        self.kept_share = 0.0  # the device tier
        self.snapshot_dtype = "fp32"
        self.part_bytes = PART_BYTES
        self.stream_interval_s = 0.0
        self.tier: HeldBlocks | None = None  # what decode has kept; set before `start`
        self.drafters: dict[str, Path | None] = {}  # by worker, with native backends; empty: the torch backend, none
        self.caches: list[WorkerCache] = []

    async def start(self, transport: str, **settings: int) -> None:
        self.prefill = await self._half("prefill", "prefill-0", transport, settings)
        table = HandoffTable(self.timing)
        self.owner = PrefillEdge(
            self.prefill.prompts, table, self.prefill.gate, HandoffMetrics(self.prefill.metrics, table),
            fingerprint=FINGERPRINT, layout=self.prefill.engine.pools.layout, max_context=4096,
            peer=self.prefill.transports.peer(), address=self.prefill.address, part_bytes=self.part_bytes,
            drafter=self.prefill.drafter,
        )  # fmt: skip
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self.owner, self.prefill.server.grpc)
        self.decode = await self._half("decode", "decode-0", transport, settings)
        self.identity = Identity(
            fingerprint=FINGERPRINT, layout=self.decode.engine.pools.layout,
            vocab_size=self._backend.config.vocab_size, drafter=self.decode.drafter,
        )  # fmt: skip
        readers = ReaderTable()
        metrics = ReaderMetrics(self.decode.metrics, readers)
        self.owners = Owners(self.spawn, metrics)
        held = self.tier or NothingHeld(self.decode.memory)
        self.reader = Reader(
            self.decode.prompts, readers, self.decode.transports, self.owners, held, metrics,
            identity=self.identity, timing=self.timing, reservation_ttl_ms=self.reservation_ttl_ms,
            epochs=lambda: self.epochs,
        )  # fmt: skip
        edge = DecodeEdge(
            self.decode.prompts, self.reader, self.decode.gate, identity=self.identity, max_context=4096,
            stream_interval_s=self.stream_interval_s,
        )  # fmt: skip
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(edge, self.decode.server.grpc)
        for half, work in ((self.prefill, self.owner.run()), (self.decode, self.reader.run())):
            await half.server.start()
            self.spawn(work)
        self.channels = [grpc.aio.insecure_channel(half.address) for half in (self.prefill, self.decode)]
        self.prefill_stub = worker_pb2_grpc.PrefillWorkerStub(self.channels[0])
        self.decode_stub = worker_pb2_grpc.DecodeWorkerStub(self.channels[1])

    def spawn(self, work) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        for task in self._tasks:
            task.cancel()
        await self.owners.close()
        for cache in self.caches:
            await cache.close()
        for half in (self.prefill, self.decode):
            await half.server.stop(0)
            await half.transports.close()
            await asyncio.to_thread(half.engine.stop)
            half.prompts.close()

    async def until_clean(self) -> None:
        """Nothing is held any more; the books of both engines balance."""
        await until(lambda: not (len(self.owner.table) or len(self.reader.table) or sum(self.held())))
        await until(lambda: not (self.prefill.prompts.num_background or self.decode.prompts.num_background))
        for half in (self.prefill, self.decode):
            half.memory.check()
            half.memory.clear()
            stats = half.engine.stats
            await until(lambda: stats().free_blocks == stats().num_blocks and not stats().num_running)  # noqa: B023
            half.engine.check()
            assert half.memory.leaked() == half.memory.leaked() == (0, 0)
        self.owner.table.check()
        self.reader.table.check()

    async def _half(self, source, instance_id: str, transport: str, settings: dict[str, int]) -> Half:
        loop = asyncio.get_running_loop()
        metrics = WorkerMetrics(source, "tiny")
        drafts = {"native": True, "drafter": self.drafters.get(source)} if self.drafters else {}
        engine = self._make_engine(observer=metrics, **drafts, **settings)
        memory = Memory(engine, waiting_max=16, kept_share=self.kept_share)
        metrics.on_memory_freed = lambda: loop.call_soon_threadsafe(memory.serve_waiting)
        metrics.watch(engine.stats, lambda: memory.num_waiting, 64)
        if transport == "memory":
            transports = TransportSet.in_memory(instance_id, 1, self.fabric)
        else:
            transports = TransportSet.open(instance_id, 1, transport=transport)
        for pool, (address, length) in memory.pools().items():
            transports.register(pool, address, length)
        await transports.start()
        cache = None if self.nodes is None else WorkerCache(transports, self.nodes, self.timing.transfer_ms, metrics)
        self.caches += [cache] if cache is not None else []
        prompts = PromptRunner(
            engine, memory, cache, transports.span, metrics, self.spawn,
            admission_wait_ms=30_000, publish_inflight_max=self.publish_inflight_max,
            snapshot_dtype=self.snapshot_dtype,
            drafter=engine.drafter.drafter_id if engine.drafter is not None else "",
        )  # fmt: skip
        server = Server(f"moonrelay.v1.{source.title()}Worker")
        address = server.bind("127.0.0.1:0", None)
        return Half(engine, memory, metrics, prompts, transports, server, Gate(unexpected), address)

    # -- what a router does ---------------------------------------------------------------------------------------

    async def reserve(self, prompt: list[int], max_tokens: int, **more) -> str:
        request = worker_pb2.ReserveRequest(request_id="r", prompt_tokens=len(prompt), max_tokens=max_tokens, **more)
        return (await self.decode_stub.Reserve(request)).reservation_id

    async def prefilled(self, request: worker_pb2.PrefillRequest) -> Prefilled:
        events = [event async for event in self.prefill_stub.Prefill(request)]
        [first] = [event.first_token for event in events if event.HasField("first_token")]
        assert events[0].HasField("opened") and events[-1].HasField("handoff")
        lent = self.owner._lent.get(events[0].opened.handoff_id)
        manifest = None if lent is None else lent._log[-1].manifest  # what a follower would get last
        return Prefilled(events[0].opened, first, events[-1].handoff, manifest)

    async def disaggregated(self, prompt: list[int], **sampling) -> list[int]:
        """Every token of a request that travels through both workers."""
        request = prefill_request(prompt, **sampling)
        reservation_id = await self.reserve(prompt, request.sampling.max_tokens)
        first, rest, ended = None, None, False
        async for event in self.prefill_stub.Prefill(request):
            match event.WhichOneof("event"):
                case "opened":
                    rest = asyncio.create_task(tokens_of(self.adopt(request, reservation_id, event.opened)))
                case "first_token":
                    first = event.first_token.token.id
                case "handoff":
                    ended = event.handoff.HasField("finish_reason")
        assert first is not None and rest is not None
        if ended:
            with pytest.raises(grpc.aio.AioRpcError, match="handoff refused"):
                await rest
            return [first]
        return [first, *await rest]

    def adopt(self, request: worker_pb2.PrefillRequest, reservation_id: str, opened: worker_pb2.HandoffOpened):
        adopt = worker_pb2.AdoptRequest(
            request_id="r", reservation_id=reservation_id, opened=opened, sampling=request.sampling,
            context_ids=request.prompt_ids[-40:],
        )  # fmt: skip
        if request.write_back:
            tail = request.prompt_ids[len(request.prefix_hashes) * 64 :]
            adopt.writeback.root = request.root
            adopt.writeback.prefix_hashes.extend(request.prefix_hashes)
            adopt.writeback.tail_ids.extend(tail)
        return self.decode_stub.Adopt(adopt)

    async def handed_over(self, prompt: list[int], **sampling) -> tuple[worker_pb2.PrefillRequest, str, Prefilled]:
        """Reserved and prefilled, nothing adopted yet."""
        request = prefill_request(prompt, **sampling)
        reservation_id = await self.reserve(prompt, request.sampling.max_tokens)
        return request, reservation_id, await self.prefilled(request)

    def held(self) -> tuple[int, int]:
        """How many things hold memory in prefill and in decode."""
        return self.prefill.memory.num_held, self.decode.memory.num_held

    async def aggregated(self, prompt: list[int], **sampling) -> list[int]:
        return await tokens_of(self.decode_stub.Generate(prefill_request(prompt, **sampling)))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task or the engine's thread is about to do; it must come within a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for "the books balance"
            await asyncio.sleep(0.002)


async def tokens_of(call) -> list[int]:
    """The tokens of a stream that ends as every stream must: with one Finished, which counts them."""
    tokens, finished = [], None
    async for event in call:
        assert finished is None
        tokens += [token.id for token in event.tokens.tokens]
        if event.HasField("finished"):
            finished = event.finished
    assert finished is not None and finished.completion_tokens == len(tokens)
    return tokens


def prefill_request(
    prompt: list[int],
    *,
    root: bytes = ROOT,
    hit: worker_pb2.CacheHit | None = None,
    snapshot_at: tuple[int, ...] = (),
    store: bool = False,
    write_back: bool = False,
    **sampling,
) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        request_id="r",
        prompt_ids=prompt,
        sampling=common_pb2.Sampling(**{**SAMPLING, **sampling}),
        root=root,
        prefix_hashes=prefix_hashes(root, prompt, 64),
        hit=hit,
        snapshot_at=snapshot_at,
        store=store,
        write_back=write_back,
    )


@asynccontextmanager
async def running(
    make_engine,
    backend,
    transport: str = "memory",
    *,
    timing: Timing = TIMING,
    reservation_ttl_ms: int = 60_000,
    prepare: Callable[[World], Awaitable[None]] | None = None,
    drafters: dict[str, Path | None] | None = None,
    **settings: int,
) -> AsyncIterator[World]:
    """A world; at its end every block and slot must have come back."""
    async with asyncio.TaskGroup() as group:
        world = World(group, make_engine, backend, timing, reservation_ttl_ms)
        world.drafters = drafters or {}
        if prepare is not None:
            await prepare(world)
        await world.start(transport, **settings)
        try:
            yield world
            await world.until_clean()
        finally:
            await world.close()
