"""What the NIXL thread does with the library: the agent, its remotes, transfers as windows of groups.

Traps found by trying, each with a test: the metadata names the agent, and the name carries the epoch, so that a
restarted peer is another agent; `check_remote_metadata` says True for a dead peer; releasing a handle in flight does
not stop it, so none is released before it ended; descriptor lists are numpy rows (address, length, device), never the
library's pickles; a transfer may be done inside `transfer()` (shared memory) or later (RDMA).
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachestore.checksum import checksum
from cachestore.transports.base import Batch, ChecksumMismatch, ReadHandle, ReadReport, Segment
from cachestore.transports.plan import Verifier, groups
from cachestore.transports.pools import Pools
from cachestore.transports.probe import LANDING_SLOTS, PROBE_BYTES, PROBE_POOL, ProbePage
from moonrelay.errors import ServeError, TransferError, Unavailable
from moonrelay.stubs.v1.common_pb2 import Peer

logger = logging.getLogger(__name__)

WINDOW = 4  # groups in flight of one transfer, where the transport is asynchronous
Xfer = Any  # the library's transfer handle
Row = tuple[int, int, int]  # address, length, device 0


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's agent as this one knows it. `dead`: the library said so; `suspect`: a read outlived its deadline."""

    peer: Peer
    name: bytes
    ranges: dict[int, tuple[int, int]]
    slot: int
    probe: Xfer
    since_s: float
    connecting: bool = True
    parked: bool = False  # connecting for too long; its reads go elsewhere meanwhile
    dead: bool = False
    suspect: bool = False
    num_active: int = 0
    waiting: list[tuple[ReadHandle, Batch]] = field(default_factory=list)


class Agent:
    """The library's two agents and our registered pools. Raises: Unavailable where they cannot be made.

    One agent is read from, the other reads. With a single one, two processes that read each other share endpoints,
    and those move bytes by messages that the owner has to answer (up to an idle pause each) instead of one-sidedly:
    measured, 8 to 20 ms against 0.4 ms for 2.8 MB.
    """

    def __init__(self, name: str, pools: Pools, page: ProbePage) -> None:
        try:
            api: Any = importlib.import_module("nixl_cu12._api")
            bindings: Any = importlib.import_module("nixl_cu12._bindings")
        except ImportError as error:
            raise Unavailable(f"NIXL is not installed: {error}") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.pools = pools
        self._page = page
        self.verifying = ThreadPoolExecutor(1, thread_name_prefix="nixl-verify")
        self._free_slots = list(range(1, LANDING_SLOTS + 1))
        self.errors: tuple[type[Exception], ...] = tuple(
            getattr(bindings, n) for n in dir(bindings) if n.startswith("nixl") and n.endswith("Error")
        )
        failures: tuple[type[Exception], ...] = (*self.errors, RuntimeError)
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._owner, self._agent = api.nixl_agent(name, config), api.nixl_agent(f"{name}.reader", config)
            ranges = [(pool.base, pool.length, 0, "") for pool in pools.describe()]
            for agent in (self._owner, self._agent):
                agent.register_memory([*ranges, (page.base, page.length, 0, "")], "DRAM")
            self.metadata: bytes = self._owner.get_agent_metadata()
        except failures as error:
            raise Unavailable(f"NIXL: {type(error).__name__} {error}") from None

    def progress(self) -> None:
        """Answer connecting peers. Nobody sends us notifications; what comes is dropped."""
        self._owner.get_new_notifs()
        self._agent.get_new_notifs()

    def connect(self, peer: Peer) -> Remote:
        """Load the peer's metadata and post the probe read. Raises: TransferError."""
        if not self._free_slots:
            raise TransferError("too many NIXL peers")
        try:
            name: bytes = self._agent.add_remote_agent(peer.nixl_metadata)
        except self.errors as error:
            raise TransferError(f"NIXL refused the peer's metadata: {type(error).__name__}") from None
        ranges = {pool.id: (pool.base, pool.length) for pool in peer.pools}
        slot = self._free_slots.pop()
        remote = Remote(peer, name, ranges, slot, None, time.monotonic())
        try:
            if name.decode() != peer.nixl_name or PROBE_POOL not in ranges:
                raise TransferError("the peer's NIXL metadata and description disagree")
            row = [(self._page.base + PROBE_BYTES * slot, PROBE_BYTES, 0)]
            remote.probe, _ = self.post(name, row, [(ranges[PROBE_POOL][0] + peer.probe.offset, PROBE_BYTES, 0)])
        except TransferError:
            self.remove(remote)
            raise
        return remote

    def check_probe(self, remote: Remote) -> str | None:
        """None: still connecting. Empty: connected. Else why not, and the remote is of no use."""
        try:
            if not self.done(remote.probe):
                return None
        except TransferError as error:
            self.release(remote.probe)
            remote.probe = None
            return str(error)
        self.release(remote.probe)
        remote.probe, remote.connecting = None, False
        offset = PROBE_BYTES * remote.slot
        self._free_slots.append(remote.slot)
        remote.slot = 0
        found = checksum(self._page.read(offset, PROBE_BYTES))
        return "" if found == remote.peer.probe.xxh3 else "the probe page arrived with other bytes"

    def post(self, name: bytes, local: list[Row], remote: list[Row]) -> tuple[Xfer, bool]:
        """Start a read of `remote` rows into `local` ones; (handle, already done). Raises: TransferError."""
        try:
            ours = self._agent.get_xfer_descs(np.array(local, dtype=np.uint64), "DRAM")
            theirs = self._agent.get_xfer_descs(np.array(remote, dtype=np.uint64), "DRAM")
            xfer = self._agent.initialize_xfer("READ", ours, theirs, name)
            state = self._agent.transfer(xfer)
        except self.errors as error:
            raise TransferError(f"NIXL read: {type(error).__name__}") from None
        if state == "ERR":
            raise TransferError("NIXL read failed")
        return xfer, state == "DONE"

    def done(self, xfer: Xfer) -> bool:
        """Raises: TransferError when the transfer ended badly."""
        try:
            state = self._agent.check_xfer_state(xfer)
        except self.errors as error:
            raise TransferError(f"NIXL read: {type(error).__name__}") from None
        if state == "ERR":
            raise TransferError("NIXL read failed")
        return bool(state == "DONE")

    def release(self, xfer: Xfer) -> None:
        """Free a handle whose transfer ended."""
        try:
            xfer.release()
        except self.errors as error:
            logger.warning("nixl handle not released", extra={"error": type(error).__name__})

    def remove(self, remote: Remote) -> None:
        """Disconnect. A probe still in flight keeps its landing slot for good."""
        if remote.slot and remote.probe is None:
            self._free_slots.append(remote.slot)
            remote.slot = 0
        try:
            self._agent.remove_remote_agent(remote.name)
        except self.errors as error:
            logger.info("nixl peer already gone", extra={"peer": remote.peer.instance_id, "error": str(error)})

    def close(self) -> None:
        self.verifying.shutdown()
        del self._agent, self._owner


class Transfer:
    """One read in the NIXL thread: groups posted in order, never released in flight.

    A read of one group is verified here. A longer one hands each landed group to the verifying thread, so that
    hashing overlaps with the next pull; the read is settled there too, after its last group.
    """

    def __init__(self, agent: Agent, remote: Remote, handle: ReadHandle, batch: Batch) -> None:
        self.handle = handle
        self.over = False
        self._agent, self._remote = agent, remote
        self._groups = groups(batch)
        self._next = next(self._groups, None)
        self._begun = self._inline = False
        self._flying: deque[tuple[Xfer, bool, list[Segment]]] = deque()
        self._verifier = Verifier(batch, agent.pools, handle)
        self._bytes = sum(batch.lengths)
        self._error: ServeError | None = None
        self._started = time.perf_counter()
        remote.num_active += 1

    def step(self) -> bool:
        """Finish what has landed, post at most one group. True if anything moved."""
        moved = self._land()
        if self._post():
            moved = True
            self._land()
        if not self._flying and (self._next is None or self._error or self.handle.aborted):
            self._close()
        elif time.monotonic() > self.handle.deadline_s:
            self._remote.suspect = True  # past its deadline and silent: new reads fail at once
        return moved or self.over

    def _land(self) -> bool:
        moved = False
        while self._flying:
            xfer, ended, group = self._flying[0]
            try:
                ended = ended or self._agent.done(xfer)
            except TransferError as error:
                ended, self._error, self._remote.dead = True, self._error or error, True
            if not ended:
                break
            moved = True
            self._flying.popleft()
            self._agent.release(xfer)
            self._check(group)
        return moved

    def _check(self, group: list[Segment]) -> None:
        if self._inline:
            self._verify(group)
        else:
            self._agent.verifying.submit(self._verify, group)

    def _verify(self, group: list[Segment]) -> None:
        if self._error is not None or self.handle.aborted:
            return
        try:
            self._verifier.landed(group)
        except ChecksumMismatch as error:
            self._error = error

    def _post(self) -> bool:
        group = self._next
        if group is None or self._error or self.handle.aborted or len(self._flying) >= WINDOW:
            return False
        self._next = next(self._groups, None)
        self._inline, self._begun = self._next is None and not self._begun, True
        local: list[Row] = []
        remote: list[Row] = []
        for segment in group:
            base, length = self._remote.ranges.get(segment.remote_pool, (0, 0))
            if segment.remote_offset + segment.length > length:
                self._error = TransferError(f"refused: pool {segment.remote_pool} is not registered that far")
                return True
            if segment.length:
                local.append((self._agent.pools.address(segment.pool, segment.offset), segment.length, 0))
                remote.append((base + segment.remote_offset, segment.length, 0))
        if not local:
            self._check(group)
            return True
        try:
            xfer, done = self._agent.post(self._remote.name, local, remote)
        except TransferError as error:
            self._error, self._remote.dead = error, True
        else:
            self._flying.append((xfer, done, group))
        return True

    def _close(self) -> None:
        """Nothing is in flight any more: the last word follows the last verification."""
        self.over = True
        self._remote.num_active -= 1
        if not self._remote.num_active:
            self._remote.suspect = False
        if self._inline:
            self._settle()
        else:
            self._agent.verifying.submit(self._settle)

    def _settle(self) -> None:
        if self._error is not None:
            self.handle.fail(self._error)
        elif self.handle.aborted:
            self.handle.end()
        else:
            seconds = time.perf_counter() - self._started
            verify_seconds = self._verifier.seconds
            self.handle.finish(
                ReadReport(
                    transport="nixl", bytes=self._bytes, verify_seconds=verify_seconds,
                    pull_seconds=seconds - verify_seconds if self._inline else seconds, note=self.handle.note,
                )
            )  # fmt: skip
