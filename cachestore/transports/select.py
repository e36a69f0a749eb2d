"""The transports of one process behind one face: the best one a peer and this host allow, and which that was."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from cachestore.transports import plan
from cachestore.transports.base import Batch, Read, ReadHandle, Transport
from cachestore.transports.memory import MemoryFabric, MemoryTransport
from cachestore.transports.nixl import NixlTransport
from cachestore.transports.pools import Pools
from cachestore.transports.tcp import TcpTransport
from moonrelay.errors import InvariantError, StaleEpoch, TransferError, Unavailable
from moonrelay.stubs.v1.common_pb2 import Peer, Span

logger = logging.getLogger(__name__)

Choice = Literal["auto", "nixl", "tcp"]


class TransportSet:
    """Pools registered once, then reads of peers' pools.

    `auto` takes NIXL where it is one-sided (RDMA, or readable memory on the same host) and our TCP elsewhere; `nixl`
    fails where NIXL does not work; every process serves TCP, whatever it prefers as a reader.
    """

    def __init__(
        self, instance_id: str, epoch: int, pools: Pools, transports: Sequence[Transport], required: bool = False
    ) -> None:
        self.instance_id, self.epoch = instance_id, epoch
        self._required = required  # the first transport must work
        self._pools = pools
        self._transports = list(transports)
        self._first: Transport | None = None
        self._note: str | None = None
        self._newest: dict[str, int] = {}
        self._shown: dict[str, tuple[Peer, dict[int, int]]] = {}

    @classmethod
    def open(
        cls, instance_id: str, epoch: int, host: str = "127.0.0.1", transport: Choice = "auto",
        advertise: str | None = None,
    ) -> TransportSet:  # fmt: skip
        """The real transports. `host` is where the TCP plane listens, `advertise` the name peers reach it by."""
        pools = Pools()
        tcp = TcpTransport(epoch, pools, host, advertise)
        if transport == "tcp":
            return cls(instance_id, epoch, pools, [tcp])
        nixl = NixlTransport(instance_id, epoch, pools)
        if transport == "auto":
            nixl.fallback = tcp.submit
        return cls(instance_id, epoch, pools, [nixl, tcp], required=transport == "nixl")

    @classmethod
    def in_memory(cls, instance_id: str, epoch: int, fabric: MemoryFabric) -> TransportSet:
        pools = Pools()
        return cls(instance_id, epoch, pools, [MemoryTransport(fabric, instance_id, epoch, pools)])

    def register(self, pool_id: int, base: int, length: int) -> None:
        """Offer memory to peers and as a landing place; before start, for the life of the process."""
        self._pools.register(pool_id, base, length)

    async def start(self) -> None:
        """Raises: Unavailable where the required transport does not work."""
        self._pools.freeze()
        for transport in list(self._transports):
            try:
                await transport.start()
            except Unavailable as error:
                if self._required:
                    raise
                self._transports.remove(transport)
                self._note = str(error)
                logger.warning("transport not available", extra={"transport": transport.name, "reason": str(error)})
        self._first = self._transports[0]
        logger.info("transports ready", extra={"transports": [t.name for t in self._transports]})

    def peer(self) -> Peer:
        """How others reach this process's pools."""
        made = Peer(instance_id=self.instance_id, epoch=self.epoch, pools=self._pools.describe())
        for transport in self._transports:
            transport.describe(made)
        return made

    def span(self, pool_id: int, offset: int, length: int) -> Span:
        """A range of our own pools with its checksum now."""
        return self._pools.span(pool_id, offset, length)

    def view(self, pool_id: int, offset: int, length: int) -> memoryview:
        return self._pools.view(pool_id, offset, length)

    def read(
        self, peer: Peer, reads: Sequence[Read] | Batch, deadline_s: float, *, at_once: bool = False
    ) -> ReadHandle:
        """Start pulling; await the handle for the report. Event-loop thread only. `at_once`: a short read may be done
        here and now, for who waits for nothing else: two changes of thread cost as much as a MiB.

        Raises: InvariantError for landing slices outside our pools. The handle raises TransferError,
        ChecksumMismatch, StaleEpoch, ReadTimeout.
        """
        if self._first is None:
            raise InvariantError("read before start")
        batch = reads if isinstance(reads, Batch) else Batch.of(reads)
        plan.check(batch, self._pools)
        handle = ReadHandle(peer.instance_id, deadline_s, at_once)
        newest = self._newest.get(peer.instance_id, 0)
        if peer.epoch < newest:
            handle.fail(StaleEpoch(f"{peer.instance_id} restarted: epoch {newest} is known, not {peer.epoch}"))
            return handle
        self._newest[peer.instance_id] = peer.epoch
        ranges = self._ranges(peer)
        for run in batch.runs:
            if run.remote_offset + run.length > ranges.get(run.remote_pool, 0):
                handle.fail(TransferError(f"{peer.instance_id} has no such range in pool {run.remote_pool}"))
                return handle
        self._first.submit(handle, peer, batch, self._note)
        if at_once:
            handle.begun()
        return handle

    def _ranges(self, peer: Peer) -> dict[int, int]:
        """Its pools' lengths, kept as long as the same description is shown."""
        shown, ranges = self._shown.get(peer.instance_id, (None, {}))
        if shown is not peer:
            ranges = {pool.id: pool.length for pool in peer.pools}
            self._shown[peer.instance_id] = (peer, ranges)
        return ranges

    def connect(self, peer: Peer, deadline_s: float) -> ReadHandle:
        """A read of nothing: afterwards the way to the peer is open, and the report says which it is."""
        return self.read(peer, [], deadline_s)

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()
