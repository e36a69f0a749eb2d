"""What goes wrong in phase one: at a time, or when a request enters a phase; and the healing before phase two."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sim.network import Network, Weather
from sim.world import Process, World

PHASES: Final = (
    "looked_up",
    "reserved",
    "restoring",
    "prefilling",
    "leased",
    "handed_off",
    "pulling",
    "adopted",
    "decoding",
    "publishing",
    "publish_pulling",
    "evicting",
    "writing_back",
    "writing_file",
    "promoting",
    "followed",
)
ROLES: Final = ("router", "prefill", "decode", "cachestore", "redis")
STRIKES: Final = ("kill", "stop", "cut")  # at a process
STORMS: Final = (
    "lossy",
    "doubled",
    "slow",
    "stuck_reads",
    "flips",
    "model",
    "replayed_acks",
    "flush",
    "lost_keys",
    "disk",
    "bit_rot",
)
REPLAYS: Final = 8
KINDS: Final = (*STRIKES, *STORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`role` is whom a strike hits: the process in the phase where it has that role, else a random one."""

    kind: str
    role: str = ""
    phase: str | None = None  # None: at `at_ms`
    nth: int = 1
    at_ms: float = 0.0
    lasts_ms: float = 300.0


def draw(rng: random.Random, count: int, span_ms: float) -> list[Fault]:
    """`count` faults for a run whose requests come within `span_ms`."""
    faults = []
    for _ in range(count):
        kind = rng.choice(STRIKES) if rng.random() < 0.6 else rng.choice(STORMS)
        phase = rng.choice(PHASES) if rng.random() < 0.6 else None
        faults.append(
            Fault(
                kind=kind,
                role=rng.choice(ROLES),
                phase=phase,
                nth=rng.randint(1, 4),
                at_ms=rng.uniform(0, span_ms),
                lasts_ms=rng.choice((20, 150, 400, 900, 1_600)) * rng.uniform(0.7, 1.3),
            )
        )
    return faults


class Faults:
    """Carries out a plan on a world. `make`: a fresh life of a process, by name."""

    def __init__(self, world: World, plan: list[Fault], make: Callable[[str], Process]) -> None:
        self.world, self._make = world, make
        self._waiting = [fault for fault in plan if fault.phase is not None]
        self._seen: dict[str, int] = {}
        self._over = False
        self.struck: list[tuple[str, str, str]] = []  # kind, role, phase
        for fault in plan:
            if fault.phase is None:
                world.at(fault.at_ms, None, self._strike, fault, None)
        world.phase_hooks.append(self._on_phase)

    def heal(self) -> None:
        """Phase two: everything runs, nothing is lost any more."""
        self._over = True
        world = self.world
        network: Network = world.network
        network.weather = Weather()
        network.cut.clear()
        world.stuck = world.flip = world.model_faults = world.disk_faults = 0.0
        for name, process in list(world.processes.items()):
            if not process.alive:
                self._restart(name)
            elif process.stopped:
                process.resume()
        world.note("world", "healed")

    def _on_phase(self, phase: str, process: Process, detail: str) -> None:
        if not self._waiting:
            return
        seen = self._seen[phase] = self._seen.get(phase, 0) + 1
        for fault in self._waiting:
            if fault.phase == phase and fault.nth == seen:
                self._waiting.remove(fault)
                self.world.at(self.world.now + self.world.rng.random(), None, self._strike, fault, process)
                return

    def _strike(self, fault: Fault, process: Process | None) -> None:
        if self._over:
            return
        world = self.world
        self.struck.append((fault.kind, fault.role if fault.kind in STRIKES else "", fault.phase or "any"))
        world.counts["fault:" + fault.kind] += 1
        world.note("world", "fault", f"{fault.kind} {fault.role} {fault.phase}")
        if fault.kind in STRIKES:
            victim = self._victim(fault.role, process)
            if victim is not None:
                getattr(self, "_" + fault.kind)(victim, fault.lasts_ms)
            return
        getattr(self, "_" + fault.kind)(fault.lasts_ms)

    def _victim(self, role: str, process: Process | None) -> Process | None:
        if process is not None and process.role == role and process.alive:
            return process
        able = [p for p in self.world.processes.values() if p.role == role and p.alive and not p.stopped]
        return self.world.rng.choice(able) if able else None

    def _later(self, ms: float, work: Callable[..., None], *args: Any) -> None:
        def unless_over() -> None:
            if not self._over:
                work(*args)

        self.world.at(self.world.now + ms, None, unless_over)

    # At a process.

    def _kill(self, victim: Process, lasts_ms: float) -> None:
        victim.kill()
        self.world.network.drop_links(victim)
        for transfer in list(victim.readers):
            transfer.source_died()
        self._later(lasts_ms, self._restart, victim.name)

    def _restart(self, name: str) -> None:
        if not self.world.processes[name].alive:
            life = self.world.processes[name] = self._make(name)
            self.world.note(name, "restarted", str(life.epoch))
            life.boot()

    def _stop(self, victim: Process, lasts_ms: float) -> None:
        victim.stop()
        self._later(lasts_ms, self._resume, victim)

    def _resume(self, victim: Process) -> None:
        if victim.alive and victim.stopped:
            victim.resume()

    def _cut(self, victim: Process, lasts_ms: float) -> None:
        others = [p.name for p in self.world.processes.values() if p is not victim and p.role != "client"]
        pair = frozenset((victim.name, self.world.rng.choice(others)))
        self.world.network.cut[pair] = self.world.now + lasts_ms

    # Everywhere.

    def _weather(self, lasts_ms: float, **worse: float) -> None:
        weather: Weather = self.world.network.weather
        for name, value in worse.items():
            setattr(weather, name, value)
            self._later(lasts_ms, setattr, weather, name, 0.0)

    def _lossy(self, lasts_ms: float) -> None:
        self._weather(lasts_ms, lost=0.15)

    def _doubled(self, lasts_ms: float) -> None:
        self._weather(lasts_ms, doubled=0.5)

    def _slow(self, lasts_ms: float) -> None:
        self._weather(lasts_ms, slow=0.3)

    def _stuck_reads(self, lasts_ms: float) -> None:
        self.world.stuck = 0.5
        self._later(lasts_ms, setattr, self.world, "stuck", 0.0)

    def _flips(self, lasts_ms: float) -> None:
        self.world.flip = 0.05
        self._later(lasts_ms, setattr, self.world, "flip", 0.0)

    def _model(self, lasts_ms: float) -> None:
        self.world.model_faults = 0.3
        self._later(lasts_ms, setattr, self.world, "model_faults", 0.0)

    def _disk(self, lasts_ms: float) -> None:
        self.world.disk_faults = 0.5
        self._later(lasts_ms, setattr, self.world, "disk_faults", 0.0)

    def _bit_rot(self, lasts_ms: float) -> None:
        """Some files at rest are altered."""
        for files in self.world.files.values():
            for file in files.values():
                if self.world.rng.random() < 0.5:
                    file.values = [value ^ 1 for value in file.values]

    def _replayed_acks(self, lasts_ms: float) -> None:
        """Releases from the past come again and again, some with fences that were never theirs."""
        for number in range(REPLAYS):
            self._later(lasts_ms * number / REPLAYS, self._replay)

    def _replay(self) -> None:
        rng, world = self.world.rng, self.world
        for target, method, request in world.acks[-8:]:
            process = world.processes.get(target)
            if process is None or not process.alive:
                continue
            if isinstance(request, tuple) and rng.random() < 0.7:
                request = (request[0], max(0, request[1] + rng.choice((-2, -1, 1))))
            if method == "release":
                live = [key for key in process.pools["arena"].guards if isinstance(key, str)]
                if live:
                    request = (rng.choice(live), rng.randrange(1, 6))
            if method == "release_handoff":
                live = [key for key in process.pools["rows"].guards if isinstance(key, str)]
                if live:
                    request = (rng.choice(live), rng.randrange(0, 6))
            world.network.inject(process, method, request)

    def _flush(self, lasts_ms: float) -> None:
        redis: Any = self.world.processes["redis"]
        redis.flush()

    def _lost_keys(self, lasts_ms: float) -> None:
        redis: Any = self.world.processes["redis"]
        redis.index.lose(self.world.rng)
