"""`make bench-cache`: a get from the cache, by parts and whole, beside memcpy, Redis and Mooncake's store.

One run; samples of every side alternate, so that a busy moment of the machine hits all; medians and their ratios are
printed. Ours verifies every byte by checksum, the peers do not. Writes bench/results/cache.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cache_ours
import peer_llama
import peer_mooncake
import peer_redis
import uvloop
from cache_loads import LEASE_BLOCKS, LOADS, MIB, READ_SIZES

from moonrelay.valkey import start_local_valkey

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 5
UNVERIFIED_MAX, VERIFIED_MAX = 1.25, 2.0  # times memcpy, from 1 MiB on
LOOKUP_LEASE_MAX_MS = 1.0


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Microseconds, warm-up left out."""
    return {name: round(statistics.median(found[WARM_UP:]) * 1e6, 1) for name, found in samples.items()}


async def reads(ours: cache_ours.Ours, rounds: int) -> dict[str, Any]:
    """One pull by the transport alone, from another process's pool, against memcpy of the same length.

    By the transport's own clock; "awaited" adds the way from the event loop to its thread and back, which is the same
    whatever the length.
    """
    found: dict[str, Any] = {}
    async with cache_ours.source_process() as (peer, spans):
        for size in READ_SIZES:
            names = ("memcpy", "unverified", "verified", "unverified_awaited", "verified_awaited")
            samples: dict[str, list[float]] = {name: [] for name in names}
            for i in range(rounds + WARM_UP):
                span = spans[size][i % len(spans[size])]
                samples["memcpy"].append(ours.memcpy(size))
                for name in ("unverified", "verified"):
                    seconds, awaited, transport = await ours.read(peer, span, name == "verified")
                    samples[name].append(seconds)
                    samples[f"{name}_awaited"].append(awaited)
            found[str(size)] = medians(samples) | {"transport": transport}
    return found


async def lookup_and_lease(ours: cache_ours.Ours, rounds: int) -> dict[str, float]:
    root, hashes = await ours.put_long()
    samples: dict[str, list[float]] = {"lookup": [], "lease": [], "lookup_and_lease": []}
    for _ in range(rounds + WARM_UP):
        began = time.perf_counter()
        await ours.lookup(root, hashes)
        looked_up = time.perf_counter()
        await ours.lease(root, hashes)
        leased = time.perf_counter()
        samples["lookup"].append(looked_up - began)
        samples["lease"].append(leased - looked_up)
        samples["lookup_and_lease"].append(leased - began)
    return medians(samples)


async def whole(ours: cache_ours.Ours, peers: list[Any], rounds: int) -> dict[str, dict[str, float]]:
    """Every load from every side, in turns."""
    found: dict[str, dict[str, float]] = {}
    for load in LOADS:
        await ours.put(load)
        for peer in peers:
            await asyncio.to_thread(peer.put, load)
        samples: dict[str, list[float]] = {n: [] for n in ("memcpy", ours.name, *(p.name for p in peers))}
        for i in range(rounds + WARM_UP):
            samples["memcpy"].append(ours.memcpy(load.bytes))
            samples[ours.name].append(await ours.get(load, i % load.sets))
            assert i >= WARM_UP or ours.same_bytes(load)
            for peer in peers:
                samples[peer.name].append(peer.get(load, i % load.sets))
        found[load.name] = medians(samples)
    return found


def limits(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, what was found, and whether it holds."""
    found = []

    def add(what: str, value: float, limit: float) -> None:
        found.append({"what": what, "found": round(value, 3), "limit": limit, "holds": value <= limit})

    for size, times in result["reads_us"].items():
        if int(size) >= MIB:
            add(
                f"read {int(size) // MIB} MiB unverified / memcpy",
                times["unverified"] / times["memcpy"],
                UNVERIFIED_MAX,
            )
            add(f"read {int(size) // MIB} MiB verified / memcpy", times["verified"] / times["memcpy"], VERIFIED_MAX)
    add(
        f"lookup + lease of {LEASE_BLOCKS:,} blocks, ms",
        result["lease_us"]["lookup_and_lease"] / 1e3,
        LOOKUP_LEASE_MAX_MS,
    )
    for load in (load for load in LOADS if load.must_win):
        times = result["whole_us"][load.name]
        for name in times.keys() - {"memcpy", "moonrelay"}:
            add(f"get {load.name}: ours / {name}", times["moonrelay"] / times[name], 1.0)
    return found


def show(result: dict[str, Any]) -> None:
    print("\nread by the transport alone, µs (awaited: with the way from the event loop and back)")
    print(f"{'':<14}{'memcpy':>10}{'unverified':>12}{'ratio':>7}{'verified':>10}{'ratio':>7}{'awaited':>10}")
    for size, t in result["reads_us"].items():
        line = f"{int(size) // 1024:>8} KiB  {t['memcpy']:>10}"
        for name, width in (("unverified", 12), ("verified", 10)):
            line += f"{t[name]:>{width}}{t[name] / t['memcpy']:>7.2f}"
        print(f"{line}{t['verified_awaited']:>10}  {t['transport']}")
    t = result["lease_us"]
    print(f"\n{LEASE_BLOCKS:,} blocks, µs: lookup {t['lookup']}, lease {t['lease']}, both {t['lookup_and_lease']}")
    print("\nget into own memory (ours: lookup, lease, read, verify, release), µs, and ours as a part of theirs")
    for name, times in result["whole_us"].items():
        mine = times["moonrelay"]
        beside = [f"{other:>12}{us:>10}{mine / us:>7.2f}" for other, us in times.items() if other != "moonrelay"]
        print(f"{name:<14}{mine:>10}" + "".join(beside))
    copied = ", ".join(f"{name} {us}" for name, us in result["redis_copy_us"].items())
    print(f"of Redis's, the copy from its bytes object into the pool: {copied}")
    for name, reason in result["absent"].items():
        print(f"\n{name} is absent: {reason}")
    print()
    for limit in result["limits"]:
        print(f"{'holds' if limit['holds'] else 'LOST':<7}{limit['what']}: {limit['found']} (limit {limit['limit']})")


async def bench(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    valkey = start_local_valkey(scratch / "valkey")
    result: dict[str, Any] = {"absent": {}}
    peers: list[Any] = [peer_redis.RedisStore(valkey.url)]
    try:
        with cache_ours.cache_node(valkey.url, "bench", scratch / "node.log"):
            ours = cache_ours.Ours(valkey.url, "bench")
            await ours.open()
            try:
                result["reads_us"] = await reads(ours, args.rounds)
                result["lease_us"] = await lookup_and_lease(ours, args.rounds)
                try:
                    peers.append(peer_mooncake.Mooncake(peer_llama.work_folder(), scratch / "mooncake.log"))
                except peer_mooncake.Absent as reason:
                    result["absent"]["mooncake"] = str(reason)
                result["whole_us"] = await whole(ours, peers, args.rounds)
                result["redis_copy_us"] = medians(peers[0].copied)
            finally:
                await ours.close()
    finally:
        for peer in peers:
            peer.close()
        valkey.stop()
    return result


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "cache.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moonrelay-bench-") as folder:
        result = uvloop.run(bench(args, Path(folder)))  # as the workers run
    load = f"load {os.getloadavg()[0]:.1f}"
    result = {
        "commit": git("rev-parse", "HEAD"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {load}",
        "rounds": args.rounds,
        **result,
        "limits": limits(result),
    }
    show(result)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
