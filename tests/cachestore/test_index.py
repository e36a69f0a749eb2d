"""The lookup against a real Valkey, and against a plain re-statement of the hit rule."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachestore.index import CacheIndex, Entry, Match
from moonrelay.valkey import LocalValkey, connect

BLOCK_TOKENS = 64
ENTRY = Entry(bytes=10, checksums=(1, 2))


@dataclass(frozen=True)
class Life:
    instance_id: str
    epoch: int


def hashes(count: int) -> list[bytes]:
    return [index.to_bytes(2, "big") * 8 for index in range(count)]


def with_index(url: str, test: Callable[[CacheIndex, bytes], Awaitable[None]]) -> None:
    async def run() -> None:
        redis = connect(url)
        try:
            await test(CacheIndex(redis, BLOCK_TOKENS), secrets.token_bytes(16))
        finally:
            await redis.aclose()

    asyncio.run(run())


async def store(index: CacheIndex, root: bytes, node: Life, blocks=(), snapshots=()) -> None:
    """Blocks by their index, snapshots by their tokens in blocks."""
    names = hashes(200)
    entries = {("block", names[b]): ENTRY for b in blocks} | {("snapshot", names[n - 1]): ENTRY for n in snapshots}
    await index.write(root, node, entries)


def expected(prompt_tokens: int, lives: list[tuple[set[int], set[int]]]) -> tuple[int, int]:
    """The rule itself: (usable tokens, how deep blocks go) from what each live node holds."""
    limit = (prompt_tokens - 1) // BLOCK_TOKENS
    depth = next((d for d in range(limit) if not any(d in blocks for blocks, _ in lives)), limit)
    usable = max((n for _, cuts in lives for n in cuts if n <= depth), default=0)
    return usable * BLOCK_TOKENS, depth * BLOCK_TOKENS


def assert_sums(match: Match, prompt_tokens: int) -> None:
    assert match.tokens + sum(tokens for _, tokens in match.lost) == prompt_tokens
    assert match.lost and all(tokens > 0 for _, tokens in match.lost)
    at = 0
    for run in match.runs:
        assert run.first == at and run.end > at
        at = run.end
    assert at * BLOCK_TOKENS == match.tokens
    assert (match.hit() is None) == (match.tokens == 0)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    held=st.lists(
        st.tuples(st.sets(st.integers(0, 12), max_size=13), st.sets(st.integers(1, 13), max_size=3)), max_size=3
    ),
    prompt_tokens=st.integers(1, 14 * BLOCK_TOKENS),
)
def test_the_script_finds_what_the_rule_says(valkey: LocalValkey, held, prompt_tokens: int) -> None:
    async def check(index: CacheIndex, root: bytes) -> None:
        nodes = [Life(f"n{i}", 10 + i) for i in range(len(held))]
        for node, (blocks, cuts) in zip(nodes, held, strict=True):
            await store(index, root, node, blocks, cuts)
        match = await index.match(root, hashes(prompt_tokens // BLOCK_TOKENS), prompt_tokens, nodes)
        assert (match.tokens, match.matchable_tokens) == expected(prompt_tokens, held)
        assert_sums(match, prompt_tokens)
        for run in match.runs:
            blocks = held[nodes.index(Life(run.node_id, run.epoch))][0]
            assert set(range(run.first, run.end)) <= blocks
        if match.snapshot is not None:
            cuts = held[nodes.index(Life(match.snapshot.node_id, match.snapshot.epoch))][1]
            assert match.tokens // BLOCK_TOKENS in cuts

    with_index(valkey.url, check)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_last_token_is_always_computed(valkey: LocalValkey, extra: int) -> None:
    async def check(index: CacheIndex, root: bytes) -> None:
        node, prompt_tokens = Life("n", 1), 4 * BLOCK_TOKENS + extra
        await store(index, root, node, range(4), (3, 4))
        match = await index.match(root, hashes(prompt_tokens // BLOCK_TOKENS), prompt_tokens, [node])
        assert match.tokens == (4 if extra == 1 else 3) * BLOCK_TOKENS
        assert match.miss_reason == "remainder"
        assert_sums(match, prompt_tokens)

    with_index(valkey.url, check)


def test_every_lost_token_has_a_reason(valkey: LocalValkey) -> None:
    async def check(index: CacheIndex, root: bytes) -> None:
        live, dead = Life("a", 7), Life("a", 6)
        await store(index, root, live, range(6), (2,))
        await store(index, root, dead, range(8), (8,))
        tokens = 10 * BLOCK_TOKENS + 5
        match = await index.match(root, hashes(10), tokens, [live])
        assert match.lost == (("no_snapshot", 4 * 64), ("stale_index", 4 * 64), ("remainder", 5))
        assert match.branch_tokens == 6 * 64 and match.miss_reason == "no_snapshot"
        assert match.hit().matchable_tokens == 6 * 64

        cold = await index.match(bytes(16), hashes(10), tokens, [live])
        assert cold.lost == (("cold", 10 * 64), ("remainder", 5)) and cold.branch_tokens == 0
        nobody = await index.match(root, hashes(10), tokens, [])
        assert nobody.lost == cold.lost
        assert (await index.match(root, [], 1, [live])).lost == (("remainder", 1),)

    with_index(valkey.url, check)


def test_entries_are_withdrawn_renewed_and_forgotten(valkey: LocalValkey) -> None:
    async def check(index: CacheIndex, root: bytes) -> None:
        node, names = Life("n", 1), hashes(4)
        await store(index, root, node, range(4), (4,))
        assert await index.renew(root, node) == {"block", "snapshot"}
        await index.remove(root, node, [("snapshot", names[3]), ("block", names[2])])
        match = await index.match(root, hashes(10), 640, [node])
        assert (match.tokens, match.matchable_tokens) == (0, 128)
        assert await index.renew(root, node) == {"block"}
        await index.forget(root, node)
        assert await index.renew(root, node) == set()
        assert (await index.match(root, hashes(10), 640, [node])).matchable_tokens == 0

    with_index(valkey.url, check)


def test_a_long_lookup_is_one_short_script(valkey: LocalValkey) -> None:
    """Relative, since machines differ: 2,000 blocks cost less than 40 small round trips."""

    async def check(index: CacheIndex, root: bytes) -> None:
        names = [i.to_bytes(2, "big") * 8 for i in range(2_000)]
        nodes = [Life(f"n{i}", i) for i in range(4)]
        await index.write(root, nodes[2], {("block", h): ENTRY for h in names})
        await index.write(root, nodes[1], {("snapshot", names[0]): ENTRY})
        redis = connect(valkey.url)
        lookups, pings = [], []
        for _ in range(15):
            started = time.perf_counter()
            match = await index.match(root, names, 2_000 * BLOCK_TOKENS + 1, nodes)
            lookups.append(time.perf_counter() - started)
            assert match.tokens == BLOCK_TOKENS
            started = time.perf_counter()
            for _ in range(40):
                await redis.get("x")
            pings.append(time.perf_counter() - started)
        await redis.aclose()
        assert min(lookups) < min(pings), (min(lookups), min(pings))

    with_index(valkey.url, check)
