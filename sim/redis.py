"""Redis as the others see it: membership with a TTL, the index, the router's id store. And members, which beat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moonrelay.errors import ServeError
from sim.adapters import IndexTwin
from sim.network import LinkLost
from sim.world import Process, Steps, World

BEAT_MS, TTL_MS, KEEP_VIEW_MS = 250, 1_000, 5_000
RPC_MS = 300


@dataclass(frozen=True, slots=True)
class Record:
    """One process as membership shows it. `instance_id` and `epoch` are what the index wants of a node."""

    instance_id: str
    epoch: int
    role: str
    busy: int = 0
    state: str = "ready"


class Redis(Process):
    role = "redis"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.members: dict[str, tuple[Record, float]] = {}
        self.index = IndexTwin()
        self.last_epoch = 0
        self.answers: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def next_epoch(self) -> int:
        """Rises over flushes and restarts too: the server's clock is a floor."""
        self.last_epoch = max(self.last_epoch + 1, int(self.world.now) + 1)
        return self.last_epoch

    def flush(self) -> None:
        self.members.clear()
        self.index = IndexTwin()
        self.answers.clear()

    def beat(self, record: Record) -> list[Record]:
        """Write the caller's record; everybody who is alive."""
        now = self.world.now
        self.members[record.instance_id] = (record, now + TTL_MS)
        return [found for found, until in self.members.values() if until > now]

    # One handler per index call: (method, arguments).

    def rpc_index(self, request: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Any:
        method, args, more = request
        return getattr(self.index, method)(*args, **more, now_ms=int(self.world.now))

    def rpc_remember(self, request: tuple[tuple[Any, ...], tuple[int, ...]]) -> None:
        self.answers[request[0]] = request[1]

    def rpc_recall(self, request: tuple[Any, ...]) -> tuple[int, ...] | None:
        return self.answers.get(request)


class Member(Process):
    """A process of the cluster: it beats, and has a view of the others that it keeps for a while without Redis."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.view: dict[str, Record] = {}
        self.viewed_at = world.now
        self.epoch = world.processes["redis"].next_epoch()  # type: ignore[attr-defined]

    def boot(self) -> None:
        self._beat()

    def busy(self) -> int:
        return 0

    def members(self, role: str) -> list[Record]:
        return [record for _, record in sorted(self.view.items()) if record.role == role]

    def find(self, name: str, epoch: int) -> Record | None:
        record = self.view.get(name)
        return record if record is not None and record.epoch == epoch else None

    def index(self, method: str, *args: Any, **more: Any) -> Steps:
        """Raises: LinkLost, DeadlineExceeded."""
        return (yield from self.world.network.call(self, "redis", "index", (method, args, more), RPC_MS))

    def call(self, target: str, method: str, request: Any, timeout_ms: float = RPC_MS) -> Steps:
        if target not in self.world.processes:
            raise LinkLost(f"{target} is unknown", unreachable=True)
        return (yield from self.world.network.call(self, target, method, request, timeout_ms))

    def tell(self, target: str, method: str, request: Any) -> None:
        """A message that may be lost: what it would end, time ends too."""
        self.world.acks.append((target, method, request))
        self.spawn(self._tell(target, method, request), method)

    def _tell(self, target: str, method: str, request: Any) -> Steps:
        with suppress(ServeError):
            yield from self.call(target, method, request)

    def _beat(self) -> None:
        redis: Any = self.world.processes["redis"]
        now = self.world.now
        if redis.alive and not redis.stopped and self.world.network.reachable(self, redis):
            found: Sequence[Record] = redis.beat(Record(self.name, self.epoch, self.role, self.busy()))
            self.view = {record.instance_id: record for record in found}
            self.viewed_at = now
            self.redis_back()
        elif now - self.viewed_at > KEEP_VIEW_MS:
            self.view = {}
        self.after(BEAT_MS, self._beat)

    def redis_back(self) -> None:
        """The view is fresh."""
