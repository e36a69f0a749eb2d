"""What must hold in every run, checked where it could break; each invariant has one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cachestore.entries import SNAPSHOT, Key
from cachestore.node.states import State
from sim.toy import BLOCK_TOKENS, ROW_CELLS, SEEDS, Oracle, consume, num_blocks
from sim.world import Violation, World

INVARIANTS: Final[dict[str, str]] = {
    "tokens": "every token equals the single-process run's",
    "one_reply": "every request ends in exactly one terminal reply",
    "books": "blocks, slots and pages balance, and nothing is held when idle",
    "reuse_under_reader": "a byte is never given away while a lease, a late read or a step may look at it",
    "stale_fence": "no older or foreign fence renews or frees anything",
    "depth": "state depth equals key depth when stored, found, restored and adopted",
    "verified": "the index names only verified entries, and a hit is whole",
    "account": "achieved and lost tokens add up to the prompt",
    "tenants": "tenants never share a bundle",
    "deadline": "every wait ends by its deadline",
    "orphans": "entries of use to nobody are evicted before useful ones, and eviction leaves none behind",
    "sightings": "a hinted prefix hits on its second sighting, an unhinted one on its third",
    "delta": "what decode need not pull has the prompt's own prefix hashes",
    "immutable": "stored entries, snapshots and shared blocks are copied, never written to",
    "completion": "once faults are over, every request completes",
    "core": "no core finds its own invariant broken",
}


class Checkers:
    """Ghost knowledge: what every prefix hash stands for and whose it is."""

    def __init__(self, world: World) -> None:
        self.world, self.oracle = world, Oracle()
        self._tenant: dict[bytes, str] = {}  # of each root
        world.checkers = self

    def require(self, holds: bool, invariant: str, message: str) -> None:
        self.world.counts["check:" + invariant] += 1
        if not holds:
            raise Violation(invariant, message)

    # Lookups.

    def hashed(self, tenant: str, root: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        owner = self._tenant.setdefault(root, tenant)
        self.require(owner == tenant, "tenants", f"the root of {owner} is {tenant}'s too")
        self.oracle.register(root, hashes, ids)

    def matched(self, where: Any, root: bytes, hashes: Sequence[bytes], prompt_tokens: int, match: Any) -> None:
        """A lookup's answer is whole: runs without a gap up to the snapshot, which sits at the key's own depth."""
        name = where.name
        lost = sum(tokens for _, tokens in match.lost)
        self.require(match.tokens + lost == prompt_tokens, "account", f"{name}: {match} of {prompt_tokens} tokens")
        self.require(match.tokens < prompt_tokens, "depth", f"{name}: a hit leaves no token to compute")
        if not match.tokens:
            return
        depth, odd = divmod(match.tokens, BLOCK_TOKENS)
        at = 0
        for run in match.runs:
            self.require(run.first == at and run.end > at, "verified", f"{name}: a gap in {match.runs}")
            at = run.end
        whole = match.snapshot is not None and at == depth == match.snapshot.first and not odd
        self.require(whole, "verified", f"{name}: half a bundle, {match}")
        found = self.oracle.depth[hashes[depth - 1]]
        self.require(found == depth, "depth", f"{name}: snapshot found at {depth}, its key is {found} deep")

    def accounted(self, account: Any) -> None:
        total = account.cached_tokens + sum(tokens for _, tokens in account.lost)
        self.require(total == account.prompt_tokens, "account", f"{account}")

    # The store.

    def committed(self, tenant: str, key: Key, cells: Sequence[int], depth: int) -> None:
        """An entry became leasable: its bytes are what its key says, and its depth."""
        oracle = self.oracle
        self.require(self._tenant.get(key.root) == tenant, "tenants", f"{tenant} stores under a foreign root")
        self.require(
            oracle.depth[key.prefix_hash] == depth,
            "depth",
            f"a {key.kind} stored {depth} deep under a key of another",
        )
        self.named(key, cells)

    def named(self, key: Key, cells: Sequence[int]) -> None:
        truth = self.oracle.state if key.kind == SNAPSHOT else self.oracle.rows
        invariant = "depth" if key.kind == SNAPSHOT else "verified"
        self.require(tuple(cells) == truth[key.prefix_hash], invariant, f"a {key.kind} that is not its key's")

    def leased(self, tenant: str, keys: Sequence[Key]) -> None:
        for key in keys:
            self.require(self._tenant.get(key.root) == tenant, "tenants", f"{tenant} reads a foreign {key.kind}")

    def evicted(self, node: Any, victims: Sequence[Key], protect: Sequence[Key]) -> None:
        """What rests on an entry goes before it, and blocks that no snapshot stands on before any snapshot."""
        going = dict.fromkeys(victims)
        entries = {k: e for k, e in node.core._entries.items() if k in going or e.state is not State.LEAVING}
        resting = {entry.offer.parent for key, entry in node.core._entries.items() if key not in going}
        for key in victims:
            self.require(key not in resting, "orphans", f"{node.name}: what rests on a {key.kind} stays")
        # What was put back goes first, and memory's order does not know what lies below it on disk. A snapshot whose
        # block never landed is itself of use to nobody.
        whole = [key for key in victims if key.kind == SNAPSHOT and entries[key].offer.parent in entries]
        if node.restored or node.core.stats().disk.capacity_bytes or not whole:
            return
        useful: set[Key] = set()
        for key in [*(key for key in entries if key.kind == SNAPSHOT), *protect]:
            at: Key | None = key
            while at is not None and at in entries and at not in useful:
                useful.add(at)
                at = entries[at].offer.parent
        pins = node.core._retention._kept
        for key, entry in entries.items():
            idle = entry.state is State.HOST and key not in resting and key not in useful and not pins[key].pins
            self.require(not idle, "orphans", f"{node.name}: a snapshot goes before a block of use to nobody")

    def reclaimed(self, node: Any, gone: Sequence[Key]) -> None:
        """Nothing that stays rests on what has left."""
        left = set(gone)
        for key, entry in node.core._entries.items():
            behind = entry.offer.parent in left and entry.state is not State.LEAVING
            self.require(not behind, "orphans", f"{node.name}: a {key.kind} is left behind by what it rests on")

    def fence(self, owner: Any, granted: int | None, used: int) -> None:
        self.require(granted == used, "stale_fence", f"{owner.name}: fence {used} honoured, {granted} was granted")

    # Workers.

    def kept(self, name: bytes, cells: Sequence[int], *, state: bool) -> None:
        """What a worker keeps under a hash is what the hash names."""
        truth = self.oracle.state if state else self.oracle.rows
        self.require(tuple(cells) == truth[name], "depth" if state else "delta", "kept under another prefix's hash")

    def restored(self, worker: Any, prompt: Any, holding: Any, tokens: int) -> None:
        depth = tokens // BLOCK_TOKENS
        owner = self._tenant.get(self.oracle.root[prompt.hashes[depth - 1]])
        self.require(owner == prompt.tenant, "tenants", f"{worker.name}: {prompt.tenant} restores what is {owner}'s")
        for index in range(depth):
            cells = worker.rows.read(holding.row_cells(index))
            truth = self.oracle.rows[prompt.hashes[index]]
            self.require(tuple(cells) == truth, "verified", f"{worker.name}: restored rows of another prefix")
        cells = worker.state.read(holding.state_cells())
        truth = self.oracle.state[prompt.hashes[depth - 1]]
        self.require(tuple(cells) == truth, "depth", f"{worker.name}: the restored state is not that after {tokens}")

    def adopted(self, worker: Any, request: Any, holding: Any) -> None:
        """Rows and state of a handoff are the prompt's, to the token."""
        ids = request.prompt
        tokens = request.opened.prompt_tokens
        self.require(tokens == len(ids), "depth", f"{worker.name}: {tokens} tokens adopted of {len(ids)}")
        state, rows = list(SEEDS), [[0] * ROW_CELLS for _ in range(num_blocks(len(ids)))]
        consume(ids, 0, state, rows)
        found = worker.state.read(holding.state_cells())
        self.require(found == state, "depth", f"{worker.name}: the adopted state is not that after {tokens} tokens")
        for index, truth in enumerate(rows):
            found = worker.rows.read(holding.row_cells(index))
            invariant = "delta" if index < holding.reservation.shared else "verified"
            self.require(found == truth, invariant, f"{worker.name}: adopted block {index} is another prefix's")

    def waited(self, where: Any, ms: float, limit_ms: float) -> None:
        self.require(ms <= limit_ms + 5, "deadline", f"{where.name}: waited {ms:.0f} of {limit_ms} ms")

    # Clients.

    def heard(self, request_id: str, got: Sequence[int], truth: Sequence[int]) -> None:
        """What was streamed so far is a beginning of the single-process run's answer."""
        self.require(list(got) == list(truth[: len(got)]), "tokens", f"{request_id}: {got} is not {truth}")

    def answered(self, request_id: str, got: Sequence[int], truth: Sequence[int], terminals: int) -> None:
        self.require(terminals == 1, "one_reply", f"{request_id}: {terminals} terminal replies")
        self.require(list(got) == list(truth), "tokens", f"{request_id}: {got} is not {truth}")
