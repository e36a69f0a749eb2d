"""One training run: batches, steps, schedule, checkpoints, progress. Resumable at every checkpoint."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.tokenizer import VOCABULARY_FILE, Tokenizer
from train import data, loops, nano
from train.experts import mxfp4_round
from train.loss import cross_entropy
from train.network import Network, Shape
from train.optimizer import Optimizer

STATE_FILE = "state.pt"
LOG_FILE = "log.jsonl"
WARMUP_STEPS = 20
FINAL_RATE = 0.02
BALANCE_RATE = 0.01  # of the router bias, per step, at full rate
BIAS = ".e_score_correction_bias"
KINDS = ("text", "chat", "copy")
VALIDATIONS = ("validation", "validation_chat", "validation_copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is told. The budget is whichever of tokens and minutes is used up first."""

    work: Path
    folder: Path
    copy_to: Path | None
    vocabulary: Path
    tokens: int | None
    minutes: float | None
    decay: float = 0.3
    batch_rows: int = 2
    chat_share: float = 0.15
    chat_share_decay: float = 0.22
    copy_share: float = 0.2  # until copy_tokens are seen, then copy_share_later
    copy_share_later: float = 0.04
    copy_tokens: int = 120_000
    # The last share of the budget teaches to stop: see loops.py.
    end: float = 0.16
    chat_share_end: float = 0.4
    loop_share_end: float = 0.3
    loop_steps: int = 12  # after so many the model writes anew
    seed: int = 0
    compiled: bool = True
    checkpoint_s: float = 300.0
    validate_steps: int = 100
    validation_rows: int = 8


class Run:
    """A run's state: parameters, optimiser, and how far it has come."""

    def __init__(self, settings: Settings, config: dict[str, Any] | None = None) -> None:
        self.settings = settings
        self.tokenizer = Tokenizer.load(settings.vocabulary)
        self.config = config or nano.config(self.tokenizer.num_ranks)
        shape = Shape.of(self.config)
        self.network = Network(shape, compiled=settings.compiled)
        self.params = nano.initial(shape, settings.seed)
        for name, value in self.params.items():
            value.requires_grad_(not name.endswith(BIAS))
        self.optimizer = Optimizer(self.params)
        self.step = 0
        self.tokens = 0
        self.chat_tokens = 0
        self.elapsed_s = 0.0
        self.copy_tokens = 0
        self.next_row = dict.fromkeys((*KINDS, "loop"), 0)
        self.loops_until = 0
        self.rows: dict[str, tuple[NDArray[Any], ...]] = {
            name: data.load(settings.work, name) for name in (*KINDS, *VALIDATIONS)
        }
        sizes = [len(self.tokenizer.decode_bytes([token])) for token in range(self.tokenizer.num_ranks)]
        self.token_bytes = np.array(sizes + [0] * (self.tokenizer.vocab_size - len(sizes)))

    # Schedule

    def progress(self) -> float:
        """The share of the budget that is used."""
        s = self.settings
        by_tokens = self.tokens / s.tokens if s.tokens else 0.0
        by_time = self.elapsed_s / (60 * s.minutes) if s.minutes else 0.0
        return max(by_tokens, by_time)

    def rate(self) -> float:
        """Learning rate factor: warm-up, constant, then linear to FINAL_RATE over the last `decay` of the budget."""
        left = max(0.0, 1.0 - self.progress())
        cooled = FINAL_RATE + (1 - FINAL_RATE) * min(1.0, left / self.settings.decay)
        return min(cooled, (self.step + 1) / WARMUP_STEPS)

    # Steps

    def shares(self) -> dict[str, float]:
        """How likely the next row is of each kind."""
        s = self.settings
        if 1.0 - self.progress() < s.end:
            loop = s.loop_share_end if self._loops() else 0.0
            return {"text": 1.0 - s.chat_share_end - loop, "chat": s.chat_share_end, "copy": 0.0, "loop": loop}
        chat = s.chat_share_decay if 1.0 - self.progress() < s.decay else s.chat_share
        copy = s.copy_share if self.copy_tokens < s.copy_tokens else s.copy_share_later
        return {"text": 1.0 - chat - copy, "chat": chat, "copy": copy}

    def _loops(self) -> bool:
        """Whether there are rows of what the model repeats now; made anew now and then."""
        if self.step >= self.loops_until:
            rng = random.Random(f"{self.settings.seed}:{self.step}")
            words = self.tokenizer
            opening = [words.open, *words.encode('message role="assistant"'), words.sep]
            asked = loops.prompts(self.rows["text"], self.rows["chat"], opening, rng)
            self.rows["loop"] = loops.rows(
                self.params,
                self.config,
                self.settings.vocabulary / VOCABULARY_FILE,
                asked,
                self.tokenizer.end_of_msg,
            )
            self.loops_until = self.step + self.settings.loop_steps
        return bool(self.rows["loop"])

    def batch(self) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """(kind of each row, ids, first, loss weights) of the next step; [B,ROW], weights sum to 1 at most."""
        rng = np.random.default_rng((self.settings.seed, self.step))
        shares = self.shares()
        kinds = [str(kind) for kind in rng.choice(list(shares), self.settings.batch_rows, p=list(shares.values()))]
        picked = []
        for kind in kinds:
            rows = self.rows[kind]
            at = self.next_row[kind] % len(rows[0])
            self.next_row[kind] += 1
            picked.append([part[at] for part in rows])
        ids, first, counts = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*picked, strict=True))
        return kinds, ids, first, counts.float() / counts[:, 1:].numel()

    def forward_weights(self) -> dict[str, Tensor]:
        """Parameters as the forward pass uses them: experts as leaves holding their MXFP4 values."""
        with torch.no_grad():
            return {
                name: mxfp4_round(value).requires_grad_() if ".experts." in name else value
                for name, value in self.params.items()
            }

    def train_step(self) -> float:
        """One step; its mean loss in nats a token."""
        kinds, ids, first, each = self.batch()
        rate = self.rate()
        weights = self.forward_weights()
        hidden, counts = self.network.hidden(weights, ids[:, :-1].contiguous(), first[:, :-1].contiguous())
        targets = ids[:, 1:].flatten()
        head = weights["lm_head.weight"]
        loss, _ = cross_entropy(hidden.flatten(0, 1), head, targets, each[:, 1:].flatten())
        torch.autograd.backward(loss)
        # Straight through: the gradient at the rounded expert weights is taken as the masters' own.
        grads = {}
        for name, value in self.params.items():
            if value.requires_grad:  # layer 0 scores a single residual source, which leaves its scorer no gradient
                grad = weights[name].grad
                grads[name] = torch.zeros_like(value) if grad is None else grad
            value.grad = None
        self.optimizer.step(grads, rate)
        self._balance(counts, rate)
        self.step += 1
        self.tokens += targets.numel()
        self.chat_tokens += kinds.count("chat") * targets.numel() // len(kinds)
        self.copy_tokens += kinds.count("copy") * targets.numel() // len(kinds)
        return loss.item() / each[:, 1:].abs().sum().clamp(min=1e-9).item()

    def _balance(self, counts: list[Tensor], rate: float) -> None:
        """Move each expert's selection bias against its load; no loss term is involved."""
        biases = [value for name, value in self.params.items() if name.endswith(BIAS)]
        for bias, count in zip(biases, counts, strict=True):
            load = count.float() / count.sum() * count.numel() - 1.0
            bias.sub_(load.clamp(-1.0, 1.0), alpha=BALANCE_RATE * rate)
            bias.sub_(bias.mean())

    @torch.no_grad()
    def validate(self, split: str) -> float:
        """Bits per byte on the first rows of a validation split, over the tokens that count."""
        weights, nats, size = self.forward_weights(), 0.0, 0
        step = self.settings.batch_rows
        rows = min(len(self.rows[split][0]), self.settings.validation_rows)
        for start in range(0, rows - step + 1, step):
            ids, first, counts = (
                torch.from_numpy(part[start : start + step].astype(np.int64)) for part in self.rows[split]
            )
            with torch.enable_grad():  # the same compiled graphs as in training
                hidden, _ = self.network.hidden(weights, ids[:, :-1].contiguous(), first[:, :-1].contiguous())
            targets, head = ids[:, 1:].flatten(), weights["lm_head.weight"].detach()
            _, losses = cross_entropy(hidden.detach().flatten(0, 1), head, targets, torch.zeros(targets.numel()))
            count = counts[:, 1:].flatten()
            nats += (losses * count).sum().item()
            size += int((self.token_bytes[targets.numpy()] * count.numpy()).sum())
        return nats / math.log(2) / max(1, size)

    # Checkpoints

    def save(self) -> None:
        """Write the state atomically, and a copy outside the working tree if asked for."""
        state = {
            "params": {name: value.detach() for name, value in self.params.items()},
            "optimizer": self.optimizer.state(),
            "config": self.config,
            "loops": [torch.from_numpy(part) for part in self.rows.get("loop", ())],
            **{name: getattr(self, name) for name in COUNTERS},
        }
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        target = self.settings.folder / STATE_FILE
        part = target.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, target)
        if self.settings.copy_to is not None:
            self.settings.copy_to.mkdir(parents=True, exist_ok=True)
            part = self.settings.copy_to / f"{STATE_FILE}.part"
            shutil.copyfile(target, part)
            os.replace(part, self.settings.copy_to / STATE_FILE)

    def resume(self) -> bool:
        """Load the folder's (or the copy's) state if there is one."""
        for folder in (self.settings.folder, self.settings.copy_to):
            if folder is not None and (folder / STATE_FILE).exists():
                state = torch.load(folder / STATE_FILE, weights_only=True)
                with torch.no_grad():
                    for name, value in state["params"].items():
                        self.params[name].copy_(value)
                self.optimizer.load(state["optimizer"])
                for name in COUNTERS:
                    setattr(self, name, state[name])
                self.rows["loop"] = tuple(part.numpy() for part in state["loops"])
                return True
        return False

    # The loop

    def train(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Train until the budget is used up; `report` gets a record every ten steps and at each validation."""
        s = self.settings
        started, saved = time.monotonic() - self.elapsed_s, time.monotonic()
        window: list[float] = []
        window_start, window_tokens = time.monotonic(), self.tokens
        while self.progress() < 1.0:
            window.append(self.train_step())
            now = time.monotonic()
            self.elapsed_s = now - started
            record: dict[str, Any] = {}
            if len(window) == 10:
                record = {
                    "loss": round(sum(window) / len(window), 4),
                    "tokens_per_s": round((self.tokens - window_tokens) / (now - window_start), 1),
                }
                window, window_start, window_tokens = [], now, self.tokens
            if self.step % s.validate_steps == 0 or self.progress() >= 1.0:
                record |= {f"{split}_bpb": round(self.validate(split), 4) for split in VALIDATIONS}
            if record:
                report(self._record(record))
            if now - saved > s.checkpoint_s:
                self.save()
                saved = now
        self.save()

    def _record(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "chat_tokens": self.chat_tokens,
            "copy_tokens": self.copy_tokens,
            "minutes": round(self.elapsed_s / 60, 2),
            "rate": round(self.rate(), 4),
            **extra,
        }


COUNTERS = ("step", "tokens", "chat_tokens", "copy_tokens", "elapsed_s", "next_row", "loops_until")


def append_log(folder: Path, record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG_FILE).open("a") as log:
        log.write(json.dumps(record) + "\n")
