"""The index in Redis: which node holds which block and snapshot, and the one script that finds a prompt's hit.

Keys, all of a root under the hash tag `{root}` (hex), so that one script touches one slot and tenants spread:
    mr:{root}:block:NODE:EPOCH     hash: prefix hash -> msgpack of `Entry`
    mr:{root}:snap:NODE:EPOCH      hash: the same for snapshots, under the hash of the prefix they follow
    mr:{root}:nodes                set: NODE:EPOCH of every node that ever wrote here
A hash belongs to one life of one node: entries of a dead epoch are not looked at, because their keys are not asked
for, and expire by themselves. An entry is written after its bytes were verified and removed before they are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from redis.asyncio import Redis

from moonrelay.stubs.v1.worker_pb2 import CacheHit, CacheRun

Kind = Literal["block", "snapshot"]
MissReason = Literal["cold", "no_snapshot", "stale_index", "remainder"]
_FAMILY: dict[Kind, str] = {"block": "block", "snapshot": "snap"}

KEY_TTL_S = 3_600  # renewed by every write and by live nodes; for so long a dead node's losses have a name

# KEYS: nodes set, then per live node its block and its snapshot hash.
# ARGV: block key prefix, all prefix hashes joined (as one word: two thousand cost the client milliseconds to send),
# then the live NODE:EPOCHs.
# Returns {depth, dead, snapshot depth, snapshot's node, first, end, node, first, end, node, ...}: nodes count from 1.
# At each place the node whose chain goes on the longest is taken, which gives the fewest runs; each node is asked
# only from the place reached, in chunks, so the cost is the depth and not nodes times prompt.
MATCH = """
local prefix, joined, num_nodes = ARGV[1], ARGV[2], #ARGV - 2
local total = #joined / 16
local CHUNK = 256

local hashes = {}
for i = 1, total do hashes[i] = string.sub(joined, 16 * i - 15, 16 * i) end

local function chain(key, first)
  local at = first
  while at < total do
    local last = math.min(total, at + CHUNK)
    local got = redis.call('HMGET', key, unpack(hashes, at + 1, last))
    for i = 1, last - at do
      if not got[i] then return at + i - 1 end
    end
    at = last
  end
  return at
end

local runs, depth = {}, 0
while depth < total do
  local best, owner = depth, 0
  for n = 1, num_nodes do
    if redis.call('HEXISTS', KEYS[2 * n], hashes[depth + 1]) == 1 then
      local reach = chain(KEYS[2 * n], depth)
      if reach > best then best, owner = reach, n end
    end
  end
  if owner == 0 then break end
  runs[#runs + 1] = depth
  runs[#runs + 1] = best
  runs[#runs + 1] = owner
  depth = best
end

local found, holder = 0, 0
local at = depth
local holders = {}
for n = 1, num_nodes do
  if redis.call('EXISTS', KEYS[2 * n + 1]) == 1 then holders[#holders + 1] = n end
end
while #holders > 0 and at > 0 and found == 0 do
  local low = math.max(0, at - CHUNK)
  for _, n in ipairs(holders) do
    local got = redis.call('HMGET', KEYS[2 * n + 1], unpack(hashes, low + 1, at))
    for i = at - low, 1, -1 do
      if got[i] and low + i > found then found, holder = low + i, n end
    end
  end
  at = low
end

local dead = 0
if depth < total then
  local live = {}
  for n = 1, num_nodes do live[ARGV[2 + n]] = true end
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    if not live[name] and redis.call('HEXISTS', prefix .. name, hashes[depth + 1]) == 1 then dead = 1 end
  end
end
return {depth, dead, found, holder, unpack(runs)}
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="e1"):
    """What the index keeps of a block or snapshot beside its node: tier, size, and each region's xxh3."""

    tier: Literal["host"] = "host"
    bytes: int
    checksums: tuple[int, ...]


class Node(Protocol):
    """A live cache node, as membership shows it."""

    @property
    def instance_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks [first, end) on one life of one node."""

    node_id: str
    epoch: int
    first: int
    end: int

    def proto(self) -> CacheRun:
        return CacheRun(node_id=self.node_id, node_epoch=self.epoch, first_block=self.first, end_block=self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A lookup's answer. tokens + the tokens in `lost` = the prompt's tokens; `lost` is in order of position."""

    tokens: int
    matchable_tokens: int
    runs: tuple[Run, ...]
    snapshot: Run | None
    lost: tuple[tuple[MissReason, int], ...]

    @property
    def miss_reason(self) -> MissReason:
        """Of the shallowest lost token; one is always lost, since the last one must be computed."""
        return self.lost[0][0]

    @property
    def branch_tokens(self) -> int:
        """How deep blocks go where that is deeper than the usable snapshot: a place worth a snapshot. Else 0."""
        return self.matchable_tokens if self.matchable_tokens > self.tokens else 0

    def hit(self) -> CacheHit | None:
        if self.snapshot is None:
            return None
        return CacheHit(
            tokens=self.tokens,
            runs=[run.proto() for run in self.runs],
            snapshot=self.snapshot.proto(),
            matchable_tokens=self.matchable_tokens,
        )


class CacheIndex:
    """Lookups for routers, writes for nodes. Redis's errors pass through: `moonrelay.valkey.FAILURES`."""

    def __init__(self, redis: Redis, block_tokens: int = 1) -> None:
        self._redis = redis
        self._block_tokens = block_tokens
        self._match = redis.register_script(MATCH)

    async def match(self, root: bytes, hashes: Sequence[bytes], prompt_tokens: int, nodes: Sequence[Node]) -> Match:
        """The deepest N with blocks [0, N) and a snapshot at N on live nodes, N <= prompt_tokens - 1. One round trip.

        `hashes`: the prompt's full blocks, in order. A prompt has at least one token.
        """
        limit = (prompt_tokens - 1) // self._block_tokens
        usable = list(hashes[:limit])
        if not usable or not nodes:
            return self.explain(prompt_tokens, [0, 0, 0, 0], nodes)
        prefix = f"mr:{{{root.hex()}}}:"
        names = [_name(n.instance_id, n.epoch) for n in nodes]
        keys = [prefix + "nodes"]
        for name in names:
            keys += [f"{prefix}block:{name}", f"{prefix}snap:{name}"]
        args: list[Any] = [prefix + "block:", b"".join(usable), *names]
        return self.explain(prompt_tokens, await self._match(keys=keys, args=args), nodes)

    def explain(self, prompt_tokens: int, found: Sequence[int], nodes: Sequence[Node]) -> Match:
        """The script's answer as a `Match`, with a reason for every token it does not give."""
        depth, dead, cut, holder = found[:4]
        size, limit = self._block_tokens, (prompt_tokens - 1) // self._block_tokens
        runs = []
        for first, end, owner in zip(found[4::3], found[5::3], found[6::3], strict=True):
            if first < cut:
                node = nodes[owner - 1]
                runs.append(Run(node_id=node.instance_id, epoch=node.epoch, first=first, end=min(end, cut)))
        snapshot = None
        if cut:
            node = nodes[holder - 1]
            snapshot = Run(node_id=node.instance_id, epoch=node.epoch, first=cut, end=cut)
        lost: list[tuple[MissReason, int]] = [
            ("no_snapshot", (depth - cut) * size),
            ("stale_index" if dead else "cold", (limit - depth) * size),
            ("remainder", prompt_tokens - limit * size),
        ]
        return Match(
            tokens=cut * size,
            matchable_tokens=depth * size,
            runs=tuple(runs),
            snapshot=snapshot,
            lost=tuple((reason, tokens) for reason, tokens in lost if tokens),
        )

    async def write(
        self, root: bytes, node: Node, entries: Mapping[tuple[Kind, bytes], Entry], *, ttl_s: int = KEY_TTL_S
    ) -> None:
        """Make entries visible; their bytes are verified. All or, if the connection breaks, perhaps some."""
        prefix, name = f"mr:{{{root.hex()}}}:", _name(node.instance_id, node.epoch)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(prefix + "nodes", name)
            pipe.expire(prefix + "nodes", ttl_s)
            for kind in _FAMILY:
                fields = {h: msgspec.msgpack.encode(e) for (k, h), e in entries.items() if k == kind}
                key = f"{prefix}{_FAMILY[kind]}:{name}"
                if fields:
                    pipe.hset(key, mapping=fields)  # type: ignore[arg-type]
                pipe.expire(key, ttl_s)
            await pipe.execute()

    async def renew(self, root: bytes, node: Node, *, ttl_s: int = KEY_TTL_S) -> frozenset[Kind]:
        """Keep this node's keys alive; the kinds it has entries of here. One that is missing was flushed."""
        prefix, name = f"mr:{{{root.hex()}}}:", _name(node.instance_id, node.epoch)
        async with self._redis.pipeline(transaction=True) as pipe:
            for family in _FAMILY.values():
                pipe.expire(f"{prefix}{family}:{name}", ttl_s)
            pipe.expire(prefix + "nodes", ttl_s)
            answers = await pipe.execute()
        return frozenset(kind for kind, there in zip(_FAMILY, answers, strict=False) if there)

    async def remove(self, root: bytes, node: Node, entries: Iterable[tuple[Kind, bytes]]) -> None:
        """Withdraw entries; returns when no lookup can find them any more."""
        prefix, name = f"mr:{{{root.hex()}}}:", _name(node.instance_id, node.epoch)
        fields: dict[Kind, list[bytes]] = {kind: [] for kind in _FAMILY}
        for kind, prefix_hash in entries:
            fields[kind].append(prefix_hash)
        async with self._redis.pipeline(transaction=True) as pipe:
            for kind, hashes in fields.items():
                if hashes:
                    pipe.hdel(f"{prefix}{_FAMILY[kind]}:{name}", *hashes)
            await pipe.execute()

    async def forget(self, root: bytes, node: Node) -> None:
        """Withdraw everything that this life of the node wrote under a root."""
        prefix, name = f"mr:{{{root.hex()}}}:", _name(node.instance_id, node.epoch)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.unlink(*(f"{prefix}{family}:{name}" for family in _FAMILY.values()))
            pipe.srem(prefix + "nodes", name)
            await pipe.execute()


def _name(node_id: str, epoch: int) -> str:
    return f"{node_id}:{epoch}"
