"""An OpenAI chat request to K3's prompt, as segments to be tokenised one by one. Imports no torch.

Order: tool declarations, thinking effort, the conversation, one-shot system messages (tool choice, response
format), the generation prefix. Which text may become special ids is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from model import chat
from model.chat import Call, Object, RenderError, refuse
from model.xtml import IMAGE_PLACEHOLDER, Segment, SegmentWriter, value_type

__all__ = ["CheckpointHint", "Prompt", "RenderError", "Rendered", "encode", "render", "render_reply"]

EFFORTS: Final = ("low", "medium", "high", "max")
DEFAULT_EFFORT: Final = "max"
ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_EFFORT: Final = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS: Final = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS: Final = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_TOOL_CHOICE: Final = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT: Final = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA: Final = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

HintKind = Literal[0, 1]


@dataclass(frozen=True, slots=True)
class CheckpointHint:
    """Where a state snapshot would be reused. `offset` counts segments in `Rendered`, tokens in `Prompt`.

    Kind 0: the end of the leading system and tool declarations. Kind 1: the end of the last message of the
    conversation, before one-shot messages, which vanish next turn, and the generation prefix.
    """

    offset: int
    kind: HintKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt before tokenisation.

    `thinking`: generation starts inside the think channel (else inside the response);
    `one_shot`: one-shot system messages stand before the generation, so the turn's end is no reusable prefix;
    `turns`: [start, end) in segments of what the model generated of each assistant message, end mark included;
    `generation`: where the generation prefix begins.
    """

    segments: tuple[Segment, ...]
    hints: tuple[CheckpointHint, ...]
    thinking: bool
    one_shot: bool
    turns: tuple[tuple[int, int], ...] = ()
    generation: int = 0

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenised prompt. `assistant_spans`: ascending [start, end) of tokens that an assistant produces;
    `starts`: where each segment begins, in tokens, and at the end the number of tokens.
    """

    ids: list[int]
    checkpoint_hints: tuple[CheckpointHint, ...]
    assistant_spans: tuple[tuple[int, int], ...]
    starts: tuple[int, ...] = field(default=(), compare=False)


class Encoder(Protocol):
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...


Given = Mapping[int, tuple[Sequence[int], int]]


def encode(rendered: Rendered, tokenizer: Encoder, given: Given | None = None) -> Prompt:
    """Tokenise a rendered prompt, its hints moved from segments to tokens.

    `given`: at a segment the ids of it and its followers, and the segment that comes after them. No hint may lie
    between the two.
    """
    ids: list[int] = []
    starts: list[int] = []
    spans: list[tuple[int, int]] = []
    given = given or {}
    for index, segment in enumerate(rendered.segments):
        start = len(ids)
        if index < len(starts):
            continue  # its ids were given
        if index in given:
            known, after = given[index]
            ids += known
            starts += [start] * (after - index)
        else:
            starts.append(start)
            ids += tokenizer.encode(segment.text, allow_special=segment.allow_special)
        if segment.is_assistant:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, len(ids)))
    starts.append(len(ids))
    hints = tuple(CheckpointHint(starts[hint.offset], hint.kind) for hint in rendered.hints)
    return Prompt(ids=ids, checkpoint_hints=hints, assistant_spans=tuple(spans), starts=tuple(starts))


def render(
    request: Object, *, image_prompts: Sequence[str] | None = None, image_placeholders: bool = False
) -> Rendered:
    """Render a chat request: `messages`, and optionally `tools`, `thinking` (default true), `thinking_effort`
    or its other name `reasoning_effort` (absent: max; `thinking_effort` null: no effort message),
    `tool_choice`, `response_format`, `add_generation_prompt` (default true). Other fields are not the
    renderer's and are not read.

    A system message with `tools` extends the tool set and consists of nothing else: its content is not
    rendered. Reasoning that is only whitespace is rendered as none.

    Images are refused, unless `image_prompts` gives each image's expansion (it also replaces placeholders
    written in text, in order), or `image_placeholders` asks for the placeholder's text in each image's place.
    Neither is read from the request: what they hold may become special ids.

    Raises: RenderError with the field's name.
    """
    thinking = chat.flag(request, "thinking", True)
    page = _Page(image_prompts, image_placeholders)
    page.declare(chat.tool_declarations(request.get("tools"), "tools"), _TOOLS)
    effort = _effort(request)
    if thinking and effort is not None:
        page.notice("thinking-effort", _EFFORT.format(effort))

    messages = _messages(request)
    conversation = _Conversation(page, thinking)
    lead_end = len(page.segments)
    leading = True
    for message, param in chat.in_call_order(messages):
        leading = leading and message["role"] in ("system", "developer")
        conversation.write(message, param)
        lead_end = len(page.segments) if leading else lead_end
    last_end = len(page.segments)

    one_shot = _one_shot_notices(request)
    for kind, body in one_shot:
        page.notice(kind, body)
    generation = len(page.segments)
    if chat.flag(request, "add_generation_prompt", True):
        page.open("message", [("role", "assistant")])
        page.open("think" if thinking else "response")
    page.check_images_used()
    hints = [CheckpointHint(lead_end, 0)] if lead_end else []
    return Rendered(
        segments=tuple(page.segments),
        hints=(*hints, CheckpointHint(last_end, 1)),
        thinking=thinking,
        one_shot=bool(one_shot),
        turns=tuple(conversation.turns),
        generation=generation,
    )


def render_reply(message: Object, *, thinking: bool) -> tuple[Segment, ...]:
    """What the model generated of an assistant message, as a later request's conversation will hold it.

    Raises: RenderError.
    """
    page = _Page(None, False)
    conversation = _Conversation(page, thinking)
    conversation.write({**message, "role": "assistant"}, "reply")
    (start, end) = conversation.turns[0]
    return tuple(page.segments[start:end])


def _effort(request: Object) -> str | None:
    given = [key for key in ("thinking_effort", "reasoning_effort") if request.get(key) is not None]
    for key in given:
        if request[key] not in EFFORTS:
            refuse(key, "one of " + ", ".join(EFFORTS), request[key])
    if len({request[key] for key in given}) > 1:
        message = "reasoning_effort: another name of thinking_effort, expected the same value"
        raise RenderError(message, param="reasoning_effort")
    if given:
        return str(request[given[0]])
    return None if "thinking_effort" in request else DEFAULT_EFFORT


def _messages(request: Object) -> list[Object]:
    given = chat.as_list(request.get("messages"), "messages")
    if not given:
        raise RenderError("messages: expected at least one message, found none", param="messages")
    messages = [chat.as_object(item, f"messages[{index}]") for index, item in enumerate(given)]
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            refuse(f"messages[{index}].role", "one of " + ", ".join(ROLES), message.get("role"))
    return messages


def _one_shot_notices(request: Object) -> list[tuple[str, str]]:
    """(type, body) of the system messages that hold for the next answer only."""
    notices = []
    choice = request.get("tool_choice")
    if isinstance(choice, str) and choice in _TOOL_CHOICE:
        body = f"The system is invoked with `tool_choice={choice}`.\n{_TOOL_CHOICE[choice]}"
        notices.append(("tool-choice", body))
    elif choice not in (None, "auto"):
        refuse("tool_choice", "`auto`, `none` or `required`", choice)
    wanted = request.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind == "json_object":
        notices.append(("response-format", _RESPONSE_FORMAT.format(kind)))
    elif kind == "json_schema":
        schema = chat.sorted_json(_schema(wanted), "response_format.json_schema")
        notices.append(("response-format", _RESPONSE_FORMAT.format(kind) + _SCHEMA.format(schema)))
    elif kind != "text" and wanted is not None:
        refuse("response_format.type", "`text`, `json_object` or `json_schema`", kind)
    return notices


def _schema(wanted: Any) -> Object:
    """The schema itself: at `json_schema.schema`, where some clients put it a level off, or bare."""
    param = "response_format.json_schema"
    outer = chat.as_object(wanted.get("json_schema") if isinstance(wanted, Mapping) else None, param)
    for key in ("schema", "json_schema"):
        if key in outer:
            return chat.as_object(outer[key], f"{param}.{key}")
    return outer


class _Page(SegmentWriter):
    """A segment writer that knows system notices and what to do with images."""

    def __init__(self, image_prompts: Sequence[str] | None, image_placeholders: bool) -> None:
        super().__init__()
        self._image_prompts = image_prompts
        self._image_placeholders = image_placeholders
        self._images_used = 0

    def notice(self, kind: str, body: str) -> None:
        self.open("message", [("role", "system"), ("type", kind)])
        self.text(body)
        self.end_message()

    def declare(self, declarations: str | None, body: str) -> None:
        if declarations is not None:
            self.notice("tool-declare", body.format(declarations))

    def user_text(self, text: str, param: str) -> None:
        """Text from outside, in which placeholders stand for images only when expansions were given."""
        if self._image_prompts is None:
            self.text(text)
            return
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        self.text(first)
        for piece in rest:
            self.image(param)
            self.text(piece)

    def image(self, param: str) -> None:
        if self._image_prompts is not None:
            if self._images_used == len(self._image_prompts):
                raise RenderError(f"{param}: more images than were given", param=param)
            self.control(self._image_prompts[self._images_used])
            self._images_used += 1
        elif self._image_placeholders:
            self.control(IMAGE_PLACEHOLDER)
        else:
            raise RenderError(f"{param}: images are not supported; expected text parts only", param=param)

    def content(self, content: Any, param: str) -> None:
        for text, where in chat.parts(content, param):
            if text is None:
                self.image(where)
            else:
                self.user_text(text, where)

    def check_images_used(self) -> None:
        if self._image_prompts is not None and self._images_used != len(self._image_prompts):
            count = len(self._image_prompts)
            raise RenderError(f"messages: {count} images given, {self._images_used} used", param="messages")


class _Conversation:
    """Writes messages in order; remembers the last assistant's calls, which tool results number and name.

    `turns`: [start, end) of each assistant message behind the generation prefix.
    """

    def __init__(self, page: _Page, thinking: bool) -> None:
        self.turns: list[tuple[int, int]] = []
        self._page = page
        self._thinking = thinking
        self._calls: tuple[Call, ...] = ()
        self._num_results = 0

    def write(self, message: Object, param: str) -> None:
        role = message["role"]
        if role == "assistant":
            self._assistant(message, param)
        elif role == "tool":
            self._tool_result(message, param)
        elif role != "user" and message.get("tools"):
            self._page.declare(chat.tool_declarations(message["tools"], f"{param}.tools"), _MORE_TOOLS)
        else:
            self._page.open("message", _named("user" if role == "user" else "system", message, param))
            self._page.content(message.get("content"), f"{param}.content")
            self._page.end_message()

    def _assistant(self, message: Object, param: str) -> None:
        page = self._page
        self._calls = chat.tool_calls(message, param)
        self._num_results = 0
        page.open("message", _named("assistant", message, param))
        page.is_assistant = True
        if self._thinking:
            key = "reasoning_content" if message.get("reasoning_content") else "reasoning"
            reasoning = chat.optional_text(message, key, param)
            page.open("think")
            start = len(page.segments)
            if reasoning.strip():
                page.user_text(reasoning, f"{param}.{key}")
            page.close("think")
        page.open("response")
        if not self._thinking:
            start = len(page.segments)
        if message.get("content") is not None:
            page.content(message["content"], f"{param}.content")
        page.close("response")
        if self._calls:
            page.open("tools")
            for index, call in enumerate(self._calls, start=1):
                self._call(call, index, f"{param}.tool_calls[{index - 1}].function.arguments")
            page.close("tools")
        page.end_message()
        page.is_assistant = False
        self.turns.append((start, len(page.segments)))

    def _call(self, call: Call, index: int, param: str) -> None:
        page = self._page
        page.open("call", [("tool", call.name), ("index", str(index))])
        if call.unparsed is not None:
            page.open("json", [("type", "object")])
            page.user_text(call.unparsed, param)
            page.close("json")
        for key, text, value in call.arguments:
            page.open("argument", [("key", key), ("type", value_type(value))])
            page.user_text(text, param)
            page.close("argument")
        page.close("call")

    def _tool_result(self, message: Object, param: str) -> None:
        page = self._page
        self._num_results += 1
        name = message.get("tool", message.get("name"))
        if name is None and self._num_results <= len(self._calls):
            name = self._calls[self._num_results - 1].name
        if name is None:
            expected = "the id of a call of the assistant message before it"
            refuse(f"{param}.tool_call_id", expected, message.get("tool_call_id"))
        name = chat.as_name(name, f"{param}.name")
        page.open("message", [("role", "tool"), ("tool", name), ("index", str(self._num_results))])
        if message.get("content") is not None:
            page.content(message["content"], f"{param}.content")
        page.end_message()


def _named(role: str, message: Object, param: str) -> list[tuple[str, str]]:
    name = chat.optional_text(message, "name", param)
    return [("role", role), ("name", name)] if name else [("role", role)]
