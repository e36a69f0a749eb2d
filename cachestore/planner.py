"""Where a prompt's state is kept: a pure function of its hints, of what the index knows of it, and of its length.

Kinds, as everywhere: 0 the end of the leading system and tool declarations; 1 the end of the last real message;
2 the turn, which decode keeps; 3 a branch point; 4 a long interval.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

HEAD, MESSAGE, TURN, BRANCH, INTERVAL = range(5)
Writeback = Literal["on", "off", "adaptive"]


class Known(Protocol):
    """What the index knows of a prompt.

    `tokens`: the usable hit; `seen_tokens`: as deep as its blocks are, or until lately were, in the cache.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def seen_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Keep the state after exactly `tokens` tokens."""

    tokens: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """`head_blocks_min`: a shorter head is recomputed faster than fetched.

    `interval_tokens`: 0 takes no kind 4. Of a long stretch, a quarter of the interval or more, one more state is kept
    a sixteenth of it before the end: what differs between two prompts about the same thing is often the last message.
    """

    head_blocks_min: int = 4
    branch_blocks_min: int = 1  # how far past the deepest snapshot a shared prefix must go
    interval_tokens: int = 32_768
    writeback: Writeback = "adaptive"


DEFAULTS: Final = PlannerSettings()


def plan(
    hints: Iterable[tuple[int, int]],
    prompt_tokens: int,
    block_tokens: int,
    match: Known,
    settings: PlannerSettings = DEFAULTS,
) -> tuple[Planned, ...]:
    """Where prefill keeps the state, ascending; one kind a boundary, the lowest that asks for it.

    `hints`: (offset in tokens, kind 0 or 1). Only a boundary that the computation passes can be kept, so none lies
    at or below the hit; the last token must be computed to have logits, so none lies above prompt_tokens - 1.
    """
    last = (prompt_tokens - 1) // block_tokens * block_tokens
    wanted: list[tuple[int, int]] = []
    for offset, kind in hints:
        boundary = min(offset // block_tokens * block_tokens, last)
        if kind == MESSAGE or boundary >= settings.head_blocks_min * block_tokens:
            wanted.append((boundary, kind))
    seen = min(match.seen_tokens // block_tokens * block_tokens, last)
    if seen - match.tokens >= settings.branch_blocks_min * block_tokens:
        wanted.append((seen, BRANCH))
    if settings.interval_tokens:
        step = max(block_tokens, settings.interval_tokens // block_tokens * block_tokens)
        # The grid is the prompt's own positions, so that prompts with the same beginning keep the same states.
        first = match.tokens // step * step + step
        wanted += [(boundary, INTERVAL) for boundary in range(first, last + 1, step)]
        short = max(block_tokens, settings.interval_tokens // 16 // block_tokens * block_tokens)
        if 4 * (last - match.tokens) >= settings.interval_tokens and last - match.tokens > short:
            wanted.append((last - short, INTERVAL))
    chosen: dict[int, int] = {}
    for boundary, kind in wanted:
        if boundary > match.tokens:
            chosen[boundary] = min(kind, chosen.get(boundary, kind))
    return tuple(Planned(tokens=boundary, kind=chosen[boundary]) for boundary in sorted(chosen))


def wants_turn(*, one_shot: bool, settings: PlannerSettings = DEFAULTS) -> bool:
    """Whether decode keeps the turn (kind 2): no prompt goes on from one that answers one-shot messages."""
    return settings.writeback != "off" and not one_shot
