"""Processes and in-process twins to read from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from peer_child import POOL, pattern

from cachestore.arena import Arena
from cachestore.checksum import checksum
from cachestore.transports import MemoryFabric, TransportSet
from moonrelay.stubs.v1.common_pb2 import Peer, Span

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("peer_child.py")
LENGTH = 20 << 20


class Bytes:
    """What a peer's pool holds, known to the test from the seed."""

    def __init__(self, seed: int, length: int) -> None:
        self.data = pattern(seed, length)

    def span(self, offset: int, length: int) -> Span:
        view = memoryview(self.data)[offset : offset + length]
        return Span(pool=POOL, offset=offset, length=length, xxh3=checksum(view))


class ProcessPeer:
    """A peer in a process of its own."""

    def __init__(self, transport: str, instance_id: str, epoch: int, *, env: dict | None = None, **more) -> None:
        given = {"transport": transport, "instance_id": instance_id, "epoch": epoch, "seed": epoch, "length": LENGTH}
        self.bytes = Bytes(epoch, LENGTH)
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(given | more)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )  # fmt: skip
        self.peer = Peer.FromString(bytes.fromhex(self._answer()["peer"]))

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the peer process ended"
        return json.loads(line)

    def alter_first_byte(self) -> None:
        self.process.stdin.write("alter\n")
        self.process.stdin.flush()
        self._answer()

    def read(self, peer: Peer, span: Span) -> dict:
        """Let the process read from `peer`; its report."""
        words = (message.SerializeToString().hex() for message in (peer, span))
        self.process.stdin.write("read " + " ".join(words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> int:
        if self.process.poll() is None:
            self.resume()
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=20)


class MemoryPeer:
    """The same face, in this process."""

    def __init__(self, fabric: MemoryFabric, instance_id: str, epoch: int) -> None:
        self.bytes = Bytes(epoch, LENGTH)
        self.fabric, self.instance_id, self.epoch = fabric, instance_id, epoch
        self.arena = Arena(LENGTH)
        np.frombuffer(self.arena.view, dtype=np.uint8)[:] = self.bytes.data
        self.transports = TransportSet.in_memory(instance_id, epoch, fabric)
        self.transports.register(POOL, self.arena.base, self.arena.length)

    async def start(self) -> None:
        await self.transports.start()
        self.peer = self.transports.peer()

    def alter_first_byte(self) -> None:
        self.arena.view[0] ^= 0xFF

    def kill(self) -> None:
        self.fabric.kill(self.instance_id)

    def stop(self) -> None:
        self.fabric.stop(self.instance_id)

    def resume(self) -> None:
        self.fabric.resume(self.instance_id)

    def close(self) -> int:
        self.fabric.kill(self.instance_id)
        return 0


class Reader:
    """This process as a reader: transports and one landing pool."""

    def __init__(self, transport: str, fabric: MemoryFabric) -> None:
        self.arena = Arena(LENGTH)
        self.memory = np.frombuffer(self.arena.view, dtype=np.uint8)
        instance_id = f"reader-{time.monotonic_ns()}"
        if transport == "memory":
            self.transports = TransportSet.in_memory(instance_id, 1, fabric)
        else:
            self.transports = TransportSet.open(instance_id, 1, transport=transport)
        self.transports.register(1, self.arena.base, self.arena.length)

    def landed(self, offset: int, length: int) -> bytes:
        return self.memory[offset : offset + length].tobytes()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds
