"""What no policy can exceed on a trace: everything kept for ever, and the best that foresight could do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sim.replay_cores import Sizes
from sim.traces import Request


def ideal_tokens(requests: Sequence[Request], block_tokens: int) -> int:
    """Hit tokens of an unlimited cache with a snapshot at every boundary."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        total += _known(request, seen, block_tokens) * block_tokens
        seen.update(request.blocks)
    return total


def foresight_tokens(requests: Sequence[Request], sizes: Sizes, budget_bytes: int) -> float:
    """An upper bound of what an offline policy can hit: a fractional knapsack of bytes times seconds.

    A hit of k blocks needs each of them kept since a prompt last had it, and a snapshot at k for at least as long as
    the last of them. Every such stretch of time ends with this request and so belongs to it alone, which lets the
    costs add up; the budget is all the bytes for the whole trace. For each request the depths worth their cost are
    the upper hull of tokens over cost; the steepest pieces of all requests are taken until the budget is used up.
    """
    last_ms: dict[int, int] = {}
    pieces: list[tuple[float, float, float]] = []  # (tokens per byte-ms, tokens, byte-ms)
    free = 0.0
    for request in requests:
        hull = [(0.0, 0.0)]  # (cost, tokens)
        cost = 0.0
        for index, block in enumerate(request.blocks[: (request.prompt_tokens - 1) // sizes.block_tokens]):
            if block not in last_ms:
                break
            gap_ms = request.time_ms - last_ms[block]
            cost += gap_ms * sizes.block_bytes
            point = (cost + gap_ms * sizes.snapshot_bytes, float((index + 1) * sizes.block_tokens))
            while len(hull) > 1 and _below(hull[-2], hull[-1], point):
                hull.pop()
            if point[0] > hull[-1][0]:
                hull.append(point)
            else:
                hull[-1] = (hull[-1][0], point[1])
        for (cost_a, tokens_a), (cost_b, tokens_b) in pairwise(hull):
            pieces.append(((tokens_b - tokens_a) / (cost_b - cost_a), tokens_b - tokens_a, cost_b - cost_a))
        free += hull[0][1]
        last_ms.update(dict.fromkeys(request.blocks, request.time_ms))
    left = float(budget_bytes) * max(1, requests[-1].time_ms - requests[0].time_ms)
    total = free
    for density, tokens, cost in sorted(pieces, reverse=True):
        if cost > left:
            return total + density * left
        total, left = total + tokens, left - cost
    return total


def _below(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or under the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def _known(request: Request, seen: set[int], block_tokens: int) -> int:
    """How many of the prompt's usable blocks were seen before."""
    usable = request.blocks[: (request.prompt_tokens - 1) // block_tokens]
    return next((i for i, block in enumerate(usable) if block not in seen), len(usable))
