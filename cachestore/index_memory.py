"""The index without a Redis: the same answers as the scripts in `index_scripts.py`, for the simulator and `replay`.

Not thread-safe, no I/O; time is the caller's `now_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachestore.lookup import (
    ALTERNATIVES_BLOCKS,
    ALTERNATIVES_MAX,
    NOTHING,
    PIECES_MAX,
    RUNS_MAX,
    UNSALTED,
    Entry,
    EntryName,
    Found,
    Kind,
    Life,
    Match,
    MissReason,
    Tenant,
    Tier,
    explain,
    inner_hashes,
    life_name,
)

KEY_TTL_S = 3_600  # renewed by every write and by live owners; for so long a dead owner's losses have a name
TRACE_TTL_S = 7_200  # a trace lives at least half of this
TRACE_MAX = 32_768  # of a root's younger traces, and of its older ones; about 60 bytes each in Redis


@dataclass(slots=True)
class _Block:
    entry: Entry
    inner: bool  # it had a child when it was written


@dataclass(slots=True)
class _Held:
    """What one life holds."""

    blocks: dict[bytes, _Block] = field(default_factory=dict)
    snapshots: dict[bytes, Entry] = field(default_factory=dict)
    expires_ms: int = 0


@dataclass(slots=True)
class _Traces:
    letters: dict[bytes, str] = field(default_factory=dict)
    expires_ms: int = 0


@dataclass(slots=True)
class _Root:
    lives: dict[str, _Held] = field(default_factory=dict)
    cuts: dict[bytes, dict[str, Tier]] = field(default_factory=dict)
    young: _Traces = field(default_factory=_Traces)
    old: _Traces = field(default_factory=_Traces)
    expires_ms: int = 0

    def expire(self, now_ms: int) -> None:
        for traces in (self.young, self.old):
            if traces.expires_ms <= now_ms:
                traces.letters = {}
        if self.expires_ms <= now_ms:
            self.lives, self.cuts = {}, {}
        for held in self.lives.values():
            if held.expires_ms <= now_ms:
                held.blocks, held.snapshots = {}, {}

    def trace(self, prefix_hash: bytes, letters: str, now_ms: int, ttl_ms: int, most: int) -> None:
        left = self.young.expires_ms - now_ms
        if self.young.letters and (2 * left < ttl_ms or len(self.young.letters) >= most):
            self.old, self.young = self.young, _Traces()
        if not self.young.letters:
            self.young.expires_ms = now_ms + ttl_ms
        held = self.young.letters.get(prefix_hash, "")
        self.young.letters[prefix_hash] = held + "".join(c for c in letters if c not in held)

    def traced(self, prefix_hash: bytes, letter: str) -> bool:
        return any(letter in t.letters.get(prefix_hash, "") for t in (self.young, self.old))


class MemoryIndex:
    """`CacheIndex` as plain calls. Every call takes the time in `now_ms`, from one clock."""

    def __init__(
        self, block_tokens: int = 1, *, ttl_s: int = KEY_TTL_S, trace_ttl_s: int = TRACE_TTL_S,
        trace_max: int = TRACE_MAX,
    ) -> None:  # fmt: skip
        self._block_tokens = block_tokens
        self._ttl_ms, self._trace_ttl_ms, self._trace_max = 1000 * ttl_s, 1000 * trace_ttl_s, trace_max
        self._roots: dict[bytes, _Root] = {}
        self._tenants: dict[bytes, bytes] = {}  # tenant key to the last root under which it had entries

    def match(
        self, root: bytes, hashes: Sequence[bytes], prompt_tokens: int, nodes: Sequence[Life], *,
        workers: Sequence[Life] = (), tenant: Tenant | None = None, now_ms: int = 0,
    ) -> Match:  # fmt: skip
        """See `CacheIndex.match`."""
        limit = (prompt_tokens - 1) // self._block_tokens
        usable, lives = hashes[:limit], [*nodes, *workers]
        if not usable:
            return explain(NOTHING, prompt_tokens, self._block_tokens, lives)
        found = _Lookup(self._at(root, now_ms), usable, nodes, workers).find()
        empty: MissReason = "cold"
        if tenant is not None and found.empty:
            empty = self._why_empty(root, tenant)
        elif tenant is not None:
            self._tenants[tenant.key] = root
        return explain(found, prompt_tokens, self._block_tokens, lives, empty)

    def write(self, root: bytes, life: Life, entries: Mapping[EntryName, Entry], *, now_ms: int = 0) -> None:
        """Make entries visible; their bytes are verified."""
        at, name = self._at(root, now_ms), life_name(life)
        held = at.lives.setdefault(name, _Held())
        inner, elsewhere = inner_hashes(entries)
        for (kind, prefix_hash), entry in entries.items():
            if kind == "block":
                before = held.blocks.get(prefix_hash)
                has_child = prefix_hash in inner or (before is not None and before.inner)
                held.blocks[prefix_hash] = _Block(entry, has_child)
            else:
                held.snapshots[prefix_hash] = entry
                at.cuts.setdefault(prefix_hash, {})[name] = entry.tier
        for prefix_hash in elsewhere:
            at.trace(prefix_hash, "p", now_ms, self._trace_ttl_ms, self._trace_max)
        held.expires_ms = at.expires_ms = now_ms + self._ttl_ms

    def remove(self, root: bytes, life: Life, entries: Iterable[EntryName], *, now_ms: int = 0) -> None:
        """Withdraw entries, leaving traces."""
        at, name, names = self._at(root, now_ms), life_name(life), list(entries)
        for prefix_hash in (h for kind, h in names if kind == "snapshot"):
            self._drop_snapshot(at, name, prefix_hash, now_ms)
        for prefix_hash in (h for kind, h in names if kind == "block"):
            block = at.lives[name].blocks.pop(prefix_hash, None) if name in at.lives else None
            if block is not None:
                at.trace(prefix_hash, "bp" if block.inner else "b", now_ms, self._trace_ttl_ms, self._trace_max)

    def renew(self, root: bytes, life: Life, *, now_ms: int = 0) -> frozenset[Kind]:
        """Keep this life's entries alive; the kinds it has entries of here. One that is missing was flushed."""
        at, name = self._at(root, now_ms), life_name(life)
        held = at.lives.get(name, _Held())
        there: set[Kind] = set()
        if held.blocks:
            there.add("block")
        if held.snapshots and at.cuts:
            there.add("snapshot")
        held.expires_ms = at.expires_ms = now_ms + self._ttl_ms
        for other in sorted(at.lives):
            left = at.lives[other]
            gone = not (left.blocks or left.snapshots) or 2 * (left.expires_ms - now_ms) < self._ttl_ms
            if other != name and gone:
                self._drop_life(at, other, now_ms)
                break
        return frozenset(there)

    def forget(self, root: bytes, life: Life, *, now_ms: int = 0) -> None:
        """Withdraw everything that this life wrote under a root."""
        self._drop_life(self._at(root, now_ms), life_name(life), now_ms)

    def flush(self) -> None:
        """What FLUSHALL does."""
        self._roots, self._tenants = {}, {}

    def _at(self, root: bytes, now_ms: int) -> _Root:
        at = self._roots.setdefault(root, _Root())
        at.expire(now_ms)
        return at

    def _drop_snapshot(self, at: _Root, name: str, prefix_hash: bytes, now_ms: int) -> None:
        held, holders = at.lives.get(name, _Held()), at.cuts.get(prefix_hash, {})
        had = (held.snapshots.pop(prefix_hash, None), holders.pop(name, None))
        if had == (None, None):
            return
        at.trace(prefix_hash, "s", now_ms, self._trace_ttl_ms, self._trace_max)
        if not holders:
            at.cuts.pop(prefix_hash, None)

    def _drop_life(self, at: _Root, name: str, now_ms: int) -> None:
        for prefix_hash in list(at.lives[name].snapshots) if name in at.lives else []:
            self._drop_snapshot(at, name, prefix_hash, now_ms)
        at.lives.pop(name, None)

    def _why_empty(self, root: bytes, tenant: Tenant) -> MissReason:
        had = self._tenants.get(tenant.key)
        if had is not None and had != root:
            return "fingerprint"
        if tenant.unsalted_root != root and self._tenants.get(UNSALTED) == tenant.unsalted_root:
            return "salt"
        return "cold"


class _Lookup:
    """One run of the MATCH script, step by step. Lives count from 0: nodes, then workers."""

    def __init__(self, at: _Root, hashes: Sequence[bytes], nodes: Sequence[Life], workers: Sequence[Life]) -> None:
        self._at, self._hashes, self._total = at, hashes, len(hashes)
        self._num_nodes = len(nodes)
        self._names = [life_name(life) for life in (*nodes, *workers)]
        self._dead = [name for name in at.lives if name not in set(self._names)]
        self._hits: list[tuple[int, int, int]] = []
        self._devices: dict[int, int] = {}
        self._dead_cut = 0

    def find(self) -> Found:
        runs, depth = self._cover(None)
        skip = runs[0][0] if runs else None
        spare, spare_depth = self._cover(skip) if skip is not None and self._num_nodes > 1 else ([], 0)
        seen = depth
        if depth < self._total and self._known(depth):
            seen = _last(depth, self._total, self._known) + 1
        stale = max([depth, *(self._reach(name, depth, seen) for name in self._dead)])
        covered = (runs, depth, skip, spare_depth)
        kept = max([stale, *(self._reach(name, depth, seen) for name in self._names[self._num_nodes :])])
        for cut in range(seen, 0, -1):
            self._consider(cut, *covered)
            if self._hits:
                break
        best = self._hits[0][0] if self._hits else 0
        for cut in range(best - 1, max(0, best - ALTERNATIVES_BLOCKS), -1):
            if len(self._hits) > ALTERNATIVES_MAX:
                break
            self._consider(cut, *covered)
        gone = (c for c in range(depth, best, -1) if self._at.traced(self._hashes[c - 1], "s"))
        diverged = 0 < seen < self._total and self._inner(self._hashes[seen - 1])
        nothing = not (self._at.lives or self._at.young.letters or self._at.old.letters)
        return Found(
            depth=depth, seen=seen, stale=stale, kept=kept, dead_cut=self._dead_cut, gone_cut=next(gone, 0),
            diverged=diverged, empty=seen == 0 and nothing, hits=self._hits, devices=tuple(self._devices.items()),
            covers=(runs, spare), tiers=self._tiers(runs, best),
        )  # fmt: skip

    def _block(self, name: str, i: int) -> _Block | None:
        held = self._at.lives.get(name)
        return held.blocks.get(self._hashes[i]) if held is not None else None

    def _reach(self, name: str, at: int, top: int) -> int:
        def holds(i: int) -> bool:
            block = self._block(name, i)
            return block is not None and block.entry.first is not None and block.entry.first <= at

        return _last(at, top, holds) + 1 if at < top and holds(at) else at

    def _cover(self, skip: int | None) -> tuple[list[tuple[int, int, int]], int]:
        runs: list[tuple[int, int, int]] = []
        at = 0
        while at < self._total and len(runs) < RUNS_MAX:
            ends = [(self._reach(self._names[n], at, self._total), n) for n in range(self._num_nodes) if n != skip]
            best, _, owner = max(
                ((end, self._warm(n, end - 1), -n) for end, n in ends if end > at), default=(at, 0, 0)
            )
            if best == at:
                break
            runs.append((-owner, at, best))
            at = best
        return runs, at

    def _warm(self, n: int, i: int) -> bool:
        block = self._block(self._names[n], i)
        return block is not None and block.entry.tier == "host"

    def _known(self, i: int) -> bool:
        here = any(self._block(name, i) is not None for name in (*self._names, *self._dead))
        return here or self._at.traced(self._hashes[i], "b")

    def _consider(
        self, cut: int, runs: Sequence[tuple[int, int, int]], depth: int, skip: int | None, spare_depth: int
    ) -> None:
        """Take a boundary into account, if somebody has a snapshot there."""
        holders = self._at.cuts.get(self._hashes[cut - 1])
        if not holders:
            return
        nodes = [n for n in range(self._num_nodes) if self._names[n] in holders]
        if nodes and cut <= depth:
            owner = next(n for n, _, end in runs if cut - 1 < end)
            self._hits.append((cut, owner if owner in nodes else nodes[0], 0))
        others = [n for n in nodes if n != skip]
        if others and cut <= spare_depth and len(self._hits) <= ALTERNATIVES_MAX:
            self._hits.append((cut, others[0], 1))
        for w in range(self._num_nodes, len(self._names)):
            if self._names[w] in holders and w not in self._devices:
                block = self._block(self._names[w], cut - 1)
                if block is not None and block.entry.first == 0:
                    self._devices[w] = cut
        if not self._hits and self._dead_cut < cut <= depth and any(name not in self._names for name in holders):
            self._dead_cut = cut

    def _inner(self, prefix_hash: bytes) -> bool:
        if self._at.traced(prefix_hash, "p"):
            return True
        blocks = (held.blocks.get(prefix_hash) for held in self._at.lives.values())
        return any(block is not None and block.inner for block in blocks)

    def _tiers(self, runs: Sequence[tuple[int, int, int]], best: int) -> list[tuple[Tier, int]]:
        tiers: list[tuple[Tier, int]] = []
        for owner, at, end in runs:
            tiers += _pieces(self._names[owner], at, min(end, best), self._block)
        return tiers


def _pieces(name: str, at: int, stop: int, block_at: Callable[[str, int], Any]) -> list[tuple[Tier, int]]:
    def tier(i: int) -> Tier:
        block = block_at(name, i)
        return block.entry.tier if block is not None else "host"

    found: list[tuple[Tier, int]] = []
    while at < stop:
        here = tier(at)
        last_piece = len(found) == PIECES_MAX - 1
        upto = stop if last_piece else _last(at, stop, lambda i, here=here: tier(i) == here) + 1  # type: ignore[misc]
        found.append((here, upto - at))
        at = upto
    return found


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The deepest i in [low, high) for which it holds, if it holds up to a depth; it does at `low`."""
    high -= 1
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
