"""Attention residuals: a layer reads a learned mix of earlier block outputs instead of their plain sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.ops.norm import inverse_rms


def mix(sources: Sequence[torch.Tensor], score_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax over the sources of each one's normed score; the sum takes the raw vectors.

    Shapes: sources [T, hidden] each; score_weight [hidden] (norm weight times projection); result [T, hidden].
    Source: the K3 technical report; checked against golden/.
    """
    scores = [((v * inverse_rms(v, eps)) * score_weight).sum(-1) for v in sources]
    shares = torch.softmax(torch.stack(scores, -1), -1)
    mixed = shares[:, :1] * sources[0]
    for i in range(1, len(sources)):
        mixed = mixed + shares[:, i : i + 1] * sources[i]
    return mixed
