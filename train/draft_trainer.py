"""One trainer of the drafter: a replay of samples, batches of anchors, steps, checkpoints, export."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from model.drafter.config import DrafterConfig
from model.drafter.lookup import MATCH_MIN_DRAWN, MATCH_MIN_GREEDY
from train.draft_data import Sample
from train.draft_loss import Aim, Vocabulary, block_loss
from train.draft_network import CONFIDENCE, CONFIDENCE_BIAS, W1, W2, DraftNetwork
from train.optimizer import Optimizer

KNOWN_SHARE = 0.15  # of the blocks whose first tokens a look into the text would draft are learnt from
# Greedy text is learnt at temperature 1/2: laws that overlap there agree about the likeliest token, which is all that
# counts, and the same logits are right at temperature 1, which a pull towards the token itself would bend.
GREEDY_SHARPNESS = 2.0
FLOOR = 0.1  # of what a slot counts, beside the chance that it is reached at all
SLOT_SHARES = {3: 0.15, 5: 0.3, 7: 0.2, 11: 0.35}  # blocks attend both ways, so every length has to be met
CONFIDENCE_SHARE = 0.5  # of the confidence head's loss: the block has to carry what it sees, at some cost
# A loss is over the likeliest tokens of all its batch's laws, a third of the vocabulary, and so many of the others,
# each for several: at temperature 1 a tenth of a law lies there.
OTHERS = 640
WARMUP_STEPS = 20
FINAL_RATE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """`samples` sequences a step, `anchors` blocks in each. Learning rates fall linearly over the last `decay`."""

    samples: int = 12
    anchors: int = 48
    decay: float = 0.8
    rate: float = 1.3
    ce_first: float = 0.8  # share of the cross-entropy at the start, which moves what overlaps nowhere
    ce_last: float = 0.1
    seed: int = 0


class Replay:
    """The latest `capacity` samples, by length, so that a batch pads little."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity, self._rng = capacity, random.Random(seed)
        self._order: list[tuple[int, int]] = []  # length, number
        self._samples: dict[int, Sample] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())

    def add(self, sample: Sample) -> None:
        if sample.generated < 2:
            return  # no token follows its only anchor
        bisect.insort(self._order, (len(sample.ids), self._next))
        self._samples[self._next] = sample
        self._next += 1
        if len(self._samples) > self._capacity:
            oldest = next(iter(self._samples))
            del self._order[bisect.bisect_left(self._order, (len(self._samples.pop(oldest).ids), oldest))]

    def draw(self, count: int) -> list[Sample]:
        """Samples of like length: any, from a window at a random place of the order."""
        width = min(4 * count, len(self._order))
        start = self._rng.randrange(len(self._order) - width + 1)
        window = self._order[start : start + width]
        return [self._samples[number] for _, number in self._rng.sample(window, min(count, width))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Blocks of several samples.

    Shapes: taps [sequences, tokens, num_taps, hidden]; ids, places [sequences, anchors]; before [.., slots]: the
    token that each slot's follows; drawn [.., slots]: the one behind it; states [.., slots, hidden], likeliest
    [.., slots, TOP]: the law that it was drawn from; weights [.., slots], 0 where a sample ends; greedy [sequences]
    bool. `seed`: of what the loss draws.
    """

    taps: Tensor
    ids: Tensor
    places: Tensor
    before: Tensor
    drawn: Tensor
    states: Tensor
    likeliest: Tensor
    weights: Tensor
    greedy: Tensor
    seed: int


def collate(samples: Sequence[Sample], anchors: int, slots: int, rng: np.random.Generator) -> Batch:
    """`anchors` random blocks of every sample; a shorter one repeats some with weight 0."""
    length = max(len(s.ids) for s in samples) - 1
    taps = torch.zeros(len(samples), length, *samples[0].taps.shape[1:])
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for row, s in zip(taps, samples, strict=True):
        row[: len(s.taps)] = torch.from_numpy(s.taps)
        known = s.matched[:-1] >= (MATCH_MIN_GREEDY if s.greedy else MATCH_MIN_DRAWN)
        good = np.flatnonzero(~known | (rng.random(len(known)) < KNOWN_SHARE))
        chosen = np.resize(rng.permutation(good)[:anchors], anchors) if len(good) else np.zeros(anchors, np.int64)
        law = chosen[:, None] + 1 + np.arange(slots)  # of the token behind each slot's
        kept = (law < s.generated) & (np.arange(anchors) < len(good))[:, None]
        law = np.minimum(law, s.generated - 1)
        ids = s.ids.astype(np.int64)
        for name, value in (
            ("ids", ids[s.prompt + chosen]),
            ("places", s.prompt + chosen),
            ("before", ids[s.prompt + law - 1]),
            ("drawn", ids[s.prompt + law]),
            ("states", s.states[law].astype(np.float32)),
            ("likeliest", s.likeliest[law].astype(np.int64)),
            ("weights", kept.astype(np.float32)),
        ):
            parts[name].append(torch.from_numpy(value))
    stacked = {name: torch.stack(values) for name, values in parts.items()}
    greedy = torch.tensor([s.greedy for s in samples])
    return Batch(taps=taps, greedy=greedy, seed=int(rng.integers(2**31)), **stacked)


def vocabulary(likeliest: Tensor, head: Tensor, w2: Tensor, seed: int) -> Vocabulary:
    """What laws are compared over: `likeliest` [any] of them, and OTHERS of the rest for all of it.

    Shapes: head [vocab, hidden], w2 [vocab, rank].
    """
    named = torch.zeros(len(head), dtype=torch.bool).index_fill_(0, likeliest, True)
    sure, rest = named.nonzero()[:, 0], (~named).nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:OTHERS]]
    standing = torch.zeros(len(sure) + len(drawn))
    standing[len(sure) :] = math.log(len(rest) / max(1, len(drawn)))
    tokens = torch.cat([sure, drawn])
    index = torch.full((len(head),), -1).index_copy_(0, sure, torch.arange(len(sure)))
    return Vocabulary(head=head[tokens], w2=F.embedding(tokens, w2), standing=standing, sure=len(sure), index=index)


class Trainer:
    """Parameters, optimiser and how far they have come. `head` [vocab, hidden] is the target's lm_head, frozen."""

    def __init__(
        self, network: DraftNetwork, params: dict[str, Tensor], head: Tensor, settings: TrainerSettings
    ) -> None:
        self.network, self.params, self.settings = network, params, settings
        self._dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        self._head = head.float()
        for value in params.values():
            value.requires_grad_(True)
        self.optimizer = Optimizer(params, self._dtype)
        self.step_number = 0
        self.slots_seen = 0

    def rates(self, progress: float) -> tuple[float, float]:
        """Learning rate factor and share of the cross-entropy at `progress` in [0, 1] of the budget."""
        s = self.settings
        cooled = FINAL_RATE + (1 - FINAL_RATE) * min(1.0, (1.0 - progress) / s.decay)
        rate = s.rate * min(cooled, (self.step_number + 1) / WARMUP_STEPS)
        return rate, s.ce_first + (s.ce_last - s.ce_first) * min(1.0, 2 * progress)

    def batch(self, replay: Replay) -> Batch:
        """The next step's, a function of the replay, the seed and the step's number."""
        rng = np.random.default_rng((self.settings.seed, self.step_number))
        slots = int(rng.choice(list(SLOT_SHARES), p=list(SLOT_SHARES.values())))
        return collate(replay.draw(self.settings.samples), self.settings.anchors, slots, rng)

    def step(self, batch: Batch, progress: float) -> dict[str, float]:
        """Learn from one batch; its mean loss, overlap and matches over the slots that count."""
        rate, ce_share = self.rates(progress)
        loss, numbers = self.loss(batch, ce_share)
        names = list(self.params)
        grads = torch.autograd.grad(loss, [self.params[name] for name in names])
        self.optimizer.step(dict(zip(names, grads, strict=True)), rate)
        self.step_number += 1
        self.slots_seen += int(batch.weights.count_nonzero())
        return numbers

    def loss(self, batch: Batch, ce_share: float) -> tuple[Tensor, dict[str, float]]:
        p, slots, dtype = self.params, batch.before.shape[-1], self._dtype
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden = self.network.hidden(p, batch.taps, batch.ids, batch.places, slots)
        hidden = hidden.flatten(0, 1).float()
        whole = batch.weights.flatten(0, 1)
        markov = F.embedding(batch.before.flatten(0, 1), p[W1])
        greedy = batch.greedy[:, None].expand(-1, batch.ids.shape[1]).flatten()
        named = torch.cat([batch.likeliest.flatten(), batch.drawn.flatten()])
        tokens = vocabulary(named, self._head, p[W2], batch.seed)
        aim = Aim(
            states=batch.states.flatten(0, 1),
            drawn=tokens.index[batch.drawn.flatten(0, 1)],
            weights=whole / whole[:, 0].sum().clamp(min=1.0),
            greedy=greedy,
            sharpness=torch.where(greedy, GREEDY_SHARPNESS, 1.0),
            ce_share=ce_share,
            floor=FLOOR,
        )
        losses = block_loss(hidden, markov, tokens, aim, dtype)
        # Kept or not: at temperature 0 a token must be the likeliest, else the overlap is its chance.
        kept = torch.where(greedy[:, None], losses.matched.float(), losses.overlap)
        weights = whole * (FLOOR + (1 - FLOOR) * losses.reach)
        weights /= weights.sum().clamp(min=1e-9)
        seen = torch.cat([hidden, markov], -1)
        scores = F.linear(seen, p[CONFIDENCE], p[CONFIDENCE_BIAS])[..., 0]
        confidence = F.binary_cross_entropy_with_logits(scores, kept, weights, reduction="sum")
        numbers = {
            "loss": losses.total.item(),
            "confidence_loss": confidence.item(),
            "overlap": float((losses.overlap * weights).sum()),
            "matched": float((losses.matched * weights).sum()),
        }
        return losses.total + CONFIDENCE_SHARE * confidence, numbers

    def state(self) -> dict[str, Any]:
        """All that a trainer which takes over needs, as tensors that share memory with this one's."""
        return {
            "params": {name: value.detach() for name, value in self.params.items()},
            "optimizer": self.optimizer.state(),
            "step": self.step_number,
            "slots": self.slots_seen,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
        self.optimizer.load(state["optimizer"])
        self.step_number, self.slots_seen = state["step"], state["slots"]

    def save(self, path: Path) -> None:
        """Atomically."""
        torch.save(self.state(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def resume(self, path: Path) -> bool:
        if not path.exists():
            return False
        self.load(torch.load(path, weights_only=True))
        return True


def export(params: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """config.json and model.safetensors in the released form; the target's tables are not in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in params.items()}
    save_file(tensors, folder / ".model.safetensors", metadata={"format": "pt"})
    (folder / ".model.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def released_config(config: DrafterConfig, num_target_layers: int) -> dict[str, Any]:
    """config.json under the released drafter's field names."""
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "q_lora_rank": config.q_lora,
        "kv_lora_rank": config.kv_lora,
        "qk_nope_head_dim": config.nope,
        "qk_rope_head_dim": config.rope.dim,
        "v_head_dim": config.v_dim,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "target_hidden_size": config.hidden,
        "target_num_hidden_layers": num_target_layers,
        "target_layer_ids": list(config.target_layers),
        "num_target_layers": len(config.target_layers),
        "mask_token_id": config.mask_id,
        "block_size": config.block_len,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_sees_markov,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "torch_dtype": config.dtype,
    }
