"""Which drafted tokens a request keeps, and the token after them, from the target's logits. Pure; numpy only.

A drafted token that was certain, as every one of a greedy request, is kept while it is the very token that the
request would have drawn there by itself: such drafts change no result, seeded ones included. Where the drafter drew
from a law of its own, `engine.verify` judges by rejection sampling against the request's own filtered law: results
then follow that law, but are others than without a drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.api import SampledToken, SamplingParams
from engine.errors import NonFiniteLogits
from engine.sampler import Logits, Purpose, Rows, filtered, invert, named, not_finite, uniform
from engine.step import Draw, Drawn
from engine.verify import Law, Rule, verify
from model.sampling import Sampler

Run = list[SampledToken | NonFiniteLogits]


def draw(logits: Logits, draws: Sequence[Draw], rule: Rule, sampler: Sampler | None = None) -> list[Drawn]:
    """Answer a step's draws: a token each, or for drafted ones the kept tokens and the one after them.

    Shapes: logits [rows, vocab] fp32: one row for each draw and one more for each token drafted for it, in order.
    `sampler` computes the same on the backend's side; without one numpy does, which says what is computed.
    """
    return _slow(logits, draws, rule) if sampler is None else _fast(logits, draws, rule, sampler)


def _fast(logits: Logits, draws: Sequence[Draw], rule: Rule, sampler: Sampler) -> list[Drawn]:
    shifted = _shifted(logits, draws) if [1 for wanted in draws if wanted.shift is not None] else {}
    found = sampler.draw(logits, draws, shifted, rule)
    drawn: list[Drawn] = []
    at = 0
    for wanted, kept, drew in zip(draws, found[::2], found[1::2], strict=True):
        drafted, params = wanted.drafted, wanted.params
        last = named(logits, at + kept, drew, params) if drew >= 0 else not_finite(wanted.position + kept)
        if not drafted:
            drawn.append(last)
        elif params.top_logprobs is None:
            drawn.append((*[SampledToken(id=token) for token in drafted[:kept]], last))
        else:
            drawn.append((*(named(logits, at + i, drafted[i], params) for i in range(kept)), last))
        at += 1 + len(drafted)
    return drawn


def _shifted(logits: Logits, draws: Sequence[Draw]) -> dict[int, Logits]:
    """By index of a draw, its rows with what its request adds to them."""
    shifted, at = dict[int, Logits](), 0
    for index, wanted in enumerate(draws):
        end = at + 1 + len(wanted.drafted)
        if wanted.shift is not None:
            shifted[index] = wanted.shift.apply(logits[at:end], wanted.drafted)
        at = end
    return shifted


def _slow(logits: Logits, draws: Sequence[Draw], rule: Rule) -> list[Drawn]:
    rows, at = Rows(logits), 0
    drawn: list[Drawn] = []
    for wanted in draws:
        end = at + 1 + len(wanted.drafted)
        own, first = rows, at
        if wanted.shift is not None:
            raw = logits[at:end]
            own, first = Rows(wanted.shift.apply(raw, wanted.drafted), told=raw), 0
        if wanted.drafted:
            drawn.append(tuple(_judge(own, first, wanted.params, wanted.drafted, wanted.laws, wanted.position, rule)))
        else:
            drawn.append(own.draw(first, wanted.params, wanted.position))
        at = end
    return drawn


def _judge(
    rows: Rows,
    at: int,
    params: SamplingParams,
    tokens: Sequence[int],
    laws: Logits | None,
    position: int,
    rule: Rule,
) -> Run:
    if laws is not None and params.temperature > 0.0:
        return _by_law(rows, at, params, tokens, laws, position, rule)
    run: Run = []
    for i in range(len(tokens) + 1):
        token = rows.draw(at + i, params, position + i)
        run.append(token)
        if isinstance(token, NonFiniteLogits) or i == len(tokens) or token.id != tokens[i]:
            break
    return run


def _by_law(
    rows: Rows,
    at: int,
    params: SamplingParams,
    tokens: Sequence[int],
    laws: Logits,
    position: int,
    rule: Rule,
) -> Run:
    # A row that is not finite ends the draft before it: whether it does is known from the tokens before it alone.
    k = next((i for i in range(len(tokens)) if not rows.finite(at + i)), len(tokens))
    if k == 0:
        return [rows.draw(at, params, position)]
    uniforms = [uniform(params.seed, params.choice, position, Purpose.ACCEPT, slot) for slot in range(k)]
    whole = rows.finite(at + k)
    target = np.stack([law_of(rows.logits[at + i], params) for i in range(k + whole)])
    if not whole:
        target = np.concatenate([target, target[-1:]])  # looked at only where all are kept, and then not drawn from
    draft = laws[:k].astype(np.float64)
    draft /= draft.sum(axis=1, keepdims=True)
    verdict = verify(rule, target, draft, np.asarray(tokens[:k], dtype=np.intp), np.asarray(uniforms))
    run: Run = [rows.named(at + i, tokens[i], params) for i in range(verdict.accepted)]
    last = at + verdict.accepted
    if verdict.accepted == k:
        return [*run, rows.draw(last, params, position + k)]
    number = uniform(params.seed, params.choice, position + verdict.accepted, Purpose.SAMPLE)
    return [*run, rows.named(last, invert(verdict.law, number), params)]


def law_of(logits: Logits, params: SamplingParams) -> Law:
    """The request's own filtered law over the whole vocabulary: [vocab], sums to 1. Needs temperature > 0."""
    kept, weights = filtered(logits, params)
    law = np.zeros(len(logits))
    law[slice(None) if kept is None else kept] = weights
    law /= law.sum()
    return law
