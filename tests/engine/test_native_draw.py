"""The draws in C++ against the engine's own, which say what is computed: laws, tokens, verdicts, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import sampler_of

from engine.api import SampledToken, SamplingParams
from engine.errors import NonFiniteLogits
from engine.judge import draw
from engine.sampler import Purpose, filtered, uniform
from engine.shift import Shift
from engine.step import Draw
from engine.verify import Rule
from model.native.backend import library
from model.native.draw_ffi import WANTED
from model.native.sampler import ROOM, NativeSampler
from moonrelay.errors import InvariantError

pytestmark = pytest.mark.usefixtures("sampler")  # the library is there, compiled, before anything is timed
RULES: tuple[Rule, ...] = ("standard", "block")
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.05},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 10**6, "top_p": 1.0},
)
VOCABS = (2, 5, 16, 17, 255, 256, 257, 1000, 6400)


@pytest.fixture(scope="module")
def sampler() -> NativeSampler:
    found = sampler_of("native")
    assert isinstance(found, NativeSampler)
    return found


def rows_of(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Peaked, flat, tied and ordinary logits."""
    if kind == "peaked":
        logits = rng.normal(0.0, 1.0, (rows, vocab))
        logits[np.arange(rows), rng.integers(0, vocab, rows)] += 40.0
    elif kind == "flat":
        logits = np.zeros((rows, vocab))
    elif kind == "tied":
        logits = rng.integers(-2, 3, (rows, vocab)).astype(np.float64)
    else:
        logits = rng.normal(0.0, 4.0, (rows, vocab))
    return logits.astype(np.float32)


KINDS = ("peaked", "flat", "tied", "ordinary")


@given(
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**40),
    purpose=st.sampled_from(Purpose),
    slot=st.integers(0, 2**20),
)
def test_random_numbers_are_the_engines(seed: int, choice: int, position: int, purpose: Purpose, slot: int) -> None:
    assert library().mr_op_uniform(seed, choice, position, purpose, slot) == uniform(
        seed, choice, position, purpose, slot
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_filtered_law_is_the_engines(kind: str, vocab: int) -> None:
    rng, weights = np.random.default_rng([vocab, *kind.encode()]), np.empty(vocab, dtype=np.float32)
    for options in FILTERS[1:]:
        params = SamplingParams(**options)
        (row,) = rows_of(kind, 1, vocab, rng)
        top_k = params.top_k if params.top_k < vocab else 0
        asked = WANTED.pack(row.ctypes.data, 0, 0, 0, params.top_p, params.temperature, 0, top_k, 0)
        assert library().mr_op_weigh(asked, vocab, weights.ctypes.data) == 0
        kept, want = filtered(row, params)
        law = np.zeros(vocab, dtype=np.float64)
        law[slice(None) if kept is None else kept] = want
        found = weights.astype(np.float64)
        np.testing.assert_allclose(found / found.sum(), law / law.sum(), rtol=2e-5, atol=1e-9, err_msg=str(options))


def both(
    sampler: NativeSampler, logits: np.ndarray, draws: list[Draw], rule: Rule = "block"
) -> tuple[list[Any], list[Any]]:
    return draw(logits, draws, rule), draw(logits, draws, rule, sampler)


def told(answers: list[Any]) -> list[Any]:
    """Ids and errors, comparable."""

    def one(token: Any) -> Any:
        return token.id if isinstance(token, SampledToken) else str(token)

    return [tuple(map(one, a)) if isinstance(a, tuple) else one(a) for a in answers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_plain_draws_are_the_engines(sampler: NativeSampler, kind: str, vocab: int) -> None:
    rng = np.random.default_rng([1, vocab, *kind.encode()])
    for options in FILTERS:
        logits = rows_of(kind, 2 * ROOM, vocab, rng)
        draws = [
            Draw(params=SamplingParams(seed=int(rng.integers(2**63)), choice=i % 3, **options), position=7 * i)
            for i in range(len(logits))
        ]
        slow, fast = both(sampler, logits, draws)
        assert told(slow) == told(fast), options


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["tied", "ordinary"])
@pytest.mark.parametrize("vocab", [5, 40, 257, 6400])
def test_verdicts_are_the_engines(sampler: NativeSampler, rule: Rule, kind: str, vocab: int) -> None:
    """Drafts from laws near the target's, certain ones, and plain draws beside them, in one batch."""
    rng = np.random.default_rng([2, vocab, *rule.encode()])
    kept_any = refused_any = False
    for options in FILTERS:
        draws, logits = [], []
        for number in range(12):
            length = int(rng.integers(0, 6))
            rows = rows_of(kind, length + 1, vocab, rng)
            near = rows[:length] + rng.normal(0.0, 0.7, (length, vocab)).astype(np.float32)
            params = SamplingParams(seed=number, **options)
            laws = np.exp(near - near.max(axis=1, keepdims=True)) if length else np.empty((0, vocab))
            laws = (laws / laws.sum(axis=1, keepdims=True)).astype(np.float32)
            tokens = [int(rng.choice(vocab, p=law / law.sum())) for law in laws.astype(np.float64)]
            certain = number % 3 == 0
            if certain:
                tokens = [int(row.argmax()) for row in rows[:length]]
            draws.append(
                Draw(
                    params=params, position=100 + number, drafted=tokens, laws=None if certain or not length else laws
                )
            )
            logits.append(rows)
        slow, fast = both(sampler, np.concatenate(logits), draws, rule)
        assert told(slow) == told(fast), options
        runs = [(d, a) for d, a in zip(draws, fast, strict=True) if d.laws is not None and isinstance(a, tuple)]
        kept_any |= any(len(a) > 1 for _, a in runs)
        refused_any |= any(len(a) <= len(d.drafted) for d, a in runs)
    assert kept_any and refused_any


@pytest.mark.parametrize("options", FILTERS)
def test_a_verified_row_gives_the_token_that_a_plain_one_does(
    sampler: NativeSampler, options: dict[str, Any]
) -> None:
    """What a request draws behind certain drafts is what it draws one by one: the same function of the same row."""
    rng = np.random.default_rng(3)
    logits = rows_of("ordinary", 8, 6400, rng)
    params = SamplingParams(seed=11, **options)
    one_by_one = [
        draw(logits[i : i + 1], [Draw(params=params, position=50 + i)], "block", sampler)[0].id for i in range(8)
    ]
    (run,) = draw(logits, [Draw(params=params, position=50, drafted=one_by_one[:7])], "block", sampler)
    assert [token.id for token in run] == one_by_one


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab", [5, 257, 6400])
def test_a_row_that_is_not_finite_gives_no_token(sampler: NativeSampler, bad: float, vocab: int) -> None:
    rng = np.random.default_rng(4)
    for place in {0, 1, vocab // 2, vocab - 1}:
        for options in FILTERS:
            logits = rows_of("ordinary", 4, vocab, rng)
            logits[2, place] = bad
            params = SamplingParams(seed=place, **options)
            laws = np.full((3, vocab), 1.0 / vocab, dtype=np.float32)
            certain = Draw(params=params, position=9, drafted=[int(i) for i in logits[:3].argmax(axis=1)])
            for asked in (certain, Draw(params=params, position=9, drafted=[1, 2, 3], laws=laws)):
                slow, fast = both(sampler, logits, [asked])
                assert told(slow) == told(fast)
            (alone,) = draw(logits[2:3], [Draw(params=params, position=31)], "block", sampler)
            assert isinstance(alone, NonFiniteLogits) and "position 31" in str(alone)


def test_what_a_request_adds_to_its_logits_and_wants_to_know_of_them(sampler: NativeSampler) -> None:
    rng = np.random.default_rng(5)
    logits = rows_of("ordinary", 5, 300, rng)
    params = SamplingParams(temperature=1.0, seed=3, presence_penalty=1.5, logit_bias=((7, 9.0),), top_logprobs=3)
    drafted = [7, 7]
    draws = [
        Draw(params=SamplingParams(temperature=0.7, seed=1, top_logprobs=0), position=4),
        Draw(params=params, position=4, drafted=drafted, shift=Shift(params, [7, 8])),
        Draw(params=SamplingParams(temperature=0.0), position=4),
    ]
    slow, fast = both(sampler, logits, draws)
    assert slow == fast


def test_what_does_not_fit_is_refused(sampler: NativeSampler) -> None:
    logits = np.zeros((2, 10), dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    for drafted in ([10], [-1]):
        with pytest.raises(InvariantError, match="outside the vocabulary of 10"):
            draw(logits, [Draw(params=greedy, position=1, drafted=drafted)], "block", sampler)
    with pytest.raises(InvariantError, match="2 rows"):
        draw(logits, [Draw(params=greedy, position=1)], "block", sampler)
    laws = np.ones((1, 9), dtype=np.float32)
    with pytest.raises(InvariantError, match="expected"):
        draw(logits, [Draw(params=SamplingParams(), position=1, drafted=[1], laws=laws)], "block", sampler)
