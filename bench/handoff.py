"""A handoff's transfer against memcpy: 16 MiB pulled from another process and verified, medians of one run.

The publishing side's hashing and one message's round trip are timed and printed apart: they are not part of the pull.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("UCX_MODULES", "^efa")

import numpy as np

from cachestore.arena import Arena
from cachestore.transports import Read, Slice, TransportSet
from moonrelay.stubs.v1.common_pb2 import Peer, Span

SIZE = 16 << 20
POOL_BYTES = 256 << 20  # the reads walk it, so that neither side works in its last-level cache
ROUNDS = 24
DEADLINE_S = 30.0


async def source() -> None:
    """The publisher: a pool of random bytes; prints its address, spans and hashing time, waits for the end."""
    arena = Arena(POOL_BYTES)
    base = arena.base
    np.frombuffer(arena.view, np.uint64)[:] = np.random.default_rng(0).integers(0, 1 << 62, POOL_BYTES // 8)
    transports = TransportSet.open("bench-source", 1)
    transports.register(0, base, POOL_BYTES)
    await transports.start()
    began = time.perf_counter()
    spans = [transports.span(0, offset, SIZE) for offset in range(0, POOL_BYTES, SIZE)]
    hashing = (time.perf_counter() - began) / len(spans)
    peer = transports.peer().SerializeToString().hex()
    print(json.dumps({"peer": peer, "spans": [s.SerializeToString().hex() for s in spans], "publish_s": hashing}))
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    await transports.close()


async def reader(made: dict[str, Any], transport: str) -> dict[str, Any]:
    """Memcpy and pulls alternate, so that a busy moment hits both."""
    arena, other = Arena(POOL_BYTES), Arena(POOL_BYTES)  # the baseline's pages are as huge as the pull's
    base, other_base = arena.base, other.base
    np.frombuffer(arena.view, np.uint64)[:] = 1
    np.frombuffer(other.view, np.uint64)[:] = 2
    transports = TransportSet.open("bench-reader", 1, transport=transport)  # type: ignore[arg-type]
    transports.register(0, base, POOL_BYTES)
    await transports.start()
    peer = Peer.FromString(bytes.fromhex(made["peer"]))
    spans = [Span.FromString(bytes.fromhex(s)) for s in made["spans"]]
    copies, pulls, used = [], [], ""
    for i in range(ROUNDS):
        span = spans[i % len(spans)]
        began = time.perf_counter()
        ctypes.memmove(base + span.offset, other_base + span.offset, SIZE)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        read = Read(span, (Slice(0, span.offset, SIZE),))
        report = await transports.read(peer, [read], time.monotonic() + DEADLINE_S)
        pulls.append(time.perf_counter() - began)
        used = report.transport
    await transports.close()
    memcpy, pull = statistics.median(copies[2:]), statistics.median(pulls[2:])
    return {
        "transport": used,
        "memcpy_gbps": round(SIZE / memcpy / 1e9, 2),
        "pull_and_verify_gbps": round(SIZE / pull / 1e9, 2),
        "ratio_to_memcpy": round(memcpy / pull, 3),
        "publish_ms": round(made["publish_s"] * 1e3, 2),
    }


def measure(transport: str = "auto") -> dict[str, Any]:
    """One run over `transport` (auto: what the system itself would take)."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--source"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        return asyncio.run(reader(json.loads(process.stdout.readline()), transport))
    finally:
        process.stdin.write("\n")
        process.stdin.close()
        process.wait(timeout=30)


if __name__ == "__main__":
    if "--source" in sys.argv:
        asyncio.run(source())
    else:
        for name in ("auto", "tcp"):
            print(json.dumps(measure(name)))
