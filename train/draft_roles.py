"""The two roles of drafter training as plain objects: one writes, one learns. `draft_ray` makes actors of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.backend import BackendKind, load_backend
from model.batch import Verifier
from model.checkpoint import load_weights
from model.config import load_config
from model.drafter.config import DrafterConfig, Rope
from model.drafter.network import read_drafter
from train import draft_eval
from train.draft_data import Generator, GeneratorSettings, Sample
from train.draft_network import W1, W2, DraftNetwork, bigram_factors, initial, look_back, widen
from train.draft_prompts import Prompt
from train.draft_trainer import Replay, Trainer, TrainerSettings, export, released_config

PromptSource = Callable[[int], Iterator[Prompt]]  # seed -> an endless stream; also says what a document ends with
State = dict[str, Any]
LOOK_BACK_SAMPLES = 8
BIGRAM_VOCAB_MAX = 20_000  # above it the square table is no longer small, and the Markov head starts small
HELD_OUT_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSizes:
    """What is chosen about a drafter; the rest is its target's."""

    target_layers: tuple[int, ...] = (2, 5, 8)
    layers: int = 2
    intermediate: int = 768
    heads: int = 4
    q_lora: int = 96
    kv_lora: int = 96
    nope: int = 32
    rope: int = 32
    v_dim: int = 64
    markov_rank: int = 96
    block_len: int = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Everything about a run but where its actors stand.

    A round is what a trainer does between two meetings: `round_steps` steps, fed with what its generators wrote.
    Units: `fill` samples are in a trainer's replay before it starts. `start`: a drafter of the same sizes, or with a
    narrower MLP or Markov head, whose weights are gone on from.
    """

    model_dir: Path
    folder: Path
    stop: int
    mask_id: int
    sizes: DrafterSizes = field(default_factory=DrafterSizes)
    generator: GeneratorSettings = field(
        default_factory=lambda: GeneratorSettings(target_layers=(2, 5, 8), prompts_too=True, past_end_share=0.5)
    )
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    batch_samples: int = 96
    fill: int = 1_200
    replay: int = 8_000
    round_steps: int = 40
    backend: BackendKind = "native"
    seed: int = 0
    start: Path | None = None


def drafter_config(settings: DraftSettings) -> DrafterConfig:
    target, sizes = load_config(settings.model_dir), settings.sizes
    return DrafterConfig(
        form="dspark",
        dtype="bfloat16",
        hidden=target.hidden_size,
        intermediate=sizes.intermediate,
        layers=sizes.layers,
        heads=sizes.heads,
        eps=1e-5,
        vocab=target.vocab_size,
        target_layers=sizes.target_layers,
        mask_id=settings.mask_id,
        block_len=sizes.block_len,
        rope=Rope(dim=sizes.rope, theta=1e4),
        windows=(None,) * sizes.layers,
        q_lora=sizes.q_lora,
        kv_lora=sizes.kv_lora,
        nope=sizes.nope,
        v_dim=sizes.v_dim,
        markov_rank=sizes.markov_rank,
        confidence=True,
        confidence_sees_markov=True,
    )


def load_target(settings: DraftSettings) -> Verifier:
    """Raises: BackendUnavailable where the native backend is, since only that one has taps."""
    backend = load_backend(settings.model_dir, kind=settings.backend, threads=1, numerics="invariant")
    if not hasattr(backend, "tap"):
        raise ValueError(f"backend {backend.name} gives no taps")
    return backend  # type: ignore[return-value]


class GeneratorRole:
    """The target, writing from the prompts of one seed."""

    def __init__(self, settings: DraftSettings, prompts: PromptSource, seed: int) -> None:
        torch.set_num_threads(1)
        own = replace(settings.generator, seed=seed)
        generator = Generator(load_target(settings), prompts(seed), own, settings.stop)
        self._samples = iter(generator)

    def produce(self, count: int) -> tuple[int, list[Sample]]:
        """How many tokens were written, and `count` samples with them."""
        samples = list(itertools.islice(self._samples, count))
        return sum(sample.generated for sample in samples), samples


def write_held_out(settings: DraftSettings, prompts: Sequence[Prompt]) -> list[Sample]:
    """What the target says at temperature 0, and draws at 1, to prompts that nobody trains on."""
    torch.set_num_threads(1)
    target, layers = load_target(settings), settings.sizes.target_layers
    return [
        sample
        for greedy in (True, False)
        for sample in draft_eval.continuations(target, prompts, layers, HELD_OUT_TOKENS, settings.stop, greedy=greedy)
    ]


class TrainerRole:
    """One copy of the drafter, its replay, and the target's tables (not the target).

    Trainers learn apart for a round and then start the next from the mean of their states (local SGD), which every
    one of them works out for itself.
    """

    def __init__(self, settings: DraftSettings, index: int) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        self._settings, self._index = settings, index
        self._config = drafter_config(settings)
        target = load_config(settings.model_dir)
        weights = load_weights(settings.model_dir, target)
        self._embedding = weights["model.embed_tokens.weight"].float()
        self._head = weights["lm_head.weight"].float()
        self._num_target_layers = target.num_layers
        network = DraftNetwork(self._config, self._embedding)
        params = initial(self._config, weights["model.norm.weight"], settings.seed)
        if settings.start is not None:
            widen(params, read_drafter(settings.start, target)[1])
        self._trainer = Trainer(network, params, self._head, settings.trainer)
        self._replay = Replay(settings.replay, settings.seed + 1_000 * index)

    def step(self) -> int:
        return self._trainer.step_number

    def adopt(self, *states: State) -> None:
        """Go on from the mean of these."""
        self._trainer.load(mean_state(states))

    def learn(self, progress: float, *batches: list[Sample]) -> tuple[dict[str, float], State | None]:
        """One round: add the samples, take steps at `progress` in [0, 1] of the budget.

        Returns the round's mean numbers and the state after it; while the replay still fills, its size and None.
        """
        for samples in batches:
            for sample in samples:
                self._replay.add(sample)
        if len(self._replay) < self._settings.fill:
            return {"replay": len(self._replay)}, None
        if self._trainer.step_number == 0 and self._settings.start is None:
            self._start()
        rows = []
        for _ in range(self._settings.round_steps):
            rows.append(self._trainer.step(self._trainer.batch(self._replay), progress))
        numbers = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        counts = {"step": self._trainer.step_number, "slots": self._trainer.slots_seen, "replay": len(self._replay)}
        return numbers | counts, self._trainer.state()

    def _start(self) -> None:
        """What the weights start as depends on what the target says."""
        samples = self._replay.draw(LOOK_BACK_SAMPLES)
        ids = np.concatenate([sample.ids for sample in samples]).astype(np.int64)
        mask = np.full(len(ids), self._config.mask_id)
        taps = torch.cat([torch.from_numpy(sample.taps) for sample in samples]).float()
        embedded = self._embedding[torch.from_numpy(np.concatenate([ids, mask]))]
        look_back(self._config, self._trainer.params, taps, embedded)
        if self._config.vocab <= BIGRAM_VOCAB_MAX:
            counts = np.zeros((self._config.vocab, self._config.vocab), np.float32)
            for sample in self._replay:
                np.add.at(counts, (sample.ids[:-1].astype(np.int64), sample.ids[1:].astype(np.int64)), 1.0)
            w1, w2 = bigram_factors(counts, self._config.markov_rank, self._settings.seed)
            with torch.no_grad():
                self._trainer.params[W1].copy_(w1)
                self._trainer.params[W2].copy_(w2)

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Tokens a verify step on held-out continuations, for each kind of prompt."""
        params, network, out = self._trainer.params, self._trainer.network, dict[str, float]()
        for kind, greedy in sorted({(sample.kind, sample.greedy) for sample in samples}):
            own = [sample for sample in samples if (sample.kind, sample.greedy) == (kind, greedy)]
            found = draft_eval.acceptance(network, params, self._head, own, self._config.block_len)
            out[f"held_out_{kind}" + ("" if greedy else "_drawn")] = found.tokens_per_step
        return out

    def restore(self, path: Path) -> int:
        """Steps done by the run whose state lies at `path`; 0 and nothing where there is none."""
        self._trainer.resume(path)
        return self._trainer.step_number

    def save(self, path: Path, folder: Path) -> None:
        """The state to resume from, and the drafter as it is served."""
        self._trainer.save(path)
        export(self._trainer.params, released_config(self._config, self._num_target_layers), folder)


def mean_state(states: Sequence[State]) -> State:
    """The mean of trainers' parameters and moments; steps and slots of the one that is furthest."""
    if len(states) == 1:
        return states[0]

    def mean(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

    optimizers = [state["optimizer"] for state in states]
    steps = max(state["step"] for state in states)
    moments = {name: mean([optimizer[name] for optimizer in optimizers]) for name in ("first", "second")}
    return {
        "params": mean([state["params"] for state in states]),
        "optimizer": {**moments, "steps": steps},
        "step": steps,
        "slots": max(state["slots"] for state in states),
    }
