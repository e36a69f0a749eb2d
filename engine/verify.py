"""Which drafted tokens a request keeps: rejection sampling against its own law. Pure; float64.

Both rules leave the target's law unchanged whatever the draft proposes; they differ in how many tokens they keep.
Rows are laws over one set of ids: the request's filtered law (temperature, top-k, top-p and whatever else it asks
for) and the drafter's. A greedy request is the case of laws with one id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.settings import DraftRule

Law = npt.NDArray[np.float64]
Rule = DraftRule


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """`accepted` drafted tokens are kept; the token after them is drawn from `law` [vocab], which sums to 1."""

    accepted: int
    law: Law


def verify(
    rule: Rule, target: Law, draft: Law, tokens: npt.NDArray[np.intp], uniforms: npt.NDArray[np.float64]
) -> Verdict:
    """Judge k drafted tokens.

    Shapes: target [k+1, vocab]: the law at each drafted position, and after the last; draft [k, vocab]: what each
            token was drawn from; tokens [k]; uniforms [k] in [0, 1).
    Source: standard: arXiv 2302.01318; block: arXiv 2403.10444, Algorithm 2, which keeps at least as many on average.
    """
    k = len(tokens)
    if target.shape != (k + 1, target.shape[1]) or draft.shape != (k, target.shape[1]) or uniforms.shape != (k,):
        raise ValueError(f"{k} tokens need target [k+1, vocab], draft [k, vocab] and k uniforms")
    at = np.arange(k)
    ratio_of, ratio_to = target[at, tokens], draft[at, tokens]
    if rule == "standard":
        refused = np.flatnonzero(uniforms * ratio_to >= ratio_of)
        accepted = int(refused[0]) if len(refused) else k
        share = 1.0
    else:
        accepted, share = _block(target, draft, ratio_of, ratio_to, uniforms)
    if accepted == k:
        return Verdict(k, target[k])
    rest = np.maximum(share * target[accepted] - draft[accepted], 0.0)
    total = float(rest.sum())
    # Nothing is left only where both laws agree to the last bit; then a refusal has no weight, and any law is right.
    return Verdict(accepted, rest / total if total > 0.0 else target[accepted])


def _block(target: Law, draft: Law, of: Law, to: Law, uniforms: Law) -> tuple[int, float]:
    """The longest prefix that its own threshold admits, and the share of the target's law that is left there."""
    accepted, kept, share = 0, 1.0, 1.0
    for i in range(len(of)):
        share = min(share * float(of[i]) / float(to[i]), 1.0) if to[i] > 0.0 else (1.0 if of[i] > 0.0 else 0.0)
        if i + 1 == len(of):
            threshold = share
        else:
            mass = float(np.maximum(share * target[i + 1] - draft[i + 1], 0.0).sum())
            below = mass + 1.0 - share
            threshold = mass / below if below > 0.0 else 1.0
        if uniforms[i] < threshold:
            accepted, kept = i + 1, share
    return accepted, kept
