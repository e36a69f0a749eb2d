"""Generated ids to reasoning, content and tool calls, as they come. Imports no torch.

Structure is special ids, so a marker written out as text is text. Between `<|open|>` or `<|close|>` and
`<|sep|>` nothing is content; therefore no part of a marker ever reaches a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from model.output import (
    ContentDelta,
    Delta,
    ParsedOutput,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from model.tokenizer import StreamDecoder, Tokenizer
from model.xtml import read_header, value_type


def parse_output(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    call_id: Callable[[int], str],
    stopped: bool = False,
) -> ParsedOutput:
    """Parse a whole output; see `OutputParser`."""
    parser = OutputParser(tokenizer, thinking=thinking, call_id=call_id)
    parser.push(ids)
    return parser.finish(stopped=stopped)


_CHANNELS: Final = ("think", "response", "tools")
_CHILDREN: Final = {
    "message": _CHANNELS,
    "tools": ("call",),
    "call": ("argument", "json"),
}
_ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "think": (),
    "response": (),
    "tools": (),
    "call": ("tool", "index"),
    "argument": ("key", "type"),
    "json": ("type",),
}
_AFTER: Final = {"think": "response", "response": "tools"}


@dataclass(slots=True)
class _Element:
    """An open element. What stands in an ignored one goes nowhere; its problem is already recorded."""

    tag: str
    ignored: bool = False


@dataclass(slots=True)
class _Call:
    """A call being generated. `value` holds an argument that is not a string until it is whole."""

    index: int
    id: str
    name: str
    fragments: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    has_json: bool = False
    key: str = ""
    type: str = ""
    value: list[str] = field(default_factory=list)


class OutputParser:
    """Reads one generation, which began inside `think` (thinking mode) or `response` (instruct mode).

    Where the output departs from the format, the first departure is recorded and reading goes on with what is
    still clear: a channel that opens ends those before it; unknown elements and text outside channels are
    dropped. An output that is `ok` renders back to the generated text, except reasoning of whitespace only,
    bytes that are no UTF-8, and arguments whose JSON is spelled otherwise than `json.dumps` does.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, call_id: Callable[[int], str]) -> None:
        """`call_id` names the call with a given index; see `tool_call_id`."""
        self._tokenizer = tokenizer
        self._call_id = call_id
        self._channel = "think" if thinking else "response"
        self._stack = [_Element("message"), _Element(self._channel)]
        self._decoder = StreamDecoder(tokenizer)
        self._header: list[int] | None = None  # ids since <|open|> or <|close|>; None outside a marker
        self._closing = False
        self._reasoning: list[str] | None = [] if thinking else None
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._num_tokens = 0
        self._ended = False
        self._problem: str | None = None
        self._deltas: list[Delta] = []

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """Read more ids; what they add for the client, neighbours of one kind joined."""
        run: list[int] = []  # text is decoded a run at a time, which keeps whole outputs linear
        for token_id in ids:
            special = self._tokenizer.is_special(token_id)
            if not (special or self._ended or self._header is not None):
                run.append(token_id)
                continue
            self._plain(run)
            run = []
            if self._ended:
                self._note("more follows <|end_of_msg|>")
            elif special:
                self._special(token_id)
            elif self._header is not None:
                self._header.append(token_id)
            self._num_tokens += 1
        self._plain(run)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, *, stopped: bool = False) -> ParsedOutput:
        """The result. `stopped`: generation ended on the stop id, which was not pushed.

        Adds nothing for the stream: a partial marker, character or argument of a cut output is left out.
        """
        if stopped and not self._ended:
            self._end_message()
        if not self._ended:
            inside = f"inside {self._stack[-1].tag}" if self._stack else "after its message"
            self._note(f"the output ends {inside}, without <|end_of_msg|>")
        return ParsedOutput(
            reasoning_content=None if self._reasoning is None else "".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments="".join(call.fragments)) for call in self._calls
            ),
            ended=self._ended,
            problem=self._problem,
        )

    def _note(self, problem: str) -> None:
        if self._problem is None:
            self._problem = f"token {self._num_tokens}: {problem}"

    def _emit(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        match last, delta:
            case ReasoningDelta(before), ReasoningDelta(text):
                self._deltas[-1] = ReasoningDelta(before + text)
            case ContentDelta(before), ContentDelta(text):
                self._deltas[-1] = ContentDelta(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(same, text) if index == same:
                self._deltas[-1] = ToolCallArguments(index, before + text)
            case _:
                self._deltas.append(delta)

    # Tokens

    def _plain(self, ids: list[int]) -> None:
        self._text(self._decoder.push(ids))
        self._num_tokens += len(ids)

    def _special(self, token_id: int) -> None:
        tokenizer = self._tokenizer
        if token_id in (tokenizer.open, tokenizer.close):
            if self._header is not None:
                self._note("a marker begins inside a marker")
            self._text(self._decoder.flush())
            self._header = []
            self._closing = token_id == tokenizer.close
        elif token_id == tokenizer.end_of_msg:
            self._text(self._decoder.flush())
            self._end_message()
        elif token_id == tokenizer.sep and self._header is not None:
            header, self._header = tokenizer.decode(self._header), None
            if self._closing:
                self._close(header)
            else:
                self._open(header)
        else:
            self._note(f"{tokenizer.decode((token_id,))} stands in text")

    def _text(self, text: str) -> None:
        if not text:
            return
        element = self._stack[-1] if self._stack else _Element("no message")
        if element.ignored:
            return
        if element.tag == "think":
            if self._reasoning is None:
                self._reasoning = []
            self._reasoning.append(text)
            self._emit(ReasoningDelta(text))
        elif element.tag == "response":
            self._content.append(text)
            self._emit(ContentDelta(text))
        elif element.tag == "argument":
            self._argument_text(text)
        elif element.tag == "json":
            self._fragment(text)
        else:
            self._note(f"text outside a channel, in {element.tag}")

    # Elements

    def _open(self, header: str) -> None:
        written = read_header(header)
        if written is None:
            self._note(f"malformed marker {header!r}")
        tag, attributes = written or (header.split(" ", 1)[0], [])
        parent = self._stack[-1] if self._stack else _Element("no message", ignored=True)
        allowed = not parent.ignored and tag in _CHILDREN.get(parent.tag, ())
        if not allowed:
            self._note(f"{tag!r} opens inside {parent.tag}")
            if tag in _CHANNELS and self._stack and not self._stack[0].ignored:
                self._close_down_to(1)
                allowed = True
        if allowed and tuple(key for key, _ in attributes) != _ATTRIBUTES[tag]:
            self._note(f"malformed marker {header!r}")
            allowed = tag in _CHANNELS
        self._stack.append(_Element(tag, ignored=not (allowed and self._begin(tag, dict(attributes)))))

    def _begin(self, tag: str, attributes: dict[str, str]) -> bool:
        """Take notice of an element that opens; False if what is in it must be ignored."""
        if tag in _CHANNELS:
            if _AFTER.get(self._channel) != tag:
                self._note(f"{tag} opens after {self._channel}")
            self._channel = tag
            return True
        if tag == "call":
            return self._begin_call(attributes["tool"], attributes["index"])
        if tag == "argument":
            return self._begin_argument(attributes["key"], attributes["type"])
        call = self._calls[-1]
        self._note("arguments come as one json block, not as arguments")
        if call.keys or call.has_json:
            return False
        call.has_json = True
        return True

    def _close(self, header: str) -> None:
        depth = next((i for i in reversed(range(len(self._stack))) if self._stack[i].tag == header), None)
        if depth is None:
            self._note(f"{header!r} closes but is not open")
            return
        if depth != len(self._stack) - 1:
            self._note(f"{header} closes before {self._stack[-1].tag}")
        self._close_down_to(depth)

    def _close_down_to(self, depth: int) -> None:
        while len(self._stack) > depth:
            element = self._stack.pop()
            if element.ignored:
                continue
            if element.tag == "argument":
                self._end_argument()
            elif element.tag == "call":
                self._end_call()
            elif element.tag == "tools" and not self._calls:
                self._note("tools holds no call")
            elif element.tag == "message" and self._channel == "think":
                self._note("the message has no response")

    def _end_message(self) -> None:
        if self._header is not None:
            self._note("the message ends inside a marker")
        elif self._stack:
            self._note(f"the message ends before {self._stack[-1].tag} closes")
        self._close_down_to(0)
        self._ended = True

    # Tool calls

    def _begin_call(self, name: str, number: str) -> bool:
        index = len(self._calls)
        if number != str(index + 1):
            self._note(f"call {number!r} follows call {index}")
        if not name:
            self._note("a call names no tool")
            return False
        call = _Call(index, self._call_id(index), name)
        self._calls.append(call)
        self._emit(ToolCallStart(index, call.id, name))
        return True

    def _end_call(self) -> None:
        call = self._calls[-1]
        if not call.has_json:
            self._fragment("}" if call.keys else "{}")

    def _begin_argument(self, key: str, kind: str) -> bool:
        call = self._calls[-1]
        if key in call.keys or call.has_json:
            self._note(f"argument {key!r} is given twice")
            return False
        call.key, call.type, call.value = key, kind, []
        if kind == "string":
            self._argument_key()
            self._fragment('"')
        return True

    def _argument_key(self) -> None:
        call = self._calls[-1]
        self._fragment((", " if call.keys else "{") + _json(call.key) + ": ")
        call.keys.add(call.key)

    def _argument_text(self, text: str) -> None:
        call = self._calls[-1]
        if call.type == "string":
            self._fragment(_json(text)[1:-1])
        else:
            call.value.append(text)

    def _end_argument(self) -> None:
        call = self._calls[-1]
        if call.type == "string":
            self._fragment('"')
            return
        text = "".join(call.value)
        try:
            found = value_type(json.loads(text, parse_constant=_refuse_constant))
        except (ValueError, RecursionError):
            self._note(f"argument {call.key!r} is not JSON")
            text = _json(text)
        else:
            if found != call.type:
                self._note(f"argument {call.key!r} of type {call.type!r} holds a {found}")
        self._argument_key()
        self._fragment(text)

    def _fragment(self, text: str) -> None:
        call = self._calls[-1]
        call.fragments.append(text)
        self._emit(ToolCallArguments(call.index, text))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
