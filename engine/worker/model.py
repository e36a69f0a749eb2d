"""Loads a worker's checkpoint: backend, threads, and the fingerprint that its bytes carry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from engine.pools import Pools
from engine.settings import TILE_TOKENS, EngineSettings
from engine.worker.settings import WorkerSettings
from model.backend import load_backend, load_draft_model
from model.batch import Backend, PoolLayout, Segment
from model.checkpoint import weights_revision
from model.drafting import DraftModel
from model.errors import BackendUnavailable
from model.ops.snapshot import DTYPE_NAMES
from model.tokenizer import tokenizer_revision
from moonrelay.naming import served_name
from moonrelay.prefix import Fingerprint

LAYOUT_VERSION: Final = "1"  # the stored order of blocks and snapshots, model/batch.py
ROW_DTYPE: Final = "float32"
TRIAL_ROUNDS: Final = 3
TRIAL_DECODE_STEPS: Final = 8
TRIAL_MAX_S: Final = 2.0  # per number of threads


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
    backend, threads = _load_fastest(settings, model_dir, say)
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


def _load_fastest(settings: WorkerSettings, model_dir: Path, say: Callable[[str], None]) -> tuple[Backend, int]:
    """The asked number of threads, or whichever of one and two a small trial finds faster."""

    def load(threads: int) -> Backend:
        return load_backend(model_dir, kind=settings.backend, threads=threads, numerics=settings.numerics)

    if settings.threads or len(os.sched_getaffinity(0)) < 2:
        threads = settings.threads or 1
        return load(threads), threads
    seconds = {}
    for threads in (2, 1):  # one last: it is kept without loading again where it wins, which is usual here
        backend = load(threads)
        seconds[threads] = trial_seconds(backend, settings.engine())
    say(f"one thread {seconds[1] * 1e3:.1f} ms, two {seconds[2] * 1e3:.1f} ms for the same work")
    return (backend, 1) if seconds[1] <= seconds[2] else (load(2), 2)


def trial_seconds(backend: Backend, settings: EngineSettings) -> float:
    """The best of a few rounds of single tokens and one prompt chunk; infinity where not one round ended in time.

    The clock is looked at after every pass: two threads on a busy machine spend whole seconds waiting for each other.
    """
    few = EngineSettings(block_tokens=settings.block_tokens, num_blocks=4, num_slots=1)
    pools, best = Pools(backend.layout(settings.block_tokens), few), float("inf")
    steps = [([1], at) for at in range(TRIAL_DECODE_STEPS)] + [(list(range(1, 1 + TILE_TOKENS)), 0)]
    give_up_s = time.perf_counter() + TRIAL_MAX_S
    for _ in range(1 + TRIAL_ROUNDS):  # the first warms up
        began = time.perf_counter()
        for ids, start in steps:
            _consume(backend, pools, ids, start)
            if time.perf_counter() > give_up_s:
                return best
        best = min(best, time.perf_counter() - began)
    return best


def _consume(backend: Backend, pools: Pools, ids: list[int], start: int) -> torch.Tensor:
    segment = Segment(ids=ids, start=start, slot=0, blocks=(0, 1, 2, 3))
    return backend.forward([segment], pools.rows, pools.state)
