"""Golden vectors of the prefix hash: a change here orphans every stored bundle."""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonrelay.prefix import HASH_BYTES, Fingerprint, prefix_hashes, prefix_root

FINGERPRINT = Fingerprint(
    model="k3-nano", weights_revision="abc", tokenizer_revision="tok-1", row_dtype="float32",
    snapshot_dtype="float32", layout_version="1", numerics_version="native-1", block_tokens=64,
)  # fmt: skip
ROOT = "9dd6ef2ad240f04ab0c7882b4d776073"
ROOT_SALTED = "e37f42fac0002671e1c8b59a602bd5da"
CHAIN = [
    "c70d4eaaf28bd90986f03b2173523922",
    "0887f08002bb02345d1e3933f11b03b0",
    "811db715b66b49b82f05a4ff0a4e8815",
]  # of tokens 0..191 under ROOT
CHAIN_WITH_IMAGE = "df0016aadede5464884f5aee59a4bc6e"  # block 1 with extras


def test_golden_roots() -> None:
    assert prefix_root(FINGERPRINT, "").hex() == ROOT
    assert prefix_root(FINGERPRINT, "tenant-a").hex() == ROOT_SALTED


def test_golden_chain() -> None:
    root, tokens = bytes.fromhex(ROOT), list(range(192))
    assert [h.hex() for h in prefix_hashes(root, tokens, 64)] == CHAIN
    with_image = prefix_hashes(root, tokens, 64, extras={1: b"image digest"})
    assert with_image[0].hex() == CHAIN[0] and with_image[1].hex() == CHAIN_WITH_IMAGE
    assert with_image[2].hex() != CHAIN[2]


@pytest.mark.parametrize("name", FINGERPRINT.__struct_fields__)
def test_every_field_changes_the_root(name: str) -> None:
    value = getattr(FINGERPRINT, name)
    other = value + 64 if isinstance(value, int) else value + "x"
    assert prefix_root(msgspec.structs.replace(FINGERPRINT, **{name: other}), "") != prefix_root(FINGERPRINT, "")


def test_fields_cannot_run_into_each_other() -> None:
    shifted = msgspec.structs.replace(FINGERPRINT, model="k3-nanoabc", weights_revision="")
    assert prefix_root(shifted, "") != prefix_root(FINGERPRINT, "")
    moved = msgspec.structs.replace(FINGERPRINT, block_tokens=6)
    assert prefix_root(moved, "4") != prefix_root(FINGERPRINT, "")


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_tokens=st.sampled_from([1, 4, 8]))
def test_a_hash_names_everything_up_to_its_block_and_nothing_after(tokens: list[int], block_tokens: int) -> None:
    root = b"r" * HASH_BYTES
    hashes = prefix_hashes(root, tokens, block_tokens)
    assert len(hashes) == len(tokens) // block_tokens
    assert all(len(h) == HASH_BYTES for h in hashes) and len(set(hashes)) == len(hashes)
    for end in range(len(tokens) + 1):
        assert prefix_hashes(root, tokens[:end], block_tokens) == hashes[: end // block_tokens]
    parent = root
    for index, found in enumerate(hashes):
        words = tokens[index * block_tokens : (index + 1) * block_tokens]
        parent = blake2b(parent + struct.pack(f"<{block_tokens}I", *words), digest_size=16).digest()
        assert found == parent
