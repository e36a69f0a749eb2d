"""Generated ids in a plain completion's text: what of a prompt was generated before, and as which ids. Pure.

A completion's client sends back a prompt, its completion and more as one string, and nobody knows where the earlier
end was. Each earlier text is therefore kept under a digest of its beginning, cut at one of a few lengths that every
longer text has too, and carries its own length and digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Final, Protocol

from model.tokenizer import Tokenizer

# A shorter text fills no block. The lengths grow by a sixteenth of an octave, so that a list of those that share a
# beginning holds the texts that part only in their last 5 %.
CHARS_MIN: Final = 64
CUTS: Final = tuple(dict.fromkeys(round(CHARS_MIN * 2 ** (k / 16)) for k in range(16 * 18)))
RECOUNT_CHARS_MAX: Final = 20_000  # a longer text is kept without asking whether tokenising it gives the same ids


class Encoder(Protocol):
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `chars` characters; `ids` None: as the tokenizer has them, taken alone."""

    chars: int
    ids: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a text of `chars` characters was spelled in ids."""

    chars: int
    digest: bytes
    pieces: tuple[Piece, ...]


def heads(text: str, salt: bytes) -> list[bytes]:
    """Digests of the text's beginnings, shortest first; all but short texts have one. The last is where to keep."""
    return digests(text, takewhile(lambda cut: cut <= len(text), CUTS), salt)


def digests(text: str, lengths: Iterable[int], salt: bytes) -> list[bytes]:
    """Of the text's first `lengths` characters, ascending."""
    running = blake2b(struct.pack("<I", len(salt)) + salt, digest_size=16, person=b"moonrelay-texts")
    found, at = [], 0
    for length in lengths:
        running.update(text[at:length].encode("utf-8", "surrogatepass"))
        found.append(running.digest())
        at = length
    return found


def longest(text: str, known: Iterable[Spelling], salt: bytes) -> Spelling | None:
    """The longest of the known texts with which this one begins."""
    fit = sorted((one for one in known if one.chars <= len(text)), key=lambda one: one.chars)
    for one, digest in zip(reversed(fit), reversed(digests(text, [one.chars for one in fit], salt)), strict=True):
        if one.digest == digest:
            return one
    return None


def spell(
    text: str, spelling: Spelling | None, encoder: Encoder, tokenizer: Tokenizer
) -> tuple[list[int], tuple[Piece, ...]]:
    """The text's ids, and its pieces: as they were spelled where they are exactly that text, the rest tokenised."""
    ids: list[int] = []
    pieces: list[Piece] = []
    at = 0
    for piece in spelling.pieces if spelling is not None else ():
        part = text[at : at + piece.chars]
        known = piece.ids
        if known is not None and tokenizer.decode_bytes(known) != part.encode("utf-8", "surrogatepass"):
            break
        ids += encoder.encode(part) if known is None else known
        pieces.append(piece)
        at += piece.chars
    if at < len(text):
        ids += encoder.encode(text[at:])
        pieces.append(Piece(len(text) - at, None))
    return ids, tuple(pieces)


def spelling_to_keep(
    text: str,
    ids: Sequence[int],
    pieces: Sequence[Piece],
    generated: Sequence[int],
    tokenizer: Tokenizer,
    salt: bytes,
) -> tuple[bytes, bytes, Spelling] | None:
    """The first and the last of the heads of a prompt and its completion, and the spelling: kept under the last.

    `ids` and `pieces`: the prompt's. None where there is nothing to keep: no text, or tokenising gives these ids.
    """
    said, count = _text_of(generated, tokenizer)
    whole = text + said
    if not said or len(whole) < CHARS_MIN:
        return None
    if len(whole) <= RECOUNT_CHARS_MAX and tokenizer.encode(whole) == [*ids, *generated[:count]]:
        return None
    digest = digests(whole, [len(whole)], salt)[0]
    piece = Piece(len(said), tuple(generated[:count]))
    names = heads(whole, salt)
    return names[0], names[-1], Spelling(len(whole), digest, (*pieces, piece))


def _text_of(generated: Sequence[int], tokenizer: Tokenizer) -> tuple[str, int]:
    """The longest beginning without special ids that is whole characters, and of how many ids it is."""
    count = next((i for i, token in enumerate(generated) if tokenizer.is_special(token)), len(generated))
    for end in range(count, max(0, count - 4), -1):
        try:
            return tokenizer.decode_bytes(generated[:end]).decode("utf-8"), end
        except UnicodeDecodeError:
            continue
    return "", 0
