"""A prompt in either worker, from memory to its first token, in the order of `engine/worker/prompt.py`."""

from __future__ import annotations

from engine.api import Failed, SnapshotTaken
from sim.cached_worker import CachedWorker
from sim.memory import Landing
from sim.toy import BLOCK_TOKENS
from sim.worker import Holding, Mailbox, Prompt
from sim.world import Steps

ADMISSION_WAIT_MS = 400
STALL_MS = 5_000


class PromptRun:
    """One prompt in the engine of either worker: memory with the hit restored, the rest submitted."""

    def __init__(self, worker: CachedWorker, prompt: Prompt) -> None:
        self.worker, self.prompt = worker, prompt
        self.box = Mailbox(worker.discard)
        self.taken: list[tuple[int, int]] = []  # snapshots: tokens, slot
        self.cached, self.reason = 0, None
        self.holding: Holding | None = None

    def begin(self, tokens: int) -> Steps:
        """Memory, with the hit in it. Raises: Overloaded and others; memory is given back by `close`."""
        worker, prompt = self.worker, self.prompt
        self.holding = yield from worker.reserve(tokens, ADMISSION_WAIT_MS)
        if not prompt.hits:
            return
        landing = Landing()
        try:
            self.cached, self.reason = yield from worker.fetch(prompt, self.holding, landing)
        finally:
            if landing.pending:
                worker.quarantine(self.holding, landing)
                self.holding.drop()
                self.holding = None
        if self.holding is None:
            self.holding = yield from worker.reserve(tokens, ADMISSION_WAIT_MS)
        if self.cached:
            worker.world.checkers.restored(worker, prompt, self.holding, self.cached)

    def submit(self, *, hold: bool) -> None:
        assert self.holding is not None
        self.worker.submit(
            self.prompt.request_id,
            self.holding,
            self.box,
            ids=self.prompt.ids[self.cached :],
            sampling=self.prompt.sampling,
            restored=self.cached,
            hold_after_first=hold,
            snapshot_at=tuple(cut for cut in self.prompt.snapshot_at if cut > self.cached),
        )

    def events(self) -> Steps:
        """The next events but snapshots, which are kept. Raises: what failed the sequence."""
        events = []
        for event in (yield from self.box.batch(STALL_MS)):
            match event:
                case SnapshotTaken(tokens=tokens, slot=slot):
                    self.worker.snapshots[slot] = None
                    self.taken.append((tokens, slot))
                case Failed(error=error):
                    raise error
                case _:
                    events.append(event)
        return events

    def store(self) -> None:
        assert self.holding is not None
        taken, self.taken = self.taken, []
        first, full = self.cached // BLOCK_TOKENS, len(self.prompt.ids) // BLOCK_TOKENS
        self.worker.store(self.prompt, self.holding, first, full, taken)

    def close(self) -> None:
        self.box.close()
        for _, slot in self.taken:
            self.worker.drop_snapshot(slot)
        self.taken = []
        if self.holding is not None:
            self.holding.drop()
