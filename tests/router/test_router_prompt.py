"""What a prompt costs before it is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_workers import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import chat_request, completion_request

from model.tokenizer import Tokenizer
from moonrelay.errors import ContextLengthExceeded, InvalidRequest
from router.encodings import SHARED_CHARS, EncodingCache
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
        request = parse_chat(chat_request(messages=[{"role": "user", "content": c} for c in contents]), "toy", 512)
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
    request = parse_chat(chat_request(messages=[{"role": "assistant", "tool_calls": [call]}]), "toy", 512)
    with pytest.raises(InvalidRequest, match="too many digits") as refused:
        prepare(request, TOKENIZER)
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.booleans()), max_size=40))
def test_texts_seen_before_have_the_same_ids(asked):
    cache = EncodingCache(TOKENIZER, 50)  # overflows all the time
    for letter, times, special in asked:
        text = f"<|open|>{letter} " * times
        want = TOKENIZER.encode(text, allow_special=special)
        assert cache.encode(b"s", text, allow_special=special) == want


def test_a_text_is_encoded_once_for_each_tenant_and_whole(monkeypatch):
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **options: object) -> list[int]:
        encoded.append(text)
        return encode(self, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "encode", counting)
    cache = EncodingCache(TOKENIZER, 10_000_000)
    short, long, longest = "hi", "secret " * SHARED_CHARS, "a b " * 150_000
    for salt in (b"a", b"b", b"a"):
        for text in (short, long):
            assert cache.encode(salt, text) == encode(TOKENIZER, text)
    assert encoded == [short, long, long]
    assert len(cache.encode(b"a", longest, limit=10)) < len(cache.encode(b"a", longest, limit=1_000_000))
    assert cache.encode(b"a", longest) == encode(TOKENIZER, longest) and encoded.count(longest) == 2
