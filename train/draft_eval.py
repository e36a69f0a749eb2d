"""The headline of drafter training: tokens a verify step on held-out prompts at temperature 0.

What the target writes at temperature 0 is fixed, so it is written once; a drafter is then judged at every place of
it in a few batched passes, and the walk of accepted lengths gives what serving would do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.batch import Verifier
from model.drafter.lookup import looked_up
from model.drafting import DraftRequest
from model.tokenizer import Tokenizer
from train import corpus, heldout
from train.draft_data import Generator, GeneratorSettings, Sample
from train.draft_network import W1, W2, DraftNetwork
from train.draft_prompts import Kind, Prompt, prose_of

PROMPT_TOKENS = (96, 384)
LOOP_GRAM = 16  # a step is in a loop when its last tokens, so many, stood earlier in the same output
ANCHORS = 64  # judged at once


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
    target: Verifier, prompts: Sequence[Prompt], layers: tuple[int, ...], tokens: int, stop: int
) -> list[Sample]:
    """What the target writes at temperature 0; one ends early where it goes round."""
    settings = GeneratorSettings(
        target_layers=layers,
        batch=min(32, len(prompts)),
        tokens_min=tokens,
        tokens_max=tokens,
        context_max=PROMPT_TOKENS[1] + tokens,
        greedy_share=1.0,
    )
    return list(Generator(target, iter(prompts), settings, stop))


@torch.no_grad()
def accepted(
    network: DraftNetwork, params: Mapping[str, Tensor], head: Tensor, sample: Sample, slots: int
) -> list[int]:
    """How many of `slots` drafted tokens the target would keep, for a block at each generated token but the last."""
    ids = torch.from_numpy(sample.ids.astype("int64"))
    taps = torch.from_numpy(sample.taps).float()[None]
    out: list[int] = []
    for start in range(sample.prompt, len(ids) - 1, ANCHORS):
        places = torch.arange(start, min(start + ANCHORS, len(ids) - 1))
        hidden = network.hidden(params, taps, ids[places][None], places[None], slots)[0]
        logits = F.linear(hidden, head)
        before, alive, kept = ids[places], torch.ones(len(places), dtype=torch.bool), torch.zeros(len(places))
        for slot in range(slots):
            before = (logits[:, slot] + params[W1][before] @ params[W2].T).argmax(-1)
            wanted = places + slot + 1
            alive &= (wanted < len(ids)) & (before == ids[wanted.clamp(max=len(ids) - 1)])
            kept += alive
        out += kept.int().tolist()
    return out


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
    for sample in samples:
        kept = accepted(network, params, head, sample, slots)
        ids = sample.ids.tolist()
        loops = in_loop(ids[sample.prompt :])
        at = 0
        while at + slots < len(kept):
            found = copied(ids, sample.prompt + at, slots) if lookup else None
            run = kept[at] if found is None else found
            if loops[at]:
                looped += 1
            else:
                steps, tokens = steps + 1, tokens + run + 1
            at += run + 1
    total = steps + looped
    return Acceptance(tokens_per_step=tokens / max(1, steps), steps=steps, looped_share=looped / max(1, total))


def copied(ids: Sequence[int], place: int, slots: int) -> int | None:
    """How many tokens are kept of what a look into the text drafts at `place`; None where nothing is found."""
    context = ids[: place + 1]
    request = DraftRequest(anchor=ids[place], position=place, blocks=(), length=slots, context=lambda: context)
    found = looked_up(request)
    if found is None:
        return None
    pairs = zip(found.tokens, ids[place + 1 :], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
