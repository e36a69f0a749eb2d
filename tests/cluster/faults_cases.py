"""What the fault matrix runs: its cases, the suite's sample of them, and the requests that are under way."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["idle", "admitted", "prefill", "handoff", "stream", "publish"]
Fault = Literal["kill", "stop", "restart"]
PHASES: tuple[Phase, ...] = ("idle", "admitted", "prefill", "handoff", "stream", "publish")
FAULTS: tuple[Fault, ...] = ("kill", "stop", "restart")
VICTIMS = ("router-0", "prefill-0", "decode-0", "cachestore-0", "valkey")
TRANSPORTS = ("nixl", "tcp")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    victim: str
    fault: Fault
    phase: Phase


def every_case() -> list[Case]:
    """All of them; neighbours differ in the victim, so that none is struck twice in a row."""
    return [Case(victim=v, fault=f, phase=p) for p in PHASES for f in FAULTS for v in VICTIMS]


def sample(seed: int) -> list[Case]:
    """One case per phase that together hold every fault and every victim; which goes with which rotates."""
    phases = PHASES[seed % 6 :] + PHASES[: seed % 6]
    return [
        Case(victim=VICTIMS[(i + seed // 18) % 5], fault=FAULTS[(i + seed // 6) % 3], phase=phase)
        for i, phase in enumerate(phases)
    ]


@dataclass(frozen=True, slots=True)
class Body:
    """A request: its prompt's length and first id decide its ids; every second one is sampled, with a seed."""

    length: int
    new_tokens: int
    first: int
    tenant: str = ""  # empty: the case's own, in which nothing is cached

    def json(self, model: str) -> dict[str, Any]:
        ids = [300 + (self.first + 7 * j + j * j % 11) % 5000 for j in range(self.length)]
        body = {"model": model, "prompt": ids, "max_tokens": self.new_tokens, "ignore_eos": True, "stream": True}
        law = {"temperature": 0.9, "top_p": 0.9, "seed": self.first} if self.first % 2 else {"temperature": 0}
        return body | law | {"return_token_ids": True}


WARM = Body(801, 30, 22, tenant="warm")  # its prefix is in the cache: requests that fetch are among the load
LOAD = (Body(2500, 24, 1), Body(700, 60, 42), Body(200, 80, 63), Body(65, 100, 84), WARM)


@dataclass(slots=True)
class Reply:
    """What a client got: the tokens so far, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    end: str = "nothing"  # finished; an error's code; lost: the connection broke
    detail: str = ""  # how it broke
    seconds: float = 0.0
    cached_tokens: int = 0
    retries: int = 0
