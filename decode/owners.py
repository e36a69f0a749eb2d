"""Calls to handoff owners: following a handoff, and telling its owner that its memory is free."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Final

import grpc

from decode.metrics import ReaderMetrics
from engine.worker.prompt import Spawn
from engine.worker.service import OPTIONS
from moonrelay.stubs.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)
TIMEOUT_S: Final = 2.0
CHANNELS_MAX: Final = 256  # more prefill workers than that share by turns
Parts = Any  # grpc.aio's stream of HandoffPart


class Owners:
    """One channel per owner; acknowledgements go in the background. On the event loop's thread only."""

    def __init__(self, spawn: Spawn, metrics: ReaderMetrics) -> None:
        self._spawn, self._metrics = spawn, metrics
        self._channels: OrderedDict[str, tuple[grpc.aio.Channel, worker_pb2_grpc.PrefillWorkerStub]] = OrderedDict()

    async def follow(self, opened: worker_pb2.HandoffOpened, held: worker_pb2.HeldPrefix | None) -> Parts:
        """The handoff's parts as they become final. Iterating raises grpc.aio.AioRpcError; cancel it when done."""
        stub = await self._stub(opened.source_address)
        request = worker_pb2.FollowHandoffRequest(handoff_id=opened.handoff_id, fence=opened.fence, held=held)
        return stub.FollowHandoff(request)

    def acknowledge(self, address: str, handoff_id: str, fence: int) -> None:
        """Our reads of it are over, whatever came of them. Losing this is harmless: the lease ends by itself."""
        self._spawn(self._release(address, worker_pb2.ReleaseHandoffRequest(handoff_id=handoff_id, fence=fence)))

    async def close(self) -> None:
        while self._channels:
            _, (channel, _) = self._channels.popitem()
            await channel.close()

    async def _release(self, address: str, request: worker_pb2.ReleaseHandoffRequest) -> None:
        stub = await self._stub(address)
        try:
            await stub.ReleaseHandoff(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._metrics.acks_failed.inc()
            log.info("handoff not acknowledged", extra={"address": address, "status": error.code().name})

    async def _stub(self, address: str) -> worker_pb2_grpc.PrefillWorkerStub:
        if address in self._channels:
            self._channels.move_to_end(address)
            return self._channels[address][1]
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        self._channels[address] = (channel, stub)
        if len(self._channels) > CHANNELS_MAX:
            _, (oldest, _) = self._channels.popitem(last=False)
            await oldest.close(grace=TIMEOUT_S)
        return stub
