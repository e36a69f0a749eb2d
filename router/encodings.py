"""Ids of texts that come again: a conversation's every turn brings all its messages, and tools the same for all."""

from __future__ import annotations

from array import array
from typing import Final

from model.tokenizer import Tokenizer

SHARED_CHARS: Final = 64  # markup and names; whoever may have said a longer text is nobody else's business


class EncodingCache:
    """Encodings of lately seen texts, up to about `tokens_max` ids twice; a long text is known to its tenant alone.

    Two generations instead of an order: reading needs no lock, and what is lost in a race is computed again. Threads
    may share it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens_max: int) -> None:
        self._tokenizer = tokenizer
        self._tokens_max = tokens_max
        self._young: dict[tuple[bytes, str], array[int]] = {}
        self._old: dict[tuple[bytes, str], array[int]] = {}
        self._num_tokens = 0

    def encode(self, salt: bytes, text: str, *, allow_special: bool = False, limit: int | None = None) -> list[int]:
        """As `Tokenizer.encode`."""
        if allow_special:
            return self._tokenizer.encode(text, allow_special=True)
        key = (b"" if len(text) <= SHARED_CHARS else salt, text)
        known = self._young.get(key)
        if known is None:
            known = self._old.get(key)
            if known is None:
                ids = self._tokenizer.encode(text, limit=limit)
                if limit is not None and len(ids) > limit:
                    return ids  # perhaps not all of it
                known = array("I", ids)
            self._keep(key, known)
        return known.tolist()

    def _keep(self, key: tuple[bytes, str], ids: array[int]) -> None:
        self._young[key] = ids
        self._num_tokens += len(ids) + 1
        if self._num_tokens > self._tokens_max:
            self._old, self._young, self._num_tokens = self._young, {}, 0
