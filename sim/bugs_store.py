"""Bugs planted into the store: the node's core, lookup, plan and account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappush
from typing import Any

from cachestore import index_memory, planner, retention
from cachestore.node.allocator import Extent, PageAllocator
from cachestore.node.core import NodeCore
from cachestore.node.leases import Leases
from cachestore.node.states import State
from cachestore.retention import Retention
from router import core as router_core
from sim import adapters
from sim.faults import Fault
from sim.planting import patched, planted

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


@planted("orphans", seeds=300, fault=Fault(kind="stop", role="cachestore", phase="publishing", nth=3, lasts_ms=300))
@contextmanager
def the_leaving_joined() -> Iterator[None]:
    """What is on its way out counts as on its way in: a publish has others come to rest on it."""
    real = NodeCore.admit

    def admit(self: NodeCore, offers: Any) -> Any:
        going = [entry for entry in self._entries.values() if entry.state is State.LEAVING]
        for entry in going:
            entry.state = State.LANDING
        found = real(self, offers)
        for entry in going:
            entry.state = State.LEAVING
        return found

    with patched(NodeCore, "admit", admit):
        yield


@planted("orphans", seeds=300, fault=Fault(kind="stop", role="redis", phase="evicting", lasts_ms=800))
@contextmanager
def the_leaving_forgotten() -> Iterator[None]:
    """A block leaves before what rested on it has left, which then comes back: the index could not be told."""
    real = NodeCore.victims

    def victims(self: NodeCore, *args: Any) -> Any:
        before, self._leaving = self._leaving, Counter()
        found = real(self, *args)
        self._leaving += before
        return found

    with patched(NodeCore, "victims", victims):
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
        return found._replace(runs=found.runs[:-1])

    with patched(index_memory.MemoryIndex, "match", match):
        yield


@planted("depth", "core")
@contextmanager
def whole_prompt_hits() -> Iterator[None]:
    """A hit may cover the prompt's last token, which has to be computed."""
    real = index_memory.MemoryIndex.match

    def match(self: Any, root: bytes, hashes: Any, prompt_tokens: int, nodes: Any, **more: Any) -> Any:
        found = real(self, root, hashes, prompt_tokens + 1, nodes, **more)
        return found._replace(lost=((found.lost[0][0], prompt_tokens - found.tokens),))

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


@planted("sightings", calm=True)
@contextmanager
def hints_forgotten() -> Iterator[None]:
    """The planner keeps no state at the end of the system and tool declarations."""
    real = planner.plan

    def plan(hints: Any, *rest: Any) -> Any:
        return real([hint for hint in hints if hint[1] != planner.HEAD], *rest)

    with patched(planner, "plan", plan):
        yield
