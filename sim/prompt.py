"""A prompt in either worker, from memory to its first token, in the order of `engine/worker/prompt.py`."""

from __future__ import annotations

from dataclasses import replace

from engine.api import Failed, SnapshotTaken
from sim.cached_worker import Bundle, CachedWorker
from sim.memory import Landing
from sim.toy import BLOCK_TOKENS
from sim.worker import Mailbox, Prompt
from sim.worker_memory import Holding, Want
from sim.world import Steps

ADMISSION_WAIT_MS = 400
STALL_MS = 5_000


class PromptRun:
    """One prompt in the engine of either worker: memory with the hit restored, the rest submitted."""

    def __init__(self, worker: CachedWorker, prompt: Prompt) -> None:
        self.worker, self.prompt = worker, prompt
        self.box = Mailbox(worker.discard)
        self.taken: list[tuple[int, int]] = []  # snapshots: tokens, slot
        self.cached = 0
        self.reason: str | None = None
        self.holding: Holding | None = None

    def begin(self, tokens: int) -> Steps:
        """Memory, with the hit in it. Raises: Overloaded and others; memory is given back by `close`."""
        worker, prompt = self.worker, self.prompt
        hit_blocks = prompt.hits[0].tokens // BLOCK_TOKENS if prompt.hits else 0
        want = Want(
            tokens=tokens,
            hashes=prompt.hashes[: (len(prompt.ids) - 1) // BLOCK_TOKENS],
            blocks_min=max(1, hit_blocks),
            snapshots=len(prompt.snapshot_at),
        )
        self.holding = yield from worker.memory.reserve(want, ADMISSION_WAIT_MS)
        if self.holding.found is not None:
            yield from self._take()
        elif prompt.hits:
            yield from self._fetch(want)
        if self.cached:
            worker.world.checkers.restored(worker, prompt, self.holding, self.cached)

    def _fetch(self, want: Want) -> Steps:
        """What the cache nodes have; other memory where a failed fetch may still land."""
        landing, holding = Landing(), self.holding
        assert holding is not None
        try:
            self.cached, self.reason = yield from self.worker.fetch(self.prompt, holding, landing)
        finally:
            if landing.pending:
                self.worker.quarantine(holding, landing)
                holding.drop()
                self.holding = None
        if self.holding is None or not self.cached:
            yield from self._fall_back(want)

    def _fall_back(self, want: Want) -> Steps:
        """A hit that could not be fetched: what is kept here, however shallow, or else nothing."""
        memory = self.worker.memory
        if self.holding is not None:
            if not memory.bundles.depth(want.hashes):
                return
            holding, self.holding = self.holding, None
            holding.drop()
        self.holding = yield from memory.reserve(replace(want, blocks_min=1), ADMISSION_WAIT_MS)
        if self.holding.found is not None:
            self.worker.world.counts["fell_back_to_kept"] += 1
            yield from self._take()

    def _take(self) -> Steps:
        """A bundle kept here: its rows are shared as they are, its snapshot is copied."""
        memory, holding = self.worker.memory, self.holding
        assert holding is not None
        try:
            yield self.worker.rng.random()  # beside the loop, where it is large
        except GeneratorExit:
            memory.untake(holding)
            raise
        self.cached = memory.take(holding)
        self.worker.world.counts["device_hits"] += 1

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
                    self.worker.own_snapshot(slot)
                    self.taken.append((tokens, slot))
                case Failed(error=error):
                    raise error
                case _:
                    events.append(event)
        return events

    def store(self) -> None:
        """Keep the prompt's bundles here and offer what is new of them."""
        assert self.holding is not None
        prompt = self.prompt
        taken, self.taken = self.taken, []
        if not prompt.store:
            for _, slot in taken:
                self.worker.memory.drop_snapshot(slot)
            return
        first, full = self.cached // BLOCK_TOKENS, len(prompt.ids) // BLOCK_TOKENS
        bundle = Bundle(
            root=prompt.root,
            hashes=prompt.hashes,
            first=first,
            end=full,
            publish=first < full or bool(taken),
            hits=prompt.hits,
            tenant=prompt.tenant,
        )
        self.worker.offer(bundle, self.holding, taken)

    def close(self) -> None:
        self.box.close()
        for _, slot in self.taken:
            self.worker.memory.drop_snapshot(slot)
        self.taken = []
        if self.holding is not None:
            self.holding.drop()
