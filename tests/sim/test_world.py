"""The simulator's own promises, a sample of runs that rotates with the commit, and every planted bug found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.bugs import BUGS
from sim.checkers import INVARIANTS, Checkers
from sim.clients import Clients, Conversation, TurnPlan
from sim.faults import KINDS, PHASES, ROLES, STORMS, STRIKES, Fault
from sim.network import Network
from sim.router import Ask, RequestDeadline
from sim.scenario import Outcome, run, scenario, struck_by
from sim.world import Process, Steps, Violation, World

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 70
pytestmark = pytest.mark.sim


def commit() -> int:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(found.stdout.strip()[:8] or "0", 16)


def told(outcome: Outcome) -> str:
    return f"{outcome.message}\nagain: moonrelay sim --seed {outcome.seed} --runs 1 --trace"


def test_a_sample_of_runs_breaks_no_invariant() -> None:
    first = commit() % 1_000_000
    counts: Counter[str] = Counter()
    for seed in range(first, first + SAMPLE):
        outcome = run(scenario(seed))
        assert outcome.violation is None, told(outcome)
        counts += outcome.counts
    assert not [name for name in INVARIANTS if not counts["check:" + name]]
    assert counts["answered"] > SAMPLE and counts["cached_tokens"] and counts["evicted"] and counts["device_hits"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_run_for_every_fault_in_every_phase(kind: str) -> None:
    """A strike hits each role in each phase, a storm begins in each."""
    seed = commit() % 1_000_000
    struck: set[tuple[str, str, str]] = set()
    for phase in PHASES:
        for role in ROLES if kind in STRIKES else ("",):
            seed += 1
            outcome = run(struck_by(seed, Fault(kind=kind, role=role, phase=phase, nth=1 + seed % 2, lasts_ms=300)))
            assert outcome.violation is None, f"{kind} {role} in {phase}: {told(outcome)}"
            struck.update(outcome.struck)
    assert len(struck) > len(PHASES) // 2, "most phases were reached"


class SlowRouter(Process):
    """Gives up at every request's deadline, by its own clock."""

    role = "router"

    def rpc_serve(self, ask: Ask, emit: Callable[[Any], None]) -> Steps:
        yield ask.deadline_ms
        raise RequestDeadline("the request's deadline passed")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_deadline_is_counted_from_when_a_stopped_router_goes_on(stopped: bool) -> None:
    """Until then nobody has the request; a router that runs all the time has no such excuse."""
    world = World(0)
    Network(world)
    Checkers(world)
    router, stop_ms = SlowRouter(world, "router0"), 1_000.0
    turn = TurnPlan(ids=(1, 2, 3), max_tokens=1, stops=False, pause_ms=0)
    talk = Conversation(name="c", tenant="red", head=(), hinted=False, turns=(turn,), start_ms=10)
    clients = Clients(world, [talk], deadline_ms=2_000)
    world.processes |= {"router0": router, "clients": clients}
    clients.boot()
    if stopped:
        router.stop()
        world.run(stop_ms)
        router.resume()
        world.run(stop_ms + 2_200)
        assert clients.failed == 1 and world.counts["check:deadline"] == 1
    else:
        router.clock_rate = 0.5
        with pytest.raises(Violation, match="deadline"):
            world.run(stop_ms + 4_000)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in range(bug.seeds):
        with bug.patch():
            outcome = run(bug.scenario(seed))
        if outcome.violation is not None:
            assert outcome.violation in bug.invariants, outcome.message
            return
    pytest.fail(f"not found in {bug.seeds} runs")


def test_every_invariant_is_broken_by_some_planted_bug() -> None:
    assert {name for bug in BUGS.values() for name in bug.invariants} == INVARIANTS.keys()
    assert len(BUGS) >= 10


def test_equal_seeds_give_equal_traces_whatever_the_hash_seed() -> None:
    """In another process, where sets of strings have another order."""
    here = [run(scenario(seed), keep_trace=True) for seed in (3, 5, 5)]
    assert here[1].lines == here[2].lines and here[1].digest == here[2].digest
    assert here[0].digest != here[1].digest
    command = [sys.executable, "-m", "sim.main", "--seed", "5", "--runs", "1", "--trace"]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        assert found.stdout.rsplit("digest ", 1)[1].strip() == f"{here[1].digest:08x}"


def test_a_violation_prints_its_seed_and_the_command_that_finds_it_again() -> None:
    command = [sys.executable, "-m", "sim.main", "--seed", "0", "--runs", "2", "--bug", "last_block_not_read"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "VIOLATION seed 0" in found.stderr
    again = "moonrelay sim --seed 0 --runs 1 --bug last_block_not_read --trace"
    assert again in found.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "sim.main", *again.split()[2:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1 and "looked_up" in shown.stdout


def test_an_interrupted_job_goes_on_where_it_stopped(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out.json"
    command = [sys.executable, "-m", "sim.main", "--runs", "2", "--log", str(log), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    first = out.read_text()
    log.write_text(log.read_text() + '{"first": 250, "torn')
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "2 runs, 0 violations" in again.stdout
    assert log.read_text().count("\n") == 1, "nothing was run again"
    assert [line for line in first.splitlines() if '"runs"' in line or '"answered"' in line]
    assert set(STORMS) | set(STRIKES) == set(KINDS)
