"""A real engine on a committed checkpoint; cheap enough to make one per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.settings import EngineSettings
from model.backend import load_backend, load_draft_model
from model.batch import Backend
from moonrelay.valkey import LocalValkey, start_local_valkey
from tests.golden import golden_dir


@pytest.fixture(scope="session")
def backend() -> Backend:
    return load_backend(golden_dir("k3_tiny_smooth"), kind="torch", threads=1, numerics="invariant")


@pytest.fixture
def make_engine(backend: Backend) -> Iterator[Callable[..., Engine]]:
    """Engines with the settings a test names, stopped at its end; `start=False` leaves the thread out.

    `native`: on a native backend of their own, with the drafter in the folder `drafter` if there is one.
    """
    made: list[Engine] = []

    def make(
        *, start: bool = True, observer=None, native: bool = False, drafter: Path | None = None, **settings: int
    ) -> Engine:
        own, draft_model = backend, None
        if native:
            own = load_backend(golden_dir("k3_tiny_smooth"), kind="native", threads=1, numerics="invariant")
        if drafter is not None:
            draft_model = load_draft_model(drafter, own, kind="auto", threads=1, target_revision="w")
        chosen = EngineSettings(**{"num_blocks": 32, "num_slots": 8, **settings})
        engine = Engine(own, chosen, drafter=draft_model, observer=observer)
        if start:
            engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalValkey]:
    started = start_local_valkey(tmp_path_factory.mktemp("valkey"))
    yield started
    started.stop()
