"""A handoff followed while its prompt is computed: regions move early; whatever ends it early frees both sides."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from cachestore.transports import Read
from engine.worker.memory import Holding, Memory
from engine.worker.timing import Timing
from moonrelay.prefix import prefix_hashes
from moonrelay.stubs.v1 import worker_pb2
from tests.workers.world import ROOT, World, prefill_request, running, tokens_of, until

CHUNKED = {"max_batch_tokens": 160, "max_batch_sequences": 32, "num_blocks": 48}
PATIENT = Timing(transfer_floor_ms=20_000, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=60_000)
HASTY = Timing(transfer_floor_ms=150, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=300)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(1, 250), k=length)


class Gate:
    """Lets the prefill engine's passes through one by one, and counts the decode side's reads."""

    def __init__(self, world: World) -> None:
        runner, self._backend = world.prefill.engine._runner, world.prefill.engine.backend
        runner.backend = self  # type: ignore[assignment]
        self.tickets, self.entered = threading.Semaphore(0), 0
        self.reads: list[list[Read]] = []
        self._read = world.decode.transports.read
        world.decode.transports.read = self.read  # type: ignore[method-assign]

    def forward(self, *args, **named):
        self.entered += 1
        assert self.tickets.acquire(timeout=60)
        return self._backend.forward(*args, **named)

    def read(self, peer, reads, deadline_s):
        self.reads.append(list(reads))
        return self._read(peer, reads, deadline_s)

    def open(self, passes: int = 1000) -> None:
        self.tickets.release(passes)


class Request:
    """What a router does with one request, step by step."""

    def __init__(self, world: World, prompt: list[int], **sampling) -> None:
        self.world, self.request = world, prefill_request(prompt, **sampling)

    async def start(self, **reserve) -> None:
        prompt, world = list(self.request.prompt_ids), self.world
        self.reservation_id = await world.reserve(prompt, self.request.sampling.max_tokens, **reserve)
        self.prefill = world.prefill_stub.Prefill(self.request)
        self.events = self.prefill.__aiter__()
        self.opened = (await anext(self.events)).opened
        self.adopt = world.adopt(self.request, self.reservation_id, self.opened)
        self.rest = asyncio.create_task(tokens_of(self.adopt))
        await until(lambda: world.reader.table.stats().num_following == 1)

    async def finish(self) -> list[int]:
        async for event in self.events:
            if event.HasField("first_token"):
                first = event.first_token.token.id
        return [first, *await self.rest]

    async def refused(self) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.rest
        return dict(failed.value.trailing_metadata())["moonrelay-reason"]


@asynccontextmanager
async def gated(make_engine, backend, **how) -> AsyncIterator[tuple[World, Gate]]:
    part_bytes, tier = how.pop("part_bytes", 1), how.pop("tier", None)

    async def prepare(world: World) -> None:
        world.part_bytes, world.tier = part_bytes, tier

    settings = {"timing": PATIENT, **CHUNKED, **how}
    timing, transport = settings.pop("timing"), settings.pop("transport", "memory")
    async with running(make_engine, backend, transport, timing=timing, prepare=prepare, **settings) as world:
        gate = Gate(world)
        try:
            yield world, gate
        finally:
            gate.open()


@pytest.mark.parametrize("transport", ["memory", "tcp", "nixl"])
def test_rows_move_chunk_by_chunk_and_state_by_layers_before_the_prompt_is_done(make_engine, backend, transport):
    prompt, layers = prompt_of(64 * 5 + 7), backend.config.pool_layout(64).num_kda_layers

    async def scenario():
        async with gated(make_engine, backend, transport=transport) as (world, gate):
            request = Request(world, prompt)
            await request.start()
            moved, sent = 0, world.owner._lent[request.opened.handoff_id]
            for passes in range(1, 3):  # 128 tokens each
                gate.open(1)
                await until(lambda n=passes: gate.entered == n + 1 and len(gate.reads) >= n)
                moved += 2
                assert sum(len(reads) for reads in gate.reads) == moved
                assert world.owner.table.stats().num_lending == 1
            gate.open()
            tokens = await request.finish()
            parts = [part for part in sent._log if part.HasField("state")]
            assert parts and [p.state.first_layer for p in parts] == [0, *(p.state.end_layer for p in parts[:-1])]
            assert parts[-1].state.end_layer < layers  # the last ones come with the manifest
            regions = sum(len(reads) for reads in gate.reads)
            assert regions == 6 + 2 * (len(parts) + 1)
            assert tokens == await world.aggregated(prompt)

    asyncio.run(scenario())


def test_a_small_handoff_is_worth_one_message(make_engine, backend):
    async def scenario():
        async with gated(make_engine, backend, part_bytes=4 << 20) as (world, gate):
            request = Request(world, prompt_of(200))
            await request.start()
            gate.open()
            tokens = await request.finish()
            assert len(gate.reads) == 1 and tokens == await world.aggregated(prompt_of(200))

    asyncio.run(scenario())


def test_a_cancelled_prompt_is_withdrawn_and_its_lent_memory_waits_for_the_reader(make_engine, backend):
    async def scenario():
        async with gated(make_engine, backend) as (world, gate):
            request = Request(world, prompt_of(400))
            await request.start()
            world.fabric.stop("prefill-0")
            gate.open(1)
            await until(lambda: world.reader.table.stats().num_pulling == 1)
            request.prefill.cancel()
            gate.open()
            await until(lambda: world.owner.table.stats().num_expired == 1)
            await until(lambda: not world.prefill.engine.stats().num_running)
            assert world.held() == (1, 1)  # a read of it runs
            world.fabric.resume("prefill-0")
            assert await request.refused() == "withdrawn"
            assert world.prefill.value("moonrelay_prefill_handoff_withdrawn_total") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_reader_that_gives_up_midway_keeps_its_landing_memory_and_is_heard_by_the_owner(make_engine, backend, how):
    async def scenario():
        timing = PATIENT if how == "cancelled" else HASTY
        async with gated(make_engine, backend, timing=timing) as (world, gate):
            request = Request(world, prompt_of(400))
            await request.start()
            world.fabric.stop("prefill-0")
            gate.open(1)
            await until(lambda: world.reader.table.stats().num_pulling == 1)
            if how == "cancelled":
                request.adopt.cancel()
                await until(lambda: world.reader.table.stats().num_quarantined == 1)
            else:
                assert await request.refused() == "deadline"
            assert world.reader.table.stats().quarantined_bytes == world.decode.value(
                "moonrelay_decode_quarantined_bytes"
            )
            assert world.owner.table.stats().num_lending == 1
            world.fabric.resume("prefill-0")
            await until(lambda: world.owner.table.stats().num_declined == 1)
            assert world.held() == (1, 0)  # the sequence still writes it
            gate.open()
            [*_, last] = [event async for event in request.events]
            assert last.HasField("handoff") and not last.handoff.HasField("finish_reason")

    asyncio.run(scenario())


def test_a_prefill_worker_that_goes_while_it_is_followed(make_engine, backend):
    async def scenario():
        async with gated(make_engine, backend, timing=HASTY) as (world, gate):
            request = Request(world, prompt_of(400))
            await request.start()
            gate.open(1)
            await until(lambda: len(gate.reads) >= 1)
            await world.prefill.server.stop(0)
            gate.open()
            assert await request.refused() in ("transfer", "withdrawn")
            assert world.decode.memory.num_held == 0

    asyncio.run(scenario())


def test_an_altered_region_is_refused_while_the_prompt_still_runs(make_engine, backend):
    async def scenario():
        async with gated(make_engine, backend, part_bytes=1) as (world, gate):
            request = Request(world, prompt_of(400))
            await request.start()
            span = world.prefill.prompts._make_span

            def altered(pool, offset, length):
                made = span(pool, offset, length)
                made.xxh3 ^= 1
                return made

            world.prefill.prompts._make_span = altered
            gate.open(1)
            assert await request.refused() == "checksum"
            await until(lambda: world.owner.table.stats().num_declined == 1)
            assert world.decode.memory.num_held == 0
            gate.open()
            async for _ in request.events:
                pass

    asyncio.run(scenario())


def test_a_handoff_is_followed_once_by_its_own_fence(make_engine, backend):
    async def scenario():
        async with gated(make_engine, backend) as (world, gate):
            request = Request(world, prompt_of(100))
            await request.start()
            await until(lambda: world.owner.table._handoffs[request.opened.handoff_id].followed)
            for fence in (request.opened.fence, request.opened.fence + 1):
                follow = worker_pb2.FollowHandoffRequest(handoff_id=request.opened.handoff_id, fence=fence)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await world.prefill_stub.FollowHandoff(follow).read()
                assert dict(refused.value.trailing_metadata())["moonrelay-reason"] == "withdrawn"
            gate.open()
            assert await request.finish() == await world.aggregated(prompt_of(100))

    asyncio.run(scenario())


class Kept:
    """A device tier with the first blocks of one prompt, as bytes; it puts them into every reservation."""

    def __init__(self, hashes: Sequence[bytes], count: int) -> None:
        self.hashes, self.count, self.rows = tuple(hashes), count, b""
        self.memory: Memory
        self.world: World

    def reserve(
        self, tokens: int, root: bytes, hashes: Sequence[bytes], *, write_back: bool = False
    ) -> tuple[Holding, int]:
        holding = self.memory.try_reserve(tokens)
        if root != ROOT or not hashes:
            return holding, 0
        size = self.memory.block_bytes
        for index, extent in enumerate(holding.rows(0, self.count)):
            view = self.world.decode.transports.view(*extent)
            view[:] = self.rows[index * size : (index + 1) * size]
        return holding, self.count


@pytest.mark.parametrize("late", [False, True])
def test_only_what_decode_does_not_hold_moves(make_engine, backend, late):
    """`late`: the follower comes when the manifest is made already."""
    prompt, count = prompt_of(64 * 5 + 7), 3
    hashes = prefix_hashes(ROOT, prompt, 64)

    async def scenario():
        tier = Kept(hashes, count)
        async with gated(make_engine, backend, tier=tier) as (world, gate):
            tier.memory, tier.world = world.decode.memory, world
            gate.open()
            want = await world.aggregated(prompt)
            whole = await world.handed_over(prompt)
            spans = whole[2].manifest.rows[:count]
            tier.rows = b"".join(bytes(world.prefill.transports.view(s.pool, s.offset, s.length)) for s in spans)
            assert await tokens_of(world.adopt(whole[0], whole[1], whole[2].opened)) == want[1:]
            everything = sum(len(reads) for reads in gate.reads)
            gate.reads.clear()

            request = prefill_request(prompt)
            reservation_id = await world.reserve(prompt, 6, root=ROOT, prefix_hashes=hashes)
            if late:
                opened = (await world.prefilled(request)).opened
                stream = world.adopt(request, reservation_id, opened)
            else:
                prefill = world.prefill_stub.Prefill(request)
                stream = world.adopt(request, reservation_id, (await prefill.read()).opened)
            events = [event async for event in stream]
            adopted = events[0].adopted
            tokens = [token.id for event in events for token in event.tokens.tokens]
            assert tokens == want[1:] and adopted.held_tokens == 64 * count
            held = {tuple(s) for reads in gate.reads for read in reads for s in [(read.span.pool, read.span.offset)]}
            assert len(held) == sum(len(reads) for reads in gate.reads) <= everything - count
            assert world.decode.value("moonrelay_decode_handoff_held_tokens_total") == 64 * count

    asyncio.run(scenario())


def test_blocks_held_under_another_name_are_refused(make_engine, backend):
    prompt = prompt_of(200)
    other = prefix_hashes(ROOT, prompt_of(200, seed=2), 64)

    async def scenario():
        tier = Kept(other, 1)
        async with gated(make_engine, backend, tier=tier) as (world, gate):
            tier.memory, tier.world, tier.rows = world.decode.memory, world, bytes(world.decode.memory.block_bytes)
            gate.open()
            request = Request(world, prompt)
            reservation_id = await world.reserve(prompt, 6, root=ROOT, prefix_hashes=other)
            opened = (await world.prefilled(request.request)).opened
            request.rest = asyncio.create_task(tokens_of(world.adopt(request.request, reservation_id, opened)))
            assert await request.refused() == "held"
            assert world.decode.value("moonrelay_decode_handoff_refused_total", reason="held") == 1

    asyncio.run(scenario())
