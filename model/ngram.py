"""Prompt lookup: draft what followed the last time that the sequence's newest tokens occurred in it. Torch-free.

It has no weights, no rows and no idea on text that does not repeat itself: what a trained drafter is measured beside.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from model.drafting import NOTHING, DraftRequest, Proposal
from model.errors import ModelError
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    import torch

    from model.batch import Segment

BLOCK_LEN = 7
LONGEST = 8  # tokens that are looked up together; a longer match says no more
# How often the next drafted token is kept, by the length of the match, from 1 on: counted on k3-nano's own greedy
# outputs, code and prose. Most recent matches are kept more often than earliest ones, longest ones than shorter.
KEPT = (0.5, 0.7, 0.8, 0.8, 0.85, 0.85, 0.9, 0.9)


class NgramDrafter:
    """A `DraftModel` without a model; the same tokens always give the same draft."""

    drafter_id = f"ngram-{LONGEST}"
    target_layers: tuple[int, ...] = ()
    draft_width = 0

    def __init__(self, block_len: int = BLOCK_LEN) -> None:
        """Raises: ModelError where nothing could be drafted."""
        if block_len < 1:
            raise ModelError(f"expected a draft length of at least 1, found {block_len}")
        self.block_len = block_len

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        """Nothing is kept beside the tokens themselves."""

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """Proposals are shorter than asked where the earlier text ends, empty where nothing recurs.

        Raises: InvariantError for a request without its context, or whose context does not end with its anchor.
        """
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Proposal:
        if request.context is None or not 1 <= request.length <= self.block_len:
            raise InvariantError(f"a draft of {request.length} tokens needs its text and at most {self.block_len}")
        context = request.context()
        if not context or context[-1] != request.anchor:
            raise InvariantError("the text does not end with the anchor")
        start, matched = look_up(context)
        if not matched:
            return NOTHING
        tokens = list(context[start : start + request.length])
        return Proposal(tokens=tokens, confidence=[KEPT[matched - 1]] * len(tokens))


def look_up(context: Sequence[int], longest: int = LONGEST) -> tuple[int, int]:
    """Where the most recent occurrence of the longest recurring end of `context` ends, and that end's length.

    Units: tokens. (0, 0) where not even the last token occurred before.
    """
    words = array("I", context[:])
    width, text = words.itemsize, words.tobytes()
    for matched in range(min(longest, len(words) - 1), 0, -1):
        end = text[-matched * width :]
        found = text.rfind(end, 0, len(text) - width)
        while found % width and found > 0:  # a match of bytes across two ids
            found = text.rfind(end, 0, found + len(end) - 1)
        if found >= 0 and found % width == 0:
            return found // width + matched, matched
    return 0, 0
