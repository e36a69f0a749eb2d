"""One handoff from opened to manifest: what became final is hashed off the event loop and given to its follower."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from engine.worker.layers import layer_extents
from engine.worker.prompt import PromptRun, PromptRunner
from model.progress import LayerProgress
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from prefill.parts import Announcer, HandoffShape


class Handoff:
    """Made when a prompt's memory is settled. On the event loop's thread only."""

    def __init__(self, handoff_id: str, fence: int, prompts: PromptRunner, run: PromptRun, part_bytes: int) -> None:
        self.id, self.fence = handoff_id, fence
        self.holding = run.holding.share()
        self._prompts, self._run = prompts, run
        self._announcer = Announcer(shape=_shape(prompts, run), part_bytes=part_bytes)
        self._tokens = run.restored.cached_tokens
        self._layers = 0
        self._state: list[worker_pb2.StatePart] = []
        self._log: list[worker_pb2.HandoffPart] = []
        self._over = False  # the log is complete
        self._more = asyncio.Event()  # replaced at each addition
        self._pump: asyncio.Task[None] | None = None
        self._held: worker_pb2.HeldPrefix | None = None
        self._wake()

    @property
    def wants_layers(self) -> bool:
        """Whether the state is large enough to be worth lending before its last pass has ended."""
        shape = self._announcer.shape
        return (shape.num_layers - 1) * shape.layer_bytes >= self._announcer.part_bytes

    def tokens_done(self, tokens: int) -> None:
        """The prompt's first `tokens` tokens are in the rows."""
        self._tokens = tokens
        self._wake()

    def layers_done(self, layers: int | None) -> None:
        """The last pass has left that many KDA layers; None: all."""
        self._layers = self._announcer.shape.num_layers if layers is None else layers
        self._wake()

    def agree(self, held: worker_pb2.HeldPrefix) -> bool:
        """Whether the follower's blocks are this prompt's: same root, same chained hash at that depth."""
        hashes, count = self._run.prompt.hashes, held.num_blocks
        if not 0 < count <= len(hashes) or held.root != self._run.prompt.root:
            return False
        if held.prefix_hash != hashes[count - 1]:
            return False
        self._held = held
        self._announcer.hold(count)
        return True

    async def parts(self) -> AsyncIterator[worker_pb2.HandoffPart]:
        """For the one follower: everything announced so far, then what comes, to the manifest or the withdrawal."""
        sent = 0
        while True:
            while sent < len(self._log):
                part = self._without_held(self._log[sent])
                sent += 1
                if part is not None:
                    yield part
            if self._over:
                return
            await self._more.wait()

    async def regions(self) -> tuple[int, list[common_pb2.Span], list[worker_pb2.StatePart]]:
        """Every region with its checksum: rows from the returned block on, state. Nothing may change any more."""
        self._announcer.next_block = self._announcer.shape.num_blocks  # the manifest names the rest
        if self._pump is not None:
            await self._pump
        first = self._held.num_blocks if self._held is not None else 0
        rows = await self._run.spans(first, self._announcer.shape.num_blocks)
        if self._announcer.next_layer < self._announcer.shape.num_layers:
            rest = range(self._announcer.next_layer, self._announcer.shape.num_layers)
            self._announcer.next_layer = rest.stop
            self._state.append(await self._state_part(rest))
        return first, rows, self._state

    def publish(self, manifest: worker_pb2.Manifest, held_blocks: int) -> None:
        """The last part. `held_blocks` were left out of its rows."""
        if held_blocks and self._held is not None:
            manifest.held.CopyFrom(self._held)
        self._end(worker_pb2.HandoffPart(manifest=manifest))

    def withdraw(self, reason: str) -> None:
        """There will be no manifest. Moot after one."""
        if not self._over:
            self._end(worker_pb2.HandoffPart(withdrawn=worker_pb2.HandoffWithdrawn(reason=reason)))

    def _wake(self) -> None:
        if self._over or (self._pump is not None and not self._pump.done()):
            return
        if work := self._due():
            self._pump = self._prompts.spawn(self._announce(work))

    def _due(self) -> tuple[range, range] | None:
        rows = self._announcer.rows(self._tokens)
        layers = self._announcer.layers(self._layers)
        return (rows, layers) if rows or layers else None

    async def _announce(self, work: tuple[range, range] | None) -> None:
        """Hash and log what is due, until nothing is."""
        while work is not None and not self._over:
            rows, layers = work
            if rows:
                spans = await self._run.spans(rows.start, rows.stop)
                self._add(worker_pb2.HandoffPart(rows=worker_pb2.RowsPart(first_block=rows.start, blocks=spans)))
            if layers:
                part = await self._state_part(layers)
                self._state.append(part)
                self._add(worker_pb2.HandoffPart(state=part))
            work = self._due()

    async def _state_part(self, layers: range) -> worker_pb2.StatePart:
        num_layers = self._announcer.shape.num_layers
        extents = layer_extents(self.holding.state_parts(), num_layers, layers.start, layers.stop)
        recurrent, conv = await self._prompts.checked(extents)
        return worker_pb2.StatePart(
            first_layer=layers.start, end_layer=layers.stop, recurrent=recurrent, conv=conv
        )  # fmt: skip

    def _without_held(self, part: worker_pb2.HandoffPart) -> worker_pb2.HandoffPart | None:
        """What was logged before the follower came and said what it holds."""
        if self._held is None or part.HasField("state") or part.HasField("withdrawn"):
            return part
        held = self._held.num_blocks
        if part.HasField("rows"):
            first, blocks = part.rows.first_block, part.rows.blocks
            if first >= held:
                return part
            kept = blocks[held - first :]
            rows = worker_pb2.RowsPart(first_block=held, blocks=kept)
            return worker_pb2.HandoffPart(rows=rows) if kept else None
        if part.manifest.HasField("held"):
            return part
        trimmed = worker_pb2.HandoffPart()
        trimmed.CopyFrom(part)
        del trimmed.manifest.rows[:held]
        trimmed.manifest.held.CopyFrom(self._held)
        return trimmed

    def _end(self, part: worker_pb2.HandoffPart) -> None:
        if not self._over:
            self._over = True
            self._add(part)

    def _add(self, part: worker_pb2.HandoffPart) -> None:
        self._log.append(part)
        more, self._more = self._more, asyncio.Event()
        more.set()


class LayerWatch:
    """Wakes handoffs whose prompt is in its last pass, as the pass leaves its layers."""

    def __init__(self, progress: LayerProgress) -> None:
        self._progress = progress
        self._watching: dict[str, tuple[Handoff, int]] = {}

    def add(self, handoff: Handoff, number: int) -> None:
        """Pass `number` ends the handoff's prompt."""
        if not self._watching:
            asyncio.get_running_loop().add_reader(self._progress.fd, self._signalled)
        self._watching[handoff.id] = (handoff, number)
        self._progress.watch(1)
        self._signalled()  # the pass may have begun long ago

    def remove(self, handoff: Handoff) -> None:
        """Idempotent."""
        if self._watching.pop(handoff.id, None) is None:
            return
        self._progress.watch(-1)
        if not self._watching:
            asyncio.get_running_loop().remove_reader(self._progress.fd)

    def _signalled(self) -> None:
        self._progress.clear()
        for handoff, number in list(self._watching.values()):
            handoff.layers_done(self._progress.layers(number))


def nbytes(part: worker_pb2.HandoffPart) -> int:
    """What a part lends."""
    spans: Iterable[Any] = ()
    match part.WhichOneof("part"):
        case "rows":
            spans = part.rows.blocks
        case "state":
            spans = (part.state.recurrent, part.state.conv)
    return sum(span.length for span in spans)


def _shape(prompts: PromptRunner, run: PromptRun) -> HandoffShape:
    memory, layout = prompts.memory, prompts.engine.pools.layout
    return HandoffShape(
        block_tokens=prompts.block_tokens,
        prompt_tokens=len(run.prompt.ids),
        block_bytes=memory.block_bytes,
        num_layers=layout.num_kda_layers,
        layer_bytes=memory.slot_bytes // max(1, layout.num_kda_layers),
    )
