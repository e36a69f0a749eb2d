"""How many cores a worker counts on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.worker.cores import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 6),
        ("400000 100000", 4),
        ("250000 100000", 2),  # half a core would make two threads wait for one another
        ("50000 100000", 1),
        ("900000 100000", 6),  # no more than the scheduler allows
        ("100000 0", 6),
        ("nonsense", 6),
        ("", 6),
    ],
)
def test_a_quota_counts_in_whole_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    assert usable_cores(file) == cores


def test_without_a_quota_the_scheduler_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores(tmp_path / "none") == 1
