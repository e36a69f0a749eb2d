"""The lookup: the script on a real Valkey, its twin in memory and a naive statement of the rule all agree."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_model import BLOCK_TOKENS, DEPTH, SHARED, Life, Model, assert_whole, chain, operations
from msgspec.structs import replace
from redis.asyncio import Redis

from cachestore.index import CacheIndex
from cachestore.index_memory import MemoryIndex
from cachestore.lookup import UNSALTED, Entry, Match, Tenant, life_name
from moonrelay.prefix import Fingerprint, prefix_root
from moonrelay.valkey import LocalValkey, connect


class Both:
    """The index in Redis and its twin; every answer must be the same."""

    def __init__(self, redis: Redis, **sizes: int) -> None:
        self.redis, self.root = redis, secrets.token_bytes(16)
        self.index, self.twin = CacheIndex(redis, BLOCK_TOKENS, **sizes), MemoryIndex(BLOCK_TOKENS, **sizes)

    async def match(self, hashes, prompt_tokens: int, nodes, *, root: bytes | None = None, **more) -> Match:
        root = root or self.root
        found = await self.index.match(root, hashes, prompt_tokens, nodes, **more)
        assert found == self.twin.match(root, hashes, prompt_tokens, nodes, **more)
        assert_whole(found, prompt_tokens)
        return found

    async def write(self, life: Life, entries, *, root: bytes | None = None) -> None:
        await self.index.write(root or self.root, life, entries)
        self.twin.write(root or self.root, life, entries)

    async def remove(self, life: Life, names) -> None:
        await self.index.remove(self.root, life, names)
        self.twin.remove(self.root, life, names)

    async def renew(self, life: Life) -> frozenset:
        there = await self.index.renew(self.root, life)
        assert there == self.twin.renew(self.root, life)
        return there

    async def forget(self, life: Life) -> None:
        await self.index.forget(self.root, life)
        self.twin.forget(self.root, life)

    async def lose(self, life: Life, prefix_hash: bytes) -> None:
        """As a Redis does that drops what it was given."""
        await self.redis.hdel(f"mr:{{{self.root.hex()}}}:block:{life_name(life)}", prefix_hash)
        lives = self.twin._roots[self.root].lives if self.root in self.twin._roots else {}
        if life_name(life) in lives:
            lives[life_name(life)].blocks.pop(prefix_hash, None)


def with_both(url: str, test: Callable[[Both], Awaitable[None]], **sizes: int) -> None:
    async def run() -> None:
        redis = connect(url)
        both = Both(redis, **sizes)
        try:
            await test(both)
        finally:
            both.index.close()
            await redis.aclose()

    asyncio.run(run())


def entries(hashes: list[bytes], blocks=(), cuts=(), *, first: int = 0, tier="host") -> dict:
    """Blocks by index, all of one run; snapshots by their depth."""
    made = {
        ("block", hashes[i]): Entry(nbytes=10, tier=tier, first=first, parent=hashes[i - 1] if i else None)
        for i in blocks
    }
    return made | {("snapshot", hashes[n - 1]): Entry(nbytes=5, tier=tier) for n in cuts}


async def apply(both: Both, model: Model, step) -> None:
    what, index, name, (low, high, cuts), tier = step
    node = model.nodes[index]
    match what:
        case "write":
            made = model.write(node, name, low, high, cuts, tier)
            if made:
                await both.write(node.life, made)
        case "evict":
            await both.remove(node.life, model.evict(node, low))
        case "drop_cut":
            names: list = []
            for prefix_hash in sorted(node.cuts)[:low]:
                model.drop_cut(node, prefix_hash, names)
            await both.remove(node.life, names)
        case "kill":
            model.kill(index)
        case "hole":
            model.exact = False
            await both.lose(node.life, chain(name)[min(low, DEPTH - 1)])
        case "forget":
            model.exact = False
            await both.forget(node.life)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=operations(), blocks=st.integers(0, DEPTH), extra=st.integers(1, BLOCK_TOKENS))
def test_the_script_its_twin_and_the_rule_agree(valkey: LocalValkey, steps, blocks: int, extra: int) -> None:
    async def check(both: Both) -> None:
        model = Model(3)
        for step in steps:
            await apply(both, model, step)
        for name in SHARED:
            tokens = blocks * BLOCK_TOKENS + extra
            found = await both.match(chain(name)[: tokens // BLOCK_TOKENS], tokens, model.lives())
            model.check(found, name, tokens)

    with_both(valkey.url, check)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_last_token_is_always_computed(valkey: LocalValkey, extra: int) -> None:
    async def check(both: Both) -> None:
        node, prompt_tokens = Life("n", 1), 4 * BLOCK_TOKENS + extra
        await both.write(node, entries(chain("a"), range(4), (3, 4)))
        match = await both.match(chain("a")[: prompt_tokens // BLOCK_TOKENS], prompt_tokens, [node])
        assert match.tokens == (4 if extra == 1 else 3) * BLOCK_TOKENS
        assert match.miss_reason == "remainder"

    with_both(valkey.url, check)


def test_every_lost_token_has_a_reason(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        live, dead, hashes = Life("a", 7), Life("a", 6), chain("a")
        await both.write(live, entries(hashes, range(6), (2, 3)))
        await both.write(dead, entries(hashes, range(8), (8,)))
        tokens = 10 * BLOCK_TOKENS + 5
        match = await both.match(hashes, tokens, [live])
        assert match.lost == (("no_snapshot", 3 * 64), ("stale_index", 2 * 64), ("cold", 2 * 64), ("remainder", 5))
        assert match.matchable_tokens == 6 * 64 and match.seen_tokens == 8 * 64
        assert [b.tokens for b in match.alternatives] == [2 * 64]
        hit = match.hit()
        assert (hit.matchable_tokens, hit.seen_tokens, len(hit.alternatives)) == (6 * 64, 8 * 64, 1)

        await both.remove(live, [("snapshot", hashes[2]), ("block", hashes[5]), ("block", hashes[4])])
        match = await both.match(hashes, tokens, [live])
        assert match.lost == (
            ("snapshot_evicted", 64), ("no_snapshot", 64), ("stale_index", 4 * 64), ("cold", 2 * 64), ("remainder", 5)
        )  # fmt: skip
        await both.forget(dead)
        assert (await both.match(hashes, tokens, [live])).lost[2] == ("block_evicted", 2 * 64)
        other = await both.match(chain("b"), tokens, [live])
        assert other.lost[-2:] == (("diverged", 6 * 64), ("remainder", 5))

        cold = await both.match(hashes, tokens, [live], root=bytes(16))
        assert cold.lost == (("cold", 10 * 64), ("remainder", 5))
        nobody = await both.match(hashes, tokens, [])
        assert nobody.lost[0] == ("stale_index", 4 * 64)
        assert (await both.match([], 1, [live])).lost == (("remainder", 1),)

    with_both(valkey.url, check)


def test_a_snapshot_that_died_or_was_evicted_is_named_up_to_its_depth(valkey: LocalValkey) -> None:
    """The deeper of the two would have served; what lies beyond both had no snapshot."""

    async def check(both: Both) -> None:
        live, dead, hashes = Life("a", 7), Life("b", 6), chain("a")
        await both.write(live, entries(hashes, range(9), (1, 4)))
        await both.write(dead, entries(hashes, range(9), (6,)))
        await both.remove(live, [("snapshot", hashes[3])])
        lost = (await both.match(hashes, 641, [live])).lost
        assert lost == (("stale_index", 5 * 64), ("no_snapshot", 3 * 64), ("cold", 64), ("remainder", 1))
        await both.write(live, entries(hashes, (), (8,)))
        await both.remove(live, [("snapshot", hashes[7])])
        lost = (await both.match(hashes, 641, [live])).lost
        assert lost == (("snapshot_evicted", 7 * 64), ("no_snapshot", 64), ("cold", 64), ("remainder", 1))

    with_both(valkey.url, check)


def test_runs_of_several_nodes_are_joined_where_each_begins(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        x, y, hashes = Life("x", 1), Life("y", 1), chain("a")
        for first, end in ((0, 1), (2, 5), (7, 9)):
            await both.write(x, entries(hashes, range(first, end), first=first))
        await both.write(y, entries(hashes, range(1, 3), first=1))
        await both.write(y, entries(hashes, range(4, 7), (6,), first=4))
        match = await both.match(hashes, 641, [x, y])
        assert [(r.node_id, r.first, r.end) for r in match.runs] == [
            ("x", 0, 1),
            ("y", 1, 3),
            ("x", 3, 5),
            ("y", 5, 6),
        ]
        assert (match.tokens, match.matchable_tokens) == (6 * 64, 9 * 64)
        alone = await both.match(hashes, 641, [x])
        assert alone.matchable_tokens == 64 and alone.seen_tokens == 9 * 64

    with_both(valkey.url, check)


def test_a_block_that_had_a_child_is_a_fork_however_it_is_written_again(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        node, stored, asked = Life("n", 1), chain("a"), chain("b")  # they part after four blocks
        await both.write(node, entries(stored, range(6)))
        await both.write(node, entries(stored, range(4)))  # a publish of what is known
        assert (await both.match(asked, 640, [node])).lost[1] == ("diverged", 5 * 64)
        await both.remove(node, [("block", h) for h in stored[5:3:-1]])
        assert (await both.match(asked, 640, [node])).lost[1] == ("diverged", 5 * 64)
        await both.remove(node, [("block", stored[3])])
        lost = (await both.match(asked, 640, [node])).lost
        assert lost[1:3] == (("block_evicted", 64), ("diverged", 5 * 64))

    with_both(valkey.url, check)


FINGERPRINT = Fingerprint(
    model="k3-nano", weights_revision="1", tokenizer_revision="t", row_dtype="fp32", snapshot_dtype="fp32",
    layout_version="1", numerics_version="n", block_tokens=BLOCK_TOKENS,
)  # fmt: skip


def test_an_empty_root_says_whether_the_salt_or_the_fingerprint_is_new(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        revision, salt = secrets.token_hex(4), secrets.token_hex(4)
        now, later = (replace(FINGERPRINT, weights_revision=r) for r in (revision, revision + "b"))
        node, tokens = Life("n", 1), 4 * BLOCK_TOKENS + 1

        async def reason(fingerprint: Fingerprint, salt: str) -> str:
            root = prefix_root(fingerprint, salt)
            tenant = Tenant.of(fingerprint, salt)
            return (await both.match(chain("a")[:4], tokens, [node], root=root, tenant=tenant)).miss_reason

        await both.redis.delete(f"mr:{{{UNSALTED.hex()}}}:root")
        assert await reason(now, salt) == "cold"  # nothing unsalted is known yet
        await both.write(node, entries(chain("a"), range(4), (4,)), root=prefix_root(now, ""))
        assert await reason(now, "") == "remainder"
        assert await reason(now, salt) == "salt"
        await both.write(node, entries(chain("a"), range(4), (4,)), root=prefix_root(now, salt))
        assert await reason(now, salt) == "remainder"
        assert await reason(later, salt) == "fingerprint"
        assert await reason(later, "") == "fingerprint"
        assert await reason(later, salt + "other") == "cold"  # never served, and unsalted has nothing here either

    with_both(valkey.url, check)


def test_workers_tell_how_deep_their_own_bundles_go_and_serve_no_hit(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        hashes, node, tokens = chain("a"), Life("n", 1), 10 * BLOCK_TOKENS
        workers = [Life("p", 1), Life("d", 2), Life("idle", 3)]
        await both.write(node, entries(hashes, range(6), (3, 6)))
        await both.write(workers[0], entries(hashes, range(8), (6, 8), tier="device"))
        await both.write(workers[1], entries(hashes, range(2, 6), (6,), first=2, tier="device"))  # not from the start
        match = await both.match(hashes, tokens, [node], workers=workers)
        assert match.tokens == 6 * 64 and match.snapshot.node_id == "n"
        assert [(d.instance_id, d.tokens) for d in match.devices] == [("p", 8 * 64)]
        assert match.seen_tokens == 8 * 64 and match.by_tier == {"host": 6 * 64}
        assert match.lost == (("cold", 3 * 64), ("remainder", 64))  # nobody evicted what a worker has for itself
        await both.write(workers[1], entries(hashes, range(3), (3,), tier="device"))
        match = await both.match(hashes, tokens, [node], workers=workers)
        assert {d.instance_id: d.tokens for d in match.devices} == {"p": 8 * 64, "d": 3 * 64}
        assert [r.node_id for b in match.alternatives for r in (*b.runs, b.snapshot)] == ["n", "n"]

    with_both(valkey.url, check)


def test_a_replica_is_an_alternative_of_its_own(valkey: LocalValkey) -> None:
    """Where a node cannot be reached, its chain cannot be used at any depth: the other node's can."""

    async def check(both: Both) -> None:
        hashes, nodes, tokens = chain("a"), [Life("x", 1), Life("y", 1)], 10 * BLOCK_TOKENS
        await both.write(nodes[0], entries(hashes, range(8), (2, 5, 8)))
        await both.write(nodes[1], entries(hashes, range(5), (5,)))
        match = await both.match(hashes, tokens, nodes)
        assert (match.tokens, {r.node_id for r in match.runs}) == (8 * 64, {"x"})
        offered = [(b.tokens, {r.node_id for r in (*b.runs, b.snapshot)}) for b in match.alternatives]
        assert offered == [(5 * 64, {"x"}), (5 * 64, {"y"}), (2 * 64, {"x"})]
        swapped = await both.match(hashes[:5], 5 * BLOCK_TOKENS + 1, nodes[::-1])
        assert {r.node_id for r in swapped.runs} == {"y"}  # equal runs: the order given decides
        await both.write(nodes[1], entries(hashes, range(5), tier="disk"))
        swapped = await both.match(hashes[:5], 5 * BLOCK_TOKENS + 1, nodes[::-1])
        assert {r.node_id for r in swapped.runs} == {"x"}  # unless one of them has it in memory

    with_both(valkey.url, check)


def test_entries_are_withdrawn_renewed_and_forgotten(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        node, hashes = Life("n", 1), chain("a")
        await both.write(node, entries(hashes, range(4), (4,)))
        assert await both.renew(node) == {"block", "snapshot"}
        await both.remove(node, [("snapshot", hashes[3]), ("block", hashes[3]), ("block", hashes[2])])
        match = await both.match(hashes, 640, [node])
        assert (match.tokens, match.matchable_tokens, match.seen_tokens) == (0, 128, 256)
        assert await both.renew(node) == {"block"}
        await both.forget(node)
        assert await both.renew(node) == set()
        assert (await both.match(hashes, 640, [node])).matchable_tokens == 0

    with_both(valkey.url, check)


def test_a_life_that_nobody_renews_is_taken_out_by_the_others(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        hashes, live, dead = chain("a"), Life("n", 2), Life("n", 1)
        prefix = f"mr:{{{both.root.hex()}}}:"
        await both.index.write(both.root, dead, entries(hashes, range(4), (4,)), ttl_s=100)
        await both.index.write(both.root, live, entries(hashes, range(2), (2,)))
        assert await both.index.renew(both.root, live, ttl_s=150) == {"block", "snapshot"}
        assert await both.redis.hlen(prefix + "cuts") == 2
        assert await both.index.renew(both.root, live, ttl_s=300) == {"block", "snapshot"}
        assert await both.redis.smembers(prefix + "nodes") == {b"n:2"}
        assert await both.redis.hkeys(prefix + "cuts") == [hashes[1]]
        for key in ("nodes", "cuts", "block:n:2", "snap:n:2"):
            assert 0 < await both.redis.ttl(prefix + key) <= 300
        assert await both.redis.exists(prefix + "block:n:1", prefix + "snap:n:1") == 0

    with_both(valkey.url, check)


def test_traces_are_bounded_in_number_and_time(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        node, prefix = Life("n", 1), f"mr:{{{both.root.hex()}}}:"
        long = [i.to_bytes(2, "big") * 8 for i in range(1, 120)]
        await both.write(node, entries(long, range(119)))
        for i in range(118, 0, -1):
            await both.remove(node, [("block", long[i])])
            sizes = [await both.redis.hlen(f"{prefix}was:{g}") for g in (0, 1)]
            assert max(sizes) <= 20, sizes
        assert sum(sizes) > 20
        match = await both.match(long, 119 * BLOCK_TOKENS + 1, [node])
        assert 20 < match.seen_tokens // BLOCK_TOKENS < 60  # the deepest went first, and were forgotten first
        for g in (0, 1):
            assert 0 < await both.redis.ttl(f"{prefix}was:{g}") <= 3_600

    with_both(valkey.url, check, trace_max=20, trace_ttl_s=3_600)


def test_no_lookup_and_no_write_touches_another_roots_keys(valkey: LocalValkey) -> None:
    async def check(both: Both) -> None:
        node, mine, theirs = Life("n", 1), prefix_root(FINGERPRINT, "mine"), prefix_root(FINGERPRINT, "theirs")
        await both.write(node, entries(chain("a"), range(4), (4,)), root=theirs)
        monitored = connect(valkey.url)
        async with monitored.monitor() as monitor:
            tenant = Tenant.of(FINGERPRINT, "mine")
            await both.index.match(mine, chain("a"), 640, [node], tenant=tenant)
            await both.index.write(mine, node, entries(chain("b"), range(4), (4,)))
            await both.index.match(mine, chain("a"), 640, [node], tenant=tenant)
            await both.index.remove(mine, node, [("block", chain("b")[3]), ("snapshot", chain("b")[3])])
            await both.index.renew(mine, node)
            await both.index.forget(mine, node)
            await both.redis.echo("the end")
            commands = []
            while "the end" not in (command := (await monitor.next_command())["command"]):
                commands.append(command)
        await monitored.aclose()
        assert sum(mine.hex() in c for c in commands) > 20
        allowed = (mine.hex(), tenant.key.hex(), UNSALTED.hex())
        for command in commands:
            assert theirs.hex() not in command
            assert "mr:{" not in command or any(key in command for key in allowed), command

    with_both(valkey.url, check)


def test_a_long_lookup_is_one_short_script(valkey: LocalValkey) -> None:
    """Relative, since machines differ: 2,000 blocks cost less than 10 small round trips."""

    async def check(both: Both) -> None:
        names = [i.to_bytes(2, "big") * 8 for i in range(2_000)]
        nodes = [Life(f"n{i}", i) for i in range(4)]
        await both.write(nodes[2], entries(names, range(2_000), (1_999, 2_000)))
        lookups, pings = [], []
        for _ in range(15):
            started = time.perf_counter()
            match = await both.index.match(both.root, names, 2_000 * BLOCK_TOKENS + 1, nodes)
            lookups.append(time.perf_counter() - started)
            assert match.tokens == 2_000 * BLOCK_TOKENS and len(match.alternatives) == 1
            started = time.perf_counter()
            for _ in range(10):
                await both.redis.get("x")
            pings.append(time.perf_counter() - started)
        assert min(lookups) < min(pings), (min(lookups), min(pings))

    with_both(valkey.url, check)
