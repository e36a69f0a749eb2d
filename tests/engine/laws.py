"""A toy language with an exact law, drafters of every kind for it, and Pearson's test of what was drawn.

The next token's logits depend on all tokens before it, so the law of a few tokens is a product that can be summed up
exactly, and a judge that mixes up positions is seen.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from engine.api import SamplingParams
from engine.sampler import filtered
from model.native.build import COMPILERS
from model.sampling import Sampler

VOCAB = 5
TWINS = ("numpy", "native")
TOKENS = 3  # of a stream whose joint law is tested
DRAFTED = 3
EXPECTED_MIN = 5.0  # a cell with fewer expected draws joins the others of that kind

History = tuple[int, ...]
Law = npt.NDArray[np.float64]
Change = Callable[[npt.NDArray[np.float32], History], npt.NDArray[np.float32]]  # penalties and bias, on the logits


def unchanged(logits: npt.NDArray[np.float32], history: History) -> npt.NDArray[np.float32]:
    return logits


def penalised(logits: npt.NDArray[np.float32], history: History) -> npt.NDArray[np.float32]:
    """A presence penalty of 0.7, a frequency penalty of 0.4, and a bias for one token against another."""
    counts = np.bincount(history, minlength=VOCAB).astype(np.float32)
    bias = np.array([0.0, 1.0, 0.0, -1.5, 0.0], dtype=np.float32)
    changed: npt.NDArray[np.float32] = logits - np.float32(0.7) * (counts > 0) - np.float32(0.4) * counts + bias
    return changed


def sampler_of(twin: str) -> Sampler | None:
    """Who draws: numpy or the library in C++; the test skips where there is no compiler for that."""
    if twin == "numpy":
        return None
    from model.native.backend import library
    from model.native.sampler import NativeSampler

    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    return NativeSampler(library())


@cache
def raw_logits(history: History, seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng([seed, len(history), *history])
    return rng.normal(0.0, 1.5, VOCAB).astype(np.float32)


def law_of(logits: npt.NDArray[np.float32], params: SamplingParams) -> Law:
    """The request's own law as the sampler filters it, over the whole vocabulary."""
    kept, weights = filtered(logits, params)
    law = np.zeros(VOCAB)
    law[slice(None) if kept is None else kept] = weights
    normalised: Law = law / law.sum()
    return normalised


def joint_law(params: SamplingParams, change: Change) -> dict[History, float]:
    """Every stream of TOKENS tokens and its probability."""
    found = {}
    for stream in itertools.product(range(VOCAB), repeat=TOKENS):
        laws = (law_of(change(raw_logits(stream[:i]), stream[:i]), params) for i in range(TOKENS))
        found[stream] = math.prod(float(law[token]) for law, token in zip(laws, stream, strict=True))
    return found


def softmax(values: npt.NDArray[np.floating]) -> Law:
    weights = np.exp(values - values.max())
    law: Law = weights / weights.sum()
    return law


@cache
def sharp(history: History) -> Law:
    """Surer than the target, and often of the same."""
    return softmax(2.5 * raw_logits(history) + 0.8 * raw_logits(history, seed=1))


@cache
def flat(history: History) -> Law:
    return np.full(VOCAB, 1.0 / VOCAB)


@cache
def wrong(history: History) -> Law:
    """Sure of what the target thinks unlikely."""
    return softmax(-1.5 * raw_logits(history))


@cache
def same(history: History) -> Law:
    """The unfiltered target itself."""
    return softmax(raw_logits(history).astype(np.float64))


@cache
def certain(history: History) -> Law:
    """One token, which is not always the target's likeliest."""
    law = np.zeros(VOCAB)
    law[int(np.argmax(raw_logits(history) + 0.8 * raw_logits(history, seed=2)))] = 1.0
    return law


DRAFTERS: Mapping[str, Callable[[History], Law]] = {
    "certain": certain, "sharp": sharp, "flat": flat, "wrong": wrong, "same": same,
}  # fmt: skip


def p_value(drawn: Counter[History], law: Mapping[History, float]) -> float:
    """How often draws from `law` would look at least as unlike it as `drawn` do; 0 for one that the law excludes.

    Pearson's statistic over cells of at least EXPECTED_MIN expected draws, its tail by Wilson and Hilferty.
    """
    total = sum(drawn.values())
    if any(law[stream] == 0.0 for stream in drawn):
        return 0.0
    cells, rest_found, rest_expected = [], 0, 0.0
    for stream, probability in law.items():
        expected = probability * total
        if expected >= EXPECTED_MIN:
            cells.append((drawn[stream], expected))
        else:
            rest_found, rest_expected = rest_found + drawn[stream], rest_expected + expected
    if rest_expected > 0.0:
        cells.append((rest_found, rest_expected))
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    return chi_square_tail(statistic, len(cells) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square >= statistic), to a few per cent of itself in the tail."""
    if degrees < 1:
        return 1.0
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
