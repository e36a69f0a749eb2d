"""The drafter's rows of what sequences keep: taps wait until rows are made of many tokens at once."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.pools import Pools, mapped_floats
from engine.sequence import LiveSequence
from engine.settings import EngineSettings
from engine.step import Step
from model.batch import Segment, Verifier
from model.drafting import DraftModel

BACKLOG_TOKENS_MAX = 128  # whose rows are not written yet: one product for many is several times cheaper than for one
TAPS_SPARE = 4 * BACKLOG_TOKENS_MAX  # taps of refused tokens lie between those that are waited with
KEEPS_ALL: Mapping[int, int] = {}


class Attempt(Protocol):
    """Runs what may raise anything. The edge to it is the engine's."""

    def __call__(self, work: Callable[[], Any], /) -> Any: ...


@dataclass(slots=True)
class _Consumed:
    """Tokens of one sequence whose drafter rows are to be written: ids from `start` on and where their taps lie."""

    start: int
    ids: list[int] = field(default_factory=list)
    taps: list[tuple[int, int]] = field(default_factory=list)


# Whose taps begin at which row, and how many tokens of its verified segments count.
_Pass = tuple[int, Sequence[LiveSequence], Sequence[Segment], Mapping[int, int]]


class DraftRows:
    """Owns the taps, [room, num_taps, hidden], which passes fill from row `used` on; None where nobody reads them.
    `cold` is told from where on a sequence's rows are valid, when some were not written."""

    def __init__(
        self,
        drafter: DraftModel,
        backend: Verifier,
        settings: EngineSettings,
        pools: Pools,
        *,
        attempt: Attempt,
        cold: Callable[[LiveSequence, int], None],
    ) -> None:
        self._drafter, self._pools, self._attempt, self._cold = drafter, pools, attempt, cold
        self.taps: torch.Tensor | None = None
        self.room = 0  # tokens
        if drafter.target_layers:
            backend.tap(drafter.target_layers)
            self.room = settings.max_batch_tokens + TAPS_SPARE
            floats = len(drafter.target_layers) * backend.config.hidden_size
            self.taps = mapped_floats(self.room, floats).view(self.room, len(drafter.target_layers), -1)
        self.used = 0  # by passes whose rows are not written yet
        self._passes: list[_Pass] = []
        self._failed: set[LiveSequence] = set()
        self.on = True
        self.seconds = 0.0  # spent; whoever reports it sets it back

    @property
    def behind(self) -> bool:
        """Whether rows are still to be written."""
        return bool(self._passes)

    def consumed(self, step: Step) -> None:
        """The pass ran and is settled: what its sequences keep will need rows."""
        kept = step.verification.kept if step.verification is not None else KEEPS_ALL
        if self.taps is not None:
            self._passes.append((self.used, step.sequences, step.segments, kept))
            self.used += step.num_prompt_tokens + step.num_decode_tokens
        elif self._drafter.draft_width:
            for index, (sequence, segment) in enumerate(zip(step.sequences, step.segments, strict=True)):
                self._cold(sequence, segment.start + kept.get(index, len(segment.ids)))

    def forget(self, sequences: Sequence[LiveSequence]) -> None:
        """They have failed: nobody reads their rows, and their blocks are not ours to write to any more."""
        self._failed.update(sequences)

    def write(self) -> Exception | None:
        """Of all that was consumed. Before anybody else may own the blocks, or look into them. What failed, if it
        did: then what waited is cold."""
        waiting = self._waiting()
        if not waiting:
            return None
        assert self.taps is not None
        segments = [
            Segment(ids=entry.ids, start=entry.start, slot=sequence.reservation.slot, blocks=sequence.blocks)
            for sequence, entry in waiting.items()
        ]
        pieces = [piece for entry in waiting.values() for piece in entry.taps]
        started = time.perf_counter()
        failed = self._attempt(lambda: self._drafter.write_rows(segments, self._joined(pieces), self._pools.rows))
        self.seconds += time.perf_counter() - started
        if failed is None:
            return None
        assert isinstance(failed, Exception)
        for sequence, entry in waiting.items():
            self._cold(sequence, entry.start + len(entry.ids))
        return failed

    def _joined(self, pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The taps of all pieces, in order: one look-up, since a view of each would cost more than its rows."""
        assert self.taps is not None
        first, end = pieces[0]
        if len(pieces) == 1:
            return self.taps[first:end]
        places = array("q")
        for first, end in pieces:
            places.extend(range(first, end))
        return self.taps.index_select(0, torch.frombuffer(places, dtype=torch.int64))

    def give_up(self) -> None:
        """From now on nothing is written; what waits is cold."""
        self.on, self.taps = False, None
        for sequence, entry in self._waiting().items():
            self._cold(sequence, entry.start + len(entry.ids))

    def _waiting(self) -> dict[LiveSequence, _Consumed]:
        """What is to be written, in order; none waits afterwards. Passes of a sequence follow one another, and so do
        their taps where nothing lies between."""
        waiting: dict[LiveSequence, _Consumed] = {}
        for at, sequences, segments, kept in self._passes:
            for index, (sequence, segment) in enumerate(zip(sequences, segments, strict=True)):
                tokens = kept.get(index, len(segment.ids))
                if sequence not in self._failed:
                    entry = waiting.get(sequence)
                    if entry is None:
                        entry = waiting[sequence] = _Consumed(segment.start)
                    entry.ids += segment.ids[:tokens]
                    if entry.taps and entry.taps[-1][1] == at:
                        entry.taps[-1] = entry.taps[-1][0], at + tokens
                    else:
                        entry.taps.append((at, at + tokens))
                at += len(segment.ids)
        self._passes.clear()
        self._failed.clear()
        self.used = 0
        return waiting
