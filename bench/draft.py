"""`make bench-draft`: what the drafter gives and what it costs, on held-out prompts, in one run.

The machine's ceiling; identical greedy output with and without the drafter, on every path; tokens a verify step on
code and prose, beside prompt lookup; decode speed beside no drafter; memory at Kimi-K3's sizes. Writes
bench/results/draft.json; `--quick` takes a small sample and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ceiling
import draft_cluster
import draft_memory
from draft_local import Local, acceptance
from draft_prompts import KINDS, NoHeldOut, Prompt, held_out_prompts

from model.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "model" / "zoo" / "k3_nano"
RESULT = ROOT / "bench" / "results" / "draft.json"
SEED = 0
TOKENS_PER_STEP_MIN = {"code": 3.0, "prose": 2.0}
NGRAM_RATIO_MIN = 1.3
PATH_SPREAD_MAX = 0.03
ONE_STREAM_MIN, NEVER_BELOW = 2.0, 0.97


@dataclass(frozen=True)
class Size:
    """How much is run."""

    prompts: int
    tokens: int
    acceptance_prompts: int
    cost_prompts: int
    starts: int
    rounds: int
    speed_tokens: int


FULL = Size(prompts=200, tokens=256, acceptance_prompts=200, cost_prompts=16, starts=6, rounds=4, speed_tokens=256)
QUICK = Size(prompts=16, tokens=96, acceptance_prompts=16, cost_prompts=4, starts=2, rounds=1, speed_tokens=96)


def local_figures(
    size: Size, prompts: list[Prompt], drafter_dir: Path | None, ends: frozenset[int]
) -> dict[str, Any]:
    """Acceptance with the draft length fixed and adaptive, the peer beside; what a step's parts cost."""
    local = Local(NANO, drafter_dir)
    drafter = local.drafters.get("drafter")
    length = drafter.block_len if drafter is not None else 7
    names = [name for name in ("drafter", "ngram") if name in local.drafters]
    chosen = prompts[: size.acceptance_prompts]
    found: dict[str, Any] = {"draft_length": length, "fixed": {}, "adaptive": {}, "costs": {}}
    for temperature in (0.0, 1.0):
        for name in [*names, *(["network"] if temperature == 0.0 and "network" in local.drafters else [])]:
            outputs, _ = local.run(name, chosen, tokens=size.tokens, temperature=temperature, length=length)
            found["fixed"].setdefault(name, {})[f"temperature {temperature:g}"] = acceptance(outputs, ends)
    for temperature in (0.0, 1.0):
        for streams in (1, 8):
            what = f"{streams} stream{'s' * (streams > 1)}, temperature {temperature:g}"
            chosen = prompts[: size.cost_prompts]
            for name in [*names[:1], "none"]:
                outputs, costs = local.run(
                    name, chosen, tokens=size.tokens, temperature=temperature, length=length, adaptive=True,
                    at_once=streams,
                )  # fmt: skip
                found["costs"].setdefault(what, {})[name] = costs.summary()
                if name != "none":
                    found["adaptive"][what] = acceptance(outputs, ends)
    return found


async def system_figures(size: Size, prompts: list[Prompt], scratch: Path, length: int) -> dict[str, Any]:
    """Identity and tokens a step on each path."""
    fixed = {"MOONRELAY_DRAFT_ADAPTIVE": "false", "MOONRELAY_DRAFT_LEN_MAX": str(length)}
    found: dict[str, Any] = {"differing": {}, "first_differing": {}, "paths": {}}
    async with draft_cluster.cluster(scratch, "undrafted", "--no-draft") as undrafted:
        want = await draft_cluster.ask_all(undrafted, prompts, size.tokens)

        def compare(name: str, got: list[draft_cluster.Answer]) -> None:
            different = draft_cluster.differing(want, got)
            found["differing"][name] = len(different)
            found["first_differing"][name] = [prompts[i].source for i in different[:3]]

        for path, flags in (("aggregated", ["--aggregated"]), ("disaggregated", [])):
            async with draft_cluster.cluster(scratch, path, *flags, **fixed) as url:
                for temper in ("cold", "cached"):
                    got = await draft_cluster.ask_all(url, prompts, size.tokens)
                    compare(f"{path}, {temper}", got)
                    found["paths"][f"{path}, {temper}"] = draft_cluster.by_path(prompts, got, temper == "cached")
        async with draft_cluster.cluster(scratch, "drafted") as drafted:
            for temper in ("cold", "cached"):
                got = await draft_cluster.ask_all(drafted, prompts, size.tokens)
                compare(f"disaggregated, adaptive, {temper}", got)
    return found


async def speed_figures(size: Size, prompts: list[Prompt], scratch: Path) -> dict[str, Any]:
    """Decode speed with the drafter beside without, on pairs of clusters that are started in turns."""
    kinds = {"undrafted": ["--no-draft"], "drafted": []}
    speed = draft_cluster.Speed(list(kinds), prompts, size.speed_tokens)
    for start in range(size.starts):
        urls: dict[str, str] = {}
        async with contextlib.AsyncExitStack() as running:
            for name in sorted(kinds, reverse=bool(start % 2)):
                made = draft_cluster.cluster(scratch, f"{name}-{start}", *kinds[name])
                urls[name] = await running.enter_async_context(made)
            await speed.measure(urls, size.rounds)
    return speed.summary()


def limits(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, what was found, and whether it holds."""
    found: list[dict[str, Any]] = []

    def add(what: str, value: float, limit: float, *, least: bool = True) -> None:
        holds = value >= limit if least else value <= limit
        found.append({"what": what, "found": round(value, 3), "limit": limit, "holds": holds})

    system, fixed = result["system"], result["local"]["fixed"]
    for path, count in system["differing"].items():
        add(f"outputs that differ, {path}", count, 0, least=False)
    for heat in ("temperature 0", "temperature 1"):
        for kind in KINDS:
            mine, peer = (fixed[name][heat][kind]["tokens_per_step"] for name in ("drafter", "ngram"))
            add(f"tokens a step, {kind}, {heat}", mine, TOKENS_PER_STEP_MIN[kind])
            add(f"times prompt lookup, {kind}, {heat}", mine / peer, NGRAM_RATIO_MIN)
    cold = system["paths"]["aggregated, cold"]
    for path, other in system["paths"].items():
        if other is not cold:
            for kind in KINDS:
                spread = abs(other[kind] / cold[kind] - 1)
                add(f"tokens a step, {kind}, {path}: off the cold one by", spread, PATH_SPREAD_MAX, least=False)
    for load in draft_cluster.LOADS:
        limit = ONE_STREAM_MIN if load.streams == 1 and load.temperature == 0 else NEVER_BELOW
        add(f"speed, {load.name}, times undrafted", system["speed"][load.name]["drafted_ratio"], limit)
    return found


def show(result: dict[str, Any]) -> None:
    local, system = result["local"], result["system"]
    print(f"\ntokens a verify step outside loops, {local['draft_length']} drafted at every step")
    print(f"{'':<34}{'code':>8}{'prose':>8}{'own text':>18}{'looped steps':>18}")
    rows = [(f"{name}, {heat}", kinds) for name, heats in local["fixed"].items() for heat, kinds in heats.items()]
    rows += [(f"adaptive, {what}", kinds) for what, kinds in local["adaptive"].items()]
    for what, kinds in rows:
        line = f"{what:<34}" + "".join(f"{kinds[kind]['tokens_per_step']:>8.2f}" for kind in KINDS)
        line += "  " + "".join(f"{kinds[kind]['tokens_per_step_in_own_text'] or 0:>8.2f}" for kind in KINDS)
        print(line + "  " + "".join(f"{kinds[kind]['looped_share']:>8.0%}" for kind in KINDS))
    print("\na step's parts, ms (medians; in this process, with as many threads as a worker takes)")
    for what, sides in local["costs"].items():
        for name, steps in sides.items():
            for kind, parts in steps.items():
                shown = ", ".join(f"{part} {value}" for part, value in parts.items())
                print(f"  {what}, {name}, {kind}: {shown}")
    print("\ntokens a step by path, loops included, over HTTP")
    for path, row in system["paths"].items():
        print(f"  {path:<24}" + ", ".join(f"{name} {value}" for name, value in row.items()))
    print("\ndecode over HTTP, tokens a second")
    for load, row in system["speed"].items():
        shown = {name: value for name, value in row.items() if not name.endswith("ratios")}
        print(f"  {load:<34}" + ", ".join(f"{name} {value}" for name, value in shown.items()))
    draft_memory.show(result["k3_memory"])
    print()
    for limit in result["limits"]:
        print(f"{'holds' if limit['holds'] else 'LOST':<7}{limit['what']}: {limit['found']} (limit {limit['limit']})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--drafter", type=Path, default=NANO / "drafter")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    began = time.monotonic()
    tokenizer = Tokenizer.load(NANO)
    try:
        prompts = held_out_prompts(tokenizer, size.prompts, SEED)
    except NoHeldOut as reason:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    result: dict[str, Any] = {"commit": commit, "machine": machine, "seed": SEED, **vars(size)}
    result["ceiling"] = ceiling.ceilings()
    print("ceiling")
    for threads, values in result["ceiling"].items():
        print(f"  {threads}: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()))
    result["k3_memory"] = draft_memory.verification()
    ends = frozenset((tokenizer.eos, tokenizer.end_of_msg))
    result["local"] = local_figures(size, prompts, args.drafter, ends)
    with tempfile.TemporaryDirectory(prefix="moonrelay-bench-") as folder:
        length = result["local"]["draft_length"]
        result["system"] = asyncio.run(system_figures(size, prompts, Path(folder), length))
        result["system"]["speed"] = asyncio.run(speed_figures(size, prompts, Path(folder)))
    result["seconds"] = round(time.monotonic() - began)
    result["limits"] = limits(result)
    if not args.quick:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
