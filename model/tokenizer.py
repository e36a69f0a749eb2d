"""Text to token ids and back, from a checkpoint's `tiktoken.model`. Imports no torch.

A vocabulary is `num_ranks` byte strings (a byte-level BPE) followed by 256 special slots. Structure (message and
channel markers) is special ids; text that merely looks like a marker stays ordinary ids unless the caller says
`allow_special`, which only the renderer's own segments do.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import tiktoken

VOCABULARY_FILE: Final = "tiktoken.model"
NUM_SPECIAL: Final = 256

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
# K3's pre-tokeniser. The `&&` class intersections are syntax of tiktoken's regex engine; Python's `re` has none.
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

# The released tokenizer cuts its input here (tiktoken's regex engine overflows its stack on longer pieces), so the
# cuts are part of what a text's ids are.
PIECE_CHARS_MAX: Final = 400_000
RUN_CHARS_MAX: Final = 25_000
_RUN: Final = re.compile(r"\s+|\S+")
_SPACE: Final = re.compile(r"\s")
_NON_SPACE: Final = re.compile(r"\S")


class TokenizerError(ValueError):
    """A checkpoint's tokenizer files cannot be used; the message names file, place, found and expected."""


class SegmentLike(Protocol):
    """A stretch of a rendered prompt that is tokenised on its own."""

    @property
    def text(self) -> str: ...

    @property
    def allow_special(self) -> bool: ...


class Tokenizer:
    """A checkpoint's vocabulary. Immutable, so threads may share it; `encode` releases the GIL while it works."""

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str] | None = None) -> None:
        """`ranks` maps every token's bytes to 0..len-1; `special_names` maps a slot (0..255) to a name of the
        checkpoint's own.

        Raises: TokenizerError where the names disagree with the structural tokens or repeat.
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

        Names of special slots come from `tokenizer_config.json` where the folder has one, else from the table above.
        Raises: TokenizerError naming file, line, what was found and what is expected.
        """
        folder = Path(checkpoint)
        ranks = read_ranks(folder / VOCABULARY_FILE)
        return cls(ranks, _configured_names(folder / "tokenizer_config.json", len(ranks)))

    def is_special(self, token_id: int) -> bool:
        return self.num_ranks <= token_id < self.vocab_size

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Without `allow_special` none of them is special, whatever the text says.

        Lone surrogates, which JSON can smuggle in, become U+FFFD.
        """
        if not allow_special:
            return self._encode_ordinary(text)
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

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for, special tokens as their names.

        Raises: IndexError for an id outside the vocabulary.
        """
        return b"".join([self._bytes[self._checked(token_id)] for token_id in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return token_id

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) <= RUN_CHARS_MAX:
            return self._bpe.encode_ordinary(text)
        ids: list[int] = []
        for piece in guarded_pieces(text):
            ids += self._bpe.encode_ordinary(piece)
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


def guarded_pieces(text: str) -> Iterator[str]:
    """Cut `text` every PIECE_CHARS_MAX characters, and a run of one class (whitespace or not) every RUN_CHARS_MAX.

    Runs are counted anew in each piece.
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
    """Whether some aligned window of half a run is of one class: a run over the limit must fill one such window.

    Two searches a window, each stopping at the first hit, where walking every run would cost as much as encoding.
    """
    window = RUN_CHARS_MAX // 2
    for start in range(0, len(piece) - window + 1, window):
        end = start + window
        if _SPACE.search(piece, start, end) is None or _NON_SPACE.search(piece, start, end) is None:
            return True
    return False


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from a file with `base64 rank` on each line.

    Raises: TokenizerError for a missing file, a malformed line, a token or rank given twice, ranks that are not
    exactly 0..n-1, or one of the 256 single bytes missing (some text could then not be encoded).
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}); expected a tiktoken vocabulary") from error
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        token, rank = _read_line(path, number, line)
        if token in ranks or rank in seen:
            what = f"token {token!r}" if token in ranks else f"rank {rank}"
            raise TokenizerError(f"{path}, line {number}: {what} is given twice; expected once")
        ranks[token] = rank
        seen.add(rank)
    missing_rank = next((rank for rank in range(len(ranks)) if rank not in seen), None)
    if missing_rank is not None:
        raise TokenizerError(f"{path}: rank {missing_rank} is missing; expected 0..{len(ranks) - 1}, each once")
    missing_byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing_byte is not None:
        raise TokenizerError(f"{path}: no token for the byte 0x{missing_byte:02x}; expected all 256 single bytes")
    return ranks


def _read_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    expected = "expected a base64 token, a space and a rank"
    shown = line[:80].decode("utf-8", errors="backslashreplace")
    if len(fields) != 2:
        raise TokenizerError(f"{path}, line {number}: found {shown!r}; {expected}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise TokenizerError(f"{path}, line {number}: not base64 ({error}) in {shown!r}; {expected}") from error
    if not token or not fields[1].isdigit() or len(fields[1]) > 9:
        raise TokenizerError(f"{path}, line {number}: found {shown!r}; {expected}")
    return token, int(fields[1])


def _configured_names(path: Path, num_ranks: int) -> dict[int, str]:
    """Slot to name, from `added_tokens_decoder` of a `tokenizer_config.json`; empty where there is none."""
    try:
        config: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}); expected a JSON object") from error
    added = config.get("added_tokens_decoder", {}) if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object of id -> token")
    names: dict[int, str] = {}
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        slot = int(key) - num_ranks if key.isdigit() else None
        if slot is None or not 0 <= slot < NUM_SPECIAL or not isinstance(name, str) or not name:
            raise TokenizerError(
                f"{path}: added_tokens_decoder[{key!r}] is {entry!r}; expected an id in "
                f"{num_ranks}..{num_ranks + NUM_SPECIAL - 1} with its name as `content`"
            )
        names[slot] = name
    return names


def _special_names(num_ranks: int, configured: Mapping[int, str]) -> list[str]:
    """The name of each of the 256 slots."""
    names = [f"<|reserved_token_{num_ranks + slot}|>" for slot in range(NUM_SPECIAL)]
    for name, slot in SPECIAL_SLOTS.items():
        names[slot] = name
    for slot, name in configured.items():
        names[slot] = name
    for name in STRUCTURAL:
        if names[SPECIAL_SLOTS[name]] != name:
            found = names[SPECIAL_SLOTS[name]]
            raise TokenizerError(f"special slot {SPECIAL_SLOTS[name]} is named {found!r}; expected {name!r}")
    if len(set(names)) != NUM_SPECIAL:
        repeated = next(name for name in names if names.count(name) > 1)
        raise TokenizerError(f"special token {repeated!r} is given to two slots; expected one")
    return names
