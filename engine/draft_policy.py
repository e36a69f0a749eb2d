"""How many tokens to draft for each sequence, and how many of a draft to verify. Pure: numbers in, numbers out.

A step of S sequences that verifies n tokens more keeps S tokens and the expected part of n, and takes the time of
S + n tokens and of the drafting. Tokens are added, likeliest first, as long as tokens per second rise; where none
raises them nothing is drafted, and what can be learned is probed for at a fixed small share of the time.

Chances come from what was kept before, of this sequence and of all, and from the drafter's confidence, corrected by
what it was worth so far; costs from the steps that ran. Whether a drafted token is verified depends on tokens before
it and on the past alone: a choice that looked at later ones would bend the law of what a request draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Literal

from engine.draft_cost import Costs

KEPT_PRIOR = 0.7  # of the first drafts ever; soon forgotten
OWN_RATE, ALL_RATE = 1 / 12, 1 / 64  # how fast a sequence's own chances and those of all follow what happens
OWN_FEW, ALL_FEW = 2, 8  # as if so many drafts had been seen before the first
BIAS_RATE = 0.1
BIAS_MAX = 4.0
JUDGED_MAX = 8  # tokens of a draft that say how far the drafter's confidence is off; others cost as much to look at
DOUBT = 0.3  # what may be better than it is known, where no draft was judged so far
DOUBT_OTHERS = 1 / 8  # what a draft of others that draw alike says of a sequence, beside one of its own
GAIN_MIN = 1.06  # drafting that promises less is not worth its risk: sequences that end apart leave smaller steps
PRICE_MIN, PRICE_MAX = 0.02, 0.95
# Where drafts do not pay they are probed for a share of the time, for all sequences and some steps in a row: behind
# plain steps a drafter's weights and the other cores are cold, and a draft alone takes twice as long as one of many.
PROBE_SHARE = 0.005  # besides, the plain steps behind a probe are slow ones
PROBE_STEPS = 6
PROBE_LEN = 3  # at most: 1, 2 and so on in turn
CREDIT_MAX_S = 1.0
LOOK_AGAIN = 64  # steps after which a choice not to draft is thought over; and between plain steps where it pays
CONFIDENCE_MIN = 1e-6
# The best that a token read from the text can be hoped to be, of a request that takes the likeliest and of one that
# draws: where not even such a draft pays, nobody reads.
READ_BEST, READ_BEST_DRAWN = 0.97, 0.8
READ_GAIN_MIN = 1.04  # what costs are believed to be is rough, and a plain step is the safe one
# Verifying for some makes all others of a step wait: no step is drawn out to more than this, by what others gain.
STRETCH_MAX = 2.0
READ_MORE_MAX = 64  # tokens that one step verifies of drafts read from the text
PLAIN_EVERY, PLAIN_KNOWN = 4, 32  # of plain steps seen so often only some are looked at: that costs, too
# A plain step behind a verified one finds the caches cold and takes up to twice as long as the third in a row; so now
# and then some are run in a row, or drafting would be measured against what nobody would have to pay.
PLAIN_WARM, PLAIN_RUN, DRAFTED_RUN = 2, 6, 192
PLAIN_COLD = 3  # plain steps in a row behind which a draft's cost is no measure either: it is this much dearer
COLD, COLD_RATE, COLD_MAX = 1.3, 0.1, 3.0
PLAIN_MIN = 3  # plain steps to have seen of so many sequences: all that drafting promises is measured against them


Draws = Literal["greedy", "seeded", "sampled"]  # how a request draws: drafts do differently well with each


@dataclass(slots=True, kw_only=True)
class Acceptance:
    """How well drafts do: of one sequence, or of all that draw alike.

    kept: for each slot, the chance that its token is kept, given that those before it are; bias: what is added to
    the log odds of the drafter's confidence; ideas: the chance that there is a draft at all; seen: drafts judged;
    others: those of other sequences that it began with.
    """

    kept: list[float]
    bias: float = 0.0
    ideas: float = 1.0
    seen: int = 0
    others: int = 0

    def observe(
        self, confidence: Sequence[float], outcomes: Sequence[bool], *, few: int, rate: float, slots: bool = True
    ) -> None:
        """Learn from the slots of a draft that were decided, all kept but perhaps the last. `slots`: what is kept of
        each slot, too, which drafts that are read have no use for."""
        self.seen += 1
        expected = sum(self.calibrated(confidence[:JUDGED_MAX]))
        self.bias = min(max(self.bias + BIAS_RATE * (sum(outcomes[:JUDGED_MAX]) - expected), -BIAS_MAX), BIAS_MAX)
        if slots:
            speed = max(1.0 / (self.seen + few), rate)
            for slot, kept in enumerate(outcomes):
                self.kept[slot] += speed * (kept - self.kept[slot])

    def calibrated(self, confidence: Sequence[float]) -> list[float]:
        """For each token, the chance that it is kept where those before it are."""
        factor = math.exp(-self.bias)
        return [
            1.0 / (1.0 + (1.0 / c - 1.0) * factor) if CONFIDENCE_MIN < c < 1.0 else max(min(c, 1.0), CONFIDENCE_MIN)
            for c in confidence
        ]

    def chances(self, confidence: Sequence[float]) -> list[float]:
        """For each token of a draft, the chance that it and all before it are kept, by the confidence in each."""
        return list(accumulate(self.calibrated(confidence), mul))

    def survival(self, length: int) -> list[float]:
        """For each slot, the chance that its token and all before it are kept, what is unknown taken hopefully."""
        doubt, chance = DOUBT / (1.0 + self.seen + DOUBT_OTHERS * self.others), self.ideas
        chances = []
        for kept in self.kept[:length]:
            chance *= min(kept + doubt * (1.0 - kept), 1.0)
            chances.append(chance)
        return chances


@dataclass(slots=True, kw_only=True)
class Plan:
    """How many tokens to draft for each sequence; a drafted token is verified while the chance that it and all before
    it are kept is at least `price`."""

    lengths: list[int]
    price: float = 0.0

    def verified(self, acceptance: Acceptance, confidence: Sequence[float]) -> int:
        """How many tokens of a draft to verify, given the drafter's confidence in each."""
        chances = acceptance.chances(confidence)  # none looks at a later token
        return next((count for count, chance in enumerate(chances) if chance < self.price), len(chances))


def _likelier(token: tuple[float, int]) -> float:
    return -token[0]


@dataclass(slots=True, kw_only=True)
class DraftPolicy:
    """Lengths for one engine. `len_max`: the longest draft, and of those read from the text `read_len_max` where that
    is more; not `adaptive`: every draft is that long, and verified.

    Units: seconds.
    """

    len_max: int
    read_len_max: int = 0
    adaptive: bool = True
    steps: Costs = field(default_factory=Costs)  # by sequences and tokens of a step without prompts
    drafts: Costs = field(default_factory=Costs)  # by requests and slots
    _priors: dict[tuple[Draws, bool], Acceptance] = field(default_factory=dict)
    _reads: dict[tuple[int, bool], tuple[bool, int]] = field(default_factory=dict)  # and for how many steps more
    _credit_s: float = 0.0
    _probe_s: float = 0.0  # what the next probe will take, when that was last asked
    _still: int = 0  # steps since the last plan that was thought over
    _still_for: int = 0  # sequences of that plan, which chose not to draft; 0: it did draft
    _probes: int = 0  # begun so far
    _probing: int = 0  # steps of the last that are still to come
    _ran: int = 0  # plain steps
    _plain: int = 0  # of them in a row
    _drafted: int = 0  # steps with drafts since plain ones were last run for their own sake
    _pause: int = 0  # plain steps still to run for their own sake
    _cold: float = COLD

    def begin(self, *, draws: Draws, read: bool = False) -> Acceptance:
        """What is expected of a new sequence: what others that draw alike came to. `read`: of drafts that are read
        from its text, which say themselves how good they are."""
        prior = self._prior(draws, read)
        return replace(prior, kept=list(prior.kept), seen=0, others=prior.seen)

    def plan(self, known: Sequence[Acceptance], caps: Sequence[int]) -> Plan | None:
        """For the sequences of the next step, each with the longest draft that it has room for; None: draft nothing.

        Sequences that may not be drafted for have a cap of 0.
        """
        caps = [min(cap, self.len_max) for cap in caps]
        if not any(caps):
            return None
        if not self.adaptive:
            return Plan(lengths=caps)
        if self._probing:
            self._probing -= 1
            return self._tried(caps)
        if self._still_for == len(known) and self._still < LOOK_AGAIN:
            self._still += 1
            return self._probe(known, caps)
        if self.steps.times(len(known), len(known)) < PLAIN_MIN:
            return None
        plan = self._best(known, caps)
        self._still, self._still_for = 0, 0 if plan is not None else len(known)
        if plan is None:
            return self._probe(known, caps)
        return plan

    def pauses(self) -> bool:
        """Whether nothing is drafted for the next step, so that plain steps' cost stays known. Ask once a step."""
        if not self.adaptive or not self._pause:
            return False
        self._pause -= 1
        return True

    def rests(self, sequences: int) -> bool:
        """Whether drafting does not pay for so many and no probe is due: what most steps ask where it never pays."""
        if not self.adaptive or self._still_for != sequences or self._still >= LOOK_AGAIN or self._probing:
            return False
        if self._credit_s >= self._probe_s:
            return False
        self._still += 1
        return True

    def reads(self, sequences: int, *, drawn: bool) -> bool:
        """Whether a draft read from the text, made for nothing, could pay in a step of so many; looked at now and
        then only. `drawn`: by a request that draws at a temperature."""
        if not self.adaptive:
            return True
        if self.steps.times(sequences, sequences) < PLAIN_MIN:
            return False
        pays, steps = self._reads.get((sequences, drawn), (False, 0))
        if not steps:
            best, longest = READ_BEST_DRAWN if drawn else READ_BEST, max(self.len_max, self.read_len_max)
            pays, steps = any(self.worth(sequences, [[best**n for n in range(1, longest + 1)]])), LOOK_AGAIN
        self._reads[sequences, drawn] = pays, steps - 1
        return pays

    def worth(self, sequences: int, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens to verify of drafts that are there already, in a step of so many sequences.

        `chances`: for each draft, that its first token is kept, that its first two are, and so on.
        """
        if not self.adaptive:
            return [len(row) for row in chances]
        lengths = [0] * len(chances)
        if self.steps.times(sequences, sequences) < PLAIN_MIN:
            return lengths
        ranked = [(chance, index) for index, row in enumerate(chances) for chance in row]
        if len(chances) > 1:
            ranked.sort(key=_likelier)  # stable: a draft's tokens stay in order
            del ranked[READ_MORE_MAX:]
        seconds = self.steps.curve(sequences, len(ranked))
        plain = seconds[0]
        longest = plain * STRETCH_MAX if sequences > 1 else math.inf
        dearer = self._cold if self._plain >= PLAIN_COLD else 1.0
        kept, best_rate, best = float(sequences), READ_GAIN_MIN * sequences / plain, 0
        for tokens, (chance, _) in enumerate(ranked, 1):
            kept += chance
            if kept > best_rate * seconds[tokens] * dearer:
                if seconds[tokens] > longest:
                    break
                best_rate, best = kept / (seconds[tokens] * dearer), tokens
        for _, index in ranked[:best]:
            lengths[index] += 1
        return lengths

    def ran(self, *, sequences: int, tokens: int, seconds: float) -> None:
        """A step without prompts: `tokens` in all of `sequences`."""
        self._credit_s = min(self._credit_s + PROBE_SHARE * seconds, max(CREDIT_MAX_S, self._probe_s))
        if tokens > sequences:
            cold, self._plain = self._plain >= PLAIN_COLD, 0
            self._drafted += 1
            if self._drafted >= DRAFTED_RUN:
                self._drafted, self._pause = 0, PLAIN_RUN
            if cold:
                usual = self.steps.estimate(sequences, tokens)
                if usual:
                    self._cold += COLD_RATE * (min(max(seconds / usual, 1.0), COLD_MAX) - self._cold)
                return
        else:
            self._ran += 1
            self._plain += 1
            if self._plain <= PLAIN_WARM:
                return
            if self._ran % PLAIN_EVERY and self.steps.times(sequences, tokens) >= PLAIN_KNOWN:
                return
        self.steps.observe(sequences, tokens, seconds)

    def coasted(self, *, sequences: int, seconds: Sequence[float]) -> None:
        """Plain steps behind which nobody asked anything."""
        self._credit_s = min(self._credit_s + PROBE_SHARE * sum(seconds), max(CREDIT_MAX_S, self._probe_s))
        self._still += len(seconds)
        self._ran += len(seconds)
        self._plain += len(seconds)
        if self._plain > PLAIN_WARM:
            self.steps.observe(sequences, sequences, seconds[-1])

    def drafted(self, *, requests: int, slots: int, seconds: float) -> None:
        if self._plain < PLAIN_COLD:
            self.drafts.observe(requests, slots, seconds)

    def judged(
        self,
        own: Acceptance,
        confidence: Sequence[float],
        outcomes: Sequence[bool],
        *,
        draws: Draws,
        read: bool = False,
    ) -> None:
        """What became of a sequence's draft: see `Acceptance.observe`."""
        own.observe(confidence, outcomes, few=OWN_FEW, rate=OWN_RATE, slots=not read)
        self._prior(draws, read).observe(confidence, outcomes, few=ALL_FEW, rate=ALL_RATE, slots=not read)
        if not read:
            self._still = LOOK_AGAIN

    def cut(self, own: Acceptance, confidence: Sequence[float], verified: int, *, draws: Draws) -> None:
        """A draft was not verified beyond `verified` tokens: the next would not have been kept more often than the
        drafter says, or drafts would be made for ever that nobody tries."""
        if verified < len(confidence):
            chance = own.calibrated(confidence[verified : verified + 1])[0]
            own.kept[verified] += OWN_RATE * (chance - own.kept[verified])
            own.seen += not verified
            prior = self._prior(draws)
            prior.kept[verified] += ALL_RATE * (chance - prior.kept[verified])

    def had_idea(self, own: Acceptance, *, idea: bool, draws: Draws) -> None:
        """Whether the drafter, asked for this sequence, gave any token."""
        own.ideas += OWN_RATE * (idea - own.ideas)
        prior = self._prior(draws)
        prior.ideas += ALL_RATE * (idea - prior.ideas)

    def forget(self, *, costs: bool) -> None:
        """What drafts came to: the texts so far were not real ones. And what things cost, where they were cold."""
        self._priors.clear()
        self._credit_s, self._still_for = 0.0, 0
        self._reads.clear()
        if costs:
            self.steps, self.drafts = Costs(), Costs()

    def plain_s(self, sequences: int) -> float | None:
        """What a step without drafts takes; None: not known."""
        return self.steps.estimate(sequences, sequences)

    # -- details ---------------------------------------------------------------------------------------------------

    def _prior(self, draws: Draws, read: bool = False) -> Acceptance:
        length = max(self.len_max, self.read_len_max) if read else self.len_max
        return self._priors.setdefault((draws, read), Acceptance(kept=[KEPT_PRIOR] * length))

    def _best(self, known: Sequence[Acceptance], caps: Sequence[int]) -> Plan | None:
        """The most tokens per second; None where that is without drafts."""
        count = len(known)
        plain = self.plain_s(count)
        assert plain is not None, "some plain steps come first"
        chances = [
            (chance, index)
            for index, (acceptance, cap) in enumerate(zip(known, caps, strict=True))
            for chance in acceptance.survival(cap)
        ]
        chances.sort(key=_likelier)  # stable: a sequence's slots stay in order
        lengths, kept = [0] * count, float(count)
        best_rate, best = GAIN_MIN * count / plain, 0
        requests, steps, drafts = 0, self.steps.curve(count, len(chances)), self.drafts.curve(1, len(chances))
        for tokens, (chance, index) in enumerate(chances, 1):
            if not lengths[index]:
                requests += 1
                drafts = self.drafts.curve(requests, len(chances))
            lengths[index] += 1
            kept += chance
            rate = kept / (steps[tokens] + (drafts[tokens] if drafts else 0.0))
            if rate > best_rate:
                best_rate, best = rate, tokens
        if not best:
            return None
        lengths = [0] * count
        for _, index in chances[:best]:
            lengths[index] += 1
        more = steps[best] - steps[0]
        price = min(max(best_rate * more / best, PRICE_MIN), PRICE_MAX)
        # One slot further than it pays on average: where confidence is high it will.
        return Plan(lengths=[min(n + 1, cap) if n else 0 for n, cap in zip(lengths, caps, strict=True)], price=price)

    def _probe(self, known: Sequence[Acceptance], caps: Sequence[int]) -> Plan | None:
        """All sequences' drafts, for some steps, where what was put aside pays for them."""
        count, plain = len(known), self.plain_s(len(known)) or 0.0
        tokens = sum(min(cap, PROBE_LEN) for cap in caps)
        step, draft = self.steps.estimate(count, count + tokens), self.drafts.estimate(count, count + tokens)
        cost = PROBE_STEPS * ((step or plain) - plain + (draft or 0.0))
        self._probe_s = max(cost, PROBE_SHARE * plain)
        if not tokens or self._credit_s < self._probe_s:
            return None
        self._credit_s -= self._probe_s
        self._probes += 1
        self._probing = PROBE_STEPS - 1
        return self._tried(caps)

    def _tried(self, caps: Sequence[int]) -> Plan | None:
        length = 1 + self._probes % PROBE_LEN
        return Plan(lengths=[min(cap, length) for cap in caps]) if any(caps) else None
