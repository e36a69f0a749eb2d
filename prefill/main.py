"""`moonrelay prefill`: argv into settings, settings into a running prefill worker."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from cachestore.prompt_cache import WorkerCache
from cachestore.transports.warm import keep_warm
from engine.worker.pairs import Pairs
from engine.worker.process import Worker, build_prompts, cache_arguments, serve
from engine.worker.prompt import PromptRunner
from engine.worker.settings import WorkerSettings
from moonrelay.settings import check_range, load
from moonrelay.stubs.v1 import worker_pb2_grpc
from prefill.core import HandoffTable
from prefill.edge import PrefillEdge
from prefill.metrics import HandoffMetrics
from prefill.parts import PART_BYTES

SERVICE_NAME = "moonrelay.v1.PrefillWorker"


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compute prompts and hand them over to decode workers."""

    part_bytes: int = PART_BYTES  # a handoff's regions are lent early in parts of at least this

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, {"part_bytes": (1, 1 << 40)})


class PrefillService:
    """The prefill role's half of the process."""

    def __init__(self, edge: PrefillEdge, prompts: PromptRunner, cache: WorkerCache) -> None:
        self.peer = cache.peer
        self._edge, self._prompts, self._cache = edge, prompts, cache

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self._edge, server)

    async def run(self) -> None:
        await self._edge.run()

    async def drained(self) -> None:
        await self._edge.drained()

    def check(self) -> int:
        self._edge.table.check()
        return len(self._edge.table) + self._prompts.memory.num_held

    async def close(self) -> None:
        self._prompts.close()
        await self._cache.close()


async def assemble(worker: Worker) -> PrefillService:
    settings = worker.settings
    assert isinstance(settings, PrefillSettings)
    cache = await WorkerCache.open(**cache_arguments(worker))
    prompts = build_prompts(worker, cache)
    if cache.device is not None:
        worker.spawn(cache.device.run())
    worker.spawn(keep_warm(cache.transports, worker.membership, ("cachestore",)))
    worker.spawn(Pairs(worker.metrics, worker.membership, worker.instance_id, worker.epoch, "owner").run())
    table = HandoffTable(settings.timing())
    edge = PrefillEdge(
        prompts,
        table,
        worker.gate,
        HandoffMetrics(worker.metrics, table),
        fingerprint=worker.model.fingerprint,
        layout=worker.model.layout,
        max_context=worker.model.max_context,
        peer=cache.peer,
        address=worker.address,
        part_bytes=settings.part_bytes,
        drafter=worker.model.drafter_id,
    )
    return PrefillService(edge, prompts, cache)


def main(argv: Sequence[str]) -> int:
    settings = load(PrefillSettings, argv, prog="moonrelay prefill")
    return serve(settings, role="prefill", source="prefill", service_name=SERVICE_NAME, assemble=assemble)
