"""One sequence as its request hears it, and what it leaves behind when the turn is written back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.api import EngineEvent, Failed, Finished, SequenceSpec, SnapshotTaken, TokenSampled
from engine.worker.memory import Holding
from engine.worker.stream import EventStream
from engine.worker.sums import BlockSums
from moonrelay.errors import InvalidRequest
from moonrelay.ids import PrefixHash
from moonrelay.prefix import HASH_BYTES, prefix_hashes
from moonrelay.stubs.v1 import worker_pb2

if TYPE_CHECKING:
    from engine.worker.prompt import PromptRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPrompt:
    """The prompt that a turn goes on from, as far as naming the turn's blocks needs it.

    `tail` are its ids after the last full block; `hit` is what prefill was given, in its wire form.
    """

    root: bytes
    hashes: tuple[PrefixHash, ...]
    tail: tuple[int, ...]
    hit: worker_pb2.CacheHit | None = None

    def num_tokens(self, block_tokens: int) -> int:
        return len(self.hashes) * block_tokens + len(self.tail)

    def continued(self, ids: Sequence[int], block_tokens: int) -> list[PrefixHash]:
        """The hashes of every full block of the prompt and the `ids` after it."""
        parent = self.hashes[-1] if self.hashes else self.root
        return [*self.hashes, *prefix_hashes(parent, [*self.tail, *ids], block_tokens)]


def turn_prompt(request: worker_pb2.AdoptRequest, *, prompt_tokens: int, block_tokens: int) -> TurnPrompt | None:
    """What to write back to, or None where the router does not want it.

    Raises: InvalidRequest where it does not describe a prompt of `prompt_tokens`.
    """
    if not request.HasField("writeback"):
        return None
    wire = request.writeback
    prompt = TurnPrompt(
        root=wire.root,
        hashes=tuple(PrefixHash(h) for h in wire.prefix_hashes),
        tail=tuple(wire.tail_ids),
        hit=wire.hit if wire.HasField("hit") else None,
    )
    whole = prompt.num_tokens(block_tokens) == prompt_tokens and len(prompt.tail) < block_tokens
    if not whole or any(len(h) != HASH_BYTES for h in (prompt.root, *prompt.hashes)):
        raise InvalidRequest(f"write-back to another prompt than that of {prompt_tokens} tokens", param="writeback")
    return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What is kept of a chain, blocks [0, end) and snapshots in it; blocks [first, end) and the snapshots are new to
    the cache nodes, and with `publish` offered to them. Blocks from `drafted_from` on hold the drafter's rows."""

    root: bytes
    hashes: Sequence[PrefixHash]
    first: int
    end: int
    publish: bool
    drafted_from: int = 0
    hit: worker_pb2.CacheHit | None = None


class Turn:
    """Made by `PromptRunner.turn`. `events` is awaited by one task at a time; `close` is called once.

    What is kept are the tokens that were heard through `events`, which is what the caller was sent: of a turn that
    its caller ended (a stop string, a client that left) the engine may have drawn more, and those are forgotten.
    """

    def __init__(
        self,
        runner: PromptRunner,
        request_id: str,
        holding: Holding,
        prompt: TurnPrompt | None,
        drawn: Sequence[int],
        tenant: str,
    ) -> None:
        self.engine_id = runner.engine_id(request_id)
        self._request_id, self._tenant = request_id, tenant
        self.holding, self.prompt = holding, prompt
        self.snapshots: list[SnapshotTaken] = []
        self.ids = list(drawn)  # of the turn, those drawn elsewhere first
        self.sums = BlockSums(holding, runner.checked)
        self.submitted = self._failed = False
        self.finished: Finished | None = None
        self._writing: asyncio.Task[None] | None = None
        self._runner = runner
        self._stream = EventStream(runner.wakeups, self._late)

    def submit(self, spec: SequenceSpec) -> None:
        """Raises: whatever `Engine.submit` does."""
        self._runner.engine.submit(spec, self.holding.reservation, self._stream.emit)
        self.submitted = True

    async def events(self, not_before_s: float = 0.0) -> list[EngineEvent]:
        """The next events, at least one step's; snapshots are kept aside. See `EventStream.batch`.

        Raises: what failed the sequence.
        """
        return self._hear(await self._stream.batch(not_before_s), heard=True)

    async def landed(self, patience_s: float) -> None:
        """Write the finished turn back now, and wait for the cache to have it, but not longer than `patience_s`: a
        client whose next turn comes at once then finds it."""
        self._write_back()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=patience_s)

    def close(self) -> None:
        """Nobody waits for events any more: write back what is worth it, beside everything; give up the rest."""
        self._write_back()
        if self._writing is None:
            self.end()

    async def ended(self) -> None:
        """Until the engine has said its last of a sequence whose caller is gone."""
        while self.finished is None and not self._failed:
            self._hear(await self._stream.batch(), heard=False)

    def end(self) -> None:
        """Give back what is still kept aside; what comes later gives itself back."""
        self._stream.close()
        for snapshot in self.snapshots:
            self._runner.memory.drop_snapshot(snapshot.slot)
        self.snapshots = []

    def bundle(self, block_tokens: int) -> Bundle | None:
        """What the turn adds to its prompt: blocks that hold only tokens it keeps, and hold them already.

        Without a snapshot nobody could go on from them: they are kept here, where they save a transfer, but not
        published. None where the turn failed.
        """
        if self.prompt is None or self.finished is None:
            return None
        first, kept = len(self.prompt.hashes), self.prompt.num_tokens(block_tokens) + len(self.ids)
        end = min(kept, self.finished.tokens_in_state) // block_tokens
        publish = any(snapshot.tokens <= end * block_tokens for snapshot in self.snapshots)
        return Bundle(
            root=self.prompt.root,
            hashes=self.prompt.continued(self.ids, block_tokens)[:end],
            first=min(first, end),
            end=end,
            publish=publish,
            drafted_from=-(-(self.finished.draft_first or 0) // block_tokens),
            hit=self.prompt.hit,
        )

    def take_snapshots(self, tokens_max: int | None = None) -> list[SnapshotTaken]:
        """Those kept aside, at most `tokens_max` deep; from now on the caller's to give back."""
        taken = [s for s in self.snapshots if tokens_max is None or s.tokens <= tokens_max]
        self.snapshots = [s for s in self.snapshots if s not in taken]
        return taken

    def _write_back(self) -> None:
        if self._writing is None and self.prompt is not None and self.submitted and self.ids and not self._failed:
            if self.finished is None:
                self._runner.engine.cancel(self.engine_id)
            self._writing = self._runner.write_back(self)

    def _hear(self, arrived: list[EngineEvent], *, heard: bool) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for event in arrived:
            match event:
                case SnapshotTaken(slot=slot):
                    self._runner.memory.own_snapshot(slot)
                    self.snapshots.append(event)
                    continue
                case TokenSampled(token=token) if heard:
                    self.ids.append(token.id)
                case Finished():
                    self.finished = event
                    self._count(event)
                case Failed(error=error):
                    self._failed = True
                    if heard:
                        raise error
            events.append(event)
        return events

    def _late(self, event: EngineEvent) -> None:
        """It came after its request had gone."""
        if isinstance(event, Finished):
            self._count(event)
        self._runner.discard(event)

    def _count(self, finished: Finished) -> None:
        self._runner.metrics.drafting.request_done(self._request_id, self._tenant, finished, len(self.ids))
