"""The planner: every kind where it belongs, and nothing that could not be used."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.planner import BRANCH, HEAD, INTERVAL, MESSAGE, PlannerSettings, plan, wants_turn

NO_INTERVAL = PlannerSettings(interval_tokens=0)


@dataclass(frozen=True)
class Known:
    tokens: int = 0
    seen_tokens: int = 0


def chosen(hints, prompt_tokens, known, settings=NO_INTERVAL):
    return [(p.tokens, p.kind) for p in plan(hints, prompt_tokens, 64, known, settings)]


@pytest.mark.parametrize(
    ("hints", "prompt_tokens", "hit_tokens", "want"),
    [
        ([(300, 1)], 310, 0, [(256, MESSAGE)]),
        ([(300, 1)], 300, 0, [(256, MESSAGE)]),
        ([(256, 1)], 256, 0, [(192, MESSAGE)]),  # the last token must be computed
        ([(256, 1)], 257, 0, [(256, MESSAGE)]),
        ([(63, 1)], 63, 0, []),
        ([(64, 1)], 65, 0, [(64, MESSAGE)]),
        ([(260, 0), (700, 1)], 720, 0, [(256, HEAD), (640, MESSAGE)]),
        ([(255, 0), (700, 1)], 720, 0, [(640, MESSAGE)]),  # a head of fewer than 4 blocks
        ([(260, 0), (700, 1)], 720, 256, [(640, MESSAGE)]),  # the head is there already
        ([(260, 0), (700, 1)], 720, 640, []),
        ([(700, 0), (700, 1)], 720, 0, [(640, HEAD)]),
        ([], 720, 0, []),
    ],
)
def test_hinted_ends(hints, prompt_tokens, hit_tokens, want):
    assert chosen(hints, prompt_tokens, Known(hit_tokens, hit_tokens)) == want


@pytest.mark.parametrize(
    ("prompt_tokens", "known", "want"),
    [
        (1_000, Known(0, 320), [(320, BRANCH)]),
        (1_000, Known(128, 320), [(320, BRANCH)]),
        (1_000, Known(320, 320), []),
        (1_000, Known(128, 128), []),
        (320, Known(128, 320), [(256, BRANCH)]),  # all of it was seen, its last token must be computed
    ],
)
def test_a_shared_prefix_is_kept_where_it_was_seen_to_end(prompt_tokens, known, want):
    assert chosen([], prompt_tokens, known) == want


def test_the_interval_lies_on_the_same_positions_for_every_prompt():
    settings = PlannerSettings(interval_tokens=256)
    assert chosen([(900, 1)], 1_000, Known(), settings) == [
        (256, INTERVAL), (512, INTERVAL), (768, INTERVAL), (896, MESSAGE),
    ]  # fmt: skip
    assert chosen([], 1_000, Known(320, 320), settings)[:2] == [(512, INTERVAL), (768, INTERVAL)]
    assert chosen([], 1_000, Known(256, 512), settings)[:2] == [(512, BRANCH), (768, INTERVAL)]


def test_a_long_stretch_is_also_kept_short_of_its_end():
    settings = PlannerSettings(interval_tokens=2_048)  # so a stretch of 512 is long, and 128 is short of its end
    assert chosen([(999, 1)], 1_000, Known(), settings) == [(832, INTERVAL), (960, MESSAGE)]
    assert chosen([(999, 1)], 1_000, Known(448, 448), settings) == [(832, INTERVAL), (960, MESSAGE)]
    assert chosen([(999, 1)], 1_000, Known(512, 512), settings) == [(960, MESSAGE)]


def test_a_turn_after_one_shot_messages_is_not_kept():
    assert wants_turn(one_shot=False) and not wants_turn(one_shot=True)
    assert not wants_turn(one_shot=False, settings=PlannerSettings(writeback="off"))


@given(
    hints=st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 1)), max_size=4),
    prompt_tokens=st.integers(1, 90_000),
    block_tokens=st.sampled_from([64, 512]),
    hit_blocks=st.integers(0, 9),
    seen_blocks=st.integers(0, 300),
    interval_tokens=st.sampled_from([0, 100, 16_384, 32_768]),
)
def test_every_planned_state_is_a_passed_boundary(
    hints, prompt_tokens, block_tokens, hit_blocks, seen_blocks, interval_tokens
):
    last = (prompt_tokens - 1) // block_tokens * block_tokens
    hit = min(hit_blocks * block_tokens, last)
    known = Known(hit, max(hit, min(seen_blocks * block_tokens, prompt_tokens)))
    found = plan(hints, prompt_tokens, block_tokens, known, PlannerSettings(interval_tokens=interval_tokens))
    at = [p.tokens for p in found]
    assert at == sorted(set(at))
    assert all(n % block_tokens == 0 and hit < n <= last for n in at)
    if min(known.seen_tokens, last) - hit >= block_tokens:
        assert min(known.seen_tokens, last) // block_tokens * block_tokens in at, "the shared prefix is kept"
    if hints and (end := max(min(o, last) // block_tokens * block_tokens for o, k in hints)) > hit:
        assert end in at or end < 4 * block_tokens


@given(kinds=st.permutations([0, 1]), first=st.integers(300, 900))
def test_the_order_of_hints_does_not_matter(kinds, first):
    hints = [(first, k) for k in kinds]
    assert chosen(hints, 1_000, Known()) == chosen(hints[::-1], 1_000, Known())
