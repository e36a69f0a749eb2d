"""Can this process read that one's memory? Asked of the kernel, on a page of known bytes, before NIXL relies on it.

UCX takes cross-memory attach (CMA, `process_vm_readv`) between processes of one host. Where ptrace rules, seccomp or
separate namespaces forbid it, UCX falls back, silently, to emulation over TCP that is slower than a plain socket and
needs the peer's processor. So the first read from a peer tries a probe page and compares its checksum.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from functools import cache
from hashlib import blake2b
from pathlib import Path

from cachestore.checksum import checksum
from moonrelay.stubs.v1.common_pb2 import Peer, Span

PROBE_POOL = 0xFFFF_FFFF  # the probe page's pool id; others are the process's own choice
PROBE_BYTES = 64
LANDING_SLOTS = 512  # probe landing places behind the page, one per peer being connected


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    return libc


@cache
def host_id() -> str:
    """Equal on processes that share a kernel, a pid namespace and a user namespace: CMA needs all three."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    return blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


@cache
def has_rdma() -> bool:
    """Whether this host has an RDMA device. Source: sysfs."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


class ProbePage:
    """A page of random bytes that peers read to learn whether they can, and landing room for our own probes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PROBE_BYTES * (1 + LANDING_SLOTS))
        self._memory[:PROBE_BYTES] = secrets.token_bytes(PROBE_BYTES)
        self.length = len(self._memory)
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))

    def read(self, offset: int, length: int) -> bytes:
        return self._memory[offset : offset + length]

    def span(self) -> Span:
        return Span(pool=PROBE_POOL, offset=0, length=PROBE_BYTES, xxh3=checksum(self._memory[:PROBE_BYTES]))


def read_process_memory(pid: int, address: int, length: int) -> bytes:
    """Bytes of another process. Raises: PermissionError, ProcessLookupError, OSError."""
    buffer = ctypes.create_string_buffer(length)
    local = _IoVec(ctypes.addressof(buffer), length)
    remote = _IoVec(address, length)
    got = _libc().process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # the constructor picks the subclass
    return buffer.raw[:got]


def why_not_shared_memory(peer: Peer) -> str | None:
    """None if the peer's memory can be read from here; else the reason, for people."""
    if peer.host_id != host_id():
        return "the peer is on another host or in another namespace"
    base = next((pool.base for pool in peer.pools if pool.id == PROBE_POOL), None)
    if base is None or not peer.HasField("probe"):
        return "the peer offers no probe page"
    try:
        found = read_process_memory(peer.pid, base + peer.probe.offset, peer.probe.length)
    except OSError as error:
        return f"same-host memory access is forbidden or gone: {error.strerror}"
    return None if checksum(found) == peer.probe.xxh3 else "the probe page holds other bytes"
