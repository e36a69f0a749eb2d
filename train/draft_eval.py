"""The headline of drafter training: tokens a verify step on held-out prompts, at temperature 0 and at 1.

What the target writes is the same whoever drafts, so it is written once; a drafter is then judged at every place of
it in a few batched passes, and the walk of accepted lengths gives what serving would do. At temperature 1, too: of a
text drawn from the target, verification keeps each drafted token with a chance that the two laws give.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.batch import Verifier
from model.drafter.lookup import looked_up
from model.text import Text
from model.tokenizer import Tokenizer
from train import corpus, heldout
from train.draft_data import Generator, GeneratorSettings, Sample
from train.draft_network import W1, W2, DraftNetwork
from train.draft_prompts import Kind, Prompt, prose_of

PROMPT_TOKENS = (96, 384)
LOOP_GRAM = 16  # a step is in a loop when its last tokens, so many, stood earlier in the same output
ANCHORS = 64  # judged at once
WALKS = 8  # through a drawn text, whose accepted lengths are drawn too


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Mean tokens a verify step outside loops, and how many steps those were of all."""

    tokens_per_step: float
    steps: int
    looped_share: float


def held_out_prompts(work: Path, tokenizer: Tokenizer, count: int, seed: int = 0) -> list[Prompt]:
    """`count` beginnings of held-out files, and as many of their docstrings run together."""
    listed = {(entry["package"], entry["path"]) for entry in json.loads(heldout.FILES_LIST.read_text())}
    texts = [d.text for d in corpus.read(work, "held") if (d.package, d.path) in listed]
    rng = random.Random(seed)
    rng.shuffle(texts)
    prompts: list[Prompt] = []
    kinds: tuple[Kind, Kind] = ("code", "prose")
    for kind in kinds:
        found = 0
        for text in texts:
            tokens = rng.randint(*PROMPT_TOKENS)
            ids = tokenizer.encode(text if kind == "code" else prose_of(text))[:tokens]
            if len(ids) == tokens and found < count:
                found += 1
                prompts.append(Prompt(kind=kind, ids=ids))
    return prompts


def continuations(
    target: Verifier,
    prompts: Sequence[Prompt],
    layers: tuple[int, ...],
    tokens: int,
    stop: int,
    *,
    greedy: bool = True,
) -> list[Sample]:
    """What the target writes at temperature 0, or draws at 1; one ends early where it goes round."""
    settings = GeneratorSettings(
        target_layers=layers,
        batch=min(32, len(prompts)),
        tokens_min=tokens,
        tokens_max=tokens,
        context_max=PROMPT_TOKENS[1] + tokens,
        greedy_share=1.0 if greedy else 0.0,
    )
    return list(Generator(target, iter(prompts), settings, stop))


@torch.no_grad()
def chances(
    network: DraftNetwork, params: Mapping[str, Tensor], head: Tensor, sample: Sample, slots: int
) -> NDArray[np.float32]:
    """How likely verification keeps at least 1, 2, .. `slots` drafted tokens: [places, slots].

    A place is each generated token that `slots` more follow. At temperature 0 it is certain: 0 or 1. At temperature 1
    a draft is kept as the target's own draw with the least of 1 and the ratios drafter / target of the chances of its
    first tokens: block verification.
    Source: Block Verification, arXiv 2403.10444, of whose accepted length this is the mean over the drafts.
    """
    ids = torch.from_numpy(sample.ids.astype("int64"))
    taps, states = torch.from_numpy(sample.taps).float()[None], torch.from_numpy(sample.states).float()
    out = [torch.empty(0, slots)]
    for start in range(sample.prompt, len(ids) - slots, ANCHORS):
        places = torch.arange(start, min(start + ANCHORS, len(ids) - slots))
        along = places[:, None] + torch.arange(slots)
        logits = F.linear(network.hidden(params, taps, ids[places][None], places[None], slots)[0], head)
        logits += params[W1][ids[along]] @ params[W2].T
        wanted = ids[along + 1]
        if sample.greedy:  # as long as all are right, each stands behind the one that was drafted before it
            out.append((logits.argmax(-1) == wanted).float().cumprod(-1))
            continue
        law = F.linear(states[along + 1 - sample.prompt], head)
        mine, own = (of.log_softmax(-1).gather(-1, wanted[..., None])[..., 0] for of in (logits, law))
        out.append((mine - own).cumsum(-1).cummin(-1).values.clamp(max=0.0).exp())
    return torch.cat(out).numpy()


def in_loop(output: Sequence[int]) -> list[bool]:
    """For each token: whether it and those before it, LOOP_GRAM in all, stood earlier in `output`."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(output) + 1):
        gram = tuple(output[max(0, end - LOOP_GRAM) : end])
        found.append(gram in seen)
        if len(gram) == LOOP_GRAM:
            seen.add(gram)
    return found


def acceptance(
    network: DraftNetwork,
    params: Mapping[str, Tensor],
    head: Tensor,
    samples: Sequence[Sample],
    slots: int,
    *,
    lookup: bool = True,
) -> Acceptance:
    """Walk each continuation as a verifier would: from a token to the one behind the run it keeps.

    `lookup`: as it is served, with what the text itself gives tried first; else the network alone.
    """
    steps = tokens = looped = 0
    rng = random.Random(0)
    for sample in samples:
        likely = chances(network, params, head, sample, slots)
        ids = sample.ids.tolist()
        loops = in_loop(ids[sample.prompt :])
        seen = [copied(ids, sample.prompt + at, slots, sample.greedy) for at in range(len(likely) if lookup else 0)]
        for _ in range(1 if sample.greedy else WALKS):
            at = 0
            while at < len(likely):
                found = seen[at] if lookup else None
                run = int((likely[at] > rng.random()).sum()) if found is None else found
                if loops[at]:
                    looped += 1
                else:
                    steps, tokens = steps + 1, tokens + run + 1
                at += run + 1
    total = steps + looped
    return Acceptance(tokens_per_step=tokens / max(1, steps), steps=steps, looped_share=looped / max(1, total))


def copied(ids: Sequence[int], place: int, slots: int, greedy: bool) -> int | None:
    """How many tokens are kept of what a look into the text drafts at `place`; None where nothing is found."""
    found = looked_up(Text(ids[: place + 1]), slots, drawn=not greedy)
    if found is None:
        return None
    pairs = zip(found.tokens, ids[place + 1 :], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
