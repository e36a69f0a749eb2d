"""Prefill and decode side by side, workers that freeze, and what a request leaves in usage and log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_workers import TOKENIZER, chat_ids
from router_fakes import Cluster, FakeIds, chat_request, cluster, completion_request, in_loop, spin

from moonrelay.errors import InvalidRequest, TransferError
from router.legs import _ended

WHAT = "1 2 3 4 5 6 7 8 9 10 11 12"


def text_of(events: list) -> str:
    return "".join(e["choices"][0].get("text", "") for e in events[:-1] if e.get("choices"))


def counting(c: Cluster) -> None:
    c.model.reply = [*TOKENIZER.encode(WHAT), TOKENIZER.eos]


@in_loop
async def test_decodes_tokens_wait_for_prefills_first():
    async with cluster() as c:
        counting(c)
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        prefill.late_first_token = asyncio.Event()
        asking = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.until(lambda: not decode.reservations and bool(decode.requests("Adopt")))  # it has said all
        prefill.late_first_token.set()
        assert text_of(await asking) == WHAT
        await c.idle()


@in_loop
async def test_one_token_is_prefills_and_decode_hears_nothing_of_it():
    async with cluster() as c:
        counting(c)
        status, answer = await c.post("/v1/completions", completion_request(max_tokens=1))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert not c.workers["decode-0"].requests("Reserve") and not c.workers["decode-0"].requests("Adopt")
        await c.idle()


@in_loop
async def test_one_token_does_not_wait_for_decodes_room():
    async with cluster(room_retry_ms=5) as c:
        decode = c.workers["decode-0"]
        decode.room, decode.hold_after = 1, 2
        asked = [asyncio.ensure_future(c.chat(f"number {n}")) for n in range(2)]
        service = c.frontends.service
        await spin(lambda: service.admission.waiting == 1)
        status, answer = await c.post("/v1/completions", completion_request(max_tokens=1))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
        assert service.admission.waiting == 1
        decode.go_on.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 2
        await c.idle()


@pytest.mark.parametrize("tokens", [1, 4])
@in_loop
async def test_decode_may_end_before_prefill_says_that_it_has(tokens):
    """Its tokens, its refusal of a handoff that was withdrawn, or its last word come before prefill's last event."""
    async with cluster() as c:
        counting(c)
        if tokens == 1:
            c.model.reply = [TOKENIZER.eos]
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        prefill.late_handoff = asyncio.Event()
        decode.withdrawn = tokens == 1
        asking = asyncio.ensure_future(c.post("/v1/completions", completion_request(max_tokens=4)))
        await decode.until(lambda: bool(decode.requests("Adopt")) and not decode.reservations)
        for _ in range(20):
            await asyncio.sleep(0)
        prefill.late_handoff.set()
        status, answer = await asking
        assert (status, answer["usage"]["completion_tokens"]) == (200, tokens)
        assert len(prefill.requests("Prefill")) == 1
        await c.idle()


@pytest.mark.parametrize("fails", ["before prefill's last event", "after it"])
@in_loop
async def test_decode_that_fails_leaves_the_request_alive(fails):
    """The attempt's end must not look like the request's own cancellation to what the next attempt awaits."""
    async with cluster(("prefill", "decode", "decode")) as c:
        counting(c)
        cancelling = []
        match = c.index.match

        async def asked(*args):
            cancelling.append(asyncio.current_task().cancelling())
            return await match(*args)

        c.index.match = asked
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        decode.hold_after = 2
        if fails != "after it":
            prefill.late_handoff = asyncio.Event()
        asking = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.holding.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        await decode.die()
        if prefill.late_handoff is not None:
            prefill.late_handoff.set()
        assert text_of(await asking) == WHAT
        assert cancelling == [0, 0]
        await c.idle()


@in_loop
async def test_a_client_that_leaves_as_an_attempt_fails_is_gone():
    async with cluster(("prefill", "decode", "decode")) as c:
        counting(c)
        decode = c.workers["decode-0"]
        decode.hold_after = 2
        asking = asyncio.ensure_future(c.post("/v1/completions", completion_request()))
        await decode.holding.wait()
        dying = asyncio.ensure_future(decode.die())
        asking.cancel()
        await c.idle()
        await dying
        assert not c.workers["decode-1"].reservations and asking.cancelled()


@in_loop
async def test_a_request_cancelled_twice_still_gives_everything_back():
    """A deadline and a client that leaves, in one moment: the books are closed before the request is over."""
    order = []

    async def slow(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            order.append(name)

    async def request() -> None:
        tasks = [asyncio.ensure_future(slow("half")) for _ in range(2)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        try:
            await _ended(tasks)
        finally:
            order.append("over")

    asking = asyncio.ensure_future(request())
    for _ in range(3):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert order == ["half", "half", "over"] and asking.cancelled()


@in_loop
async def test_a_handoff_withdrawn_without_reason_is_a_loss():
    async with cluster(("prefill", "decode"), retries_max=0, recoveries_max=0, recovery_wait_ms=1) as c:
        c.workers["decode-0"].withdrawn = True
        status, answer = await c.post("/v1/completions", completion_request(max_tokens=4))
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        await c.idle()


@in_loop
async def test_room_is_asked_for_beside_prefill_and_its_lack_ends_it():
    async with cluster(room_retry_ms=5) as c:
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        prefill.hold_after, decode.room = -1, 0
        asking = asyncio.ensure_future(c.chat())
        await spin(lambda: c.frontends.service.admission.waiting == 1)
        await prefill.until(lambda: prefill.cancelled == len(prefill.requests("Prefill")))
        prefill.hold_after, decode.room = None, 1
        assert (await asking)[0] == 200
        # None while it waited for room; the one that was given up may have come only now, or never.
        assert len(prefill.requests("Prefill")) <= 2
        await prefill.until(lambda: len(prefill.requests("Prefill")) - prefill.cancelled == 1)
        await decode.until(lambda: not decode.reservations)
        await c.idle()


@in_loop
async def test_a_reservation_that_comes_too_late_is_given_back():
    async with cluster() as c:
        decode = c.workers["decode-0"]
        decode.frozen = True
        c.workers["prefill-0"].faults["Prefill"] = [InvalidRequest("no")]
        asking = asyncio.ensure_future(c.chat())
        await decode.holding.wait()
        assert (await asking)[0] == 400
        decode.go_on.set()
        await decode.until(lambda: len(decode.requests("ReleaseReservation")) == 1 and not decode.reservations)
        await c.idle()


@in_loop
async def test_prefill_that_fails_ends_decode_too():
    async with cluster(("prefill", "decode", "prefill", "decode")) as c:
        counting(c)
        for name in ("prefill-0", "prefill-1"):
            c.workers[name].hold_after = -1
        asking = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        decodes = [w for w in c.workers.values() if w.role == "decode"]
        await spin(lambda: any(w.requests("Adopt") for w in decodes))
        first = next(w for w in decodes if w.requests("Adopt"))
        busy = next(w for w in c.workers.values() if w.role == "prefill" and w.requests("Prefill"))
        other = next(w for w in c.workers.values() if w.role == "prefill" and w is not busy)
        other.hold_after = None
        await busy.die()
        assert text_of(await asking) == WHAT
        await first.until(lambda: first.cancelled == 1 and not first.reservations)
        await c.idle()


@pytest.mark.parametrize("roles", [("prefill", "decode", "decode"), ("aggregated", "aggregated")], ids=str)
@in_loop
async def test_a_frozen_workers_stream_goes_on_elsewhere(roles):
    """Stopped, missing from membership, connection open: nothing ends by itself. It may come back as it was."""
    async with cluster(roles) as c:
        counting(c)
        last = roles[-1]
        frozen, other = c.workers[f"{last}-0"], c.workers[f"{last}-1"]
        frozen.hold_after = 3
        asking = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await frozen.holding.wait()
        frozen.frozen = True
        everybody = list(c.workers.values())
        c.fleet.set([w for w in everybody if w is not frozen])
        events = await asking
        assert text_of(events) == WHAT and events[-1] == "[DONE]"
        frozen.frozen, frozen.hold_after = False, None
        frozen.go_on.set()  # back, in the same life: what it still says reaches nobody
        c.fleet.set(everybody)
        await frozen.until(lambda: frozen.cancelled == 1 and not frozen.reservations)
        for _ in range(2):
            assert text_of(await c.stream("/v1/completions", completion_request())) == WHAT
        method = "Adopt" if last == "decode" else "Generate"
        assert len(frozen.requests(method)) == 2 and len(other.requests(method)) == 2
        await c.idle()


@in_loop
async def test_a_frozen_worker_is_not_waited_for_by_those_who_reserve():
    async with cluster(("prefill", "decode", "decode"), rpc_timeout_ms=60_000) as c:
        counting(c)
        frozen = c.workers["decode-0"]
        frozen.frozen = True
        asking = [asyncio.ensure_future(c.stream("/v1/completions", completion_request())) for _ in range(2)]
        await frozen.holding.wait()
        c.fleet.set([w for w in c.workers.values() if w is not frozen])
        for events in await asyncio.gather(*asking):
            assert text_of(events) == WHAT
        await c.idle()


@pytest.mark.parametrize("why", ["it answers", "nobody can say"])
@in_loop
async def test_a_worker_that_is_only_missing_keeps_its_streams(why):
    """Redis was flushed, or is away: the view says nothing of the worker."""
    async with cluster(("prefill", "decode", "decode")) as c:
        counting(c)
        decode = c.workers["decode-0"]
        decode.hold_after = 3
        asking = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.holding.wait()
        everybody = list(c.workers.values())
        service = c.frontends.service
        if why == "nobody can say":
            decode.frozen, c.fleet.fresh = True, False
            c.fleet.set([])
            await asyncio.sleep(0)
            assert not service._watched
        else:
            probed = []
            alive = service.workers.alive

            async def noted(worker, timeout_s):
                probed.append(await alive(worker, timeout_s))
                return probed[-1]

            service.workers.alive = noted
            c.fleet.set([w for w in everybody if w is not decode])
            await spin(lambda: bool(probed))
            assert probed == [True]
        c.fleet.fresh = True
        c.fleet.set(everybody)
        decode.go_on.set()
        assert text_of(await asking) == WHAT and decode.cancelled == 0
        await c.idle()


@in_loop
async def test_every_request_leaves_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="router.service"):
        async with cluster() as c:
            c.index.tokens, c.index.matchable_tokens = 128, 192
            await c.post("/v1/completions", completion_request([5] * 300, max_tokens=2), x_request_id="r-1")
            c.workers["prefill-0"].faults["Prefill"] = [TransferError("gone")] * 9
            await c.post("/v1/completions", completion_request([5] * 300, max_tokens=2), x_request_id="r-2")
    good, bad = (record for record in caplog.records if record.message == "request")
    assert (good.request_id, good.code, good.prompt_tokens, good.completion_tokens) == ("r-1", "200", 300, 2)
    assert good.cached_tokens + sum(n for _, n in good.lost) == 300 and good.miss_reason == "tier_error"
    assert (bad.request_id, bad.code) == ("r-2", "503") and not hasattr(bad, "prompt_tokens")


@in_loop
async def test_the_device_tier_draws_requests():
    async with cluster(("prefill", "prefill", "decode")) as c:
        key = c.workers["prefill-1"].worker().key
        c.index.kept, c.index.tokens = {key: 256}, 192
        for _ in range(3):
            await c.post("/v1/completions", completion_request([5] * 300, max_tokens=2))
        assert len(c.workers["prefill-1"].requests("Prefill")) == 3


@in_loop
async def test_retokenised_tokens_are_counted_as_such():
    """The model wrote a call's JSON otherwise than it is rendered: its turn comes back in other ids from there on."""
    ids = FakeIds()
    markup = (
        'ok<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="array"<|sep|>[' + "1," * 80 + "2]<|close|>argument<|sep|>"
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    async with cluster(ids=ids) as c:
        c.model.reply = TOKENIZER.encode(markup, allow_special=True)
        _, answer = await c.chat()
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done " * 30}
        messages = [{"role": "user", "content": "hi"}, message, result]
        c.model.reply = chat_ids("Good.")
        _, answer = await c.post("/v1/chat/completions", chat_request(messages=messages), x_moonrelay_explain="1")
        usage = answer["usage"]
        lost = {entry["reason"]: entry["tokens"] for entry in usage["moonrelay"]["lost"]}
        assert lost["retokenised"] > 80 and lost["cold"] > 30 and sum(lost.values()) == usage["prompt_tokens"]
        assert usage["moonrelay"]["recalled_tokens"] > 10
