"""A turn on a decode worker: heard event by event, and written back when it ends, like `engine/worker/turn.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.api import Failed, Finished, SnapshotTaken, TokenSampled
from moonrelay.errors import ServeError
from moonrelay.prefix import prefix_hashes
from sim.cached_worker import Bundle
from sim.prompt import STALL_MS
from sim.toy import BLOCK_TOKENS
from sim.worker import Mailbox
from sim.worker_memory import Holding
from sim.world import Steps

if TYPE_CHECKING:
    from sim.decode import Adopt, Decode


class Turn:
    """What is written back are the tokens that were heard, which is what the router was sent."""

    def __init__(self, worker: Decode, request: Adopt, holding: Holding, first: int) -> None:
        self.worker, self.request, self.holding = worker, request, holding
        self.box = Mailbox(worker.discard)
        self.ids = [first]
        self.submitted = self._failed = False
        self._finished: Finished | None = None
        self._taken: list[tuple[int, int]] = []

    def hear(self, *, counted: bool = True) -> Steps:
        """The next tokens, and why it ended if it has. Raises: what failed the sequence."""
        ids, ended = [], None
        for event in (yield from self.box.batch(STALL_MS)):
            match event:
                case SnapshotTaken(tokens=tokens, slot=slot):
                    self.worker.own_snapshot(slot)
                    self._taken.append((tokens, slot))
                case TokenSampled(token=token) if counted:
                    ids.append(token.id)
                case Finished(reason=reason):
                    self._finished, ended = event, reason
                case Failed(error=error):
                    self._failed = True
                    raise error
        self.ids += ids
        return ids, ended

    def close(self) -> None:
        """Nobody waits any more: write back what is worth it, beside everything; give up the rest."""
        worker = self.worker
        if self.request.writeback is None or not self.submitted or self._failed or not worker.alive:
            self._end()
            return
        if self._finished is None:
            worker.cancel(self.box)
        worker.background += 1
        self.holding.share()
        worker.spawn(self._write_back(), "write_back")

    def _write_back(self) -> Steps:
        worker, request = self.worker, self.request
        try:
            while self._finished is None and not self._failed:
                yield from self.hear(counted=False)
        except ServeError:
            self._failed = True
        finally:
            worker.background -= 1
        if self._finished is not None and request.writeback is not None:
            self._offer()
        self._end()
        self.holding.drop()

    def _offer(self) -> None:
        worker, back = self.worker, self.request.writeback
        assert back is not None and self._finished is not None
        kept = len(back.hashes) * BLOCK_TOKENS + len(back.tail) + len(self.ids)
        end = min(kept, self._finished.tokens_in_state) // BLOCK_TOKENS
        parent = back.hashes[-1] if back.hashes else back.root
        hashes = [*back.hashes, *prefix_hashes(parent, [*back.tail, *self.ids], BLOCK_TOKENS)][:end]
        worker.world.checkers.hashed(back.tenant, back.root, hashes, [*self.request.prompt, *self.ids])
        worker.world.phase("writing_back", worker)
        fitting = [(tokens, slot) for tokens, slot in self._taken if tokens <= end * BLOCK_TOKENS]
        self._taken = [taken for taken in self._taken if taken not in fitting]
        bundle = Bundle(
            root=back.root,
            hashes=hashes,
            first=min(len(back.hashes), end),
            end=end,
            publish=bool(fitting),
            hits=back.hits,
            tenant=back.tenant,
        )
        worker.offer(bundle, self.holding, fitting)

    def _end(self) -> None:
        self.box.close()
        for _, slot in self._taken:
            self.worker.memory.drop_snapshot(slot)
        self._taken = []
