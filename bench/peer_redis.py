"""Redis beside us: the Valkey server of our own wheel over a unix socket, redis-py with hiredis, values as bytes."""

from __future__ import annotations

import os
import time

import redis
from cache_loads import Load


class RedisStore:
    """A synchronous client, the faster of redis-py's two. Nothing is verified and nothing copied into a pool."""

    name = "redis"

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._block = os.urandom(16 << 20)

    def put(self, load: Load) -> None:
        for index in range(load.sets):
            for key in self._names(load, index):
                self._redis.set(key, self._block[: load.value_bytes])

    def get(self, load: Load, index: int) -> float:
        names = self._names(load, index)
        began = time.perf_counter()
        found = [self._redis.get(names[0])] if load.values == 1 else self._redis.mget(names)
        seconds = time.perf_counter() - began
        assert [len(value) for value in found] == [load.value_bytes] * load.values
        return seconds

    def close(self) -> None:
        self._redis.close()

    @staticmethod
    def _names(load: Load, index: int) -> list[str]:
        return [f"{load.name}-{index}-{value}" for value in range(load.values)]
