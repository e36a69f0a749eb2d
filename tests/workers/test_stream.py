"""Events from the engine's thread to the loop: none lost or doubled, in order, with as few wake-ups as can be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode.edge import next_due
from engine.api import Finished, Progress
from engine.worker.stream import EventStream, Wakeups
from tests.workers.world import World, prefill_request, running

LONG_S = 30.0  # a wait that must end early
LAST = Finished(reason="length", tokens_in_state=1)


class CountingWakeups(Wakeups):
    """Counts how often the loop was woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def _notice(self) -> None:
        self.woken += 1
        super()._notice()


def made(num_streams: int = 1) -> tuple[CountingWakeups, list[EventStream], list[object]]:
    wakeups, late = CountingWakeups(), []
    return wakeups, [EventStream(wakeups, late.append) for _ in range(num_streams)], late


def progress(count: int, first: int = 0) -> list[Progress]:
    return [Progress(tokens=first + i) for i in range(count)]


async def turns_of_the_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_step_wakes_the_loop_once_for_all_its_sequences():
    async def scenario():
        wakeups, streams, _ = made(8)
        waiting = [asyncio.ensure_future(stream.batch()) for stream in streams]
        await turns_of_the_loop()
        for number, stream in enumerate(streams):
            for event in progress(2, number):
                stream.emit(event)
        assert await asyncio.gather(*waiting) == [progress(2, number) for number in range(8)]
        assert wakeups.woken == 1

    asyncio.run(scenario())


def test_until_a_message_is_due_events_gather_without_a_wake_up():
    async def scenario():
        wakeups, (stream,), _ = made()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + 0.05
        waiting = asyncio.ensure_future(stream.batch(due_s))
        for event in progress(3):
            await turns_of_the_loop()
            stream.emit(event)
        assert await waiting == progress(3)
        assert loop.time() >= due_s - 0.001 and wakeups.woken == 0
        waiting = asyncio.ensure_future(stream.batch(loop.time() - 1.0))  # due already: the first event is waited for
        await turns_of_the_loop()
        assert not waiting.done()
        stream.emit(Progress(tokens=9))
        assert await waiting == [Progress(tokens=9)]

    asyncio.run(scenario())


@pytest.mark.parametrize("before", [True, False])
def test_the_last_event_waits_for_no_message_to_be_due(before):
    async def scenario():
        _, (stream,), _ = made()
        if before:
            stream.emit(LAST)
        waiting = asyncio.ensure_future(stream.batch(asyncio.get_running_loop().time() + LONG_S))
        await turns_of_the_loop()
        if not before:
            stream.emit(Progress(tokens=1))
            await turns_of_the_loop()
            assert not waiting.done()
            stream.emit(LAST)
        found = await asyncio.wait_for(waiting, LONG_S / 2)
        assert found[-1] == LAST and stream.ended

    asyncio.run(scenario())


def test_nothing_is_lost_or_doubled_between_the_threads():
    count = 20_000

    async def scenario():
        _, (stream,), _ = made()
        loop, found = asyncio.get_running_loop(), []

        def engine() -> None:
            for event in progress(count):
                stream.emit(event)
            stream.emit(LAST)

        thread = threading.Thread(target=engine)
        thread.start()
        number = 0
        while not found or found[-1] != LAST:
            number += 1
            due_s = loop.time() + 0.0002 if number % 2 else 0.0
            found += await asyncio.wait_for(stream.batch(due_s), LONG_S)
        thread.join()
        assert found == [*progress(count), LAST]

    asyncio.run(scenario())


def test_what_comes_to_a_closed_stream_is_late_and_known_once():
    async def scenario():
        _, (stream,), late = made()
        stream.emit(Progress(tokens=0))
        waiting = asyncio.ensure_future(stream.batch())
        assert await waiting == [Progress(tokens=0)]
        stream.emit(Progress(tokens=1))
        stream.close()
        assert late == [Progress(tokens=1)]
        for event in (Progress(tokens=2), Progress(tokens=3), LAST):
            stream.emit(event)
            await turns_of_the_loop()
        assert late == [*progress(3, 1), LAST]

    asyncio.run(scenario())


def test_a_wait_given_up_leaves_the_events_to_the_next():
    async def scenario():
        _, (stream,), _ = made()
        for due_s in (0.0, asyncio.get_running_loop().time() + LONG_S):
            waiting = asyncio.ensure_future(stream.batch(due_s))
            await turns_of_the_loop()
            waiting.cancel()
            await asyncio.wait({waiting})
            stream.emit(Progress(tokens=1))
            assert await asyncio.wait_for(stream.batch(), LONG_S) == [Progress(tokens=1)]

    asyncio.run(scenario())


def test_tokens_of_fast_steps_leave_together_and_the_end_at_once(make_engine, backend):
    """Messages are due only at an hour's end: the first token goes by itself, what follows with the turn's end."""

    async def hourly(world: World) -> None:
        world.stream_interval_s = 3_600.0

    async def scenario():
        prompt = list(range(1, 40))
        async with running(make_engine, backend) as world:
            expected = await world.aggregated(prompt, max_tokens=20)
        async with running(make_engine, backend, prepare=hourly) as world:
            messages = []
            async for event in world.decode_stub.Generate(prefill_request(prompt, max_tokens=20)):
                if event.WhichOneof("event") == "tokens":
                    messages.append([token.id for token in event.tokens.tokens])
            assert [token for message in messages for token in message] == expected
            assert len(messages) == 2 and len(expected) == 20

    asyncio.run(scenario())


@pytest.mark.parametrize("interval_s", [0.001, 0.003, 0.004, 0.008, 0.1])
@pytest.mark.parametrize("uptime_s", [0, 12_345, 3_000_000])
def test_the_next_message_is_due_after_now_and_within_one_interval(interval_s: float, uptime_s: int) -> None:
    """The clock of uvloop counts whole milliseconds, so that it often stands exactly on the grid."""
    for ms in range(2_000):
        now_s = (uptime_s * 1_000 + ms) / 1_000
        assert 0.0 < next_due(now_s, interval_s) - now_s <= interval_s * 1.001, now_s
