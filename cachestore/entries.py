"""The store's words: what an entry is called, and what a publisher says of one that it offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BLOCK, SNAPSHOT = "block", "snapshot"


class Key(NamedTuple):
    """Names an entry: the root it belongs to, its kind, its prefix hash. A tuple, because books look up nothing else
    so often and its hash is made in C."""

    root: bytes
    kind: str
    prefix_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a publisher would give. `parent`: the entry that this one is of no use without."""

    key: Key
    parent: Key | None
    depth: int  # a block's index; a snapshot's tokens in blocks
    nbytes: int

    @property
    def rank(self) -> int:
        """Order along a chain: the block that ends at a boundary, then the snapshot there."""
        return 2 * self.depth + 1 if self.key.kind == SNAPSHOT else 2 * (self.depth + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOffer:
    """The rows that a drafter left for a block's tokens: a part of the block's entry that may be missing."""

    key: Key
    drafter: str
    nbytes: int
