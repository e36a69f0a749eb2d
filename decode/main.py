"""`moonrelay decode`: argv into settings, settings into a running decode or aggregated worker."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from cachestore.prompt_cache import WorkerCache
from cachestore.transports.warm import keep_warm
from decode.core import ReaderTable
from decode.edge import DecodeEdge
from decode.held import DeviceTier
from decode.metrics import ReaderMetrics
from decode.owners import Owners
from decode.reader import Identity, Reader
from engine.worker.pairs import Pairs
from engine.worker.process import Worker, build_prompts, cache_arguments, serve
from engine.worker.prompt import PromptRunner
from engine.worker.settings import WorkerSettings
from moonrelay.ids import Role
from moonrelay.settings import DAY_MS, check_range, load
from moonrelay.stubs.v1 import worker_pb2_grpc

SERVICE_NAME = "moonrelay.v1.DecodeWorker"


class DecodeSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adopt handoffs and generate; or, aggregated, serve whole requests."""

    aggregated: bool = False  # register as "aggregated": routers send whole requests here and hand nothing over
    draft_len_max: int = 15  # more than the drafter's block means all of it
    draft_read_len_max: int = 31
    reservation_ttl_ms: int = 60_000  # floor; grows by 10 ms per prompt token
    stream_interval_ms: int = 16  # between a request's messages; faster steps' tokens go together; 0: each step alone

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, {"reservation_ttl_ms": (1, DAY_MS), "stream_interval_ms": (0, 1_000)})


class DecodeService:
    """The decode role's half of the process."""

    def __init__(
        self, edge: DecodeEdge, reader: Reader, prompts: PromptRunner, owners: Owners, cache: WorkerCache
    ) -> None:
        self.peer = cache.peer
        self._edge, self._reader, self._prompts, self._owners, self._cache = edge, reader, prompts, owners, cache

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._edge, server)

    async def run(self) -> None:
        await self._reader.run()

    async def drained(self) -> None:
        await self._reader.drained()

    def check(self) -> int:
        self._reader.table.check()
        return len(self._reader.table) + self._prompts.memory.num_held

    async def close(self) -> None:
        self._prompts.close()
        await self._owners.close()
        await self._cache.close()


async def assemble(worker: Worker) -> DecodeService:
    settings = worker.settings
    assert isinstance(settings, DecodeSettings)
    cache = await WorkerCache.open(**cache_arguments(worker))
    prompts = build_prompts(worker, cache)
    if cache.device is not None:
        worker.spawn(cache.device.run())
    worker.spawn(keep_warm(cache.transports, worker.membership, ("prefill", "cachestore")))
    worker.spawn(Pairs(worker.metrics, worker.membership, worker.instance_id, worker.epoch, "reader").run())
    table = ReaderTable()
    metrics = ReaderMetrics(worker.metrics, table)
    owners = Owners(worker.spawn, metrics)
    identity = Identity(
        fingerprint=worker.model.fingerprint,
        layout=worker.model.layout,
        vocab_size=worker.model.vocab_size,
        drafter=worker.model.drafter_id,
    )

    def epochs() -> dict[str, int]:
        return {member.instance_id: member.epoch for member in worker.membership.members("prefill")}

    reader = Reader(
        prompts,
        table,
        cache.transports,
        owners,
        DeviceTier(worker.memory),
        metrics,
        identity=identity,
        timing=settings.timing(),
        reservation_ttl_ms=settings.reservation_ttl_ms,
        epochs=epochs,
    )
    edge = DecodeEdge(
        prompts,
        reader,
        worker.gate,
        identity=identity,
        max_context=worker.model.max_context,
        stream_interval_s=settings.stream_interval_ms / 1e3,
    )
    return DecodeService(edge, reader, prompts, owners, cache)


def main(argv: Sequence[str]) -> int:
    settings = load(DecodeSettings, argv, prog="moonrelay decode")
    role: Role = "aggregated" if settings.aggregated else "decode"
    return serve(settings, role=role, source="decode", service_name=SERVICE_NAME, assemble=assemble)
