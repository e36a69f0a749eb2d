"""The index in Redis: which node holds which block and snapshot, and the one script that finds a prompt's hit.

Keys, all of a root under the hash tag `{root}` (hex), so that one script touches one slot and tenants spread:
    mr:{root}:block:NAME     hash: prefix hash -> msgpack of `StoredEntry`; NAME is INSTANCE:EPOCH of its owner
    mr:{root}:snap:NAME      hash: the same for snapshots, under the hash of the prefix they follow
    mr:{root}:cuts           hash: prefix hash -> msgpack map of every owner of that snapshot to its tier
    mr:{root}:nodes          set: NAME of every life that ever wrote here
    mr:{root}:was:0, :1      hash: prefix hash -> letters, the traces of what was evicted; two generations
and, apart from all roots, mr:{TENANT}:root: the last root under which a tenant (digest of its salt) had entries.
A hash belongs to one life of one owner: entries of a dead epoch are not looked at, because their keys are not asked
for, and expire by themselves. An entry is written after its bytes were verified and removed before they are reused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from cachestore.index_line import ScriptLine
from cachestore.index_memory import KEY_TTL_S, TRACE_MAX, TRACE_TTL_S
from cachestore.index_scripts import FORGET, MATCH, REMOVE, RENEW, WRITE
from cachestore.lookup import (
    ALTERNATIVES_BLOCKS,
    ALTERNATIVES_MAX,
    NOTHING,
    PIECES_MAX,
    RUNS_MAX,
    UNSALTED,
    Cover,
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

TENANT_TTL_S = 86_400
TENANT_AGAIN_S = 3_600.0  # how often a tenant's root is written while it stays the same
TENANTS_MAX = 10_000  # remembered by one process


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="e2"):
    """An entry at rest. `first`: see `Entry`; `inner`: 1 where the block had a child when it was written."""

    tier: Tier
    first: int
    bytes: int
    inner: int = 0


class CacheIndex:
    """Lookups for routers, writes for owners. Redis's errors pass through: `moonrelay.valkey.FAILURES`.

    Lookups have a connection of their own: `close` it before the loop ends.
    """

    def __init__(
        self, redis: Redis, block_tokens: int = 1, *, trace_ttl_s: int = TRACE_TTL_S, trace_max: int = TRACE_MAX
    ) -> None:
        self._redis = redis
        self._block_tokens = block_tokens
        self._trace_ttl_ms, self._trace_max = 1000 * trace_ttl_s, trace_max
        self._match = ScriptLine(redis, MATCH)
        self._write, self._remove, self._renew, self._forget = (
            redis.register_script(text) for text in (WRITE, REMOVE, RENEW, FORGET)
        )
        self._tenants: dict[bytes, tuple[bytes, float]] = {}

    def close(self) -> None:
        self._match.close()

    async def match(
        self, root: bytes, hashes: Sequence[bytes], prompt_tokens: int, nodes: Sequence[Life], *,
        workers: Sequence[Life] = (), tenant: Tenant | None = None,
    ) -> Match:  # fmt: skip
        """The deepest N with blocks [0, N) and a snapshot at N on live nodes, N <= prompt_tokens - 1. One round trip,
        a second where nothing was ever known under this root.

        `hashes`: the prompt's full blocks, in order; a prompt has at least one token. `nodes` and `workers`: all that
        are alive; other owners count as dead. Where two nodes have the same run, the first in order that has it in
        memory gives it, so a caller that shuffles them spreads the reads over replicas. `workers` are never part of a
        hit.
        """
        limit = (prompt_tokens - 1) // self._block_tokens
        usable, lives = hashes[:limit], [*nodes, *workers]
        if not usable:
            return explain(NOTHING, prompt_tokens, self._block_tokens, lives)
        prefix = _prefix(root)
        found = _found(
            await self._match.call(
                prefix + "nodes", prefix, b"".join(usable), len(nodes), ALTERNATIVES_MAX + 1, ALTERNATIVES_BLOCKS,
                RUNS_MAX, PIECES_MAX, *[life_name(life) for life in lives],
            )
        )  # fmt: skip
        empty: MissReason = "cold"
        if tenant is not None and found.empty:
            empty = await self._why_empty(root, tenant)
        elif tenant is not None:
            await self._remember(root, tenant)
        return explain(found, prompt_tokens, self._block_tokens, lives, empty)

    async def write(
        self, root: bytes, life: Life, entries: Mapping[EntryName, Entry], *, ttl_s: int = KEY_TTL_S
    ) -> None:
        """Make entries visible; their bytes are verified. All or none."""
        inner, elsewhere = inner_hashes(entries)
        args: list[Any] = []
        for kind in ("block", "snapshot"):
            of_kind = {h: e for (k, h), e in entries.items() if k == kind}
            stored = [
                StoredEntry(
                    tier=e.tier, first=e.first or 0, bytes=e.nbytes, inner=int(kind == "block" and h in inner)
                )
                for h, e in of_kind.items()
            ]
            args += [b"".join(of_kind), msgspec.msgpack.encode(stored)]
        await self._call(self._write, root, life, ttl_s, *args, b"".join(elsewhere))

    async def renew(self, root: bytes, life: Life, *, ttl_s: int = KEY_TTL_S) -> frozenset[Kind]:
        """Keep this life's keys alive; the kinds it has entries of here. One that is missing was flushed.

        Takes out a life that nobody has renewed for half of `ttl_s`: give one `ttl_s` for all.
        """
        blocks, snapshots = await self._call(self._renew, root, life, ttl_s)
        there: list[tuple[Kind, int]] = [("block", blocks), ("snapshot", snapshots)]
        return frozenset(kind for kind, has in there if has)

    async def remove(self, root: bytes, life: Life, entries: Iterable[EntryName]) -> None:
        """Withdraw entries, leaving traces; returns when no lookup can find them any more."""
        names: dict[Kind, list[bytes]] = {"block": [], "snapshot": []}
        for kind, prefix_hash in entries:
            names[kind].append(prefix_hash)
        args = (b"".join(names["block"]), b"".join(names["snapshot"]))
        await self._call(self._remove, root, life, KEY_TTL_S, *args)

    async def forget(self, root: bytes, life: Life) -> None:
        """Withdraw everything that this life wrote under a root."""
        await self._call(self._forget, root, life, KEY_TTL_S)

    async def _call(self, script: Any, root: bytes, life: Life, ttl_s: int, *args: Any) -> Any:
        prefix = _prefix(root)
        given = [prefix, life_name(life), 1000 * ttl_s, self._trace_ttl_ms, self._trace_max, *args]
        return await script(keys=[prefix + "nodes"], args=given)

    async def _why_empty(self, root: bytes, tenant: Tenant) -> MissReason:
        """Why nothing was ever known under this root: looks at this tenant's key and the unsalted one alone."""
        had = await self._redis.get(_tenant_key(tenant.key))
        if had is not None and had != root:
            return "fingerprint"
        if tenant.unsalted_root != root and await self._redis.get(_tenant_key(UNSALTED)) == tenant.unsalted_root:
            return "salt"
        return "cold"

    async def _remember(self, root: bytes, tenant: Tenant) -> None:
        """This tenant has entries under this root."""
        known, again_s = self._tenants.get(tenant.key, (b"", 0.0))
        if known == root and time.monotonic() < again_s:
            return
        await self._redis.set(_tenant_key(tenant.key), root, ex=TENANT_TTL_S)
        if len(self._tenants) >= TENANTS_MAX:
            self._tenants.clear()
        self._tenants[tenant.key] = (root, time.monotonic() + TENANT_AGAIN_S)


def _found(answer: Sequence[Any]) -> Found:
    """The script's answer; Lua counts lives from 1."""
    depth, seen, stale, kept, dead_cut, gone_cut, diverged, empty, hits, devices, runs, spare, tiers = answer
    return Found(
        depth, seen, stale, kept, dead_cut, gone_cut, bool(diverged), bool(empty),
        [(cut, holder - 1, cover) for cut, holder, cover in hits],
        [(worker - 1, cut) for worker, cut in devices] if devices else (),
        (_cover(runs), _cover(spare) if spare else ()),
        [(tier.decode(), blocks) for tier, blocks in tiers],
    )  # fmt: skip


def _cover(runs: Sequence[tuple[int, int, int]]) -> Cover:
    return [(owner - 1, first, end) for owner, first, end in runs]


def _prefix(root: bytes) -> str:
    return f"mr:{{{root.hex()}}}:"


def _tenant_key(key: bytes) -> str:
    return f"mr:{{{key.hex()}}}:root"


__all__ = ["CacheIndex", "Entry", "Kind", "Match", "MissReason", "StoredEntry", "Tenant"]
