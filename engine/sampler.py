"""From logits to tokens: one row at a time in effect, so a sample cannot depend on its batch.

The law: what the request adds to its logits (`engine.shift`), then temperature, then top-k, then top-p over what
top-k left; both keep the lower id of equals. A token is drawn by inverting the cumulative law over the kept ids in
ascending order at one uniform number, which is a pure function of (seed, choice, position, purpose). Log
probabilities are of the model's own law, before all of these.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from engine.api import SampledToken, SamplingParams
from engine.errors import NonFiniteLogits

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
FLOAT64_STEP = 2.0**-53
BLOCK = 256  # about the square root of a vocabulary


class Purpose(IntEnum):
    """Separates the random numbers that one position may need. The values are part of every seeded result."""

    SAMPLE = 0
    DRAFT = 1  # what the drafter draws with
    ACCEPT = 2  # what judges it


def uniform(seed: int, choice: int, position: int, purpose: Purpose, slot: int = 0) -> float:
    """A number in [0, 1), 53 bits; independent across arguments. Golden vectors in the tests pin it.

    A keyed hash is used as a counter-based generator: no state to hand over, and the same on every machine. A draft's
    numbers are told apart by its `slot`s and not by their positions: the next draft covers some positions again, and
    what a verdict has looked at must not be looked at twice.
    """
    counter = struct.pack("<QIQI", seed, choice, position, purpose | slot << 8)
    digest = blake2b(counter, digest_size=8, person=b"moonrelay-random").digest()
    return (int.from_bytes(digest, "little") >> 11) * FLOAT64_STEP


class Rows:
    """Logits [rows, vocab] fp32 of one pass; what all rows need is computed for all at once."""

    def __init__(self, logits: Logits, told: Logits | None = None) -> None:
        """`told`: the rows that log probabilities are of, where those to draw from have been changed."""
        self.logits = logits
        self._told = logits if told is None else told
        # One pass decides for nearly every row: a sum is finite only if no summand is NaN or infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            self._sums = np.add.reduce(logits, axis=1).tolist()

    @cached_property
    def greedy(self) -> list[int]:
        """The lowest id among each row's largest."""
        ids: list[int] = self.logits.argmax(axis=1).tolist()
        return ids

    def finite(self, row: int) -> bool:
        return math.isfinite(self._sums[row]) or bool(np.isfinite(self.logits[row]).all())

    def draw(self, row: int, params: SamplingParams, position: int) -> SampledToken | NonFiniteLogits:
        """The token at `position`, from its row's own law; the error where that has a NaN or an infinity."""
        if not self.finite(row):
            return not_finite(position)
        token = self.greedy[row] if params.temperature == 0.0 else _draw(self.logits[row], params, position)
        return self.named(row, token, params)

    def named(self, row: int, token: int, params: SamplingParams) -> SampledToken:
        return named(self._told, row, token, params)


def named(logits: Logits, row: int, token: int, params: SamplingParams) -> SampledToken:
    """A token that was drawn, with what the request wants to know of its row of logits [rows, vocab], unshifted."""
    if params.top_logprobs is None:
        return SampledToken(id=token)
    return _with_logprobs(logits[row], token, params.top_logprobs)


def not_finite(position: int) -> NonFiniteLogits:
    return NonFiniteLogits(f"the model's logits at position {position} are not finite")


def filtered(logits: Logits, params: SamplingParams) -> tuple[Ids | None, Weights]:
    """The kept ids, ascending (None: all), and their unnormalised weights: the law a token is drawn from.

    Shapes: logits [vocab]; weights [kept] fp32. Needs temperature > 0.
    """
    with np.errstate(over="ignore", under="ignore"):  # far below the maximum a weight is 0, as it should be
        weights = np.exp((logits - logits.max()) / np.float32(max(params.temperature, 1e-30)))
    kept: Ids | None = None
    if 0 < params.top_k < len(logits):
        kept = np.sort(largest(logits, params.top_k))
        weights = weights[kept]
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        weights = weights[nucleus]
        kept = nucleus if kept is None else kept[nucleus]
    return kept, weights


def largest(values: Logits, count: int) -> Ids:
    """Ids of the `count` largest, best first; among equals the lower id comes first. Needs count <= len(values)."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    bound = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= bound)
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that together reach top_p of the whole."""
    total = float(weights.sum(dtype=np.float64))
    # All below this bound weigh less than 1 - top_p together, so none of them is needed: only the others are sorted.
    bound = min((1.0 - top_p) * total / len(weights), float(weights.max()))
    ids = np.flatnonzero(weights >= bound)
    candidates = weights[ids]
    falling = np.sort(candidates)[::-1]
    count = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), top_p * total, side="left")) + 1
    if count >= len(ids):
        return ids
    least = falling[count - 1]
    kept = candidates > least
    equals = np.flatnonzero(candidates == least)
    kept[equals[: count - int(np.count_nonzero(kept))]] = True
    nucleus: Ids = ids[kept]
    return nucleus


def invert(weights: npt.NDArray[np.floating], fraction: float) -> int:
    """The first index at which the running sum exceeds `fraction` of the whole; never one of weight 0.

    Two levels in a fixed order, since a running sum over a whole vocabulary costs more than all else here.
    """
    whole = len(weights) // BLOCK * BLOCK
    sums = np.add.reduce(weights[:whole].reshape(-1, BLOCK), axis=1, dtype=np.float64)
    reached = np.cumsum(np.append(sums, np.add.reduce(weights[whole:], dtype=np.float64)))
    target = fraction * float(reached[-1])
    block = _first_above(reached, target)
    within = np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    before = float(reached[block - 1]) if block else 0.0
    return block * BLOCK + _first_above(within, target - before)


def _first_above(reached: npt.NDArray[np.float64], target: float) -> int:
    index = int(np.searchsorted(reached, target, side="right"))
    if index == len(reached):  # rounding only: take the last that has any weight
        index = int(np.searchsorted(reached, reached[-1], side="left"))
    return index


def _draw(logits: Logits, params: SamplingParams, position: int) -> int:
    kept, weights = filtered(logits, params)
    index = invert(weights, uniform(params.seed, params.choice, position, Purpose.SAMPLE))
    return index if kept is None else int(kept[index])


def _with_logprobs(logits: Logits, token: int, count: int) -> SampledToken:
    best = float(logits.max())
    log_total = best + float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))
    top = tuple((int(i), float(logits[i]) - log_total) for i in largest(logits, count))
    return SampledToken(id=token, logprob=float(logits[token]) - log_total, top=top)
