"""A process to read from: one pool of bytes that the seed decides. Talks JSON lines on stdin and stdout."""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import time

import numpy as np

from cachestore.arena import Arena
from cachestore.transports import Read, Slice, TransportSet
from moonrelay.stubs.v1.common_pb2 import Peer, Span

POOL = 7


def pattern(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


async def main() -> None:
    given = json.loads(sys.argv[1])
    if given.get("undumpable"):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: others may not attach to this process
    arena = Arena(given["length"])
    memory = np.frombuffer(arena.view, dtype=np.uint8)
    memory[:] = pattern(given["seed"], given["length"])
    transports = TransportSet.open(given["instance_id"], given["epoch"], transport=given["transport"])
    transports.register(POOL, arena.base, arena.length)
    await transports.start()
    print(json.dumps({"peer": transports.peer().SerializeToString().hex()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "alter":
            memory[0] ^= 0xFF
            print("{}", flush=True)
        elif line.startswith("read "):  # its first bytes, into the pool's end
            peer, span = (bytes.fromhex(word) for word in line.split()[1:])
            wanted = Span.FromString(span)
            into = (Slice(POOL, arena.length - wanted.length, wanted.length),)
            report = await transports.read(Peer.FromString(peer), [Read(wanted, into)], time.monotonic() + 10)
            print(json.dumps({"transport": report.transport}), flush=True)
    await transports.close()


if __name__ == "__main__":
    asyncio.run(main())
