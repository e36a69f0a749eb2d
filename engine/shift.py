"""What a request adds to its logits before its law: a bias for tokens, less penalties for what its output has said.

As OpenAI's API defines them: every token of the output costs `frequency_penalty` for each time that it was drawn and
`presence_penalty` once; prompts are not counted. Drafted tokens count from the slot behind them on, so that a
verified token's law is the very one that it has without a draft, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.api import SamplingParams

Logits = npt.NDArray[np.float32]


class Shift:
    """Of one sequence; hears what it draws through `drawn`, the sequence's own growing list."""

    def __init__(self, params: SamplingParams, drawn: Sequence[int]) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._bias = dict(params.logit_bias)
        self._counts = Counter(params.generated)
        self._drawn, self._heard = drawn, 0
        self._offsets: Logits | None = None  # [vocab]

    def apply(self, logits: Logits, drafted: Sequence[int]) -> Logits:
        """A shifted copy. Shapes: logits [len(drafted) + 1, vocab]: at each drafted token, and after the last."""
        shifted: Logits = logits + self._current(logits.shape[1])
        counts = Counter[int]()
        for row, token in enumerate(drafted, 1):
            counts[token] += 1
            shifted[row:, token] = logits[row:, token] + self._offset(token, self._counts[token] + counts[token])
        return shifted

    def _current(self, vocab_size: int) -> Logits:
        """What all that was drawn so far comes to."""
        if self._offsets is None:
            self._offsets = np.zeros(vocab_size, dtype=np.float32)
            for token in self._bias.keys() | self._counts.keys():
                self._offsets[token] = self._offset(token, self._counts[token])
        for token in self._drawn[self._heard :]:
            self._counts[token] += 1
            self._offsets[token] = self._offset(token, self._counts[token])
        self._heard = len(self._drawn)
        return self._offsets

    def _offset(self, token: int, count: int) -> np.float32:
        # One rounding from the count, never a running sum: a draft must not meet other bits than a step does.
        penalty = self._frequency * count + (self._presence if count else 0.0)
        return np.float32(self._bias.get(token, 0.0) - penalty)
