"""What a drafter is asked for one sequence, and what its answer must be. Pure; numpy only."""

from __future__ import annotations

import math

import numpy as np

from engine.draft_policy import Draws
from engine.sampler import Purpose, uniform
from engine.sequence import Drafting, LiveSequence
from model.drafting import DraftRequest, Proposal
from model.text import Text

TEMPERATURE_MIN = 1e-30  # as the target's own draw has it: one over it must be a number
LAW_SLACK = 1e-3  # how far from 1 a drafter's law may sum up to


def request_for(sequence: LiveSequence, length: int) -> DraftRequest:
    params, position = sequence.spec.sampling, sequence.consumed
    # A request that must draw what it would undrafted is given the likeliest token, which is a certain draft.
    drawn = drafting_of(sequence).draws == "sampled" and params.temperature > 0.0
    slots = range(length if drawn else 0)
    numbers = [uniform(params.seed, params.choice, position + 1, Purpose.DRAFT, slot) for slot in slots]
    assert sequence.last_id is not None
    return DraftRequest(
        anchor=sequence.last_id,
        position=position,
        blocks=sequence.blocks,
        length=length,
        first=sequence.draft_first,
        temperature=max(params.temperature, TEMPERATURE_MIN) if drawn else 0.0,
        uniforms=numbers,
        context=lambda: text_of(sequence),
    )


def text_of(sequence: LiveSequence) -> Text:
    """All ids that are known, the anchor last. It grows in place."""
    drafting, drawn = drafting_of(sequence), sequence.drawn
    if drafting.text is None:
        drafting.text = Text([*sequence.spec.history, *sequence.spec.ids])
    drafting.text.extend(drawn[drafting.heard :] if drafting.heard else drawn)
    drafting.heard = len(drawn)
    return drafting.text


def draws_as(sequence: LiveSequence) -> Draws:
    params = sequence.spec.sampling
    return "greedy" if params.temperature == 0.0 else "seeded" if params.reproducible else "sampled"


def drafting_of(sequence: LiveSequence) -> Drafting:
    assert sequence.drafting is not None
    return sequence.drafting


def what_is_wrong(proposal: Proposal, length: int, *, vocab_size: int, draws: Draws) -> str | None:
    """Why a proposal cannot be used; None: it can. An empty one is right."""
    tokens, laws = proposal.tokens, proposal.laws
    if len(tokens) > length or len(proposal.confidence) != len(tokens):
        return "length"
    if not tokens:
        return None
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return "vocabulary"
    if not all(map(math.isfinite, proposal.confidence)):
        return "non_finite"
    if laws is None or draws != "sampled":
        return None
    if laws.shape != (len(tokens), vocab_size):
        return "law"
    sums = np.add.reduce(laws, axis=1)  # pairwise, so far nearer than the slack in fp32, too
    if not np.isfinite(sums).all():
        return "non_finite"
    if np.abs(sums - 1.0).max() > LAW_SLACK or np.minimum.reduce(laws, axis=None) < 0.0:
        return "law"
    return None if laws[range(len(tokens)), tokens].min() > 0.0 else "law"
