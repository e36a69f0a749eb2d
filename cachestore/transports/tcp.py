"""Our own TCP plane: the transport that always works, and the faster one where NIXL would have to emulate.

A read takes a worker thread and a connection for its time. Bytes go from the socket straight to their landing place,
and only while this process itself receives: when the worker stops, nothing can land any more, so an abort ends a
read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cachestore.transports import wire
from cachestore.transports.base import Batch, ReadHandle, ReadReport, ReadTimeout, Segment, TransportName
from cachestore.transports.plan import Verifier, groups
from cachestore.transports.pools import Pools
from cachestore.transports.tcp_server import TcpServer, receive, send, tune
from cachestore.transports.wire import Status
from moonrelay.errors import ServeError, StaleEpoch, TransferError
from moonrelay.stubs.v1.common_pb2 import Peer

IN_FLIGHT_MAX = 8  # reads at once, each with a thread and a connection
WAITING_MAX = 256
IDLE_CONNECTIONS_MAX = 4  # kept per peer


class TcpTransport:
    name: TransportName = "tcp"

    def __init__(self, epoch: int, pools: Pools, host: str = "127.0.0.1", advertise: str | None = None) -> None:
        self._epoch, self._pools, self._host = epoch, pools, host
        self._advertise = advertise  # the name peers reach us by, where `host` is a wildcard
        self._workers = ThreadPoolExecutor(IN_FLIGHT_MAX, thread_name_prefix="tcp-read")
        self._waiting = threading.BoundedSemaphore(IN_FLIGHT_MAX + WAITING_MAX)
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}
        self._reading: set[_Reading] = set()
        self._lock = threading.Lock()
        self._server: TcpServer | None = None

    async def start(self) -> None:
        self._server = TcpServer(self._host, self._epoch, self._pools)

    def describe(self, peer: Peer) -> None:
        assert self._server is not None
        peer.tcp_address = f"{self._advertise or self._host}:{self._server.port}"

    def submit(self, handle: ReadHandle, peer: Peer, batch: Batch, note: str | None = None) -> None:
        handle.at_once = False  # a thread settles it
        handle.note, handle.transport = note, self.name
        if not self._waiting.acquire(blocking=False):
            handle.fail(TransferError(f"more than {WAITING_MAX} reads are waiting for a TCP connection"))
            return
        self._workers.submit(self._read, _Reading(handle, peer, batch))

    async def close(self) -> None:
        with self._lock:
            for reading in self._reading:
                reading.stop()
            for sock in itertools.chain.from_iterable(self._idle.values()):
                sock.close()
            self._idle.clear()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        await asyncio.to_thread(self._workers.shutdown, cancel_futures=True)

    # Below: worker threads.

    def _read(self, reading: _Reading) -> None:
        handle = reading.handle
        handle.on_abort = reading.stop
        with self._lock:
            self._reading.add(reading)
        try:
            report = self._attempt(reading)
        except ServeError as error:
            handle.fail(error)
        except TimeoutError:
            handle.fail(ReadTimeout(f"reading from {reading.peer.instance_id} passed its deadline", handle.ended))
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "the connection ended"
            handle.fail(TransferError(f"reading from {reading.peer.instance_id}: {reason}"))
        else:
            handle.finish(report)
        finally:
            self._waiting.release()
            with self._lock:
                self._reading.discard(reading)

    def _attempt(self, reading: _Reading) -> ReadReport:
        """Read over a kept connection, or over a new one where the kept one turns out to have ended."""
        while kept := self._take_idle(reading.peer):
            try:
                return self._transfer(reading, kept)
            except (ConnectionError, EOFError):
                if reading.moved or reading.handle.aborted:
                    raise
        host, port = reading.peer.tcp_address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)), timeout=reading.remaining_s())
        tune(sock)
        return self._transfer(reading, sock)

    def _transfer(self, reading: _Reading, sock: socket.socket) -> ReadReport:
        started = time.perf_counter()
        verifier = Verifier(reading.batch, self._pools, reading.handle)
        kept = False
        try:
            reading.use(sock)
            for request in _requests(groups(reading.batch)):
                self._request(reading, sock, request)
                for group in request:
                    for segment in group:
                        self._receive(reading, sock, segment)
                        verifier.landed((segment,))  # what has come counts, whether or not the rest of the group does
            reading.release()
            kept = self._keep(reading.peer, sock)
        finally:
            reading.release()
            if not kept:
                sock.close()
        seconds = time.perf_counter() - started
        return ReadReport(
            transport="tcp", bytes=reading.moved, pull_seconds=seconds - verifier.seconds,
            verify_seconds=verifier.seconds, note=reading.handle.note,
        )  # fmt: skip

    def _request(self, reading: _Reading, sock: socket.socket, request: list[list[Segment]]) -> None:
        """Ask for the groups' ranges and check the reply's header. Raises: StaleEpoch, TransferError."""
        ranges = [s for group in request for s in group]
        total = sum(s.length for s in ranges)
        header = wire.REQUEST.pack(wire.REQUEST_MAGIC, len(ranges), reading.peer.epoch, 0)
        body = b"".join(wire.RANGE.pack(s.remote_pool, s.remote_offset, s.length) for s in ranges)
        sock.settimeout(reading.remaining_s())
        send(sock, [memoryview(header + body)])
        reply = bytearray(wire.REPLY.size)
        receive(sock, memoryview(reply))
        magic, status, _, length = wire.REPLY.unpack(reply)
        if magic != wire.REPLY_MAGIC:
            raise TransferError(f"{reading.peer.tcp_address} does not speak this protocol")
        if status == Status.STALE_EPOCH:
            raise StaleEpoch(f"{reading.peer.instance_id} restarted since epoch {reading.peer.epoch}")
        if status != Status.OK:
            raise TransferError(f"{reading.peer.instance_id} refused: status {status}")
        if length != total:
            raise TransferError(f"{reading.peer.instance_id} offers {length} bytes where {total} were asked for")

    def _receive(self, reading: _Reading, sock: socket.socket, segment: Segment) -> None:
        view = self._pools.view(segment.pool, segment.offset, segment.length)
        while view:
            sock.settimeout(reading.remaining_s())
            got = sock.recv_into(view)
            if got == 0:
                raise EOFError
            reading.moved += got
            view = view[got:]

    def _take_idle(self, peer: Peer) -> socket.socket | None:
        with self._lock:
            kept = self._idle.get((peer.instance_id, peer.epoch))
            return kept.pop() if kept else None

    def _keep(self, peer: Peer, sock: socket.socket) -> bool:
        """Put a clean connection back; connections to a peer's older epochs are closed."""
        key = (peer.instance_id, peer.epoch)
        with self._lock:
            for old in [k for k in self._idle if k[0] == key[0] and k[1] < key[1]]:
                for stale in self._idle.pop(old):
                    stale.close()
            kept = self._idle.setdefault(key, [])
            if len(kept) >= IDLE_CONNECTIONS_MAX:
                return False
            kept.append(sock)
            return True


class _Reading:
    """One read's worker-side state. `stop` may come from the loop's thread at any moment."""

    def __init__(self, handle: ReadHandle, peer: Peer, batch: Batch) -> None:
        self.handle, self.peer, self.batch = handle, peer, batch
        self.moved = 0
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def use(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
            if self._stopped or self.handle.aborted:
                raise EOFError

    def release(self) -> None:
        """From here on `stop` leaves the socket alone: it may carry another read next."""
        with self._lock:
            self._sock = None

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # the peer ended it first
                    self._sock.shutdown(socket.SHUT_RDWR)

    def remaining_s(self) -> float:
        """Raises: TimeoutError past the deadline, EOFError once stopped."""
        if self._stopped or self.handle.aborted:
            raise EOFError
        left = self.handle.deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _requests(all_groups: Iterable[list[Segment]]) -> Iterable[list[list[Segment]]]:
    """Gather groups into requests within the wire's limits."""
    request: list[list[Segment]] = []
    count = total = 0
    for group in all_groups:
        group_bytes = sum(s.length for s in group)
        if request and (count + len(group) > wire.RANGES_MAX or total + group_bytes > wire.REQUEST_BYTES_MAX):
            yield request
            request, count, total = [], 0, 0
        request.append(group)
        count, total = count + len(group), total + group_bytes
    if request:
        yield request
