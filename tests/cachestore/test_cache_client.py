"""A fetch that goes wrong: what it falls back to, what it keeps of what has landed, what it says of the rest."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from cache_world import BLOCK_BYTES, ROWS, STATE, STATE_BYTES, Listed, LocalNode, Prompt, Worker, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_node import until
from tests_cachestore import soon

from cachestore import fetch
from cachestore.client import CacheClient, FetchReport
from cachestore.index import Match
from cachestore.lookup import Entry
from cachestore.prompt_cache import WorkerCache
from cachestore.spans import DISK, HOST, mark_disk, pack_entry, unpack
from cachestore.transports import Landing, MemoryFabric, Slice, TransportSet
from moonrelay.membership import Member
from moonrelay.stubs.v1 import common_pb2
from moonrelay.stubs.v1.worker_pb2 import CacheHit, CacheRun
from moonrelay.valkey import LocalValkey, connect


@dataclass
class Two:
    """Two nodes and a worker."""

    fabric: MemoryFabric
    nodes: dict[str, LocalNode]
    members: dict[str, Member]
    worker: Worker
    mine: Prompt

    async def publish(self, name: str, blocks: range, cuts: tuple[int, ...]) -> None:
        for first in range(0, len(cuts), 2):  # the worker has two slots
            await self.worker.publish(self.members[name], self.mine, blocks, cuts[first : first + 2])

    async def match(self, first: str = "a") -> Match:
        """Where both nodes have the same, `first` gives it."""
        nodes = sorted(self.worker.nodes.all, key=lambda m: m.instance_id != first)
        return await self.worker.index.match(self.mine.root, self.mine.hashes, len(self.mine.tokens), nodes)

    async def fetch(
        self, match: Match, landing: Landing | None = None, deadline_s: float | None = None
    ) -> FetchReport:
        """Into wiped memory; whatever it says it brought must be the prompt's."""
        worker = self.worker
        worker.rows.view[:], worker.state.view[:] = bytes(worker.rows.length), bytes(worker.state.length)
        rows = [Slice(ROWS, i * BLOCK_BYTES, BLOCK_BYTES) for i in range(match.tokens // 64)]
        report = await worker.client.fetch(
            match.hit(), self.mine.root, self.mine.hashes, rows, Slice(STATE, 0, STATE_BYTES), deadline_s or soon(),
            landing or Landing(),
        )  # fmt: skip
        blocks = report.tokens // 64
        assert len(report.xxh3) == blocks == sum(place.blocks for place in report.places)
        assert (report.miss_reason is None) == (report.tokens == match.tokens)
        for i in range(blocks):
            view = worker.rows.view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
            assert bytes(view) == self.mine.block(i)
            assert report.xxh3[i] in (None, worker.transports.span(ROWS, i * BLOCK_BYTES, BLOCK_BYTES).xxh3)
        if blocks:
            assert bytes(worker.state.view[:STATE_BYTES]) == self.mine.state(blocks)
        return report

    def spoil(self, name: str, kind: str, depth: int) -> None:
        """Alter a byte of an entry in a node's memory."""
        node = self.nodes[name]
        wanted = self.mine.hashes[depth - 1 if kind == "snapshot" else depth]
        [regions] = [r for k, r in node.core.visible().items() if (k.kind, k.prefix_hash) == (kind, wanted)]
        node.arena.view[regions[0].offset] ^= 1


@contextlib.asynccontextmanager
async def two_nodes(url: str, blocks: int = 8) -> AsyncIterator[Two]:
    redis, fabric = connect(url), MemoryFabric()
    nodes = {name: LocalNode(name, time.monotonic_ns(), fabric, redis, 4 << 20) for name in ("a", "b")}
    members = {name: await node.start() for name, node in nodes.items()}
    worker = Worker(TransportSet.in_memory("worker", 1, fabric), Listed(*members.values()), redis)
    await worker.transports.start()
    try:
        yield Two(fabric, nodes, members, worker, prompt(secrets.token_bytes(16), (5, blocks)))
    finally:
        await worker.close()
        for node in nodes.values():
            await node.close()
        await redis.aclose()


def run(url: str, test: Callable[[Two], object]) -> None:
    async def inside() -> None:
        async with two_nodes(url) as two:
            await test(two)
            await until(lambda: sum(n.core.stats().num_leases for n in two.nodes.values()) == 0)

    asyncio.run(inside())


def test_what_left_between_lookup_and_lease_costs_only_its_part(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(7), (3, 5))
        more: dict = {("snapshot", two.mine.hashes[7]): Entry(nbytes=1)}
        more["block", two.mine.hashes[7]] = Entry(nbytes=1, first=0, parent=two.mine.hashes[6])
        await two.worker.index.write(two.mine.root, two.nodes["a"].identity, more)  # and then it left the node
        match = await two.match()
        assert match.tokens == 512 and [b.tokens for b in match.alternatives] == [320, 192]
        report = await two.fetch(match)
        assert (report.tokens, report.miss_reason) == (320, "stale_index")
        await two.nodes["a"].intake.index.flush()  # the node put the index right
        assert (await two.match()).lost[:2] == (("no_snapshot", 128), ("block_evicted", 64))

    run(valkey.url, check)


@pytest.mark.parametrize(("kind", "depth", "tokens", "pulled", "leases"), [
    ("snapshot", 8, 320, STATE_BYTES, 2),  # every block landed and agreed: only another state is brought
    ("block", 6, 320, STATE_BYTES, 2),
    ("block", 4, 192, STATE_BYTES, 2),  # the first alternative needs the bad block too, and is not tried
    ("block", 0, 0, 0, 1),
])  # fmt: skip
def test_bytes_that_do_not_agree_cost_only_what_needs_them(
    valkey: LocalValkey, kind: str, depth: int, tokens: int, pulled: int, leases: int
) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (3, 5, 8))
        match = await two.match()
        two.spoil("a", kind, depth)
        report = await two.fetch(match)
        assert (report.tokens, report.miss_reason, report.bytes) == (tokens, "tier_error", pulled)
        assert two.nodes["a"].metrics.leases_granted._value.get() == leases

    run(valkey.url, check)


def test_a_replica_gives_what_a_bad_copy_does_not(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        for name in ("a", "b"):
            await two.publish(name, range(8), (8,))
        match = await two.match()
        two.spoil("a", "block", 5)
        report = await two.fetch(match)
        assert (report.tokens, report.places[-1].node.instance_id) == (512, "b")
        assert report.bytes == 3 * BLOCK_BYTES + STATE_BYTES  # five blocks of the bad copy were right

    run(valkey.url, check)


def test_a_dead_node_is_left_for_its_replica(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (5, 8))
        await two.publish("b", range(6), (5,))
        match = await two.match()
        two.worker.nodes.all = [two.members["b"]]
        assert (await two.fetch(match)).tokens == 320
        two.worker.nodes.all = list(two.members.values())
        two.fabric.kill("a")  # its gRPC answers, its memory does not
        report = await two.fetch(match)
        assert (report.tokens, report.miss_reason) == (320, "tier_error")
        assert [p.node.instance_id for p in report.places] == ["b"]

    run(valkey.url, check)


def test_a_node_that_does_not_answer_leaves_time_for_the_other(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (8,))
        await two.publish("b", range(6), (5,))
        match = await two.match()
        with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and says nothing
            address = f"127.0.0.1:{deaf.getsockname()[1]}"
            two.worker.nodes.all = [
                replace(two.members["a"], grpc_address=address, line_address=address),
                two.members["b"],
            ]
            started = time.monotonic()
            report = await two.fetch(match, deadline_s=started + 1.5)
            assert (report.tokens, report.miss_reason) == (320, "tier_error")
            assert time.monotonic() - started < 1.5

    run(valkey.url, check)


def test_while_bytes_may_still_land_nothing_else_is_brought_there(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (8,))
        await two.publish("b", range(8), (5,))
        match, landing = await two.match(), Landing()
        assert (await two.fetch(match)).tokens == 512  # the channel is there now
        two.fabric.stop("a")
        report = await two.fetch(match, landing, deadline_s=soon(0.6))
        assert (report.tokens, report.miss_reason) == (0, "tier_error") and landing.pending
        assert not any(two.worker.rows.view)
        two.fabric.resume("a")
        await landing.ended()
        two.nodes["a"].core.expire(10**12)

    run(valkey.url, check)


def test_a_long_read_keeps_its_lease_and_one_that_lost_it_is_thrown_away(
    valkey: LocalValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LEASE_TTL_MS", 300)

    async def check(two: Two) -> None:
        await two.publish("a", range(8), (8,))
        match, core = await two.match(), two.nodes["a"].core
        renewed: list[int] = []
        renew = core.renew
        monkeypatch.setattr(core, "renew", lambda *a: renewed.append(1) or renew(*a))
        two.fabric.stop("a")
        reading = asyncio.ensure_future(two.fetch(match))
        await until(lambda: len(renewed) >= 6)  # two lives of the lease
        two.fabric.resume("a")
        assert (await reading).tokens == 512

        monkeypatch.setattr(core, "renew", lambda *_: renewed.clear())
        two.fabric.stop("a")
        reading, started = asyncio.ensure_future(two.fetch(match)), time.monotonic()
        await until(lambda: not renewed and time.monotonic() > started + 0.4)
        two.fabric.resume("a")
        report = await reading
        assert (report.tokens, report.miss_reason) == (0, "tier_error") and "lease ended" in report.detail
        core.expire(10**12)

    run(valkey.url, check)


def test_ended_leases_travel_with_the_next(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (8,))
        match, core = await two.match(), two.nodes["a"].core
        for _ in range(5):
            assert (await two.fetch(match)).tokens == 512
            assert core.stats().num_leases <= 2

    run(valkey.url, check)


def test_a_worker_accounts_for_every_token_of_the_hit(valkey: LocalValkey) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (5, 8))
        match = await two.match()
        counted = SimpleNamespace(fetched=lambda *_: None, published=lambda *_: None)
        cache = WorkerCache(two.worker.transports, two.worker.nodes, lambda _: 5_000, counted)
        rows = [(ROWS, i * BLOCK_BYTES, BLOCK_BYTES) for i in range(8)]

        async def restore():
            return await cache.restore(
                match.hit(), two.mine.root, two.mine.hashes, rows, (STATE, 0, STATE_BYTES), Landing()
            )

        whole = await restore()
        assert (whole.usage.cached_tokens, whole.usage.cached_host, len(whole.usage.lost)) == (512, 512, 0)
        assert whole.usage.seen_tokens == 512
        assert whole.xxh3 == tuple(two.worker.transports.span(*row).xxh3 for row in rows)
        two.spoil("a", "snapshot", 8)
        less = await restore()
        assert (less.usage.cached_tokens, less.usage.cached_host) == (320, 320)
        assert [(e.reason, e.tokens) for e in less.usage.lost] == [(common_pb2.MISS_REASON_TIER_ERROR, 192)]
        two.worker.nodes.all = []
        none = await restore()
        assert none.usage.cached_tokens == 0 and none.xxh3 == ()
        assert [(e.reason, e.tokens) for e in none.usage.lost] == [(common_pb2.MISS_REASON_STALE_INDEX, 512)]
        await cache._client.close()

    run(valkey.url, check)


@pytest.mark.parametrize("change", [{"tokens": 513}, {"tokens": 0}, {"blocks": 7}, {"rows": 7}, {"rows": 0}])
def test_tokens_that_are_not_those_of_the_blocks_are_refused(valkey: LocalValkey, change: dict) -> None:
    async def check(two: Two) -> None:
        await two.publish("a", range(8), (7, 8))
        match = await two.match()
        hit = match.hit()
        hit.ClearField("alternatives")
        hit.tokens = change.get("tokens", hit.tokens)
        if "blocks" in change:
            hit.snapshot.first_block = hit.runs[0].end_block = change["blocks"]
        rows = [Slice(ROWS, i * BLOCK_BYTES, BLOCK_BYTES) for i in range(change.get("rows", 8))]
        unknown = CacheHit(tokens=512, runs=hit.runs, snapshot={"node_id": "?", "first_block": 8}, alternatives=[hit])
        for asked in (hit, unknown):
            report = await two.worker.client.fetch(
                asked, two.mine.root, two.mine.hashes, rows, Slice(STATE, 0, STATE_BYTES), soon(), Landing()
            )
            assert (report.tokens, report.miss_reason) == (0, "stale_index")

    run(valkey.url, check)


RUN = st.builds(
    CacheRun, node_id=st.sampled_from(["x", "gone"]), node_epoch=st.integers(0, 2), first_block=st.integers(0, 9),
    end_block=st.integers(0, 9),
)  # fmt: skip
BARE = st.builds(CacheHit, tokens=st.integers(0, 999), runs=st.lists(RUN, max_size=3), snapshot=RUN)


@settings(max_examples=40, deadline=None)
@given(hit=st.builds(CacheHit, tokens=st.integers(0, 999), runs=st.lists(RUN, max_size=3), snapshot=RUN,
                     alternatives=st.lists(BARE, max_size=2)))  # fmt: skip
def test_a_hit_that_makes_no_sense_is_a_miss(hit: CacheHit) -> None:
    async def inside() -> FetchReport:
        client = CacheClient(TransportSet.in_memory("w", 1, MemoryFabric()), Listed())
        rows = [Slice(ROWS, 0, 10)] * 5
        return await client.fetch(hit, bytes(16), [bytes(16)] * 5, rows, Slice(STATE, 0, 10), soon(), Landing())

    report = asyncio.run(inside())
    assert (report.tokens, report.miss_reason) == (0, "stale_index")


REGIONS = st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(entries=st.lists(REGIONS, max_size=6), on_disk=st.sets(st.integers(0, 5)))
def test_packed_spans_come_back_as_they_were(entries, on_disk) -> None:
    packed = b"".join(pack_entry(7, regions) for regions in entries)
    records = unpack(mark_disk(packed, sorted(on_disk)))
    assert [(o, n, x) for _, _, _, o, n, x in records] == [r for regions in entries for r in regions]
    assert [pool for pool, *_ in records] == [7] * len(records)
    number = 0
    for _, tier, last, *_ in records:
        assert tier == (DISK if number in on_disk else HOST)
        number += last
    assert number == len(entries)


def test_packed_spans_that_were_cut_are_refused() -> None:
    packed = pack_entry(0, [(0, 1, 2), (3, 4, 5)])
    for cut in (packed[:-1], packed[:32]):
        with pytest.raises(ValueError):
            unpack(cut)
