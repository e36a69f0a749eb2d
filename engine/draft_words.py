"""What a drafter is asked for one sequence, and what its answer must be. Pure; numpy only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.draft_policy import Draws
from engine.sampler import Purpose, uniform
from engine.sequence import Drafting, LiveSequence
from model.drafting import DraftRequest, Proposal

TEMPERATURE_MIN = 1e-30  # as the target's own draw has it: one over it must be a number
LAW_SLACK = 1e-3  # how far from 1 a drafter's law may sum up to


def request_for(sequence: LiveSequence, length: int, *, dice: bool = True) -> DraftRequest:
    """`dice`: with the numbers that a drafter draws by; a draft read from the text is certain whoever asks."""
    params, position = sequence.spec.sampling, sequence.consumed
    # A request that must draw what it would undrafted is given the likeliest token, which is a certain draft.
    drawn = not dice or draws_as(sequence) == "sampled"
    temperature = max(params.temperature, TEMPERATURE_MIN) if drawn and params.temperature > 0.0 else 0.0
    numbers = [
        uniform(params.seed, params.choice, position + 1, Purpose.DRAFT, slot)
        for slot in range(length if temperature > 0.0 and dice else 0)
    ]
    assert sequence.last_id is not None
    return DraftRequest(
        anchor=sequence.last_id,
        position=position,
        blocks=sequence.blocks,
        length=length,
        first=sequence.draft_first,
        temperature=temperature,
        uniforms=numbers,
        context=lambda: _text(sequence),
    )


def _text(sequence: LiveSequence) -> Sequence[int]:
    """All ids that are known, the anchor last. It grows in place: copying it at every step would cost as much as a
    draft."""
    drafting = drafting_of(sequence)
    if drafting.text is None:
        drafting.text = array("I", [*sequence.spec.history, *sequence.spec.ids])
    drafting.text.extend(sequence.drawn[drafting.heard :])
    drafting.heard = len(sequence.drawn)
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
    if not np.isfinite(proposal.confidence).all():
        return "non_finite"
    if laws is None or draws != "sampled":
        return None
    if laws.shape != (len(tokens), vocab_size):
        return "law"
    sums = laws.sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        return "non_finite"
    if np.abs(sums - 1.0).max() > LAW_SLACK or laws.min() < 0.0:
        return "law"
    return None if laws[np.arange(len(tokens)), tokens].min() > 0.0 else "law"
