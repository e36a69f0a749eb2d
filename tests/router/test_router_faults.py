"""Workers that die, refuse or fall silent, clients that leave, too much work: one terminal reply, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from fake_workers import TOKENIZER, FakeWorker
from router_fakes import chat_request, cluster, completion_request, in_loop, spin

from moonrelay.errors import HandoffRefused, Overloaded, ServeError, TransferError

WHAT = "1 2 3 4 5 6 7 8 9 10 11 12"
PATHS = [("prefill", "decode"), ("aggregated",)]


def text_of(events: list) -> str:
    return "".join(e["choices"][0].get("text", "") for e in events[:-1] if e.get("choices"))


def counting(c) -> None:
    c.model.reply = [*TOKENIZER.encode(WHAT), TOKENIZER.eos]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", PATHS, ids=str)
@in_loop
async def test_a_client_that_leaves_frees_everything(roles, stream):
    async with cluster(roles) as c:
        counting(c)
        worker = c.workers[f"{roles[-1]}-0"]
        worker.hold_after = 3
        body = completion_request(stream=stream)
        asking = asyncio.ensure_future(c.session.post(c.url + "/v1/completions", json=body))
        await worker.holding.wait()
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        await worker.until(lambda: worker.cancelled == 1 and not worker.reservations)
        await c.idle()


@in_loop
async def test_a_client_that_leaves_during_prefill_frees_the_reservation():
    async with cluster() as c:
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        prefill.hold_after = -1
        asking = asyncio.ensure_future(c.chat())
        await prefill.holding.wait()
        await spin(lambda: len(decode.reservations) == 1)
        asking.cancel()
        await prefill.until(lambda: prefill.cancelled == 1)
        await decode.until(lambda: not decode.reservations)
        await c.idle()


@in_loop
async def test_a_client_that_leaves_between_handoff_and_adoption_frees_both():
    """The stop string ends the turn on the first token, which the router alone knows: it cancels both sides."""
    async with cluster() as c:
        counting(c)
        decode = c.workers["decode-0"]
        _, answer = await c.post("/v1/completions", completion_request(stop="1"))
        assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 1
        await decode.until(lambda: not decode.reservations)
        await c.idle()


@pytest.mark.parametrize("roles", [(*PATHS[0], *PATHS[0]), (*PATHS[1], *PATHS[1])], ids=str)
@pytest.mark.parametrize("die_after", [1, 4, 9])
@in_loop
async def test_a_stream_survives_its_worker(roles, die_after):
    async with cluster(roles) as c:
        counting(c)
        c.workers[f"{roles[1]}-0"].die_after = die_after
        c.workers[f"{roles[1]}-1"].die_after = None
        events = await c.stream(
            "/v1/completions", completion_request(seed=5, frequency_penalty=0.5), x_moonrelay_explain="1"
        )
        assert text_of(events) == WHAT and events[-1] == "[DONE]"
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == len(c.model.reply)
        if c.workers[f"{roles[1]}-0"].die_after is None:
            assert usage["moonrelay"]["retries"] == 1
            method, survivor = ("Generate", "aggregated-1") if len(set(roles)) == 1 else ("Prefill", "prefill-1")
            requests = [r for w in c.workers.values() for r in w.requests(method)]
            replay = max(requests, key=lambda r: len(r.prompt_ids))
            whole = min(requests, key=lambda r: len(r.prompt_ids))
            generated = list(replay.prompt_ids)[len(whole.prompt_ids) :]
            assert generated == c.model.reply[: len(generated)] and generated
            assert list(replay.sampling.generated) == generated and not whole.sampling.generated
            assert replay.sampling.seed == 5 and not replay.store and not replay.snapshot_at
            assert replay.sampling.max_tokens == whole.sampling.max_tokens - len(generated)
            assert survivor in c.workers
        await c.idle()


@in_loop
async def test_a_prefill_that_dies_is_replaced_before_the_first_token():
    async with cluster(("prefill", "prefill", "decode")) as c:
        c.workers["prefill-0"].die_after = -1
        status, answer = await c.chat()
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello there."
        assert [len(c.workers[f"prefill-{n}"].requests("Prefill")) for n in (0, 1)] == [1, 1]
        decode = c.workers["decode-0"]
        await decode.until(lambda: not decode.reservations)
        assert len(decode.requests("Reserve")) == 2
        await c.idle()


@in_loop
async def test_workers_already_dead_cost_no_retry():
    """Both of one pair are gone but still in the view: each is found out once, and the request goes on."""
    async with cluster(("prefill", "decode", "prefill", "decode"), retries_max=0) as c:
        await c.workers["prefill-0"].die()
        await c.workers["decode-0"].die()
        for _ in range(3):
            status, _ = await c.chat()
            assert status == 200
        # A prefill may have begun when its decode worker turned out to be dead, once.
        assert len(c.workers["prefill-1"].requests("Prefill")) in (3, 4)
        await c.idle()


@in_loop
async def test_the_only_worker_is_waited_for():
    async with cluster() as c:
        counting(c)
        decode = c.workers["decode-0"]
        decode.die_after = 4
        stream = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.until(lambda: decode.cancelled)
        again = await FakeWorker(c.model, "decode", "decode-0", epoch=2).start()
        c.workers["decode-0b"] = again
        c.fleet.set([c.workers["prefill-0"], again])
        assert text_of(await stream) == WHAT
        assert len(again.requests("Adopt")) == 1
        await c.idle()


@in_loop
async def test_a_stream_that_cannot_go_on_ends_in_one_error_event():
    async with cluster(recovery_wait_ms=50) as c:
        counting(c)
        c.workers["decode-0"].die_after = 4
        events = await c.stream("/v1/completions", completion_request())
        assert text_of(events) and WHAT.startswith(text_of(events[:-1]))
        assert events[-1]["error"]["code"] == "unavailable" and "[DONE]" not in events
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert sum("error" in event for event in events) == 1
        await c.idle()


@in_loop
async def test_losses_are_counted_and_end():
    async with cluster(("prefill", "decode", "decode", "decode"), retries_max=1, recoveries_max=2) as c:
        counting(c)
        prefill = c.workers["prefill-0"]
        prefill.faults["Prefill"] = [ServeError("bug")] * 9
        status, answer = await c.chat()
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert len(prefill.requests("Prefill")) == 2
        prefill.faults.clear()
        for name in ("decode-0", "decode-1", "decode-2"):
            c.workers[name].faults["Adopt"] = [TransferError("gone")] * 9
        events = await c.stream("/v1/completions", completion_request())
        assert events[-1]["error"]["code"] == "unavailable"
        assert sum(len(w.requests("Adopt")) for w in c.workers.values()) == 3
        await c.idle()


@pytest.mark.parametrize("fault", [TransferError("x"), HandoffRefused("x", reason="checksum"), ServeError("x")])
@in_loop
async def test_a_refused_handoff_is_done_again_by_others(fault):
    async with cluster(("prefill", "decode", "prefill", "decode")) as c:
        counting(c)
        for worker in c.workers.values():
            if worker.name == "decode-0":
                worker.faults["Adopt"] = [fault]
        for _ in range(2):
            _, answer = await c.post("/v1/completions", completion_request())
            assert answer["choices"][0]["text"] == WHAT
        refused = c.workers["decode-0"].requests("Adopt")
        assert refused
        await c.workers["decode-0"].until(lambda: not c.workers["decode-0"].reservations)
        await c.idle()


@in_loop
async def test_a_bad_request_found_by_a_worker_is_the_clients():
    from moonrelay.errors import ContextLengthExceeded, RequestTooLarge

    async with cluster() as c:
        c.workers["prefill-0"].late_handoff = asyncio.Event()  # it may have begun, but cannot be done
        for fault, status in [(ContextLengthExceeded("no", param="prompt"), 400), (RequestTooLarge("big"), 413)]:
            c.workers["decode-0"].faults["Reserve"] = [fault]
            got, answer = await c.chat()
            assert (got, answer["error"]["code"]) == (status, fault.code)
        assert not c.workers["decode-0"].requests("Adopt")
        await c.idle()


@in_loop
async def test_full_workers_are_waited_for_in_order():
    async with cluster(room_retry_ms=5) as c:
        decode = c.workers["decode-0"]
        decode.room, decode.hold_after = 1, 2
        asked = [asyncio.ensure_future(c.chat(f"number {n}")) for n in range(4)]
        service = c.frontends.service
        await spin(lambda: service.admission.waiting == 3)
        decode.go_on.set()
        answers = await asyncio.gather(*asked)
        assert [status for status, _ in answers] == [200] * 4
        await c.idle()


@in_loop
async def test_room_refused_after_the_last_token_asks_for_no_more():
    """The decode side says that it is full when prefill's first token is here, and the turn was over with it."""
    async with cluster(room_retry_ms=5) as c:
        c.model.reply = [TOKENIZER.eos]
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        prefill.late_handoff = asyncio.Event()
        decode.frozen, decode.room = True, 0
        asking = asyncio.ensure_future(c.post("/v1/completions", completion_request(max_tokens=5)))
        await decode.holding.wait()
        taken = c.frontends.service.metrics.prompt_tokens
        await spin(lambda: taken._value.get() > 0)
        decode.frozen, decode.room = False, 1
        decode.faults["Reserve"] = [Overloaded("full")]
        decode.go_on.set()
        status, answer = await asking
        assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        assert len(prefill.requests("Prefill")) == 1
        await c.idle()


@in_loop
async def test_another_worker_with_room_is_taken_at_once():
    async with cluster(("prefill", "decode", "decode")) as c:
        c.workers["decode-0"].room = 0
        for _ in range(3):
            assert (await c.chat())[0] == 200
        assert len(c.workers["decode-1"].requests("Adopt")) == 3


@in_loop
async def test_too_much_work_is_refused_with_the_reason():
    async with cluster(in_flight_max=2, queue_len_max=1, queue_timeout_ms=400) as c:
        decode = c.workers["decode-0"]
        decode.hold_after = 0
        url, service = c.url + "/v1/chat/completions", c.frontends.service
        asked = [asyncio.ensure_future(c.chat()) for _ in range(2)]
        await spin(lambda: service.admission.in_flight == 2)
        waiting = asyncio.ensure_future(c.chat())
        await spin(lambda: service.admission.waiting == 1)
        async with c.session.post(url, json=chat_request(stream=True)) as answer:
            body = await answer.json()
            assert (answer.status, body["error"]["code"], body["error"]["reason"]) == (
                429,
                "overloaded",
                "queue_full",
            )
            assert int(answer.headers["Retry-After"]) >= 1
        status, body = await waiting
        assert (status, body["error"]["reason"]) == (429, "queue_timeout")
        decode.go_on.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
        async with c.session.get(c.url + "/metrics") as answer:
            assert 'moonrelay_router_refused_total{reason="queue_full"} 1.0' in await answer.text()
        await c.idle()


@in_loop
async def test_room_that_never_comes_is_a_429():
    async with cluster(room_retry_ms=5, queue_timeout_ms=40) as c:
        c.workers["decode-0"].room = 0
        status, body = await c.chat()
        assert (status, body["error"]["reason"]) == (429, "queue_timeout")
        c.workers["decode-0"].room = 1
        c.workers["prefill-0"].faults["Prefill"] = [Overloaded("full")] * 1_000
        status, body = await c.chat()
        assert (status, body["error"]["reason"]) == (429, "queue_timeout")
        decode = c.workers["decode-0"]
        await decode.until(lambda: not decode.reservations)
        await c.idle()


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ()], ids=str)
@in_loop
async def test_without_a_path_requests_and_health_say_so(roles):
    async with cluster(roles) as c:
        async with c.session.post(c.url + "/v1/chat/completions", json=chat_request()) as answer:
            assert answer.status == 503 and (await answer.json())["error"]["code"] == "unavailable"
            assert "Retry-After" in answer.headers
        assert (await c.get("/health"))[0] == 503 and (await c.get("/health/live"))[0] == 200
        other = await FakeWorker(c.model, "decode", "d", revision="w2").start()
        c.workers["d"] = other
        c.fleet.set([*c.workers.values()])
        assert (await c.get("/health"))[0] == 503
        both = [await FakeWorker(c.model, role, role).start() for role in ("prefill", "decode")]
        c.workers |= {worker.name: worker for worker in both}
        c.fleet.set(both)
        assert (await c.get("/health"))[0] == 200
        assert (await c.chat())[0] == 200


@in_loop
async def test_deadlines_end_requests():
    async with cluster() as c:
        decode = c.workers["decode-0"]
        decode.hold_after = 2
        status, body = await c.post("/v1/chat/completions", chat_request(), x_moonrelay_deadline_ms="400")
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        events = await c.stream("/v1/chat/completions", chat_request(), x_moonrelay_deadline_ms="400")
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await decode.until(lambda: decode.cancelled == 2 and not decode.reservations)
        await c.idle()


@in_loop
async def test_a_silent_worker_counts_as_lost():
    async with cluster(("prefill", "decode", "decode"), stall_timeout_ms=400) as c:
        counting(c)
        c.workers["decode-0"].hold_after = 3
        for _ in range(2):
            assert text_of(await c.stream("/v1/completions", completion_request())) == WHAT
        assert c.workers["decode-0"].cancelled >= 1
        await c.idle()


@in_loop
async def test_draining_lets_streams_end_and_takes_no_more():
    async with cluster() as c:
        counting(c)
        decode = c.workers["decode-0"]
        decode.hold_after = 3
        stream = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.holding.wait()
        drain = asyncio.ensure_future(c.frontends.drain(5))
        await spin(lambda: c.frontends.service.draining)
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as fresh:
                while True:
                    async with fresh.get(c.url + "/health") as answer:
                        assert answer.status == 503
                    await fresh.connector.close()
        decode.go_on.set()
        assert text_of(await stream) == WHAT
        await drain


@in_loop
async def test_what_does_not_end_in_the_drain_gets_its_terminal_reply():
    async with cluster() as c:
        counting(c)
        decode = c.workers["decode-0"]
        decode.hold_after = 3
        stream = asyncio.ensure_future(c.stream("/v1/completions", completion_request()))
        await decode.holding.wait()
        await c.frontends.drain(0.05)
        events = await stream
        assert events[-1]["error"]["code"] == "unavailable" and "shutting down" in events[-1]["error"]["message"]
        await decode.until(lambda: decode.cancelled == 1)


@in_loop
async def test_a_bug_is_one_internal_error_that_tells_nothing():
    async with cluster() as c:
        c.frontends.service._begin = lambda *args: 1 / 0
        status, body = await c.chat()
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "division" not in body["error"]["message"]
        del c.frontends.service._begin
        assert (await c.chat())[0] == 200


@in_loop
async def test_a_broken_promise_of_ours_is_fatal():
    async with cluster() as c:

        def broken(*args):
            raise AssertionError("books do not balance")

        c.frontends.service._begin = broken
        assert (await c.chat())[0] == 500
        assert [str(error) for error in c.fatal] == ["books do not balance"]
        c.fatal.clear()
