"""A request to token ids: render, tokenise, and the hashes under which the cache knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model import renderer
from model.tokenizer import Tokenizer
from moonrelay.errors import ContextLengthExceeded, InvalidRequest
from router.schema import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenised prompt. `hints`: (offset in tokens, kind) where a state snapshot would be reused."""

    ids: list[int]
    hints: tuple[tuple[int, int], ...]
    thinking: bool


class _Bounded:
    """A tokenizer for a prompt of up to `limit` ids: it raises as soon as there are more, however long the text."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None, param: str) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._param = param
        self._count = 0

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        left = None if self._limit is None else self._limit - self._count
        ids = self._tokenizer.encode(text, allow_special=allow_special, limit=left)
        self._count += len(ids)
        if self._limit is not None and self._count > self._limit:
            raise ContextLengthExceeded(
                f"{self._param}: more tokens than the context of {self._limit} holds", param=self._param
            )
        return ids


def prepare(request: GenerationRequest, tokenizer: Tokenizer, limit: int | None = None) -> Prompt:
    """Render and tokenise. Text of users never becomes special tokens; text of more than `limit` ids is refused.

    Raises: InvalidRequest naming the field.
    """
    bounded = _Bounded(tokenizer, limit, "prompt" if request.chat is None else "messages")
    if request.chat is not None:
        rendered = renderer.render(request.chat)
        prompt = renderer.encode(rendered, bounded)
        hints = tuple((hint.offset, hint.kind) for hint in prompt.checkpoint_hints)
        return Prompt(ids=prompt.ids, hints=hints, thinking=rendered.thinking)
    assert request.prompt is not None
    ids = bounded.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    if not ids:
        raise InvalidRequest("prompt: expected at least one token, found none", param="prompt")
    return Prompt(ids=ids, hints=((len(ids), 1),), thinking=False)


def token_limit(request: GenerationRequest, prompt_ids: Sequence[int], context_len: int, default: int) -> int:
    """How many tokens may be generated: at least 1, and prompt plus limit fit the context.

    Raises: ContextLengthExceeded naming the prompt, or the limit where the prompt alone would fit.
    """
    used = len(prompt_ids)
    param = "messages" if request.kind == "chat" else "prompt"
    if used >= context_len:
        raise ContextLengthExceeded(
            f"{param}: {used} tokens do not fit the context of {context_len} with room for an answer",
            param=param,
        )
    if request.max_tokens is None:
        return min(context_len - used, default)
    if used + request.max_tokens > context_len:
        raise ContextLengthExceeded(
            f"{request.max_tokens_param}: {request.max_tokens} tokens after a prompt of {used} do not fit the "
            f"context of {context_len}; expected at most {context_len - used}",
            param=request.max_tokens_param,
        )
    return request.max_tokens
