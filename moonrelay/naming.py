"""The name that a model is served under: one rule for `up`, routers and workers."""

from __future__ import annotations

from pathlib import Path


def served_name(model_dir: str | Path, given: str | None = None) -> str:
    """`given`, or the checkpoint directory's name with hyphens for underscores: `k3_nano` is served as `k3-nano`."""
    return given or Path(model_dir).resolve().name.replace("_", "-")
