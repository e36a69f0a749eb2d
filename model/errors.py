"""What can be wrong with a model on disk. Torch-free."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """A model directory that cannot be served; the message names the file, the expected and the found."""


class ConfigError(ModelError):
    """config.json lacks a field, has one that nothing here understands, or contradicts itself."""

    def __init__(self, path: Path, field: str, expected: str, found: object) -> None:
        super().__init__(f"{path}: {field}: expected {expected}, found {found}")
        self.path, self.field, self.expected, self.found = path, field, expected, found


class CheckpointError(ModelError):
    """A weight file that is missing, cut short, or holds something else than the config promises."""

    def __init__(self, path: Path, tensor: str | None, expected: str, found: object) -> None:
        subject = f"{path}: {tensor}" if tensor else str(path)
        super().__init__(f"{subject}: expected {expected}, found {found}")
        self.path, self.tensor, self.expected, self.found = path, tensor, expected, found


class BackendUnavailable(RuntimeError):
    """A backend that cannot run on this machine; the message says why."""
