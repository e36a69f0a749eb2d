"""`make faults`: every role killed, stopped and restarted in every phase of a request, over NIXL and over TCP.

One cluster per transport, on which all its cases run in turn under load; a case that goes wrong does not end the run.
Writes bench/results/faults.json after every case; what the file has of the same commit and other cases is kept, so
that the whole can be run in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.faults_cases import TRANSPORTS, Case, every_case, sample
from tests.cluster.faults_matrix import Matrix, Outcome, settings
from tests.cluster.harness import Cluster, running_cluster


async def run(cluster: Cluster, transport: str, cases: list[Case], save: Any) -> list[str]:
    """Every case; returns what is still held when all is over."""
    async with Matrix(cluster).connected() as matrix:
        await matrix.learn()
        for case in cases:
            outcome = await matrix.run(case)
            save(transport, outcome)
        return await matrix.rest()


def earlier(path: Path, commit: str) -> dict[str, Any] | None:
    """What earlier parts found at this commit."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("commit") == commit else None


def named(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(record[key] for key in ("transport", "victim", "fault", "phase"))


def line(transport: str, outcome: Outcome) -> str:
    case, ends = outcome.case, ", ".join(f"{n} {end}" for end, n in outcome.ends.items())
    verdict = "; ".join(outcome.wrong) or ("ok" if outcome.reached else "ok (phase missed)")
    what = f"{transport:<5}{case.fault:<8}{case.victim:<13}{case.phase:<9}"
    return f"{what}{outcome.seconds:>6.1f} s, again after {outcome.recovered_s:>5.1f} s  {ends:<40}{verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--sample", type=int, help="one case per phase, as the suite runs them, from this seed")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case, from the K-th on")
    parser.add_argument("--keep", type=Path, help="copy the roles' logs here")
    parser.add_argument("--only", default="", help="cases whose words hold all of these, e.g. 'kill decode stream'")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "faults.json")
    args = parser.parse_args()
    wanted = args.only.split()
    chosen = every_case() if args.sample is None else sample(args.sample)
    cases = [c for c in chosen if all(any(w in word for word in (c.victim, c.fault, c.phase)) for w in wanted)]
    part, parts = map(int, args.part.split("/"))
    cases = cases[part - 1 :: parts]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = earlier(args.out, commit) or {"commit": commit, "left": {}, "cases": []}

    def save(transport: str, outcome: Outcome) -> None:
        print(line(transport, outcome), flush=True)
        record = {"transport": transport, **outcome.record()}
        result["cases"] = [case for case in result["cases"] if named(case) != named(record)] + [record]
        result["wrong"] = sum(bool(case["wrong"]) for case in result["cases"])
        result["phase_missed"] = sum(not case["reached"] for case in result["cases"])
        result["ends"] = dict(sum((Counter(case["ends"]) for case in result["cases"]), Counter()))
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    for transport in args.transport or TRANSPORTS:
        with (
            tempfile.TemporaryDirectory(prefix="moonrelay-faults-") as folder,
            running_cluster(Path(folder), **settings(transport)) as cluster,
        ):
            result["left"][transport] = asyncio.run(run(cluster, transport, cases, save))
            if args.keep:
                shutil.copytree(cluster.ready["logs"], args.keep / transport, dirs_exist_ok=True)
    shown = {key: result[key] for key in ("wrong", "phase_missed", "left", "ends")}
    print(json.dumps({"cases": len(result["cases"]), **shown}))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] or any(result["left"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
