"""How many tokens are drafted: what pays is, what does not is not, and what is not known is tried for little."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from engine.draft_cost import LOOKS, Costs, rising
from engine.draft_policy import (
    DRAFTED_RUN,
    PLAIN_RUN,
    PLAIN_WARM,
    PROBE_LEN,
    PROBE_SHARE,
    PROBE_STEPS,
    STRETCH_MAX,
    DraftPolicy,
    Plan,
)

SLOTS = 7


class Machine:
    """Steps whose cost is known and drafts that are kept with known chances, under a policy."""

    def __init__(self, *, sequences: int, kept: float, per_token: float, draft_s: float, seed: int = 1) -> None:
        self.policy = DraftPolicy(len_max=SLOTS)
        self.known = [self.policy.begin(draws="greedy") for _ in range(sequences)]
        self.kept, self.per_token, self.draft_s = kept, per_token, draft_s
        self.rng = random.Random(seed)
        self.seconds = self.drafting_s = 0.0
        self.tokens = 0
        self.lengths: list[int] = []

    def step_s(self, tokens: int) -> float:
        return 1e-3 + self.per_token * (tokens - 1)

    def step(self) -> None:
        count = len(self.known)
        plan = None if self.policy.pauses() else self.policy.plan(self.known, [SLOTS] * count)
        lengths = [0] * count if plan is None else plan.lengths
        if any(lengths):
            asked = sum(length > 0 for length in lengths)
            self.policy.drafted(requests=asked, slots=sum(lengths) + asked, seconds=self.draft_s)
            self.seconds += self.draft_s
            self.drafting_s += self.draft_s
        worth = [
            plan.verified(a, [self.kept] * n) if plan is not None and n else 0
            for a, n in zip(self.known, lengths, strict=True)
        ]
        for acceptance, asked_for, length in zip(self.known, lengths, worth, strict=True):
            self.policy.cut(acceptance, [self.kept] * asked_for, length, draws="greedy")
        seconds = self.step_s(count + sum(worth)) * self.rng.uniform(0.9, 1.3)
        self.policy.ran(sequences=count, tokens=count + sum(worth), seconds=seconds)
        self.seconds += seconds
        self.drafting_s += seconds * sum(worth) / (count + sum(worth))
        for acceptance, length in zip(self.known, worth, strict=True):
            passed = next((i for i in range(length) if self.rng.random() >= self.kept), length)
            outcomes = [True] * passed + [False] * (passed < length)
            if length:
                self.policy.judged(acceptance, [self.kept] * len(outcomes), outcomes, draws="greedy")
            self.tokens += 1 + passed
        self.lengths.append(sum(worth))

    def run(self, steps: int) -> float:
        """Tokens per second of the last half."""
        for _ in range(steps // 2):
            self.step()
        self.seconds = self.drafting_s = 0.0
        self.tokens, self.lengths = 0, []
        for _ in range(steps // 2):
            self.step()
        return self.tokens / self.seconds

    @property
    def plain(self) -> float:
        """Tokens per second without drafts."""
        return len(self.known) / (self.step_s(len(self.known)) * 1.1)


def test_drafts_that_are_kept_are_made_and_pay():
    machine = Machine(sequences=1, kept=0.9, per_token=1e-4, draft_s=2e-4)
    assert machine.run(600) > 2.5 * machine.plain
    assert sum(machine.lengths) / len(machine.lengths) > 4


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize(("kept", "per_token"), [(0.05, 2e-4), (0.5, 1e-3), (0.3, 2e-3)])
def test_drafts_that_do_not_pay_are_left_out_but_for_a_small_share(sequences, kept, per_token):
    machine = Machine(sequences=sequences, kept=kept, per_token=per_token, draft_s=3e-4)
    assert machine.run(3000) > 0.95 * machine.plain
    probe_s = PROBE_STEPS * (machine.draft_s + PROBE_LEN * sequences * per_token)  # one may just have been saved for
    assert machine.drafting_s < 3 * PROBE_SHARE * machine.seconds + probe_s
    assert any(machine.lengths) or machine.policy._credit_s > 0  # it goes on trying, or saves up for it


def test_what_begins_to_pay_is_found():
    machine = Machine(sequences=1, kept=0.05, per_token=2e-4, draft_s=2e-4)
    machine.run(2000)
    machine.kept = 0.95
    assert machine.run(6000) > 1.8 * machine.plain


def test_plain_steps_are_run_in_a_row_now_and_then_so_that_their_cost_stays_known():
    machine = Machine(sequences=1, kept=0.95, per_token=1e-5, draft_s=1e-5)
    machine.run(4 * DRAFTED_RUN)
    runs = [len(list(steps)) for plain, steps in groupby(machine.lengths, key=lambda n: n == 0) if plain]
    assert runs and set(runs) == {PLAIN_RUN} and PLAIN_RUN > PLAIN_WARM


def test_a_plain_step_behind_a_verified_one_is_no_measure():
    """It finds the caches cold: twice as long here."""
    policy = policy_of({1: 1e-3, 4: 2e-3})
    for _ in range(200):
        policy.ran(sequences=1, tokens=4, seconds=2e-3)
        policy.ran(sequences=1, tokens=1, seconds=2e-3)
    assert policy.plain_s(1) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("later", [0.0, 0.5, 1.0])
def test_how_far_a_draft_is_verified_never_looks_at_later_tokens(later):
    policy = DraftPolicy(len_max=SLOTS)
    acceptance = policy.begin(draws="sampled")
    plan = Plan(lengths=[SLOTS], price=0.3)
    seen = [0.9, 0.8, 0.7, 0.2]
    count = plan.verified(acceptance, [*seen, later, later, later])
    assert count == 3


def test_not_adaptive_means_always_all_of_it():
    policy = DraftPolicy(len_max=3, adaptive=False)
    known = [policy.begin(draws="greedy") for _ in range(2)]
    for _ in range(5):
        plan = policy.plan(known, [9, 1])
        assert plan is not None and plan.lengths == [3, 1]
        assert plan.verified(known[0], [0.0, 0.0, 0.0]) == 3
    assert policy.plan(known, [0, 0]) is None


def test_what_was_learned_of_texts_is_forgotten_and_costs_only_where_they_were_cold():
    machine = Machine(sequences=1, kept=0.1, per_token=1e-4, draft_s=1e-4)
    machine.run(100)
    policy = machine.policy
    policy.forget(costs=False)
    assert policy.plain_s(1) is not None
    assert policy.begin(draws="greedy").kept == [pytest.approx(0.7)] * SLOTS
    policy.forget(costs=True)
    assert policy.plain_s(1) is None


def test_costs_follow_a_busier_machine_for_sizes_that_are_not_run():
    costs = Costs()
    for _ in range(50):
        costs.observe(1, 1, 1e-3)
        costs.observe(1, 4, 2e-3)
    between = costs.estimate(1, 2)
    assert between is not None and 1e-3 < between < 2e-3
    for _ in range(200):
        costs.observe(1, 1, 2e-3)
    slower = costs.estimate(1, 4)
    assert slower is not None and slower > 2.4e-3  # a part of the surprise is everybody's
    assert Costs().estimate(1, 1) is None


def policy_of(seconds_by_tokens: dict[int, float], sequences: int = 1) -> DraftPolicy:
    policy = DraftPolicy(len_max=SLOTS)
    for tokens, seconds in seconds_by_tokens.items():
        for _ in range(50):
            policy.ran(sequences=sequences, tokens=tokens, seconds=seconds)
    return policy


def test_drafts_that_are_there_are_verified_as_far_as_each_token_pays():
    """Plain 1 ms, 0.4 ms for each token more: one that is kept every second time does not pay, nine of ten do."""
    policy = policy_of({tokens: 1e-3 + 0.4e-3 * (tokens - 1) for tokens in range(1, SLOTS + 2)})
    assert policy.worth(1, [[0.9, 0.8, 0.7, 0.1, 0.01]]) == [3]
    assert policy.worth(1, [[0.3, 0.2]]) == [0]
    assert DraftPolicy(len_max=SLOTS, adaptive=False).worth(1, [[0.3, 0.2]]) == [2]
    assert DraftPolicy(len_max=SLOTS).worth(1, [[0.9]]) == [0]  # plain steps come first


def test_of_several_drafts_the_likelier_tokens_are_verified():
    policy = policy_of({tokens: 4e-3 + 0.3e-3 * (tokens - 8) for tokens in range(8, 8 + 2 * SLOTS)}, sequences=8)
    assert policy.worth(8, [[0.95, 0.9], [0.4, 0.1]]) == [2, 0]


@pytest.mark.parametrize(("per_token", "reads"), [(0.2e-3, True), (2e-3, False)])
def test_the_text_is_read_only_where_that_could_pay(per_token, reads):
    policy = policy_of({tokens: 1e-3 + per_token * (tokens - 1) for tokens in range(1, SLOTS + 2)})
    assert policy.reads(1, drawn=False) is reads
    assert DraftPolicy(len_max=SLOTS).reads(1, drawn=False) is False


def test_a_nearly_certain_draft_is_verified_far_beyond_the_block():
    policy = policy_of({tokens: 1e-3 + 0.3e-3 * (tokens - 1) for tokens in (1, 2, 4, 8, 16, 32)})
    policy.read_len_max = 31
    assert policy.worth(1, [[0.999**n for n in range(1, 32)]]) == [31]
    assert policy.worth(1, [[0.8**n for n in range(1, 32)]])[0] < SLOTS


def test_no_step_is_drawn_out_for_others_by_more_than_a_bound():
    policy = policy_of({tokens: 4e-3 + 0.1e-3 * (tokens - 8) for tokens in range(8, 80, 6)}, sequences=8)
    lengths = policy.worth(8, [[0.999**n for n in range(1, 64)]])
    assert 4e-3 + 0.1e-3 * lengths[0] == pytest.approx(4e-3 * STRETCH_MAX, rel=0.03)
    alone = policy_of({tokens: 4e-3 + 0.1e-3 * (tokens - 1) for tokens in range(1, 80, 6)})
    assert alone.worth(1, [[0.999**n for n in range(1, 64)]]) == [63]


def test_a_curve_of_costs_never_falls_and_is_drawn_anew():
    assert rising([1.0, 3.0, 2.0, 4.0, 1.0]) == pytest.approx([1.0, 2.5, 2.5, 2.5, 2.5])
    costs = Costs()
    assert list(costs.curve(1, 3)) == []
    for tokens, seconds in ((1, 1e-3), (2, 3e-3), (3, 2e-3), (8, 6e-3)):
        costs.observe(1, tokens, seconds)
    curve = list(costs.curve(1, 7))
    assert curve == sorted(curve) and len(curve) == 8 and curve[0] == pytest.approx(1e-3)
    for _ in range(100):
        costs.observe(1, 1, 1e-2)
    for _ in range(LOOKS):
        curve = list(costs.curve(1, 7))
    assert curve[0] > 2e-3


def test_one_slow_step_of_a_size_rules_it_out_no_longer_than_it_takes_to_try_it_again():
    """The first steps of a size are often cold: here a long draft's first takes four times as long as others."""
    costs = Costs()
    for _ in range(40):
        costs.observe(1, 1, 0.4e-3)
        costs.observe(1, 6, 1.0e-3)
    costs.observe(1, 16, 8e-3)
    slow = costs.estimate(1, 16)
    assert slow is not None and 16 / slow > 6 / 1.0e-3  # still worth another try, where all of it is kept
    for _ in range(4):
        costs.observe(1, 16, 2e-3)
    known = costs.estimate(1, 16)
    assert known is not None and known == pytest.approx(2e-3, rel=0.25)


def test_what_was_seen_long_ago_counts_less():
    costs = Costs()
    for _ in range(40):
        costs.observe(1, 1, 0.4e-3)
    for _ in range(3):
        costs.observe(1, 5, 4e-3)
    soon = costs.estimate(1, 5)
    for _ in range(1000):
        costs.observe(1, 1, 0.4e-3)
    later = costs.estimate(1, 5)
    assert soon is not None and later is not None and later < 0.75 * soon


def test_a_size_that_was_never_seen_lies_between_its_neighbours():
    costs = Costs()
    for _ in range(40):
        for tokens, seconds in ((1, 0.4e-3), (4, 0.7e-3), (8, 1.5e-3)):
            costs.observe(1, tokens, seconds)
    between = costs.estimate(1, 6)
    assert between is not None and 0.7e-3 < between < 1.5e-3


def test_a_new_sequence_is_expected_to_do_as_others_that_draw_alike_did():
    """Much is hoped where nobody knows yet, and nothing where many drafts were judged."""
    policy = DraftPolicy(len_max=SLOTS)
    assert policy.begin(draws="greedy").survival(1)[0] > 0.75
    one = policy.begin(draws="greedy")
    for _ in range(200):
        policy.judged(one, [0.5], [False], draws="greedy")
    assert policy.begin(draws="greedy").survival(1)[0] < 0.1
    assert policy.begin(draws="sampled").survival(1)[0] > 0.75
