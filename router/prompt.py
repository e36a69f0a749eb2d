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


def prepare(request: GenerationRequest, tokenizer: Tokenizer) -> Prompt:
    """Render and tokenise. Text of users never becomes special tokens.

    Raises: InvalidRequest naming the field.
    """
    if request.chat is not None:
        rendered = renderer.render(request.chat)
        prompt = renderer.encode(rendered, tokenizer)
        hints = tuple((hint.offset, hint.kind) for hint in prompt.checkpoint_hints)
        return Prompt(ids=prompt.ids, hints=hints, thinking=rendered.thinking)
    assert request.prompt is not None
    ids = tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
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
