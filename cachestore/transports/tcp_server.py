"""The serving half of our TCP plane: sends ranges of registered pools, straight from their memory, to whoever asks.

A thread per connection; blocking sends release the GIL and copy once, into the kernel. Nothing outside the registered
pools is ever sent, and nothing is ever received into them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from cachestore.transports import wire
from cachestore.transports.pools import Pools
from cachestore.transports.wire import Status
from moonrelay.errors import SettingsError

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
SEND_TIMEOUT_S = 30.0  # a reader that takes nothing for this long is dropped
IOV_MAX = 1024  # the kernel's limit on buffers of one sendmsg


class TcpServer:
    def __init__(self, host: str, epoch: int, pools: Pools) -> None:
        self._epoch, self._pools = epoch, pools
        try:
            self._listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"listen: expected an address of this machine, found {host}: {reason}") from None
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; readers see the connection end."""
        self._closing = True
        with self._lock:
            open_now = list(self._connections)
        for sock in [self._listener, *open_now]:
            _shut(sock)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refused = self._closing or len(self._connections) >= CONNECTIONS_MAX
                if not refused:
                    self._connections.add(sock)
            if refused:
                logger.warning("tcp connection refused", extra={"peer": str(address), "limit": CONNECTIONS_MAX})
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, str(address)), name="tcp-serve", daemon=True).start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            tune(sock)
            while self._answer(sock, address):
                pass
        except (OSError, EOFError):
            pass  # the reader left; its own side reports why
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket, address: str) -> bool:
        """Serve one request; False ends the connection."""
        sock.settimeout(None)  # between requests a connection may rest
        header = bytearray(wire.REQUEST.size)
        receive(sock, memoryview(header))
        sock.settimeout(SEND_TIMEOUT_S)
        magic, count, epoch, request_id = wire.REQUEST.unpack(header)
        if magic != wire.REQUEST_MAGIC or not 0 < count <= wire.RANGES_MAX:
            logger.warning("tcp request malformed", extra={"peer": address, "count": count})
            sock.sendall(wire.REPLY.pack(wire.REPLY_MAGIC, Status.MALFORMED, 0, 0))
            return False
        body = bytearray(wire.RANGE.size * count)
        receive(sock, memoryview(body))
        ranges = list(wire.RANGE.iter_unpack(body))
        total = sum(length for _, _, length in ranges)
        status = Status.OK
        if epoch != self._epoch:
            status = Status.STALE_EPOCH
        elif total > wire.REQUEST_BYTES_MAX or not all(self._pools.holds(*r) for r in ranges):
            status = Status.OUT_OF_RANGE
        if status is not Status.OK:
            logger.warning(
                "tcp read refused", extra={"peer": address, "status": status.name, "count": count, "bytes": total}
            )
            sock.sendall(wire.REPLY.pack(wire.REPLY_MAGIC, status, request_id, 0))
            return True
        reply = wire.REPLY.pack(wire.REPLY_MAGIC, Status.OK, request_id, total)
        send(sock, [memoryview(reply), *(self._pools.view(*r) for r in ranges if r[2])])
        return True


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, wire.BUFFER_BYTES)


def receive(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises: EOFError when the other side ends first."""
    while into:
        got = sock.recv_into(into)
        if got == 0:
            raise EOFError
        into = into[got:]


def send(sock: socket.socket, parts: list[memoryview]) -> None:
    """Send every part, in order, without joining them."""
    first = 0
    while first < len(parts):
        sent = sock.sendmsg(parts[first : first + IOV_MAX])
        while first < len(parts) and sent >= len(parts[first]):
            sent -= len(parts[first])
            first += 1
        if first < len(parts):
            parts[first] = parts[first][sent:]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already ended by the other side
        sock.shutdown(socket.SHUT_RDWR)
