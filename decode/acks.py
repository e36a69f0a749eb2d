"""Tells handoff owners that their memory is free. Losing one is harmless: the owner's lease ends by itself."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

import grpc

from decode.metrics import ReaderMetrics
from engine.worker.prompt import Spawn
from moonrelay.stubs.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)
TIMEOUT_S: Final = 2.0
CHANNELS_MAX: Final = 256  # more prefill workers than that share by turns


class Acks:
    """Sends in the background, over one channel per owner."""

    def __init__(self, spawn: Spawn, metrics: ReaderMetrics) -> None:
        self._spawn, self._metrics = spawn, metrics
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def send(self, manifest: worker_pb2.Manifest) -> None:
        """Our reads of this handoff are over, whatever came of them."""
        self._spawn(self._send(manifest.source_address, manifest.handoff_id, manifest.fence))

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    async def _send(self, address: str, handoff_id: str, fence: int) -> None:
        request = worker_pb2.ReleaseHandoffRequest(handoff_id=handoff_id, fence=fence)
        stub = worker_pb2_grpc.PrefillWorkerStub(await self._channel(address))
        try:
            await stub.ReleaseHandoff(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._metrics.acks_failed.inc()
            log.info("handoff not acknowledged", extra={"address": address, "status": error.code().name})

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if address in self._channels:
            self._channels.move_to_end(address)
            return self._channels[address]
        channel = self._channels[address] = grpc.aio.insecure_channel(address)
        if len(self._channels) > CHANNELS_MAX:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close(grace=TIMEOUT_S)
        return channel
