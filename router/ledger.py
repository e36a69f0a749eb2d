"""What this router knows of workers beyond membership: what it has given them, and who could not be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace

from router.core import NO_LOAD, Load, Worker, WorkerKey


class Ledger:
    """Loads and suspects by worker. Invariant: loads are what the requests in flight hold, zero when idle."""

    def __init__(self, *, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self._loads: dict[WorkerKey, Load] = {}
        self._suspects: dict[WorkerKey, float] = {}  # until when, on the loop's clock
        self._choices = 0

    @property
    def loads(self) -> Mapping[WorkerKey, Load]:
        return self._loads

    @contextmanager
    def held(self, worker: Worker, prompt_tokens: int) -> Iterator[None]:
        """Count a sequence, and the prompt tokens it must compute, as this worker's."""
        self._choices += 1
        self._add(worker.key, 1, prompt_tokens, self._choices)
        try:
            yield
        finally:
            self._add(worker.key, -1, -prompt_tokens, 0)

    def suspect(self, worker: Worker, now_s: float) -> None:
        self._suspects[worker.key] = now_s + self._suspect_s

    def suspects(self, now_s: float) -> Set[WorkerKey]:
        if not self._suspects:
            return frozenset()
        self._suspects = {key: until for key, until in self._suspects.items() if until > now_s}
        return self._suspects.keys()

    def cleared_s(self) -> float | None:
        """When the next suspicion ends; None where there is none."""
        return min(self._suspects.values(), default=None)

    def prune(self, live: Set[WorkerKey]) -> None:
        """Forget workers that are gone and hold nothing."""
        gone = [key for key, load in self._loads.items() if key not in live and not load.sequences]
        for key in gone:
            del self._loads[key]
        self._suspects = {key: until for key, until in self._suspects.items() if key in live}

    def check(self) -> None:
        """Assert that nothing is held; run when idle."""
        assert not any(load.sequences or load.prompt_tokens for load in self._loads.values())

    def _add(self, key: WorkerKey, sequences: int, prompt_tokens: int, chosen_at: int) -> None:
        load = self._loads.get(key, NO_LOAD)
        self._loads[key] = replace(
            load,
            sequences=load.sequences + sequences,
            prompt_tokens=load.prompt_tokens + prompt_tokens,
            chosen_at=chosen_at or load.chosen_at,
        )
