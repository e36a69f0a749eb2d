"""A prompt from its request to its first token: memory, cache, engine. The same in both workers.

The cache comes in as a `PromptCache`, so that nothing here depends on how bytes move.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.api import EngineEvent, SequenceSpec, SnapshotTaken
from engine.engine import Engine
from engine.worker.bundles import Found
from engine.worker.cache import PromptCache
from engine.worker.memory import Extent, Holding, Memory, Want
from engine.worker.metrics import WorkerMetrics
from engine.worker.snapshots import SnapshotForm
from engine.worker.stream import Wakeups
from engine.worker.sums import BlockSums
from engine.worker.turn import Bundle, Turn, TurnPrompt
from engine.worker.wire import Prompt
from model.ops.snapshot import SnapshotDtype
from moonrelay.stubs.v1 import common_pb2

log = logging.getLogger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
INLINE_BYTES = 4 << 20  # copying as much takes some 0.4 ms: a hand-over to a thread that waits its turn costs that
MakeSpan = Callable[[int, int, int], common_pb2.Span]  # pool, offset, length


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a prompt need not compute, and the checksums of its blocks where a transfer or an owner has made them.

    `draft_first`: the drafter's rows are there from this token on, to the end of what was restored.
    """

    usage: common_pb2.CacheUsage = field(default_factory=common_pb2.CacheUsage)
    xxh3: Sequence[int | None] = ()
    draft_first: int = 0


class PromptRun:
    """One prompt in the engine. Made by `PromptRunner.run`."""

    def __init__(self, runner: PromptRunner, prompt: Prompt, holding: Holding, restored: Restored) -> None:
        self.prompt, self.holding, self.restored = prompt, holding, restored.usage
        self.draft_first = restored.draft_first if runner.drafter else 0
        self.began_s = time.monotonic()
        self.turn = runner.turn(prompt.request_id, holding, prompt.turn, tenant=prompt.tenant)
        for index in range(restored.usage.cached_tokens // runner.block_tokens):
            xxh3 = restored.xxh3[index] if index < len(restored.xxh3) else None
            if xxh3 is not None:
                self.turn.sums.know(index, xxh3)
        self._runner = runner

    async def events(self) -> list[EngineEvent]:
        """The next events, at least one step's; snapshots are kept aside. Raises: what failed the sequence."""
        return await self.turn.events()

    async def spans(self, first: int, end: int) -> list[common_pb2.Span]:
        """Blocks [first, end) with their checksums; none of them may change any more."""
        return await self.turn.sums.spans(first, end)

    def usage(self) -> common_pb2.CacheUsage:
        """What the cache gave, and why it gave no more as far as this worker can know."""
        usage, hit = common_pb2.CacheUsage(), self.prompt.hit
        usage.CopyFrom(self.restored)
        usage.matchable_tokens = hit.matchable_tokens if hit is not None else 0
        usage.drafter_cold = self.draft_first
        usage.miss_reason = miss_reason(len(self.prompt.ids), self._runner.block_tokens, usage)
        return usage

    def submit(self, *, hold_after_first: bool) -> None:
        restored = self.restored.cached_tokens
        spec = SequenceSpec(
            request_id=self.turn.engine_id,
            ids=self.prompt.ids[restored:],
            sampling=self.prompt.sampling,
            restored=restored,
            draft_first=self.draft_first,
            history=self.prompt.ids[:restored],
            hold_after_first=hold_after_first,
            snapshot_at=self._cuts(restored),
            write_back=self.turn.prompt is not None,
        )
        self.turn.submit(spec)

    def _cuts(self, restored: int) -> tuple[int, ...]:
        """Where to keep the state. Whoever planned that counted on the hit: where it could not be had, its own
        boundary is kept anew, or the next prompt would find nothing there."""
        cuts = set(self.prompt.snapshot_at)
        if self.prompt.hit is not None and self.prompt.store:
            cuts.add(self.prompt.hit.tokens)
        return tuple(sorted(cut for cut in cuts if cut > restored))

    def close(self) -> None:
        """Nobody waits for events any more. Memory follows when the engine is done with it."""
        self.turn.close()
        self.holding.drop()


class PromptRunner:
    """Runs prompts; owns what outlives them: publishes in flight and quarantined landings."""

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        cache: PromptCache | None,
        make_span: MakeSpan,
        metrics: WorkerMetrics,
        spawn: Spawn,
        *,
        admission_wait_ms: int,
        publish_inflight_max: int,
        snapshot_dtype: SnapshotDtype = "fp32",
        drafter: str = "",
    ) -> None:
        self.engine, self.memory, self.metrics = engine, memory, metrics
        self.drafter = drafter  # whose rows the blocks hold beside the target's; empty: nobody's
        self.block_tokens = engine.settings.block_tokens
        self.form = SnapshotForm(engine.state, engine.pools.layout, snapshot_dtype)
        self.num_background = 0  # publishes and quarantines
        self.wakeups = Wakeups()
        self._cache, self._make_span, self.spawn = cache, make_span, spawn
        self._admission_wait_s = admission_wait_ms / 1000
        self._publish_inflight_max = publish_inflight_max
        self._publishing = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._num_ids = 0

    @asynccontextmanager
    async def run(
        self, prompt: Prompt, *, tokens: int, hold_after_first: bool, remaining_s: float | None
    ) -> AsyncIterator[PromptRun]:
        """Rows for `tokens` and a slot, the hit restored into them, the rest submitted; all given back at the end.

        Raises: Overloaded when no memory came in time, InvalidRequest and others of `Engine.submit`.
        """
        wait_s = self._admission_wait_s if remaining_s is None else min(self._admission_wait_s, remaining_s)
        deadline_s = asyncio.get_running_loop().time() + wait_s
        holding, restored = await self._restore(prompt, tokens, deadline_s)
        run = PromptRun(self, prompt, holding, restored)
        try:
            run.submit(hold_after_first=hold_after_first)
            yield run
        finally:
            run.close()

    def turn(
        self,
        request_id: str,
        holding: Holding,
        prompt: TurnPrompt | None,
        drawn: Sequence[int] = (),
        *,
        tenant: str = "",
    ) -> Turn:
        """A sequence to be submitted on `holding`; with `prompt` the turn is written back. `drawn`: ids of the turn
        that were drawn elsewhere."""
        return Turn(self, request_id, holding, prompt, drawn, tenant)

    def store(self, run: PromptRun) -> None:
        """Offer the prompt's new blocks and snapshots to the cache, beside the request. Call once it is computed."""
        prompt, first = run.prompt, run.restored.cached_tokens // self.block_tokens
        full = len(prompt.ids) // self.block_tokens
        taken = run.turn.take_snapshots()
        if prompt.store:
            new = first < full or bool(taken)
            offer = Bundle(
                hit=prompt.hit,
                root=prompt.root,
                hashes=prompt.hashes,
                first=first,
                end=full,
                publish=new,
                drafted_from=-(-self.draft_first(run.holding) // self.block_tokens),
            )
            self.spawn(self._background(self._offer(offer, run.turn.sums, taken, run.holding.share())))
        else:
            self._drop(taken)

    def draft_first(self, holding: Holding) -> int:
        """The first token from which on the drafter's rows of a computed prompt are there; 0 without a drafter."""
        return self.engine.draft_first(holding.reservation) or 0

    def write_back(self, turn: Turn) -> asyncio.Task[None]:
        """Offer what a turn adds to its prompt, once the engine has ended it, beside everything else."""
        turn.holding.share()
        return self.spawn(self._background(self._write_back(turn)))

    def quarantine(self, holding: Holding, ended: Awaitable[object], then: Callable[[], None] | None = None) -> None:
        """Keep `holding` from everybody until `ended`: a read of ours may still write into it."""
        self.metrics.quarantined_bytes.inc(holding.nbytes)
        self.spawn(self._background(self._await_end(holding.share(), ended, then)))

    async def checked(self, extents: Sequence[Extent]) -> list[common_pb2.Span]:
        """Spans with checksums, made off the event loop."""

        def work() -> list[common_pb2.Span]:
            return [self._make_span(*extent) for extent in extents]

        return await asyncio.get_running_loop().run_in_executor(self._hasher, work)

    def discard(self, event: EngineEvent) -> None:
        """An event that came after its request had gone: only a snapshot has to be given back."""
        if isinstance(event, SnapshotTaken):
            self.memory.own_snapshot(event.slot)
            self.memory.drop_snapshot(event.slot)

    def engine_id(self, request_id: str) -> str:
        """A retried request may come while its first try is still leaving the engine."""
        self._num_ids += 1
        return f"{request_id}/{self._num_ids}"

    def close(self) -> None:
        self._hasher.shutdown(wait=True)

    async def _restore(self, prompt: Prompt, tokens: int, deadline_s: float) -> tuple[Holding, Restored]:
        """Memory for the prompt with what is kept here or in the cache of it, whichever is deeper; other memory where
        a failed fetch may still land."""
        hit_blocks = 0 if prompt.hit is None else prompt.hit.tokens // self.block_tokens
        want = Want(
            tokens=tokens,
            write_back=prompt.turn is not None,
            hashes=prompt.hashes[: (len(prompt.ids) - 1) // self.block_tokens],
            blocks_min=max(1, hit_blocks),
            snapshots=len(prompt.snapshot_at),
        )
        holding = await self.memory.reserve(want, deadline_s)
        if holding.found is not None:
            return holding, await self._take(holding, holding.found)
        if prompt.hit is None:
            return holding, Restored()
        if self._cache is None:
            return holding, Restored(usage=common_pb2.CacheUsage(miss_reason=common_pb2.MISS_REASON_TIER_ERROR))
        landing, restored = self._cache.landing(), None
        rows, state = holding.target_rows(0, hit_blocks), self.form.extent(holding.reservation.slot)
        drafts = holding.draft_rows(0, hit_blocks) if self.drafter else ()
        try:
            with self.metrics.fetch_seconds.time():
                restored = await self._cache.restore(
                    prompt.hit, prompt.root, prompt.hashes, rows, state, landing, drafter=self.drafter, drafts=drafts
                )
        finally:
            pending = landing.pending
            if pending:
                self.quarantine(holding, landing.ended())
            if pending or restored is None:
                holding.drop()
        self.metrics.drafting.rows_refused(restored.draft_refused)
        if pending or not restored.usage.cached_tokens:
            return await self._fall_back(None if pending else holding, want, restored.usage, deadline_s)
        if not self.form.exact:
            await self._beside(holding, lambda: self.form.decode(holding.reservation.slot))
        sums = () if drafts else restored.xxh3  # the cache's are of the target's rows alone
        return holding, Restored(usage=restored.usage, xxh3=sums, draft_first=restored.draft_first)

    async def _fall_back(
        self, holding: Holding | None, want: Want, failed: common_pb2.CacheUsage, deadline_s: float
    ) -> tuple[Holding, Restored]:
        """A hit that could not be fetched: what is kept here, however shallow, or else nothing, and why."""
        if holding is not None and not self.memory.bundles.depth(want.hashes):
            return holding, Restored(usage=failed)
        if holding is not None:
            holding.drop()  # a shared beginning cannot be put into a reservation that has its own
        holding = await self.memory.reserve(replace(want, blocks_min=1), deadline_s)
        if holding.found is None:
            return holding, Restored(usage=failed)
        taken = await self._take(holding, holding.found)
        taken.usage.miss_reason = failed.miss_reason
        return holding, taken

    async def _take(self, holding: Holding, found: Found) -> Restored:
        """A bundle kept here: its rows are shared as they are, its snapshot is copied to the sequence's own slot."""
        source = found.slot
        assert source is not None
        await self._beside(
            holding,
            lambda: self.form.restore(source, holding.reservation.slot),
            then=lambda: self.memory.untake(holding),
        )
        tokens = len(found.blocks) * self.block_tokens
        usage = common_pb2.CacheUsage(cached_tokens=tokens, cached_device=tokens)
        return Restored(usage=usage, xxh3=found.xxh3, draft_first=found.drafted_from * self.block_tokens)

    async def _beside(
        self, holding: Holding, work: Callable[[], None], then: Callable[[], None] = lambda: None
    ) -> None:
        """Work on the holding's slot, in a thread where it takes long; `then` follows in any case. The memory is
        dropped for a caller that is cancelled, but given back only when the thread has let go of it."""
        if self.memory.slot_bytes <= INLINE_BYTES:
            work()
        else:
            done = asyncio.get_running_loop().run_in_executor(None, work)
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                self.quarantine(holding, done, then)
                holding.drop()
                raise
        then()

    async def _write_back(self, turn: Turn) -> None:
        try:
            await turn.ended()
            bundle = turn.bundle(self.block_tokens)
            if bundle is not None:
                taken = turn.take_snapshots(bundle.end * self.block_tokens)
                await self._offer(bundle, turn.sums, taken, turn.holding.share())
        finally:
            turn.end()
            turn.holding.drop()

    async def _offer(self, bundle: Bundle, sums: BlockSums, taken: Sequence[SnapshotTaken], holding: Holding) -> None:
        """Keep it here; publish it, unless enough publishes run already; then give snapshots and memory back."""
        try:
            depths = [(s.tokens // self.block_tokens, s.slot) for s in taken]
            if not self.form.exact:
                for _, slot in depths:
                    await asyncio.get_running_loop().run_in_executor(self._hasher, self.form.encode, slot)
            known = [sums.known(index) for index in range(bundle.end)]
            kept = bundle.hashes[: bundle.end]
            self.memory.keep(holding, bundle.root, kept, known, depths, bundle.drafted_from)
            if self._cache is None or not bundle.publish:
                return
            if self._publishing >= self._publish_inflight_max:
                self.metrics.publish_skipped.labels("busy").inc()
                return
            self._publishing += 1
            try:
                await self._publish(self._cache, bundle, sums, depths)
            finally:
                self._publishing -= 1
        finally:
            self._drop(taken)
            holding.drop()

    async def _publish(
        self, cache: PromptCache, bundle: Bundle, sums: BlockSums, snapshots: Sequence[tuple[int, int]]
    ) -> None:
        blocks, drafts = await sums.parts(bundle.first, bundle.end, bundle.drafted_from)
        for index, span in blocks if not self.memory.draft_bytes else ():  # else the sums are of a part of the block
            self.memory.bundles.learn(bundle.hashes[index], span.xxh3)
        states = [(depth, await self.checked(self.form.parts(slot))) for depth, slot in snapshots]
        await cache.store(bundle.hit, bundle.root, bundle.hashes, blocks, states, drafter=self.drafter, drafts=drafts)

    def _drop(self, taken: Sequence[SnapshotTaken]) -> None:
        for snapshot in taken:
            self.memory.drop_snapshot(snapshot.slot)

    async def _await_end(self, holding: Holding, ended: Awaitable[object], then: Callable[[], None] | None) -> None:
        await ended
        self.metrics.quarantined_bytes.dec(holding.nbytes)
        holding.drop()
        if then is not None:
            then()

    async def _background(self, work: Coroutine[Any, Any, None]) -> None:
        self.num_background += 1
        try:
            await work
        finally:
            self.num_background -= 1


def miss_reason(prompt_tokens: int, block_tokens: int, usage: common_pb2.CacheUsage) -> common_pb2.MissReason:
    """Why the shallowest lost token was lost. The router, which did the lookup, may know better than COLD."""
    if usage.miss_reason != common_pb2.MISS_REASON_UNSPECIFIED:
        return usage.miss_reason
    if usage.cached_tokens == (prompt_tokens - 1) // block_tokens * block_tokens:
        return common_pb2.MISS_REASON_REMAINDER
    if usage.matchable_tokens > usage.cached_tokens:
        return common_pb2.MISS_REASON_NO_SNAPSHOT
    return common_pb2.MISS_REASON_COLD
