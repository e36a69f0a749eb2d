"""Drafter rows in a node's books: replaced, evicted, filed and promoted without a byte that is reused too early."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from test_node_core import GRACE_MS, block, snapshot
from test_node_tiers_core import FILE_BYTES, TierMachine, store, tiered, write_all

from cachestore.entries import BLOCK, DraftOffer, Key
from cachestore.node.allocator import PAGE_BYTES, Extent
from cachestore.node.books import DraftForm, Region
from cachestore.node.core import NodeCore
from cachestore.node.file_form import FIXED, Header, RefusedFile, decode_header, encode_header, file_bytes
from cachestore.node.leases import Lease
from cachestore.node.states import State

ROWS_BYTES = 700


def rows_of(key: Key, drafter: str = "one", nbytes: int = ROWS_BYTES) -> DraftOffer:
    return DraftOffer(key=key, drafter=drafter, nbytes=nbytes)


def regions(extents: tuple[Extent, ...], nbytes: int) -> list[Region]:
    made = []
    for extent in extents:
        made.append(Region(extent.offset, min(nbytes, extent.length), 7))
        nbytes -= made[-1].length
    return made


def take(core: NodeCore, *offers: DraftOffer) -> list[bool]:
    """Admit and land them; whether each has its rows now."""
    admission = core.admit_drafts(offers)
    assert not admission.refused
    wanted = [offer for offer in offers if offer.key in admission.new]
    return [core.commit_draft(o.key, regions(core.draft_extents(o.key), o.nbytes)) for o in wanted]


def test_rows_have_their_own_memory_and_leave_with_their_block() -> None:
    core, chain = tiered(pages=8), [block(1, 0), block(1, 1)]
    store(core, *chain)
    offers = [rows_of(o.key) for o in chain]
    assert core.missing_draft_bytes(offers) == 0
    assert take(core, *offers) == [True, True] and core.stats().free_bytes == 4 * PAGE_BYTES
    assert core.admit_drafts(offers).already_there == (chain[0].key, chain[1].key)
    core.check()
    core.reclaim(core.victims(8 * PAGE_BYTES, now_ms=0))
    assert core.stats().free_bytes == 8 * PAGE_BYTES
    core.check()


def test_memory_that_rows_take_counts_when_room_is_made() -> None:
    core = tiered(pages=6)
    store(core, block(1, 0), block(2, 0), block(3, 0))
    take(core, rows_of(block(1, 0).key, nbytes=2 * PAGE_BYTES))
    core.check()
    assert core.victims(3 * PAGE_BYTES, now_ms=0) == [block(1, 0).key], "the oldest frees what it has of both"
    core.check()


def test_rows_are_not_taken_for_a_block_that_is_not_in_memory_nor_twice_at_once() -> None:
    core = tiered(pages=5)
    there, absent = block(1, 0), block(2, 0)
    store(core, there)
    landing = block(3, 0)
    core.admit([landing])
    offers = [rows_of(o.key) for o in (there, absent, landing)]
    admission = core.admit_drafts(offers)
    assert (admission.new, admission.refused) == ((there.key,), (absent.key, landing.key))
    assert core.admit_drafts(offers[:1]).refused == (there.key,)
    core.check()
    store(core, cut := snapshot(1, 1, PAGE_BYTES))
    assert core.admit_drafts([rows_of(cut.key)]).refused == (cut.key,)
    core.abort_drafts([there.key])
    assert core.admit_drafts([rows_of(there.key, nbytes=8 * PAGE_BYTES)]).refused == (there.key,)  # no room
    core.abort(landing.key)
    core.check()


def test_a_block_that_leaves_while_its_rows_land_takes_them_along() -> None:
    core, there = tiered(pages=4), block(1, 0)
    store(core, there)
    offer = rows_of(there.key)
    core.admit_drafts([offer])
    core.reclaim(core.victims(PAGE_BYTES, now_ms=0))
    assert not core.commit_draft(there.key, regions(core.draft_extents(there.key), offer.nbytes))
    assert core.stats().free_bytes == 4 * PAGE_BYTES
    core.check()


def test_replaced_rows_wait_for_older_leases_and_for_their_last_transfers() -> None:
    core, there = tiered(pages=8), block(1, 0)
    store(core, there)
    take(core, rows_of(there.key))
    old = core.lease([there.key], 1_000, now_ms=0)
    take(core, rows_of(there.key, "two"))
    new = core.lease([there.key], 60_000, now_ms=0)
    assert isinstance(old, Lease) and isinstance(new, Lease)
    assert core.stats().quarantined_bytes == PAGE_BYTES
    core.expire(1_000)
    assert core.stats().quarantined_bytes == PAGE_BYTES  # a last transfer may go on
    core.check()
    core.expire(1_000 + GRACE_MS)
    assert core.stats().quarantined_bytes == 0  # the newer lease was told of the newer rows
    core.check()


def test_a_file_that_is_being_written_keeps_the_rows_it_reads_and_is_then_written_again() -> None:
    core, there = tiered(pages=8), block(1, 0)
    store(core, there)
    take(core, rows_of(there.key))
    assert core.begin_write(there.key, FILE_BYTES)
    take(core, rows_of(there.key, "two"))
    assert core.stats().quarantined_bytes == PAGE_BYTES
    core.written(there.key)
    core.check()
    entry = core.entry(there.key)
    assert core.stats().quarantined_bytes == 0 and entry.state is State.HOST
    assert core.take_deletions() == [(there.key, FILE_BYTES)]
    core.deleted(FILE_BYTES)
    assert write_all(core) == [there.key]
    assert entry.filed_draft == DraftForm("two", ((ROWS_BYTES, 7),)) and entry.state is State.BOTH


def test_promotion_brings_both_or_the_block_alone() -> None:
    core, chain = tiered(pages=4), [block(1, 0), block(1, 1)]
    for offer in chain:
        assert core.found(offer, [(offer.nbytes, 1)], FILE_BYTES, DraftForm("one", ((ROWS_BYTES, 7),)))
    keys = [offer.key for offer in chain]
    assert core.promotion_bytes(keys) == 0 and core.begin_promote(keys)
    assert core.stats().free_bytes == 0
    core.check()
    for offer, good in zip(chain, (True, False), strict=True):
        entry = core.entry(offer.key)
        rows = regions(entry.draft.extents, ROWS_BYTES) if good else []
        assert core.promoted(offer.key, regions(entry.extents, offer.nbytes), rows) is good
    core.check()
    assert core.stats().free_bytes == PAGE_BYTES
    assert [core.entry(key).state for key in keys] == [State.BOTH, State.HOST]  # one file goes, and is written anew
    assert core.take_deletions() == [(keys[1], FILE_BYTES)]


def test_a_header_without_rows_is_read_as_before_and_one_that_makes_no_sense_is_not() -> None:
    plain = Header(root=b"r" * 16, kind="block", prefix_hash=b"h" * 16, parent=None, depth=0, regions=((9, 1),))
    assert decode_header(encode_header(plain)) == plain
    fields = msgspec.msgpack.decode(encode_header(plain)[FIXED.size :].rstrip(b"\0"))
    older = msgspec.msgpack.encode(fields[:-2])  # as it was written before there were drafters
    assert msgspec.msgpack.decode(older, type=Header) == plain
    rows = msgspec.structs.replace(plain, drafter="one", draft=((4_096, 2),))
    assert decode_header(encode_header(rows)) == rows and file_bytes(rows) == file_bytes(plain) + PAGE_BYTES
    for bad in ({"drafter": ""}, {"draft": ()}, {"draft": ((0, 2),)}, {"kind": "snapshot"}):
        with pytest.raises(RefusedFile):
            decode_header(encode_header(msgspec.structs.replace(rows, **bad)))


class DraftMachine(TierMachine):
    """The tiers' machine with rows that come, are replaced, and go bad in files."""

    drafts_landing: tuple[DraftOffer, ...] = ()

    @initialize(pages=st.integers(8, 24), files=st.integers(2, 12))
    def start(self, pages: int, files: int) -> None:
        super().start(pages, files)

    @rule(chain=st.integers(0, 2), count=st.integers(1, 3))
    def publish_and_land(self, chain: int, count: int) -> None:
        if not self.landing:
            self.publish(chain, 0, count, 1)
            if self.landing:
                self.land(True)

    @precondition(lambda self: not self.drafts_landing)
    @rule(
        data=st.data(),
        drafter=st.sampled_from(["a", "b"]),
        nbytes=st.sampled_from([700, 5_000]),
        at_once=st.booleans(),
    )
    def offer_rows(self, data, drafter: str, nbytes: int, at_once: bool) -> None:
        self.publish_and_land(0, 3)
        known = sorted((key for key in self.core.visible() if key.kind == BLOCK), key=repr)
        keys = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True)) if known else []
        offers = [rows_of(key, drafter, nbytes) for key in keys]
        admission = self.core.admit_drafts(offers)
        assert len(admission.new) + len(admission.already_there) + len(admission.refused) == len(offers)
        for key in admission.new:
            self.untouched(self.core.draft_extents(key))
        self.drafts_landing = tuple(offer for offer in offers if offer.key in admission.new)
        if at_once:
            self.rows_land("land")

    @precondition(lambda self: self.drafts_landing)
    @rule(how=st.sampled_from(["land", "land", "abort", "quarantine"]))
    def rows_land(self, how: str) -> None:
        offers, self.drafts_landing = self.drafts_landing, ()
        if how == "land":
            for offer in offers:
                self.core.commit_draft(offer.key, regions(self.core.draft_extents(offer.key), offer.nbytes))
        elif how == "abort":
            self.core.abort_drafts(offer.key for offer in offers)
        else:
            number = self.core.quarantine_drafts(offer.key for offer in offers)
            self.core.check()
            self.core.release_quarantine(number)

    @rule(data=st.data(), ttl_ms=st.integers(1, 3_000))
    def lease_rows(self, data, ttl_ms: int) -> None:
        """A lease of a chain's deepest block promises the rows of all of it."""
        with_rows = sorted((k for k in self.core.visible() if self.has_rows(k)), key=repr)
        if not with_rows:
            return
        deepest = data.draw(st.sampled_from(with_rows))
        if not isinstance(self.core.lease([deepest], ttl_ms, self.now_ms), Lease):
            return
        at: Key | None = deepest
        while at is not None and self.has_rows(at):
            promised = self.core.entry(at).draft.extents
            self.promised += [(self.now_ms + ttl_ms + GRACE_MS, extent) for extent in promised]
            at = self.core.entry(at).offer.parent

    def has_rows(self, key: Key) -> bool:
        entry = self.core.entry(key)
        return entry is not None and entry.draft is not None and bool(entry.draft.regions)

    def fresh(self, keys) -> None:
        for key in keys:
            self.untouched(self.core.entry(key).all_extents)

    def untouched(self, extents: tuple[Extent, ...]) -> None:
        for new in extents:
            for until_ms, old in self.promised:
                apart = new.offset + new.length <= old.offset or old.offset + old.length <= new.offset
                assert apart or until_ms <= self.now_ms, "a byte was reused under a lease"

    @precondition(lambda self: self.promoting)
    @rule(good=st.booleans(), rows_good=st.booleans())
    def promotion_ends(self, good: bool, rows_good: bool = True) -> None:
        for key in self.promoting:
            assert key in self.files, "a file went while it was read"
            entry = self.core.entry(key)
            if not good:
                self.core.refuse(key)
                continue
            had = entry.filed_draft
            rows = regions(entry.draft.extents, had.nbytes) if had is not None and rows_good else []
            complete = self.core.promoted(key, regions(entry.extents, entry.offer.nbytes), rows)
            assert complete is (had is None or rows_good)
        self.promoting = []


TestDraftMachine = DraftMachine.TestCase
TestDraftMachine.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
