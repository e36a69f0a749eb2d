"""Says which workers of the other role this one can never share a handoff with, and when that is all of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final, Literal

from prometheus_client import Gauge

from engine.worker.metrics import WorkerMetrics
from moonrelay.membership import Member, Membership
from moonrelay.pairing import MISFITS, Misfit, describe, unfit
from moonrelay.valkey import raise_if_cancelled

log = logging.getLogger(__name__)
LOOK_AGAIN_S: Final = 60.0


class Pairs:
    """One worker's view of its counterparts. Loop thread only."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        membership: Membership,
        instance_id: str,
        epoch: int,
        role: Literal["owner", "reader"],
    ) -> None:
        self._membership, self._me, self._role = membership, (instance_id, epoch), role
        self._unfit = Gauge(
            f"moonrelay_{metrics.source}_pairs_unfit",
            "Workers of the other role that this one can never share a handoff with, by why",
            ("reason",),
            registry=metrics.registry,
        )
        for reason in MISFITS:
            self._unfit.labels(reason)
        self._judged: dict[tuple[str, int], Misfit | None] = {}

    async def run(self) -> None:
        """Judge every counterpart once; until cancelled."""
        while True:
            raise_if_cancelled()
            self.look()
            await self._membership.wait_for(lambda now: bool(self._new()), time.monotonic() + LOOK_AGAIN_S)

    def look(self) -> None:
        """Judge who is new, forget who is gone, say what is worth saying."""
        me, members = self._membership.find(*self._me), self._counterparts()
        new = [] if me is None else self._new()
        live = {(m.instance_id, m.epoch) for m in members}
        self._judged = {key: reason for key, reason in self._judged.items() if key in live}
        for member in new:
            assert me is not None
            owner, reader = (member, me) if self._role == "reader" else (me, member)
            reason = self._judged[member.instance_id, member.epoch] = unfit(owner, reader)
            if reason is not None:
                found = {"peer": member.instance_id, "reason": reason, "found": describe(owner, reader, reason)}
                log.error("worker does not fit", extra=found)
        if new and all(reason is not None for reason in self._judged.values()):
            log.error("no worker fits this one", extra={"instance_id": self._me[0], "peers": len(self._judged)})
        counts = Counter(self._judged.values())
        for reason in MISFITS:
            self._unfit.labels(reason).set(counts[reason])

    def _counterparts(self) -> tuple[Member, ...]:
        return self._membership.members("prefill" if self._role == "reader" else "decode")

    def _new(self) -> list[Member]:
        return [m for m in self._counterparts() if (m.instance_id, m.epoch) not in self._judged]
