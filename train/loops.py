"""What the model repeats when it is left alone, as rows that teach it not to.

A model that has learnt to look back for what came next also finds its own last words, and at temperature 0 goes
round for ever. Cross-entropy on good text never shows it that state. So it writes from training prompts, and where
its output goes round for the third time the loss is -log(1 - p) of the token it chose.
Source: unlikelihood training, arXiv 1908.04319.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.checkpoint import load_weights
from model.config import load_config
from model.native.backend import NativeBackend
from train import checkpoint
from train.data import ROW
from train.eval import generate_greedy

NGRAM = 6
TOKENS_MAX = 128
PROMPTS = 64
TEXT_CONTEXT = (24, 256)
CHAT_CONTEXT_MAX = 768
TRIES_MAX = 1_000


def repeats(output: Sequence[int]) -> list[bool]:
    """Whether the last NGRAM tokens, this one included, stood twice before in the same output."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for end in range(1, len(output) + 1):
        gram = tuple(output[max(0, end - NGRAM) : end])
        found.append(len(gram) == NGRAM and seen[gram] >= 2)
        seen[gram] += 1
    return found


def prompts(
    text: Sequence[NDArray[Any]], chat: Sequence[NDArray[Any]], opening: Sequence[int], rng: random.Random
) -> list[list[int]]:
    """Half cut from documents, half conversations up to `opening`, after which the assistant speaks."""
    chosen: list[list[int]] = []
    while len(chosen) < PROMPTS // 2:
        row = text[0][rng.randrange(len(text[0]))].tolist()
        start = rng.randrange(ROW - TEXT_CONTEXT[1])
        chosen.append(row[start : start + rng.randint(*TEXT_CONTEXT)])
    ids, first = chat[:2]
    for _ in range(TRIES_MAX):
        if len(chosen) == PROMPTS:
            break
        at = rng.randrange(len(ids))
        windows = np.lib.stride_tricks.sliding_window_view(ids[at], len(opening))
        places = np.flatnonzero((windows == opening).all(1)) + len(opening)
        if not len(places):
            continue
        place = int(rng.choice(places.tolist()))
        start = int(first[at][place - 1])
        if place - start <= CHAT_CONTEXT_MAX:
            chosen.append(ids[at][start:place].tolist())
    return chosen


def rows(
    params: dict[str, torch.Tensor], config: dict[str, Any], vocabulary: Path, asked: list[list[int]], stop: int
) -> tuple[NDArray[Any], ...]:
    """ids, first and counts [rows, ROW] of what the model as it is now writes; counts are -1 where it goes round.

    Nothing where it never does.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.export(params, config, vocabulary, Path(folder))
        loaded = load_config(Path(folder))
        backend = NativeBackend(loaded, load_weights(Path(folder), loaded), torch.get_num_threads())
        outputs = generate_greedy(backend, asked, TOKENS_MAX, stop)
    ids, first, counts = [np.zeros((PROMPTS, ROW), np.int64) for _ in range(3)]
    row, at = 0, 0
    for prompt, output in zip(asked, outputs, strict=True):
        marks = repeats(output)
        if not any(marks):
            continue
        size = len(prompt) + len(output)
        if at + size > ROW:
            row, at = row + 1, 0
        ids[row, at : at + size] = prompt + output
        first[row, at : at + size] = at
        counts[row, at + len(prompt) : at + size] = -np.array(marks, np.int64)
        at += size
    if at:  # the rest of the last row is one document more, which teaches nothing
        row += 1
    for used in range(row):
        end = int(np.flatnonzero(ids[used])[-1]) + 1
        first[used, end:] = end
    return (ids[:row], first[:row], counts[:row]) if row else ()
