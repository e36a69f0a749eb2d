"""Request traces in Mooncake's form: read, checked, or made.

One JSON object a line: `timestamp` (ms from the start), `input_length`, `output_length` (tokens) and `hash_ids`, one
for each block of the prompt, the last one perhaps a partial block. Equal ids stand for equal blocks at equal places.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from moonrelay.errors import SettingsError

KINDS = {"timestamp": "an integer", "input_length": "an integer", "output_length": "an integer", "hash_ids": "a list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`blocks`: numbers of the prompt's full blocks; a number names a block and everything before it."""

    time_ms: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class Chains:
    """Numbers for chains of ids, so that an id that stands behind two different ones is two blocks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ids: Sequence[int]) -> tuple[int, ...]:
        found, parent = [], -1
        for one in ids:
            parent = self._numbers.setdefault((parent, one), len(self._numbers))
            found.append(parent)
        return tuple(found)


def read(path: Path, block_tokens: int) -> list[Request]:
    """The file's requests, in order. Raises: SettingsError naming the line and what was expected there."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    chains, requests, before_ms = Chains(), [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _request(line, f"{path}, line {number}", block_tokens, chains)
        if request.time_ms < before_ms:
            raise SettingsError(
                f"{path}, line {number}: timestamp: expected at least {before_ms}, the one before; found "
                f"{request.time_ms}"
            )
        before_ms = request.time_ms
        requests.append(request)
    if not requests:
        raise SettingsError(f"{path}: expected at least one request, found none")
    return requests


def _request(line: bytes, where: str, block_tokens: int, chains: Chains) -> Request:
    try:
        found: Any = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingsError(f"{where}: expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{where}: expected a JSON object, found {type(found).__name__}")
    for name in KINDS:
        if name not in found:
            raise SettingsError(f"{where}: {name}: expected {KINDS[name]}, found none")
    time_ms, prompt_tokens, output_tokens = (
        _integer(found[name], least, f"{where}: {name}")
        for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0))
    )
    ids = found["hash_ids"]
    if not isinstance(ids, list):
        raise SettingsError(f"{where}: hash_ids: expected a list of integers, found {type(ids).__name__}")
    ids = [_integer(one, 0, f"{where}: hash_ids") for one in ids]
    needed = -(-prompt_tokens // block_tokens)
    if len(ids) != needed:
        raise SettingsError(
            f"{where}: hash_ids: expected {needed} for {prompt_tokens} tokens in blocks of {block_tokens}, "
            f"found {len(ids)}"
        )
    blocks = chains.number(ids[: prompt_tokens // block_tokens])
    return Request(time_ms=time_ms, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=blocks)


def _integer(value: object, least: int, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{where}: expected an integer of at least {least}, found {value!r}")
    return value


def tool_loops(seed: int, block_tokens: int = 512, num_requests: int = 23_608) -> list[Request]:
    """A trace of agents: few hot system prompts, loops of tool calls that come seconds apart, and one-off requests.

    Statistics aimed at: those published for Mooncake's tool-and-agent trace: 23,608 requests, prompts of 8,596
    tokens in the mean, 182 generated, 59 % of the blocks seen before, system prompts of about 12 blocks.
    """
    chance, chains = Random(seed), Chains()
    fresh = iter(range(1, 1 << 60))
    heads = [[next(fresh) for _ in range(12)] for _ in range(7)]
    found: list[tuple[int, int, Request]] = []
    start_s = 0.0
    while len(found) < num_requests:
        start_s += chance.expovariate(1.9)
        for request in _session(chance, start_s, heads, fresh, block_tokens, chains):
            found.append((request.time_ms, len(found), request))
    return [request for _, _, request in heapq.nsmallest(num_requests, found)]


def _session(
    chance: Random, at_s: float, heads: Sequence[list[int]], fresh: Iterator[int], block_tokens: int, chains: Chains
) -> Iterator[Request]:
    """One agent's requests: each prompt is the one before, what was generated, and a tool's answer."""
    ids: list[int] = []
    if chance.random() < 0.45:
        ids = list(heads[min(int(chance.expovariate(0.8)), len(heads) - 1)])
    tokens = len(ids) * block_tokens + 40 + int(chance.lognormvariate(6.2, 1.0))
    if chance.random() < 0.6:
        tokens += int(chance.lognormvariate(8.5, 0.8))  # a document
    for _ in range(1 + int(chance.expovariate(0.8))):
        ids += [next(fresh) for _ in range(tokens // block_tokens - len(ids))]
        output = 10 + int(chance.lognormvariate(4.8, 0.8))
        yield Request(
            time_ms=int(1000 * at_s),
            prompt_tokens=tokens,
            output_tokens=output,
            blocks=chains.number(ids[: tokens // block_tokens]),
        )
        tokens += output + chance.randint(100, 1_200)
        if tokens > 120_000:
            return
        at_s += output / 30 + (
            chance.lognormvariate(1.8, 0.9) if chance.random() < 0.6 else chance.expovariate(1 / 150)
        )
