"""Blocks that a decode worker still has from earlier turns: a handoff moves only what is not among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decode.manifest import Held
from engine.worker.memory import Holding, Memory


class HeldBlocks(Protocol):
    """The device tier, as reservations use it."""

    def reserve(
        self, tokens: int, root: bytes, hashes: Sequence[bytes], *, write_back: bool = False
    ) -> tuple[Holding, int]:
        """Memory for `tokens`, and how many of its first blocks are there, verified, under `hashes` of `root`.

        Those blocks are shared: they are not written to. Raises: Overloaded, RequestTooLarge, Unavailable.
        """
        ...


class NothingHeld:
    """The do-nothing twin: every reservation is empty."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def reserve(
        self, tokens: int, root: bytes, hashes: Sequence[bytes], *, write_back: bool = False
    ) -> tuple[Holding, int]:
        return self._memory.try_reserve(tokens, write_back=write_back), 0


class DeviceTier:
    """What finished turns have left in the worker's own memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def reserve(
        self, tokens: int, root: bytes, hashes: Sequence[bytes], *, write_back: bool = False
    ) -> tuple[Holding, int]:
        holding = self._memory.try_reserve(tokens, hashes=hashes, write_back=write_back)  # hashes tell roots apart
        return holding, holding.reservation.shared


def held_prefix(root: bytes, hashes: Sequence[bytes], num_blocks: int) -> Held | None:
    """How the first `num_blocks` blocks are named to their owner."""
    if not num_blocks:
        return None
    return Held(root=root, prefix_hash=hashes[num_blocks - 1], num_blocks=num_blocks)
