"""The checked form of an entry's file. Bytes in, values out; no files here.

    offset 0   magic "MRENTRY\\n", version u32, header length u32, xxh3 of both numbers and the header; little endian
    offset 24  header: msgpack of `Header`
    body       from the next multiple of 4 KiB on: the entry's regions, then those of its drafter rows

The header names root, kind and hash, as the file's name does: a file that was moved to another tenant's name is
refused like an altered one. Nothing is believed before its checksum was compared.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import msgspec

from cachestore.checksum import checksum
from moonrelay.errors import ServeError
from moonrelay.prefix import HASH_BYTES

MAGIC: Final = b"MRENTRY\n"
VERSION: Final = 1
FIXED: Final = struct.Struct("<8sIIQ")
_NUMBERS = struct.Struct("<II")
PAGE_BYTES: Final = 4_096
HEADER_BYTES_MAX: Final = 1 << 20
BadFile = Literal["torn", "altered", "unreadable"]


class RefusedFile(ServeError):
    """A file that must not be served. `reason`: torn (its end is missing), altered (a checksum or a name differs),
    unreadable (the system refused)."""

    code = "transfer_failed"

    def __init__(self, message: str, *, reason: BadFile) -> None:
        super().__init__(message)
        self.reason: BadFile = reason


class Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="entry-file-1"):
    """What a file holds. `regions`, `draft`: length and xxh3 of each part of the body, in order; `draft` are the rows
    that `drafter` left, if any."""

    root: bytes
    kind: Literal["block", "snapshot"]
    prefix_hash: bytes
    parent: bytes | None
    depth: int
    regions: tuple[tuple[int, int], ...]
    drafter: str = ""
    draft: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the entry, without drafter rows."""
        return sum(length for length, _ in self.regions)

    @property
    def body_bytes(self) -> int:
        return self.nbytes + sum(length for length, _ in self.draft)


def encode_header(header: Header) -> bytes:
    """The file's bytes up to its body."""
    payload = msgspec.msgpack.encode(header)
    numbers = _NUMBERS.pack(VERSION, len(payload))
    fixed = MAGIC + numbers + struct.pack("<Q", checksum(numbers + payload))
    whole = fixed + payload
    return whole + bytes(-len(whole) % PAGE_BYTES)


def decode_header(data: bytes) -> Header:
    """The header of a file that begins with `data`. Raises: RefusedFile."""
    if len(data) < FIXED.size:
        raise RefusedFile("shorter than a header", reason="torn")
    magic, version, length, digest = FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION or length > HEADER_BYTES_MAX:
        raise RefusedFile("not an entry of this version", reason="altered")
    payload = data[FIXED.size : FIXED.size + length]
    if len(payload) < length:
        raise RefusedFile("its header ends early", reason="torn")
    if checksum(_NUMBERS.pack(version, length) + payload) != digest:
        raise RefusedFile("its header's checksum differs", reason="altered")
    try:
        header = msgspec.msgpack.decode(payload, type=Header)
    except msgspec.MsgspecError as error:
        raise RefusedFile(f"its header cannot be read: {error}", reason="altered") from None
    hashes = (header.root, header.prefix_hash, header.parent or header.prefix_hash)
    parts = (*header.regions, *header.draft)
    if any(len(h) != HASH_BYTES for h in hashes) or not header.regions or min(parts)[0] <= 0:
        raise RefusedFile("its header makes no sense", reason="altered")
    if bool(header.draft) != bool(header.drafter) or (header.draft and header.kind != "block"):
        raise RefusedFile("its header makes no sense", reason="altered")
    return header


def body_offset(header: Header) -> int:
    return len(encode_header(header))


def file_bytes(header: Header) -> int:
    """What the entry takes of the disk, in whole pages."""
    return -(-(body_offset(header) + header.body_bytes) // PAGE_BYTES) * PAGE_BYTES
