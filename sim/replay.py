"""`moonrelay replay TRACE --budget-tb 1`: what share of a trace's prompt tokens a cache node of that size would give.

The first row of each budget runs the real cores whole; the rows beside it, which share planner and retention, show
what other policies, row and snapshot formats would give. The last line of `--json` is one object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from moonrelay.errors import SettingsError
from sim.replay_books import Books
from sim.replay_bounds import foresight_tokens, ideal_tokens
from sim.replay_cores import Cache, Places, Policy, Sizes
from sim.replay_plot import bars, svg
from sim.traces import Request, read, tool_loops

# Kimi-K3: 24 MLA layers of 576 values a token; 69 KDA layers of 96 heads of 128 x 128 in fp32 and three conv
# histories of 3 x 12,288 in bf16. The drafter's rows: 5 layers of 576 values.
ROW_BYTES: Final = 24 * 576 * 2
SNAPSHOT_BYTES: Final = 69 * (96 * 128 * 128 * 4 + 3 * 36_864 * 2)
BF16_SNAPSHOT_BYTES: Final = 69 * (96 * 128 * 128 * 2 + 3 * 36_864 * 2)
DRAFTER_ROW_BYTES: Final = 5 * 576 * 2
BLOCK_TOKENS: Final = 512
TB: Final = 10**12
GENERATED: Final = "tool-loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One row to be computed."""

    name: str
    policy: Policy
    places: Places
    sizes: Sizes
    whole: bool = False  # all real cores, not planner and retention alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one budget. `cores`: `whole`, or `books` for planner and retention alone."""

    name: str
    policy: str
    places: str
    budget_tb: float
    row_bytes: int
    snapshot_bytes: int
    cores: str
    token_hit_rate: float
    hit_tokens: int
    snapshots_stored: int
    seconds: float


def main(argv: Sequence[str]) -> int:
    """0: done. Raises: SettingsError for a trace or an option that cannot be used."""
    options = parse(argv)
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise SettingsError(f"--plot: expected a file in a folder that is there, found {options.plot}")
    sizes = Sizes(row_bytes=ROW_BYTES, snapshot_bytes=SNAPSHOT_BYTES, block_tokens=options.block_tokens)
    requests = load(options.trace, options.block_tokens)
    # What a run allocates lives to its end or is in no cycle; looking for cycles costs a third of the time.
    gc.disable()
    total = sum(request.prompt_tokens for request in requests)
    ideal = ideal_tokens(requests, options.block_tokens) / total
    print(f"{options.trace}: {len(requests):,} requests, {total:,} prompt tokens; unlimited cache: {ideal:.4f}")
    rows: list[Row] = []
    bounds: dict[str, float] = {}
    for budget_tb in options.budget_tb:
        bound = min(ideal, foresight_tokens(requests, sizes, round(budget_tb * TB)) / total)
        bounds[f"{budget_tb:g}"] = bound
        print(f"\n{budget_tb:g} TB; foresight cannot exceed {bound:.4f}", flush=True)
        wanted = list(plans(sizes, policies=options.policies, beside=options.beside))
        for row in compute_all(wanted, requests, budget_tb, options.jobs):
            rows.append(row)
            print(bars(row.name, row.token_hit_rate, ideal, f"{row.seconds:.1f} s"), flush=True)
    if options.plot:
        Path(options.plot).write_text(svg([asdict(row) for row in rows], bounds, ideal, str(options.trace)))
    if options.json:
        print(json.dumps(report(options, requests, rows, bounds, ideal)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moonrelay replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", help=f"a Mooncake trace (JSON lines), or {GENERATED}[:SEED]")
    parser.add_argument("--budget-tb", type=budget, nargs="+", default=[1.0], help="cache size(s) in 10^12 bytes")
    parser.add_argument("--block-tokens", type=positive, default=BLOCK_TOKENS, help="tokens of a hash id (512)")
    parser.add_argument(
        "--policies", choices=("ours", "all"), default="all", help="ours alone, or LRU baselines too (all)"
    )
    parser.add_argument(
        "--beside", action=argparse.BooleanOptionalAction, default=True, help="rows for other row and state formats"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes (one a processor)")
    parser.add_argument("--plot", metavar="FILE", help="write the rows as an SVG")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    return parser.parse_args(argv)


def budget(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if math.isfinite(value) and value > 0:
            return value
    raise argparse.ArgumentTypeError(f"expected terabytes above 0, found {text!r}")


def positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        value = int(text)
        if value > 0:
            return value
    raise argparse.ArgumentTypeError(f"expected an integer above 0, found {text!r}")


def load(trace: str, block_tokens: int) -> list[Request]:
    """The file's requests, or generated ones. Raises: SettingsError."""
    name, _, seed = trace.partition(":")
    if name != GENERATED or Path(trace).exists():
        return read(Path(trace), block_tokens)
    if seed and not seed.isdecimal():
        raise SettingsError(f"{GENERATED}:SEED: expected a number, found {seed!r}")
    return tool_loops(int(seed or 0), block_tokens)


def plans(sizes: Sizes, *, policies: str, beside: bool) -> Iterator[Plan]:
    """The rows of a budget, ours first."""
    yield Plan(name="planner, by worth", policy="worth", places="planner", sizes=sizes, whole=True)
    if policies == "all":
        yield Plan(name="end + branch, LRU", policy="lru", places="end+branch", sizes=sizes)
        yield Plan(name="end, LRU", policy="lru", places="end", sizes=sizes)
    if beside:
        half, small = sizes.row_bytes // 2, BF16_SNAPSHOT_BYTES
        drafted = sizes.row_bytes + DRAFTER_ROW_BYTES
        for name, changed in (
            ("ours, fp8 rows", replace(sizes, row_bytes=half)),
            ("ours, bf16 snapshots", replace(sizes, snapshot_bytes=small)),
            ("ours, with drafter rows", replace(sizes, row_bytes=drafted)),
        ):
            yield Plan(name=name, policy="worth", places="planner", sizes=changed)


def compute_all(plans: Sequence[Plan], requests: Sequence[Request], budget_tb: float, jobs: int) -> Iterator[Row]:
    """A row for each plan, in order. Rows do not depend on each other: `jobs` processes share them."""
    work = partial(compute, requests=requests, budget_tb=budget_tb)
    if jobs == 1:
        yield from map(work, plans)
        return
    with ProcessPoolExecutor(min(jobs, len(plans)), get_context("fork")) as processes:
        yield from processes.map(work, plans)


def compute(plan: Plan, requests: Sequence[Request], budget_tb: float) -> Row:
    """Replay the trace into an empty cache."""
    total = sum(request.prompt_tokens for request in requests)
    began = time.perf_counter()
    cache = (Cache if plan.whole else Books)(plan.sizes, round(budget_tb * TB), plan.policy, plan.places)
    hit = sum(cache.serve(request) for request in requests)
    cache.check()
    return Row(
        name=plan.name,
        policy=plan.policy,
        places=plan.places,
        budget_tb=budget_tb,
        row_bytes=plan.sizes.row_bytes,
        snapshot_bytes=plan.sizes.snapshot_bytes,
        cores="whole" if plan.whole else "books",
        token_hit_rate=hit / total,
        hit_tokens=hit,
        snapshots_stored=cache.snapshots,
        seconds=round(time.perf_counter() - began, 2),
    )


def report(
    options: argparse.Namespace,
    requests: Sequence[Request],
    rows: Sequence[Row],
    bounds: dict[str, float],
    ideal: float,
) -> dict[str, Any]:
    """`token_hit_rate`: of our policy in the first budget given."""
    first = rows[0]
    return {
        "trace": options.trace,
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "block_tokens": options.block_tokens,
        "budget_tb": first.budget_tb,
        "token_hit_rate": first.token_hit_rate,
        "ideal": ideal,
        "offline_bound": bounds[f"{first.budget_tb:g}"],
        "offline_bounds": bounds,
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
