"""The in-process twin: same promises, no system calls, faults on demand. For tests and the simulator.

A stopped peer behaves like the worst real one: reads stay in flight past their deadline and land when it goes on.
"""

from __future__ import annotations

from cachestore.transports.base import Batch, ReadHandle, ReadReport, TransportName
from cachestore.transports.plan import Verifier, groups
from cachestore.transports.pools import Pools
from moonrelay.errors import ServeError, StaleEpoch, TransferError
from moonrelay.stubs.v1.common_pb2 import Peer


class MemoryFabric:
    """Every in-memory peer of one world."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[int, Pools]] = {}
        self._stopped: dict[str, list[_Pending]] = {}

    def attach(self, instance_id: str, epoch: int, pools: Pools) -> None:
        self._peers[instance_id] = (epoch, pools)

    def kill(self, instance_id: str) -> None:
        """Reads in flight and later ones fail."""
        self._peers.pop(instance_id, None)
        for pending in self._stopped.pop(instance_id, []):
            pending.run(self)

    def stop(self, instance_id: str) -> None:
        self._stopped.setdefault(instance_id, [])

    def resume(self, instance_id: str) -> None:
        for pending in self._stopped.pop(instance_id, []):
            pending.run(self)

    def run(self, instance_id: str, pending: _Pending) -> None:
        if instance_id in self._stopped:
            self._stopped[instance_id].append(pending)
        else:
            pending.run(self)

    def find(self, peer: Peer) -> Pools:
        found = self._peers.get(peer.instance_id)
        if found is None:
            raise TransferError(f"{peer.instance_id} is gone")
        if found[0] != peer.epoch:
            raise StaleEpoch(f"{peer.instance_id} restarted: epoch {found[0]}, not {peer.epoch}")
        return found[1]


class _Pending:
    def __init__(self, transport: MemoryTransport, handle: ReadHandle, peer: Peer, batch: Batch) -> None:
        self._transport, self._handle, self._peer, self._batch = transport, handle, peer, batch

    def run(self, fabric: MemoryFabric) -> None:
        try:
            source = fabric.find(self._peer)
            report = self._transport.copy(source, self._batch, self._handle)
        except ServeError as error:
            self._handle.fail(error)
        else:
            self._handle.finish(report)


class MemoryTransport:
    name: TransportName = "memory"

    def __init__(self, fabric: MemoryFabric, instance_id: str, epoch: int, pools: Pools) -> None:
        self._fabric, self._instance_id, self._epoch, self._pools = fabric, instance_id, epoch, pools

    async def start(self) -> None:
        self._fabric.attach(self._instance_id, self._epoch, self._pools)

    def describe(self, peer: Peer) -> None:
        """Nothing to add: the fabric knows."""

    def submit(self, handle: ReadHandle, peer: Peer, batch: Batch, note: str | None = None) -> None:
        handle.note, handle.transport = note, self.name
        self._fabric.run(peer.instance_id, _Pending(self, handle, peer, batch))

    def copy(self, source: Pools, batch: Batch, handle: ReadHandle) -> ReadReport:
        """Move and verify every segment. Raises: TransferError out of the peer's range, ChecksumMismatch."""
        verifier, moved = Verifier(batch, self._pools, handle), 0
        for run in batch.runs:
            if not source.holds(run.remote_pool, run.remote_offset, run.length):
                raise TransferError(f"refused: pool {run.remote_pool} offset {run.remote_offset} is not registered")
        for group in groups(batch):
            for segment in group:
                data = source.view(segment.remote_pool, segment.remote_offset, segment.length)
                self._pools.view(segment.pool, segment.offset, segment.length)[:] = data
                moved += segment.length
            verifier.landed(group)
        return ReadReport(
            transport="memory", bytes=moved, pull_seconds=0.0, verify_seconds=verifier.seconds, note=handle.note
        )

    async def close(self) -> None:
        self._fabric.kill(self._instance_id)
