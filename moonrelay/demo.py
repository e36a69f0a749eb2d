"""`moonrelay demo`: a whole cluster, real requests through it, a table of what happened, nothing left running."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from moonrelay import settings as settings_module
from moonrelay.children import python_command
from moonrelay.up import ZOO, UpSettings

REQUEST_TIMEOUT_S = 60.0
SYSTEM = (
    "You are a careful Python programmer. Answer with one short function and nothing else. Use clear names, "
    "handle empty input, and never import a module that the task does not need. Keep every line under eighty "
    "characters and write a docstring of one sentence."
)
COMPLETION = 'import os\n\n\ndef read_lines(path):\n    """Return the lines of a text file as a list."""\n'
QUESTION = "Write a function `count_words(text)` that returns how many words a text has."
FOLLOW_UP = "Now write `count_lines(text)` in the same way."


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start a cluster, send real requests, print what happened, stop."""

    model: str = str(ZOO)
    aggregated: bool = False
    draft: bool = True  # with the model's own drafter, where it has one
    max_tokens: int = 160

    def __post_init__(self) -> None:
        UpSettings(model=self.model)  # the same checks, before anything starts


@dataclass
class Exchange:
    """One streamed request as its client saw it."""

    name: str
    began: float
    text: str = ""
    reasoning: str = ""
    first: float | None = None
    last: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""

    def row(self) -> list[str]:
        details = self.usage.get("prompt_tokens_details") or {}
        explained = self.usage.get("moonrelay") or {}
        tokens = self.usage.get("completion_tokens", 0)
        ttft = (self.first or self.began) - self.began
        per_token = ((self.last or 0) - (self.first or 0)) / (tokens - 1) if tokens > 1 else 0.0
        steps = explained.get("verify_steps", 0) + explained.get("plain_steps", 0)
        per_step = f"{(tokens - 1) / steps:.2f}" if steps else "none"
        served = " > ".join(str(explained[k]) for k in ("prefill", "decode") if explained.get(k))
        return [
            self.name, str(self.usage.get("prompt_tokens", "?")), str(details.get("cached_tokens", 0)), str(tokens),
            f"{ttft * 1e3:.0f} ms", f"{per_token * 1e3:.2f} ms", per_step, f"{explained.get('handoff_bytes', 0):,}",
            str(explained.get("transport") or "none"), served,
        ]  # fmt: skip


async def stream(session: aiohttp.ClientSession, name: str, url: str, body: dict[str, Any]) -> Exchange:
    """Send one streaming request, print the text as it comes, and return what was seen."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    exchange = Exchange(name, time.perf_counter())
    print(f"\n--- {name}")
    async with session.post(url, json=body, headers={"x-moonrelay-explain": "1"}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{name}: HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{name}: {event['error']}")
            exchange.usage = event.get("usage") or exchange.usage
            for choice in event["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                exchange.finish_reason = choice.get("finish_reason") or exchange.finish_reason
                thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
                if thought or said:
                    exchange.last = time.perf_counter()
                    exchange.first = exchange.first or exchange.last
                    answers_now = bool(said and exchange.reasoning and not exchange.text)
                    print(thought + ("\n\n" if answers_now else "") + said, end="", flush=True)
                exchange.text += said
                exchange.reasoning += thought
    print(f"\n[{exchange.finish_reason}]")
    return exchange


async def converse(http: str, max_tokens: int) -> list[Exchange]:
    """A completion, then a chat of two turns; the second turn's prompt extends the first's."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{http}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        done = [await stream(session, "completion", f"{http}/v1/completions", {**body, "prompt": COMPLETION})]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
        ]
        chat = f"{http}/v1/chat/completions"
        first = await stream(session, "chat, turn 1", chat, {**body, "messages": messages})
        reply = {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning}
        messages += [reply, {"role": "user", "content": FOLLOW_UP}]
        second = await stream(session, "chat, turn 2", chat, {**body, "messages": messages})
        return [*done, first, second]


def read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


async def run(settings: DemoSettings) -> int:
    """Start `moonrelay up` as its own process, talk to it, stop it; returns the exit status."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="moonrelay-demo-") as scratch:
        ready_file = Path(scratch, "ready.json")
        args = ["up", "--port", "0", "--ready-file", str(ready_file), "--model", settings.model]
        args += ["--aggregated"] if settings.aggregated else []
        args += [] if settings.draft else ["--no-draft"]
        cluster = await asyncio.create_subprocess_exec(*python_command(*args))
        try:
            while (ready := read_json(ready_file)) is None:
                if cluster.returncode is not None:
                    print("the cluster did not start; see above", file=sys.stderr)
                    return 1
                await asyncio.sleep(0.05)
            started = time.perf_counter()
            exchanges = await converse(ready["http"].rstrip("/"), settings.max_tokens)
            asked = time.perf_counter()
        finally:
            if cluster.returncode is None:
                cluster.send_signal(signal.SIGINT)
            await cluster.wait()
    head = [
        "request",
        "prompt",
        "cached",
        "generated",
        "TTFT",
        "per token",
        "tokens per step",
        "handed over (B)",
        "transport",
        "served by",
    ]
    print("\n" + table([head, *(e.row() for e in exchanges)]))
    ended = time.perf_counter()
    print(f"\nstart {started - began:.1f} s, requests {asked - started:.1f} s, stop {ended - asked:.1f} s")
    return 0


def main(argv: Sequence[str]) -> int:
    settings = settings_module.load(DemoSettings, argv, prog="moonrelay demo")
    try:
        return asyncio.run(run(settings))
    except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        print(f"moonrelay demo: {error}", file=sys.stderr)
        return 1
