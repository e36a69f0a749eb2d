"""Generated ids come back where their text does, and nowhere else: pure, over routers, and in a real Valkey."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from fake_workers import TOKENIZER, chat_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_fakes import FakeIds, chat_request, cluster, completion_request, in_loop

from model import spelling
from model.parser import parse_output
from model.renderer import encode, render, render_reply
from model.spelling import Spelling
from model.splice import Reply, fitting, given_ids, lost_turns, reply_key, reply_to_keep, turn_keys
from moonrelay.valkey import connect, start_local_valkey
from router.idstore import RedisIdStore
from router.prompt import Recalled, draft, tokenise
from router.schema import parse_completion

quick = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
SALT = b"s"
TEXT = st.text(alphabet=st.sampled_from('ab e.\n1你é👩<|>"{}:,'), max_size=40)
THINK = {"chat_template_kwargs": {"thinking": True}}


ID_OF = {TOKENIZER.decode_bytes([token]): token for token in range(TOKENIZER.num_ranks)}


def odd_ids(text: str, seed: int) -> list[int]:
    """Ids of a text as a model might choose them: any tokens that spell it, characters cut through as well."""
    draw, data, ids = random.Random(seed), text.encode(), []
    while data:
        length = next(n for n in range(draw.randint(1, 4), 0, -1) if data[:n] in ID_OF)
        ids.append(ID_OF[data[:length]])
        data = data[length:]
    return ids


def generated(segments: Any, seed: int) -> list[int]:
    """A reply as a model would generate it: markers as special ids, text in odd pieces."""
    ids: list[int] = []
    for n, segment in enumerate(segments):
        special = segment.allow_special
        ids += TOKENIZER.encode(segment.text, allow_special=True) if special else odd_ids(segment.text, seed + n)
    return ids


def typed(ids: Any) -> list[int | bytes]:
    """Special ids as themselves, what stands between them as bytes: what a prompt says, however it is tokenised."""
    said: list[int | bytes] = []
    for token in ids:
        if TOKENIZER.is_special(token):
            said.append(token)
        elif said and isinstance(said[-1], bytes):
            said[-1] += TOKENIZER.decode_bytes([token])
        else:
            said.append(TOKENIZER.decode_bytes([token]))
    return said


arguments = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.one_of(TEXT, st.integers(-9, 9), st.floats(-2, 2), st.none(), st.booleans(), st.lists(st.integers(0, 3))),
    max_size=3,
)
functions = arguments.map(lambda given: {"name": "grep", "arguments": json.dumps(given)})
calls = st.lists(functions.map(lambda function: {"type": "function", "function": function}), max_size=2)
answers = st.builds(
    lambda content, reasoning, tools: {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tools or None,
    },
    TEXT,
    TEXT,
    calls,
)
users = TEXT.map(lambda text: {"role": "user", "content": text})
turns = st.lists(st.tuples(users, answers), min_size=1, max_size=3)


@quick
@given(turns, st.booleans(), st.integers(0, 1_000), st.booleans())
def test_spliced_ids_say_what_tokenising_afresh_says(conversation, thinking, seed, cut):
    """Whatever the turns say and however they were generated, and cut off, the prompt is the same text."""
    messages = [message for turn in conversation for message in turn]
    request = {"messages": [*messages, {"role": "user", "content": "next"}], "thinking": thinking}
    rendered = render(request)
    keys = turn_keys(rendered, SALT).keys
    store = {}
    for n, (start, end) in enumerate(rendered.turns):
        before = {**request, "messages": messages[: 2 * n + 1], "tool_choice": "required" if seed % 2 else None}
        segments = render_reply(messages[2 * n + 1], thinking=thinking)
        assert segments == rendered.segments[start:end]
        ids = generated(segments, seed)
        reply = reply_to_keep(ids[: len(ids) // 2] if cut else ids, segments, TOKENIZER)
        store[reply_key(turn_keys(render(before), SALT).before, segments)] = reply
    found = [store[key] for key in keys]  # every turn is found by what came back
    afresh = encode(rendered, TOKENIZER)
    placed = given_ids(rendered, found, TOKENIZER)
    spliced = encode(rendered, TOKENIZER, placed)
    assert typed(spliced.ids) == typed(afresh.ids)
    assert [h.kind for h in spliced.checkpoint_hints] == [h.kind for h in afresh.checkpoint_hints]
    for mine, theirs in zip(spliced.checkpoint_hints, afresh.checkpoint_hints, strict=True):
        assert typed(spliced.ids[: mine.offset]) == typed(afresh.ids[: theirs.offset])
    for (start, end), reply in zip(rendered.turns, found, strict=True):
        ids = spliced.ids[spliced.starts[start] : spliced.starts[end]]
        if reply is not None:
            assert ids[: len(reply.ids)] == reply.ids
    if not cut:
        assert not lost_turns(rendered, found, placed)


@quick
@given(answers, answers, st.booleans(), st.integers(0, 99))
def test_ids_of_one_text_are_never_taken_for_another(kept, sent, thinking, seed):
    """Even if a key promised too much: what does not fit is left, and what is left says what was sent."""
    ids = generated(render_reply(kept, thinking=thinking), seed)
    rendered = render({"messages": [{"role": "user", "content": "x"}, sent], "thinking": thinking})
    found = [Reply(ids, True)]
    spliced = encode(rendered, TOKENIZER, given_ids(rendered, found, TOKENIZER))
    assert typed(spliced.ids) == typed(encode(rendered, TOKENIZER).ids)


def test_what_a_parser_read_renders_back_to_what_was_generated():
    """The whole way: ids to a message, the message's JSON through a client, and the ids fit again."""
    function = {"name": "grep", "arguments": '{"pat": "a\\"b", "n": 3, "o": {"x": [1, null]}}'}
    message = {"content": "Look:\n", "reasoning_content": " hm ", "tool_calls": [{"function": function}]}
    segments = render_reply(message, thinking=True)
    ids = generated(segments, 5)
    said = parse_output(ids, TOKENIZER, thinking=True, call_id=str).message()
    function = said["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))  # spelled otherwise
    again = render_reply(said, thinking=True)
    assert fitting(ids, again, TOKENIZER) == (len(ids), len(again))


def test_markers_written_out_are_no_markers():
    """Text that looks like a marker and the marker itself are the same bytes, and never each other."""
    segments = render_reply({"content": "a<|close|>response<|sep|>"}, thinking=False)
    ids = TOKENIZER.encode("a<|close|>response<|sep|><|close|>response<|sep|>", allow_special=True)
    count, covered = fitting(ids, segments, TOKENIZER)
    assert covered == 0 and count == 0
    assert (
        turn_keys(render({"messages": [{"role": "user", "content": "<|open|>"}]}), SALT).before
        != turn_keys(render({"messages": [{"role": "user", "content": "<|close|>"}]}), SALT).before
    )


def test_arguments_that_json_spells_otherwise_are_lost_from_there_on():
    ids = TOKENIZER.encode(
        'ok<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="array"<|sep|>[1,2]<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        allow_special=True,
    )
    said = parse_output(ids, TOKENIZER, thinking=False, call_id=str).message()
    segments = render_reply(said, thinking=False)
    reply = reply_to_keep(ids, segments, TOKENIZER)
    assert reply is not None and not reply.whole and 0 < len(reply.ids) < len(ids)
    rendered = render({"messages": [{"role": "user", "content": "q"}, said], "thinking": False})
    placed = given_ids(rendered, [reply], TOKENIZER)
    ((start, end),) = lost_turns(rendered, [reply], placed)
    assert "".join(s.text for s in rendered.segments[start:end]).startswith("[1, 2]")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("reasoning_content"),
        lambda m: m.update(content=m["content"] + " "),
        lambda m: m.update(name="bob"),
        lambda m: m.update(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
    ],
)
def test_a_message_that_was_changed_has_another_key(change):
    message = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    user = {"role": "user", "content": "q"}
    want = turn_keys(render({"messages": [user, message]}), SALT)
    changed = dict(message)
    change(changed)
    assert turn_keys(render({"messages": [user, changed]}), SALT).keys != want.keys
    parts = {**message, "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}], "id": "x"}
    assert turn_keys(render({"messages": [user, parts]}), SALT) == want
    assert turn_keys(render({"messages": [user, message]}), b"other").keys != want.keys


@quick
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.integers(0, 99), TEXT)
def test_a_completion_goes_on_with_the_ids_of_the_ones_before(rounds, seed, tail):
    store = FakeIds()
    text, ids_so_far = "system prompt " * 8, None
    for n, (more, said) in enumerate([*rounds, (tail, "")]):
        text += more
        drafted = draft(parse_completion(completion_request(text), "toy", TOKENIZER.vocab_size), SALT)
        texts = [one for head in drafted.heads for one in store.kept_texts.get((drafted.tag, head), [])]
        prompt = tokenise(drafted, TOKENIZER, None, Recalled(texts=texts))
        assert TOKENIZER.decode_bytes(prompt.ids) == text.encode() and not any(map(TOKENIZER.is_special, prompt.ids))
        if ids_so_far is not None:
            assert prompt.ids[: len(ids_so_far)] == ids_so_far
        reply = [*odd_ids(said, seed + n), TOKENIZER.eos]
        kept = spelling.spelling_to_keep(text, prompt.ids, prompt.pieces, reply, TOKENIZER, SALT)
        text += said
        ids_so_far = None
        if kept is not None:
            store.kept_texts.setdefault(kept[:2], []).insert(0, kept[2])
            ids_so_far = [*prompt.ids, *reply[:-1]]


def test_the_longest_beginning_is_taken_and_a_liar_is_not():
    text = "0123456789" * 20
    ids = odd_ids(text, 1)

    def known(n: int) -> Spelling:
        piece = spelling.Piece(n, ids)
        return Spelling(n, spelling.digests(text, [n], SALT)[0], (piece,))

    assert spelling.longest(text, [known(70), known(199), known(100)], SALT).chars == 199
    assert spelling.longest(text[:150], [known(70), known(199), known(100)], SALT).chars == 100
    assert spelling.longest("x" + text[1:], [known(70)], SALT) is None
    spelled, pieces = spelling.spell(text, known(100), TOKENIZER, TOKENIZER)  # its ids are the whole text's
    assert spelled == TOKENIZER.encode(text) and pieces == (spelling.Piece(200, None),)


async def talk(c, ids: list[int], messages: list[dict], **fields: Any) -> tuple[list[int], dict]:
    """One turn through the router: the ids the worker was given, and the answer."""
    c.model.reply = ids
    status, answer = await c.post("/v1/chat/completions", chat_request(messages=messages, **fields))
    assert status == 200, answer
    return list(c.workers["prefill-0"].requests("Prefill")[-1].prompt_ids), answer


@pytest.mark.parametrize("drops_reasoning", [False, True])
@in_loop
async def test_turns_come_back_as_generated_over_two_routers(drops_reasoning):
    ids = FakeIds()
    async with cluster(ids=ids) as one, cluster(ids=ids) as other:
        messages: list[dict] = [{"role": "user", "content": "hi"}]
        known: list[int] = []
        for n in range(4):
            reply = generated(render_reply({"content": f"Hello {n}.", "reasoning_content": "hmm"}, thinking=True), n)
            asked, answer = await talk((one, other)[n % 2], reply, messages, **THINK)
            assert (asked[: len(known)] == known) is (n == 0 or not drops_reasoning)
            known = asked + reply
            message = answer["choices"][0]["message"]
            assert answer["choices"][0]["message"]["content"] == f"Hello {n}."
            if drops_reasoning:
                del message["reasoning_content"]
            messages += [message, {"role": "user", "content": "more"}]
        assert len(ids.kept_turns) == 4 and ids.asked == 3


@in_loop
async def test_a_store_that_is_away_costs_nothing_but_hits():
    ids = FakeIds()
    async with cluster(ids=ids) as c:
        reply = generated(render_reply({"content": "Hello."}, thinking=False), 1)
        messages = [{"role": "user", "content": "hi"}]
        _, answer = await talk(c, reply, messages)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        ids.away = True
        asked, _ = await talk(c, reply, messages)
        assert asked == encode(render({"messages": messages, "thinking": False}), TOKENIZER).ids
        assert reply != chat_ids("Hello.")


@in_loop
async def test_a_turn_that_was_cut_off_comes_back_as_far_as_it_went():
    async with cluster() as c:
        reply = generated(render_reply({"content": "Hello over there. " * 9}, thinking=False), 1)
        messages = [{"role": "user", "content": "hi " * 70}]
        first, answer = await talk(c, reply, messages, max_tokens=90)
        assert answer["choices"][0]["finish_reason"] == "length"
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        c.model.reply = encode_reply("ok")
        body = chat_request(messages=messages)
        _, answer = await c.post("/v1/chat/completions", body, x_moonrelay_explain="1")
        asked = list(c.workers["prefill-0"].requests("Prefill")[-1].prompt_ids)
        assert asked[: len(first) + 90] == first + reply[:90]
        shown = answer["usage"]["moonrelay"]
        assert shown["recalled_tokens"] == 90 and "retokenised" not in [lost["reason"] for lost in shown["lost"]]


@in_loop
async def test_what_tokenising_gives_anyway_is_not_kept_and_tenants_keep_apart():
    ids = FakeIds()
    async with cluster(ids=ids) as c:
        await talk(c, encode_reply("Hello."), [{"role": "user", "content": "hi"}])
        assert not ids.kept_turns
        c.model.reply = generated(render_reply({"content": "Hello."}, thinking=False), 1)
        for tenant in ("a", "b"):
            await c.post("/v1/chat/completions", chat_request(), x_moonrelay_tenant=tenant)
        assert len(ids.kept_turns) == 2


def encode_reply(text: str) -> list[int]:
    return TOKENIZER.encode_segments(render_reply({"content": text}, thinking=False))


@in_loop
async def test_completions_come_back_as_generated():
    async with cluster() as c:
        text = "one two three " * 8
        reply = odd_ids("four five", 3)
        c.model.reply = [*reply, TOKENIZER.eos]
        _, answer = await c.post("/v1/completions", completion_request(text))
        _, again = await c.post(
            "/v1/completions",
            completion_request(text + answer["choices"][0]["text"] + " six", return_token_ids=True),
        )
        asked = again["choices"][0]["prompt_token_ids"]
        first, second = (list(r.prompt_ids) for r in c.workers["prefill-0"].requests("Prefill"))
        assert asked == second == [*first, *reply, *TOKENIZER.encode(" six")]


@pytest.fixture
def redis_url(tmp_path):
    valkey = start_local_valkey(tmp_path / "valkey")
    yield valkey
    valkey.stop()


@in_loop
async def test_redis_keeps_ids_for_all_routers_and_for_a_while(redis_url):
    up = [True]
    redis = connect(redis_url.url)
    options = {"ttl_s": 100, "bytes_max": 10_000, "timeout_s": 5.0, "usable": lambda: up[0]}
    one, other = RedisIdStore(redis, **options), RedisIdStore(connect(redis_url.url), **options)
    tag, keys = b"t" * 16, [n.to_bytes(16) for n in range(2_500)]
    reply = Reply([1, 2, 1 << 31], False)
    await one.keep_turn(tag, keys[1], reply)
    await one.keep_turn(tag, keys[2], Reply(list(range(5_000)), True))  # too long
    found = await other.turns(tag, keys)
    assert found[1] == reply and [n for n, one in enumerate(found) if one] == [1]
    name = f"mr:{{{tag.hex()}}}:turn:{keys[1].hex()}"
    await redis.expire(name, 5)
    assert (await other.turns(tag, [keys[1]]))[0] == reply and await redis.ttl(name) > 5
    await redis.set(name, b"\xc1 nonsense")
    assert await other.turns(tag, [keys[1]]) == [None]
    texts = [Spelling(70 + n, bytes([n]) * 16, (spelling.Piece(70, None), spelling.Piece(n, [n]))) for n in range(20)]
    for text in (*texts, texts[10]):
        await one.keep_text(tag, b"h" * 16, text)
    kept = await other.texts(tag, [b"g" * 16, b"h" * 16])
    assert kept[0] == texts[10] and len(kept) == 16 and texts[19] in kept and texts[0] not in kept
    up[0] = False
    assert await one.turns(tag, keys[:1]) == [None]
    up[0] = True
    redis_url.stop()
    assert await one.turns(tag, keys[:3]) == [None] * 3 and await one.texts(tag, [b"h"]) == []
    await one.keep_turn(tag, keys[1], reply)
    await asyncio.gather(redis.aclose(), other._redis.aclose())
