"""What a prompt costs before it is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_workers import TOKENIZER
from router_fakes import chat_request, completion_request

from moonrelay.errors import ContextLengthExceeded, InvalidRequest
from router.prompt import prepare
from router.schema import parse_chat, parse_completion


def counting_tokenizer() -> tuple[SimpleNamespace, list[int]]:
    """The tokenizer, and how many ids each call to it made."""
    counts: list[int] = []

    def encode(text: str, **options: object) -> list[int]:
        ids = TOKENIZER.encode(text, **options)
        counts.append(len(ids))
        return ids

    return SimpleNamespace(encode=encode), counts


@pytest.mark.parametrize("kind", ["prompt", "one message", "many messages"])
def test_text_beyond_the_context_is_not_tokenised_to_its_end(kind):
    text = "a b " * 300_000  # three pieces of the tokenizer
    if kind == "prompt":
        request = parse_completion(completion_request(text), "toy", TOKENIZER.vocab_size)
    else:
        contents = [text] if kind == "one message" else ["hi"] * 5_000
        request = parse_chat(chat_request(messages=[{"role": "user", "content": c} for c in contents]), "toy")
    tokenizer, counts = counting_tokenizer()
    with pytest.raises(ContextLengthExceeded) as refused:
        prepare(request, tokenizer, 4_096)
    assert refused.value.param == ("prompt" if kind == "prompt" else "messages")
    whole = prepare(request, TOKENIZER)
    assert 4_096 < sum(counts) < len(whole.ids) / 2
    assert prepare(request, TOKENIZER, len(whole.ids)) == whole


def test_numbers_of_a_tool_call_may_not_be_endless():
    function = {"name": "f", "arguments": '{"a": ' + "9" * 5_000 + "}"}
    call = {"id": "1", "type": "function", "function": function}
    request = parse_chat(chat_request(messages=[{"role": "assistant", "tool_calls": [call]}]), "toy")
    with pytest.raises(InvalidRequest, match="too many digits") as refused:
        prepare(request, TOKENIZER)
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"
