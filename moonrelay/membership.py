"""Who is in the cluster: every process writes itself to Redis and watches the others.

Keys, all under the hash tag `{cluster}`:
    mr:{cluster}:epoch        the last epoch given; rises at every start of every process, also after a flush
    mr:{cluster}:members      sorted set: instance id by the server's time at which it expires
    mr:{cluster}:member:ID    hash: epoch, data (msgpack of `Member`); expires with its heartbeat
    mr:{cluster}:events       channel: an instance id whenever one joins, leaves or changes state
Only the server's clock counts. When Redis is away the last view is kept for a while and `stale_since` says so; when
it is back, every process writes itself again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from moonrelay.errors import InvariantError, Unavailable
from moonrelay.ids import Role
from moonrelay.prefix import Fingerprint
from moonrelay.valkey import FAILURES, raise_if_cancelled

logger = logging.getLogger(__name__)

TTL_MS = 2_000
HEARTBEAT_S = 0.5
REFRESH_S = 0.3
KEEP_VIEW_S = 10.0
CALL_TIMEOUT_S = 1.5

EPOCH = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local epoch = redis.call('INCR', KEYS[1])
if epoch < now then epoch = now; redis.call('SET', KEYS[1], string.format('%.0f', now)) end
return epoch
"""
# Returns -1 where a newer process has this id, 1 where it is new to the server, else 0.
BEAT = """
local held = redis.call('HGET', KEYS[2], 'epoch')
if held and tonumber(held) > tonumber(ARGV[2]) then return -1 end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'data', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
local new = held ~= ARGV[2]
if new or ARGV[6] == '1' then redis.call('PUBLISH', ARGV[5], ARGV[1]) end
return new and 1 or 0
"""
LEAVE = """
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""
VIEW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local data = redis.call('HGET', KEYS[2] .. id, 'data')
  if data then found[#found + 1] = data end
end
return found
"""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and what is free of it, as of the last heartbeat. Blocks and slots: workers; bytes: cache nodes."""

    free_blocks: int = 0
    num_blocks: int = 0
    free_slots: int = 0
    num_slots: int = 0
    waiting: int = 0
    running: int = 0
    free_bytes: int = 0
    capacity_bytes: int = 0


class Member(msgspec.Struct, frozen=True, kw_only=True, tag="member-1"):
    """One process as the others see it. `peer` is a serialised `Peer`; `started_at` is for people (Unix seconds)."""

    instance_id: str
    role: Role
    epoch: int
    grpc_address: str
    http_address: str = ""
    line_address: str = ""  # cache nodes: leases without gRPC's share (`cachestore/lines.py`)
    fingerprint: Fingerprint | None = None
    layout: dict[str, int] | None = None
    drafter: str = ""  # workers: whose rows their blocks hold beside the target's; empty: nobody's
    peer: bytes = b""
    model: str = ""
    max_context: int = 0
    tp_size: int = 1
    readable_by: tuple[str, ...] = ()  # transports by which others can read this process's memory
    reads_by: tuple[str, ...] = ()  # and by which it reads others'
    state: Literal["ready", "draining"] = "ready"
    load: Load = Load()
    started_at: float = msgspec.field(default_factory=time.time)


class Membership:
    """This process's place in the cluster and its view of the others. Loop thread only."""

    def __init__(self, redis: Redis, cluster: str, *, keep_view_s: float = KEEP_VIEW_S) -> None:
        self._redis = redis
        self._keep_view_s = keep_view_s
        prefix = f"mr:{{{cluster}}}:"
        self._epoch_key, self._members_key = prefix + "epoch", prefix + "members"
        self._member_prefix, self._channel = prefix + "member:", prefix + "events"
        self._scripts = {text: redis.register_script(text) for text in (EPOCH, BEAT, LEAVE, VIEW)}
        self._me: Member | None = None
        self._beating = asyncio.Lock()
        self._announce = False  # the next heartbeat tells the others at once
        self._beat_now, self._refresh_now = asyncio.Event(), asyncio.Event()
        self._refreshed = asyncio.Event()  # replaced at each refresh
        self._view: dict[str, Member] = {}
        self.stale_since: float | None = None

    async def next_epoch(self) -> int:
        """A number that no process of this cluster has had. Raises: Unavailable."""
        try:
            return int(await self._call(EPOCH, [self._epoch_key], []))
        except FAILURES as error:
            raise Unavailable(f"no epoch from Redis: {error}") from None

    async def join(self, member: Member) -> None:
        """Appear to the others, once; `run` keeps it so. Raises: Unavailable, also if a newer process has the id."""
        self._me, self._announce = member, True
        try:
            await self._beat()
            await self._refresh()
        except FAILURES as error:
            raise Unavailable(f"could not join the cluster: {error}") from None

    def update(self, **changes: Any) -> None:
        """Change fields of this process's entry (`load`, `state`); a change of state is told at once."""
        if self._me is None:
            raise InvariantError("update before join")
        changed = msgspec.structs.replace(self._me, **changes)
        if changed.state != self._me.state:
            self._announce = True
            self._beat_now.set()
        self._me = changed

    async def leave(self) -> None:
        """Disappear now. A lost Redis is no error here: the entry expires by itself."""
        async with self._beating:  # a heartbeat in flight must not come after
            me, self._me = self._me, None
        if me is None:
            return
        keys = [self._members_key, self._member_prefix + me.instance_id]
        try:
            await self._call(LEAVE, keys, [me.instance_id, me.epoch, self._channel])
        except FAILURES as error:
            logger.warning("left without telling Redis", extra={"reason": str(error)})

    async def run(self) -> None:
        """Heartbeats, view and subscription, until cancelled. Raises: Unavailable if a newer process takes the id."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beats())
            group.create_task(self._refreshes())
            group.create_task(self._listen())

    def members(self, role: Role) -> tuple[Member, ...]:
        """The live members of a role, by instance id; empty once the view is too old to be kept."""
        return tuple(m for _, m in sorted(self._view.items()) if m.role == role)

    def find(self, instance_id: str, epoch: int) -> Member | None:
        member = self._view.get(instance_id)
        return member if member is not None and member.epoch == epoch else None

    async def wait_for(self, predicate: Callable[[Membership], bool], deadline_s: float) -> bool:
        """Wait until the view satisfies `predicate`; False when `deadline_s` (monotonic) comes first."""
        while not predicate(self):
            left = deadline_s - time.monotonic()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(left):
                    await self._refreshed.wait()
            except TimeoutError:
                return predicate(self)
        return True

    async def _beats(self) -> None:
        while True:
            raise_if_cancelled()
            await _wait(self._beat_now, HEARTBEAT_S)
            try:
                await self._beat()
            except FAILURES as error:
                self._lost(error)

    async def _beat(self) -> None:
        async with self._beating:
            if self._me is not None:
                await self._write(self._me)

    async def _write(self, me: Member) -> None:
        announce, self._announce = self._announce, False
        keys = [self._members_key, self._member_prefix + me.instance_id]
        data = msgspec.msgpack.encode(me)
        args = [me.instance_id, me.epoch, TTL_MS, data, self._channel, int(announce)]
        try:
            answer = int(await self._call(BEAT, keys, args))
        except FAILURES:
            self._announce = announce
            raise
        if answer < 0:
            raise Unavailable(f"a newer process has taken the instance id {me.instance_id}")
        if answer == 1:
            logger.info("joined the cluster", extra={"instance_id": me.instance_id, "epoch": me.epoch})

    async def _refreshes(self) -> None:
        while True:
            raise_if_cancelled()
            await _wait(self._refresh_now, REFRESH_S)
            try:
                await self._refresh()
            except FAILURES as error:
                self._lost(error)

    async def _refresh(self) -> None:
        found = await self._call(VIEW, [self._members_key, self._member_prefix], [])
        members = [m for m in map(_decode, found) if m is not None]
        self._view = {m.instance_id: m for m in members}
        if self.stale_since is not None:
            logger.info("redis is back", extra={"members": len(members)})
            self.stale_since = None
            self._beat_now.set()
        self._notify()

    def _lost(self, error: Exception) -> None:
        now = time.monotonic()
        if self.stale_since is None:
            self.stale_since = now
            logger.warning("redis lost, keeping the view", extra={"reason": str(error), "keep_s": self._keep_view_s})
        elif self._view and now - self.stale_since > self._keep_view_s:
            self._view = {}
            logger.error("redis lost for too long, view dropped", extra={"reason": str(error)})
        self._notify()

    def _notify(self) -> None:
        refreshed, self._refreshed = self._refreshed, asyncio.Event()
        refreshed.set()

    async def _listen(self) -> None:
        """Joins and leaves refresh the view at once; without the subscription the period alone does."""
        while True:
            raise_if_cancelled()
            pubsub = self._redis.pubsub()
            try:
                await pubsub.subscribe(self._channel)
                self._refresh_now.set()
                while True:
                    raise_if_cancelled()
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5.0)
                    if message is not None:
                        self._refresh_now.set()
            except FAILURES as error:
                logger.info("subscription lost", extra={"reason": str(error)})
                await asyncio.sleep(REFRESH_S)
            finally:
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _call(self, text: str, keys: list[str], args: list[Any]) -> Any:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await self._scripts[text](keys=keys, args=args)


def _decode(data: bytes) -> Member | None:
    """None for what another version wrote and this one cannot read."""
    try:
        return msgspec.msgpack.decode(data, type=Member)
    except msgspec.DecodeError as error:
        logger.warning("unreadable member", extra={"reason": str(error)})
        return None


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        pass
    event.clear()
