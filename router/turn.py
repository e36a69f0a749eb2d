"""One request's generation: what it may still produce, what it has produced, how it ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol

from moonrelay.errors import ServeError
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from router.core import CacheAccount, WorkerKey
from router.edge import WorkerLost
from router.metrics import RouterMetrics
from router.output import Output, Piece
from router.prompt import Draft, Prompt
from router.schema import GenerationRequest
from router.wire import sampled

FinishReason = Literal["stop", "length", "tool_calls"]
INCIDENT_S: Final = 2.0  # membership shows the dead for as long


class ClientGone(ServeError):
    """Nobody is left to answer."""

    code: ClassVar[str] = "client_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a request came in. Units: `deadline_s` on the event loop's clock; `size` is the request's bytes.

    `request_id` may be the client's, and then need not be unique; `answer_id` always is.
    """

    request_id: str
    deadline_s: float
    arrived_s: float = field(default_factory=time.perf_counter)
    answer_id: str = field(default_factory=lambda: secrets.token_hex(12))
    tenant: str = ""
    size: int = 0
    explain: bool = False


class Sink(Protocol):
    """Where a request's answer goes."""

    def accepted(self, prompt_ids: Sequence[int]) -> None:
        """The prompt is known and fits; called once, before anything is emitted."""
        ...

    async def emit(self, piece: Piece) -> None: ...


@dataclass(slots=True)
class Served:
    """Who served a request and what it took: shown to a client that asks for an explanation."""

    prefill: str | None = None
    decode: str | None = None
    transport: str | None = None
    handoff_bytes: int = 0
    held_tokens: int = 0  # of the prompt, that decode had already
    pull_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    verify_steps: int = 0
    plain_steps: int = 0  # decode steps without a draft
    draft_seconds: float = 0.0
    draft_verify_seconds: float = 0.0
    draft_saved_seconds: float = 0.0  # estimated, against stepping
    retries: int = 0

    def note_draft(self, draft: worker_pb2.DraftUsage) -> None:
        """What drafting did on one worker; nothing where it has no drafter."""
        self.drafted_tokens += draft.drafted_tokens
        self.accepted_tokens += draft.accepted_tokens
        self.verify_steps += draft.verify_steps
        self.plain_steps += draft.plain_steps
        self.draft_seconds += draft.draft_seconds
        self.draft_verify_seconds += draft.verify_seconds
        self.draft_saved_seconds += draft.saved_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The one good end of a request."""

    finish_reason: FinishReason
    completion_tokens: int
    reasoning_tokens: int
    account: CacheAccount
    served: Served
    recalled_tokens: int


def log_fields(result: Result) -> dict[str, Any]:
    """What the log says of a request that ended well: who served it, and its cache account."""
    account, served = result.account, result.served
    return {
        "prefill": served.prefill,
        "decode": served.decode,
        "first_token_seconds": round(served.first_token_seconds, 4),
        "finish_reason": result.finish_reason,
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "cached_tokens": account.cached_tokens,
        "cached_by_tier": {tier: tokens for tier, tokens in account.by_tier if tokens},
        "matchable_tokens": account.matchable_tokens,
        "possible_tokens": account.possible_tokens,
        "miss_reason": account.miss_reason,
        "drafter_cold": account.drafter_cold,
        "drafted_tokens": served.drafted_tokens,
        "accepted_tokens": served.accepted_tokens,
        "verify_steps": served.verify_steps,
        "lost": account.lost,
        "held_tokens": served.held_tokens,
        "recalled_tokens": result.recalled_tokens,
    }


class Turn:
    """A generation in progress, over as many workers as it takes.

    Invariants: what has been emitted is what `generated` says; len(generated) <= max_tokens; `ended` once, for ever.
    """

    def __init__(
        self,
        *,
        request: GenerationRequest,
        call: Call,
        draft: Draft,
        prompt: Prompt,
        max_tokens: int,
        seed: int,
        stop_ids: tuple[int, ...],
        output: Output,
        sink: Sink,
        metrics: RouterMetrics,
    ) -> None:
        self.request = request
        self.call = call
        self.draft = draft
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated: list[int] = []
        self.account: CacheAccount | None = None  # of the client's prompt: the first attempt's that got so far
        self.served = Served()
        self.emitting = False
        self.attempts = 0  # that failed, those included that reached nobody or fell with the one before
        # Incidents before and after the first token.
        self.retries = 0
        self.recoveries = 0
        self.full: set[WorkerKey] = set()
        self.failed: set[WorkerKey] = set()  # passed over as long as there are others
        self.queue_until_s: float | None = None
        self._incident_until_s = 0.0  # on the loop's clock
        self._seed = seed
        self._stop_ids = stop_ids
        self._output = output
        self._sink = sink
        self._metrics = metrics
        self._reason: Literal["stop", "length"] | None = None
        self._last_s = 0.0
        self._keep_tokens = request.top_logprobs is not None or request.return_token_ids

    @property
    def ended(self) -> bool:
        return self._reason is not None

    @property
    def ids(self) -> list[int]:
        """What a worker that takes over must have consumed."""
        return self.prompt.ids + self.generated if self.generated else self.prompt.ids

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.generated)

    def new_work_id(self) -> str:
        """What workers call the next attempt: never the same twice, readable beside our own log."""
        return f"{self.call.request_id}.{secrets.token_hex(6)}"

    def sampling(self) -> common_pb2.Sampling:
        """Random numbers depend on seed, choice and position alone, so a replay draws what was drawn before.

        Where drafts are drawn too that holds only for a `reproducible` request: one whose client named the seed. A
        replay has to go on from tokens that were sent, and is made one, for it may meet other drafts.
        """
        request = self.request
        return common_pb2.Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=self._seed,
            max_tokens=self.remaining,
            stop_token_ids=self._stop_ids,
            top_logprobs=request.top_logprobs,
            reproducible=request.seed is not None or bool(self.generated),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=dict(request.logit_bias),
            generated=self.generated if request.presence_penalty or request.frequency_penalty else (),
        )

    async def take(self, tokens: Sequence[common_pb2.Token]) -> None:
        """Count tokens and pass on what they say. A stop string ends the turn at the token that completes it."""
        if not tokens or self.ended:
            return
        self._time(len(tokens))
        piece = self._one_by_one(tokens) if self.request.stop else self._together(tokens)
        await self._emit(piece)

    def end(self, reason: int) -> None:
        """The worker says why it stopped (a FinishReason of the wire)."""
        if not self.ended:
            self._reason = "stop" if reason == common_pb2.FINISH_REASON_STOP else "length"

    def end_if_complete(self) -> None:
        """Nothing is left to generate, although the worker did not live to say so."""
        if self.generated and self.generated[-1] in self._stop_ids:
            self._reason = self._reason or "stop"
        elif self.remaining <= 0:
            self._reason = self._reason or "length"

    def lose(self, lost: WorkerLost, now_s: float) -> str:
        """Count a loss; returns the metrics' word for when it came.

        What dies with the first of an incident costs no further retry: a request on one of two workers that fall
        together is tried on the other before anybody can know.
        """
        self.end_if_complete()
        self.attempts += 1
        self.served.retries = self.attempts
        self.failed.update(worker.key for worker in lost.workers)
        if lost.unreachable:
            return "unreachable"
        if not (lost.died and now_s < self._incident_until_s):
            self._incident_until_s = now_s + INCIDENT_S
            if self.generated:
                self.recoveries += 1
            else:
                self.retries += 1
        return "after_first_token" if self.generated else "before_first_token"

    async def finish(self) -> Result:
        """Emit what was held back and sum up."""
        assert self._reason is not None and self.account is not None
        await self._emit(self._output.finish())
        self._metrics.generation_tokens.inc(len(self.generated))
        calls = self._output.called_tools and self._reason == "stop" and not self._output.stopped
        return Result(
            finish_reason="tool_calls" if calls else self._reason,
            completion_tokens=len(self.generated),
            reasoning_tokens=self._output.reasoning_tokens,
            account=self.account,
            served=self.served,
            recalled_tokens=self.prompt.recalled_tokens,
        )

    def message(self) -> Mapping[str, Any] | None:
        """What the client has of a chat's turn, as it will send it back; None where it cannot be known."""
        return self._output.message()

    def _together(self, tokens: Sequence[common_pb2.Token]) -> Piece:
        kept = tokens[: self.remaining]
        ids = [token.id for token in kept]
        self.generated += ids
        piece = self._output.push(ids)
        if self._keep_tokens:
            piece.tokens = sampled(kept)
        return piece

    def _one_by_one(self, tokens: Sequence[common_pb2.Token]) -> Piece:
        whole = Piece()
        for index in range(len(tokens)):
            piece = self._together(tokens[index : index + 1])
            whole.reasoning += piece.reasoning
            whole.content += piece.content
            whole.calls += piece.calls
            whole.tokens += piece.tokens
            if self._output.stopped:
                self._reason = "stop"
                break
        return whole

    async def _emit(self, piece: Piece) -> None:
        if piece:
            self.emitting = True
            await self._sink.emit(piece)
            self.emitting = False

    def _time(self, num_tokens: int) -> None:
        now_s = time.perf_counter()
        if self._last_s:
            self._metrics.itl.observe((now_s - self._last_s) / num_tokens)
        else:
            self.served.first_token_seconds = now_s - self.call.arrived_s
            self._metrics.ttft.observe(self.served.first_token_seconds)
        self._last_s = now_s
