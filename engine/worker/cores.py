"""How many cores this process may use: what the scheduler lets it run on, and a container's quota."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the own cgroup (version 2): "microseconds period", or "max period"


def usable_cores(quota: Path = QUOTA) -> int:
    """Whole cores, at least 1. A quota that cannot be read is none."""
    allowed = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        if share != "max":
            allowed = min(allowed, int(share) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return max(1, allowed)
