"""The whole system over HTTP: the same answers with a drafter and without, tokens a step by path, decode speed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import client
from draft_prompts import Prompt

READY_S = 120.0
AT_ONCE = 8
MODEL = "k3-nano"
SPEED_PROMPT_TOKENS = 64  # of each prompt, where decoding is timed: others' prompts are in its way


@dataclass(frozen=True)
class Answer:
    """`steps`: decode steps, as the usage says, with a draft or without; 0 where there is no drafter."""

    ids: tuple[int, ...]
    cached: int
    drafter_cold: int
    steps: int


@asynccontextmanager
async def cluster(scratch: Path, name: str, *flags: str, **settings: str) -> AsyncIterator[str]:
    """`moonrelay up` with `flags`, and environment `settings` for every role; yields the router's URL."""
    folder = scratch / name
    folder.mkdir()
    ready, log = folder / "ready.json", folder / "up.log"
    command = [sys.executable, "-m", "moonrelay", "up", "--port", "0", "--ready-file", str(ready), *flags]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, env={**os.environ, **settings}
        )
    try:
        began = time.monotonic()
        while not ready.exists():
            if process.returncode is not None or time.monotonic() - began > READY_S:
                raise RuntimeError(f"the cluster {name} did not start: {log.read_text()[-2000:]}")
            await asyncio.sleep(0.05)
        yield json.loads(ready.read_text())["http"].rstrip("/")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def ask(session: aiohttp.ClientSession, url: str, ids: Sequence[int], tokens: int, **more: Any) -> Answer:
    """One greedy completion of exactly `tokens`, unless `more` says otherwise. Raises: RuntimeError."""
    body = {
        "model": MODEL, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    headers = {"x-moonrelay-explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {answer}")
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    return Answer(
        tuple(answer["choices"][0]["token_ids"]),
        details["cached_tokens"],
        details.get("drafter_cold") or 0,
        usage["moonrelay"]["verify_steps"] + usage["moonrelay"]["plain_steps"],
    )


async def ask_all(url: str, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Every prompt's greedy answer, AT_ONCE under way at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Answer:
        async with places:
            return await ask(session, url, prompt.ids, tokens)

    async with client.session() as session:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def differing(want: Sequence[Answer], got: Sequence[Answer]) -> list[int]:
    """Prompts whose outputs are not the same, token for token."""
    return [index for index, (a, b) in enumerate(zip(want, got, strict=True)) if a.ids != b.ids]


def by_path(prompts: Sequence[Prompt], answers: Sequence[Answer], only_hits: bool) -> dict[str, Any]:
    """Tokens a decode step by kind of prompt, loops included: the answers are the same ones on every path.

    `only_hits` leaves out prompts that are too short for a hit.
    """
    tokens: dict[str, int] = {}
    steps: dict[str, int] = {}
    cold = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer.steps or (only_hits and not answer.cached):
            continue
        cold += answer.drafter_cold
        tokens[prompt.kind] = tokens.get(prompt.kind, 0) + len(answer.ids) - 1  # the first is prefill's
        steps[prompt.kind] = steps.get(prompt.kind, 0) + answer.steps
    return {kind: round(tokens[kind] / steps[kind], 4) for kind in tokens} | {
        "prompts": sum(a.steps > 0 and (not only_hits or a.cached > 0) for a in answers),
        "cached_tokens": sum(answer.cached for answer in answers),
        "drafter_cold_tokens": cold,
    }


@dataclass(frozen=True)
class Load:
    """What one speed sample sends: `streams` at a time, `rounds` times one after another."""

    name: str
    streams: int
    temperature: float
    rounds: int
    seed: int | None = None  # named by the client: what is drawn is then what would be drawn without drafts


LOADS = (
    Load("1 stream, temperature 0", 1, 0.0, 4),
    Load("8 streams, temperature 0", 8, 0.0, 1),
    Load("1 stream, temperature 1", 1, 1.0, 4),
    Load("8 streams, temperature 1", 8, 1.0, 1),
    Load("1 stream, temperature 1, seeded", 1, 1.0, 4, seed=7),
    Load("8 streams, temperature 1, seeded", 8, 1.0, 1, seed=7),
)


async def rate(session: aiohttp.ClientSession, url: str, prompts: Sequence[Prompt], tokens: int, load: Load) -> float:
    """Generated tokens a second, from each group's first to its last token."""
    total, seconds = 0, 0.0
    extra = {"ignore_eos": True, "temperature": load.temperature}
    if load.seed is not None:
        extra["seed"] = load.seed
    server = client.Server("moonrelay", url, MODEL, 0, extra)
    for start in range(0, len(prompts), load.streams):
        group = prompts[start : start + load.streams]
        timings = await asyncio.gather(
            *(client.stream(session, server, list(p.ids[:SPEED_PROMPT_TOKENS]), tokens) for p in group)
        )
        total += sum(timing.tokens - 1 for timing in timings)
        seconds += max(t.last_s for t in timings) - min(t.ttft_s for t in timings)
    return total / seconds


class Speed:
    """Rates of every load on every cluster, of as many starts and rounds as were run; all are asked the same.

    Two clusters of the same kind differ by up to a tenth for as long as they live, and a round by a fifth: so several
    of each kind are started, and a round's ratio is one of many.
    """

    def __init__(self, names: Sequence[str], prompts: Sequence[Prompt], tokens: int) -> None:
        self._prompts, self._tokens, self._round = prompts, tokens, 0
        self._samples: dict[str, dict[str, list[float]]] = {load.name: {name: [] for name in names} for load in LOADS}
        self._starts: list[int] = []  # after how many rounds each ended

    async def measure(self, urls: dict[str, str], rounds: int) -> None:
        """So many rounds on clusters that were just started, after one that does not count. The order of the clusters
        is reversed every second time; each round takes other prompts, code and prose alike."""
        async with client.session() as session:
            for number in range(rounds + 1):
                for load in LOADS:
                    count = load.streams * load.rounds
                    first = self._round * count % max(len(self._prompts) - count, 1)
                    chosen = self._prompts[first : first + count]
                    for name in sorted(urls, reverse=bool(self._round % 2)):
                        found = await rate(session, urls[name], chosen, self._tokens, load)
                        if number:
                            self._samples[load.name][name].append(found)
                self._round += 1
        self._starts.append(rounds + sum(self._starts[-1:]))

    def summary(self) -> dict[str, Any]:
        return {load: summary(found, self._starts) for load, found in self._samples.items()}


def summary(found: dict[str, list[float]], starts: Sequence[int]) -> dict[str, Any]:
    """Medians of tokens a second, and the median over rounds of each cluster's ratio to the undrafted one, of all
    rounds and of each start's, which end at `starts`."""
    result: dict[str, Any] = {f"{name}_tps": round(statistics.median(rates), 1) for name, rates in found.items()}
    for name, rates in found.items():
        if name != "undrafted":
            ratios = [a / b for a, b in zip(rates, found["undrafted"], strict=True)]
            each = [ratios[first:end] for first, end in zip([0, *starts], starts, strict=False)]
            result[f"{name}_ratio"] = round(statistics.median(ratios), 3)
            result[f"{name}_ratios_by_start"] = [round(statistics.median(own), 3) for own in each]
            result[f"{name}_ratios"] = [round(ratio, 3) for ratio in sorted(ratios)]
    return result
