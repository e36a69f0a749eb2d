"""A cluster of cache nodes as plain sets, driven by operations; what a lookup must say of it, stated naively."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st

from cachestore.lookup import Entry, Match

BLOCK_TOKENS = 64
DEPTH = 10
SHARED = {"a": "aaaaaaaaaa", "b": "aaaabbbbbb", "c": "aaaaaaaccc"}  # block by block; equal beginnings are shared


@dataclass(frozen=True)
class Life:
    instance_id: str
    epoch: int


def chain(name: str) -> list[bytes]:
    """The prefix hashes of a prompt: they name everything up to a block's end."""
    path = SHARED[name]
    return [f"{path[: d + 1]:-<16}".encode() for d in range(DEPTH)]


@dataclass
class NodeModel:
    life: Life
    blocks: dict[bytes, str] = field(default_factory=dict)  # hash -> tier
    cuts: set[bytes] = field(default_factory=set)


class Model:
    """What every node holds, what ever was, and the entries that a real node would write."""

    def __init__(self, num_nodes: int) -> None:
        self.nodes = [NodeModel(Life(f"n{i}", 1)) for i in range(num_nodes)]
        self.dead: list[NodeModel] = []
        self.known: set[bytes] = set()
        self.parents: set[bytes] = set()
        self.gone_cuts: set[bytes] = set()
        self.exact = True  # False once the index lost something that its owner has

    def lives(self) -> list[Life]:
        return [node.life for node in self.nodes]

    def write(self, node: NodeModel, name: str, start: int, end: int, cuts: list[int], tier: str) -> dict:
        """Blocks [start, end) of a chain whose beginning is known somewhere, and snapshots at its boundaries."""
        hashes = chain(name)
        start = min(start, next((d for d in range(DEPTH) if hashes[d] not in self.known), DEPTH))
        entries: dict = {}
        for d in range(start, max(start, end)):
            node.blocks[hashes[d]] = tier
            first = next((f for f in range(d, 0, -1) if hashes[f - 1] not in node.blocks), 0)
            parent = hashes[d - 1] if d else None
            entries["block", hashes[d]] = Entry(nbytes=10, tier=tier, first=first, parent=parent)
            self.known.add(hashes[d])
            if parent is not None:
                self.parents.add(parent)
        for n in cuts:
            if hashes[n - 1] in node.blocks:
                node.cuts.add(hashes[n - 1])
                entries["snapshot", hashes[n - 1]] = Entry(nbytes=5, tier=tier)
        return entries

    def evict(self, node: NodeModel, count: int) -> list:
        """What rests on nothing goes first: a snapshot, else a block that no other follows."""
        names: list = []
        for _ in range(count):
            rest = {c[d - 1] for c in map(chain, SHARED) for d in range(1, DEPTH) if c[d] in node.blocks}
            free = sorted(set(node.blocks) - rest)
            if not free:
                break
            if free[0] in node.cuts:
                self.drop_cut(node, free[0], names)
            del node.blocks[free[0]]
            names.append(("block", free[0]))
        return names

    def drop_cut(self, node: NodeModel, prefix_hash: bytes, names: list) -> None:
        node.cuts.discard(prefix_hash)
        self.gone_cuts.add(prefix_hash)
        names.append(("snapshot", prefix_hash))

    def kill(self, index: int) -> None:
        self.dead.append(self.nodes[index])
        self.nodes[index] = NodeModel(Life(f"n{index}", self.nodes[index].life.epoch + 1))

    def check(self, match: Match, name: str, prompt_tokens: int) -> None:
        """The answer of a lookup of this chain's first `prompt_tokens`."""
        hashes, limit = chain(name), (prompt_tokens - 1) // BLOCK_TOKENS
        assert_whole(match, prompt_tokens)
        if not self.exact:
            return
        held = [n.blocks for n in self.nodes]
        depth = next((d for d in range(limit) if not any(hashes[d] in b for b in held)), limit)
        seen = next((d for d in range(limit) if hashes[d] not in self.known), limit)
        cuts = {n for n in range(1, depth + 1) if any(hashes[n - 1] in node.cuts for node in self.nodes)}
        cut = max(cuts, default=0)
        in_blocks = [t // BLOCK_TOKENS for t in (match.tokens, match.matchable_tokens, match.seen_tokens)]
        assert in_blocks == [cut, depth, seen]
        self.check_lost(match, hashes, cut, depth, seen, limit)
        self.check_places(match, hashes)
        shallower = sorted(cuts - {cut}, reverse=True)
        offered = [b.tokens // BLOCK_TOKENS for b in match.alternatives]
        assert offered == sorted(offered, reverse=True) and len(offered) <= 3
        assert set(offered) <= cuts and (len(offered) == 3 or set(shallower) <= set(offered))

    def check_lost(self, match: Match, hashes: list[bytes], cut: int, depth: int, seen: int, limit: int) -> None:
        lost: dict[str, int] = {}
        dead_cut = max(
            (n for n in range(cut, depth + 1) for d in self.dead if n and hashes[n - 1] in d.cuts), default=0
        )
        gone_cut = max((n for n in range(cut, depth + 1) if n and hashes[n - 1] in self.gone_cuts), default=0)
        for position in range(limit):
            if position < cut:
                continue
            if position < depth:
                could = "stale_index" if dead_cut >= gone_cut else "snapshot_evicted"
                reason = could if position < max(dead_cut, gone_cut) else "no_snapshot"
            elif position < seen:
                dead = any(all(h in d.blocks for h in hashes[depth : position + 1]) for d in self.dead)
                reason = "stale_index" if dead else "block_evicted"
            else:
                reason = "diverged" if seen and hashes[seen - 1] in self.parents else "cold"
            lost[reason] = lost.get(reason, 0) + BLOCK_TOKENS
        got: dict[str, int] = {}
        for reason, tokens in match.lost:
            got[reason] = got.get(reason, 0) + tokens
        assert 0 < got.pop("remainder") <= BLOCK_TOKENS
        assert got == lost

    def check_places(self, match: Match, hashes: list[bytes]) -> None:
        """Whatever is offered is there: blocks on their node, the snapshot on its own; and so are the tiers."""
        by_life = {(n.life.instance_id, n.life.epoch): n for n in self.nodes}
        bundles = [(match.tokens, match.runs, match.snapshot)] if match.snapshot else []
        for tokens, runs, snapshot in [*bundles, *((b.tokens, b.runs, b.snapshot) for b in match.alternatives)]:
            at = 0
            for run in runs:
                assert run.first == at < run.end
                assert all(h in by_life[run.node_id, run.epoch].blocks for h in hashes[at : run.end])
                at = run.end
            assert at == snapshot.first == tokens // BLOCK_TOKENS
            assert hashes[at - 1] in by_life[snapshot.node_id, snapshot.epoch].cuts
        tiers = [by_life[r.node_id, r.epoch].blocks[h] for r in match.runs for h in hashes[r.first : r.end]]
        changes = sum(a != b for a, b in pairwise(tiers))
        if changes <= 1:  # a node moves a chain's deep end first; other orders are told approximately
            assert match.by_tier == {t: tiers.count(t) * BLOCK_TOKENS for t in set(tiers)}


def assert_whole(match: Match, prompt_tokens: int) -> None:
    assert match.tokens + sum(tokens for _, tokens in match.lost) == prompt_tokens
    assert match.lost and all(tokens > 0 for _, tokens in match.lost)
    assert sum(match.by_tier.values()) == match.tokens
    assert match.tokens <= match.matchable_tokens <= match.seen_tokens < prompt_tokens
    assert (match.hit() is None) == (match.tokens == 0)


def operations() -> st.SearchStrategy:
    """Lists of (what, node, chain, numbers)."""
    what = st.sampled_from(["write"] * 6 + ["evict"] * 3 + ["drop_cut", "kill"] * 2 + ["hole", "forget"])
    numbers = st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH), st.lists(st.integers(1, DEPTH), max_size=3))
    return st.lists(
        st.tuples(what, st.integers(0, 2), st.sampled_from("abc"), numbers, st.sampled_from(["host", "disk"])),
        max_size=14,
    )
