"""The node's disk tier at work: files are found at the start, written behind the requests, read for leases.

Loop thread only; what blocks runs in threads of its own, one that writes and deletes, in order, and a few that read.
Whatever goes wrong with the disk is said, counted, and costs hits only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from cachestore.entries import Key
from cachestore.node.core import NodeCore
from cachestore.node.file_form import HEADER_BYTES_MAX, RefusedFile, encode_header, file_bytes
from cachestore.node.files import (
    BytesChanged,
    DirectoryInUse,
    DiskFault,
    DiskFull,
    DiskUnavailable,
    EntryFiles,
    Found,
    ScanCounts,
)
from cachestore.node.index_writer import IndexWriter
from cachestore.node.metrics import NodeMetrics
from cachestore.node.promotion import Brought, bring, draft_of, header_of, job_of, offer_of
from cachestore.node.room import Room
from cachestore.node.states import WITH_FILE, State
from moonrelay.errors import DeadlineExceeded, Overloaded, ServeError, SettingsError, Unavailable
from moonrelay.valkey import FAILURES

logger = logging.getLogger(__name__)

READERS = 4  # an NVMe device needs several requests at once
PROMOTIONS_MAX = 64  # going on or waiting for a reading thread
PROMOTE_TRIES = 3  # what came into memory may leave again while the rest is read
MEASURED_BYTES_MIN = 8 << 20  # less says more about the machine's load than about its disk
SCAN_BATCH = 128
OPEN_AGAIN_S = 0.1
LOCK_WAIT_S = 5.0  # at the start: a killed predecessor may still be letting go of the directory
PAUSE_S = 10.0  # of writing, after the disk was full or failed
DiskState = Literal["off", "recovering", "ready"]
T = TypeVar("T")


@dataclass(slots=True)
class Pace:
    """How long the tier waits; tests wait less."""

    lock_wait_s: float = LOCK_WAIT_S
    pause_s: float = PAUSE_S


class DiskTier:
    """`view` gives arena memory by offset and length. Without a directory, nothing here does anything."""

    def __init__(
        self, core: NodeCore, room: Room, index: IndexWriter, view: Callable[[int, int], memoryview],
        metrics: NodeMetrics, directory: Path | None, pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self._core, self._room, self._index, self._metrics = core, room, index, metrics
        self._view, self._directory, self._pace = view, directory, pace or Pace()
        self._files: EntryFiles | None = None
        self._writer = ThreadPoolExecutor(1, "disk-writer")
        self._readers = ThreadPoolExecutor(READERS, "disk-reader")
        self._promoting: dict[Key, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(READERS)
        self._bytes_per_s = 0.0  # of promotions; 0: not known yet
        self._wake, self._written_out = asyncio.Event(), asyncio.Event()
        self._counts = ScanCounts()
        self.state: DiskState = "off" if directory is None else "recovering"
        metrics.watch_disk(lambda: (self.state, self._counts))

    async def open(self) -> None:
        """Take the directory; waits a little for a process that holds it. Raises: SettingsError."""
        if self._directory is None:
            return
        until_s = time.monotonic() + self._pace.lock_wait_s
        while self._files is None:
            try:
                self._files = await self._in_writer(EntryFiles, self._directory)
            except DiskUnavailable as error:
                if not isinstance(error, DirectoryInUse) or time.monotonic() > until_s:
                    raise SettingsError(f"disk_dir: expected a directory of this node's own, found {error}") from None
                await asyncio.sleep(OPEN_AGAIN_S)

    async def run(self) -> None:
        """Find what is there, then write what is new, for as long as this runs; after `open`."""
        if self._files is None:
            return
        await self._recover(self._files)
        self.state = "ready"
        logger.info("disk tier ready", extra=asdict(self._counts))
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (following := self._core.next_writes()) is not None:
                chain, used = following
                for key in chain:
                    if not await self._write(self._files, key, used):
                        break
            self._written_out.set()

    def wake(self) -> None:
        """There may be something to write."""
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Write out what is waiting, as far as time allows: this process is about to end."""
        if self.state != "ready":
            return
        self._written_out.clear()
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await self._written_out.wait()
        except TimeoutError:
            logger.warning("not all was written to disk", extra={"entries": self._core.stats().disk.num_waiting})

    async def close(self) -> None:
        """Once `run` has ended: wait for the threads, let go of the directory."""
        for task in set(self._promoting.values()):
            task.cancel()
        for threads in (self._writer, self._readers):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        files, self._files = self._files, None
        if files is not None:
            files.close()

    # Reading.

    async def ensure(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        """Bring those of `keys` that are on disk only into memory; they are there when this returns, and stay until
        the loop's next turn. Which they were. What a file does not give is not here any more afterwards.

        Raises: Overloaded, DeadlineExceeded, RequestTooLarge, Unavailable; what was begun goes on beside the caller.
        """
        asked = self._core.on_disk(keys)
        if not asked:
            return []
        if len(set(self._promoting.values())) >= PROMOTIONS_MAX:
            raise Overloaded(f"{PROMOTIONS_MAX} leases are waiting for the disk")
        self._start(asked, keys)
        wanted = sum(entry.offer.nbytes for key in asked if (entry := self._core.entry(key)) is not None)
        if self._bytes_per_s and wanted / self._bytes_per_s > deadline_s - time.monotonic():
            raise DeadlineExceeded("reading from disk will take longer than the lease may wait")
        held = self._core.hold(keys)
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                missing = asked
                for _ in range(PROMOTE_TRIES):
                    await self._read(missing)
                    held += self._core.hold(missing)
                    missing = self._core.on_disk(keys)
                    if not missing:
                        return asked
                    self._start(missing, keys)
            raise Overloaded("memory is too small for all that is wanted from disk")
        except TimeoutError:
            raise DeadlineExceeded("reading from disk took longer than the lease may wait") from None
        finally:
            self._core.let_go(held)

    def _start(self, missing: Sequence[Key], protect: Sequence[Key]) -> None:
        """Have those of `missing` read that are not being read yet; that goes on whoever stops waiting for it."""
        fresh = [key for key in missing if key not in self._promoting]
        if not fresh:
            return

        def ended(task: asyncio.Task[None]) -> None:
            for key in fresh:
                del self._promoting[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.info("not brought from disk", extra={"reason": str(error), "entries": len(fresh)})

        task = asyncio.get_running_loop().create_task(self._promote(fresh, protect))
        for key in fresh:
            self._promoting[key] = task
        task.add_done_callback(ended)

    async def _read(self, missing: Sequence[Key]) -> None:
        """Wait until every one of `missing` was read. Raises: ServeError."""
        tasks = {self._promoting[key] for key in missing if key in self._promoting}
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _promote(self, wanted: Sequence[Key], protect: Sequence[Key]) -> None:
        """Raises: ServeError where there is no room."""
        files = self._files
        if files is None:
            raise Unavailable("the disk is not open")

        def still() -> list[Key]:
            return [k for k in wanted if (e := self._core.entry(k)) is not None and e.state is State.DISK]

        async with self._slots:  # a disk that hangs must not come to hold all of memory
            await self._room.make(lambda: self._core.promotion_bytes(still()), protect)
            await self._bring(files, still())

    async def _bring(self, files: EntryFiles, keys: Sequence[Key]) -> None:
        if not self._core.begin_promote(keys):
            raise Overloaded("memory is leased or too small")
        jobs = [job_of(entry) for k in keys if (entry := self._core.entry(k)) is not None]
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        parts = [range(i, len(jobs), READERS) for i in range(min(READERS, len(jobs)))]
        readings = [
            loop.run_in_executor(self._readers, bring, files, [jobs[i] for i in part], self._view) for part in parts
        ]
        results: dict[Key, Brought | RefusedFile] = {}
        for part, reading in zip(parts, readings, strict=True):
            for i, result in zip(part, await reading, strict=True):
                results[keys[i]] = result
        self._settle(keys, results)
        self._measure(sum(job.header.body_bytes for job in jobs), time.monotonic() - started)

    def _settle(self, keys: Sequence[Key], results: dict[Key, Brought | RefusedFile]) -> None:
        refused: list[Key] = []
        for key in keys:
            result = results[key]
            if isinstance(result, RefusedFile):
                logger.warning("a file was refused", extra={"reason": result.reason, "detail": str(result)})
                self._metrics.refused_files.labels(result.reason).inc()
                self._core.refuse(key)
                refused.append(key)
            else:
                self._metrics.promoted_bytes.inc(sum(r.length for r in (*result.regions, *result.draft)))
                if not self._core.promoted(key, result.regions, result.draft):
                    self._metrics.refused_files.labels("draft").inc()
        self._delete()
        if refused:
            self._index.note([*refused, *self._core.resting_on(refused)])
        self._index.note(self._core.take_moved())

    def _measure(self, nbytes: int, seconds: float) -> None:
        self._metrics.promote_seconds.observe(seconds)
        if nbytes >= MEASURED_BYTES_MIN:
            now = nbytes / max(seconds, 1e-6)
            self._bytes_per_s = now if not self._bytes_per_s else 0.7 * self._bytes_per_s + 0.3 * now

    # Writing.

    async def _write(self, files: EntryFiles, key: Key, used: bool) -> bool:
        """Write an entry's file, if it is worth it: when the disk is full, only what was used at least once."""
        entry = self._core.entry(key)
        if entry is None or entry.state is not State.HOST:
            return False
        header = header_of(entry)
        nbytes = file_bytes(header)
        if (nbytes > self._core.disk_free_bytes and not used) or len(encode_header(header)) > HEADER_BYTES_MAX:
            self._metrics.not_written.inc()
            return False
        try:
            await self._make_room(nbytes)
        except ServeError as error:
            logger.warning("no room is made on disk", extra={"reason": str(error)})
        self._delete()  # an older file of this entry, if it had one, goes before the new one is written
        if self._core.entry(key) is not entry or header_of(entry) != header:
            return False  # it left while room was made, and may have come back to another place, or is another
        if not self._core.begin_write(key, nbytes):
            return False
        rows = entry.draft.regions if entry.draft is not None else ()
        body = [self._view(region.offset, region.length) for region in (*entry.regions, *rows)]
        try:
            await self._in_writer(files.write, header, body)
        except (DiskFull, DiskFault) as error:
            self._core.unwritten(key, again=isinstance(error, DiskFull), used=used)
            reason = "full" if isinstance(error, DiskFull) else "failed"
            self._metrics.disk_errors.labels(reason).inc()
            logger.warning("disk not written, pausing", extra={"reason": str(error), "seconds": self._pace.pause_s})
            await asyncio.sleep(self._pace.pause_s)
            return False
        except BytesChanged as error:
            self._core.unwritten(key, again=error.of_draft, used=used)
            if error.of_draft:
                self._metrics.refused_files.labels("draft").inc()
                self._core.drop_draft(key)
            else:
                await self._retire(key, error)
            return False
        self._core.written(key)
        self._metrics.written_bytes.inc(nbytes)
        return True

    async def _retire(self, key: Key, error: BytesChanged) -> None:
        """An entry whose memory went bad goes, unless somebody reads it: the reader's checksum refuses it too."""
        self._metrics.refused_files.labels("memory").inc()
        logger.error("an entry's memory does not have its checksum", extra={"kind": key.kind, "reason": str(error)})
        if self._core.retire(key):
            try:
                await self._index.withdraw([key])
            except Unavailable as away:
                logger.warning("kept although it is bad", extra={"reason": str(away)})

    async def _make_room(self, nbytes: int) -> None:
        """Let go of files until `nbytes` are free, as far as that can be had. Raises: Unavailable."""
        if nbytes <= self._core.disk_free_bytes or nbytes > self._core.stats().disk.capacity_bytes:
            return
        leaving = self._core.disk_victims(nbytes)
        try:
            await self._index.withdraw(leaving)
        finally:
            deleting = self._delete()
        if deleting is not None:
            await deleting

    def _delete(self) -> asyncio.Future[None] | None:
        """Have the files that are to go deleted, before whatever is written next."""
        taken = self._core.take_deletions()
        files = self._files
        if not taken or files is None:
            return None

        def delete() -> None:
            failed: list[DiskFault] = []
            for key, _ in taken:
                try:
                    files.remove(*key)
                except DiskFault as error:
                    failed.append(error)
            if failed:
                raise failed[0]

        def done(job: asyncio.Future[None]) -> None:
            if job.cancelled():  # the node is closing: they are still there, and its next life finds them
                return
            self._core.deleted(sum(nbytes for _, nbytes in taken))
            if (error := job.exception()) is not None:
                self._failed("files not deleted", error)

        job = asyncio.get_running_loop().run_in_executor(self._writer, delete)
        job.add_done_callback(done)
        return job

    # Starting.

    async def _recover(self, files: EntryFiles) -> None:
        """Make entries of the files that are there, oldest first; the node serves meanwhile."""
        found = files.scan(self._counts, lambda error: self._metrics.refused_files.labels(error.reason).inc())
        taken: list[Key] = []
        try:
            while batch := await self._in_writer(_next_batch, found):
                known = [key for item in batch if (key := await self._know(item)) is not None]
                self._delete()
                await self._tell(known)
                taken += known
        except DiskFault as error:
            self._failed("files from before are lost", error)
        await self._tell(taken)  # again: where a block came before its parent, its run begins higher than was told

    async def _tell(self, keys: Sequence[Key]) -> None:
        try:
            await self._index.write(keys)
        except FAILURES as error:
            logger.warning("the index hears of files later", extra={"reason": str(error)})

    async def _know(self, item: Found) -> Key | None:
        """Take a file into the books, or delete it: its entry is here anew, or there is no room."""
        offer = offer_of(item.header)
        if self._core.entry(offer.key) is None:
            try:
                await self._make_room(item.file_bytes)
            except Unavailable as error:
                logger.warning("no room is made on disk", extra={"reason": str(error)})
            if self._core.found(offer, item.header.regions, item.file_bytes, draft_of(item.header)):
                return offer.key
        entry = self._core.entry(offer.key)
        if (entry is None or entry.state not in WITH_FILE) and self._files is not None:
            try:
                await self._in_writer(self._files.remove, *offer.key)
            except DiskFault as error:
                self._failed("a file of no use stays", error)
        return None

    def _failed(self, what: str, error: BaseException) -> None:
        self._metrics.disk_errors.labels("failed").inc()
        logger.warning(what, extra={"reason": str(error)})

    async def _in_writer(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)


def _next_batch(found: Iterator[Found]) -> list[Found]:
    """Parents first: files written within one tick of the file system's clock have no order of their own."""
    return sorted(islice(found, SCAN_BATCH), key=lambda item: (item.header.depth, item.header.kind == "snapshot"))
