"""The disk's files: what was written comes back or is refused, whatever happened to them meanwhile."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.checksum import checksum
from cachestore.node import files as files_module
from cachestore.node.file_form import Header, RefusedFile, body_offset, decode_header, encode_header, file_bytes
from cachestore.node.files import (
    OWNER_FILE,
    BytesChanged,
    DiskFault,
    DiskFull,
    DiskUnavailable,
    EntryFiles,
    ScanCounts,
)

ROOT, OTHER_ROOT = b"r" * 16, b"q" * 16
BODY = tuple(bytes([65 + i]) * length for i, length in enumerate((300, 1, 4_096, 77)))


class Crashed(BaseException):
    """The process ends here."""


def header_of(body: tuple[bytes, ...] = BODY, *, root: bytes = ROOT, kind: str = "block", name: int = 1) -> Header:
    parent = bytes([name - 1]) * 16 if kind == "block" and name else None
    regions = tuple((len(part), checksum(part)) for part in body)
    return Header(root=root, kind=kind, prefix_hash=bytes([name]) * 16, parent=parent, depth=name, regions=regions)  # type: ignore[arg-type]


def written(files: EntryFiles, header: Header, body: tuple[bytes, ...] = BODY) -> Path:
    assert files.write(header, [memoryview(part) for part in body]) == file_bytes(header)
    return files.path(header.root, header.kind, header.prefix_hash)


def brought(files: EntryFiles, header: Header) -> tuple[bytes, ...]:
    into = [bytearray(length) for length, _ in header.regions]
    files.read(header, [[memoryview(part)[:7], memoryview(part)[7:]] for part in into])
    return tuple(bytes(part) for part in into)


@contextmanager
def opened(directory: Path) -> Iterator[EntryFiles]:
    files = EntryFiles(directory)
    try:
        yield files
    finally:
        files.close()


def scanned(files: EntryFiles) -> tuple[list[Header], ScanCounts]:
    counts = ScanCounts()
    return [found.header for found in files.scan(counts)], counts


def served(directory: Path, header: Header) -> tuple[bytes, ...] | None:
    """What a node that starts on `directory` would serve for the entry."""
    with opened(directory) as files:
        found, _ = scanned(files)
        try:
            return brought(files, found[0]) if found else None
        except RefusedFile:
            return None


def test_an_entry_comes_back_after_a_restart_and_a_removed_one_does_not(tmp_path: Path) -> None:
    block, state = header_of(), header_of(kind="snapshot")
    with opened(tmp_path) as files:
        path = written(files, block)
        written(files, state)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size == body_offset(block) + block.nbytes <= file_bytes(block)
    with opened(tmp_path) as files:
        found, counts = scanned(files)
        assert found == [block, state] and (counts.kept, counts.files) == (2, 2)  # oldest first
        assert all(brought(files, header) == BODY for header in found)
        files.remove(ROOT, "block", block.prefix_hash)
        files.remove(ROOT, "block", block.prefix_hash)  # idempotent
        assert scanned(files)[0] == [state]
        with pytest.raises(RefusedFile) as refused:
            brought(files, block)
        assert refused.value.reason == "unreadable"
        files.remove(ROOT, "snapshot", state.prefix_hash)
        assert os.listdir(tmp_path) == [OWNER_FILE]


def test_an_entry_of_many_pieces_and_more_than_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "READ_BYTES", 1_000)
    monkeypatch.setattr(files_module, "BUFFERS_MAX", 3)
    body = tuple(os.urandom(1 + 37 * i) for i in range(60))
    with opened(tmp_path) as files:
        written(files, header_of(body), body)
        assert brought(files, header_of(body)) == body


def whole_file(directory: Path) -> bytes:
    with opened(directory) as files:
        path = written(files, header_of())
        data = path.read_bytes()
        files.remove(ROOT, "block", header_of().prefix_hash)
    return data


FILE_BYTES = body_offset(header_of()) + header_of().nbytes


@settings(max_examples=60, deadline=None)
@given(at=st.one_of(st.integers(0, 200), st.integers(0, FILE_BYTES)))
def test_a_crash_at_any_byte_of_a_write_leaves_nothing_that_is_served(at: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        left = [at]
        real = os.writev

        def writev(fd: int, pieces: list[memoryview]) -> int:
            data = b"".join(pieces)[: left[0]]
            if not data:
                raise Crashed
            left[0] -= len(data)
            return real(fd, [data])

        patch.setattr(os, "writev", writev)
        with opened(Path(name)) as files:
            if at >= FILE_BYTES:  # it did not crash in time
                written(files, header_of())
            else:
                with pytest.raises(Crashed):
                    written(files, header_of())
        assert served(Path(name), header_of()) == (BODY if at >= FILE_BYTES else None)
        assert not list(Path(name).rglob("*.part"))


@settings(max_examples=80, deadline=None)
@given(
    at=st.one_of(st.integers(0, 200), st.integers(0, FILE_BYTES - 1)),
    how=st.sampled_from(["cut", "zeros", "flip", "longer", "doubled"]),
    bit=st.integers(0, 7),
)
def test_a_torn_or_altered_file_is_never_served(at: int, how: str, bit: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole = whole_file(Path(name))
        changed = {
            "cut": whole[:at],
            "zeros": whole[:at] + bytes(len(whole) - at),  # a power cut: the length was journalled, the data not
            "flip": whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :],
            "longer": whole + b"x",
            "doubled": whole[:at] + whole[: len(whole) - at],
        }[how]
        with opened(Path(name)) as files:
            path = written(files, header_of())
        path.write_bytes(changed)
        # Bytes between the header and the body belong to nobody: altered there, the entry is still right.
        right = changed == whole or _only_padding_differs(changed, whole)
        assert served(Path(name), header_of()) == (BODY if right else None)


def _only_padding_differs(changed: bytes, whole: bytes) -> bool:
    used = len(encode_header(header_of()).rstrip(b"\0"))
    start = body_offset(header_of())
    return len(changed) == len(whole) and changed[:used] == whole[:used] and changed[start:] == whole[start:]


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_at_all_are_refused_as_a_header(data: bytes) -> None:
    for head in (data, encode_header(header_of())[:24] + data):
        with pytest.raises(RefusedFile):
            decode_header(head)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    """A tenant's bytes cannot be given to another by moving files, nor a state for a block."""
    mine = header_of()
    theirs = header_of(root=OTHER_ROOT)
    with opened(tmp_path) as files:
        path = written(files, mine)
        other = files.path(OTHER_ROOT, "block", mine.prefix_hash)
        other.parent.mkdir()
        other.write_bytes(path.read_bytes())
        path.with_suffix(".snapshot").write_bytes(path.read_bytes())
        with pytest.raises(RefusedFile, match="another entry"):
            brought(files, theirs)
        with pytest.raises(RefusedFile, match="another entry"):
            brought(files, header_of(kind="snapshot"))
        found, counts = scanned(files)
        assert found == [mine] and counts.refused == 2 and not other.exists()


def test_the_memory_is_compared_before_a_file_appears(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for body in ((b"X" + BODY[0][1:], *BODY[1:]), BODY[:-1]):
            with pytest.raises(BytesChanged):
                files.write(header_of(), [memoryview(part) for part in body])
        assert scanned(files)[0] == [] and not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFault)]
)
def test_a_full_or_broken_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def refuse(fd: int, pieces: list[memoryview]) -> int:
        raise OSError(number, os.strerror(number))

    with opened(tmp_path) as files:
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse)
            with pytest.raises(error, match=os.strerror(number)):
                written(files, header_of())
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != OWNER_FILE]
        written(files, header_of())
        assert brought(files, header_of()) == BODY


def test_what_is_not_ours_is_left_alone_and_never_served(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        path = written(files, header_of())
        folder = path.parent
        strangers = [tmp_path / "notes.txt", folder / "readme", folder / "ab.block", tmp_path / ("g" * 32)]
        for stranger in strangers:
            stranger.write_bytes(b"mine")
        link = folder / f"{'0' * 32}.block"
        link.symlink_to("/dev/zero")
        pipe = folder / f"{'1' * 32}.block"
        os.mkfifo(pipe)
        found, counts = scanned(files)
        assert found == [header_of()] and counts.foreign == 6
        assert all(stranger.exists() for stranger in (*strangers, link, pipe))
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(RefusedFile):
            brought(files, header_of())
        path.unlink()
        os.mkfifo(path)  # opening it must not wait for a writer
        with pytest.raises(RefusedFile, match="plain file"):
            brought(files, header_of())


def test_a_directory_is_taken_by_one_process_and_only_if_it_is_a_cache(tmp_path: Path) -> None:
    with opened(tmp_path / "mine"), pytest.raises(DiskUnavailable, match="in use by another process"):
        EntryFiles(tmp_path / "mine")
    with opened(tmp_path / "mine"):
        pass  # free again
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(DiskUnavailable, match="other things than a cache"):
        EntryFiles(home)
    assert os.listdir(home) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable, match=r"exists|Not a directory"):
        EntryFiles(tmp_path / "file")
    later = tmp_path / "later"
    later.mkdir()
    (later / OWNER_FILE).write_text("moonrelay cache directory, form 9\n")
    with pytest.raises(DiskUnavailable, match="another version"):
        EntryFiles(later)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / OWNER_FILE).symlink_to(home / "thesis.tex")
    with pytest.raises(DiskUnavailable):
        EntryFiles(tmp_path / "linked")
    assert (home / "thesis.tex").read_text() == "years of work"
