"""Two workers, one small node with a small disk, everything at once: what is fetched is right, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest
from cache_world import Listed, LocalWorld, Prompt, Worker, local_world, prompt
from test_node import BUNDLE_BYTES, fresh_root, until
from test_node_tiers import files_in

from cachestore.transports import TransportSet
from moonrelay.errors import ServeError
from moonrelay.valkey import LocalValkey, connect

ROUNDS = 40  # of each worker, in each of two lives of the node


async def work(worker: Worker, world: LocalWorld, prompts: list[Prompt], rng: random.Random, directory: Path) -> int:
    """Fetch what is found (`Worker.fetch` compares every byte), publish what is not; now and then alter a file."""
    hits = 0
    for _ in range(ROUNDS):
        mine = rng.choice(prompts)
        match = await worker.match(mine)
        if match.tokens:
            hits += (await worker.fetch(mine, match)).tokens > 0
        else:
            with contextlib.suppress(ServeError):  # everything is leased just now
                await worker.publish(world.member, mine, range(4), (4,))
        world.node.core.check()
        if rng.random() < 0.1 and (files := files_in(directory)):
            path = rng.choice(files)
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                body = file.read()
                if body:  # it may just have been created
                    at = rng.randrange(len(body))
                    file.seek(at)
                    file.write(bytes([body[at] ^ 1 << rng.randrange(8)]))
    return hits


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_what_is_fetched_is_right(valkey: LocalValkey, tmp_path: Path, seed: int) -> None:
    rng, root = random.Random(seed), fresh_root()
    prompts = [prompt(root, (token, 4)) for token in range(9)]

    async def life() -> int:
        async with local_world(valkey.url, 3 * BUNDLE_BYTES, tmp_path, 7 * BUNDLE_BYTES) as world:
            redis = connect(valkey.url)
            other = Worker(TransportSet.in_memory("other", 1, world.fabric), Listed(world.member), redis)
            await other.transports.start()
            workers = (world.worker, other)
            hits = await asyncio.gather(*(work(w, world, prompts, rng, tmp_path) for w in workers))
            await until(lambda: not world.node.core.stats().num_leases)
            await until(lambda: not world.node.disk._promoting)
            world.node.core.expire(int(time.monotonic() * 1000))
            world.node.core.check()
            await other.close()
            await redis.aclose()
            return sum(hits)

    assert asyncio.run(life()) + asyncio.run(life()) > ROUNDS  # of both: one life alone has anything from 19 to 44
