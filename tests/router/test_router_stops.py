"""Stop strings at awkward places: never leaked, however the text is cut into tokens, events and pushes."""

from __future__ import annotations

import pytest
from fake_workers import TOKENIZER, chat_ids
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import chat_request, cluster, completion_request, in_loop

from router.stops import StopMatcher

THINK = {"chat_template_kwargs": {"thinking": True}}


def first_to_end(text: str, stops: list[str]) -> str:
    """The law, by hand: read characters until some stop string has just ended; the longest such one is cut off."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_cut_is_the_same_however_text_arrives(pieces, stops):
    matcher = StopMatcher(stops)
    passed = ""
    for piece in pieces:
        passed += matcher.push(piece)
        assert not any(stop in passed for stop in stops)
    passed += "" if matcher.matched else matcher.flush()
    text = "".join(pieces)
    assert passed == first_to_end(text, stops)
    assert matcher.matched == any(stop in text for stop in stops)


def test_text_that_cannot_become_a_stop_is_passed_at_once():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("abc", " E", "N", "x")] == ["abc", " ", "", "ENx"]


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("aggregated",)], ids=str)
@pytest.mark.parametrize("tokens_per_event", [1, 2, 7])
@in_loop
async def test_a_stop_string_cuts_text_and_work(roles, tokens_per_event):
    text = "one two three four five six seven eight nine ten eleven twelve"
    async with cluster(roles) as c:
        c.model.reply = [*TOKENIZER.encode(text), TOKENIZER.eos]
        c.model.tokens_per_event = tokens_per_event
        decode = c.workers[f"{roles[-1]}-0"]
        for stop in ("three", "e t", "one two three f", "r f", ["zzz", "five", "ur"], text[0]):
            decode.cancelled, decode.hold_after = 0, None
            want = first_to_end(text, stop if isinstance(stop, list) else [stop])
            _, whole = await c.post("/v1/completions", completion_request(stop=stop))
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (want, "stop"), stop
            counted = whole["usage"]["completion_tokens"]
            read = [TOKENIZER.decode(c.model.reply[:n]) for n in (counted - 1, counted)]
            stops = stop if isinstance(stop, list) else [stop]
            assert [any(s in said for s in stops) for said in read] == [False, True]
            events = await c.stream("/v1/completions", completion_request(stop=stop))
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == want
        await c.idle()


@in_loop
async def test_work_behind_a_stop_string_is_cancelled():
    async with cluster() as c:
        c.model.reply = TOKENIZER.encode("one two three four")
        decode = c.workers["decode-0"]
        decode.hold_after = 6  # the stream would wait here for ever
        _, answer = await c.post("/v1/completions", completion_request(stop="two"))
        assert answer["choices"][0]["text"] == "one "
        await decode.until(lambda: decode.cancelled == 1 and not decode.reservations)
        await c.idle()


@in_loop
async def test_a_held_back_beginning_is_given_out_when_the_text_ends():
    async with cluster() as c:
        c.model.reply = [*TOKENIZER.encode("abc EN"), TOKENIZER.eos]
        events = await c.stream("/v1/completions", completion_request(stop="END"))
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "abc EN"
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        _, answer = await c.post("/v1/completions", completion_request(stop="END", max_tokens=len(c.model.reply) - 1))
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abc EN", "length")


@in_loop
async def test_in_a_chat_they_end_the_answer_and_not_the_thought():
    async with cluster() as c:
        c.model.reply = chat_ids("first STOP second", thinking="I must not STOP here")
        _, answer = await c.chat(stop=["STOP"], **THINK)
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("first ", "I must not STOP here")
        assert answer["choices"][0]["finish_reason"] == "stop"
        events = await c.stream("/v1/chat/completions", chat_request(stop=["STOP"], **THINK))
        said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])
        assert said == "first "


@in_loop
async def test_a_marker_is_no_text_to_stop_at():
    async with cluster() as c:
        c.model.reply = chat_ids("done")
        _, answer = await c.chat(stop=["<|close|>", "response"])
        assert answer["choices"][0]["message"]["content"] == "done"
        assert answer["usage"]["completion_tokens"] == len(c.model.reply)
