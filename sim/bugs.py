"""Bugs planted into the real cores, one or more for each invariant: proof that the checkers can see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from decode import core as decode_core
from decode.bandwidth import Bandwidth
from decode.parts import Regions, Wanted
from engine import settle
from engine.core import Scheduler
from engine.ledger import Ledger
from engine.sequence import LiveSequence
from engine.settle import Copies
from engine.step import Step, Verification
from engine.worker.bundles import Bundles
from prefill.core import Event, HandoffTable, Phase
from sim import bugs_store
from sim.faults import Fault
from sim.planting import BUGS, patched, planted
from sim.router import Router

__all__ = ["BUGS", "bugs_store"]

# Handoff.


@planted("reuse_under_reader")
@contextmanager
def handoff_freed_at_lease_end() -> Iterator[None]:
    """The owner reuses a handoff's memory when its lease ends, while a read that began under it may run."""

    def expire(self: HandoffTable, now_ms: int) -> list[str]:
        late = [i for i, h in self._handoffs.items() if h.deadline_ms is not None and h.deadline_ms <= now_ms]
        for handoff_id in late:
            if self._handoffs[handoff_id].phase is Phase.PUBLISHED:
                self._end(handoff_id, Event.LEASE_END)
            self._end(handoff_id, Event.TRANSFER_END)
        return late

    with patched(HandoffTable, "expire", expire):
        yield


@planted("stale_fence", fault=Fault(kind="replayed_acks", phase="handed_off", lasts_ms=8))
@contextmanager
def handoff_fence_ignored() -> Iterator[None]:
    """An acknowledgement with any fence frees a handoff."""
    real = HandoffTable.release

    def release(self: HandoffTable, handoff_id: str, *, fence: int) -> Any:
        handoff = self._handoffs.get(handoff_id)
        return real(self, handoff_id, fence=handoff.fence if handoff is not None else fence)

    with patched(HandoffTable, "release", release):
        yield


@planted("reuse_under_reader", fault=Fault(kind="stuck_reads", phase="pulling", lasts_ms=1_500))
@contextmanager
def landing_not_quarantined() -> Iterator[None]:
    """A reader past its deadline gives its landing memory away at once."""
    table = dict(decode_core.NEXT)
    for event in decode_core.GIVEN_UP:
        table[decode_core.Phase.PULLING, event] = decode_core.Phase.RELEASED
    table[decode_core.Phase.RELEASED, decode_core.Event.READ_ENDED] = decode_core.Phase.RELEASED
    with patched(decode_core, "NEXT", table):
        yield


@planted("verified", "depth", "tokens")
@contextmanager
def last_block_not_read() -> Iterator[None]:
    """Decode adopts a handoff whose last row region it never read."""
    real = Regions.take

    def take(self: Regions) -> Wanted:
        wanted = real(self)
        return replace(wanted, rows=wanted.rows[:-1]) if self.closed and wanted.rows else wanted

    with patched(Regions, "take", take):
        yield


@planted("deadline")
@contextmanager
def reads_without_deadline() -> Iterator[None]:
    """A read may take as long as it likes."""
    with patched(Bandwidth, "read_ms", lambda self, peer, nbytes: 1 << 40):
        yield


@planted("completion")
@contextmanager
def followers_refused() -> Iterator[None]:
    """A prefill worker lets nobody follow its handoffs after the first."""
    real = HandoffTable.follow

    def follow(self: HandoffTable, handoff_id: str, *, fence: int) -> Any:
        return real(self, handoff_id, fence=fence) if fence == 1 else "taken"

    with patched(HandoffTable, "follow", follow):
        yield


@planted("delta")
@contextmanager
def held_by_depth_alone() -> Iterator[None]:
    """A worker takes blocks that it keeps for a prompt's own because they lie at the same depth."""
    real = Bundles._path

    def path(self: Bundles, hashes: Sequence[bytes]) -> Any:
        found = real(self, hashes)
        while found and len(found) < len(hashes):
            below = [kept for kept in self._kept.values() if kept.parent is found[-1]]
            if not below:
                break
            found.append(below[0])
        return found

    def find(self: Bundles, hashes: Sequence[bytes], *, state: bool) -> Any:
        with nullcontext() if state else patched(Bundles, "_path", path):
            return really(self, hashes, state=state)

    really = Bundles.find
    with patched(Bundles, "find", find):
        yield


# Engine.


@planted("immutable", "core")
@contextmanager
def snapshot_slot_given_twice() -> Iterator[None]:
    """A slot that holds a snapshot stays on the free list."""
    real = Ledger.take_snapshot

    def take_snapshot(self: Ledger) -> int | None:
        slot = real(self)
        if slot is not None:
            self._free_slots.append(slot)
        return slot

    with patched(Ledger, "take_snapshot", take_snapshot):
        yield


@planted("books", "core", "completion")
@contextmanager
def slot_leaked() -> Iterator[None]:
    """A snapshot's slot does not come back."""

    def release_snapshot(self: Ledger, slot: int) -> None:
        self._snapshots.discard(slot)
        self._freed = True

    with patched(Ledger, "release_snapshot", release_snapshot):
        yield


@planted("depth", "verified", "tokens")
@contextmanager
def snapshot_not_copied() -> Iterator[None]:
    """A snapshot's slot keeps what was in it before: the hit restores another request's state."""
    real = Scheduler.plan

    def plan(self: Scheduler) -> Any:
        step = real(self)
        if step is not None:
            step.copies.clear()
        return step

    with patched(Scheduler, "plan", plan):
        yield


@planted("depth", "tokens", "core")
@contextmanager
def handed_over_token_twice() -> Iterator[None]:
    """A sequence consumes its first drawn token a second time."""
    real = LiveSequence.ids

    def ids(self: LiveSequence, count: int) -> Sequence[int]:
        found = real(self, count)
        if self.last_id is not None and self.draws_left == self.draws - 2:
            return (self.spec.ids[-1],)
        return found

    with patched(LiveSequence, "ids", ids):
        yield


@planted("depth", "verified", "tokens")
@contextmanager
def boundary_missed() -> Iterator[None]:
    """A state is copied after all that a verified draft keeps, not at the block boundary inside it."""
    real = Copies.cut

    def cut(self: Copies, step: Step, verification: Verification, index: int, end: int) -> int:
        real(self, step, verification, index, end)
        return end - step.segments[index].start

    with patched(Copies, "cut", cut):
        yield


@planted("tokens", "core", "depth", "books")
@contextmanager
def kept_past_the_stop() -> Iterator[None]:
    """A verified draft is kept whole where a stop token is in it."""
    with patched(settle, "taken", lambda _, run: len(run)):
        yield


@planted("one_reply")
@contextmanager
def answered_twice() -> Iterator[None]:
    """A router that lost a worker ends the request's stream twice."""
    real = Router.rpc_serve

    def serve(self: Router, ask: Any, emit: Any) -> Any:
        results: list[Any] = []

        def heard(event: Any) -> None:
            results.append(event)
            emit(event)

        yield from real(self, ask, heard)
        emit(results[-1])

    with patched(Router, "rpc_serve", serve):
        yield
