"""The fleet from membership's live view, and the cache index in Redis, as the router asks for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from redis.asyncio import Redis

from cachestore.index import CacheIndex
from moonrelay.ids import InstanceId, PrefixHash
from moonrelay.membership import Member, Membership
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

    def workers(self) -> Sequence[Worker]:
        """Ready workers, with the load they last reported."""
        members = [m for role in ROLES for m in self._membership.members(role) if m.state == "ready"]
        found = [(self._worker(member), member.load.waiting + member.load.running) for member in members]
        return [replace(worker, busy=busy) for worker, busy in found if worker is not None]

    async def changed(self, until_s: float) -> None:
        before = self._signature(self._membership)
        deadline_s = time.monotonic() + until_s - asyncio.get_running_loop().time()
        await self._membership.wait_for(lambda now: self._signature(now) != before, deadline_s)

    def _signature(self, membership: Membership) -> list[tuple[str, int, str]]:
        return [(m.instance_id, m.epoch, m.state) for role in ROLES for m in membership.members(role)]

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
    return Worker(
        instance_id=InstanceId(member.instance_id),
        epoch=member.epoch,
        role=cast(WorkerRole, member.role),
        address=member.grpc_address,
        host_id=common_pb2.Peer.FromString(member.peer).host_id,
        fingerprint=fingerprint,
        context_len=member.max_context,
        **handoff_bytes(member.layout),
    )


def handoff_bytes(layout: Mapping[str, int] | None) -> dict[str, int]:
    """What a handoff moves: the state whatever the length, and each token's rows."""
    if layout is None:
        return {}
    recurrent = layout["num_heads"] * layout["key_dim"] * layout["value_dim"]
    conv = layout["conv_history"] * layout["num_heads"] * (2 * layout["key_dim"] + layout["value_dim"])
    return {
        "state_bytes": FLOAT_BYTES * layout["num_kda_layers"] * (recurrent + conv),
        "row_bytes": FLOAT_BYTES * layout["num_mla_layers"] * layout["row_width"],
    }


class ClusterIndex:
    """The cluster's cache index. What goes wrong with it costs a recompute and nothing else."""

    def __init__(self, redis: Redis, membership: Membership, timeout_s: float) -> None:
        self._redis = redis
        self._membership = membership
        self._timeout_s = timeout_s
        self._indexes: dict[int, CacheIndex] = {}

    async def match(self, root: bytes, hashes: Sequence[PrefixHash], block_tokens: int, prompt_tokens: int) -> Match:
        nodes = self._membership.members("cachestore")
        index = self._indexes.setdefault(block_tokens, CacheIndex(self._redis, block_tokens))
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await index.match(root, hashes, prompt_tokens, nodes)
        except FAILURES as error:
            log.warning("cache index out of reach", extra={"reason": type(error).__name__})
            return cold(prompt_tokens, "tier_error")
        raise_if_cancelled()  # a lost cancellation here would be a lost deadline
        return Match(
            tokens=found.tokens,
            matchable_tokens=found.matchable_tokens,
            lost=tuple(found.lost),
            hit=found.hit(),
        )
