"""A run from its seed: which cluster, which conversations, which faults; phase one, healing, phase two, the audit."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from moonrelay.errors import ServeError
from sim.adapters import PoolSizes
from sim.cache_node import CacheNode
from sim.checkers import Checkers
from sim.clients import Clients, Conversation, TurnPlan, ids_of
from sim.decode import Decode
from sim.disk_node import DiskNode
from sim.faults import Fault, Faults, draw
from sim.network import Network
from sim.prefill import Prefill
from sim.redis import Redis
from sim.router import Router
from sim.toy import BLOCK_TOKENS
from sim.world import Process, Violation, World

PHASE_ONE_MS, PHASE_TWO_MS, QUIET_MS = 1_800.0, 20_000.0, 12_000.0
DEADLINE_MS = 2_500.0
# What ends a real process: its own broken invariant, or an error that no edge foresees.
CRASHES = (AssertionError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration)
CALM_EVERY = 8  # one run in so many has no faults and room for everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    routers: int
    prefills: int
    decodes: int
    nodes: int
    pools: PoolSizes
    node_cells: int
    disk_cells: int  # 0: no disk tier
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    cluster: Cluster
    conversations: tuple[Conversation, ...]
    faults: tuple[Fault, ...]
    calm: bool = False


@dataclass(slots=True)
class Outcome:
    seed: int
    violation: str | None = None  # the invariant's name
    message: str = ""
    digest: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    struck: list[tuple[str, str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed * 2_654_435_761 + 1)
    if seed % CALM_EVERY == 0:
        return calm(seed, rng)
    tight = rng.random() < 0.6
    cluster = Cluster(
        routers=2,
        prefills=rng.randint(1, 2),
        decodes=rng.randint(1, 2),
        nodes=rng.choice((1, 1, 2)),
        pools=PoolSizes(
            num_blocks=rng.randint(16, 26) if tight else 64,
            num_slots=rng.randint(3, 6) if tight else 16,
            kept_share=rng.choice((0.0, 0.0, 0.5, 0.8)),
            writeback=rng.choice(("on", "off", "adaptive")),
            draft_len_max=rng.choice((0, 0, 3, 7)),
        ),
        node_cells=rng.randint(14, 36) if tight else 240,
        disk_cells=rng.choice((0, 0, 30, 90)),
        transport=rng.choice(("rdma", "cma", "tcp")),
    )
    faults = draw(rng, rng.choice((0, 1, 1, 2, 3, 4)), PHASE_ONE_MS * 0.7)
    return Scenario(seed=seed, cluster=cluster, conversations=tuple(conversations(rng)), faults=tuple(faults))


def struck_by(seed: int, fault: Fault) -> Scenario:
    """The run of `seed`, calm ones made busy, with this one fault."""
    plan = scenario(seed + (seed % CALM_EVERY == 0))
    return replace(plan, faults=(fault,))


def conversations(rng: random.Random) -> list[Conversation]:
    """A few that share beginnings, within and across two tenants; some repeat another from its start."""
    heads = [ids_of(rng, near_boundary(rng, rng.randint(1, 3))) for _ in range(2)]
    made: list[Conversation] = []
    for number in range(rng.randint(2, 4)):
        turns = tuple(
            TurnPlan(
                ids=ids_of(rng, rng.randint(2, 90) if rng.random() < 0.6 else near_boundary(rng, 1)),
                max_tokens=rng.choice((1, 2, 3, 5, 8, 14)),
                stops=rng.random() < 0.25,
                pause_ms=rng.uniform(0, 250),
            )
            for _ in range(rng.randint(1, 3))
        )
        head, tenant = rng.choice(heads), rng.choice(("red", "blue"))
        if made and rng.random() < 0.25:
            other = rng.choice(made)
            head, tenant, turns = other.head, other.tenant, (*other.turns[:1], *turns[1:])
        made.append(
            Conversation(
                name=f"c{number}",
                tenant=tenant,
                head=head,
                hinted=rng.random() < 0.7,
                turns=turns,
                start_ms=rng.uniform(0, 400),
            )
        )
    return made


def near_boundary(rng: random.Random, blocks: int) -> int:
    return blocks * BLOCK_TOKENS + rng.choice((-1, 0, 1))


def calm(seed: int, rng: random.Random) -> Scenario:
    """No faults, room for everything, one after another: who shares a head hits it when DESIGN says so."""
    head = ids_of(rng, near_boundary(rng, rng.randint(2, 4)))
    hinted = rng.random() < 0.5
    made = [
        Conversation(
            name=f"c{number}",
            tenant="red",
            head=head,
            hinted=hinted,
            turns=(TurnPlan(ids=ids_of(rng, rng.randint(2, 90)), max_tokens=2, stops=False, pause_ms=0),),
            start_ms=200.0 * number,
        )
        for number in range(4)
    ]
    cluster = Cluster(
        routers=2,
        prefills=rng.randint(1, 2),
        decodes=1,
        nodes=rng.randint(1, 2),
        pools=PoolSizes(num_blocks=80, num_slots=24, kept_share=rng.choice((0.0, 0.5)), writeback="on"),
        node_cells=400,
        disk_cells=0,
        transport="rdma",
    )
    return Scenario(seed=seed, cluster=cluster, conversations=tuple(made), faults=(), calm=True)


def run(plan: Scenario, *, keep_trace: bool = False) -> Outcome:
    """Everything that happens in one run; a violation ends it."""
    world = World(plan.seed, keep_trace=keep_trace)
    outcome = Outcome(plan.seed)
    network = Network(world)
    Checkers(world)
    world.transport = plan.cluster.transport
    make = maker(world, plan.cluster)
    for name in names(plan.cluster):
        world.processes[name] = make(name)
    clients = Clients(world, list(plan.conversations), DEADLINE_MS)
    world.processes[clients.name] = clients
    faults = Faults(world, list(plan.faults), make)
    try:
        for process in list(world.processes.values()):
            process.boot()
        world.run(PHASE_ONE_MS)
        faults.heal()
        clients.healed.set()
        finish(world, clients)
        audit(world, clients, plan)
    except Violation as found:
        outcome.violation, outcome.message = found.invariant, str(found)
    except CRASHES as broken:
        outcome.violation, outcome.message = "core", f"core: {type(broken).__name__}: {broken}"
    outcome.digest, outcome.counts = world.digest, world.counts
    outcome.counts["events"] = world.events
    outcome.counts["check:core"] += 1  # every call of theirs in the run
    outcome.struck = faults.struck
    outcome.lines = world.lines or []
    bury(world)
    assert network is world.network
    return outcome


def names(cluster: Cluster) -> list[str]:
    """Redis first: the others take their epochs from it."""
    return [
        "redis",
        *(f"node{i}" for i in range(cluster.nodes)),
        *(f"prefill{i}" for i in range(cluster.prefills)),
        *(f"decode{i}" for i in range(cluster.decodes)),
        *(f"router{i}" for i in range(cluster.routers)),
    ]


def maker(world: World, cluster: Cluster) -> Any:
    def make(name: str) -> Process:
        match name.rstrip("0123456789"):
            case "redis":
                return Redis(world, name)
            case "node":
                if not cluster.disk_cells:
                    return CacheNode(world, name, cluster.node_cells)
                return DiskNode(world, name, cluster.node_cells, cluster.disk_cells)
            case "prefill":
                return Prefill(world, name, cluster.pools)
            case "decode":
                return Decode(world, name, cluster.pools)
            case _:
                return Router(world, name)

    return make


def finish(world: World, clients: Clients) -> None:
    """Phase two: every conversation comes to its end."""
    until = world.now + PHASE_TWO_MS
    while clients.open and world.now < until:
        world.run(world.now + 100)
    world.checkers.require(not clients.open, "completion", f"{clients.open} conversations did not end")


def audit(world: World, clients: Clients, plan: Scenario) -> None:
    """Once time has ended what only time can end, every book balances and nothing is held."""
    until = world.now + QUIET_MS
    while True:
        try:
            for process in world.processes.values():
                if hasattr(process, "settled"):
                    process.settled()
            break
        except Violation:
            if world.now >= until:
                raise
        world.run(world.now + 250)
    if plan.calm:
        sightings(world, clients, plan)


def sightings(world: World, clients: Clients, plan: Scenario) -> None:
    """A hinted head hits on its second sighting, an unhinted one on its third."""
    head = len(plan.conversations[0].head) // BLOCK_TOKENS * BLOCK_TOKENS
    first = 1 if plan.conversations[0].hinted else 2
    for served in sorted(clients.served, key=lambda s: s.conversation)[first:]:
        enough = served.result.cached >= min(head, (served.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        world.checkers.require(
            enough, "sightings", f"{served.conversation}: {served.result.cached} cached of a head of {head}"
        )


def bury(world: World) -> None:
    """Close every generator while nobody listens any more."""
    for process in world.processes.values():
        process.alive = False
        world.graves.append([task.gen for task in process.tasks])
    for grave in world.graves:
        for gen in grave:
            with suppress(Violation, ServeError, *CRASHES):
                gen.close()
