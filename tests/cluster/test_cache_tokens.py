"""The same tokens, bit for bit, wherever a prompt's state comes from: each tier, mixed, evicted, either router.

The reference is always the same prompt cold, under a tenant of its own. Log-probabilities are compared as well: a
state that is off by a bit shows there long before it changes a token.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster, wait_until

pytestmark = pytest.mark.cluster
BLOCK = 64
NEW_TOKENS = 6
SMALL_BYTES = 6 << 20
STORED_S = 15.0  # for a prompt to be found after it was answered
_fresh = itertools.count()


@dataclass(frozen=True)
class Answer:
    """`said`: token ids and log-probabilities. `tiers` holds only what gave something."""

    said: tuple[Any, ...]
    cached: int
    tiers: dict[str, int]
    lost: dict[str, int]


def ask(cluster: Cluster, ids: list[int], tenant: str, *, router: int = 0, max_tokens: int = NEW_TOKENS) -> Answer:
    body = {"model": cluster.model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 1, "return_token_ids": True}  # fmt: skip
    status, answer = cluster.post("/v1/completions", body, router, **{"x-moonrelay-tenant": tenant})
    assert status == 200, answer
    choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"]
    lost = {reason["reason"]: reason["tokens"] for reason in answer["usage"]["moonrelay"]["lost"]}
    assert details["cached_tokens"] + sum(lost.values()) == len(ids), answer["usage"]
    tiers = {tier: tokens for tier, tokens in details["cached_tokens_by_tier"].items() if tokens}
    said = (tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
    return Answer(said, details["cached_tokens"], tiers, lost)


def tenant(name: str) -> str:
    """One that nobody has used."""
    return f"{name}-{next(_fresh)}"


def cold(cluster: Cluster, ids: list[int], max_tokens: int = NEW_TOKENS) -> Answer:
    answer = ask(cluster, ids, tenant("cold"), max_tokens=max_tokens)
    assert answer.cached == 0, answer
    return answer


def prompt(seed: int, length: int) -> list[int]:
    return [300 + (seed * 131 + 7 * i + i * i % 13) % 5000 for i in range(length)]


def store(cluster: Cluster, ids: list[int], owner: str) -> Answer:
    """Ask until the prompt's deepest boundary is a hit; the first answer."""
    first = ask(cluster, ids, owner)
    deepest = (len(ids) - 1) // BLOCK * BLOCK
    wait_until(lambda: ask(cluster, ids, owner).cached == deepest, STORED_S, f"a hit of {deepest} tokens")
    return first


def lengths(blocks: int) -> list[int]:
    """k * 64 - 1, k * 64 and k * 64 + 1."""
    return [k * BLOCK + extra for k in range(1, blocks + 1) for extra in (-1, 0, 1)]


def check_every_boundary(cluster: Cluster, seed: int, owner: str, blocks: int = 3) -> list[Answer]:
    """Prompts that end at, and prompts that leave the stored one at, each boundary and one token either side.

    All at once, so that prefill packs them, each restored at another depth.
    """
    base = prompt(seed, blocks * BLOCK + 2)
    asked = [base[:n] for n in lengths(blocks)] + [[*base[:n], *prompt(seed + n, 9)] for n in lengths(blocks)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda ids: ask(cluster, ids, owner), asked))
        want = list(pool.map(lambda ids: cold(cluster, ids), asked))
    assert [a.said for a in found] == [a.said for a in want]
    depths = [(n - 1) // BLOCK * BLOCK for n in lengths(blocks)] + [n // BLOCK * BLOCK for n in lengths(blocks)]
    assert [a.cached for a in found] == depths
    return found


def store_every_boundary(cluster: Cluster, seed: int, owner: str, blocks: int = 3) -> None:
    base = prompt(seed, blocks * BLOCK + 2)
    for k in range(1, blocks + 1):
        store(cluster, base[: k * BLOCK + 1], owner)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


# -- nodes that a test starts itself -------------------------------------------------------------------------------


@dataclass
class Nodes:
    """A cluster whose workers keep nothing, and cache nodes beside it."""

    cluster: Cluster
    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *flags: str) -> None:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "moonrelay", "cachestore", "--cluster", "local", "--instance-id", name]
        command += ["--redis-url", self.cluster.ready["redis"], "--ready-file", str(ready), *flags]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})
        wait_until(ready.exists, 60, f"{name} to be ready")

    def metric(self, name: str, metric: str) -> float:
        address = json.loads((self.folder / f"{name}.ready").read_text())["metrics"]
        return metrics(f"http://{address}/metrics")[metric]

    def stop(self, *names: str) -> None:
        for name in names or tuple(self.running):
            process = self.running.pop(name)
            process.terminate()
            assert process.wait(timeout=30) == 0, (self.folder / f"{name}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers, workers that keep nothing, no cache node."""
    flags = ("--router", "2", "--cachestore", "0")
    with running_cluster(tmp_path_factory.mktemp("bare"), *flags, MOONRELAY_DEVICE_SHARE="0") as cluster:
        yield cluster


@pytest.fixture
def nodes(bare: Cluster, tmp_path: Path) -> Iterator[Nodes]:
    with closing(Nodes(bare, tmp_path)) as made:
        yield made


@contextmanager
def closing(nodes: Nodes) -> Iterator[Nodes]:
    try:
        yield nodes
        nodes.stop()
    finally:
        for process in nodes.running.values():
            process.kill()
            process.wait()


# -- the tiers -----------------------------------------------------------------------------------------------------


def test_hits_in_a_workers_own_memory(cluster: Cluster) -> None:
    owner = tenant("device")
    store_every_boundary(cluster, 1, owner)
    found = check_every_boundary(cluster, 1, owner)
    assert all(a.tiers.keys() <= {"device"} for a in found), [a.tiers for a in found]
    no_other_tenant(cluster, prompt(1, 3 * BLOCK + 2))


@pytest.mark.parametrize(("tier", "flags"), [("host", ()), ("remote", ("--transport", "tcp"))])
def test_hits_in_a_nodes_memory(nodes: Nodes, tier: str, flags: tuple[str, ...]) -> None:
    """A node that shares no memory with its readers is a remote one to them."""
    nodes.start(tier, *flags)
    owner = tenant(tier)
    store_every_boundary(nodes.cluster, 2, owner)
    found = check_every_boundary(nodes.cluster, 2, owner)
    assert all(a.tiers.keys() <= {tier} for a in found), [a.tiers for a in found]
    no_other_tenant(nodes.cluster, prompt(2, 3 * BLOCK + 2))


def test_hits_in_files_that_survived_a_restart(nodes: Nodes) -> None:
    flags = ("--disk-dir", str(nodes.folder / "files"), "--disk-bytes", str(64 << 20))
    nodes.start("disk", *flags)
    owner = tenant("disk")
    store_every_boundary(nodes.cluster, 3, owner)
    nodes.stop("disk")
    nodes.start("disk", *flags)
    base = prompt(3, 3 * BLOCK + 2)
    firsts: list[Answer] = []

    def hit() -> bool:
        firsts.append(ask(nodes.cluster, base, owner))
        return bool(firsts[-1].cached)

    wait_until(hit, STORED_S, "a hit after the node's restart")
    assert firsts[-1].tiers == {"disk": 3 * BLOCK}
    assert {a.said for a in firsts} == {cold(nodes.cluster, base).said}
    found = check_every_boundary(nodes.cluster, 3, owner)
    assert all(a.tiers.keys() <= {"host", "disk"} for a in found), [a.tiers for a in found]
    no_other_tenant(nodes.cluster, base)


def no_other_tenant(cluster: Cluster, ids: list[int]) -> None:
    """What one tenant stored is cold to another, and the reasons do not tell that it exists."""
    other, never = ask(cluster, ids, tenant("other")), ask(cluster, [*ids[:-1], ids[-1] + 1], tenant("other"))
    assert other.cached == 0 and other.lost.keys() == never.lost.keys(), (other, never)


def test_one_hit_from_two_nodes(nodes: Nodes) -> None:
    """A chain whose beginning is on one node and whose end is on another, here and remote."""
    cluster, owner = nodes.cluster, tenant("mixed")
    nodes.start("near")
    base = prompt(4, 2 * BLOCK + 1)
    store(cluster, base, owner)
    nodes.start("far", "--transport", "tcp")
    mixed: list[Answer] = []
    for seed in range(8):  # rendezvous hashing sends about half of the continuations to each node
        longer = [*base[: 2 * BLOCK], *prompt(50 + seed, 3 * BLOCK + 1)]
        store(cluster, longer, owner)
        found = ask(cluster, longer, owner)
        assert found.said == cold(cluster, longer).said and found.cached == 5 * BLOCK
        mixed += [found] if found.tiers.keys() == {"host", "remote"} else []
    assert mixed


# -- evictions, turns, routers -------------------------------------------------------------------------------------


def test_tokens_after_evictions_of_snapshots_and_blocks(nodes: Nodes) -> None:
    """A node too small for what is stored loses snapshots and blocks: fewer hits, the same tokens, and a reason."""
    nodes.start("small", "--dram-bytes", str(SMALL_BYTES))
    cluster, owner = nodes.cluster, tenant("small")
    base = prompt(5, 4 * BLOCK + 1)
    want = store(cluster, base, owner).said
    found: list[Answer] = []
    for seed in range(0, 36, 6):
        for other in range(seed, seed + 6):
            for _ in range(2):  # wanted more often than the first one
                ask(cluster, prompt(100 + other, 6 * BLOCK + 1), owner)
        found.append(ask(cluster, base, owner))
        if found[-1].lost.keys() & {"snapshot_evicted", "block_evicted"}:
            break
    assert {a.said for a in found} == {want}
    assert found[-1].lost.keys() & {"snapshot_evicted", "block_evicted"}, [a.lost for a in found]
    for kind in ("blocks", "snapshots"):
        assert nodes.metric("small", f"moonrelay_cache_evicted_{kind}_total") > 0


def written_back(cluster: Cluster) -> float:
    """Entries that decode has offered and that can be found. Asking for the prompt instead would store it."""
    lines = metrics(cluster.ready["metrics"]["decode-0"])
    return sum(value for name, value in lines.items() if name.startswith("moonrelay_decode_published_entries_total"))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_turn_that_decode_wrote_back_goes_on_as_it_would_have(nodes: Nodes, extra: int) -> None:
    """The next prompt is the last one, what was generated and something new; its state ends where decode's did."""
    nodes.start("near")
    cluster, owner = nodes.cluster, tenant("turn")
    first, before = prompt(6, 2 * BLOCK + 10), written_back(cluster)
    said = ask(cluster, first, owner, max_tokens=2 * BLOCK - 10 + extra)  # to 4 * 64 + extra tokens in all
    wait_until(lambda: written_back(cluster) > before, STORED_S, "the turn's write-back")
    longer = [*first, *said.said[0], *prompt(7, 20)]
    found = ask(cluster, longer, owner, router=1)
    assert found.cached == (len(first) + len(said.said[0]) - 1) // BLOCK * BLOCK  # the last token was never consumed
    near(found, cold(cluster, longer))


def near(found: Answer, want: Answer) -> None:
    """Generated tokens took another path than a prompt's: equal to 1e-4, and the same tokens up to a close call."""
    for token, other, a, b in zip(*(found.said[0], want.said[0]), *(found.said[1], want.said[1]), strict=True):
        assert abs(a - b) < 1e-4
        if token != other:
            return  # a greedy choice between equals: what follows is another text


def test_two_routers_share_one_cache(nodes: Nodes) -> None:
    nodes.start("near")
    cluster, owner = nodes.cluster, tenant("routers")
    base = prompt(8, 5 * BLOCK + 1)
    tellers: list[Callable[[], Answer]] = [lambda r=r: ask(cluster, base, owner, router=r) for r in (0, 1)]
    want = tellers[0]().said
    wait_until(lambda: tellers[1]().cached == 5 * BLOCK, STORED_S, "the other router's hit")
    assert {tellers[i % 2]().said for i in range(4)} == {want}


def test_a_conversation_at_temperature_one_goes_on_where_it_stopped(nodes: Nodes) -> None:
    """Text does not always tokenise to what was generated: the routers put the generated ids back, and the next turn,
    at the other router, starts from decode's last boundary."""
    nodes.start("near")
    cluster, last, hits = nodes.cluster, [], 0
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Write a class with many small methods. " * 12}]
    for turn in range(6):
        before = written_back(cluster)
        body = {"model": cluster.model, "messages": messages, "max_tokens": 150, "temperature": 1, "seed": turn,
                "return_token_ids": True}  # fmt: skip
        status, answer = cluster.post("/v1/chat/completions", body, turn % 2)
        assert status == 200, answer
        ids, said = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        if last and ids[: len(last)] == last:  # else what was generated cannot be written as a message
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(last) - 1) // BLOCK * BLOCK
            hits += 1
        last = [*ids, *said]
        if (len(last) - 1) // BLOCK > (len(ids) - 1) // BLOCK:
            wait_until(lambda before=before: written_back(cluster) > before, STORED_S, "the turn's write-back")
        message = answer["choices"][0]["message"]
        messages.append({key: message[key] for key in ("role", "content", "reasoning_content") if message.get(key)})
        messages.append({"role": "user", "content": f"Now the next one, number {turn}."})
    assert hits >= 2, hits
