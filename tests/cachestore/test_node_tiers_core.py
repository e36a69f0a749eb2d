"""The node's books with two tiers against a model: no byte is reused under a reader, in memory or on disk."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_node_core import GRACE_MS, block, commit, snapshot

from cachestore.entries import Key, Offer
from cachestore.node.allocator import PAGE_BYTES, Extent
from cachestore.node.books import Region
from cachestore.node.core import NodeCore
from cachestore.node.leases import Lease
from cachestore.node.states import NEXT, VISIBLE, Event, State, after
from moonrelay.errors import InvariantError

FILE_BYTES = 2 * PAGE_BYTES


def tiered(pages: int = 4, files: int = 8) -> NodeCore:
    return NodeCore(pages * PAGE_BYTES, longest_transfer_ms=GRACE_MS, disk_bytes=files * FILE_BYTES)


def store(core: NodeCore, *offers: Offer) -> None:
    assert len(core.admit(offers).new) == len(offers)
    for offer in offers:
        commit(core, offer.key, offer)


def write_all(core: NodeCore) -> list[Key]:
    """Write what wants to be written, as far as there is room."""
    done = []
    while (following := core.next_writes()) is not None:
        for key in following[0]:
            if core.begin_write(key, FILE_BYTES):
                core.written(key)
                done.append(key)
    core.check()
    return done


def promote(core: NodeCore, *keys: Key) -> None:
    assert core.begin_promote(keys)
    for key in keys:
        regions = [Region(e.offset, min(e.length, core.entry(key).offer.nbytes), 1) for e in core.extents(key)]
        core.promoted(key, regions)
    core.check()


def test_what_is_on_disk_leaves_memory_at_once_and_comes_back_for_a_lease() -> None:
    core, chain = tiered(), [block(1, depth) for depth in range(4)]
    store(core, *chain)
    keys = [offer.key for offer in chain]
    assert write_all(core) == keys
    assert core.victims(2 * PAGE_BYTES, now_ms=0) == []  # the index need not be told: it is still here
    assert core.stats().free_bytes == 2 * PAGE_BYTES and core.stats().num_blocks == 4
    assert core.on_disk(keys) == keys[2:]
    assert core.lease(keys, 1_000, now_ms=0) == keys[2]
    promote(core, *keys[2:])
    assert isinstance(core.lease(keys, 1_000, now_ms=0), Lease)
    assert (core.stats().disk.demoted, core.stats().disk.promoted) == (2, 2)
    assert core.victims(4 * PAGE_BYTES, now_ms=0) == [] and core.stats().free_bytes == 0  # leased


def test_parents_are_written_before_children_and_an_unwritten_entry_leaves_as_before() -> None:
    core, chain = tiered(), [block(1, depth) for depth in range(3)]
    store(core, *chain)
    keys = [offer.key for offer in chain]
    while core.next_writes() is not None:
        pass  # forgotten: not worth it then
    lease = core.lease([keys[2]], 1_000, now_ms=0)
    assert isinstance(lease, Lease) and core.release(lease.id, lease.fence)
    assert core.next_writes() == (keys, True)
    assert core.begin_write(keys[0], FILE_BYTES)
    assert core.victims(3 * PAGE_BYTES, now_ms=0) == [keys[2], keys[1]]  # the first is held while it is written
    assert core.next_writes() is None
    core.unwritten(keys[0], again=True, used=True)
    core.check()
    assert core.next_writes() == ([keys[0]], True)


def test_what_leaves_before_its_turn_to_be_written_is_counted() -> None:
    core, chain = tiered(), [block(1, depth) for depth in range(4)]
    store(core, *chain)
    assert core.begin_write(chain[0].key, FILE_BYTES)
    core.written(chain[0].key)
    leaving = core.victims(4 * PAGE_BYTES, now_ms=0)
    assert leaving == [offer.key for offer in reversed(chain[1:])]
    core.reclaim(leaving[:2])
    core.restore(leaving[2:])  # the index could not be told of this one: it may still be written
    core.check()
    assert core.stats().disk.unwritten == 2 and core.stats().disk.num_waiting == 1
    assert write_all(core) == [chain[1].key] and core.stats().disk.unwritten == 2


def test_a_new_snapshot_of_blocks_that_are_on_disk_only_does_not_leave_before_what_can() -> None:
    """Without its blocks memory's `Retention` takes it for an orphan."""
    core = tiered(pages=8)
    store(core, block(1, 0), block(1, 1))
    write_all(core)
    core.victims(2 * PAGE_BYTES, now_ms=0)
    late = snapshot(1, 2)
    store(core, late, block(2, 0), block(2, 1))  # as a branch's snapshot is
    assert core.victims(2 * PAGE_BYTES, now_ms=0) == [block(2, 1).key, block(2, 0).key]
    core.check()
    assert core.next_writes() == ([late.key], True)  # and it is to be written
    assert core.victims(PAGE_BYTES, now_ms=0) == [late.key]  # nothing else is left
    core.check()


def test_a_full_disk_gives_up_files_from_the_deep_end() -> None:
    core = tiered(pages=6, files=3)
    top, middle, deep = (block(1, depth) for depth in range(3))
    store(core, top, middle, deep)
    assert len(write_all(core)) == 3
    core.victims(PAGE_BYTES, now_ms=0)  # the end of the chain is on disk only
    assert core.entry(deep.key).state is State.DISK
    leaving = core.disk_victims(2 * FILE_BYTES)
    assert leaving == [deep.key]
    assert core.take_deletions() == [(middle.key, FILE_BYTES)] and core.take_deletions() == []
    assert core.stats().disk.deleting_bytes == FILE_BYTES
    core.restore(leaving)  # the index could not be told
    assert core.entry(deep.key).state is State.DISK
    assert core.disk_victims(2 * FILE_BYTES) == leaving and core.take_deletions() == []
    core.reclaim(leaving)
    assert core.take_deletions() == [(deep.key, FILE_BYTES)]
    core.check()
    assert not core.begin_write(middle.key, 2 * FILE_BYTES)  # room is there only once files are gone
    core.deleted(2 * FILE_BYTES)
    assert core.begin_write(middle.key, 2 * FILE_BYTES)
    core.check()


def test_files_of_an_earlier_life_are_entries_at_once_and_bad_ones_are_gone_at_once() -> None:
    core, offers = tiered(files=2), [block(1, 0), block(1, 1), block(1, 2)]
    assert [core.found(o, [(o.nbytes, 1)], FILE_BYTES) for o in offers] == [True, True, False]  # no room for more
    assert not core.found(offers[0], [(offers[0].nbytes, 1)], FILE_BYTES)  # here already
    assert core.visible() == {offers[0].key: (), offers[1].key: ()}
    assert core.admit(offers[:1]).already_there == (offers[0].key,)
    assert core.begin_promote([offers[0].key, offers[1].key])
    core.refuse(offers[0].key)
    core.check()
    assert set(core.visible()) == {offers[1].key} and core.stats().disk.deleting_bytes == FILE_BYTES
    assert core.stats().free_bytes == 3 * PAGE_BYTES  # the other one's is taken
    assert core.disk_victims(8 * FILE_BYTES) == []  # a file that is being read stays


def test_the_table_is_what_the_books_do() -> None:
    for state in State:
        assert all(after(state, event) is NEXT[state, event] for event in Event if (state, event) in NEXT)
    with pytest.raises(InvariantError, match="WRITTEN while DISK"):
        after(State.DISK, Event.WRITTEN)
    assert {s for s, _ in NEXT} | set(NEXT.values()) == set(State)
    assert all(NEXT[s, Event.WITHDRAW] is State.LEAVING for s in VISIBLE if (s, Event.WITHDRAW) in NEXT)


class TierMachine(RuleBasedStateMachine):
    """Random publishes, leases, evictions, writes, promotions and time. The model: ranges that a promise covers, and
    which files exist, by the jobs that the node's one writing thread would do, in order."""

    @initialize(pages=st.integers(4, 16), files=st.integers(2, 12))
    def start(self, pages: int, files: int) -> None:
        self.core = tiered(pages, files)
        self.now_ms = 0
        self.landing: list[Key] = []
        self.leaving: list[Key] = []
        self.promised: list[tuple[int, Extent]] = []
        self.leases: dict[str, Lease] = {}
        self.writing: list[Key] = []
        self.promoting: list[Key] = []
        self.jobs: deque[tuple[str, Key]] = deque()
        self.sizes: deque[int] = deque()
        self.files: set[Key] = set()

    def fresh(self, keys) -> None:
        for key in keys:
            for extent in self.core.extents(key):
                for until_ms, old in self.promised:
                    apart = extent.offset + extent.length <= old.offset or old.offset + old.length <= extent.offset
                    assert apart or until_ms <= self.now_ms, "a byte was reused under a lease"

    @rule(chain=st.integers(0, 2), first=st.integers(0, 3), count=st.integers(1, 3), pages=st.integers(1, 2))
    def publish(self, chain: int, first: int, count: int, pages: int) -> None:
        offers = [block(chain, d, pages * PAGE_BYTES - 7) for d in range(first, first + count)]
        admission = self.core.admit([*offers, snapshot(chain, first + count)])
        self.fresh(admission.new)
        self.landing += admission.new

    @precondition(lambda self: self.landing)
    @rule(good=st.booleans())
    def land(self, good: bool) -> None:
        for new in self.landing:
            if good:
                commit(self.core, new, self.core.entry(new).offer)
            else:
                self.core.abort(new)
        self.landing = []

    @rule(data=st.data(), ttl_ms=st.integers(1, 3_000))
    def lease(self, data, ttl_ms: int) -> None:
        visible = sorted(self.core.visible(), key=repr)
        if not visible:
            return
        keys = data.draw(st.lists(st.sampled_from(visible), min_size=1, max_size=4, unique=True))
        lease = self.core.lease(keys, ttl_ms, self.now_ms)
        if missing := self.core.on_disk(keys):
            assert lease == missing[0]
            return
        assert isinstance(lease, Lease)
        self.leases[lease.id] = lease
        extents = [Extent(r.offset, r.length) for k in keys for r in self.core.regions(k)]
        self.promised += [(self.now_ms + ttl_ms + GRACE_MS, extent) for extent in extents]

    @rule(nbytes=st.integers(1, 40_000))
    def evict(self, nbytes: int) -> None:
        self.goes(self.core.victims(nbytes, self.now_ms))

    def goes(self, keys: list[Key]) -> None:
        self.leaving += keys
        rests = [k for k in self.core.visible() if self.core.entry(k).offer.parent in keys]
        assert not rests, "an entry went before what rests on it, in whatever tier"

    @precondition(lambda self: self.leaving)
    @rule(told=st.booleans())
    def index_answers(self, told: bool) -> None:
        if told:
            self.core.reclaim(self.leaving)
        else:
            self.core.restore(self.leaving)
        self.leaving = []

    @rule(pages=st.integers(1, 2))
    def write(self, pages: int) -> None:
        following = self.core.next_writes()
        if following is None:
            return
        self.goes(self.core.disk_victims(pages * PAGE_BYTES))
        self.delete()
        if self.core.begin_write(following[0][0], pages * PAGE_BYTES):
            self.jobs.append(("write", following[0][0]))

    @rule()
    def delete(self) -> None:
        for key, nbytes in self.core.take_deletions():
            self.jobs.append(("delete", key))
            self.sizes.append(nbytes)

    @precondition(lambda self: self.jobs)
    @rule(good=st.booleans())
    def writing_thread_works(self, good: bool) -> None:
        what, key = self.jobs.popleft()
        if what == "delete":
            self.files.discard(key)
            self.core.deleted(self.sizes.popleft())
        elif good:
            self.files.add(key)
            self.core.written(key)
        else:
            self.core.unwritten(key, again=not good)

    @rule(data=st.data())
    def begin_promotion(self, data) -> None:
        keys = [k for k in self.core.visible() if self.core.entry(k).state is State.DISK]
        if keys and self.core.begin_promote(
            chosen := data.draw(st.lists(st.sampled_from(keys), min_size=1, unique=True))
        ):
            self.fresh(chosen)
            self.promoting += chosen

    @precondition(lambda self: self.promoting)
    @rule(good=st.booleans())
    def promotion_ends(self, good: bool) -> None:
        for key in self.promoting:
            assert key in self.files, "a file went while it was read"
            if good:
                entry = self.core.entry(key)
                commit_promoted(self.core, key, entry.offer)
            else:
                self.core.refuse(key)
        self.promoting = []

    @rule(passed_ms=st.integers(0, 4_000))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.core.expire(self.now_ms)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check()


def commit_promoted(core: NodeCore, key: Key, offer: Offer) -> None:
    left, regions = offer.nbytes, []
    for extent in core.extents(key):
        regions.append(Region(extent.offset, min(left, extent.length), 1))
        left -= regions[-1].length
    core.promoted(key, regions)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
