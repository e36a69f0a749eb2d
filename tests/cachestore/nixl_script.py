"""What only a fresh process can show about NIXL; run by path with a scenario's name, prints one JSON line."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

from tests_cachestore import ProcessPeer, Reader, soon

from cachestore.transports import Landing, Read, ReadTimeout, Slice, TransportSet
from moonrelay.errors import TransferError

MIB = 1 << 20


async def open_and(close: bool) -> dict:
    transports = TransportSet.open("solo", 41, transport="nixl")
    await transports.start()
    peer = transports.peer()
    found = {"modules": os.environ["UCX_MODULES"], "name": peer.nixl_name, "torch": "torch" in sys.modules}
    found["metadata_bytes"] = len(peer.nixl_metadata)
    if close:
        await transports.close()
    return found


async def idle() -> dict:
    """Processor time of a second in which nothing is asked of two transports, and where they listen."""
    reader, peer = Reader("auto", None), ProcessPeer("auto", "peer", 3)
    await reader.transports.start()
    await reader.transports.read(peer.peer, [Read(peer.bytes.span(0, 64), (Slice(1, 0, 64),))], soon())
    before = time.process_time()
    await asyncio.to_thread(threading.Event().wait, 1.0)
    used = time.process_time() - before
    listening = listeners(os.getpid()) | listeners(peer.process.pid)
    await reader.transports.close()
    return {"cpu_seconds": used, "listening": sorted(listening), "peer_exit": peer.close()}


def listeners(pid: int) -> set[str]:
    """Local addresses (hex, as the kernel writes them) of a process's listening TCP sockets."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                found.add(fields[1].split(":")[0])
    return found


async def forbidden() -> dict:
    """A peer that forbids being read, and a reader that has no privilege to do it anyway."""
    peer = ProcessPeer("auto", "peer", 3, undumpable=True)
    drop_privileges()
    found = {}
    for transport in ("auto", "nixl"):
        reader = Reader(transport, None)
        await reader.transports.start()
        try:
            report = await reader.transports.read(peer.peer, [whole(peer, MIB)], soon())
            found[transport] = [
                report.transport,
                report.note,
                reader.landed(0, MIB) == peer.bytes.data[:MIB].tobytes(),
            ]
        except TransferError as error:
            found[transport] = ["error", str(error), False]
        await reader.transports.close()
    return found | {"peer_exit": peer.close()}


def drop_privileges() -> None:
    """Give up every capability (none may be there): with uid 0 ptrace would otherwise be allowed everywhere."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0


async def quarantine() -> dict:
    """Over UCX's TCP (set by the environment) a stopped peer's read outlives its deadline and lands much later."""
    peer, reader = ProcessPeer("nixl", "peer", 3), Reader("nixl", None)
    await reader.transports.start()
    await reader.transports.read(peer.peer, [whole(peer, 64)], soon())
    reader.memory[:] = 0
    peer.stop()
    landing = Landing()
    handle = landing.add(reader.transports.read(peer.peer, [whole(peer, 16 * MIB)], soon(0.5)))
    found = {}
    try:
        await handle
    except ReadTimeout:
        found["pending_at_deadline"] = landing.pending
    await asyncio.to_thread(threading.Event().wait, 0.1)  # the NIXL thread notices that the peer is silent
    started = time.monotonic()
    try:
        await reader.transports.read(peer.peer, [whole(peer, 64)], soon())
    except TransferError as error:
        found["next_read"] = [str(error), time.monotonic() - started < 1]
    found["still_pending"] = landing.pending
    peer.resume()
    async with asyncio.timeout(20):
        await landing.ended()
    found["landed_late"] = bool(reader.memory.any())
    report = await reader.transports.read(peer.peer, [whole(peer, MIB)], soon())
    found["works_again"] = [report.transport, reader.landed(0, MIB) == peer.bytes.data[:MIB].tobytes()]
    await reader.transports.close()
    return found | {"peer_exit": peer.close()}


def whole(peer: ProcessPeer, length: int) -> Read:
    return Read(peer.bytes.span(0, length), (Slice(1, 0, length),))


SCENARIOS = {
    "closed": lambda: open_and(True), "left_open": lambda: open_and(False), "idle": idle, "forbidden": forbidden,
    "quarantine": quarantine,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(asyncio.run(SCENARIOS[sys.argv[1]]())), flush=True)
