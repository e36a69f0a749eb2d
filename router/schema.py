"""OpenAI request bodies to `GenerationRequest`: every field is read, refused by name, or unknown and refused.

Accepting a field is not supporting it: what we know but do not serve passes only with the value that means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from moonrelay.errors import InvalidRequest, UnknownModel
from router import fields
from router.fields import Reader, boolean, integer, name, number, only, refuse, text, unsupported

TOP_LOGPROBS_MAX: Final = 20
UINT32_MAX: Final = (1 << 32) - 1  # what the workers' protocol can carry


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request whose every field has been checked. `chat` is what the renderer reads; else `prompt` is set.

    `max_tokens` None: as much as the router's default and the context allow; `seed` None: the router draws one;
    `top_logprobs` None: no logprobs at all; 0: the sampled token's only.
    """

    kind: Literal["chat", "completion"]
    chat: Mapping[str, Any] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False


def _stream_options(value: Any, param: str) -> Mapping[str, Any]:
    options = fields.mapping(value, param)
    for key, item in options.items():
        where = f"{param}.{key}"
        if key == "include_obfuscation":
            only((False, None), "obfuscation is not supported")(item, where)
        elif key != "include_usage":
            unsupported(where, "unknown field")
        elif item is not None:
            boolean(item, where)
    return options


def _template_kwargs(value: Any, param: str) -> Mapping[str, Any]:
    options = fields.mapping(value, param)
    for key, item in options.items():
        if key != "thinking":
            unsupported(f"{param}.{key}", "unknown field; `thinking` is the only one")
        boolean(item, f"{param}.{key}")
    return options


def _response_format(value: Any, param: str) -> Any:
    kind = fields.mapping(value, param).get("type")
    if kind != "text":
        unsupported(param, "structured output is not supported yet; only {'type': 'text'} is")
    return value


def _bookkeeping(value: Any, param: str) -> Any:
    return value


COMMON: Final[Mapping[str, Reader]] = {
    "model": name,
    "max_tokens": integer(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1, above_low=True),
    "top_k": integer(-1, UINT32_MAX),
    "seed": integer(0, fields.UINT64_MAX),
    "stop": fields.stop_strings,
    "stream": boolean,
    "stream_options": _stream_options,
    "n": only((1,), "only one choice per request is supported; send the request again for more"),
    "ignore_eos": boolean,
    "return_token_ids": boolean,
    "user": text,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": only((1,), "not supported; use frequency_penalty or presence_penalty"),
    "min_p": only((0,), "min_p is not supported"),
    "min_tokens": only((0,), "min_tokens is not supported"),
    "logit_bias": fields.mapping,  # read with the vocabulary's size
    "stop_token_ids": only(([],), "stop_token_ids is not supported; use stop"),
}
CHAT: Final[Mapping[str, Reader]] = {
    **COMMON,
    "messages": lambda value, param: _messages(value, param),
    "max_completion_tokens": integer(1),
    "logprobs": boolean,
    "top_logprobs": integer(0, TOP_LOGPROBS_MAX),
    "tools": lambda value, param: _tools(value, param),
    "tool_choice": _bookkeeping,  # read together with `tools`
    "parallel_tool_calls": only((True,), "the model may always call several tools"),
    "response_format": _response_format,
    "reasoning_effort": only(("low", "medium", "high", "max"), "expected one of low, medium, high, max"),
    "chat_template_kwargs": _template_kwargs,
    "metadata": fields.mapping,
    "store": only((False,), "completions are not stored"),
    "service_tier": only(("auto", "default"), "there are no service tiers; only auto and default"),
    "modalities": only((["text"],), "only text is generated"),
    "functions": only(([],), "deprecated; use tools"),
    "function_call": only((), "deprecated; use tool_choice"),
    "audio": only((), "audio is not supported"),
    "prediction": only((), "predicted output is not supported"),
    "web_search_options": only((), "web search is not supported"),
    "verbosity": only((), "verbosity is not supported"),
    "prompt_cache_key": only((), "prompts are cached by their content; there is no key"),
}
COMPLETION: Final[Mapping[str, Reader]] = {
    **COMMON,
    "prompt": lambda value, param: value,  # read with the vocabulary's size
    "logprobs": integer(0, TOP_LOGPROBS_MAX),
    "echo": only((False,), "echo is not supported"),
    "suffix": only(("",), "suffix is not supported"),
    "best_of": only((1,), "only one choice per request is supported"),
}


def parse_chat(body: Mapping[str, Any], served_model: str, vocab_size: int) -> GenerationRequest:
    """Raises: InvalidRequest naming the field; UnknownModel."""
    read = _read(body, CHAT, served_model, required="messages")
    _check_tool_choice(read)
    if read.get("top_logprobs") and not read.get("logprobs"):
        raise InvalidRequest("top_logprobs: expected logprobs to be true as well", param="top_logprobs")
    kwargs = read.get("chat_template_kwargs", {})
    return GenerationRequest(
        kind="chat",
        chat={
            "messages": read["messages"],
            "tools": read.get("tools"),
            "thinking": kwargs.get("thinking", True),
            "reasoning_effort": read.get("reasoning_effort"),
        },
        top_logprobs=read.get("top_logprobs", 0) if read.get("logprobs") else None,
        **_shared(read, vocab_size),
    )


def parse_completion(body: Mapping[str, Any], served_model: str, vocab_size: int) -> GenerationRequest:
    """Raises: InvalidRequest naming the field; UnknownModel."""
    read = _read(body, COMPLETION, served_model, required="prompt")
    return GenerationRequest(
        kind="completion",
        prompt=read_prompt(read["prompt"], "prompt", vocab_size),
        top_logprobs=read.get("logprobs"),
        **_shared(read, vocab_size),
    )


def read_prompt(value: Any, param: str, vocab_size: int) -> str | list[int]:
    """Text, ids, or a list that holds one of these. Raises InvalidRequest."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value, param = value[0], f"{param}[0]"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(param, "a string or an array of token ids", value)
    if any(isinstance(item, str | list) for item in value[:2]):
        unsupported(param, "expected a single prompt; send one request for each")
    return fields.token_ids(value, param, vocab_size)


def _read(
    body: Mapping[str, Any], table: Mapping[str, Reader], served_model: str, *, required: str
) -> dict[str, Any]:
    """The fields that are given, read by their readers. null counts as not given, as it does at OpenAI."""
    read = {}
    for key, value in body.items():
        reader = table.get(key)
        if reader is None:
            raise InvalidRequest(f"{key[:80]!r}: unknown field", param=key)
        if value is not None:
            read[key] = reader(value, key)
    for key in ("model", required):
        if key not in read:
            raise InvalidRequest(f"{key}: expected this field, found none", param=key)
    if read["model"] != served_model:
        raise UnknownModel(f"model: {fields.shown(read['model'])} is not served here", param="model")
    if "stream_options" in read and not read.get("stream"):
        raise InvalidRequest("stream_options: expected only where stream is true", param="stream_options")
    return read


def _shared(read: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    limits = {key: read[key] for key in ("max_completion_tokens", "max_tokens") if key in read}
    if len(set(limits.values())) > 1:
        message = "max_completion_tokens and max_tokens are two names of one limit: expected equal values"
        raise InvalidRequest(message, param="max_completion_tokens")
    return {
        "max_tokens": next(iter(limits.values()), None),
        "max_tokens_param": next(iter(limits), "max_tokens"),
        "temperature": read.get("temperature", 1.0),
        "top_p": read.get("top_p", 1.0),
        "top_k": max(0, read.get("top_k", 0)),
        "presence_penalty": read.get("presence_penalty", 0.0),
        "frequency_penalty": read.get("frequency_penalty", 0.0),
        "logit_bias": fields.logit_bias(read.get("logit_bias", {}), "logit_bias", vocab_size),
        "seed": read.get("seed"),
        "stop": read.get("stop", ()),
        "ignore_eos": read.get("ignore_eos", False),
        "stream": read.get("stream", False),
        "include_usage": bool(read.get("stream_options", {}).get("include_usage")),
        "return_token_ids": read.get("return_token_ids", False),
    }


_MESSAGE_KEYS: Final = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "tools")
)
# What an assistant message that came from an OpenAI client carries beside its content: empty, or not for us.
_MESSAGE_EMPTY: Final = frozenset(("refusal", "annotations", "audio", "function_call"))


def _messages(value: Any, param: str) -> Any:
    """Names and shapes of messages' fields; what they hold is the renderer's to read."""
    if not isinstance(value, list) or not value:
        refuse(param, "a non-empty array of messages", value)
    for index, message in enumerate(value):
        where = f"{param}[{index}]"
        for key, item in fields.mapping(message, where).items():
            if key in _MESSAGE_EMPTY:
                only((None, []), "not supported; leave it out or null")(item, f"{where}.{key}")
            elif key not in _MESSAGE_KEYS:
                unsupported(f"{where}.{key}", "unknown field")
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") == "text" and part.keys() - {"type", "text"}:
                key = min(part.keys() - {"type", "text"})
                unsupported(f"{where}.content[{at}].{key}", "unknown field")
    return value


def _tools(value: Any, param: str) -> Any:
    if not isinstance(value, list):
        refuse(param, "an array of tools", value)
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("strict"):
            unsupported(f"{param}[{index}].function.strict", "strict schemas are not supported yet")
    return value


def _check_tool_choice(read: Mapping[str, Any]) -> None:
    """`auto` is what happens anyway, and so is `none` where there is nothing to call."""
    choice = read.get("tool_choice", "auto")
    if choice != "auto" and not (choice == "none" and not read.get("tools")):
        unsupported("tool_choice", "only `auto` is supported yet")
