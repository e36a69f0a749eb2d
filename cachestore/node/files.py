"""One entry, one file, in a directory of the node's own; the form of a file is `file_form.py`.

    DIRECTORY/moonrelay-cache        says whose directory this is, and is locked by the process that uses it
    DIRECTORY/ROOT/HASH.block        root and prefix hash in hex; a snapshot's ends in .snapshot
    DIRECTORY/ROOT/HASH.block.part   being written

A file is written under its `.part` name and renamed when its last byte is written, so that a process that dies leaves
either a whole file or a `.part`, which the next start deletes. Nothing is synced: after a power cut a file may be
torn, and its length or a checksum says so. A cache may lose an entry; a request must not wait for a disk's flush.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cachestore.node.file_form import (
    FIXED,
    HEADER_BYTES_MAX,
    PAGE_BYTES,
    Header,
    RefusedFile,
    body_offset,
    decode_header,
    encode_header,
    file_bytes,
)
from moonrelay.errors import ServeError
from moonrelay.prefix import HASH_BYTES

READ_BYTES = 8 << 20  # of one system call; also how often a reading thread lets others in
BUFFERS_MAX = 512  # of one system call; the kernel takes 1,024
OWNER_FILE = "moonrelay-cache"
OWNER_TEXT = b"moonrelay cache directory, form 1\n"
PART = ".part"
KINDS = ("block", "snapshot")


class DiskUnavailable(ServeError):
    """The directory cannot be used: not ours, in use, or no rights."""

    code = "unavailable"


class DirectoryInUse(DiskUnavailable):
    """Another process holds it."""


class DiskFull(ServeError):
    """No space is left on the device."""

    code = "overloaded"


class DiskFault(ServeError):
    """A file could not be written or removed."""

    code = "unavailable"


class BytesChanged(ServeError):
    """The memory to be written does not have the checksum it was stored with. `of_draft`: only its drafter rows."""

    code = "transfer_failed"

    def __init__(self, message: str, *, of_draft: bool = False) -> None:
        super().__init__(message)
        self.of_draft = of_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An entry that a scan came upon: its header was checked and its length is right, its body not looked at."""

    header: Header
    file_bytes: int


@dataclass(slots=True)
class ScanCounts:
    """What a scan has seen so far. `files`: all that there were at its start."""

    files: int = 0
    seen: int = 0
    kept: int = 0
    refused: int = 0  # torn, altered or unreadable: deleted
    unfinished: int = 0  # `.part`: deleted
    foreign: int = 0  # not of our making: left alone


class EntryFiles:
    """The files of one directory. No thread of its own: calls block, one write or removal at a time; reads may run
    beside them."""

    def __init__(self, directory: Path) -> None:
        """Take the directory: make it if need be, and lock it. Raises: DiskUnavailable."""
        self.directory = directory
        self._lock = _take(directory)

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)

    def path(self, root: bytes, kind: str, prefix_hash: bytes) -> Path:
        return self.directory / root.hex() / f"{prefix_hash.hex()}.{kind}"

    def write(self, header: Header, body: Sequence[memoryview]) -> int:
        """Make an entry's file; its bytes on disk. `body`: the bytes of regions and drafter rows, in whatever pieces.

        Raises: BytesChanged, DiskFull, DiskFault; then there is no file.
        """
        path = self.path(header.root, header.kind, header.prefix_hash)
        part = path.with_name(path.name + PART)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part.unlink(missing_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, [memoryview(encode_header(header)), *body])
            finally:
                os.close(fd)
            _compare(header, body)
            part.rename(path)
        except BytesChanged:
            self._discard(part)
            raise
        except OSError as error:
            self._discard(part)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self.directory}: {error.strerror}") from None
            raise DiskFault(f"writing {path}: {error.strerror}") from None
        return file_bytes(header)

    def read(
        self, header: Header, into: Sequence[Sequence[memoryview]], draft: Sequence[Sequence[memoryview]] = ()
    ) -> bool:
        """Bring the body of the entry that `header` describes into `into`: for each region, the pieces it goes to;
        and its drafter rows into `draft`. Whether those agree with their checksums too.

        The file's own header must be the same. Raises: RefusedFile; `into` then holds anything.
        """
        path = self.path(header.root, header.kind, header.prefix_hash)
        with _opened(path) as fd:
            if _header_of(fd) != header:
                raise RefusedFile(f"{path}: holds another entry than was written", reason="altered")
            _read_all(fd, [piece for pieces in (*into, *draft) for piece in pieces], body_offset(header), str(path))
        if not _agree(header.regions, into):
            raise RefusedFile(f"{path}: its bytes differ from their checksum", reason="altered")
        return _agree(header.draft, draft)

    def remove(self, root: bytes, kind: str, prefix_hash: bytes) -> None:
        """Delete an entry's file, if there is one. Raises: DiskFault."""
        path = self.path(root, kind, prefix_hash)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DiskFault(f"removing {path}: {error.strerror}") from None
        with contextlib.suppress(OSError):  # the root's last file takes its folder with it
            path.parent.rmdir()

    def scan(self, counts: ScanCounts, refused: Callable[[RefusedFile], None] = lambda _: None) -> Iterator[Found]:
        """Every entry that may be served, least recently written first; what is not whole is deleted and told to
        `refused`.

        Raises: DiskFault where the directory itself cannot be read.
        """
        try:
            listed = sorted(self._listed(counts))
        except OSError as error:
            raise DiskFault(f"reading {self.directory}: {error.strerror}") from None
        counts.files = len(listed)
        for _, path in listed:
            counts.seen += 1
            try:
                found = _found(path)
            except RefusedFile as error:
                counts.refused += 1
                refused(error)
                if error.reason != "unreadable":
                    self._discard(path)
                continue
            counts.kept += 1
            yield found

    def _listed(self, counts: ScanCounts) -> Iterator[tuple[int, Path]]:
        for name in sorted(os.listdir(self.directory)):
            folder = self.directory / name
            if name == OWNER_FILE:
                continue
            if not _is_hash(name) or not folder.is_dir() or folder.is_symlink():
                counts.foreign += 1
                continue
            with os.scandir(folder) as items:
                for item in items:
                    stem, _, kind = item.name.removesuffix(PART).partition(".")
                    if not (_is_hash(stem) and kind in KINDS and item.is_file(follow_symlinks=False)):
                        counts.foreign += 1
                    elif item.name.endswith(PART):
                        counts.unfinished += 1
                        self._discard(Path(item.path))
                    else:
                        yield item.stat(follow_symlinks=False).st_mtime_ns, Path(item.path)

    @staticmethod
    def _discard(path: Path) -> None:
        with contextlib.suppress(OSError):  # the next start tries again
            path.unlink(missing_ok=True)


def _take(directory: Path) -> int:
    """Make sure that the directory is ours and nobody else uses it; the locked file. Raises: DiskUnavailable."""
    owner = directory / OWNER_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not owner.exists() and os.listdir(directory):
            raise DiskUnavailable(f"{directory} holds other things than a cache; give an empty or a new directory")
        fd = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskUnavailable(f"{directory}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = os.pread(fd, len(OWNER_TEXT) + 1, 0)
        if not text:
            os.pwrite(fd, OWNER_TEXT, 0)
        elif text != OWNER_TEXT:
            raise DiskUnavailable(f"{directory} was written by another version; give an empty or a new directory")
    except BlockingIOError:
        os.close(fd)
        raise DirectoryInUse(f"{directory} is in use by another process") from None
    except OSError as error:
        os.close(fd)
        raise DiskUnavailable(f"{directory}: {error.strerror}") from None
    except DiskUnavailable:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A plain file, open for reading. Raises: RefusedFile, also for what the system refuses inside the block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RefusedFile(f"{path}: not a plain file", reason="altered")
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise RefusedFile(f"{path}: {error.strerror}", reason="unreadable") from None


def _header_of(fd: int) -> Header:
    data = os.pread(fd, PAGE_BYTES, 0)
    if len(data) >= FIXED.size:
        needed = FIXED.size + min(FIXED.unpack_from(data)[2], HEADER_BYTES_MAX)
        if needed > len(data):
            data += os.pread(fd, needed - len(data), len(data))
    return decode_header(data)


def _found(path: Path) -> Found:
    """What a file says it is. Raises: RefusedFile."""
    with _opened(path) as fd:
        header = _header_of(fd)
        length = os.fstat(fd).st_size
    if (path.parent.name, path.name) != (header.root.hex(), f"{header.prefix_hash.hex()}.{header.kind}"):
        raise RefusedFile(f"{path}: its header names another entry", reason="altered")
    expected = body_offset(header) + header.body_bytes
    if length != expected:
        raise RefusedFile(f"{path}: {length} bytes, {expected} expected", reason="torn")
    return Found(header=header, file_bytes=file_bytes(header))


def _write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    for batch in _batches(pieces):
        left = batch
        while left:
            left = _after(left, os.writev(fd, left))


def _read_all(fd: int, pieces: Sequence[memoryview], offset: int, name: str) -> None:
    for batch in _batches(pieces):
        left = batch
        while left:
            count = os.preadv(fd, left, offset)
            if not count:
                raise RefusedFile(f"{name}: ends early", reason="torn")
            offset += count
            left = _after(left, count)


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes in order, cut and gathered so that one system call takes a batch."""
    batch: list[memoryview] = []
    nbytes = 0
    for piece in pieces:
        for start in range(0, len(piece), READ_BYTES):
            part = piece[start : start + READ_BYTES]
            if batch and (nbytes + len(part) > READ_BYTES or len(batch) == BUFFERS_MAX):
                yield batch
                batch, nbytes = [], 0
            batch.append(part)
            nbytes += len(part)
    if batch:
        yield batch


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `pieces` once `count` bytes of them are done."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[index + 1 :]]
        count -= len(piece)
    return []


def _agree(sums: Sequence[tuple[int, int]], parts: Sequence[Sequence[memoryview]]) -> bool:
    """Whether each part's pieces have its checksum."""
    for (_, expected), pieces in zip(sums, parts, strict=True):
        running = xxhash.xxh3_64()
        for piece in pieces:
            running.update(piece)
        if running.intdigest() != expected:
            return False
    return True


def _compare(header: Header, body: Sequence[memoryview]) -> None:
    """The bytes that were written are those that were stored. Raises: BytesChanged."""
    pieces = iter(body)
    left = next(pieces, memoryview(b""))
    for number, (length, expected) in enumerate((*header.regions, *header.draft)):
        running = xxhash.xxh3_64()
        while length:
            if not len(left):
                left = next(pieces, memoryview(b""))
                if not len(left):
                    raise BytesChanged("an entry's memory is shorter than its regions")
            taken = left[:length]
            running.update(taken)
            left, length = left[len(taken) :], length - len(taken)
        if running.intdigest() != expected:
            raise BytesChanged(
                "an entry's bytes in memory differ from the checksum they were stored with",
                of_draft=number >= len(header.regions),
            )


def _is_hash(word: str) -> bool:
    return len(word) == 2 * HASH_BYTES and not word.strip("0123456789abcdef")
