"""What the engine promises to its workers: values and events. Torch-free.

`engine.engine.Engine` runs one thread that owns the model; every method named here may be called from any thread.
`emit` is called on the engine's thread (an asyncio edge hands over by `loop.call_soon_threadsafe`); it never raises.
A reservation is its caller's until `release`, whatever becomes of the sequences run on it.

    Engine(backend, settings)          .rows [num_blocks, block_floats], .state [num_slots, slot_floats]: the pools
    start(), warm(), stop()            stop fails what still lives with Unavailable
    reserve(tokens, shared=, write_back=) -> Reservation
                                       blocks for `tokens` and one slot, or raises Overloaded; never waits
    submit(spec, reservation, emit)    queues the sequence; raises Overloaded past queue_len_max
    cancel(request_id)                 ends it with Finished(cancelled); unknown ids are ignored
    release(reservation)               idempotent; cancels a live sequence; takes effect once no running step uses it
    release_snapshot(slot)             exactly once per SnapshotTaken
    retain(reservation, indices), drop(blocks)
                                       keep full blocks, unchanged, beyond their reservation's life
    draft_first(reservation)           first token whose drafter rows are valid; None without a drafter
    stats() -> EngineStats, check()    budgets balance; run when idle
    .progress                          layers of a running pass that are done, see LastPass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Random numbers are a pure function of (seed, choice, position, purpose)."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    choice: int = 0
    max_tokens: int = 1
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None  # None: no logprobs at all
    reproducible: bool = False  # drafts must not change what the seed draws; sampled ones would, within the law
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); an id once at most
    generated: tuple[int, ...] = ()  # output that was drawn before this sequence began: penalties count it

    @property
    def penalises(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def shifts(self) -> bool:
        """Whether logits are changed before the law."""
        return self.penalises or bool(self.logit_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory set aside for one sequence. Units: blocks index the row pool in token order.

    The first `shared` blocks have other holders too and are read only.
    """

    id: int
    blocks: tuple[int, ...]
    slot: int
    tokens: int
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """A sequence whose first `restored` tokens are already in the reservation's rows and state.

    `ids` are consumed next (a prompt's rest, or a handoff's `next_token`); the first draw is for position
    restored + len(ids). With `hold_after_first` the sequence stops after one draw and its memory stays as it is
    (state after exactly restored + len(ids) tokens) until released: the prefill side of a handoff.
    `snapshot_at` are token counts (multiples of 64, ascending, > restored) after which the state is copied.
    With `write_back` the state is also copied, over the last copy, whenever a step ends on a block boundary with no
    id left to consume; the last copy is the receiver's as a SnapshotTaken just before Finished.
    Of the restored tokens, those from `draft_first` on have left their drafter rows too; restored: none has.
    `history` are the last of their ids, as many as are known: for drafters that read the text, and for nothing else.
    """

    request_id: str
    ids: Sequence[int]
    sampling: SamplingParams
    restored: int = 0
    hold_after_first: bool = False
    snapshot_at: tuple[int, ...] = ()
    write_back: bool = False
    draft_first: int = 0
    history: Sequence[int] = ()


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Prompt tokens consumed so far, restored ones included."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPass:
    """The pass that ends a `hold_after_first` prompt begins: `Engine.progress` counts its layers under `number`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The state after exactly `tokens` tokens was copied into `slot`, the receiver's until release_snapshot."""

    tokens: int
    slot: int


class TokenSampled(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    token: SampledToken
    position: int  # index of this token in the whole sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReport:
    """What drafting did for one sequence. Units: tokens; steps; seconds of this sequence's share of a step.

    drafted: tokens that were verified; accepted: those of them that the sequence kept; verify_s: the steps that
    verified, drawing and folding included; saved_s: what plain steps for the same tokens would have taken longer,
    by the engine's own estimate of them (negative: drafting did not pay).
    """

    drafted: int
    accepted: int
    verify_steps: int
    plain_steps: int
    draft_s: float
    verify_s: float
    saved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a sequence. `tokens_in_state` counts what rows and state have consumed.

    `draft_first`: the first of them with valid drafter rows, as all after it; None where there is no drafter.
    """

    reason: FinishReason | Literal["held"]
    tokens_in_state: int
    draft_first: int | None = None
    draft: DraftReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last event of a sequence that could not go on; the error is for the client."""

    error: Exception


EngineEvent = Progress | LastPass | SnapshotTaken | TokenSampled | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """For metrics and admission."""

    num_blocks: int
    free_blocks: int
    num_slots: int
    free_slots: int
    num_waiting: int
    num_running: int
    snapshots_skipped: int
    rolling_slots: int = 0  # of those that are not free: copies that turns roll along
