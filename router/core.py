"""What the router decides: where snapshots go, which workers serve, what a prompt lost. No I/O, clock or chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
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
# A head of this many blocks is worth a snapshot of its own: shorter ones are recomputed faster than fetched.
HEAD_BLOCKS_MIN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A routable instance as membership shows it.

    `state_bytes` and `row_bytes` (per token) price a handoff; `busy` counts sequences of all routers, as the worker
    last reported them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A request as placement sees it. `computed_tokens`: prompt tokens that no cache hit saves."""

    prompt_tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who serves. `prefill` is None where `decode` does both."""

    prefill: Worker | None
    decode: Worker

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def serving(workers: Iterable[Worker]) -> list[Fingerprint]:
    """The fingerprints for which a whole path exists: an aggregated worker, or a prefill and a decode worker."""
    roles: dict[Fingerprint, set[str]] = {}
    for worker in workers:
        roles.setdefault(worker.fingerprint, set()).add(worker.role)
    return [found for found, has in roles.items() if "aggregated" in has or {"prefill", "decode"} <= has]


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

    Equal costs go to whoever was chosen longest ago, so that requests coming one at a time spread as well.
    """
    able = [w for w in workers if w.key not in avoid and (fingerprint is None or w.fingerprint == fingerprint)]

    def rank(plan: Plan) -> tuple[float, int, tuple[WorkerKey, ...]]:
        cost = sum(_waiting_s(w, loads.get(w.key, NO_LOAD), need, costs) for w in plan.workers)
        if plan.prefill is not None:
            cost += handoff_s(plan.prefill, plan.decode, need.prompt_tokens, costs)
        last = sum(loads.get(w.key, NO_LOAD).chosen_at for w in plan.workers)
        return (cost, last, tuple(w.key for w in plan.workers))

    alone = [Plan(prefill=None, decode=w) for w in able if w.role == "aggregated"]
    pairs = [
        Plan(prefill=p, decode=d)
        for p in able
        if p.role == "prefill"
        for d in able
        if d.role == "decode" and d.fingerprint == p.fingerprint
    ]
    return min(alone or pairs, key=rank, default=None)


def handoff_s(prefill: Worker, decode: Worker, prompt_tokens: int, costs: CostModel) -> float:
    """Price of a handoff: the fixed state and every token's rows over the link between the two hosts."""
    near = prefill.host_id == decode.host_id and prefill.host_id != ""
    per_s = costs.same_host_bytes_per_s if near else costs.other_host_bytes_per_s
    return (prefill.state_bytes + prompt_tokens * prefill.row_bytes) / per_s


def _waiting_s(worker: Worker, load: Load, need: Need, costs: CostModel) -> float:
    """How long work would wait for this worker. What other routers gave it is known only as a count."""
    others = max(0, worker.busy - load.sequences)
    prompts = (load.prompt_tokens + others * need.computed_tokens) * costs.prompt_token_s
    sequences = (load.sequences + others) * costs.sequence_s
    if worker.role == "prefill":
        return prompts
    return sequences if worker.role == "decode" else prompts + sequences


def plan_snapshots(
    hints: Iterable[tuple[int, int]], prompt_tokens: int, block_tokens: int, hit_tokens: int
) -> tuple[int, ...]:
    """Token counts after which prefill keeps the state: kinds 0 and 1 of DESIGN section 4.

    `hints`: (offset in tokens, kind). Only a boundary that the computation passes can be kept, so none lies at or
    below `hit_tokens`; the last token must be computed to have logits, so none lies above prompt_tokens - 1.
    """
    chosen = set()
    for offset, kind in hints:
        boundary = min(offset, prompt_tokens - 1) // block_tokens * block_tokens
        if boundary > hit_tokens and (kind == 1 or boundary >= HEAD_BLOCKS_MIN * block_tokens):
            chosen.add(boundary)
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAccount:
    """What the cache gave a prompt and where the rest went. cached + lost = prompt tokens."""

    prompt_tokens: int
    cached_tokens: int
    matchable_tokens: int
    by_tier: tuple[tuple[str, int], ...]
    lost: tuple[tuple[str, int], ...]

    @property
    def miss_reason(self) -> str | None:
        """Of the shallowest lost token."""
        return self.lost[0][0] if self.lost else None


def account(
    *,
    prompt_tokens: int,
    hit_tokens: int,
    matchable_tokens: int,
    index_lost: Sequence[tuple[str, int]],
    restored: Mapping[str, int],
    worker_reason: str | None,
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
        by_tier=tuple(restored.items()),
        lost=tuple(lost),
    )
