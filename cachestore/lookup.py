"""What a lookup asks and answers: entries, lives, the hit, and where every lost token went. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from moonrelay.errors import InvariantError
from moonrelay.prefix import HASH_BYTES, Fingerprint, prefix_root
from moonrelay.stubs.v1.worker_pb2 import CacheHit, CacheRun

Kind = Literal["block", "snapshot"]
Tier = Literal["device", "host", "disk"]
MissReason = Literal[
    "cold", "no_snapshot", "snapshot_evicted", "block_evicted", "diverged", "salt", "fingerprint", "stale_index",
    "remainder",
]  # fmt: skip
EntryName = tuple[Kind, bytes]  # kind, prefix hash

ALTERNATIVES_MAX = 3
ALTERNATIVES_BLOCKS = 128  # how far below the hit they are looked for: a lookup must not read the whole chain
RUNS_MAX = 64  # of one hit: a chain in more pieces than that is cheaper to compute again than to lease
PIECES_MAX = 4  # of one run by tier; a node moves a chain's deep end first, so that two are the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the index keeps of a block or snapshot beside its owner.

    `first` (blocks): the depth where the owner's unbroken run to this block begins: it holds blocks [first, here].
    That lets a lookup bisect, and obliges the owner to drop a run from its deep end. `parent` (blocks): the previous
    prefix hash; None at depth 0.
    """

    nbytes: int
    tier: Tier = "host"
    first: int | None = None
    parent: bytes | None = None


class Life(Protocol):
    """One life of a process that holds entries: a cache node, or a worker for its own memory."""

    @property
    def instance_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose prompt it is, for the reasons `salt` and `fingerprint`; names no other tenant's root."""

    key: bytes  # digest of the salt
    unsalted_root: bytes

    @classmethod
    def of(cls, fingerprint: Fingerprint, salt: str) -> Tenant:
        return cls(key=_tenant_key(salt), unsalted_root=prefix_root(fingerprint, ""))


def life_name(life: Life) -> str:
    """As the index names it."""
    return f"{life.instance_id}:{life.epoch}"


def inner_hashes(entries: Mapping[EntryName, Entry]) -> tuple[set[bytes], set[bytes]]:
    """Blocks that have a child among `entries`: those that are among them too, and those elsewhere.

    Raises: InvariantError where a block does not say where its run begins.
    """
    parents: set[bytes] = set()
    for (kind, _), entry in entries.items():
        if kind == "block" and entry.first is None:
            raise InvariantError("a block's entry without the depth where its run begins")
        if kind == "block" and entry.parent is not None:
            parents.add(entry.parent)
    here = {h for h in parents if ("block", h) in entries}
    return here, parents - here


def _tenant_key(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"moonrelay-salt").digest()


UNSALTED = _tenant_key("")


class Run(NamedTuple):
    """Blocks [first, end) on one life of one node."""

    node_id: str
    epoch: int
    first: int
    end: int

    def proto(self) -> CacheRun:
        return CacheRun(node_id=self.node_id, node_epoch=self.epoch, first_block=self.first, end_block=self.end)


class Bundle(NamedTuple):
    """Blocks [0, N) and the snapshot at N, and who has them."""

    tokens: int
    runs: tuple[Run, ...]
    snapshot: Run


class Local(NamedTuple):
    """How deep a worker's own bundle of this prompt goes."""

    instance_id: str
    epoch: int
    tokens: int


class Match(NamedTuple):
    """A lookup's answer. tokens + the tokens in `lost` = the prompt's tokens; `lost` is in order of position.

    `matchable_tokens`: how deep live nodes' blocks go. `seen_tokens`: how deep blocks are or were known, which an
    unlimited cache on this grid would give. `by_tier` sums to `tokens`; exact where each node's part of the chain
    changes tier at most three times. `alternatives`: no deeper than the hit, for when it cannot be fetched.
    `devices`: workers' own bundles, the deepest of each down to where the alternatives are looked for.
    """

    tokens: int
    matchable_tokens: int
    seen_tokens: int
    runs: tuple[Run, ...]
    snapshot: Run | None
    alternatives: tuple[Bundle, ...]
    by_tier: Mapping[Tier, int]
    devices: tuple[Local, ...]
    lost: tuple[tuple[MissReason, int], ...]

    @property
    def miss_reason(self) -> MissReason:
        """Of the shallowest lost token; one is always lost, since the last one must be computed."""
        return self.lost[0][0]

    def hit(self) -> CacheHit | None:
        if self.snapshot is None:
            return None
        return CacheHit(
            tokens=self.tokens,
            runs=[run.proto() for run in self.runs],
            snapshot=self.snapshot.proto(),
            matchable_tokens=self.matchable_tokens,
            seen_tokens=self.seen_tokens,
            alternatives=[_hit(bundle) for bundle in self.alternatives],
        )


def _hit(bundle: Bundle) -> CacheHit:
    return CacheHit(tokens=bundle.tokens, runs=[run.proto() for run in bundle.runs], snapshot=bundle.snapshot.proto())


Cover = Sequence[tuple[int, int, int]]  # (life, first, end) in order, without a gap from 0; lives count from 0


class Found(NamedTuple):
    """What is known of a prompt's blocks, in blocks. Lives are numbered as the lookup gave them.

    depth <= stale <= kept <= seen: how deep live nodes' blocks go, then those of a dead one, then those that a worker
    keeps for itself, then what was ever known.
    `dead_cut`, `gone_cut`: the deepest snapshot at or below `depth` of a dead owner, and one that was evicted.
    `hits`: (depth, life that has the snapshot, which cover), the best first. `devices`: (life, depth).
    """

    depth: int
    seen: int
    stale: int
    kept: int
    dead_cut: int
    gone_cut: int
    diverged: bool
    empty: bool  # nothing was ever known under this root
    hits: Sequence[tuple[int, int, int]]
    devices: Sequence[tuple[int, int]]
    covers: tuple[Cover, Cover]
    tiers: Sequence[tuple[Tier, int]]


NOTHING = Found(
    depth=0, seen=0, stale=0, kept=0, dead_cut=0, gone_cut=0, diverged=False, empty=False, hits=(), devices=(),
    covers=((), ()), tiers=(),
)  # fmt: skip


def explain(
    found: Found, prompt_tokens: int, block_tokens: int, lives: Sequence[Life], empty: MissReason = "cold"
) -> Match:
    """`found` as a `Match`, with a reason for every token it does not give. `empty`: the reason of an empty root."""
    size, limit = block_tokens, (prompt_tokens - 1) // block_tokens
    bundles = [_bundle(depth, lives, holder, found.covers[cover], size) for depth, holder, cover in found.hits]
    by_tier: dict[Tier, int] = {}
    for tier, blocks in found.tiers:
        by_tier[tier] = by_tier.get(tier, 0) + blocks * size
    tokens, runs, snapshot = bundles[0] if bundles else (0, (), None)
    lost = _lost(found, prompt_tokens, size, limit, empty)
    if tokens + sum([part for _, part in lost]) != prompt_tokens or sum(by_tier.values()) != tokens:
        raise InvariantError(f"{tokens} cached {by_tier} and {lost} lost are not {prompt_tokens} tokens")
    return Match(
        tokens, found.depth * size, found.seen * size, runs, snapshot, tuple(bundles[1:]), by_tier,
        tuple([Local(lives[life].instance_id, lives[life].epoch, depth * size) for life, depth in found.devices]),
        lost,
    )  # fmt: skip


def _bundle(depth: int, lives: Sequence[Life], holder: int, cover: Cover, size: int) -> Bundle:
    runs = [_run(lives[life], first, min(end, depth)) for life, first, end in cover if first < depth]
    return Bundle(depth * size, tuple(runs), _run(lives[holder], depth, depth))


def _run(life: Life, first: int, end: int) -> Run:
    return Run(life.instance_id, life.epoch, first, end)


def _lost(
    found: Found, prompt_tokens: int, size: int, limit: int, empty: MissReason
) -> tuple[tuple[MissReason, int], ...]:
    cut = found.hits[0][0] if found.hits else 0
    could = max(cut, found.dead_cut, found.gone_cut)
    unknown: MissReason = "diverged" if found.diverged else empty if found.empty else "cold"
    parts: list[tuple[MissReason, int]] = [
        ("stale_index" if found.dead_cut >= found.gone_cut else "snapshot_evicted", (could - cut) * size),
        ("no_snapshot", (found.depth - could) * size),
        ("stale_index", (found.stale - found.depth) * size),
        ("cold", (found.kept - found.stale) * size),  # the store does not have them, or not yet
        ("block_evicted", (found.seen - found.kept) * size),
        (unknown, (limit - found.seen) * size),
        ("remainder", prompt_tokens - limit * size),
    ]
    lost: list[tuple[MissReason, int]] = []
    for reason, tokens in parts:
        if tokens and lost and lost[-1][0] == reason:
            lost[-1] = (reason, lost[-1][1] + tokens)
        elif tokens:
            lost.append((reason, tokens))
    return tuple(lost)
