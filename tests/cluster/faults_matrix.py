"""The fault matrix on real processes: each role killed, stopped and restarted in each phase of requests under way.

A phase is held open from outside: a process that would end it is frozen (SIGSTOP) until the fault has struck, and
what the roles' metrics show tells when the phase was reached. Nothing in the product knows of this.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.cluster.faults_cases import LOAD, SIGNALS, VICTIMS, WARM, Body, Case, Reply
from tests.cluster.harness import Cluster

# With NIXL the workers keep finished prompts too, with TCP the nodes alone: both ways to a hit are struck.
DEVICE_SHARE = {"nixl": "0.5", "tcp": "0"}
# Short clocks, so that what a fault leaves behind is over within seconds and a stopped worker is given up.
CLOCKS = {
    "MOONRELAY_HANDOFF_TIMEOUT_MS": "1000", "MOONRELAY_HANDOFF_LEASE_MS": "2000",
    "MOONRELAY_LONGEST_TRANSFER_MS": "1000", "MOONRELAY_STALL_TIMEOUT_MS": "5000", "MOONRELAY_RPC_TIMEOUT_MS": "2000",
    "MOONRELAY_RESERVATION_TTL_MS": "3000", "MOONRELAY_DRAIN_TIMEOUT_MS": "3000", "MOONRELAY_DRAIN_MS": "3000",
}  # fmt: skip
DEADLINE_MS = 30_000
PAST_DEADLINE_S = 1.5  # for the reply to arrive, on a busy machine
STOP_S = 3.0  # longer than membership keeps a silent process
REACH_S = 10.0  # for a phase to be reached
SETTLE_S = 60.0  # for everything that a fault left behind to end; a worker's start takes most of it on a busy machine
RETRIABLE = {"overloaded", "unavailable", "transfer_failed", "deadline_exceeded", "stale_epoch", "handoff_refused"}
ORPHANS_S = 3.0 + 0.010 * LOAD[0].length  # what a router that fell had reserved lasts 10 ms longer per token
RESERVED = 'moonrelay_decode_reservations{phase="reserved"}'
BOOKS = {
    "prefill-0": ("moonrelay_prefill_handoffs", "moonrelay_prefill_leaked_blocks",
                  "moonrelay_prefill_leaked_state_slots", "moonrelay_prefill_quarantined_bytes"),
    "decode-0": ("moonrelay_decode_reservations", "moonrelay_decode_leaked_blocks",
                 "moonrelay_decode_leaked_state_slots", "moonrelay_decode_quarantined_bytes"),
    "cachestore-0": ("moonrelay_cache_leases", "moonrelay_cache_hidden_entries", "moonrelay_cache_quarantined_bytes"),
    "router-0": ("moonrelay_router_in_flight_requests", "moonrelay_router_queue_requests"),
}  # fmt: skip


def settings(transport: str) -> dict[str, str]:
    """The environment of a cluster to be struck."""
    return {**CLOCKS, "MOONRELAY_TRANSPORT": transport, "MOONRELAY_DEVICE_SHARE": DEVICE_SHARE[transport]}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One case: empty `wrong` means that everything held."""

    case: Case
    reached: bool
    ends: dict[str, int]
    recovered_s: float
    seconds: float
    wrong: list[str]

    def record(self) -> dict[str, Any]:
        return {**asdict(self.case), **{k: v for k, v in asdict(self).items() if k != "case"}}


class Matrix:
    """Runs cases, one after the other, against one cluster of one process per role."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._want: dict[Body, list[int]] = {}
        self._count = 0
        self._orphans_end_s = 0.0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Matrix]:
        """A connection per request: one that a role's end broke must not be met again."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self._session:
            yield self

    async def learn(self) -> None:
        """What every request answers when nothing fails, alone."""
        for body in LOAD:
            reply = Reply()
            await self._request(body, "reference", reply)
            assert reply.end == "finished" and len(reply.tokens) == body.new_tokens, reply
            self._want[body] = reply.tokens

    async def run(self, case: Case) -> Outcome:
        began = time.monotonic()
        self._count += 1
        pids = {name: self._cluster.pid(name) for name in VICTIMS}
        log_ends = {path: path.stat().st_size for path in self._logs()}
        replies: list[Reply] = []
        load: list[asyncio.Task[None]] = []

        def start() -> None:
            for body in LOAD:
                reply = Reply()
                replies.append(reply)
                load.append(asyncio.create_task(self._request(body, f"case-{self._count}", reply)))

        with frozen() as freezer:
            reached = await self._reach(case, freezer, start, replies)
            os.kill(pids[case.victim], SIGNALS[case.fault])
            if case.victim == "router-0" and case.fault != "stop":
                self._orphans_end_s = time.monotonic() + ORPHANS_S
            freezer.thaw(but=pids[case.victim] if case.fault == "stop" else None)
            if not load:
                start()
            if case.fault == "stop":
                await asyncio.wait(load, timeout=STOP_S)
                os.kill(pids[case.victim], signal.SIGCONT)
            await asyncio.gather(*load)
        wrong = [line for body, reply in zip(LOAD, replies, strict=True) for line in self._judge(case, body, reply)]
        after = time.monotonic()
        wrong += await self._recovers(case, pids) + self._deaths(case, pids) + complaints(log_ends)
        return Outcome(
            case=case, reached=reached, ends=count(reply.end for reply in replies), wrong=wrong,
            recovered_s=round(time.monotonic() - after, 2), seconds=round(time.monotonic() - began, 2),
        )  # fmt: skip

    # -- phases ----------------------------------------------------------------------------------------------------

    async def _reach(self, case: Case, freezer: Freezer, start: Callable[[], None], replies: list[Reply]) -> bool:
        """Start the load and return in the wanted phase, what would end it being frozen; False if it was missed."""
        cluster = self._cluster
        match case.phase:
            case "idle":
                return True  # the load meets the fault
            case "admitted":
                before = (await self._metrics("decode-0"))[RESERVED]
                freezer.freeze(cluster.pid("prefill-0"))
                start()
                return await self._seen("decode-0", RESERVED, above=before)
            case "prefill":
                start()
                return await self._seen("prefill-0", "moonrelay_prefill_handoffs", "computing", "lending")
            case "handoff":
                start()
                begun = await self._seen("decode-0", "moonrelay_decode_reservations", "following", "pulling")
                freezer.freeze(cluster.pid("decode-0"))
                return begun and await self._seen("prefill-0", "moonrelay_prefill_handoffs", "published")
            case "stream":
                start()
                return await reached(lambda: sum(len(r.tokens) > 4 for r in replies) > 1)
            case "publish":
                freezer.freeze(cluster.pid("cachestore-0"))
                start()
                return await reached(lambda: sum(bool(r.tokens) for r in replies) > 1)

    async def _seen(self, role: str, name: str, *phases: str, above: float = 0.0) -> bool:
        """Wait until the gauge, of any of the phases, is higher than before."""

        async def higher() -> bool:
            with suppress(aiohttp.ClientError, TimeoutError):
                for line, value in (await self._metrics(role)).items():
                    named = line.startswith(name) and (not phases or any(f'"{p}"' in line for p in phases))
                    if named and value > above:
                        return True
            return False

        end = time.monotonic() + REACH_S
        while time.monotonic() < end:
            if await higher():
                return True
            await pause()
        return False

    async def _metrics(self, role: str) -> dict[str, float]:
        urls = {**self._cluster.ready["metrics"], "router-0": f"{self._cluster.urls[0]}/metrics"}
        async with self._session.get(urls[role], timeout=aiohttp.ClientTimeout(total=1.0)) as answer:
            assert answer.status == 200, f"{role} could not count itself: {answer.status}"
            lines = [line.rpartition(" ") for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    # -- requests --------------------------------------------------------------------------------------------------

    async def _request(self, body: Body, tenant: str, reply: Reply) -> None:
        """Stream one completion into `reply`; never raises for what a fault may do to it."""
        headers = {"x-moonrelay-tenant": body.tenant or tenant, "x-moonrelay-explain": "1",
                   "x-moonrelay-deadline-ms": str(DEADLINE_MS)}  # fmt: skip
        began = time.monotonic()
        url = f"{self._cluster.urls[0]}/v1/completions"
        timeout = aiohttp.ClientTimeout(total=DEADLINE_MS / 1e3 + 2 * PAST_DEADLINE_S)
        try:
            async with self._session.post(
                url, json=body.json(self._cluster.model), headers=headers, timeout=timeout
            ) as answer:
                if answer.status != 200:
                    reply.end = (await answer.json())["error"]["code"]
                    return
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        take(json.loads(line[6:]), reply)
                    elif line.startswith(b"data: [DONE]") and reply.end == "nothing":
                        reply.end = "finished"
        except TimeoutError:
            reply.end = "no end"
        except (aiohttp.ClientError, OSError) as error:
            reply.end, reply.detail = "lost", f": {type(error).__name__} {error}"
        finally:
            reply.seconds = time.monotonic() - began

    def _judge(self, case: Case, body: Body, reply: Reply) -> Iterator[str]:
        """What is wrong with a reply."""
        want = self._want[body]
        if reply.tokens != want[: len(reply.tokens)]:
            at = next((i for i, (a, b) in enumerate(zip(reply.tokens, want, strict=False)) if a != b), len(want))
            yield f"{body.length} tokens: wrong token at {at} after {reply.retries} retries"
        if reply.end == "finished" and len(reply.tokens) != len(want):
            yield f"{body.length} tokens: finished with {len(reply.tokens)} of {len(want)} tokens"
        if reply.seconds > DEADLINE_MS / 1e3 + PAST_DEADLINE_S:
            yield f"{body.length} tokens: ended after {reply.seconds:.1f} s, past its deadline"
        router_fell = case.victim == "router-0" and case.fault != "stop"
        if reply.end not in RETRIABLE | {"finished"} and not (reply.end == "lost" and router_fell):
            yield f"{body.length} tokens: ended with {reply.end!r}{reply.detail}"

    # -- afterwards ------------------------------------------------------------------------------------------------

    async def _recovers(self, case: Case, pids: dict[str, int]) -> list[str]:
        """Whether it serves, hits and holds nothing, all within the time to settle."""
        end = time.monotonic() + SETTLE_S
        back = case.fault == "stop" or await until(lambda: self._cluster.pid(case.victim) != pids[case.victim], end)
        if not back:
            return [f"{case.victim} was not started again"]
        served = hit = False
        while not hit and time.monotonic() < end:
            reply = Reply()
            await self._request(WARM, "", reply)
            served |= reply.end == "finished" and reply.tokens == self._want[WARM]
            hit = served and reply.cached_tokens > 0
            await pause()
        wrong = [] if served else ["no service after the fault"]
        wrong += [] if hit else ["no cache hit after the fault"]
        return wrong + await self._falls_to_zero(end)

    async def _held(self) -> dict[str, float]:
        """What the roles' books show that should be zero at rest."""
        found: dict[str, float] = {}
        for role, names in BOOKS.items():
            try:
                metrics = await self._metrics(role)
            except (aiohttp.ClientError, TimeoutError, OSError):
                return {f"{role} does not answer": 1.0}
            for name in names:
                lines = {line: value for line, value in metrics.items() if line.partition("{")[0] == name}
                assert lines, f"{role} shows no {name}"
                found |= {line: value for line, value in lines.items() if value}
        if time.monotonic() < self._orphans_end_s:
            found.pop(RESERVED, None)
        return found

    async def rest(self) -> list[str]:
        """After the last case: what is still held once everything has had time to end."""
        return await self._falls_to_zero(time.monotonic() + ORPHANS_S + SETTLE_S)

    async def _falls_to_zero(self, end_s: float) -> list[str]:
        while (held := await self._held()) and time.monotonic() < end_s:
            await pause()
        return [f"still held: {name} {value:g}" for name, value in held.items()]

    def _deaths(self, case: Case, pids: dict[str, int]) -> list[str]:
        """A role that fell without having been struck: a broken invariant ends its process."""
        fell = [name for name in VICTIMS if name != case.victim and self._cluster.pid(name) != pids[name]]
        if case.fault == "stop" and self._cluster.pid(case.victim) != pids[case.victim]:
            fell.append(case.victim)
        return [f"{name} died" for name in fell]

    def _logs(self) -> list[Path]:
        return sorted(Path(self._cluster.ready["logs"]).glob("*.log"))


class Freezer:
    def __init__(self) -> None:
        self._pids: list[int] = []

    def freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._pids.append(pid)

    def thaw(self, but: int | None = None) -> None:
        """Let everything go on, except `but`, which is to stay stopped."""
        for pid in [pid for pid in self._pids if pid != but]:
            self._pids.remove(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen() -> Iterator[Freezer]:
    freezer = Freezer()
    try:
        yield freezer
    finally:
        freezer.thaw()


def take(event: dict[str, Any], reply: Reply) -> None:
    """One server-sent event."""
    if "error" in event:
        reply.end = event["error"]["code"]
        return
    for choice in event.get("choices", ()):
        reply.tokens += choice.get("token_ids") or ()
    usage = event.get("usage")
    if usage:
        reply.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        reply.retries = usage.get("moonrelay", {}).get("retries", 0)


def complaints(log_ends: dict[Path, int]) -> list[str]:
    """New log lines that no fault excuses."""
    found = []
    for path, start in log_ends.items():
        with path.open("rb") as log:
            log.seek(start)
            new = log.read().decode(errors="replace")
        for word in ("invariant broken", "InvariantError", "memory leaked", "request failed"):
            found += [f"{path.stem} logged: {line[:300]}" for line in new.splitlines() if word in line][:1]
    return found


async def reached(condition: Callable[[], bool]) -> bool:
    return await until(condition, time.monotonic() + REACH_S)


async def until(condition: Callable[[], bool], end_s: float) -> bool:
    while not condition():
        if time.monotonic() > end_s:
            return False
        await pause()
    return True


async def pause() -> None:
    """Between two looks at processes that give no event to wait for."""
    await asyncio.sleep(0.01)


def count(ends: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for end in ends:
        found[end] = found.get(end, 0) + 1
    return found
