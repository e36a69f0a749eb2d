"""OpenAI's response objects, whole and as stream chunks, for chat and for plain completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from model.output import ToolCallArguments, ToolCallStart
from model.tokenizer import Tokenizer
from moonrelay.errors import InvalidRequest, Overloaded, ServeError
from moonrelay.status import http_status
from router.admission import Refused
from router.output import Piece, SampledToken
from router.schema import GenerationRequest
from router.turn import Call, Result

_encode: Final = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"
LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def error_body(error: ServeError) -> dict[str, Any]:
    """OpenAI's error object. `reason` is there only where admission refused."""
    status = http_status(error)
    kind = "server_error"
    if isinstance(error, InvalidRequest):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "overloaded_error"
    shown: dict[str, Any] = {
        "message": str(error) if status != 500 else "internal error",
        "type": kind,
        "param": getattr(error, "param", None),
        "code": error.code,
    }
    if isinstance(error, Refused):
        shown["reason"] = error.reason
    return {"error": shown}


def usage_body(result: Result, call: Call) -> dict[str, Any]:
    """OpenAI's usage and the cache's account; a call that asks to be explained adds who served and what it took."""
    account = result.account
    usage: dict[str, Any] = {
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": account.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": account.cached_tokens,
            "cached_tokens_by_tier": dict(account.by_tier),
            "matchable_tokens": account.matchable_tokens,
            "miss_reason": account.miss_reason,
            "drafter_cold": account.drafter_cold,
        },
        "completion_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
    }
    if call.explain:
        usage["moonrelay"] = {
            "request_id": call.request_id,
            **asdict(result.served),
            "possible_tokens": account.possible_tokens,
            "recalled_tokens": result.recalled_tokens,
            "lost": [{"reason": reason, "tokens": tokens} for reason, tokens in account.lost],
        }
    return usage


@dataclass(slots=True)
class Collected:
    """A sink that keeps everything: for answers that are not streamed."""

    prompt_ids: Sequence[int] = ()
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)

    def accepted(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids

    async def emit(self, piece: Piece) -> None:
        self.reasoning.append(piece.reasoning)
        self.content.append(piece.content)
        self.tokens += piece.tokens
        for delta in piece.calls:
            if isinstance(delta, ToolCallStart):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.index]["function"]["arguments"] += delta.fragment


class Format(ABC):
    """One request's answer as JSON. What differs between chat and completions is in the subclasses."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, request: GenerationRequest, call: Call, model: str, tokenizer: Tokenizer) -> None:
        self.request = request
        self._call = call
        self._with_usage = request.include_usage or call.explain
        self._tokenizer = tokenizer
        self._head = {"id": self.id_prefix + call.answer_id, "created": int(time.time()), "model": model}
        head = _encode({**self._head, "object": self.chunk_object})
        self._open = b"data: " + head[:-1] + b',"choices":['
        self._close = b"]" + (b',"usage":null' if self._with_usage else b"") + b"}\n\n"

    @abstractmethod
    def first(self, prompt_ids: Sequence[int]) -> bytes:
        """What a stream begins with; written together with the first piece."""

    @abstractmethod
    def chunks(self, piece: Piece) -> bytes:
        """The piece as server-sent events."""

    @abstractmethod
    def last(self, result: Result) -> bytes:
        """The finish reason, the usage where asked for, and the end mark."""

    @abstractmethod
    def whole(self, collected: Collected, result: Result) -> dict[str, Any]:
        """The answer that is not streamed."""

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._open + _encode(choice) + self._close

    def _end(self, choice: dict[str, Any], result: Result) -> bytes:
        end = self._chunk(choice)
        if self._with_usage:
            usage = usage_body(result, self._call)
            whole = {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}
            end += b"data: " + _encode(whole) + b"\n\n"
        return end + DONE

    def _answer(self, choice: dict[str, Any], result: Result) -> dict[str, Any]:
        usage = usage_body(result, self._call)
        return {**self._head, "object": self.whole_object, "choices": [choice], "usage": usage}

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode((token_id,))


class ChatFormat(Format):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first(self, prompt_ids: Sequence[int]) -> bytes:
        choice = _delta({"role": "assistant", "content": ""})
        if not self.request.return_token_ids:
            return self._chunk(choice)
        whole = {**self._head, "object": self.chunk_object, "choices": [choice], "prompt_token_ids": prompt_ids}
        return b"data: " + _encode(whole) + b"\n\n"

    def chunks(self, piece: Piece) -> bytes:
        """Reasoning, content and calls go in chunks of their own; the tokens' details go with the first of them."""
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        deltas += [{"tool_calls": [_call_delta(delta)]} for delta in piece.calls]
        choices = [_delta(delta) for delta in deltas or [{}]]
        if piece.tokens:
            if self.request.top_logprobs is not None:
                choices[0]["logprobs"] = {"content": [self._logprob(token) for token in piece.tokens]}
            if self.request.return_token_ids:
                choices[0]["token_ids"] = [token.id for token in piece.tokens]
        return b"".join([self._chunk(choice) for choice in choices])

    def last(self, result: Result) -> bytes:
        return self._end(_delta({}, result.finish_reason), result)

    def whole(self, collected: Collected, result: Result) -> dict[str, Any]:
        content = "".join(collected.content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        reasoning = "".join(collected.reasoning)
        if reasoning or self._thinking:
            message["reasoning_content"] = reasoning
        if collected.calls:
            message["content"] = content or None
            message["tool_calls"] = collected.calls
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        if self.request.top_logprobs is not None:
            choice["logprobs"] = {"content": [self._logprob(token) for token in collected.tokens]}
        choice["finish_reason"] = result.finish_reason
        answer = self._answer(choice, result)
        if self.request.return_token_ids:
            choice["token_ids"] = [token.id for token in collected.tokens]
            answer["prompt_token_ids"] = collected.prompt_ids
        return answer

    @property
    def _thinking(self) -> bool:
        return bool(self.request.chat and self.request.chat["thinking"])

    def _logprob(self, token: SampledToken) -> dict[str, Any]:
        return {
            **self._entry(token.id, token.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._tokenizer.decode_bytes((token_id,))
        shown = text.decode("utf-8", errors="replace")
        return {"token": shown, "logprob": _finite(logprob), "bytes": list(text)}


class CompletionFormat(Format):
    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, request: GenerationRequest, call: Call, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, call, model, tokenizer)
        self._offset = 0  # characters of the tokens listed so far
        self._prompt_ids: Sequence[int] | None = None  # for the first chunk

    def first(self, prompt_ids: Sequence[int]) -> bytes:
        self._prompt_ids = prompt_ids if self.request.return_token_ids else None
        return b""

    def chunks(self, piece: Piece) -> bytes:
        return self._chunk(self._choice(piece.content, piece.tokens, None))

    def last(self, result: Result) -> bytes:
        return self._end(self._choice("", [], result.finish_reason), result)

    def whole(self, collected: Collected, result: Result) -> dict[str, Any]:
        if self.request.return_token_ids:
            self._prompt_ids = collected.prompt_ids
        choice = self._choice("".join(collected.content), collected.tokens, result.finish_reason)
        return self._answer(choice, result)

    def _choice(self, text: str, tokens: Sequence[SampledToken], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        if tokens and self.request.top_logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens)
        if self.request.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if self._prompt_ids is not None:
                choice["prompt_token_ids"] = self._prompt_ids
                self._prompt_ids = None
        return choice

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [self._text(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: SampledToken) -> dict[str, float | None]:
        """The likeliest and the sampled token, by text; where several share one text, the likeliest of them."""
        shown: dict[str, float | None] = {}
        for token_id, logprob in (*token.top, (token.id, token.logprob)):
            shown.setdefault(self._text(token_id), _finite(logprob))
        return shown


def _delta(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_delta(delta: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    if isinstance(delta, ToolCallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"index": delta.index, "function": {"arguments": delta.fragment}}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)
