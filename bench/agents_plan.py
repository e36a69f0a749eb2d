"""The agent sessions of the bench: what every turn says, decided by a seed alone.

Text is made of a fixed list of words, so that it is the same everywhere; lengths are exact in tokens of the model's
own tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHARED_TOKENS = 3_000  # system message and tool declarations, common to all sessions
GENERATED = (100, 400)
RESULT = (200, 1_500)
NUM_TOOLS = 12
WORDS = re.findall(
    r"\w+",
    """
    return value error path index buffer token cache block state update commit branch merge test assert import class
    async await handle stream request response header body json parse write read open close lock queue worker thread
    config flag default option verbose output input result expected found missing line column file folder module
    package version release build install check format lint type hint list dict tuple string bytes number float
    the of and to in is that for it with as on at by from this be are or an not have but when which
    """,
)

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True, slots=True)
class Turn:
    """The model says 100 to `generated_max` tokens, in as many messages as it takes; then a tool answers."""

    generated_max: int
    result: str


@dataclass(frozen=True, slots=True)
class Session:
    task: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    system: str
    tools: tuple[dict[str, Any], ...]
    sessions: tuple[Session, ...]


def text(draw: random.Random, tokens: int, count: Count) -> str:
    """Lines of words, as many as make `tokens` tokens or one word's more."""
    words: list[str] = []
    found = 0
    while found < tokens:
        for _ in range(max(1, (tokens - found) // 2)):
            words.append(draw.choice(WORDS) + ("\n" if draw.random() < 0.12 else " "))
        found = count("".join(words))
    while count("".join(words[:-1])) >= tokens:
        words.pop()
    return "".join(words)


def tool(draw: random.Random, index: int) -> dict[str, Any]:
    names = draw.sample([word for word in WORDS if len(word) > 4], 3)
    described = {name: {"type": "string", "description": " ".join(draw.choices(WORDS, k=14))} for name in names}
    about = " ".join(draw.choices(WORDS, k=24))
    parameters = {"type": "object", "properties": described, "required": names[:1]}
    return {"type": "function", "function": {"name": f"tool_{index}", "description": about, "parameters": parameters}}


def plan(num_sessions: int, num_turns: int, count: Count, count_lead: Callable[[str, Any], int], seed: int) -> Plan:
    """`count_lead`: tokens that a system text and tools take in a rendered prompt."""
    draw = random.Random(seed)
    tools = tuple(tool(draw, index) for index in range(NUM_TOOLS))
    system = text(draw, SHARED_TOKENS - count_lead("", tools), count)
    sessions = []
    for _ in range(num_sessions):
        turns = tuple(
            Turn(draw.randint(*GENERATED), text(draw, draw.randint(*RESULT), count)) for _ in range(num_turns)
        )
        sessions.append(Session(text(draw, draw.randint(20, 80), count), turns))
    return Plan(system, tools, tuple(sessions))
