"""The fleet from membership's live view, and the cache index in Redis, as the router asks for them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, cast

from redis.asyncio import Redis

from cachestore.index import CacheIndex, Tenant
from moonrelay.ids import InstanceId, PrefixHash
from moonrelay.membership import Member, Membership
from moonrelay.pairing import Misfit, describe, unfit
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2
from moonrelay.valkey import FAILURES, raise_if_cancelled
from router.core import Worker, WorkerKey, WorkerRole
from router.fleet import ROLES, Match, cold

log = logging.getLogger(__name__)
FLOAT_BYTES: Final = 4


class MemberFleet:
    """Workers of this cluster that speak the router's tokenizer, from membership's live view."""

    def __init__(self, membership: Membership, tokenizer_revision: str) -> None:
        self._membership = membership
        self._tokenizer_revision = tokenizer_revision
        self._known: dict[WorkerKey, Worker | None] = {}  # None: not ours to use
        self._pairs: dict[tuple[WorkerKey, WorkerKey], Misfit | None] = {}  # prefill and decode

    def workers(self) -> Sequence[Worker]:
        """Ready workers, with the load they last reported."""
        members = [m for role in ROLES for m in self._membership.members(role) if m.state == "ready"]
        found = [(self._worker(member), member.load.waiting + member.load.running) for member in members]
        return [replace(one, busy=busy, misfits=self._misfits(one)) for one, busy in found if one is not None]

    def _misfits(self, worker: Worker) -> frozenset[WorkerKey]:
        """The prefill workers with which this one can never work; each is said once."""
        reader = self._membership.find(worker.instance_id, worker.epoch)
        if worker.role != "decode" or reader is None:
            return frozenset()
        found = set()
        for owner in self._membership.members("prefill"):
            key = (InstanceId(owner.instance_id), owner.epoch)
            pair = (key, worker.key)
            if pair not in self._pairs:
                misfit = self._pairs[pair] = unfit(owner, reader)
                if misfit is not None:
                    names = {"prefill": owner.instance_id, "decode": reader.instance_id}
                    said = {"reason": misfit, "found": describe(owner, reader, misfit)}
                    log.error("workers cannot hand over to each other", extra=names | said)
            if self._pairs[pair] is not None:
                found.add(key)
        return frozenset(found)

    def present(self) -> Set[WorkerKey] | None:
        if self._membership.stale_since is not None:
            return None
        members = [m for role in ROLES for m in self._membership.members(role)]
        return {(InstanceId(member.instance_id), member.epoch) for member in members}

    async def changed(self, until_s: float) -> None:
        before = self._signature(self._membership)
        deadline_s = time.monotonic() + until_s - asyncio.get_running_loop().time()
        await self._membership.wait_for(lambda now: self._signature(now) != before, deadline_s)

    def _signature(self, membership: Membership) -> tuple[bool, list[tuple[str, int, str]]]:
        members: list[tuple[str, int, str]] = [
            (m.instance_id, m.epoch, m.state) for role in ROLES for m in membership.members(role)
        ]
        return membership.stale_since is None, members

    def _worker(self, member: Member) -> Worker | None:
        """The member's unchanging part; one that could not understand our tokens is passed over."""
        key = (InstanceId(member.instance_id), member.epoch)
        if key not in self._known:
            self._known[key] = worker_of(member, self._tokenizer_revision)
            if self._known[key] is None:
                log.error(
                    "worker passed over: it does not fit this router", extra={"instance_id": member.instance_id}
                )
        return self._known[key]


def worker_of(member: Member, tokenizer_revision: str) -> Worker | None:
    """None where the member's fingerprint is missing or its token ids mean something else than ours."""
    fingerprint = member.fingerprint
    if fingerprint is None or fingerprint.tokenizer_revision != tokenizer_revision:
        return None
    state_bytes, row_bytes = handoff_bytes(member.layout)
    return Worker(
        instance_id=InstanceId(member.instance_id),
        epoch=member.epoch,
        role=cast(WorkerRole, member.role),
        address=member.grpc_address,
        host_id=common_pb2.Peer.FromString(member.peer).host_id,
        fingerprint=fingerprint,
        context_len=member.max_context,
        state_bytes=state_bytes,
        row_bytes=row_bytes,
    )


def handoff_bytes(layout: Mapping[str, int] | None) -> tuple[int, int]:
    """What a handoff moves: the state whatever the length, and each token's rows, the drafter's included."""
    if layout is None:
        return 0, 0
    recurrent = layout["num_heads"] * layout["key_dim"] * layout["value_dim"]
    conv = layout["conv_history"] * layout["num_heads"] * (2 * layout["key_dim"] + layout["value_dim"])
    state = FLOAT_BYTES * layout["num_kda_layers"] * (recurrent + conv)
    rows = layout["num_mla_layers"] * layout["row_width"] + layout.get("draft_width", 0)
    return state, FLOAT_BYTES * rows


class ClusterIndex:
    """The cluster's cache index. What goes wrong with it costs a recompute and nothing else."""

    def __init__(self, redis: Redis, membership: Membership, timeout_s: float) -> None:
        self._redis = redis
        self._membership = membership
        self._timeout_s = timeout_s
        self._indexes: dict[int, CacheIndex] = {}
        self._random = random.Random()

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()

    async def match(
        self, root: bytes, hashes: Sequence[PrefixHash], fingerprint: Fingerprint, tenant: str, prompt_tokens: int
    ) -> Match:
        membership = self._membership
        if membership.stale_since is not None:
            return cold(prompt_tokens, "tier_error")  # known to be away: nobody waits to find out
        nodes = list(membership.members("cachestore"))
        self._random.shuffle(nodes)  # of replicas the first gives the hit
        workers = [m for role in ROLES for m in membership.members(role) if m.fingerprint == fingerprint]
        index = self._index(fingerprint.block_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await index.match(
                    root, hashes, prompt_tokens, nodes, workers=workers, tenant=Tenant.of(fingerprint, tenant)
                )
        except FAILURES as error:
            log.warning("cache index out of reach", extra={"reason": type(error).__name__})
            return cold(prompt_tokens, "tier_error")
        raise_if_cancelled()  # a lost cancellation here would be a lost deadline
        return Match(
            tokens=found.tokens,
            matchable_tokens=found.matchable_tokens,
            lost=tuple(found.lost),
            hit=found.hit(),
            seen_tokens=found.seen_tokens,
            disk_tokens=found.by_tier.get("disk", 0),
            kept={(InstanceId(one.instance_id), one.epoch): one.tokens for one in found.devices},
        )

    def _index(self, block_tokens: int) -> CacheIndex:
        if block_tokens not in self._indexes:
            self._indexes[block_tokens] = CacheIndex(self._redis, block_tokens)
        return self._indexes[block_tokens]
