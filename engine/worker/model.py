"""Loads a worker's checkpoint: backend, threads, and the fingerprint that its bytes carry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from engine.worker.cores import usable_cores
from engine.worker.settings import WorkerSettings
from model.backend import load_backend, load_draft_model
from model.batch import Backend, PoolLayout
from model.checkpoint import weights_revision
from model.drafting import DraftModel
from model.errors import BackendUnavailable
from model.ops.snapshot import DTYPE_NAMES
from model.tokenizer import tokenizer_revision
from moonrelay.naming import served_name
from moonrelay.prefix import Fingerprint

LAYOUT_VERSION: Final = "1"  # the stored order of blocks and snapshots, model/batch.py
ROW_DTYPE: Final = "float32"
# Small passes stay on one of them (model/native/pool.h); prompts, and the verification of drafts, take two. More
# would be for a machine that a worker has to itself, which nobody can see from inside it.
AUTO_THREADS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    backend: Backend
    layout: PoolLayout
    fingerprint: Fingerprint
    name: str
    threads: int
    drafter: DraftModel | None = None

    @property
    def drafter_id(self) -> str:
        """Whose rows the blocks hold beside the target's; empty: nobody's."""
        return self.drafter.drafter_id if self.drafter is not None else ""

    @property
    def max_context(self) -> int:
        return self.backend.config.context_len

    @property
    def vocab_size(self) -> int:
        return self.backend.config.vocab_size


def load_model(settings: WorkerSettings, say: Callable[[str], None]) -> LoadedModel:
    """Load, choose the threads, name what was loaded. `say` takes one line of progress at a time.

    Raises: ModelError, BackendUnavailable.
    """
    model_dir, began = Path(settings.model_dir), time.monotonic()
    name = served_name(model_dir, settings.model_name)
    say(f"loading {name} from {model_dir}")
    threads = settings.threads or min(AUTO_THREADS, usable_cores())
    backend = load_backend(model_dir, kind=settings.backend, threads=threads, numerics=settings.numerics)
    if backend.name == "native":
        # Torch only copies states here. On threads of its own it would wake one that then spins for milliseconds,
        # on the core that the native backend's next pass needs.
        torch.set_num_threads(1)
    say(f"loaded {name}: backend {backend.name}, {threads} threads, {time.monotonic() - began:.1f} s")
    revision = weights_revision(model_dir)
    drafter = _load_drafter(settings, model_dir, backend, threads, revision, say)
    fingerprint = Fingerprint(
        model=name,
        weights_revision=revision,
        tokenizer_revision=tokenizer_revision(model_dir),
        row_dtype=ROW_DTYPE,
        snapshot_dtype=DTYPE_NAMES[settings.snapshot_dtype],
        layout_version=LAYOUT_VERSION,
        numerics_version=f"{backend.name}/{settings.numerics}",
        block_tokens=settings.block_tokens,
    )
    width = drafter.draft_width if drafter is not None else 0
    layout = replace(backend.layout(settings.block_tokens), draft_width=width)
    return LoadedModel(
        backend=backend, layout=layout, fingerprint=fingerprint, name=name, threads=threads, drafter=drafter
    )


def _load_drafter(
    settings: WorkerSettings,
    model_dir: Path,
    backend: Backend,
    threads: int,
    revision: str,
    say: Callable[[str], None],
) -> DraftModel | None:
    """None where there is to be none. Raises: ModelError for one that is not this target's, or that was named and is
    not there; BackendUnavailable where it was named and the backend cannot verify what it drafts."""
    auto = settings.drafter == "auto"
    folder = model_dir / "drafter" if auto else Path(settings.drafter)
    if settings.drafter == "off" or (auto and not (folder / "config.json").is_file()):
        return None
    if not hasattr(backend, "fold"):
        if not auto:
            raise BackendUnavailable(f"backend {backend.name} cannot verify drafts: {folder} cannot be used with it")
        say(f"backend {backend.name} cannot verify drafts: the drafter is left out")
        return None
    drafter = load_draft_model(folder, backend, kind=settings.backend, threads=threads, target_revision=revision)
    say(f"drafter {drafter.drafter_id} from {folder}: up to {drafter.block_len} tokens at once")
    return drafter
