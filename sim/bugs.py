"""Bugs planted into the real cores, one or more for each invariant: proof that the checkers can see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from heapq import heappush
from typing import Any, Final

from cachestore import index_memory, planner, retention
from cachestore.node.allocator import Extent, PageAllocator
from cachestore.node.core import NodeCore
from cachestore.node.leases import Leases
from cachestore.retention import Retention
from decode import core as decode_core
from decode.bandwidth import Bandwidth
from decode.parts import Regions, Wanted
from engine.core import Scheduler
from engine.ledger import Ledger
from engine.sequence import LiveSequence
from engine.worker.bundles import Bundles
from prefill.core import Event, HandoffTable, Phase
from router import core as router_core
from sim import adapters
from sim.faults import Fault
from sim.router import Router
from sim.scenario import Scenario, scenario, struck_by

Patch = Callable[[], Any]  # a context manager


@dataclass(frozen=True, slots=True)
class Bug:
    """`invariants`: what may find it, by name; `seeds`: within how many runs it must be found.

    `fault`: without it the bug shows too rarely to wait for; runs with the bug have just this one.
    """

    about: str
    invariants: frozenset[str]
    patch: Patch
    seeds: int
    fault: Fault | None

    def scenario(self, seed: int) -> Scenario:
        return scenario(seed) if self.fault is None else struck_by(seed, self.fault)


BUGS: Final[dict[str, Bug]] = {}


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` in the body."""
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def planted(*invariants: str, seeds: int = 150, fault: Fault | None = None) -> Callable[[Patch], Patch]:
    """Registers a context manager under its own name; its docstring says what the bug is."""

    def register(patch: Patch) -> Patch:
        about = (patch.__doc__ or "").strip()
        BUGS[patch.__name__] = Bug(about, frozenset(invariants), patch, seeds, fault)
        return patch

    return register


# The node.


@planted("reuse_under_reader", "core")
@contextmanager
def pins_ignored() -> Iterator[None]:
    """Eviction takes entries that a lease covers."""

    def may_go(self: Retention, kept: Any) -> bool:
        return kept.shown and kept.offer.key not in self._children

    with patched(Retention, "_may_go", may_go):
        yield


@planted("reuse_under_reader", "core", fault=Fault(kind="stuck_reads", phase="leased", lasts_ms=1_500))
@contextmanager
def no_quiet_time() -> Iterator[None]:
    """An expired lease's memory is reused at once, while its last read may run."""

    def expire(self: Leases, now_ms: int) -> int:
        over = [lease for lease in self._leases.values() if lease.expires_ms <= now_ms]
        for lease in over:
            del self._leases[lease.id]
            heappush(self._quiet, (0, lease.fence, lease.keys))
        return len(over)

    with patched(Leases, "expire", expire):
        yield


@planted("reuse_under_reader", fault=Fault(kind="stuck_reads", phase="publish_pulling", lasts_ms=1_500))
@contextmanager
def quarantine_forgotten() -> Iterator[None]:
    """A node frees landing memory while its own late read may still write there."""
    real, release = NodeCore.quarantine, NodeCore.release_quarantine

    def quarantine(self: NodeCore, keys: Any) -> int:
        number = real(self, keys)
        release(self, number)
        return number

    with patched(NodeCore, "quarantine", quarantine), patched(NodeCore, "release_quarantine", lambda *_: None):
        yield


@planted("reuse_under_reader", "immutable", "core")
@contextmanager
def file_memory_not_held() -> Iterator[None]:
    """Memory is given away while a file is being written from it."""
    with patched(NodeCore, "hold", lambda *_: []), patched(NodeCore, "let_go", lambda *_: None):
        yield


@planted("stale_fence", fault=Fault(kind="replayed_acks", phase="leased", lasts_ms=8))
@contextmanager
def lease_fence_ignored() -> Iterator[None]:
    """Whoever knows a lease's id ends it, whatever fence he names."""

    def release(self: Leases, lease_id: str, fence: int) -> Any:
        return self._leases.pop(lease_id, None)

    with patched(Leases, "release", release):
        yield


@planted("orphans", "reuse_under_reader", "core")
@contextmanager
def parents_go_first() -> Iterator[None]:
    """Eviction takes a block that others rest on."""

    def may_go(self: Retention, kept: Any) -> bool:
        return kept.shown and not kept.pins

    with patched(Retention, "_may_go", may_go):
        yield


@planted("orphans")
@contextmanager
def orphans_kept() -> Iterator[None]:
    """Blocks that no snapshot stands on go last."""
    real = Retention._rank

    def rank(self: Retention, kept: Any) -> Any:
        found = real(self, kept)
        return (retention.WORTH + 1, found[1]) if found[0] == retention.ORPHAN else found

    with patched(Retention, "_rank", rank):
        yield


@planted("immutable", "reuse_under_reader")
@contextmanager
def pages_given_twice() -> Iterator[None]:
    """The allocator now and then hands out pages that somebody has."""
    real = PageAllocator.allocate
    last: list[tuple[Extent, ...]] = []

    def allocate(self: PageAllocator, nbytes: int) -> tuple[Extent, ...] | None:
        found = real(self, nbytes)
        if not found:
            return found
        last.append(found)
        same = [one for one in last[:-1] if sum(e.length for e in one) == sum(e.length for e in found)]
        return same[0] if len(last) % 7 == 0 and same else found

    with patched(PageAllocator, "allocate", allocate):
        yield


# Lookup and plan.


@planted("tenants")
@contextmanager
def salt_ignored() -> Iterator[None]:
    """The tenant's salt does not reach the prefix hash."""
    real = adapters.prefix_root
    with patched(adapters, "prefix_root", lambda fingerprint, salt: real(fingerprint, "")):
        yield


@planted("verified", "depth", "core")
@contextmanager
def state_ahead_of_blocks() -> Iterator[None]:
    """A lookup answers with a snapshot that lies deeper than the blocks go."""
    real = index_memory.MemoryIndex.match

    def match(self: Any, *rest: Any, **more: Any) -> Any:
        found = real(self, *rest, **more)
        return replace(found, runs=found.runs[:-1])

    with patched(index_memory.MemoryIndex, "match", match):
        yield


@planted("depth", "core")
@contextmanager
def whole_prompt_hits() -> Iterator[None]:
    """A hit may cover the prompt's last token, which has to be computed."""
    real = index_memory.MemoryIndex.match

    def match(self: Any, root: bytes, hashes: Any, prompt_tokens: int, nodes: Any, **more: Any) -> Any:
        found = real(self, root, hashes, prompt_tokens + 1, nodes, **more)
        return replace(found, lost=((found.lost[0][0], prompt_tokens - found.tokens),))

    with patched(index_memory.MemoryIndex, "match", match):
        yield


@planted("account", "core")
@contextmanager
def remainder_not_counted() -> Iterator[None]:
    """Tokens past the last block boundary have no reason."""
    real = router_core.account

    def account(**given: Any) -> Any:
        found = real(**given)
        return replace(found, lost=tuple(part for part in found.lost if part[0] != "remainder"))

    with patched(router_core, "account", account):
        yield


@planted("sightings")
@contextmanager
def hints_forgotten() -> Iterator[None]:
    """The planner keeps no state at the end of the system and tool declarations."""
    real = planner.plan

    def plan(hints: Any, *rest: Any) -> Any:
        return real([hint for hint in hints if hint[1] != planner.HEAD], *rest)

    with patched(planner, "plan", plan):
        yield


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
