"""Train the small model's byte-level BPE and write it as `tiktoken.model`.

The trainer is the `tokenizers` package (a training extra); what is shipped is only the ranks, read back by
`model.tokenizer`. `verify` shows that both tokenise alike.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from model.tokenizer import PATTERN, VOCABULARY_FILE, Tokenizer

NUM_RANKS = 6_144
NUM_DOCUMENTS = 1_400  # of the shuffled corpus, about 15 MB
# The words of the chat format, often enough that each becomes a token or few.
FORMAT_TEXTS = [
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=max`.",
    *("message", " role", " system", " type", "thinking-effort", "user", "assistant", "think", "response", "tools"),
    *("call", "argument", "tool-declare"),
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n",
] * 500


def train(texts: Iterable[str], num_ranks: int = NUM_RANKS) -> tokenizers.Tokenizer:
    """A byte-level BPE with K3's pre-tokeniser, all 256 bytes first."""
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def ranks(bpe: tokenizers.Tokenizer) -> list[bytes]:
    """Token bytes in rank order: the 256 bytes by value, then merges in the order they were learnt."""
    to_byte = {character: byte for byte, character in _byte_alphabet().items()}
    by_id = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[character] for character in token) for token, _ in by_id]
    return [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]


def write(tokens: Sequence[bytes], folder: Path) -> Path:
    """Write `tiktoken.model` into `folder`."""
    path = folder / VOCABULARY_FILE
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return path


def verify(bpe: Any, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Raises: ValueError at the first text that the two tokenise differently."""
    for text in texts:
        want = [bytes_of(bpe, token_id) for token_id in bpe.encode(text, add_special_tokens=False).ids]
        got = [tokenizer.decode_bytes([token_id]) for token_id in tokenizer.encode(text)]
        if want != got:
            at = next(i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1])
            raise ValueError(f"tokens differ at {at}: trainer {want[at : at + 5]}, tiktoken {got[at : at + 5]}")


def bytes_of(bpe: Any, token_id: int) -> bytes:
    to_byte = {character: byte for byte, character in _byte_alphabet().items()}
    return bytes(to_byte[character] for character in bpe.id_to_token(token_id))


def _byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level BPE: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet
