"""`make bench [PEER=llama.cpp]`: the ceiling, then every figure of both models, the peer beside us in the same run.

Samples of us and of the peer alternate, so that a busy minute of the machine hits both; medians are printed, and
the ratio is what counts. Writes bench/results/bench.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ceiling
import checkpoint
import client
import handoff
import peer_llama

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "model" / "zoo" / "k3_nano"
READY_S = 300.0
DECODE_TOKENS = 128


async def start(command: list[str], ready: Callable[[], Awaitable[bool]], log: Path, **env: str) -> Any:
    """Start a server and wait until it answers; returns (process, seconds)."""
    began = time.perf_counter()
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env={**os.environ, **env})
    while not await ready():
        if process.returncode is not None or time.perf_counter() - began > READY_S:
            raise RuntimeError(f"{command[0]} did not start; see {log}")
        await asyncio.sleep(0.05)
    return process, time.perf_counter() - began


def memory_mib(pids: list[int]) -> float:
    """Proportional set size of the processes and their children: shared pages counted once."""
    total, todo, seen = 0, list(pids), set()
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
            todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return total / 1024


async def ours(directory: Path, scratch: Path, threads: int, vocab: int) -> Any:
    ready_file = scratch / "ready.json"

    async def ready() -> bool:
        return ready_file.exists()

    command = [sys.executable, "-m", "moonrelay", "up", "--port", "0", "--ready-file", str(ready_file)]
    command += ["--model", str(directory), "--threads", str(threads)]
    process, seconds = await start(command, ready, scratch / "moonrelay.log")
    info = json.loads(ready_file.read_text())
    async with client.session() as session, session.get(f"{info['http']}/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]
    server = client.Server("moonrelay", info["http"].rstrip("/"), model, vocab, {"ignore_eos": True})
    return process, seconds, server


async def peer(directory: Path, scratch: Path, vocab: int) -> Any:
    work = peer_llama.work_folder()
    peer_llama.build(work)
    gguf = peer_llama.convert(work, directory)
    port = 18000 + os.getpid() % 10000
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        try:
            async with client.session() as session, session.get(f"{url}/health") as answer:
                return answer.status == 200
        except OSError:
            return False

    command = peer_llama.server_command(work, gguf, port, 32768)
    process, seconds = await start(command, ready, scratch / "llama.log")
    return process, seconds, client.Server("llama.cpp", url, directory.name, vocab, {"ignore_eos": True})


async def sample_all(servers: list[client.Server], rounds: int) -> dict[str, dict[str, Any]]:
    """Every figure of every server, alternating; {server: {figure: median}}."""
    figures: dict[str, dict[str, list[float]]] = {s.name: {} for s in servers}
    explained: dict[str, Any] = {}
    async with client.session() as session:
        measures = [client.Measure(s, session, 1000 * i) for i, s in enumerate(servers)]
        for measure in measures:
            await measure.decode(1, 16)  # warm
        for _ in range(rounds):
            for measure in measures:
                found = figures[measure.server.name]
                for length in (512, 2048):
                    found.setdefault(f"prefill_{length}_tps", []).append(await measure.prefill(length))
                for streams in (1, 4, 8):
                    rate, end_s = await measure.decode(streams, DECODE_TOKENS)
                    found.setdefault(f"decode_{streams}_tps", []).append(rate)
                    found.setdefault(f"decode_{streams}_end_ms", []).append(end_s * 1e3)
                cold, warm = await measure.cached(2048, 1984)
                found.setdefault("ttft_2048_cold_ms", []).append(cold.ttft_s * 1e3)
                found.setdefault("ttft_2048_cached_ms", []).append(warm.ttft_s * 1e3)
                details = warm.usage.get("prompt_tokens_details") or {}
                found.setdefault("cached_tokens", []).append(details.get("cached_tokens") or 0)
                explained[measure.server.name] = cold.usage.get("moonrelay")
    medians = {n: {k: round(statistics.median(v), 2) for k, v in f.items()} for n, f in figures.items()}
    for name, explanation in explained.items():
        medians[name]["handoff"] = explanation
    return medians


async def bench_model(name: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    vocab = config["text_config"]["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="moonrelay-bench-") as folder:
        scratch = Path(folder)
        running = [await ours(directory, scratch, args.threads, vocab)]
        try:
            if args.peer:
                running.append(await peer(directory, scratch, vocab))
            rest = {server.name: memory_mib([process.pid]) for process, _, server in running}
            found = await sample_all([server for _, _, server in running], args.rounds)
            for process, seconds, server in running:
                found[server.name]["startup_s"] = round(seconds, 2)
                found[server.name]["memory_rest_mib"] = round(rest[server.name])
                found[server.name]["memory_after_mib"] = round(memory_mib([process.pid]))
        finally:
            for process, _, _ in running:
                process.send_signal(signal.SIGINT)
                await process.wait()
    show(name, found)
    return found


def show(name: str, found: dict[str, dict[str, Any]]) -> None:
    mine = found["moonrelay"]
    theirs = found.get("llama.cpp")
    print(f"\n{name:<24}{'moonrelay':>12}" + (f"{'llama.cpp':>12}{'ratio':>8}" if theirs else ""))
    for key, value in mine.items():
        if isinstance(value, dict) or value is None:
            print(f"{key}: {json.dumps(value)}")
            continue
        line = f"{key:<24}{value:>12}"
        if theirs and theirs.get(key):
            line += f"{theirs[key]:>12}{value / theirs[key]:>8.2f}"
        print(line)
    print(f"{'cached / cold TTFT':<24}{mine['ttft_2048_cached_ms'] / mine['ttft_2048_cold_ms']:>12.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["llama.cpp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="per worker; prefill and decode take turns here")
    parser.add_argument("--model", choices=["k3-nano", "k3-180m"], action="append")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "threads_per_worker": args.threads,
        "rounds": args.rounds,
        "ceiling": ceiling.ceilings(),
    }
    print("ceiling")
    for threads, values in result["ceiling"].items():
        print(f"  {threads}: " + ", ".join(f"{k} {v:.1f}" for k, v in values.items()))
    result["handoff_16mib"] = handoff.measure()
    print("handoff of 16 MiB: " + json.dumps(result["handoff_16mib"]))
    models = {"k3-nano": NANO, "k3-180m": checkpoint.make(peer_llama.work_folder() / "k3_180m")}
    for name in args.model or models:
        result[name] = asyncio.run(bench_model(name, models[name], args))
    out = ROOT / "bench" / "results" / ("bench-partial.json" if args.model else "bench.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
