"""Which backend runs a checkpoint, and which code its drafter: chosen once, at start, and logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from model.batch import Backend
from model.checkpoint import Weights, load_weights
from model.config import load_config
from model.drafter.config import DrafterConfig
from model.drafter.lookup import LookupFirst
from model.drafter.network import Drafter, drafter_id, read_drafter
from model.drafter.paged import TorchDraftModel
from model.drafting import DraftModel
from model.errors import BackendUnavailable
from model.network import TorchBackend

BackendKind = Literal["auto", "native", "torch"]
Numerics = Literal["invariant", "fast"]

_log = logging.getLogger(__name__)


def load_backend(model_dir: Path, *, kind: BackendKind, threads: int, numerics: Numerics) -> Backend:
    """Load a checkpoint and the backend to run it. `auto` takes native where it can run, else torch.

    `fast` numerics only loosens the torch backend: the native one is invariant whatever is asked.
    Raises: ModelError if the checkpoint cannot be served; BackendUnavailable if `native` was asked for and cannot be.
    """
    weights = load_weights(model_dir, load_config(model_dir))
    backend = _resolve(weights, kind, threads, numerics)
    fields = {"backend": backend.name, "asked": kind, "threads": threads, "numerics": numerics}
    _log.info("backend resolved", extra=fields | {"model_dir": str(model_dir)})
    return backend


def _resolve(weights: Weights, kind: BackendKind, threads: int, numerics: Numerics) -> Backend:
    if kind != "torch":
        from model.native.backend import NativeBackend  # compiles or loads a library: only where it may be used

        try:
            return NativeBackend(weights.config, weights, threads)
        except BackendUnavailable as error:
            if kind == "native":
                raise
            _log.warning("native backend unavailable, torch takes over", extra={"reason": str(error)})
    return TorchBackend(weights, threads=threads, numerics=numerics)


def load_draft_model(
    drafter_dir: Path, backend: Backend, *, kind: BackendKind, threads: int, target_revision: str
) -> DraftModel:
    """Load the drafter of a loaded target, whose embedding and lm_head it shares. `kind` as for `load_backend`.

    `target_revision` names the target's weights (`weights_revision`): rows of another target are worthless.
    Raises: ModelError and its kinds, by name, for a drafter of another target, vocabulary or other taps.
    """
    config, tensors = read_drafter(drafter_dir, backend.config)
    name = drafter_id(config, tensors, target_revision)
    model = _resolve_drafter(config, tensors, name, backend, kind, threads)
    fields = {"drafter": name, "form": config.form, "code": type(model).__name__}
    _log.info("drafter loaded", extra=fields | {"drafter_dir": str(drafter_dir)})
    return LookupFirst(model)


def _resolve_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    backend: Backend,
    kind: BackendKind,
    threads: int,
) -> DraftModel:
    shared, layout = (backend.embedding, backend.lm_head), backend.layout(1)
    if kind != "torch":
        from model.native.drafter import NativeDraftModel  # compiles or loads a library: only where it may be used

        try:
            return NativeDraftModel(config, tensors, *shared, name, layout, threads)
        except BackendUnavailable as error:
            if kind == "native" and config.form == "dspark":
                raise
            _log.warning("native drafter unavailable, torch takes over", extra={"reason": str(error)})
    return TorchDraftModel(Drafter(config, tensors, *shared), name, layout)
