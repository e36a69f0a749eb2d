"""The drafter at work: drafts for what goes on, and what became of them.

On the engine's thread only. A drafter is advice: whatever it does wrong is counted and ignored, and one that keeps
failing is switched off. Nothing here can end a sequence or change what it draws, but for the law's own dice.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.api import SampledToken
from engine.draft_policy import DraftPolicy, Plan
from engine.draft_rows import BACKLOG_TOKENS_MAX, Attempt, DraftRows
from engine.draft_words import drafting_of, draws_as, request_for, text_of, what_is_wrong
from engine.pools import Pools, mapped_floats
from engine.sequence import Draft, Drafting, LiveSequence
from engine.settings import EngineSettings
from engine.step import Drawn, Step
from model.batch import Verifier
from model.drafting import DraftModel, DraftRequest, Proposal, Reader
from moonrelay.errors import InvariantError, SettingsError

log = logging.getLogger(__name__)
FAULTS_MAX = 8  # in a row, then the drafter is switched off
QUIET, RARELY = 24, 16  # after so many steps without a draft a text is looked into at every so many only


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


def _nothing() -> None:
    """Of a backend that has no threads to rouse."""


class Speculator:
    """Owns the drafter and the records; keeps the books of what drafting does."""

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
        self._rouse: Callable[[], None] = getattr(backend, "rouse", _nothing)
        self._reader = drafter if isinstance(drafter, Reader) else None
        self.read_max = self.length_max
        if self._reader is not None and self.length_max:
            self.read_max = max(self.length_max, min(settings.draft_read_len_max, self._reader.read_len_max))
        self.policy = DraftPolicy(
            len_max=self.length_max, read_len_max=self.read_max, adaptive=settings.draft_adaptive
        )
        self.rows = DraftRows(drafter, backend, settings, pools, attempt=attempt, cold=cold)
        self._attempt = attempt
        self._vocab_size = backend.config.vocab_size
        record = pools.layout.record_floats(self.read_max + 1)
        self.records = mapped_floats(settings.max_batch_sequences, record) if self.length_max else None
        self._faults: Counter[str] = Counter()  # in a row, of rows and of drafts
        self._draft_s = 0.0
        self._looked_s = 0.0  # for drafts that were read for the next step
        self._ignored: Counter[str] = Counter()
        # Steps behind which nothing will be looked for, since neither texts nor the policy have any hope; of as many
        # sequences, and how long those took that are over.
        self._coasts = self._coasting = 0
        self._coasted_s: list[float] = []
        self._steps = 0
        self._alert = False  # some text will be looked into behind the next step

    @property
    def on(self) -> bool:
        return self.rows.on

    # -- rows -----------------------------------------------------------------------------------------------------

    def taps(self, step: Step) -> tuple[torch.Tensor | None, int]:
        """[room, num_taps, hidden] and the row from which on the pass is to fill it; None where nobody would read."""
        rows = self.rows
        if rows.used + step.num_prompt_tokens + step.num_decode_tokens > rows.room:
            self.write_rows()
        return rows.taps, rows.used

    def write_rows(self) -> None:
        """Of all that was consumed."""
        if self.rows.behind:
            failed = self.rows.write()
            if failed is None:
                self._faults["rows"] = 0
            else:
                self._fault("rows", failed)

    def rest(self) -> None:
        """A turn is over: rows are not waited with for ever."""
        if self.rows.used >= BACKLOG_TOKENS_MAX:
            self.write_rows()

    # -- drafts ---------------------------------------------------------------------------------------------------

    def begin(self, sequence: LiveSequence) -> None:
        """A sequence was submitted."""
        if self.length_max and not sequence.spec.hold_after_first:
            draws = draws_as(sequence)
            readings = self.policy.begin(draws=draws, read=True)
            sequence.drafting = Drafting(draws=draws, acceptance=self.policy.begin(draws=draws), readings=readings)

    def coasts(self, step: Step, seconds: float) -> bool:
        """Whether nothing is left to do behind a step, which took so long: of most, where drafting does not pay."""
        if step.verification is not None or step.num_prompt_tokens or len(step.sequences) != self._coasting:
            return False
        if not self._coasts:
            return False
        self._coasts -= 1
        self._steps += 1
        self._coasted_s.append(seconds)
        if self.rows.used >= BACKLOG_TOKENS_MAX:
            self.write_rows()
        return True

    def propose(self, sequences: Sequence[LiveSequence]) -> list[tuple[LiveSequence, Draft]]:
        """Drafts for sequences that decode on, as far as that pays: read from their texts, else the drafter's."""
        self._steps += 1
        self._coasts = 0
        if not self.length_max or not sequences or not self.on or self.policy.pauses():
            return []
        started = time.perf_counter()
        offers = self._read(sequences) if self._reader is not None else []
        if offers:
            self._rouse()
            self._looked_s = time.perf_counter() - started
        if self.policy.rests(len(sequences)):
            if not offers and not self._alert:
                self._coasts, self._coasting = (-self._steps - 1) % RARELY, len(sequences)  # until `_read` looks
            return offers
        found = {id(sequence) for sequence, _ in offers}
        known = [drafting_of(sequence).acceptance for sequence in sequences]
        plan = self.policy.plan(
            known, [0 if id(s) in found else min(s.draws_left - 1, self.length_max) for s in sequences]
        )
        if plan is None:
            return offers
        self._rouse()
        asked = [(s, length) for s, length in zip(sequences, plan.lengths, strict=True) if length > 0]
        self.write_rows()  # first: where it fails the requests must know from where on rows are valid
        if not self.on:
            return []
        requests = [request_for(sequence, length) for sequence, length in asked]
        proposals = self._asked(asked, requests)
        if not self.on:
            return []
        if proposals is not None:
            offers += self._chosen(asked, proposals, plan)
        slots = sum(length for _, length in asked) + len(asked)
        self._looked_s = 0.0  # all that a draft takes is charged to it: looks, rows that would have waited, checks
        self.policy.drafted(requests=len(asked), slots=slots, seconds=time.perf_counter() - started)
        return offers

    def judged(self, step: Step, drawn: Sequence[Drawn], started_s: float) -> DraftWork:
        """What became of the drafts of the step, which began at `started_s`. Before `complete`."""
        if step.verification is None:
            return self._work(0, 0) if self.rows.seconds or self._draft_s or self._ignored else NO_DRAFTS
        seconds = time.perf_counter() - started_s
        tokens = step.num_prompt_tokens + step.num_decode_tokens
        plain_s = self.policy.plain_s(len(step.sequences)) if not step.num_prompt_tokens else None
        draws = step.verification.draws
        num_drafted = num_accepted = 0
        for index, sequence in enumerate(step.sequences):
            drafting = sequence.drafting
            if drafting is None or index not in draws:
                continue
            run, kept = drawn[draws[index]], step.verification.kept[index]
            assert isinstance(run, tuple)
            length, passed = len(step.segments[index].ids) - 1, min(kept, len(run) - 1)
            drafting.verify_steps += 1
            drafting.kept += kept
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
            how = drafting.draws
            self.policy.judged(known, claimed[: len(outcomes)], outcomes, draws=how, read=drafting.read)
        return self._work(num_drafted, num_accepted)

    def ran(self, step: Step, seconds: float) -> None:
        """The whole step took so long, its tokens handed out."""
        if self._coasted_s:
            self.policy.coasted(sequences=self._coasting, seconds=self._coasted_s)
            self._coasted_s.clear()
        if step.num_prompt_tokens == 0:
            seconds += self._looked_s if step.verification is not None else 0.0
            self.policy.ran(sequences=len(step.sequences), tokens=step.num_decode_tokens, seconds=seconds)
        self._looked_s = 0.0

    # -- details --------------------------------------------------------------------------------------------------

    def _read(self, sequences: Sequence[LiveSequence]) -> list[tuple[LiveSequence, Draft]]:
        """Drafts that stand in the texts, where they promise to pay. They cost next to nothing: no rows, no pass."""
        count, asked, pays = len(sequences), [], dict[bool, bool]()
        self._alert = False
        for sequence in sequences:
            drafting = drafting_of(sequence)
            if drafting.quiet >= QUIET and self._steps % RARELY:
                continue
            drawn = sequence.spec.sampling.temperature > 0.0
            if drawn not in pays:
                pays[drawn] = self.policy.reads(count, drawn=drawn)
            if pays[drawn] and sequence.draws_left > 1:
                drafting.quiet += 1
                self._alert |= drafting.quiet < QUIET
                asked.append((sequence, min(sequence.draws_left - 1, self.read_max), drawn))
        if not asked:
            return []
        started = time.perf_counter()
        found = self._attempt(lambda: self._readings(asked))
        seconds = time.perf_counter() - started
        self._draft_s += seconds
        for sequence, _, _ in asked:
            drafting_of(sequence).draft_s += seconds / len(asked)
        if isinstance(found, Exception):
            self._fault("raised", found, count=len(asked))
            return []
        ready = [(s, p) for (s, length, _), p in zip(asked, found, strict=True) if p and self._fit(s, length, p)]
        if not ready:
            return []
        chances = [drafting_of(sequence).readings.chances(proposal.confidence) for sequence, proposal in ready]
        offers = []
        for (sequence, proposal), worth in zip(ready, self.policy.worth(count, chances), strict=True):
            draft = Draft(tokens=proposal.tokens, laws=None).cut(worth)
            if draft is not None:
                drafting = drafting_of(sequence)
                drafting.claimed, drafting.read, drafting.quiet = proposal.confidence, True, 0
                offers.append((sequence, draft))
        return offers

    def _readings(self, asked: Sequence[tuple[LiveSequence, int, bool]]) -> list[Proposal | None]:
        assert self._reader is not None
        read, sure = self._reader.read, not self.policy.adaptive  # where costs count, what is read counts for more
        return [read(text_of(sequence), length, drawn=drawn, sure=sure) for sequence, length, drawn in asked]

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self._reader is not None:
            return self._reader.with_rows(requests, self.pools.rows)
        return self.drafter.draft(requests, self.pools.rows)

    def _asked(
        self, asked: Sequence[tuple[LiveSequence, int]], requests: Sequence[DraftRequest]
    ) -> list[Proposal] | None:
        """What the drafter says to each, or None where it failed."""
        started = time.perf_counter()
        proposals = self._attempt(lambda: self._drafts(requests))
        seconds = time.perf_counter() - started
        self._draft_s += seconds
        for sequence, _ in asked:
            drafting_of(sequence).draft_s += seconds / len(asked)
        if isinstance(proposals, Exception):
            self._fault("raised", proposals, count=len(asked))
            return None
        if not isinstance(proposals, list) or len(proposals) != len(asked):
            self._fault("length", InvariantError(f"{len(asked)} drafts asked for, not as many given"), len(asked))
            return None
        return proposals

    def _work(self, num_drafted: int, num_accepted: int) -> DraftWork:
        draft_s, rows_s, ignored = self._draft_s, self.rows.seconds, self._ignored
        self._draft_s = self.rows.seconds = 0.0
        if ignored:
            self._ignored = Counter()
        return DraftWork(
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            draft_s=draft_s,
            rows_s=rows_s,
            ignored=ignored or NO_DRAFTS.ignored,
        )

    def _chosen(
        self, asked: Sequence[tuple[LiveSequence, int]], proposals: Sequence[Proposal], plan: Plan
    ) -> list[tuple[LiveSequence, Draft]]:
        """What is worth verifying of what was proposed."""
        offers = []
        for (sequence, length), proposal in zip(asked, proposals, strict=True):
            drafting, draws = drafting_of(sequence), drafting_of(sequence).draws
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
        wrong = what_is_wrong(proposal, length, vocab_size=self._vocab_size, draws=drafting_of(sequence).draws)
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
            log.error("drafter switched off", exc_info=error, extra={"drafter": self.drafter.drafter_id})
            self.rows.give_up()
