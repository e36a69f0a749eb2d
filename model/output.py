"""What a generation says, whole and as stream deltas. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts from 0 in the order of generation."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: all fragments of one call, joined, are a JSON object once it is closed."""

    index: int
    fragment: str


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments`: JSON text; incomplete where the output was cut off inside the call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOutput:
    """What the model said: exactly what all deltas add up to.

    `reasoning_content`: None in instruct mode, which has no such channel;
    `ended`: the model ended its message itself; `problem`: the first departure from the format, or None.
    """

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    ended: bool
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.ended and self.problem is None

    def message(self) -> dict[str, Any]:
        """The assistant message in OpenAI form, as a client sends it back with the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def tool_call_id(request_id: str, index: int) -> str:
    """The same request always names its calls the same, so a recovered stream goes on with equal ids."""
    return "call_" + hashlib.blake2b(f"{request_id}:{index}".encode(), digest_size=12).hexdigest()
