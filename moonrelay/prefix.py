"""The prefix hash: a chained digest that names every token up to a block's end.

Golden vectors in the tests pin the digests; a change to anything here orphans every stored bundle.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from moonrelay.ids import PrefixHash

HASH_BYTES = 16


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree before bytes made by one process mean anything to another; the root of every prefix hash."""

    model: str
    weights_revision: str
    tokenizer_revision: str
    row_dtype: str
    snapshot_dtype: str
    layout_version: str
    numerics_version: str
    block_tokens: int


def prefix_root(fingerprint: Fingerprint, salt: str) -> bytes:
    """The chain's start: 16 bytes that differ wherever stored bytes could mean something else.

    Fields are length-prefixed, so no two fingerprints share an encoding; the tenant's salt is one of them.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"moonrelay-root")
    for name in fingerprint.__struct_fields__:
        value = str(getattr(fingerprint, name)).encode()
        digest.update(struct.pack("<I", len(value)) + value)
    encoded = salt.encode()
    digest.update(struct.pack("<I", len(encoded)) + encoded)
    return digest.digest()


def prefix_hashes(
    root: bytes, tokens: Sequence[int], block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> list[PrefixHash]:
    """One chained hash per full block; a ragged tail gets none.

    `extras` maps a block's index to the digests of images whose pads touch it (their token ids are all equal).
    """
    hashes: list[PrefixHash] = []
    parent = root
    for index, start in enumerate(range(0, len(tokens) - block_tokens + 1, block_tokens)):
        block = struct.pack(f"<{block_tokens}I", *tokens[start : start + block_tokens])
        extra = extras.get(index, b"") if extras else b""
        parent = blake2b(parent + block + extra, digest_size=HASH_BYTES).digest()
        hashes.append(PrefixHash(parent))
    return hashes
