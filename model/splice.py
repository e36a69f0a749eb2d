"""Generated ids in the place of text that a client sends back. Pure; imports no torch.

Text does not always tokenise to the ids that were generated. What a turn generated is kept under a key that a later
request's text gives again; there the ids are taken as far as they are exactly that text, marker for marker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Final

from model.renderer import Given, Rendered
from model.tokenizer import Tokenizer
from model.xtml import Segment

KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """Keys of a conversation's turns, oldest first. `before` names all that precedes the turn now to be generated;
    `first` is the same for all requests that continue one conversation.
    """

    keys: tuple[bytes, ...]
    before: bytes
    first: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """Ids of a generated turn, or their beginning. `whole`: nothing that was generated is missing."""

    ids: Sequence[int]
    whole: bool


def turn_keys(rendered: Rendered, salt: bytes) -> TurnKeys:
    """The keys of a rendered prompt's turns.

    A key covers all text before the turn (one-shot messages apart, which a later request will not hold), the turn's
    own, and which of both is markers. It depends on no turn's ids, so that all can be looked up at once.
    """
    segments, keys, at = rendered.segments, [], 0
    text, first = _Digest(salt), b""
    for start, end in rendered.turns:
        text.add(segments[at:start])
        first = first or text.value()
        keys.append(reply_key(text.value(), segments[start:end]))
        text.add(segments[start:end])
        at = end
    last = rendered.hints[-1].offset
    text.add((*segments[at:last], *segments[rendered.generation :]))
    return TurnKeys(tuple(keys), text.value(), first or text.value())


def reply_key(before: bytes, segments: Iterable[Segment]) -> bytes:
    digest = _Digest(before)
    digest.add(segments)
    return digest.value()


def fitting(ids: Sequence[int], segments: Sequence[Segment], tokenizer: Tokenizer) -> tuple[int, int]:
    """How many ids are exactly how many segments: the longest beginning that ends where a run of markers or of text
    does. Markers must be special ids and text must not be.
    """
    at = covered = 0
    for special, run in _runs(segments):
        text = "".join(segment.text for segment in run)
        if special:
            want = tokenizer.encode(text, allow_special=True)
            end = at + len(want)
            same = list(ids[at:end]) == want
        else:
            end = next((i for i in range(at, len(ids)) if tokenizer.is_special(ids[i])), len(ids))
            same = tokenizer.decode_bytes(ids[at:end]) == _utf8(text)
        if not same:
            break
        at, covered = end, covered + len(run)
    return at, covered


def reply_to_keep(ids: Sequence[int], segments: Sequence[Segment], tokenizer: Tokenizer) -> Reply | None:
    """What of a turn's ids is worth keeping; None where tokenising its text gives them anyway."""
    count, covered = fitting(ids, segments, tokenizer)
    whole = covered == len(segments) or count == len(ids)  # a turn that was cut off ends before its text does
    kept = list(ids[:count])
    return None if whole and tokenizer.encode_segments(segments[:covered]) == kept else Reply(kept, whole)


def given_ids(rendered: Rendered, found: Sequence[Reply | None], tokenizer: Tokenizer) -> Given:
    """For `renderer.encode`: what was found of each turn, as far as it fits the turn's text."""
    given = {}
    for (start, end), reply in zip(rendered.turns, found, strict=True):
        if reply is not None:
            count, covered = fitting(reply.ids, rendered.segments[start:end], tokenizer)
            if covered:
                given[start] = (reply.ids[:count], start + covered)
    return given


def lost_turns(rendered: Rendered, found: Sequence[Reply | None], given: Given) -> list[tuple[int, int]]:
    """[start, end) in segments of turns that were found, but whose ids say something else from `start` on."""
    spans = []
    for (start, end), reply in zip(rendered.turns, found, strict=True):
        used, reached = given.get(start, ((), start))
        if reply is not None and reached < end and not (reply.whole and len(used) == len(reply.ids)):
            spans.append((reached, end))
    return spans


def _runs(segments: Iterable[Segment]) -> Iterator[tuple[bool, list[Segment]]]:
    """Neighbours that are all markers or all text: how text is cut into segments means nothing to a key."""
    for special, run in groupby(segments, key=lambda segment: segment.allow_special):
        yield special, list(run)


class _Digest:
    def __init__(self, salt: bytes) -> None:
        self._hash = blake2b(digest_size=KEY_BYTES, person=b"moonrelay-turns")
        self._hash.update(struct.pack("<I", len(salt)) + salt)

    def add(self, segments: Iterable[Segment]) -> None:
        for special, run in _runs(segments):
            text = _utf8("".join(segment.text for segment in run))
            self._hash.update(struct.pack("<?Q", special, len(text)) + text)

    def value(self) -> bytes:
        return self._hash.digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
