"""A model small enough to run a million times: the state is a chain of checksums over the ids, and rows are too.

Any two different histories give different states for ever (a CRC is a bijection of what it starts from), every token
depends on every state cell and on every row of its prefix: a wrong, partial, stale or foreign cell is a wrong token.
Results do not depend on how a prompt is cut.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from zlib import crc32

BLOCK_TOKENS = 64
ROW_CELLS = 2  # per block, one per "MLA layer"
NUM_LAYERS = 2  # of KDA: recurrent state in cells 0 and 1, conv history in 2 and 3
STATE_CELLS = 4
VOCAB = 50_000
SEEDS = (0x51ED270B, 0x2545F491, 0x9E3779B9, 0x85EBCA6B)
Cells = list[int]


def packed(ids: Sequence[int]) -> bytes:
    return array("H", ids).tobytes()


def consume(ids: Sequence[int], start: int, state: Cells, rows: list[Cells]) -> None:
    """Consume `ids` after `start` tokens: `state` advances, `rows[i]` of block i fill, both in place.

    At start 0 the state begins anew whatever it holds.
    """
    if start == 0:
        state[:] = SEEDS
    data, at, end = packed(ids), 0, len(ids)
    while at < end:
        block, offset = divmod(start + at, BLOCK_TOKENS)
        count = min(BLOCK_TOKENS - offset, end - at)
        part = data[2 * at : 2 * (at + count)]
        cells = rows[block]
        if offset == 0:
            cells[0], cells[1] = state[0] ^ SEEDS[2], state[3] ^ SEEDS[1]
        cells[0], cells[1] = crc32(part, cells[0]), crc32(part, cells[1])
        state[0], state[1] = crc32(part, state[0]), crc32(part, state[1])
        state[2], state[3] = crc32(part, state[2]), crc32(part, state[3])
        at += count


def next_token(state: Cells, rows: Sequence[Cells]) -> int:
    """What the model says after everything in `state` and `rows`."""
    values = [*state]
    for cells in rows:
        values += cells
    return crc32(struct.pack(f"<{len(values)}I", *values)) % VOCAB


def num_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def generate(ids: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The single-process run: what every other way of computing must equal."""
    total = num_blocks(len(ids) + max_tokens)
    state, rows = list(SEEDS), [[0] * ROW_CELLS for _ in range(total)]
    consume(ids, 0, state, rows)
    at, tokens = len(ids), []
    while True:
        token = next_token(state, rows[: num_blocks(at)])
        tokens.append(token)
        if len(tokens) == max_tokens or token in stop:
            return tokens
        consume((token,), at, state, rows)
        at += 1


class Oracle:
    """What the bytes behind every prefix hash must be. Fills as routers hash prompts."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[int, ...]] = {}
        self.state: dict[bytes, tuple[int, ...]] = {}
        self.depth: dict[bytes, int] = {}  # in blocks
        self.root: dict[bytes, bytes] = {}

    def register(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """`hashes` name the full blocks of `ids` under `root`."""
        known = len(hashes)
        while known and hashes[known - 1] not in self.rows:
            known -= 1
        state = list(self.state[hashes[known - 1]]) if known else list(SEEDS)
        rows = [[0] * ROW_CELLS for _ in hashes]
        for index in range(known, len(hashes)):
            consume(ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS], index * BLOCK_TOKENS, state, rows)
            name = hashes[index]
            self.rows[name], self.state[name] = tuple(rows[index]), tuple(state)
            self.depth[name], self.root[name] = index + 1, root
