"""The machine's ceiling, measured first in every run: a figure without it says nothing on another machine.

Run as a program it prints one JSON object for the thread count it is given, since torch fixes threads per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

READ_BYTES = 512 << 20
GEMM_SIZE = 1024


def best_seconds(run: Callable[[], object], budget_s: float = 1.0) -> float:
    """The fastest of as many runs as fit the budget: the ceiling is what the machine can do, not its mean."""
    run()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def measure(threads: int) -> dict[str, float]:
    """GB/s of reading and copying, GFLOP/s of a square GEMM in fp32 and bf16, with `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(READ_BYTES // 4)
    target = torch.empty_like(source)
    found = {
        "read_gbps": READ_BYTES / best_seconds(source.sum) / 1e9,
        "copy_gbps": 2 * READ_BYTES / best_seconds(lambda: target.copy_(source)) / 1e9,
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype), torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        seconds = best_seconds(lambda a=a, b=b: a @ b)
        found[f"gemm_{name}_gflops"] = 2 * GEMM_SIZE**3 / seconds / 1e9
    return found


def ceilings() -> dict[str, dict[str, float]]:
    """One and two threads, each in a process of its own."""
    found = {}
    for threads in (1, 2):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, __file__, str(threads)], env=environment, capture_output=True, text=True, check=True
        )
        found[f"{threads}_thread"] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
