"""The node's core against a model of it: whatever happens, no promised byte is reused and the books balance."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.node.allocator import PAGE_BYTES, Extent, PageAllocator
from cachestore.node.core import NodeCore, Region
from cachestore.node.leases import Lease
from moonrelay.errors import InvariantError

ROOT = b"r" * 16
GRACE_MS = 2_000
FOREVER_MS = 1 << 60


def key(kind: str, chain: int, depth: int) -> Key:
    return Key(ROOT, kind, bytes([chain, depth]) * 8)


def block(chain: int, depth: int, nbytes: int = PAGE_BYTES) -> Offer:
    parent = key(BLOCK, chain, depth - 1) if depth else None
    return Offer(key=key(BLOCK, chain, depth), parent=parent, depth=depth, nbytes=nbytes)


def snapshot(chain: int, tokens: int, nbytes: int = 3 * PAGE_BYTES) -> Offer:
    """After `tokens` blocks."""
    at = key(BLOCK, chain, tokens - 1)
    return Offer(key=Key(ROOT, SNAPSHOT, at.prefix_hash), parent=at, depth=tokens, nbytes=nbytes)


def store(core: NodeCore, *offers: Offer) -> tuple[Key, ...]:
    admission = core.admit(offers)
    for new in admission.new:
        commit(core, new, next(o for o in offers if o.key == new))
    return admission.new


def commit(core: NodeCore, new: Key, offer: Offer) -> None:
    left, regions = offer.nbytes, []
    for extent in core.extents(new):
        regions.append(Region(extent.offset, min(left, extent.length), 0))
        left -= regions[-1].length
    core.commit(new, regions)


def test_memory_is_given_in_order_and_a_full_node_refuses_the_rest() -> None:
    core = NodeCore(10 * PAGE_BYTES)
    offers = [block(1, d, 3 * PAGE_BYTES - 5) for d in range(5)]
    admission = core.admit(offers)
    assert len(admission.new) == 3 and admission.refused == (offers[3].key, offers[4].key)
    assert core.admit(offers[:1]).in_progress == (offers[0].key,)
    for new, offer in zip(admission.new, offers, strict=False):
        commit(core, new, offer)
    assert core.admit(offers[:1]).already_there == (offers[0].key,)
    assert core.missing_bytes(offers) == 5 * PAGE_BYTES
    core.check()


def test_orphans_go_first_and_then_what_saves_least_a_byte() -> None:
    core = NodeCore(14 * PAGE_BYTES)
    store(core, block(1, 0), block(1, 1), block(1, 2), snapshot(1, 3))
    store(core, block(2, 0), block(2, 1), snapshot(2, 2))
    store(core, block(1, 3))  # no snapshot stands on it
    everything = core.victims(99 * PAGE_BYTES, now_ms=0)
    assert everything == [
        block(1, 3).key, snapshot(2, 2).key, block(2, 1).key, block(2, 0).key,
        snapshot(1, 3).key, block(1, 2).key, block(1, 1).key, block(1, 0).key,
    ]  # fmt: skip
    core.restore(everything)
    core.check()


def test_an_entry_that_others_rest_on_or_that_is_protected_stays() -> None:
    core = NodeCore(8 * PAGE_BYTES)
    store(core, block(1, 0), block(1, 1))
    lease = core.lease([block(1, 1).key], 1_000, now_ms=0)
    assert isinstance(lease, Lease)
    assert core.victims(PAGE_BYTES, now_ms=0) == []  # the child is leased, the parent has a child
    assert core.release(lease.id, lease.fence) and not core.release(lease.id, lease.fence)
    assert core.victims(PAGE_BYTES, now_ms=0, protect=[block(1, 1).key]) == []
    assert core.victims(PAGE_BYTES, now_ms=0) == [block(1, 1).key]
    assert core.lease([block(1, 1).key], 1_000, now_ms=0) == block(1, 1).key  # it is leaving
    core.check()


def test_nothing_comes_to_rest_on_an_entry_that_is_leaving() -> None:
    """It would be left behind: half a bundle that no lookup finds."""
    core = NodeCore(12 * PAGE_BYTES)
    offers = [block(1, 0), block(1, 1), snapshot(1, 2)]
    store(core, *offers[:2])
    assert core.victims(PAGE_BYTES, now_ms=0) == [block(1, 1).key]
    admission = core.admit(offers)
    assert admission.already_there == (block(1, 0).key,)
    assert admission.refused == (block(1, 1).key, snapshot(1, 2).key) and not admission.in_progress
    assert core.admit([block(1, 2)]).refused == (block(1, 2).key,), "what it rests on need not be offered with it"
    core.check()
    core.reclaim([block(1, 1).key])
    assert store(core, *offers) == (block(1, 1).key, snapshot(1, 2).key), "room for it again once it has left"
    core.check()


def test_what_an_entry_rested_on_waits_until_it_has_left_for_good() -> None:
    """The index could not be told of the first call's; what the second gave up must not have left before them."""
    core = NodeCore(8 * PAGE_BYTES)
    store(core, block(1, 0), block(1, 1))
    going = core.victims(PAGE_BYTES, now_ms=0)
    assert going == [block(1, 1).key]
    assert core.victims(PAGE_BYTES, now_ms=0) == [] and not core.retire(block(1, 0).key)
    core.check()
    core.restore(going)
    core.check()
    assert core.victims(2 * PAGE_BYTES, now_ms=0) == [block(1, 1).key, block(1, 0).key], "both in one call"
    core.check()
    core.reclaim([block(1, 1).key, block(1, 0).key])
    core.check()
    assert core.stats().free_bytes == 8 * PAGE_BYTES


def test_a_lease_that_expired_keeps_the_memory_for_the_longest_transfer() -> None:
    core = NodeCore(PAGE_BYTES, longest_transfer_ms=GRACE_MS)
    store(core, block(1, 0))
    lease = core.lease([block(1, 0).key], 1_000, now_ms=0)
    assert isinstance(lease, Lease)
    assert core.renew(lease.id, lease.fence + 1, now_ms=500) is None
    renewed = core.renew(lease.id, lease.fence, now_ms=500)
    assert renewed is not None and renewed.expires_ms == 1_500
    assert core.expire(now_ms=1_499) == 0 and core.expire(now_ms=1_500) == 1
    assert core.renew(lease.id, lease.fence, now_ms=1_500) is None
    assert core.victims(1, now_ms=1_500 + GRACE_MS - 1) == []
    assert core.victims(1, now_ms=1_500 + GRACE_MS) == [block(1, 0).key]


def test_split_allocations_use_every_page() -> None:
    pages = PageAllocator(10 * PAGE_BYTES)
    held = [pages.allocate(PAGE_BYTES) for _ in range(10)]
    for extents in held[::2]:
        pages.free(extents)
    scattered = pages.allocate(5 * PAGE_BYTES)
    assert scattered is not None and len(scattered) == 5 and pages.free_bytes == 0
    assert pages.allocate(1) is None and pages.allocate(0) == ()
    with pytest.raises(InvariantError):
        for _ in range(2):
            pages.free(scattered)
    with pytest.raises(InvariantError):
        pages.check([Extent(0, PAGE_BYTES)])


class NodeMachine(RuleBasedStateMachine):
    """Random publishes, leases, evictions and time. The model: which ranges a live promise covers."""

    @initialize(pages=st.integers(4, 24))
    def start(self, pages: int) -> None:
        self.core = NodeCore(pages * PAGE_BYTES, longest_transfer_ms=GRACE_MS)
        self.now_ms = 0
        self.offers: dict[Key, Offer] = {}
        self.landing: list[Key] = []
        self.leaving: list[Key] = []
        self.restored: set[Key] = set()  # they go first, useful or not
        self.quarantined: list[tuple[int, list[tuple[int, Extent]]]] = []
        self.leases: dict[str, Lease] = {}
        self.promised: list[tuple[int, Extent]] = []  # until when (ms), which range
        self.fences = [0]

    def hand_out(self, keys: tuple[Key, ...]) -> None:
        """Fresh memory overlaps nothing that a live promise covers."""
        for new in keys:
            for extent in self.core.extents(new):
                for until_ms, old in self.promised:
                    apart = extent.offset + extent.length <= old.offset or old.offset + old.length <= extent.offset
                    assert apart or until_ms <= self.now_ms, "a byte was reused under a lease"

    @rule(chain=st.integers(0, 3), first=st.integers(0, 4), count=st.integers(1, 4), pages=st.integers(1, 3))
    def publish(self, chain: int, first: int, count: int, pages: int) -> None:
        offers = [block(chain, d, pages * PAGE_BYTES - 7) for d in range(first, first + count)]
        offers.append(snapshot(chain, first + count))
        admission = self.core.admit(offers)
        parts = (admission.new, admission.already_there, admission.in_progress, admission.refused)
        assert sorted(map(hash, (k for p in parts for k in p))) == sorted(hash(o.key) for o in offers)
        self.offers |= {o.key: o for o in offers if o.key in admission.new}
        self.hand_out(admission.new)
        self.landing += admission.new

    @precondition(lambda self: self.landing)
    @rule(data=st.data(), outcome=st.sampled_from(["commit", "commit", "commit", "abort", "quarantine"]))
    def land(self, data, outcome: str) -> None:
        new = data.draw(st.sampled_from(self.landing))
        self.landing.remove(new)
        extents = self.core.extents(new)
        if outcome == "commit":
            commit(self.core, new, self.offers[new])
        elif outcome == "abort":
            self.core.abort(new)
        else:
            number = self.core.quarantine([new])
            self.quarantined.append((number, [(FOREVER_MS + number, e) for e in extents]))
            self.promised += self.quarantined[-1][1]

    @precondition(lambda self: self.quarantined)
    @rule()
    def late_read_ends(self) -> None:
        number, promises = self.quarantined.pop()
        self.core.release_quarantine(number)
        self.promised = [p for p in self.promised if p not in promises]

    @rule(data=st.data(), ttl_ms=st.integers(1, 3_000))
    def lease(self, data, ttl_ms: int) -> None:
        visible = sorted(self.core.visible(), key=repr)
        if not visible:
            return
        keys = data.draw(st.lists(st.sampled_from(visible), min_size=1, max_size=4, unique=True))
        lease = self.core.lease(keys, ttl_ms, self.now_ms)
        assert isinstance(lease, Lease) and lease.fence > self.fences[-1]
        self.fences.append(lease.fence)
        self.leases[lease.id] = lease
        self.promised += [
            (self.now_ms + ttl_ms + GRACE_MS, Extent(r.offset, r.length)) for k in keys for r in self.core.regions(k)
        ]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        assert not self.core.release(lease.id, lease.fence + 1)
        was_live = self.core.release(lease.id, lease.fence)
        if was_live:  # the reader said that it has finished: only the others' promises hold on
            extents = [Extent(r.offset, r.length) for k in lease.keys for r in self.core.regions(k)]
            for extent in extents:
                self.promised.remove((lease.expires_ms + GRACE_MS, extent))

    def useless(self) -> set[Key]:
        """Visible blocks under which there is nothing, and that no promise covers."""
        visible = self.core.visible()
        held_up = {self.offers[k].parent for k in (*visible, *self.landing)}
        covered = {extent.offset for until_ms, extent in self.promised if until_ms > self.now_ms}
        return {
            key
            for key, regions in visible.items()
            if key.kind == BLOCK and key not in held_up and not covered & {r.offset for r in regions}
        }

    @rule(nbytes=st.integers(1, 40_000))
    def evict(self, nbytes: int) -> None:
        before, useless = self.core.stats(), self.useless()
        found = self.core.victims(nbytes, self.now_ms)
        useful = [
            k for k in found if k.kind == SNAPSHOT and k not in self.restored and self.offers[k].parent in found
        ]
        assert not useful or useless <= set(found), "a block that serves nobody outlived a snapshot with its blocks"
        for victim in found:
            rests = [k for k, o in self.offers.items() if o.parent == victim and k in self.core.visible()]
            assert not rests, "an entry went before what rests on it"
        assert self.core.stats().free_bytes == before.free_bytes, "memory is free only after the index was told"
        self.leaving += found

    @precondition(lambda self: self.leaving)
    @rule(told=st.booleans())
    def index_answers(self, told: bool) -> None:
        (self.core.reclaim if told else self.core.restore)(self.leaving)
        self.restored |= set() if told else set(self.leaving)
        self.leaving = []

    @rule(passed_ms=st.integers(0, 4_000))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.core.expire(self.now_ms)
        self.leases = {i: x for i, x in self.leases.items() if x.expires_ms > self.now_ms}

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
