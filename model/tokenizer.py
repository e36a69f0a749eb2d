"""Text to token ids and back, from a checkpoint's `tiktoken.model`. Imports no torch.

A vocabulary is `num_ranks` byte strings (a byte-level BPE) followed by 256 special slots. Structure (message
and channel markers) is special ids; text that merely looks like a marker stays ordinary ids unless the caller
says `allow_special`, which only the renderer's own segments do.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol

import tiktoken

from model.errors import ModelError

VOCABULARY_FILE: Final = "tiktoken.model"
NUM_SPECIAL: Final = 256
RENDERER_VERSION: Final = "k3-xtml-1"  # to be raised whenever the same request would render to other bytes

# Slot of each named special token: released id - 163,584, the released number of ranks.
SPECIAL_SLOTS: Final[Mapping[str, int]] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}
# What rendering, parsing and stopping rely on: a checkpoint may rename other slots, never these.
STRUCTURAL: Final = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]")

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# K3's pre-tokeniser, in the syntax of tiktoken's regex engine: Python's `re` has no `&&` intersections.
PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The released tokenizer cuts its input here (tiktoken's regex engine overflows its stack on longer pieces),
# so the cuts are part of what a text's ids are.
PIECE_CHARS_MAX: Final = 400_000
RUN_CHARS_MAX: Final = 25_000
_RUN: Final = re.compile(r"\s+|\S+")
_SPACE: Final = re.compile(r"\s")
_NON_SPACE: Final = re.compile(r"\S")


class TokenizerError(ModelError):
    """A tokenizer file that cannot be used. `place`: a line or field, None for the file as a whole."""

    def __init__(self, path: Path, place: str | None, expected: str, found: object) -> None:
        subject = f"{path}, {place}" if place else str(path)
        super().__init__(f"{subject}: expected {expected}, found {found}")
        self.path, self.place, self.expected, self.found = path, place, expected, found


class SegmentLike(Protocol):
    """A stretch of a rendered prompt that is tokenised on its own."""

    @property
    def text(self) -> str: ...

    @property
    def allow_special(self) -> bool: ...


class Tokenizer:
    """A checkpoint's vocabulary. Immutable, so threads may share it; `encode` works without the GIL."""

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str] | None = None) -> None:
        """`ranks` maps each token's bytes to 0..len-1; `special_names` maps slots (0..255) to names of the
        checkpoint's own, which leave STRUCTURAL where it is. `load` checks both.
        """
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_SPECIAL
        names = _special_names(self.num_ranks, special_names or {})
        self.special_ids: Mapping[str, int] = {name: self.num_ranks + slot for slot, name in enumerate(names)}
        self.bos = self.special_ids["[BOS]"]
        self.eos = self.special_ids["[EOS]"]
        self.pad = self.special_ids["[PAD]"]
        self.end_of_msg = self.special_ids["<|end_of_msg|>"]
        self.open = self.special_ids["<|open|>"]
        self.close = self.special_ids["<|close|>"]
        self.sep = self.special_ids["<|sep|>"]
        self.stop_id = self.end_of_msg
        self._special = re.compile("|".join(re.escape(name) for name in names))
        self._bytes = [b""] * self.num_ranks + [name.encode() for name in names]
        for token, rank in ranks.items():
            self._bytes[rank] = token
        self._bpe = tiktoken.Encoding(
            name="k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(self.special_ids)
        )

    @classmethod
    def load(cls, checkpoint: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        A `tokenizer_config.json` in the folder names the special slots anew (`added_tokens_decoder`).
        Raises: TokenizerError naming file, line or field, what is expected and what was found.
        """
        folder = Path(checkpoint)
        ranks = read_ranks(folder / VOCABULARY_FILE)
        return cls(ranks, _configured_names(folder / "tokenizer_config.json", len(ranks)))

    def is_special(self, token_id: int) -> bool:
        return self.num_ranks <= token_id < self.vocab_size

    def encode(self, text: str, *, allow_special: bool = False, limit: int | None = None) -> list[int]:
        """Ids of `text`. Without `allow_special` none of them is special, whatever the text says.

        Ordinary text of more than `limit` ids may be cut short, but never to `limit` ids or fewer.
        Lone surrogates, which JSON can smuggle in, become U+FFFD.
        """
        if not allow_special:
            return self._encode_ordinary(text, limit)
        whole = self.special_ids.get(text)
        if whole is not None:
            return [whole]
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text):
            ids += self._encode_ordinary(text[start : match.start()])
            ids.append(self.special_ids[match[0]])
            start = match.end()
        return ids + self._encode_ordinary(text[start:])

    def encode_segments(self, segments: Iterable[SegmentLike]) -> list[int]:
        """Ids of segments, each tokenised on its own: no merge reaches across a segment's edge."""
        ids: list[int] = []
        for segment in segments:
            ids += self.encode(segment.text, allow_special=segment.allow_special)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes that `ids` stand for, special tokens as their names.

        Raises: IndexError for an id outside the vocabulary.
        """
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"token ids {min(ids)}..{max(ids)} are not all in 0..{self.vocab_size - 1}")
        return b"".join([self._bytes[token_id] for token_id in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _encode_ordinary(self, text: str, limit: int | None = None) -> list[int]:
        if len(text) <= RUN_CHARS_MAX:
            return self._bpe.encode_ordinary(text)
        ids: list[int] = []
        for piece in guarded_pieces(text):
            ids += self._bpe.encode_ordinary(piece)
            if limit is not None and len(ids) > limit:
                break
        return ids


class StreamDecoder:
    """Turns ids into text as they come, holding back a character whose bytes have not all arrived.

    What all `push` calls and the final `flush` return, joined, equals `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """U+FFFD for bytes still held back, else nothing; the decoder is then as new."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def tokenizer_revision(checkpoint: str | Path) -> str:
    """What ids and rendered prompts of this checkpoint mean: a digest that two processes must share to share a cache.

    Covers the vocabulary, the names of its special slots and the renderer. A checkpoint without a vocabulary, which
    only ever sees ids, has one too. Raises: TokenizerError.
    """
    folder, digest = Path(checkpoint), blake2b(digest_size=16, person=b"moonrelay-token")
    digest.update(RENDERER_VERSION.encode())
    if (folder / VOCABULARY_FILE).exists():
        ranks = read_ranks(folder / VOCABULARY_FILE)
        names = _configured_names(folder / "tokenizer_config.json", len(ranks))
        for token in (
            *sorted(ranks, key=ranks.__getitem__),
            *(name.encode() for name in _special_names(len(ranks), names)),
        ):
            digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()


def guarded_pieces(text: str) -> Iterator[str]:
    """Cut `text` every PIECE_CHARS_MAX characters, and in each piece every longer run of whitespace, or of
    anything else, every RUN_CHARS_MAX.
    """
    for piece_start in range(0, len(text), PIECE_CHARS_MAX):
        piece = text[piece_start : piece_start + PIECE_CHARS_MAX]
        start = 0
        if _may_hold_long_run(piece):
            for run in _RUN.finditer(piece):
                for cut in range(run.start() + RUN_CHARS_MAX, run.end(), RUN_CHARS_MAX):
                    yield piece[start:cut]
                    start = cut
        yield piece[start:]


def _may_hold_long_run(piece: str) -> bool:
    """Whether some aligned window of half a run is of one class, as a run over the limit must fill one.

    Two searches a window, each stopping at its first hit; walking every run would cost as much as encoding.
    """
    window = RUN_CHARS_MAX // 2
    for start in range(0, len(piece) - window + 1, window):
        end = start + window
        if _SPACE.search(piece, start, end) is None or _NON_SPACE.search(piece, start, end) is None:
            return True
    return False


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from a file with `base64 rank` on each line.

    Raises: TokenizerError for a missing file, a malformed line, a token or rank given twice, ranks that are
    not exactly 0..n-1, or one of the 256 single bytes missing (some text could then not be encoded).
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TokenizerError(path, None, "a tiktoken vocabulary", error.strerror) from error
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        token, rank = _read_line(path, f"line {number}", line)
        if token in ranks or rank in seen:
            again = f"token {token!r}" if token in ranks else f"rank {rank}"
            raise TokenizerError(path, f"line {number}", "each token and rank once", f"{again} again")
        ranks[token] = rank
        seen.add(rank)
    for rank in range(len(ranks)):
        if rank not in seen:
            raise TokenizerError(path, None, f"ranks 0..{len(ranks) - 1}", f"no rank {rank}")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise TokenizerError(path, None, "a token for each of the 256 bytes", f"none for 0x{byte:02x}")
    return ranks


def _read_line(path: Path, place: str, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    expected = "a base64 token, a space and a rank"
    found = repr(line[:80].decode("utf-8", errors="backslashreplace"))
    # Nine digits keep a damaged rank from becoming a huge integer.
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise TokenizerError(path, place, expected, found)
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(path, place, expected, f"{found} ({error})") from error
    if not token:
        raise TokenizerError(path, place, expected, found)
    return token, int(fields[1])


def _configured_names(path: Path, num_ranks: int) -> dict[int, str]:
    """Slot to name, from `added_tokens_decoder` of a `tokenizer_config.json`; empty where there is none."""
    try:
        config: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(path, None, "a JSON object", error) from error
    added = config.get("added_tokens_decoder", {}) if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise TokenizerError(path, "added_tokens_decoder", "an object of id to token", repr(added))
    names: dict[int, str] = {}
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        slot = int(key) - num_ranks if key.isdecimal() else None
        if slot is None or not 0 <= slot < NUM_SPECIAL or not isinstance(name, str) or not name:
            expected = f"ids {num_ranks}..{num_ranks + NUM_SPECIAL - 1}, each with its name as `content`"
            raise TokenizerError(path, "added_tokens_decoder", expected, f"{key!r}: {entry!r}")
        names[slot] = name
    _check_names(path, _special_names(num_ranks, names))
    return names


def _check_names(path: Path, names: list[str]) -> None:
    for name in STRUCTURAL:
        slot = SPECIAL_SLOTS[name]
        if names[slot] != name:
            raise TokenizerError(path, "added_tokens_decoder", f"{name!r} in slot {slot}", repr(names[slot]))
    for slot, name in enumerate(names):
        if names.index(name) != slot:
            raise TokenizerError(path, "added_tokens_decoder", "a name of its own for each id", f"{name!r} twice")


def _special_names(num_ranks: int, configured: Mapping[int, str]) -> list[str]:
    """The name of each of the 256 slots."""
    names = [f"<|reserved_token_{num_ranks + slot}|>" for slot in range(NUM_SPECIAL)]
    for name, slot in SPECIAL_SLOTS.items():
        names[slot] = name
    for slot, name in configured.items():
        names[slot] = name
    return names
