"""NIXL: one-sided reads over RDMA, or over the kernel's cross-memory attach between processes of one host.

NIXL calls are made by one thread, to which a bounded queue leads, or in its place, while it has nothing to do, by
the event loop's: for a short read that somebody waits for. No progress thread and no listen thread: each
would burn a core. The thread makes progress itself, also when idle, because a new peer's connection needs an answer
from this side; after that, reads need nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cachestore.transports.base import Batch, ReadHandle, TransportName
from cachestore.transports.nixl_agent import Agent, Remote, Transfer
from cachestore.transports.pools import Pools
from cachestore.transports.probe import LANDING_SLOTS, ProbePage, has_rdma, host_id, why_not_shared_memory
from moonrelay.errors import InvariantError, TransferError, Unavailable
from moonrelay.stubs.v1.common_pb2 import Peer

logger = logging.getLogger(__name__)

IDLE_PROGRESS_S = 0.02  # the longest that a connecting peer waits for our answer; costs 0.2 % of a core
CONNECT_TIMEOUT_S = 2.0  # then this peer's reads go over TCP, until the connection is made after all
START_TIMEOUT_S = 20.0
QUEUE_LEN_MAX = 256
REMOTES_MAX = LANDING_SLOTS
AT_ONCE_BYTES_MAX = 3 << 20  # holds the event loop for 0.4 ms; changing threads and back costs 0.1 ms


def prepare_environment() -> None:
    """Set what UCX reads from the environment; must precede the first import of NIXL in this process.

    Without ^efa every process with an agent dies at exit (139) on hosts that have the system's RDMA libraries. Where
    there is no RDMA device UCX's control connections stay on the loopback interface.
    """
    os.environ.setdefault("UCX_MODULES", "^efa")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if not has_rdma():
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


class _Submit(NamedTuple):
    handle: ReadHandle
    peer: Peer
    batch: Batch


class _Look(NamedTuple):
    """There is a transfer that the event loop's thread began."""


_Command = _Submit | _Look | None


class NixlTransport:
    name: TransportName = "nixl"

    def __init__(self, instance_id: str, epoch: int, pools: Pools) -> None:
        self._agent_name = f"{instance_id}.{epoch}"
        self._pools = pools
        self._page = ProbePage()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()  # in C: half of a hop's cost less
        self._metadata = b""
        self._thread: threading.Thread | None = None
        self._loop: _Loop | None = None  # while it runs
        # Takes a read that NIXL should not do, with the reason; set before start by whoever holds both transports.
        self.fallback: Callable[[ReadHandle, Peer, Batch, str], None] = _no_fallback

    async def start(self) -> None:
        """Make the agent and register the pools. Raises: Unavailable where NIXL does not work."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[bytes] = loop.create_future()

        def report(result: bytes | Unavailable) -> None:
            if not started.done():
                started.set_exception(result) if isinstance(result, Unavailable) else started.set_result(result)

        self._thread = threading.Thread(
            target=self._run, args=(lambda r: loop.call_soon_threadsafe(report, r),), name="nixl", daemon=True
        )
        self._thread.start()
        try:
            self._metadata = await asyncio.wait_for(started, START_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the NIXL agent did not start within {START_TIMEOUT_S:.0f} s") from None

    def describe(self, peer: Peer) -> None:
        peer.nixl_name = self._agent_name
        peer.nixl_metadata = self._metadata
        peer.host_id = host_id()
        peer.pid = os.getpid()
        peer.rdma = has_rdma()
        peer.probe.CopyFrom(self._page.span())
        peer.pools.add(id=self._page.span().pool, base=self._page.base, length=self._page.length)

    def submit(self, handle: ReadHandle, peer: Peer, batch: Batch, note: str | None = None) -> None:
        loop = self._loop
        if loop is None:
            raise InvariantError("the NIXL thread is not running")
        handle.transport = self.name
        if handle.at_once:
            if loop.do_at_once(handle, peer, batch):
                return
            handle.at_once = False
        if self._commands.qsize() >= QUEUE_LEN_MAX:
            handle.fail(TransferError(f"more than {QUEUE_LEN_MAX} reads are waiting for the NIXL thread"))
        else:
            self._commands.put(_Submit(handle, peer, batch))

    async def close(self) -> None:
        """End the agent. Reads in flight fail; peers that still know this process get a typed error."""
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    # Below: the NIXL thread.

    def _run(self, started: Callable[[bytes | Unavailable], None]) -> None:
        prepare_environment()
        try:
            agent = Agent(self._agent_name, self._pools, self._page)
        except Unavailable as error:
            started(error)
            return
        loop = self._loop = _Loop(agent, self._commands, self.fallback)
        started(agent.metadata)
        try:
            loop.run()
        finally:
            self._loop = None
            loop.turn.acquire()  # for good
            loop.fail_all()
            agent.close()


def _no_fallback(handle: ReadHandle, peer: Peer, batch: Batch, reason: str) -> None:
    handle.fail(TransferError(f"no way to {peer.instance_id}: {reason}"))


class _Loop:
    """The NIXL thread's state: remotes by (instance, epoch), transfers in flight. Whoever has the turn may use it,
    and the library; the NIXL thread always has, except where it waits for a command."""

    def __init__(self, agent: Agent, commands: queue.SimpleQueue[_Command], fallback: Callable[..., None]) -> None:
        self.turn = threading.Lock()
        self._agent = agent
        self._commands = commands
        self._fallback = fallback
        self._remotes: dict[tuple[str, int], Remote] = {}
        self._active: list[Transfer] = []

    def run(self) -> None:
        pause_s = 0.0
        while True:
            busy = bool(self._active) or any(remote.connecting for remote in self._remotes.values())
            try:
                command = self._commands.get(timeout=pause_s if busy else IDLE_PROGRESS_S)
                if command is None:
                    return
                pause_s = 0.0
            except queue.Empty:
                command = None
            with self.turn:
                if command is None:
                    self._agent.progress()
                elif isinstance(command, _Submit):
                    self._take(command)
                moved = self._advance()
            # Spin while bytes move; a peer that does not answer is asked ever more rarely, up to each millisecond.
            pause_s = 0.0 if moved else min(0.001, pause_s + 0.00002)

    def do_at_once(self, handle: ReadHandle, peer: Peer, batch: Batch) -> bool:
        """By the event loop's thread: begin a short read, and end it where the transport is synchronous; False where
        it has to go through the queue. Never waits for the NIXL thread."""
        if sum(batch.lengths) > AT_ONCE_BYTES_MAX or peer.rdma or not self.turn.acquire(blocking=False):
            return False
        try:
            remote = self._remotes.get((peer.instance_id, peer.epoch))
            if remote is None or remote.connecting or remote.suspect or remote.dead or self._active:
                return False
            transfer = Transfer(self._agent, remote, handle, batch)
            transfer.step()
            if not transfer.over:
                handle.at_once = False
                self._active.append(transfer)
                self._commands.put(_Look())
            return True
        finally:
            self.turn.release()

    def _take(self, command: _Submit) -> None:
        handle, peer, batch = command.handle, command.peer, command.batch
        if handle.aborted:
            handle.end()
            return
        remote = self._remotes.get((peer.instance_id, peer.epoch)) or self._connect(command)
        if remote is None:
            return
        if remote.connecting and not remote.parked:
            remote.waiting.append((handle, batch))
        elif remote.parked:
            self._fallback(handle, peer, batch, "NIXL found no answer at the peer")
        elif remote.suspect:
            handle.fail(TransferError(f"{peer.instance_id} does not answer an earlier read"))
        else:
            self._active.append(Transfer(self._agent, remote, handle, batch))

    def _connect(self, command: _Submit) -> Remote | None:
        """Load the peer's metadata and begin the probe read; None if the read went to the fallback."""
        peer = command.peer
        # RDMA needs a device on both sides; without it NIXL is worth it only where the peer's memory is readable.
        reason = None if peer.rdma and has_rdma() else why_not_shared_memory(peer)
        if not peer.nixl_metadata:
            reason = "the peer has no NIXL"
        if reason is None:
            self._forget_older(peer)
            try:
                remote = self._agent.connect(peer)
            except TransferError as error:
                reason = str(error)
        if reason is not None:
            self._fallback(command.handle, peer, command.batch, reason)
            return None
        self._remotes[peer.instance_id, peer.epoch] = remote
        return remote

    def _forget_older(self, peer: Peer) -> None:
        """A restarted peer is removed before it is added again; and the table has a limit."""
        idle = [key for key, remote in self._remotes.items() if not remote.num_active and not remote.connecting]
        for key in idle:
            if key[0] == peer.instance_id or len(self._remotes) >= REMOTES_MAX:
                self._agent.remove(self._remotes.pop(key))

    def _advance(self) -> bool:
        """One step for every connection and transfer; True if any of them moved."""
        moved = False
        for key, remote in list(self._remotes.items()):
            if remote.connecting:
                moved |= self._advance_connection(key, remote)
            elif remote.dead and not remote.num_active:
                self._agent.remove(self._remotes.pop(key))
        for transfer in list(self._active):
            moved |= transfer.step()
            if transfer.over:
                self._active.remove(transfer)
        return moved

    def _advance_connection(self, key: tuple[str, int], remote: Remote) -> bool:
        outcome = self._agent.check_probe(remote)
        if outcome is None:
            if not remote.parked and time.monotonic() > remote.since_s + CONNECT_TIMEOUT_S:
                remote.parked = True
                self._divert(remote, "NIXL found no answer at the peer")
            for handle, _ in [w for w in remote.waiting if w[0].aborted]:
                handle.end()
            remote.waiting = [w for w in remote.waiting if not w[0].aborted]
            return False
        if outcome == "":
            remote.parked = False
            self._active += [Transfer(self._agent, remote, handle, batch) for handle, batch in remote.waiting]
            remote.waiting = []
            logger.info("nixl peer connected", extra={"peer": key[0], "epoch": key[1]})
        else:
            self._agent.remove(self._remotes.pop(key))
            self._divert(remote, outcome)
        return True

    def _divert(self, remote: Remote, reason: str) -> None:
        for handle, batch in remote.waiting:
            self._fallback(handle, remote.peer, batch, reason)
        remote.waiting = []

    def fail_all(self) -> None:
        """The thread ends: nobody waits for ever. Whatever is queued or in flight fails."""
        for remote in self._remotes.values():
            for handle, _ in remote.waiting:
                handle.fail(TransferError("the transport is closing"))
        for transfer in self._active:
            transfer.handle.fail(TransferError("the transport is closing"))
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, _Submit):
                command.handle.fail(TransferError("the transport is closing"))
