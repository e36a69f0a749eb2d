"""Prompts for the drafter's training: the beginnings that the target is asked to continue.

Code and prose are cut from the training documents (never from held-out packages), conversations from the training
rows up to the assistant's turn. Prose is documentation files and docstrings, run together as one text.
"""

from __future__ import annotations

import ast
import inspect
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.tokenizer import Tokenizer
from train import corpus, data

Kind = Literal["code", "prose", "chat"]
SHARES: dict[Kind, float] = {"code": 0.45, "prose": 0.35, "chat": 0.2}
TOKENS_MIN, TOKENS_MAX = 24, 480
CHAT_TOKENS_MAX = 768
CHARS_PER_TOKEN = 6  # more than any document has on average, so that a cut is long enough
DOCSTRING_CHARS_MIN = 120
START_SHARE = 0.5  # of prompts begin where their document does, the others at any line


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the target continues. A stream of them is fixed by its seed."""

    kind: Kind
    ids: list[int]


def prose_of(code: str) -> str:
    """A module's longer docstrings, dedented, without examples and literal blocks, as paragraphs of one text."""
    paragraphs = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        kept = [part for part in re.split(r"\n\s*\n", text) if ">>>" not in part and not part.startswith("  ")]
        if sum(map(len, kept)) >= DOCSTRING_CHARS_MIN:
            paragraphs += kept
    return "\n\n".join(paragraphs)


class Prompts:
    """An endless stream of prompts, a function of the seed alone."""

    def __init__(self, work: Path, tokenizer: Tokenizer, seed: int) -> None:
        documents = corpus.read(work, "train")
        self._tokenizer = tokenizer
        self._code = [d.text for d in documents if d.path.endswith(corpus.CODE_SUFFIXES)]
        self._docs = [d.text for d in documents if not d.path.endswith(corpus.CODE_SUFFIXES)]
        ids, first, _ = data.load(work, "chat")
        self._chat = ids, first
        self._opening = [tokenizer.open, *tokenizer.encode('message role="assistant"'), tokenizer.sep]
        self._rng = random.Random(seed)

    def __iter__(self) -> Iterator[Prompt]:
        kinds, weights = list(SHARES), list(SHARES.values())
        while True:
            kind = self._rng.choices(kinds, weights)[0]
            ids = self._conversation() if kind == "chat" else self._text(kind)
            if ids is not None:
                yield Prompt(kind=kind, ids=ids)

    def _text(self, kind: Kind) -> list[int] | None:
        rng = self._rng
        tokens = round(math.exp(rng.uniform(math.log(TOKENS_MIN), math.log(TOKENS_MAX))))
        if kind == "code":
            text = rng.choice(self._code)
        elif rng.random() < 0.35:
            text = rng.choice(self._docs)
        else:
            text = "\n\n".join(prose_of(rng.choice(self._code)) for _ in range(4)).strip()
        start = 0
        if rng.random() > START_SHARE:
            start = text.rfind("\n", 0, rng.randrange(max(1, len(text)))) + 1
        ids = self._tokenizer.encode(text[start : start + CHARS_PER_TOKEN * tokens])[:tokens]
        return ids if len(ids) >= TOKENS_MIN else None

    def _conversation(self) -> list[int] | None:
        """A conversation up to an assistant's turn, or None where the row drawn has no short one."""
        ids, first = self._chat
        row = self._rng.randrange(len(ids))
        places = occurrences(ids[row], self._opening)
        if not len(places):
            return None
        place = int(self._rng.choice(places.tolist()))
        start = int(first[row][place - 1])
        return ids[row][start:place].tolist() if place - start <= CHAT_TOKENS_MAX else None


def occurrences(ids: NDArray[Any], pattern: Sequence[int]) -> NDArray[Any]:
    """Positions just behind each occurrence of `pattern`."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == np.asarray(pattern)).all(1)) + len(pattern)


@dataclass(frozen=True, slots=True)
class CorpusPrompts:
    """Prompts of the project's corpus by seed: what a generator, wherever it stands, is given to write from."""

    work: Path
    vocabulary: Path

    def __call__(self, seed: int) -> Iterator[Prompt]:
        return iter(Prompts(self.work, Tokenizer.load(self.vocabulary), seed))
