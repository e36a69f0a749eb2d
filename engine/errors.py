"""Faults of the model that end a sequence but not the process."""

from __future__ import annotations

from typing import ClassVar

from moonrelay.errors import ServeError


class ModelFailed(ServeError):
    """The forward pass raised; every sequence of that step ends, since its rows and state may be half written."""

    code: ClassVar[str] = "model_failed"


class NonFiniteLogits(ModelFailed):
    """The model returned NaN or infinity for this sequence; no token is drawn from such logits."""

    code: ClassVar[str] = "non_finite_logits"
