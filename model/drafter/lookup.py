"""A trained drafter that first looks whether the text has said it before. Torch-free.

A block of a few parallel slots cannot copy well, and text repeats itself: where the newest tokens occurred earlier,
what followed them then is often the better draft, and costs no pass of the network. Elsewhere the network drafts, and
is told what followed them: of a short match each knows what the other does not.
A draft that is read may be longer than the network's block: the longer the match, the surer is all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from model.drafting import DraftModel, DraftRequest, Proposal
from model.text import LONGEST, Text
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    import torch

    from model.batch import Segment

READ_LEN_MAX = 63  # tokens: the engine verifies no longer draft; its settings choose how many are worth it
# The shortest match that is trusted where a pass of the network costs more than it adds: the lengths from which a
# looked-up first token is kept more often than a drafted one. At a temperature the draft is certain and the target's
# draw is not.
MATCH_MIN_GREEDY, MATCH_MIN_DRAWN = 2, 4
# And from which on the network, told of the match, adds nothing.
MATCH_SURE_GREEDY, MATCH_SURE_DRAWN = 6, 11
# How often a token is kept, by the length of the match before it, those kept of the draft itself included: counted
# on 105 continuations of 384 tokens of the drafter's validation prompts. Between these lengths on a line.
KEPT_GREEDY = {2: 0.58, 3: 0.77, 5: 0.85, 12: 0.86, 16: 0.92, 20: 0.962, 32: 0.966, 40: 0.99, LONGEST: 0.997}
KEPT_DRAWN = {2: 0.29, 3: 0.43, 4: 0.53, 5: 0.61, 7: 0.69, 12: 0.8, 16: 0.87, 32: 0.94, LONGEST: 0.99}
# How much the network's log odds of a token rise where a match of that length says it: what the target's laws have
# most in common with, on 150 continuations of prompts that the drafter was trained with.
MORE_GREEDY = {2: 4.5, 3: 6.0, 5: 6.5, LONGEST: 8.0}
MORE_DRAWN = {2: 3.25, 3: 3.25, 4: 3.6, 7: 4.0, 10: 4.5, LONGEST: 4.5}


def by_length(kept: dict[int, float]) -> list[float]:
    """At each length of match up to the longest, 0 where it is shorter than any that is known."""
    known = sorted(kept)
    chances = [0.0] * known[0]
    for low, high in pairwise(known):
        chances += [kept[low] + (kept[high] - kept[low]) * (n - low) / (high - low) for n in range(low, high)]
    return [*chances, kept[known[-1]]]


GREEDY, DRAWN = by_length(KEPT_GREEDY), by_length(KEPT_DRAWN)
GREEDY_MORE, DRAWN_MORE = by_length(MORE_GREEDY), by_length(MORE_DRAWN)


def along(known: list[float], matched: int, length: int) -> list[float]:
    """What is known of `length` tokens behind a match: each that is the same makes it longer."""
    values = known[matched : matched + length]
    return values + known[-1:] * (length - len(values))


def looked_up(text: Text, length: int, *, drawn: bool, sure: bool = False) -> Proposal | None:
    """`length` tokens that followed the text's newest ones the last time, or None where no match is long enough.

    `sure`: long enough that the network would add nothing.
    """
    if not 1 <= length <= READ_LEN_MAX:
        raise InvariantError(f"a draft of {length} tokens, where 1 to {READ_LEN_MAX} are read")
    place, matched = text.look_up()
    least = (MATCH_MIN_GREEDY, MATCH_SURE_GREEDY), (MATCH_MIN_DRAWN, MATCH_SURE_DRAWN)
    if matched < least[drawn][sure]:
        return None
    return Proposal(tokens=text.after(place, length), confidence=along(DRAWN if drawn else GREEDY, matched, length))


def told(request: DraftRequest) -> DraftRequest:
    """The request with what its text says, where that is anything."""
    text = text_of(request)
    place, matched = text.look_up() if text is not None else (0, 0)
    if text is None or not matched:
        return request
    more = DRAWN_MORE if request.temperature > 0 else GREEDY_MORE
    guess = text.after(place, request.length)
    return replace(request, guess=guess, more=along(more, matched, request.length))


def text_of(request: DraftRequest) -> Text | None:
    if request.context is None:
        return None
    context = request.context()
    return context if isinstance(context, Text) else Text(context)


class LookupFirst:
    """A `DraftModel` around another: rows, taps and identity are the inner one's, and so is every other draft."""

    read_len_max = READ_LEN_MAX

    def __init__(self, inner: DraftModel) -> None:
        self.inner = inner
        self.drafter_id = inner.drafter_id
        self.target_layers = inner.target_layers
        self.block_len = inner.block_len
        self.draft_width = inner.draft_width

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        self.inner.write_rows(segments, taps, rows)

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """Read ones are as long as others. Raises: as the inner drafter, and for a length that is never read."""
        found = [self._without_rows(request) for request in requests]
        rest = [request for request, proposal in zip(requests, found, strict=True) if proposal is None]
        drafted = iter(self.with_rows(rest, rows) if rest else ())
        return [next(drafted) if proposal is None else proposal for proposal in found]

    def read(self, text: Text, length: int, *, drawn: bool, sure: bool = False) -> Proposal | None:
        """What followed the newest tokens the last time. See `Reader.read`."""
        return looked_up(text, length, drawn=drawn, sure=sure)

    def with_rows(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """The inner drafter's, told what the texts say. Raises: as it does."""
        return self.inner.draft([told(request) for request in requests], rows)

    def _without_rows(self, request: DraftRequest) -> Proposal | None:
        text = text_of(request)
        return None if text is None else self.read(text, request.length, drawn=request.temperature > 0, sure=True)
