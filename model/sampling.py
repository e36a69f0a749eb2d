"""What a backend may offer beside its logits: to draw the tokens too. Torch-free.

The law is the engine's (`engine/sampler.py`, `engine/judge.py`, `engine/verify.py`): an implementation here is a fast
twin of those, which run wherever a backend has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]


class Params(Protocol):
    """How a request draws; `engine.api.SamplingParams`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...


class Wanted(Protocol):
    """A token to draw, behind drafted ones to judge; `engine.step.Draw`."""

    @property
    def params(self) -> Params: ...
    @property
    def position(self) -> int: ...
    @property
    def drafted(self) -> Sequence[int]: ...
    @property
    def laws(self) -> Logits | None: ...


class Sampler(Protocol):
    def draw(
        self,
        logits: Logits,
        draws: Sequence[Wanted],
        shifted: Mapping[int, Logits],
        rule: Literal["standard", "block"],
    ) -> Sequence[int]:
        """For each draw two numbers in turn: how many of its drafted tokens are kept, and the token behind them, or
        -1 where that one's row has a NaN or an infinity.

        Shapes: logits [rows, vocab] fp32: one row for each draw and one more for each token drafted for it, in order;
                shifted: by index of a draw, the rows to take in place of its own.
        Raises: InvariantError for rows that do not fit the draws, or a drafted token outside the vocabulary.
        """
        ...
