"""Times without a path: whole groups of workers that die together, and a view that has to fill again."""

from __future__ import annotations

import asyncio

import pytest
from fake_workers import TOKENIZER, FakeWorker
from router_fakes import cluster, completion_request, in_loop, spin

from router.fleet import GAP_WAIT_S, Gap

WHAT = "1 2 3 4 5 6 7 8 9 10 11 12"
GRPC_WORDS = ("UNAVAILABLE", "CANCELLED", "recvmsg", "Stream removed", "Socket", "ipv4:", "unknown")


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_requests_without_a_token_wait_when_all_decodes_die(stream):
    """Four cold requests; the second decode worker dies when those of the first have moved there, both still shown.
    One is back a second later.
    """
    async with cluster(("prefill", "decode", "decode"), suspect_ms=2_000, recovery_wait_ms=8_000) as c:
        c.model.reply = [*TOKENIZER.encode(WHAT), TOKENIZER.eos]
        prefill, first, second = c.workers["prefill-0"], c.workers["decode-0"], c.workers["decode-1"]
        prefill.hold_after = -1
        bodies = [completion_request(f"Q{n}=") for n in range(4)]
        ask = (lambda b: c.stream("/v1/completions", b)) if stream else (lambda b: c.post("/v1/completions", b))
        asked = [asyncio.ensure_future(ask(body)) for body in bodies]
        await spin(lambda: len(first.requests("Adopt")) + len(second.requests("Adopt")) == 4)
        assert first.requests("Adopt") and second.requests("Adopt")
        await first.die()
        await spin(lambda: len(second.requests("Adopt")) == 4)
        await second.die()
        await asyncio.sleep(1)
        again = await FakeWorker(c.model, "decode", "decode-0", epoch=2).start()
        c.workers["decode-0b"] = again
        prefill.go_on.set()
        c.fleet.set([prefill, again])
        answers = await asyncio.gather(*asked)
        if stream:
            assert all(events[-1] == "[DONE]" for events in answers)
        else:
            assert [(status, answer["choices"][0]["text"]) for status, answer in answers] == [(200, WHAT)] * 4
        await c.idle()


@in_loop
async def test_deaths_of_other_incidents_are_counted_and_told_in_words(monkeypatch):
    """The client hears of the worker, and nothing that gRPC says."""
    monkeypatch.setattr("router.turn.INCIDENT_S", 0.0)
    async with cluster(("prefill", "decode", "decode", "decode"), retries_max=1) as c:
        decodes = [worker for worker in c.workers.values() if worker.role == "decode"]
        c.workers["prefill-0"].hold_after = -1
        asked = asyncio.ensure_future(c.chat())
        for _ in range(2):
            await spin(lambda: any(decode.requests("Adopt") for decode in decodes))
            under = next(decode for decode in decodes if decode.requests("Adopt"))
            decodes.remove(under)
            await under.die()
        status, body = await asked
        assert (status, body["error"]["code"]) == (503, "unavailable")
        message = body["error"]["message"]
        assert message.startswith(f"{under.name} died, or its connection broke")
        assert not [word for word in GRPC_WORDS if word in message], message
        await c.idle()


@pytest.mark.parametrize("left", [(), ("prefill-0",)], ids=str)
@in_loop
async def test_a_view_that_has_just_become_empty_is_waited_out(left):
    async with cluster() as c:
        whole = [*c.workers.values()]
        await spin(lambda: c.frontends.service.gap.whole)
        c.fleet.set([c.workers[name] for name in left])
        asked = asyncio.ensure_future(c.chat())
        await spin(lambda: c.frontends.service.admission.in_flight == 1)
        await asyncio.sleep(0.2)
        assert not asked.done() and (await c.get("/health"))[0] == 503
        c.fleet.set(whole)
        assert (await asked)[0] == 200
        await c.idle()


@in_loop
async def test_a_gap_ends_with_the_queue_timeout():
    async with cluster(queue_timeout_ms=100) as c:
        await spin(lambda: c.frontends.service.gap.whole)
        c.fleet.set([])
        began = asyncio.get_running_loop().time()
        assert (await c.chat())[0] == 503
        assert 0.1 <= asyncio.get_running_loop().time() - began < GAP_WAIT_S
        await c.idle()


def test_a_gap_is_counted_from_the_last_whole_view():
    gap = Gap()
    gap.note(False, 5.0)
    assert gap.until_s(6.0) == 6.0  # never was one
    gap.note(True, 7.0)
    gap.note(False, 20.0)
    gap.note(False, 24.0)
    assert gap.until_s(24.0) == 20.0 + GAP_WAIT_S
    assert gap.until_s(99.0) == 99.0
