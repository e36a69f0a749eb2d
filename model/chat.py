"""Reading an OpenAI chat request: each field checked, the wrong ones named. Imports no torch.

Every reader takes the field's name as the client would write it (`messages[2].content`) and raises
`RenderError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from moonrelay.errors import InvalidRequest


class RenderError(InvalidRequest):
    """The conversation cannot be rendered; `param` names the field, the message what was expected."""


Object = Mapping[str, Any]

_KINDS: Final = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def refuse(param: str, expected: str, found: object) -> NoReturn:
    shown = f"the string {found[:40]!r}" if isinstance(found, str) else _KINDS.get(type(found), "a number")
    raise RenderError(f"{param}: expected {expected}, found {shown}", param=param)


def as_object(value: Any, param: str) -> Object:
    if not isinstance(value, Mapping):
        refuse(param, "an object", value)
    return value


def as_list(value: Any, param: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        refuse(param, "an array", value)
    return value


def as_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        refuse(param, "a string", value)
    return value


def as_name(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(param, "a non-empty string", value)
    return value


def optional_text(message: Object, key: str, param: str) -> str:
    """A string field that may be absent or null, both meaning empty."""
    value = message.get(key)
    return "" if value is None else as_text(value, f"{param}.{key}")


def flag(request: Object, key: str, default: bool) -> bool:
    value = request.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(key, "a boolean", value)
    return value


def parts(content: Any, param: str) -> Iterator[tuple[str | None, str]]:
    """(text or None for an image, the part's field name) for each part of a message's content."""
    if isinstance(content, str):
        yield content, param
        return
    if not isinstance(content, list | tuple):
        refuse(param, "a string or an array of content parts", content)
    for index, item in enumerate(content):
        where = f"{param}[{index}]"
        part = as_object(item, where)
        kind = part.get("type")
        if kind == "text":
            yield as_text(part.get("text"), f"{where}.text"), where
        elif kind in ("image", "image_url"):
            yield None, where
        else:
            refuse(f"{where}.type", "`text`, `image_url` or `image`", kind)


def sorted_json(value: Any, param: str) -> str:
    """Compact JSON with the keys of every object sorted: equal declarations give equal prompts."""
    try:
        return json.dumps(_sorted(value), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise RenderError(f"{param}: nested too deeply", param=param) from None
    except (TypeError, ValueError) as error:
        raise RenderError(f"{param}: expected JSON, but {error}", param=param) from error


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def tool_declarations(value: Any, param: str) -> str | None:
    """The JSON array that declares these tools, or None where there are none.

    The array is sorted inside each tool; the order of tools is the caller's.
    """
    if value is None:
        return None
    tools = as_list(value, param)
    for index, item in enumerate(tools):
        where = f"{param}[{index}]"
        tool = as_object(item, where)
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", "`function`", tool["type"])
        function = as_object(tool.get("function"), f"{where}.function")
        as_name(function.get("name"), f"{where}.function.name")
        optional_text(function, "description", f"{where}.function")
        if function.get("parameters") is not None:
            as_object(function["parameters"], f"{where}.function.parameters")
    return sorted_json(tools, param) if tools else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call of an assistant message.

    `arguments`: name to the value as written between the markers, with the value's type; `unparsed`: the
    arguments as they came where they are not JSON, else None.
    """

    id: str | None
    name: str
    arguments: tuple[tuple[str, str, Any], ...]
    unparsed: str | None


def tool_calls(message: Object, param: str) -> tuple[Call, ...]:
    value = message.get("tool_calls")
    if value is None:
        return ()
    calls = []
    for index, item in enumerate(as_list(value, f"{param}.tool_calls")):
        where = f"{param}.tool_calls[{index}]"
        call = as_object(item, where)
        if call.get("type", "function") != "function":
            refuse(f"{where}.type", "`function`", call["type"])
        function = as_object(call.get("function"), f"{where}.function")
        name = as_name(function.get("name"), f"{where}.function.name")
        arguments, unparsed = _arguments(function.get("arguments"), f"{where}.function.arguments")
        call_id = call.get("id")
        calls.append(
            Call(
                id=None if call_id is None else as_text(call_id, f"{where}.id"),
                name=name,
                arguments=arguments,
                unparsed=unparsed,
            )
        )
    return tuple(calls)


def _arguments(value: Any, param: str) -> tuple[tuple[tuple[str, str, Any], ...], str | None]:
    """(arguments, None), or ((), text) for a string that is not JSON; absent and blank mean no arguments."""
    if value is None:
        return (), None
    if isinstance(value, str):
        if not value.strip():
            return (), None
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return (), value
        except RecursionError:
            raise RenderError(f"{param}: nested too deeply", param=param) from None
        except ValueError:  # more digits than Python will read
            raise RenderError(f"{param}: holds an integer of too many digits", param=param) from None
    if not isinstance(value, Mapping):
        refuse(param, "a JSON object", value)
    return tuple((key, argument_text(item, param), item) for key, item in value.items()), None


def argument_text(value: Any, param: str) -> str:
    """An argument's value between its markers: a string as it is, all else as JSON with `, ` and `: `."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RenderError(f"{param}: nested too deeply", param=param) from None
    except (TypeError, ValueError) as error:
        raise RenderError(f"{param}: expected JSON, but {error}", param=param) from error


def in_call_order(messages: Sequence[Object]) -> list[tuple[Object, str]]:
    """Messages with their field names, each run of tool results in the order of the calls they answer.

    Only a run of which every result's id is known is sorted; each result then carries its call's name.
    """
    ordered: list[tuple[Object, str]] = []
    run: list[tuple[Object, str]] = []
    calls: dict[str, tuple[int, str]] = {}
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if message["role"] == "tool":
            run.append((message, param))
            continue
        ordered += _sorted_run(run, calls)
        run = []
        if message["role"] == "assistant":
            calls = {}
            for position, call in enumerate(tool_calls(message, param)):
                if call.id is not None:
                    calls.setdefault(call.id, (position, call.name))
        ordered.append((message, param))
    return ordered + _sorted_run(run, calls)


def _sorted_run(run: list[tuple[Object, str]], calls: Mapping[str, tuple[int, str]]) -> list[tuple[Object, str]]:
    answered = []
    for message, param in run:
        call_id = message.get("tool_call_id", message.get("id"))
        if call_id is None or as_text(call_id, f"{param}.tool_call_id") not in calls:
            return run
        position, name = calls[call_id]
        answered.append((position, {**message, "tool": name}, param))
    answered.sort(key=lambda item: item[0])
    return [(message, param) for _, message, param in answered]
