"""What every transport promises: the receiver pulls, and knows when its own pull can no longer touch memory.

Nobody ever writes into foreign memory. A read names spans of a peer's registered pools and slices of our own; it
succeeds only when every byte has landed and every checksum agrees. `deadline_s` is absolute on `time.monotonic()`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate, groupby
from operator import sub
from typing import Any, Literal, NamedTuple, Protocol

from moonrelay.errors import DeadlineExceeded, InvariantError, ServeError, TransferError
from moonrelay.stubs.v1.common_pb2 import Peer, Span

TransportName = Literal["nixl", "tcp", "memory"]


class ChecksumMismatch(TransferError):
    """The bytes that landed are not the bytes that were promised."""


class ReadTimeout(DeadlineExceeded):
    """The deadline passed first. Bytes may still land until `ended` is done."""

    def __init__(self, message: str, ended: asyncio.Future[None]) -> None:
        super().__init__(message)
        self.ended = ended


class Slice(NamedTuple):
    """A range of one of our own registered pools. Units: bytes."""

    pool: int
    offset: int
    length: int


class Source(NamedTuple):
    """A range of a peer's pool, and the checksum that it is to have: what `Span` says on the wire."""

    pool: int
    offset: int
    length: int
    xxh3: int


class Read(NamedTuple):
    """Bring `span` of the peer into `into`, whose lengths sum to the span's."""

    span: Span | Source
    into: tuple[Slice, ...]


class Segment(NamedTuple):
    """A range that is contiguous on both sides, of one span or of several that follow each other."""

    remote_pool: int
    remote_offset: int
    pool: int
    offset: int
    length: int


Ints = Sequence[int]


def columns(pieces: Sequence[tuple[int, int, int, int, int]]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Rows of five numbers as five columns."""
    remote_pools, theirs, pools, ours, lengths = zip(*pieces, strict=True) if pieces else ((),) * 5
    return remote_pools, theirs, pools, ours, lengths


class Batch:
    """Many reads as the transports take them: no object for each span.

    `runs`: what moves, in the spans' order; what goes on without a gap on both sides is one, since each costs a
    descriptor and a walk over it in the system call. `lengths`, `sums`: of each span, whose bytes end anywhere in
    a run.
    """

    __slots__ = ("lengths", "runs", "sums")

    def __init__(self) -> None:
        self.runs: list[Segment] = []
        self.lengths: list[int] = []
        self.sums: list[int] = []

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Batch:
        """Raises: InvariantError where a span's landing slices are not as long as it is."""
        made, pieces = cls(), []
        for span, into in reads:
            at = span.offset
            for pool, offset, length in into:
                pieces.append((span.pool, at, pool, offset, length))
                at += length
            if at != span.offset + span.length:
                raise InvariantError(f"a span of {span.length} bytes does not fit its landing slices")
        made.add(columns(pieces), [read.span.length for read in reads], [read.span.xxh3 for read in reads])
        return made

    def add(self, pieces: tuple[Ints, Ints, Ints, Ints, Ints], lengths: Iterable[int], sums: Iterable[int]) -> None:
        """Further spans: their pieces in order, as columns of a `Segment`'s numbers; each span's length and xxh3."""
        self.lengths += lengths
        self.sums += sums
        remote_pools, theirs, pools, ours, sizes = pieces
        starts = list(accumulate(sizes, initial=0))
        at = 0
        # Pieces follow each other on both sides where neither side's offset moves against what came before.
        places = zip(remote_pools, map(sub, theirs, starts), pools, map(sub, ours, starts), strict=False)
        for (remote_pool, remote, pool, offset), same in groupby(places):
            end, start = at + len(list(same)), starts[at]
            self._move(Segment(remote_pool, remote + start, pool, offset + start, starts[end] - start), at == 0)
            at = end

    def _move(self, run: Segment, first: bool) -> None:
        """One more run; the first of several may go on from what is there."""
        if first and self.runs:
            remote_pool, theirs, pool, ours, length = self.runs[-1]
            if run[:4] == (remote_pool, theirs + length, pool, ours + length):
                self.runs[-1] = Segment(remote_pool, theirs, pool, ours, length + run.length)
                return
        self.runs.append(run)


class ReadReport(NamedTuple):
    """A finished, verified read. `note` says why the preferred transport was not used, where it was not.

    Where verifying overlaps with pulling (NIXL, more than one group), pull_seconds is the whole.
    """

    transport: TransportName
    bytes: int
    pull_seconds: float
    verify_seconds: float
    note: str | None = None


class ReadHandle:
    """One read in flight. Await it for the report; `ended` is done once no byte of it can land any more.

    Created on an event loop; `finish`, `fail` and `end` may be called from any thread. After success and after every
    error but ReadTimeout, `ended` is done too. Whoever stops waiting (a cancelled task) aborts the read, and must not
    reuse the landing memory before `ended`.
    """

    def __init__(self, peer: str, deadline_s: float, at_once: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self.deadline_s = deadline_s
        self.aborted = False
        self.at_once = at_once  # may be done before the call that starts it returns
        self.on_abort: Callable[[], None] | None = None  # set by a transport that can stop a read early
        self.note: str | None = None
        self.transport: TransportName | None = None  # that took it
        self.verified = 0  # so many of its reads, from the first on, have landed and agree; it may grow until `ended`
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._report: asyncio.Future[ReadReport] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        if not at_once:
            self.begun()

    def begun(self) -> None:
        """The call that starts it returns: where it is not over, its deadline is watched from now on, and any thread
        may settle it."""
        self.at_once = False
        if not self.ended.done():
            self._timer = self._loop.call_later(max(0.0, self.deadline_s - time.monotonic()), self._expire)

    @property
    def settled(self) -> asyncio.Future[ReadReport]:
        """Done once the read has succeeded, failed or passed its deadline. One who is cancelled while awaiting it has
        to abort the read."""
        return self._report

    def __await__(self) -> Generator[Any, None, ReadReport]:
        return self._wait().__await__()

    async def _wait(self) -> ReadReport:
        try:
            return await asyncio.shield(self._report)
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop as soon as the transport can; `ended` tells when. Loop thread only; idempotent."""
        self.aborted = True
        if self.on_abort is not None and not self.ended.done():
            self.on_abort()

    def finish(self, report: ReadReport) -> None:
        self._call(self._settle, report, None, True)

    def fail(self, error: ServeError) -> None:
        """Give up; no byte can land any more."""
        self._call(self._settle, None, error, True)

    def end(self) -> None:
        """The late end of a read whose deadline passed or which was aborted."""
        self.fail(TransferError("the read was aborted"))

    def _call(self, step: Callable[..., None], *given: Any) -> None:
        if self.at_once:
            step(*given)
        elif not self._loop.is_closed():  # a worker thread may outlive the loop at shutdown; nobody waits then
            self._loop.call_soon_threadsafe(step, *given)

    def _settle(self, report: ReadReport | None, error: ServeError | None, ended: bool) -> None:
        if ended and not self.ended.done():
            self.ended.set_result(None)
            if self._timer is not None:
                self._timer.cancel()
        if self._report.done():
            return
        if report is not None:
            self._report.set_result(report)
        elif error is not None:
            self._report.set_exception(error)
            self._report.exception()  # looked at: a lost race must not warn

    def _expire(self) -> None:
        if not self._report.done():
            self._settle(None, ReadTimeout(f"reading from {self._peer} passed its deadline", self.ended), False)
            self.abort()


class Landing:
    """The reads that may still write into one piece of our memory: it is reusable once none is pending."""

    def __init__(self) -> None:
        self._handles: list[ReadHandle] = []

    def add(self, handle: ReadHandle) -> ReadHandle:
        self._handles.append(handle)
        return handle

    @property
    def pending(self) -> bool:
        return any(not handle.ended.done() for handle in self._handles)

    async def ended(self) -> None:
        """Wait, without a deadline of its own, until nothing can land any more."""
        for handle in self._handles:
            await asyncio.shield(handle.ended)


class Transport(Protocol):
    """One way to move bytes. `describe` adds what peers need; `submit` starts a read and returns at once."""

    name: TransportName

    async def start(self) -> None: ...

    def describe(self, peer: Peer) -> None: ...

    def submit(self, handle: ReadHandle, peer: Peer, batch: Batch, note: str | None = None) -> None: ...

    async def close(self) -> None: ...
