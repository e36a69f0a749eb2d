"""One process of Mooncake's store, run by its own venv: a storage node, or (0 bytes) the client that is timed."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time

from mooncake.store import MooncakeDistributedStore

BUFFER_BYTES = 256 << 20


def answer(value: object) -> None:
    print(f"answer {value}", flush=True)


def names(request: dict[str, int], index: int) -> list[str]:
    return [f"{request['bytes']}x{request['values']}-{index}-{value}" for value in range(request["values"])]


def client(store: MooncakeDistributedStore) -> None:
    """Serve put and get requests from stdin. Gets land in registered memory that they walk through."""
    memory = mmap.mmap(-1, BUFFER_BYTES)
    base = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    memory[:] = os.urandom(1 << 20) * (BUFFER_BYTES >> 20)
    assert store.register_buffer(base, BUFFER_BYTES) == 0
    answer("ready")
    at = 0
    for line in sys.stdin:
        request = json.loads(line)
        size, values = request["bytes"], request["values"]
        total = size * values
        if request["do"] == "put":
            places = [base + size * value for value in range(values)]
            for index in range(request["sets"]):
                codes = store.batch_put_from(names(request, index), places, [size] * values)
                assert not any(codes), codes
            answer("stored")
            continue
        at = 0 if at + total > BUFFER_BYTES else at
        keys = names(request, request["set"])
        places = [base + at + size * value for value in range(values)]
        began = time.perf_counter()
        if values == 1:
            got = [store.get_into(keys[0], places[0], size)]
        else:
            got = store.batch_get_into(keys, places, [size] * values)
        seconds = time.perf_counter() - began
        assert got == [size] * values, got
        at += total
        answer(seconds)


def main() -> None:
    master, node_bytes = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", node_bytes, 64 << 20, "tcp", "", master)
    assert code == 0, code
    if node_bytes:
        answer("ready")
        sys.stdin.read()
    else:
        client(store)


main()
