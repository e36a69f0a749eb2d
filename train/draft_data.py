"""What the drafter learns from: the target's own continuations, with its taps and the law of every token.

One forward gives all of it, so generating and labelling are the same pass. A law is kept whole, as the state that
lm_head makes it from: at temperature 1 the 64 likeliest tokens of a small model hold only three quarters of it.
States and taps are fp16 (the taps' largest value is near 1e2).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import Segment, Verifier
from model.drafter.lookup import MATCH_MIN_DRAWN
from train.draft_prompts import Prompt
from train.loops import NGRAM

BLOCK_TOKENS = 64
TOP = 8  # likeliest tokens of a law that are kept by name, beside its state
MATCH_MAX = MATCH_MIN_DRAWN  # a longer one changes nothing for the drafter
LOOP_TOKENS = 24  # a run of repeated tokens this long ends a continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One continuation.

    Shapes: ids [tokens] uint16; taps [tokens - 1, num_taps, hidden] fp16 (the last token was never consumed);
    states [tokens - prompt, hidden] fp16: lm_head makes of them the logits that token prompt + i was chosen from;
    likeliest [tokens - prompt, TOP] uint16: the first of those; matched [tokens - prompt] uint8: how many of the
    newest tokens, up to MATCH_MAX, stood earlier in the text together, token prompt + i the last of them.
    """

    kind: str
    greedy: bool
    prompt: int
    ids: NDArray[np.uint16]
    taps: NDArray[np.float16]
    states: NDArray[np.float16]
    likeliest: NDArray[np.uint16]
    matched: NDArray[np.uint8]

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """`batch` sequences are decoded together, each up to a length drawn from [tokens_min, tokens_max]."""

    target_layers: tuple[int, ...]
    batch: int = 96
    tokens_min: int = 128
    tokens_max: int = 320
    context_max: int = 1_024
    greedy_share: float = 0.7
    past_end_share: float = 0.0  # of continuations that go on behind a document's end, where another one begins
    prompts_too: bool = False  # the laws that a prompt's own tokens might have been drawn from are kept as well
    seed: int = 0


class _Running:
    """A sequence being decoded, and what its steps gave."""

    def __init__(self, prompt: Prompt, slot: int, greedy: bool, tokens: int, stop: int | None) -> None:
        self.prompt, self.slot, self.greedy, self.tokens, self.stop = prompt, slot, greedy, tokens, stop
        self.ids = list(prompt.ids)
        self.consumed = 0
        self.taps: list[NDArray[np.float16]] = []
        self.states: list[NDArray[np.float16]] = []
        self.likeliest: list[NDArray[np.uint16]] = []
        self._seen: set[tuple[int, ...]] = set()
        self._run = 0

    def take(self, token: int) -> None:
        self.ids.append(token)
        gram = tuple(self.ids[-NGRAM:]) if self._generated() >= NGRAM else None
        self._run = self._run + 1 if gram in self._seen else 0
        if gram:
            self._seen.add(gram)

    def _generated(self) -> int:
        return len(self.ids) - len(self.prompt.ids)

    def ended(self) -> bool:
        return self._generated() >= self.tokens or self.ids[-1] == self.stop or self._run >= LOOP_TOKENS

    def samples(self) -> Iterator[Sample]:
        """One; or two, where laws of the prompt are kept and the rest is no text that was drawn from its law."""
        known = len(self.ids) - sum(map(len, self.states))  # tokens before the first whose law is
        middle = len(self.prompt.ids)
        parts = [(self.greedy, known, len(self.ids))]
        if self.greedy and known < middle:
            parts = [(False, known, middle), (True, middle, len(self.ids))]
        ids, found = np.array(self.ids, np.uint16), matches(self.ids)
        taps, states, likeliest = (
            np.concatenate(self.taps),
            np.concatenate(self.states),
            np.concatenate(self.likeliest),
        )
        for greedy, first, end in parts:
            yield Sample(
                kind=self.prompt.kind,
                greedy=greedy,
                prompt=first,
                ids=ids[:end],
                taps=taps[: end - 1],
                states=states[first - known : end - known],
                likeliest=likeliest[first - known : end - known],
                matched=found[first:end],
            )


class Generator:
    """The target writing from prompts, `batch` sequences at a time; a finished one makes room for the next."""

    def __init__(self, target: Verifier, prompts: Iterator[Prompt], settings: GeneratorSettings, stop: int) -> None:
        self._target, self._prompts, self._settings, self._stop = target, prompts, settings, stop
        self._rng = random.Random(settings.seed)
        self._noise = torch.Generator().manual_seed(settings.seed)
        self._from_logits = torch.linalg.pinv(target.lm_head.float()).T  # a backend gives logits, not what made them
        layout = target.layout(BLOCK_TOKENS)
        self._slot_blocks = -(-settings.context_max // BLOCK_TOKENS)
        self._rows = torch.zeros(settings.batch * self._slot_blocks, layout.block_floats)
        self._state = torch.zeros(settings.batch, layout.slot_floats)
        self._running: list[_Running] = []
        for slot in range(settings.batch):
            self._begin(slot)
        target.tap(settings.target_layers)

    def _begin(self, slot: int) -> None:
        s = self._settings
        tokens = self._rng.randint(s.tokens_min, s.tokens_max)
        prompt = next((p for p in self._prompts if len(p.ids) + tokens <= s.context_max), None)
        if prompt is not None:
            greedy = self._rng.random() < s.greedy_share
            stop = None if self._rng.random() < s.past_end_share else self._stop
            self._running.append(_Running(prompt, slot, greedy, tokens, stop))

    def __iter__(self) -> Iterator[Sample]:
        """Ends where the prompts do."""
        while self._running:
            self._step()
            ended = [running for running in self._running if running.ended()]
            self._running = [running for running in self._running if not running.ended()]
            for running in ended:
                self._begin(running.slot)
                yield from running.samples()

    def _step(self) -> None:
        width = self._slot_blocks
        segments = [
            Segment(
                ids=r.ids[r.consumed :],
                start=r.consumed,
                slot=r.slot,
                blocks=range(r.slot * width, (r.slot + 1) * width),
                logits="all" if self._settings.prompts_too else "last",
            )
            for r in self._running
        ]
        sizes = [len(segment.ids) for segment in segments]
        config = self._target.config
        taps = torch.empty(sum(sizes), len(self._settings.target_layers), config.hidden_size)
        logits = self._target.forward(segments, self._rows, self._state, taps=taps)
        states = (logits @ self._from_logits).numpy().astype(np.float16)
        likeliest = logits.topk(TOP).indices.numpy().astype(np.uint16)
        rows = np.cumsum(sizes if self._settings.prompts_too else np.ones_like(sizes))
        totals = logits[rows - 1].softmax(-1).cumsum(-1)
        points = torch.rand(len(totals), 1, generator=self._noise) * totals[:, -1:]
        drawn = torch.searchsorted(totals, points, right=True)[:, 0].clamp(max=config.vocab_size - 1).tolist()
        parts = np.split(taps.numpy().astype(np.float16), np.cumsum(sizes)[:-1])
        of_states, of_likeliest = np.split(states, rows[:-1]), np.split(likeliest, rows[:-1])
        for i, running in enumerate(self._running):
            running.consumed += sizes[i]
            running.taps.append(parts[i])
            running.states.append(of_states[i])
            running.likeliest.append(of_likeliest[i])
            running.take(int(of_likeliest[i][-1, 0]) if running.greedy else drawn[i])


def matches(ids: Sequence[int]) -> NDArray[np.uint8]:
    """For each token: how many of it and those before it, up to MATCH_MAX, stood together earlier in `ids`."""
    seen: set[tuple[int, ...]] = set()
    found = np.zeros(len(ids), np.uint8)
    for end in range(1, len(ids) + 1):
        grams = [tuple(ids[end - size : end]) for size in range(1, min(MATCH_MAX, end) + 1)]
        found[end - 1] = sum(gram in seen for gram in grams)  # a part of what occurred before did, too
        seen.update(grams)
    return found


_ARRAYS = ("ids", "taps", "states", "likeliest", "matched")


def save(samples: Sequence[Sample], path: Path) -> None:
    """One .npz: every array of all samples end to end, and their lengths. Written atomically."""
    joined: dict[str, Any] = {name: np.concatenate([getattr(s, name) for s in samples]) for name in _ARRAYS}
    joined["tokens"] = np.array([len(s.ids) for s in samples])
    for field in fields(Sample):
        if field.name not in _ARRAYS:
            joined[field.name] = np.array([getattr(s, field.name) for s in samples])
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **joined)
    part.rename(path)


def load(path: Path) -> list[Sample]:
    with np.load(path) as stored:
        joined = {name: stored[name] for name in stored.files}
    tokens, prompts = joined["tokens"], joined["prompt"]
    ends = {
        "ids": np.cumsum(tokens),
        "taps": np.cumsum(tokens - 1),
        **dict.fromkeys(("states", "likeliest", "matched"), np.cumsum(tokens - prompts)),
    }
    parts = {name: np.split(joined[name], ends[name][:-1]) for name in _ARRAYS}
    return [
        Sample(
            kind=str(joined["kind"][i]),
            greedy=bool(joined["greedy"][i]),
            prompt=int(prompts[i]),
            **{name: parts[name][i] for name in _ARRAYS},
        )
        for i in range(len(tokens))
    ]
