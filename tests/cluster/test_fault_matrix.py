"""One case per phase of the fault matrix, with every fault and every role among them; which ones rotates by commit.

`make faults` runs them all, over both transports.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faults_cases import TRANSPORTS, Case, sample
from tests.cluster.faults_matrix import Matrix, Outcome, settings
from tests.cluster.harness import running_cluster

pytestmark = pytest.mark.cluster


def commit_seed() -> int:
    """Changes with the commit; 0 outside a checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return int(done.stdout.strip() or "0", 16)


SEED = commit_seed()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with running_cluster(tmp_path_factory.mktemp("faults"), **settings(TRANSPORTS[SEED % 2])) as cluster:
        made = Matrix(cluster)
        asyncio.run(learn(made))
        yield made


async def learn(matrix: Matrix) -> None:
    async with matrix.connected():
        await matrix.learn()


@pytest.mark.parametrize("case", sample(SEED), ids=lambda c: f"{c.phase}-{c.fault}-{c.victim}")
def test_a_fault_costs_hits_and_refusals_and_nothing_else(matrix: Matrix, case: Case) -> None:
    async def run() -> Outcome:
        async with matrix.connected():
            return await matrix.run(case)

    outcome = asyncio.run(run())
    assert not outcome.wrong, outcome
    assert outcome.reached, f"the phase was over before the fault struck: {outcome}"


def test_the_sample_holds_every_phase_and_fault_and_role() -> None:
    for seed in range(90):
        cases = sample(seed)
        assert {c.phase for c in cases} == {"idle", "admitted", "prefill", "handoff", "stream", "publish"}
        assert {c.fault for c in cases} == {"kill", "stop", "restart"}
        assert len({c.victim for c in cases}) == 5
