"""`moonrelay sim`: runs the whole cluster's cores in one thread per seed, with faults, and checks every invariant.

A violation prints its seed, the commit and the one command that runs it again. Long jobs write one line a chunk of
seeds, so that an interrupted one goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sim.bugs import BUGS
from sim.checkers import INVARIANTS
from sim.replay import positive
from sim.scenario import Outcome, Scenario, run, scenario

CHUNK = 250
FAILURES_MAX = 20


def main(argv: Sequence[str]) -> int:
    """0: no violation; 1: some."""
    options = parse(argv)
    if options.trace:
        return one(options)
    seeds = range(options.seed, options.seed + options.runs)
    began = time.perf_counter()
    done = list(chunks(seeds, options))
    total = merge(done)
    total |= {
        "commit": commit(),
        "runs": sum(part["runs"] for part in done),
        "first_seed": options.seed,
        "seconds": round(sum(part["seconds"] for part in done), 1),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "invariants": {name: total["counts"].get("check:" + name, 0) for name in INVARIANTS},
    }
    for failure in total["failures"]:
        report(failure["seed"], failure["message"], options.bug)
    summary(total)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(total, indent=1, sort_keys=True) + "\n")
    return 1 if total["num_failures"] else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moonrelay sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=positive, default=100, help="how many seeds")
    parser.add_argument("--jobs", type=positive, default=1, help="processes")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug")
    parser.add_argument("--trace", action="store_true", help="print everything that happens in the first run")
    parser.add_argument("--out", type=Path, help="write the summary here, as JSON")
    parser.add_argument("--log", type=Path, help="append finished chunks here, and skip those that are there")
    return parser.parse_args(argv)


def one(options: argparse.Namespace) -> int:
    with planted(options.bug):
        outcome = run(plan(options.seed, options.bug), keep_trace=True)
    print("\n".join(outcome.lines))
    print(f"digest {outcome.digest:08x}")
    if outcome.violation is None:
        return 0
    report(outcome.seed, outcome.message, options.bug)
    return 1


def plan(seed: int, bug: str | None) -> Scenario:
    return BUGS[bug].scenario(seed) if bug is not None else scenario(seed)


def planted(bug: str | None) -> Any:
    return BUGS[bug].patch() if bug is not None else nullcontext()


def chunks(seeds: range, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every chunk's sums: those that the log has, then the others as they are done."""
    wanted = {first: min(CHUNK, seeds.stop - first) for first in range(seeds.start, seeds.stop, CHUNK)}
    sha = commit()
    for part in logged(options.log):
        if wanted.get(part["first"]) == part["runs"] and part["commit"] == sha and part["bug"] == options.bug:
            del wanted[part["first"]]
            yield part
    tasks = [(first, count, options.bug, sha) for first, count in wanted.items()]
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
    for part in computed(tasks, options.jobs):
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(part) + "\n")
        yield part


def computed(tasks: Sequence[tuple[int, int, str | None, str]], jobs: int) -> Iterable[dict[str, Any]]:
    if jobs == 1:
        yield from map(chunk, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(chunk, tasks)


def logged(log: Path | None) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last may be torn."""
    if log is None or not log.exists():
        return
    for line in log.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def chunk(task: tuple[int, int, str | None, str]) -> dict[str, Any]:
    first, count, bug, sha = task
    gc.freeze()  # what was imported lives for ever
    gc.set_threshold(50_000, 20, 50)
    began = time.process_time()
    counts: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    with planted(bug):
        for seed in range(first, first + count):
            outcome = run(plan(seed, bug))
            add(outcome, counts, struck, failures)
    return {
        "first": first,
        "runs": count,
        "bug": bug,
        "commit": sha,
        "seconds": round(time.process_time() - began, 3),
        "counts": dict(counts),
        "struck": dict(struck),
        "num_failures": len(failures),
        "failures": failures[:FAILURES_MAX],
    }


def add(outcome: Outcome, counts: Counter[str], struck: Counter[str], failures: list[dict[str, Any]]) -> None:
    counts.update(outcome.counts)
    struck.update(" ".join(part for part in what if part) for what in outcome.struck)
    if outcome.violation is not None:
        failures.append({"seed": outcome.seed, "invariant": outcome.violation, "message": outcome.message})


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for part in parts:
        counts.update(part["counts"])
        struck.update(part["struck"])
        failures += part["failures"]
    return {
        "counts": dict(counts),
        "faults_by_kind_role_phase": dict(struck),
        "num_failures": sum(part["num_failures"] for part in parts),
        "failures": failures[:FAILURES_MAX],
    }


def report(seed: int, message: str, bug: str | None) -> None:
    more = f" --bug {bug}" if bug else ""
    print(f"VIOLATION seed {seed} at {commit()}: {message}", file=sys.stderr)
    print(f"  again: moonrelay sim --seed {seed} --runs 1{more} --trace", file=sys.stderr)


def summary(total: dict[str, Any]) -> None:
    faults = {name[6:]: count for name, count in sorted(total["counts"].items()) if name.startswith("fault:")}
    print(f"{total['runs']} runs, {total['num_failures']} violations, {total['seconds']} s of CPU")
    print("faults: " + ", ".join(f"{name} {count}" for name, count in faults.items()))
    print("checks: " + ", ".join(f"{name} {count}" for name, count in total["invariants"].items()))


def commit() -> str:
    """Of the working tree; empty outside a checkout."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
