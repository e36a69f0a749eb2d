"""What the router decides: which workers serve, and what a prompt lost. No I/O, clock or chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from moonrelay.ids import InstanceId
from moonrelay.prefix import Fingerprint

WorkerRole = Literal["prefill", "decode", "aggregated"]
WorkerKey = tuple[InstanceId, int]  # instance and epoch: a restarted worker is another one

LOST_REASONS: Final = (
    "cold",
    "no_snapshot",
    "snapshot_evicted",
    "block_evicted",
    "diverged",
    "salt",
    "fingerprint",
    "retokenised",
    "stale_index",
    "tier_error",
    "remainder",
)
UNKNOWN: Final = ("cold", "diverged")  # blocks that the index has never seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A routable instance as membership shows it.

    `state_bytes` and `row_bytes` (per token) price a handoff; `busy` counts sequences of all routers, as the worker
    last reported them; `misfits`: prefill workers whose handoffs this decode worker can never adopt.
    """

    instance_id: InstanceId
    epoch: int
    role: WorkerRole
    address: str
    host_id: str
    fingerprint: Fingerprint
    context_len: int
    state_bytes: int = 0
    row_bytes: int = 0
    busy: int = 0
    misfits: frozenset[WorkerKey] = frozenset()

    @property
    def key(self) -> WorkerKey:
        return (self.instance_id, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What this router has given a worker and not got back. `chosen_at` orders workers by their last choice."""

    sequences: int = 0
    prompt_tokens: int = 0
    chosen_at: int = 0


NO_LOAD: Final = Load()
# Differences below this part of the price are not worth a herd: otherwise whoever holds the system prompt that all
# share would get every request of a quiet hour.
TIE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds, roughly: only differences between workers matter, so orders of magnitude are enough.

    Source: k3-nano on one core of a small server: about 2k prompt tokens/s, 8 streams at about 25 steps/s; reading
    another process's memory at 5 GB/s, a 10 Gbit/s link at 1 GB/s.
    """

    prompt_token_s: float = 1 / 2_000
    sequence_s: float = 0.04
    same_host_bytes_per_s: float = 5e9
    other_host_bytes_per_s: float = 1e9
    restore_s: float = 2e-3  # a lease and a read, however small
    store_bytes_per_s: float = 5e9
    disk_bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A request as placement sees it.

    `hit_tokens`: what the cache nodes have of the prompt, `disk_tokens` of it on disk; `kept`: how deep the bundles
    of this prompt go that workers have themselves.
    """

    prompt_tokens: int
    hit_tokens: int = 0
    disk_tokens: int = 0
    kept: Mapping[WorkerKey, int] = field(default_factory=dict)

    def restores(self, worker: Worker) -> bool:
        """Whether it must fetch: its own bundle is used where that is as deep, and needs no transfer."""
        return self.hit_tokens > self.kept.get(worker.key, 0)

    def computed_tokens(self, worker: Worker) -> int:
        """Prompt tokens that no cache saves it."""
        return max(1, self.prompt_tokens - max(self.hit_tokens, self.kept.get(worker.key, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who serves. `prefill` is None where `decode` does both."""

    prefill: Worker | None
    decode: Worker

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def serving(workers: Iterable[Worker]) -> list[Fingerprint]:
    """The fingerprints for which a whole path exists: an aggregated worker, or a prefill and a decode that fit."""
    able = list(workers)
    alone = [w.fingerprint for w in able if w.role == "aggregated"]
    return list(dict.fromkeys((*alone, *(decode.fingerprint for _, decode in _pairs(able)))))


def _pairs(workers: Sequence[Worker]) -> list[tuple[Worker, Worker]]:
    """The prefill and decode workers that can hand over to each other."""
    decodes = [w for w in workers if w.role == "decode"]
    return [
        (prefill, decode)
        for prefill in workers
        if prefill.role == "prefill"
        for decode in decodes
        if decode.fingerprint == prefill.fingerprint and prefill.key not in decode.misfits
    ]


def choose(
    workers: Sequence[Worker],
    loads: Mapping[WorkerKey, Load],
    need: Need,
    *,
    fingerprint: Fingerprint | None = None,
    avoid: Set[WorkerKey] = frozenset(),
    costs: CostModel = CostModel(),
) -> Plan | None:
    """The cheapest way to serve `need` outside `avoid`; aggregated workers go first. None: there is no way.

    Prices that hardly differ go to whoever was chosen longest ago, so that requests coming one at a time spread.
    """
    able = [w for w in workers if w.key not in avoid and (fingerprint is None or w.fingerprint == fingerprint)]
    alone = [Plan(prefill=None, decode=w) for w in able if w.role == "aggregated"]
    pairs = [Plan(prefill=prefill, decode=decode) for prefill, decode in _pairs(able)]
    prices = [(price_s(plan, loads, need, costs), plan) for plan in alone or pairs]
    if not prices:
        return None
    limit = min(price for price, _ in prices) * (1 + TIE)

    def rank(priced: tuple[float, Plan]) -> tuple[int, float, tuple[WorkerKey, ...]]:
        price, plan = priced
        last = sum(loads.get(w.key, NO_LOAD).chosen_at for w in plan.workers)
        return (last, price, tuple(w.key for w in plan.workers))

    return min((priced for priced in prices if priced[0] <= limit), key=rank)[1]


def price_s(plan: Plan, loads: Mapping[WorkerKey, Load], need: Need, costs: CostModel) -> float:
    """Seconds to the first token and into decode: both queues, what must be fetched and computed, and the handoff."""
    first = plan.decode if plan.prefill is None else plan.prefill
    waiting = sum(_waiting_s(w, loads.get(w.key, NO_LOAD), need, costs) for w in plan.workers)
    handoff = 0.0 if plan.prefill is None else handoff_s(plan.prefill, plan.decode, need, costs)
    return waiting + restore_s(first, need, costs) + need.computed_tokens(first) * costs.prompt_token_s + handoff


def restore_s(worker: Worker, need: Need, costs: CostModel) -> float:
    """What fetching the hit costs this worker: the fixed state and the rows, by the tier they are in."""
    if not need.restores(worker):
        return 0.0
    near = worker.state_bytes + (need.hit_tokens - need.disk_tokens) * worker.row_bytes
    disk = need.disk_tokens * worker.row_bytes
    return costs.restore_s + near / costs.store_bytes_per_s + disk / costs.disk_bytes_per_s


def handoff_s(prefill: Worker, decode: Worker, need: Need, costs: CostModel) -> float:
    """Price of a handoff: the fixed state, and the rows that decode does not hold, over the link between hosts."""
    near = prefill.host_id == decode.host_id and prefill.host_id != ""
    per_s = costs.same_host_bytes_per_s if near else costs.other_host_bytes_per_s
    moved = need.prompt_tokens - min(need.prompt_tokens, need.kept.get(decode.key, 0))
    return (prefill.state_bytes + moved * prefill.row_bytes) / per_s


def _waiting_s(worker: Worker, load: Load, need: Need, costs: CostModel) -> float:
    """How long work would wait for this worker. What other routers gave it is known only as a count."""
    others = max(0, worker.busy - load.sequences)
    prompts = (load.prompt_tokens + others * (need.prompt_tokens - need.hit_tokens)) * costs.prompt_token_s
    sequences = (load.sequences + others) * costs.sequence_s
    if worker.role == "prefill":
        return prompts
    return sequences if worker.role == "decode" else prompts + sequences


def name_retokenised(
    lost: Iterable[tuple[str, int]], hit_tokens: int, spans: Iterable[tuple[int, int]], block_tokens: int
) -> tuple[tuple[str, int], ...]:
    """The index's losses, with the reason `retokenised` for what earlier turns generated in other ids.

    `lost` runs from the hit upwards; `spans`: [start, end) in tokens, ascending. The index can only call such blocks
    unknown; the first of them begins before the span.
    """
    named: list[tuple[str, int]] = []
    at = hit_tokens
    ranges = [(start // block_tokens * block_tokens, end) for start, end in spans]
    for reason, tokens in lost:
        end = at + tokens
        cuts = {at, end}
        if reason in UNKNOWN:
            cuts |= {min(max(edge, at), end) for one in ranges for edge in one}
        for low, high in pairwise(sorted(cuts)):
            inside = reason in UNKNOWN and any(start <= low < stop for start, stop in ranges)
            word = "retokenised" if inside else reason
            if named and named[-1][0] == word:
                named[-1] = (word, named[-1][1] + high - low)
            else:
                named.append((word, high - low))
        at = end
    return tuple(named)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAccount:
    """What the cache gave a prompt and where the rest went. cached + lost = prompt tokens.

    `matchable_tokens`: how deep blocks are, snapshot or not; `possible_tokens`: how deep they are or were known, as
    an unlimited cache on the same grid would still have them. cached <= matchable <= possible. `drafter_cold`: of the
    cached ones, those before which the drafter sees nothing.
    """

    prompt_tokens: int
    cached_tokens: int
    matchable_tokens: int
    possible_tokens: int
    by_tier: tuple[tuple[str, int], ...]
    lost: tuple[tuple[str, int], ...]
    drafter_cold: int = 0

    @property
    def miss_reason(self) -> str | None:
        """Of the shallowest lost token."""
        return self.lost[0][0] if self.lost else None


def account(
    *,
    prompt_tokens: int,
    hit_tokens: int,
    matchable_tokens: int,
    seen_tokens: int,
    index_lost: Sequence[tuple[str, int]],
    restored: Mapping[str, int],
    worker_reason: str | None,
    drafter_cold: int = 0,
) -> CacheAccount:
    """Join the index's answer with what the worker really restored (tier to tokens).

    `index_lost` runs from the hit upwards. A worker that restored less than the hit lost the difference for its own
    reason; more (another source than the index) shortens the index's losses from below.
    """
    cached = sum(restored.values())
    lost: list[tuple[str, int]] = []
    if cached < hit_tokens:
        known = worker_reason if worker_reason in ("stale_index", "tier_error") else "tier_error"
        lost.append((known, hit_tokens - cached))
    spare = max(0, cached - hit_tokens)
    for reason, tokens in index_lost:
        used = min(spare, tokens)
        spare -= used
        if tokens > used:
            lost.append((reason, tokens - used))
    total = cached + sum(tokens for _, tokens in lost)
    assert total == prompt_tokens, f"{cached} cached and {lost} lost are {total} tokens, not {prompt_tokens}"
    return CacheAccount(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        matchable_tokens=max(matchable_tokens, cached),
        possible_tokens=max(seen_tokens, matchable_tokens, cached),
        by_tier=tuple(restored.items()),
        lost=tuple(lost),
        drafter_cold=min(drafter_cold, cached),
    )
