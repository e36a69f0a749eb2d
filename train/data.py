"""Training rows: documents and conversations packed into sequences, as uint16 arrays on disk.

A row holds SEQUENCE + 1 ids (inputs and targets overlap by one). Rows start at a document's start wherever possible;
what does not fit starts the next row. Documents end with [EOS]; conversations are rendered by `model.renderer`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model import renderer
from model.tokenizer import Tokenizer
from train import conversations, corpus

SEQUENCE = 2_048
ROW = SEQUENCE + 1
COPY_ROWS = 160
COPY_DOCUMENTS = 300

Rows = tuple[NDArray[np.uint16], NDArray[np.uint16]]  # ids, first visible position; both [rows, ROW]


def pack(documents: Iterable[list[int]]) -> Rows:
    """Documents (ids, [EOS] included) to rows. A last row that is not full is dropped."""
    ids, first = [], []
    row: list[int] = []
    starts: list[int] = []
    for document in documents:
        rest = document
        while rest:
            piece, rest = rest[: ROW - len(row)], rest[ROW - len(row) :]
            starts += [len(row)] * len(piece)
            row += piece
            if len(row) == ROW:
                ids.append(row)
                first.append(starts)
                row, starts = [], []
    return np.array(ids, np.uint16).reshape(-1, ROW), np.array(first, np.uint16).reshape(-1, ROW)


def _long_first(documents: list[list[int]], rng: random.Random) -> Iterator[list[int]]:
    """Whole rows of long documents first, then what is left of them with the short ones, shuffled."""
    rest = []
    for document in documents:
        cut = len(document) // ROW * ROW
        for start in range(0, cut, ROW):
            yield document[start : start + ROW]
        rest.append(document[cut:])
    rng.shuffle(rest)
    yield from rest


def shuffled(rows: Rows, seed: int) -> Rows:
    order = np.random.default_rng(seed).permutation(len(rows[0]))
    return rows[0][order], rows[1][order]


def text_rows(documents: Iterable[corpus.Document], tokenizer: Tokenizer, seed: int) -> Rows:
    ids = [[*tokenizer.encode(document.text), tokenizer.eos] for document in documents]
    return shuffled(pack(_long_first(ids, random.Random(seed))), seed)


def chat_rows(documents: Iterable[corpus.Document], tokenizer: Tokenizer, seed: int) -> Rows:
    rng = random.Random(seed)
    ids = []
    for request in conversations.requests(documents, rng):
        ids.append([*renderer.encode(renderer.render(request), tokenizer).ids, tokenizer.eos])
    rng.shuffle(ids)
    return shuffled(pack(ids), seed)


def copy_rows(documents: Sequence[list[int]], eos: int, rows: int, seed: int) -> tuple[Rows, NDArray[np.uint8]]:
    """Exercises in copying, and which of their tokens count in the loss.

    A fragment of a document, as it is or shuffled, comes two to four times with other text between. Looking back for
    what followed the last time is worth most of a model's loss on code, but at a few million tokens ordinary text
    teaches it too slowly; here it is the only way to be right. What is shuffled cannot be predicted the first time
    and does not count then.
    """
    rng = random.Random(seed)
    ids: list[int] = []
    starts: list[int] = []
    counts: list[int] = []

    def fragment(length: int) -> list[int]:
        document = rng.choice(documents)
        at = rng.randrange(max(1, len(document) - length))
        return document[at : at + length]

    while len(ids) < rows * ROW:
        piece = fragment(int(2 ** rng.uniform(2, 6.5)))
        shuffled_piece = rng.random() < 0.5
        if shuffled_piece:
            rng.shuffle(piece)
        start = len(ids)
        for repeat in range(rng.randint(2, 4)):
            gap = fragment(rng.randint(1, 48)) if rng.random() < 0.5 else []
            ids += gap + piece
            counts += [0] * len(gap) + [int(repeat > 0 or not shuffled_piece)] * len(piece)
        ids.append(eos)
        counts.append(1)
        starts += [start] * (len(ids) - start)
    shape, end = (rows, ROW), rows * ROW
    row_start = np.arange(end) // ROW * ROW
    first = np.maximum(np.array(starts[:end]), row_start) - row_start
    packed = np.array(ids[:end], np.uint16).reshape(shape), first.astype(np.uint16).reshape(shape)
    return packed, np.array(counts[:end], np.uint8).reshape(shape)


def build(work: Path, vocabulary: Path, tokens_max: int = 12_000_000, seed: int = 0) -> dict[str, int]:
    """Write rows/{text,chat,copy,validation,validation_chat,validation_copy}.npz under `work`; tokens of each."""
    tokenizer = Tokenizer.load(vocabulary)
    training, validation = corpus.read(work, "train"), corpus.read(work, "validation")
    texts, size = [], 0
    for document in training:  # shuffled by `corpus.build`
        texts.append(document)
        size += len(document.text)
        if size > 3.5 * tokens_max:
            break
    splits = {
        "text": text_rows(texts, tokenizer, seed),
        "chat": chat_rows(training, tokenizer, seed),
        "validation": text_rows(validation, tokenizer, seed),
        "validation_chat": chat_rows(validation, tokenizer, seed),
    }
    (work / "rows").mkdir(exist_ok=True)
    for name, (ids, first) in splits.items():
        np.savez(work / "rows" / f"{name}.npz", ids=ids, first=first, counts=np.ones_like(ids, np.uint8))
    for name, documents, rows in (("copy", texts, COPY_ROWS), ("validation_copy", validation, 8)):
        encoded = [tokenizer.encode(document.text) for document in documents[:COPY_DOCUMENTS]]
        (ids, first), counts = copy_rows(encoded, tokenizer.eos, rows, seed)
        np.savez(work / "rows" / f"{name}.npz", ids=ids, first=first, counts=counts)
        splits[name] = ids, first
    return {name: ids.size for name, (ids, _) in splits.items()}


def load(work: Path, name: str) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint8]]:
    """(ids, first visible position, whether a token counts in the loss), each [rows, ROW]."""
    with np.load(work / "rows" / f"{name}.npz") as rows:
        return rows["ids"], rows["first"], rows["counts"]
