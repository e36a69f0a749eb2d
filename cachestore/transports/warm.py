"""Connections made before they are needed: a first read from a peer costs up to some hundred milliseconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cachestore.transports.select import TransportSet
from moonrelay.errors import ServeError
from moonrelay.ids import Role
from moonrelay.membership import Member, Membership
from moonrelay.stubs.v1.common_pb2 import Peer
from moonrelay.valkey import raise_if_cancelled

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
LOOK_AGAIN_S = 60.0


async def keep_warm(transports: TransportSet, membership: Membership, roles: Sequence[Role]) -> None:
    """Connect to every member of `roles` as it appears, one at a time; until cancelled. Failures are only logged:
    the first real read tries again."""
    known: set[tuple[str, int]] = set()

    def new(now: Membership) -> list[Member]:
        found = [m for role in roles for m in now.members(role) if m.peer]
        return [m for m in found if (m.instance_id, m.epoch) not in known and m.instance_id != transports.instance_id]

    while True:
        raise_if_cancelled()
        for member in new(membership):
            known.add((member.instance_id, member.epoch))
            try:
                report = await transports.connect(Peer.FromString(member.peer), time.monotonic() + CONNECT_S)
            except ServeError as error:
                logger.info("peer not connected", extra={"peer": member.instance_id, "reason": str(error)})
            else:
                extra = {"peer": member.instance_id, "transport": report.transport, "note": report.note}
                logger.info("peer connected", extra=extra)
        await membership.wait_for(lambda now: bool(new(now)), time.monotonic() + LOOK_AGAIN_S)
