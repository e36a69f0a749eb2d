"""Generated tokens to what the client reads: text deltas, stop strings, counts. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.output import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, tool_call_id
from model.parser import OutputParser
from model.tokenizer import StreamDecoder, Tokenizer
from router.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One generated token; `logprob` is None where none was asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Piece:
    """What one step adds for the client, channels in the order of generation."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallStart | ToolCallArguments] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.tokens)


class Output(Protocol):
    """A generation being read. `stopped`: a stop string has ended it; what follows is not the client's."""

    @property
    def stopped(self) -> bool: ...

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def called_tools(self) -> bool: ...

    def push(self, ids: Sequence[int]) -> Piece: ...

    def finish(self) -> Piece:
        """What was held back, when generation has ended by itself."""
        ...

    def message(self) -> Mapping[str, Any] | None:
        """All that was said, as an assistant message; None where it is none. Called once, at the end."""
        ...


class TextOutput:
    """A plain completion: text without special tokens."""

    called_tools = False
    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    def push(self, ids: Sequence[int]) -> Piece:
        ordinary = [i for i in ids if not self._tokenizer.is_special(i)]
        return Piece(content=self._stops.push(self._decoder.push(ordinary)))

    def finish(self) -> Piece:
        text = self._stops.push(self._decoder.flush())
        return Piece(content=text + ("" if self.stopped else self._stops.flush()))

    def message(self) -> None:
        return None


class ChatOutput:
    """A chat turn: reasoning, content and tool calls. Stop strings are looked for in the content alone.

    They are the answer's end marks: one that turns up while the model is still thinking must not leave the client
    without an answer.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, thinking: bool, request_id: str) -> None:
        self._parser = OutputParser(
            tokenizer, thinking=thinking, call_id=lambda index: tool_call_id(request_id, index)
        )
        self._stops = StopMatcher(stops)
        self._markers = (tokenizer.open, tokenizer.close, tokenizer.end_of_msg)
        self._thinking = thinking
        self._said: list[str] = []  # content that has left: less than was generated where a stop string cut it
        self.called_tools = False
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops.matched

    def push(self, ids: Sequence[int]) -> Piece:
        if self._thinking:
            self._count_reasoning(ids)
        piece = Piece()
        for delta in self._parser.push(ids):
            if self.stopped:
                break
            if isinstance(delta, ContentDelta):
                piece.content += self._stops.push(delta.text)
            elif isinstance(delta, ReasoningDelta):
                piece.reasoning += delta.text
            else:
                self.called_tools = True
                piece.content += self._stops.flush()  # the content is over, so nothing can complete a stop string
                piece.calls.append(delta)
        self._said.append(piece.content)
        return piece

    def finish(self) -> Piece:
        return Piece(content="" if self.stopped else self._stops.flush())

    def message(self) -> Mapping[str, Any]:
        message = self._parser.finish().message()
        return {**message, "content": "".join(self._said), "tool_calls": None} if self.stopped else message

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        """Reasoning is what comes before the first marker."""
        for token_id in ids:
            if token_id in self._markers:
                self._thinking = False
                return
            self.reasoning_tokens += 1
