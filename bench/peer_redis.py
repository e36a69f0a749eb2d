"""Redis beside us: the Valkey server of our own wheel over a unix socket, redis-py with hiredis.

redis-py gives values as new `bytes`; a get is over when they are in the caller's own memory, as they are with every
other side here, so they are copied there. What the copy took is kept apart.
"""

from __future__ import annotations

import ctypes
import os
import time

import redis
from cache_loads import Load

from cachestore.arena import Arena

POOL_BYTES = 256 << 20  # walked, as the other sides' pools are


class RedisStore:
    """A synchronous client, the faster of redis-py's two. Nothing is verified."""

    name = "redis"

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._pool = Arena(POOL_BYTES)
        self._at = 0
        self.copied: dict[str, list[float]] = {}
        self._block = os.urandom(16 << 20)

    def put(self, load: Load) -> None:
        for index in range(load.sets):
            for key in self._names(load, index):
                self._redis.set(key, self._block[: load.value_bytes])

    def get(self, load: Load, index: int) -> float:
        names = self._names(load, index)
        began = time.perf_counter()
        found = [self._redis.get(names[0])] if load.values == 1 else self._redis.mget(names)
        read = time.perf_counter()
        at = 0 if self._at + load.bytes > POOL_BYTES else self._at
        self._at = at + load.bytes
        for value in found:
            ctypes.memmove(self._pool.base + at, value, load.value_bytes)
            at += load.value_bytes
        ended = time.perf_counter()
        assert [len(value) for value in found] == [load.value_bytes] * load.values
        self.copied.setdefault(load.name, []).append(ended - read)
        return ended - began

    def close(self) -> None:
        self._redis.close()

    @staticmethod
    def _names(load: Load, index: int) -> list[str]:
        return [f"{load.name}-{index}-{value}" for value in range(load.values)]
