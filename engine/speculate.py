"""The drafter at work: rows of what was consumed, drafts for what goes on, what became of them.

On the engine's thread only. A drafter is advice: whatever it does wrong is counted and ignored, and one that keeps
failing is switched off. Nothing here can end a sequence or change what it draws, but for the law's own dice.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from engine.api import SampledToken
from engine.draft_policy import DraftPolicy, Plan
from engine.draft_words import drafting_of, draws_as, request_for, what_is_wrong
from engine.pools import Pools, mapped_floats
from engine.sequence import Draft, Drafting, LiveSequence
from engine.settings import EngineSettings
from engine.step import Drawn, Step
from model.batch import Segment, Verifier
from model.drafting import DraftModel, DraftRequest, Proposal, Reader
from moonrelay.errors import InvariantError, SettingsError

log = logging.getLogger(__name__)
FAULTS_MAX = 8  # in a row, then the drafter is switched off
BACKLOG_TOKENS_MAX = 64  # whose rows are not written yet: one product for many is several times cheaper than for one
TAPS_SPARE = 4 * BACKLOG_TOKENS_MAX  # taps of refused tokens lie between those that are waited with
P = TypeVar("P", bound=Proposal | None)


class Attempt(Protocol):
    """Runs what may raise anything. The edge to it is the engine's."""

    def __call__(self, work: Callable[[], Any], /) -> Any: ...


@dataclass(slots=True)
class _Consumed:
    """Tokens of one sequence whose drafter rows are to be written: ids from `start` on and where their taps lie."""

    sequence: LiveSequence
    start: int
    ids: list[int]
    taps: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWork:
    """Of one step, and what was spent since the one before. Units: tokens; seconds; `ignored`: drafts by what was
    wrong with them."""

    num_drafted: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    rows_s: float = 0.0
    ignored: Mapping[str, int] = field(default_factory=dict)


NO_DRAFTS = DraftWork()


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


class Speculator:
    """Owns the drafter, the taps and the records; keeps the books of what drafting does."""

    def __init__(
        self,
        drafter: DraftModel,
        backend: Verifier,
        settings: EngineSettings,
        pools: Pools,
        *,
        attempt: Attempt,
        cold: Callable[[LiveSequence, int], None],
    ) -> None:
        """`cold` is told from where on a sequence's drafter rows are valid, when some could not be written.

        Raises: SettingsError if the backend cannot verify.
        """
        self.drafter, self.backend, self.pools = drafter, backend, pools
        self.length_max = min(settings.draft_len_max, drafter.block_len)
        if self.length_max and not hasattr(backend, "fold"):
            raise SettingsError(f"the {backend.name} backend cannot verify drafts: draft_len_max must be 0")
        self.policy = DraftPolicy(len_max=self.length_max, adaptive=settings.draft_adaptive)
        self._reader = drafter if isinstance(drafter, Reader) else None
        self.on = True
        self._attempt, self._cold = attempt, cold
        self._vocab_size = backend.config.vocab_size
        self._taps: torch.Tensor | None = None
        if drafter.target_layers:
            backend.tap(drafter.target_layers)
            room = settings.max_batch_tokens + TAPS_SPARE
            shape = room, len(drafter.target_layers), backend.config.hidden_size
            self._taps = mapped_floats(shape[0], shape[1] * shape[2]).view(shape)
        self._taps_max = 0 if self._taps is None else len(self._taps)
        self._taps_used = 0  # by passes whose rows are not written yet
        record = pools.layout.record_floats(self.length_max + 1)
        self.records = mapped_floats(settings.max_batch_sequences, record) if self.length_max else None
        self._backlog: dict[LiveSequence, _Consumed] = {}
        self._faults: Counter[str] = Counter()  # in a row, of rows and of drafts
        self._draft_s = self._rows_s = 0.0
        self._ignored: Counter[str] = Counter()

    # -- a pass ---------------------------------------------------------------------------------------------------

    def taps(self, step: Step) -> torch.Tensor | None:
        """[tokens of the step, num_taps, hidden], for the pass to fill; None where nobody would read them."""
        if self._taps is None or not self.on:
            return None
        tokens = step.num_prompt_tokens + step.num_decode_tokens
        if self._taps_used + tokens > self._taps_max:
            self.write_rows()
        return self._taps[self._taps_used : self._taps_used + tokens]

    def consumed(self, step: Step) -> None:
        """The pass ran and is settled: what its sequences keep will need rows."""
        kept = step.verification.kept if step.verification is not None else {}
        heard, at = self.on and self._taps is not None, self._taps_used
        for index, (sequence, segment) in enumerate(zip(step.sequences, step.segments, strict=True)):
            tokens = kept.get(index, len(segment.ids))
            if heard:
                entry = self._backlog.get(sequence)
                if entry is None:
                    entry = self._backlog[sequence] = _Consumed(sequence, segment.start, [], [])
                entry.ids += segment.ids[:tokens]
                entry.taps.append((at, at + tokens))
            elif self.drafter.draft_width:
                self._cold(sequence, segment.start + tokens)
            at += len(segment.ids)
        self._taps_used = at

    @property
    def behind(self) -> bool:
        """Whether rows are still to be written."""
        return bool(self._backlog)

    def write_rows(self) -> None:
        """Of all that was consumed. Before anybody else may own the blocks, or look into them."""
        self._taps_used = 0
        if not self._backlog:
            return
        entries = list(self._backlog.values())
        self._backlog.clear()
        segments = [
            Segment(ids=e.ids, start=e.start, slot=e.sequence.reservation.slot, blocks=e.sequence.blocks)
            for e in entries
        ]
        assert self._taps is not None
        pieces = [self._taps[first:end] for entry in entries for first, end in entry.taps]
        started = time.perf_counter()
        failed = self._attempt(lambda: self.drafter.write_rows(segments, joined(pieces), self.pools.rows))
        self._rows_s += time.perf_counter() - started
        if failed is None:
            self._faults["rows"] = 0
        else:
            for entry in entries:
                self._cold(entry.sequence, entry.start + len(entry.ids))
            self._fault("rows", failed)

    def rest(self) -> None:
        """A turn is over: rows are not waited with for ever."""
        if self._taps_used >= BACKLOG_TOKENS_MAX:
            self.write_rows()

    def forget(self, sequences: Sequence[LiveSequence]) -> None:
        """They have failed: nobody reads their rows."""
        for sequence in sequences:
            self._backlog.pop(sequence, None)

    # -- drafts ---------------------------------------------------------------------------------------------------

    def begin(self, sequence: LiveSequence) -> None:
        """A sequence was submitted."""
        if self.length_max and not sequence.spec.hold_after_first:
            draws = draws_as(sequence)
            readings = self.policy.begin(draws=draws, read=True)
            sequence.drafting = Drafting(acceptance=self.policy.begin(draws=draws), readings=readings)

    def propose(self, sequences: Sequence[LiveSequence]) -> list[tuple[LiveSequence, Draft]]:
        """Drafts for sequences that decode on, as far as that pays: read from their texts, else the drafter's."""
        if not self.on or not self.length_max or not sequences:
            return []
        offers = self._read(sequences) if self._reader is not None else []
        if self.policy.rests(len(sequences)):
            return offers
        found = {id(sequence) for sequence, _ in offers}
        known = [drafting_of(sequence).acceptance for sequence in sequences]
        plan = self.policy.plan(known, [0 if id(s) in found else self._room(s) for s in sequences])
        if plan is None:
            return offers
        asked = [(s, length) for s, length in zip(sequences, plan.lengths, strict=True) if length > 0]
        self.write_rows()  # first: where it fails the requests must know from where on rows are valid
        if not self.on:
            return []
        requests = [request_for(sequence, length) for sequence, length in asked]
        proposals, seconds = self._timed(asked, lambda: self._drafts(requests))
        if not self.on:
            return []
        self.policy.drafted(
            requests=len(asked), slots=sum(length for _, length in asked) + len(asked), seconds=seconds
        )
        return [] if proposals is None else [*offers, *self._chosen(asked, proposals, plan)]

    def judged(self, step: Step, drawn: Sequence[Drawn], seconds: float) -> DraftWork:
        """What became of the drafts of the step, which took `seconds` in all. Before `complete`."""
        tokens = step.num_prompt_tokens + step.num_decode_tokens
        count = len(step.sequences)
        pure = step.num_prompt_tokens == 0
        if pure:
            self.policy.ran(sequences=count, tokens=tokens, seconds=seconds)
        if step.verification is None:
            for sequence in step.sequences:
                if sequence.drafting is not None and sequence.last_id is not None:
                    sequence.drafting.plain_steps += 1
            return self._work(0, 0)
        plain_s = self.policy.plain_s(count) if pure else None
        draws = step.verification.draws
        num_drafted = num_accepted = 0
        for index, sequence in enumerate(step.sequences):
            drafting = sequence.drafting
            if drafting is None or sequence.last_id is None:
                continue
            if index not in draws:
                drafting.plain_steps += 1
                continue
            run, kept = drawn[draws[index]], step.verification.kept[index]
            assert isinstance(run, tuple)
            length, passed = len(step.segments[index].ids) - 1, min(kept, len(run) - 1)
            drafting.verify_steps += 1
            drafting.drafted += length
            drafting.accepted += passed
            drafting.verify_s += seconds * (length + 1) / tokens
            if plain_s is not None:
                drafting.saved_s += kept * plain_s - seconds
            num_drafted += length
            num_accepted += passed
            if index in step.verification.dropped:
                continue
            # The token after those kept was refused, unless the run ended for another reason: then nobody asked.
            refused = kept == len(run) and passed < length and isinstance(run[-1], SampledToken)
            outcomes = [True] * passed + [False] * refused
            known, claimed = drafting.readings if drafting.read else drafting.acceptance, drafting.claimed
            how = draws_as(sequence)
            self.policy.judged(known, claimed[: len(outcomes)], outcomes, draws=how, read=drafting.read)
        return self._work(num_drafted, num_accepted)

    # -- details --------------------------------------------------------------------------------------------------

    def _room(self, sequence: LiveSequence) -> int:
        return min(sequence.draws_left - 1, self.length_max)

    def _read(self, sequences: Sequence[LiveSequence]) -> list[tuple[LiveSequence, Draft]]:
        """Drafts that stand in the texts, where they promise to pay. They cost next to nothing: no rows, no pass."""
        reader, count = self._reader, len(sequences)
        assert reader is not None
        drawn = [sequence.spec.sampling.temperature > 0.0 for sequence in sequences]
        pays = {kind: self.policy.reads(count, drawn=kind) for kind in set(drawn)}
        rooms = [self._room(s) if pays[kind] else 0 for s, kind in zip(sequences, drawn, strict=True)]
        asked = [(s, room) for s, room in zip(sequences, rooms, strict=True) if room > 0]
        if not asked:
            return []
        requests = [request_for(sequence, length, dice=False) for sequence, length in asked]
        proposals, _ = self._timed(asked, lambda: reader.without_rows(requests))
        ready = []
        for (sequence, length), proposal in zip(asked, proposals or (), strict=proposals is not None):
            if proposal is None or not self._fit(sequence, length, proposal):
                continue
            ready.append((sequence, proposal, drafting_of(sequence).readings.chances(proposal.confidence)))
        lengths = self.policy.worth(count, [chances for _, _, chances in ready])
        offers = []
        for (sequence, proposal, _), worth in zip(ready, lengths, strict=True):
            draft = Draft(tokens=proposal.tokens, laws=None).cut(worth)
            if draft is not None:
                drafting = drafting_of(sequence)
                drafting.claimed, drafting.read = proposal.confidence, True
                offers.append((sequence, draft))
        return offers

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self._reader is not None:
            return self._reader.with_rows(requests, self.pools.rows)
        return self.drafter.draft(requests, self.pools.rows)

    def _timed(
        self, asked: Sequence[tuple[LiveSequence, int]], work: Callable[[], list[P]]
    ) -> tuple[list[P] | None, float]:
        """What the drafter says to each, or None where it failed; and the seconds that it took."""
        started = time.perf_counter()
        proposals = self._attempt(work)
        seconds = time.perf_counter() - started
        self._draft_s += seconds
        for sequence, _ in asked:
            drafting_of(sequence).draft_s += seconds / len(asked)
        if isinstance(proposals, Exception):
            self._fault("raised", proposals, count=len(asked))
            return None, seconds
        if not isinstance(proposals, list) or len(proposals) != len(asked):
            self._fault("length", InvariantError(f"{len(asked)} drafts asked for, not as many given"), len(asked))
            return None, seconds
        return proposals, seconds

    def _work(self, num_drafted: int, num_accepted: int) -> DraftWork:
        ignored: Mapping[str, int] = NO_DRAFTS.ignored
        if self._ignored:
            ignored = dict(self._ignored)
            self._ignored.clear()
        work = DraftWork(
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            draft_s=self._draft_s,
            rows_s=self._rows_s,
            ignored=ignored,
        )
        self._draft_s = self._rows_s = 0.0
        return work

    def _chosen(
        self, asked: Sequence[tuple[LiveSequence, int]], proposals: Sequence[Proposal], plan: Plan
    ) -> list[tuple[LiveSequence, Draft]]:
        """What is worth verifying of what was proposed."""
        offers = []
        for (sequence, length), proposal in zip(asked, proposals, strict=True):
            drafting, draws = drafting_of(sequence), draws_as(sequence)
            if not self._fit(sequence, length, proposal):
                continue
            self._faults["drafts"] = 0
            self.policy.had_idea(drafting.acceptance, idea=bool(proposal.tokens), draws=draws)
            if not proposal.tokens:
                self._ignored["empty"] += 1
                continue
            drafting.claimed, drafting.read = proposal.confidence, False
            draft = Draft(tokens=proposal.tokens, laws=proposal.laws if draws == "sampled" else None)
            count = plan.verified(drafting.acceptance, proposal.confidence)
            self.policy.cut(drafting.acceptance, proposal.confidence, count, draws=draws)
            worth = draft.cut(count)
            if worth is not None:
                offers.append((sequence, worth))
        return offers

    def _fit(self, sequence: LiveSequence, length: int, proposal: Proposal) -> bool:
        """Whether a proposal can be used; what is wrong with it is counted."""
        wrong = what_is_wrong(proposal, length, vocab_size=self._vocab_size, draws=draws_as(sequence))
        if wrong is not None:
            self._fault(wrong, InvariantError(f"a draft was refused: {wrong}"))
            return False
        return True

    def _fault(self, reason: str, error: Exception, count: int = 1) -> None:
        self._ignored[reason] += count
        kind = "rows" if reason == "rows" else "drafts"
        self._faults[kind] += 1
        log.debug("draft ignored", exc_info=error, extra={"reason": reason})
        if self._faults[kind] >= FAULTS_MAX and self.on:
            self.on = False
            log.error("drafter switched off", exc_info=error, extra={"drafter": self.drafter.drafter_id})
            for entry in self._backlog.values():
                self._cold(entry.sequence, entry.start + len(entry.ids))
            self._backlog.clear()
