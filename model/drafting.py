"""What the engine asks of a drafter, be it a small network or a look into the text. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import torch

    from model.batch import Segment
    from model.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Propose `length` tokens to follow `anchor`, the last token drawn, which is the one at `position`.

    The target has consumed the tokens before `position`, not the anchor. Of those, [first, position) left drafter
    rows in `blocks`, which are the sequence's own; tokens before `first` are unknown to the drafter. `uniforms` are
    `length` numbers in [0, 1), one a token, for a temperature above 0; at 0 the likeliest token is taken. `context`
    gives all ids up to the anchor, for drafters that read the text: a `Text` is looked up without reading it anew.

    `guess`: how the text may go on, at most `length` tokens. As long as the draft says the same, each is given so
    much `more` log odds than the drafter itself would: by its law at the temperature, at 0 by its scores.
    """

    anchor: int
    position: int
    blocks: Sequence[int]
    length: int
    first: int = 0
    temperature: float = 0.0
    uniforms: Sequence[float] = ()
    context: Callable[[], Sequence[int]] | None = None
    guess: Sequence[int] = ()
    more: Sequence[float] = ()


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """`confidence`: for each place, the chance that its token is kept, given that those before it are. It knows the
    tokens before it but not its own, so that whoever cuts a draft where it falls low does not bend the law.

    `laws` [len(tokens), vocab] fp32: the distributions from which the tokens were drawn; None where each was certain.
    No tokens: the drafter has no idea, or its output was not finite.
    """

    tokens: list[int]
    confidence: list[float]
    laws: np.ndarray | None = None


NOTHING = Proposal(tokens=[], confidence=[])


@runtime_checkable
class Reader(Protocol):
    """A `DraftModel` that can draft from the text alone, before rows are written for it. `draft` is both.

    `read_len_max`: the longest draft that it reads; one that takes rows is never longer than `block_len`.
    """

    read_len_max: int

    def read(self, text: Text, length: int, *, drawn: bool, sure: bool = False) -> Proposal | None:
        """At most `length` tokens to follow the text, for a request that draws at a temperature or takes the
        likeliest; they are certain. None where they would say too little, or with `sure` less than a draft that takes
        rows. Called at every step: cheap.

        Raises: InvariantError for a length not in 1..read_len_max.
        """
        ...

    def with_rows(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]: ...


class DraftModel(Protocol):
    """Implementations: `model.native.drafter` (C++), `model.drafter.paged` (torch), `model.ngram`.

    `drafter_id` names the rows: equal only for the same drafter on the same target. `target_layers`: the taps that
    `write_rows` wants, ascending; empty where it wants none, and then `draft_width` is 0.
    """

    drafter_id: str
    target_layers: tuple[int, ...]
    block_len: int
    draft_width: int

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the drafter's rows of every token of a pass, verified ones included.

        Shapes: taps [tokens, num_taps, hidden] fp32, as `forward` filled it; rows [num_blocks, block_floats] fp32.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """One proposal a request. What a request is given depends on nothing else in the batch.

        Raises: InvariantError for a request that would read outside the pool or the vocabulary, or whose length is
        not in 1..block_len.
        """
        ...
