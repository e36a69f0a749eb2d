"""A trained drafter that first looks whether the text has said it before. Torch-free.

A block of a few parallel slots cannot copy well, and text repeats itself: where the newest tokens occurred earlier,
what followed them then is the better draft, and costs no pass of the network. Elsewhere the network drafts.
Measured with k3-nano on held-out prompts at temperature 0, tokens a verify step of up to 7: see `train/README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from model.drafting import DraftModel, DraftRequest, Proposal
from model.ngram import LONGEST, look_up

if TYPE_CHECKING:
    import torch

    from model.batch import Segment

WINDOW = 16_384  # newest tokens that are searched: a tenth of a millisecond
# The shortest match that is trusted: the lengths from which a looked-up first token is kept more often than a
# drafted one. At a temperature the draft is certain and the target's draw is not.
MATCH_MIN_GREEDY, MATCH_MIN_DRAWN = 2, 4
# How often the first token and each later one are kept, by the length of the match from 1 on; counted on
# continuations of training prompts. Once one is kept, the match is longer by one.
KEPT_GREEDY = (0.42, 0.57, 0.77, 0.82, 0.85, 0.85, 0.86, 0.88)
KEPT_DRAWN = (0.18, 0.33, 0.48, 0.63, 0.68, 0.70, 0.72, 0.75)


class LookupFirst:
    """A `DraftModel` around another: rows, taps and identity are the inner one's, and so is every other draft."""

    def __init__(self, inner: DraftModel) -> None:
        self.inner = inner
        self.drafter_id = inner.drafter_id
        self.target_layers = inner.target_layers
        self.block_len = inner.block_len
        self.draft_width = inner.draft_width

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        self.inner.write_rows(segments, taps, rows)

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """A looked-up proposal is shorter than asked where the earlier text ends. Raises: as the inner drafter."""
        found = self.without_rows(requests)
        rest = [request for request, proposal in zip(requests, found, strict=True) if proposal is None]
        drafted = iter(self.with_rows(rest, rows) if rest else ())
        return [next(drafted) if proposal is None else proposal for proposal in found]

    def without_rows(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        """The looked-up ones, None elsewhere."""
        return [looked_up(request) for request in requests]

    def with_rows(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """The inner drafter's. Raises: as it does."""
        return self.inner.draft(requests, rows)


def looked_up(request: DraftRequest) -> Proposal | None:
    """What followed the newest tokens the last time, or None where that says too little."""
    if request.context is None:
        return None
    drawn = request.temperature > 0
    context = request.context()[-WINDOW:]
    start, matched = look_up(context)
    if matched < (MATCH_MIN_DRAWN if drawn else MATCH_MIN_GREEDY):
        return None
    tokens = list(context[start : start + request.length])
    kept = KEPT_DRAWN if drawn else KEPT_GREEDY
    confidence = [kept[min(matched + place, LONGEST) - 1] for place in range(len(tokens))]
    return Proposal(tokens=tokens, confidence=confidence)
