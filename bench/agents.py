"""`make bench-agents`: agent sessions through the official client, two routers taking turns, temperature 1.

Every prompt grows by what the model said and what a tool answered, so nearly all of it was seen before. Compared with
an unlimited cache on the same block grid: the accounting keeps every prompt and answer of the run itself. Then the
time to the first token of a prompt of 4,096 tokens, cold and cached. Writes bench/results/agent-sessions.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import agents_plan
import client

from model.renderer import encode, render
from model.tokenizer import Tokenizer
from moonrelay.prefix import prefix_hashes
from tests.cluster.harness import Cluster, running_cluster

NANO = ROOT / "model" / "zoo" / "k3_nano"
BLOCK_TOKENS = 64
NUM_ROUTERS = 2
CACHE_BYTES = 2 << 30  # the node's memory: more than all sessions together
LONG_PROMPT, VOCAB = 4_096, 6_400
LIMITS = {"of_an_unlimited_cache": 0.97, "of_earlier_turns": 0.98, "ttft_cached_of_cold": 0.1}


@dataclass
class Ledger:
    """What an unlimited cache on the same grid would have served, and what was served."""

    seen: dict[bytes, float] = field(default_factory=dict)  # since when
    prompt: int = 0
    achieved: int = 0
    possible: int = 0
    earlier: int = 0  # tokens that the session's last turn ended with
    earlier_hit: int = 0
    requests: int = 0
    by_tier: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    recalled: int = 0  # generated tokens whose ids the routers put back
    respelled: int = 0  # turns whose generated ids did not come back as they were

    def ideal(self, prompt: list[int], asked_s: float) -> int:
        """Tokens of the longest prefix on the grid known when it was asked; the last token is always computed."""
        limit = (len(prompt) - 1) // BLOCK_TOKENS
        blocks = 0
        for name in prefix_hashes(b"\0" * 16, prompt, BLOCK_TOKENS)[:limit]:
            if self.seen.get(name, asked_s) >= asked_s:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def note(
        self, asked_s: float, prompt: list[int], answer: list[int], usage: dict[str, Any], last: list[int]
    ) -> None:
        details = usage["prompt_tokens_details"]
        hit, ideal = int(details["cached_tokens"]), self.ideal(prompt, asked_s)
        self.prompt += len(prompt)
        self.achieved += hit
        self.possible += max(ideal, hit)  # another session's turn may have ended meanwhile
        self.earlier += len(last)
        self.earlier_hit += min(hit, len(last))
        self.respelled += prompt[: len(last)] != last
        self.requests += 1
        self.by_tier.update(details["cached_tokens_by_tier"])
        for lost in usage["moonrelay"]["lost"]:
            self.lost[lost["reason"]] += lost["tokens"]
        self.recalled += usage["moonrelay"]["recalled_tokens"]
        now_s = time.monotonic()
        for name in prefix_hashes(b"\0" * 16, [*prompt, *answer], BLOCK_TOKENS):
            self.seen.setdefault(name, now_s)


class Agents:
    def __init__(self, cluster: Cluster, plan: agents_plan.Plan, concurrency: int) -> None:
        self._plan, self._cluster = plan, cluster
        self._clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers={"x-moonrelay-explain": "1"})
            for url in cluster.urls
        ]
        self._places = asyncio.Semaphore(concurrency)
        lead = [{"role": "system", "content": plan.system}]
        self._messages: list[list[dict[str, Any]]] = [
            [*lead, {"role": "user", "content": session.task}] for session in plan.sessions
        ]
        self._last: list[list[int]] = [[] for _ in plan.sessions]
        self._asked = 0
        self.turns: list[int] = []  # generated tokens of each
        self.ledger = Ledger()

    async def run(self) -> None:
        """All sessions' first turns, then all their second ones: between two turns of one, the others go on."""
        for number in range(len(self._plan.sessions[0].turns)):
            await asyncio.gather(*(self._turn(session, number) for session in range(len(self._plan.sessions))))
            done = self.ledger
            print(
                f"turn {number + 1}: prompts so far {done.prompt:,} tokens, hit {done.achieved / done.prompt:.4f} of "
                f"{done.possible / done.prompt:.4f} possible",
                flush=True,
            )

    async def _turn(self, session: int, number: int) -> None:
        """Let the model speak, then give it the tool's answer.

        The small model likes to be brief: where it ends a turn below the least length, the agent asks it to go on.
        """
        turn, messages, said = self._plan.sessions[session].turns[number], self._messages[session], 0
        while said < agents_plan.GENERATED[0]:
            if said:
                self._answer(messages, {"role": "user", "content": "Go on."})
            async with self._places:
                said += await self._ask(session, turn.generated_max - said)
        self.turns.append(said)
        self._answer(messages, {"role": "tool", "content": turn.result})

    @staticmethod
    def _answer(messages: list[dict[str, Any]], answer: dict[str, Any]) -> None:
        """Calls, should the model have made any, are answered by their ids."""
        calls = [call["id"] for call in messages[-1].get("tool_calls") or ()]
        if answer["role"] == "user" and not calls:
            messages.append(answer)
        for call in calls or (["call"] if answer["role"] == "tool" else []):
            messages.append({"role": "tool", "name": "tool_0", "tool_call_id": call, "content": answer["content"]})

    async def _ask(self, session: int, tokens: int) -> int:
        """One request, by the next router; returns how many tokens it generated."""
        self._asked += 1
        asked_s = time.monotonic()
        answer = await self._clients[self._asked % len(self._clients)].chat.completions.create(
            model=self._cluster.model,
            messages=self._messages[session],  # type: ignore[arg-type]
            tools=list(self._plan.tools),  # type: ignore[arg-type]
            max_tokens=tokens,
            temperature=1.0,
            extra_body={"return_token_ids": True},
        )
        whole = answer.model_dump()
        prompt, said = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
        self.ledger.note(asked_s, prompt, said, whole["usage"], self._last[session])
        self._last[session] = [*prompt, *said]
        message = whole["choices"][0]["message"]
        kept = ("role", "content", "reasoning_content", "tool_calls")
        self._messages[session].append({key: message[key] for key in kept if message.get(key) is not None})
        return len(said)

    async def ttft(self, rounds: int) -> dict[str, float]:
        """Medians of a long prompt's first token, cold and cached, in turns."""
        found: dict[str, list[float]] = {"cold_ms": [], "cached_ms": []}
        for number in range(rounds + 1):
            ids = client.prompt_ids(LONG_PROMPT, VOCAB, 7_000 + number)
            found["cold_ms"].append((await self._first_token(ids, number))[0])
            seconds, cached = await self._first_token(ids, number + 1)
            while cached < LONG_PROMPT - 2 * BLOCK_TOKENS:  # storing runs beside the request
                seconds, cached = await self._first_token(ids, number + 1)
            found["cached_ms"].append(seconds)
        medians = {name: round(statistics.median(times[1:]) * 1e3, 1) for name, times in found.items()}
        return medians | {"ratio": round(medians["cached_ms"] / medians["cold_ms"], 4)}

    async def _first_token(self, ids: list[int], router: int) -> tuple[float, int]:
        began, first, cached = time.perf_counter(), 0.0, 0
        stream = await self._clients[router % len(self._clients)].completions.create(
            model=self._cluster.model, prompt=ids, max_tokens=2, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        async for event in stream:
            first = first or time.perf_counter() - began
            if event.usage is not None and event.usage.prompt_tokens_details is not None:  # type: ignore[attr-defined]
                cached = event.usage.prompt_tokens_details.cached_tokens or 0  # type: ignore[attr-defined]
        return first, cached

    async def close(self) -> None:
        for each in self._clients:
            await each.close()


def summary(agents: Agents, ttft: dict[str, float]) -> dict[str, Any]:
    ledger, turns = agents.ledger, agents.turns
    found = {
        "of_an_unlimited_cache": round(ledger.achieved / ledger.possible, 4),
        "of_earlier_turns": round(ledger.earlier_hit / max(1, ledger.earlier), 4),
        "ttft_cached_of_cold": ttft["ratio"],
    }
    below = {"ttft_cached_of_cold"}
    holds = {n: (v <= LIMITS[n]) if n in below else (v >= LIMITS[n]) for n, v in found.items()}
    return {
        "requests": ledger.requests,
        "prompt_tokens": ledger.prompt,
        "hit_tokens": ledger.achieved,
        "possible_hit_tokens": ledger.possible,
        "hit_rate": round(ledger.achieved / ledger.prompt, 4),
        "possible_hit_rate": round(ledger.possible / ledger.prompt, 4),
        "by_tier": dict(ledger.by_tier),
        "lost": dict(ledger.lost),
        "recalled_tokens": ledger.recalled,
        "respelled_turns": ledger.respelled,
        "generated_per_turn": {"mean": statistics.mean(turns), "min": min(turns), "max": max(turns)},
        "ttft": ttft,
        **{name: {"found": value, "limit": LIMITS[name], "holds": holds[name]} for name, value in found.items()},
    }  # fmt: skip


async def bench(cluster: Cluster, args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    def lead(system: str, tools: Any) -> int:
        request = {"messages": [{"role": "system", "content": system}], "tools": list(tools)}
        return encode(render(request), tokenizer).checkpoint_hints[0].offset

    count = lambda words: len(tokenizer.encode(words))  # noqa: E731
    agents = Agents(cluster, agents_plan.plan(args.sessions, args.turns, count, lead, args.seed), args.concurrency)
    try:
        await agents.run()
        return summary(agents, await agents.ttft(args.rounds))
    finally:
        await agents.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="of the time to first token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "agent-sessions.json")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moonrelay-agents-") as folder:
        settings = {"MOONRELAY_DRAM_BYTES": str(CACHE_BYTES)}
        with running_cluster(Path(folder), "--router", str(NUM_ROUTERS), **settings) as cluster:
            found = asyncio.run(bench(cluster, args, Tokenizer.load(NANO)))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    shape = {name: getattr(args, name) for name in ("sessions", "turns", "concurrency", "rounds", "seed")}
    load, seconds = round(os.getloadavg()[0], 1), round(time.monotonic() - began)
    result = {"commit": commit, "load": load, "seconds": seconds, **shape, **found}
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
