"""A request through both workers gives the tokens of one worker over every transport; a broken handoff gives none."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from engine.worker.timing import Timing
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from tests.workers.world import prefill_request, running, tokens_of, until

LENGTHS = (1, 63, 64, 65, 130)
SHORT = Timing(transfer_floor_ms=150, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=300)

UNPULLED = Timing(transfer_floor_ms=700, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=1_500)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(1, 250), k=length)


@pytest.mark.parametrize("transport", ["memory", "tcp", "nixl"])
def test_disaggregated_equals_aggregated(make_engine, backend, transport):
    async def scenario():
        async with running(make_engine, backend, transport) as world:
            for length in LENGTHS if transport == "memory" else (130,):
                prompt = prompt_of(length)
                alone = await world.aggregated(prompt)
                assert len(alone) == 6
                assert await world.disaggregated(prompt) == alone
            used = [m for m in ("memory", "tcp", "nixl") if world.decode.value(
                "moonrelay_decode_handoff_bytes_total", transport=m)]  # fmt: skip
            assert used == [transport]

    asyncio.run(scenario())


def test_seeded_sampling_and_a_busy_batch_change_nothing(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend, num_blocks=64, num_slots=16) as world:
            jobs = [(prompt_of(length, seed), {"temperature": 0.8, "top_p": 0.95, "seed": seed, "max_tokens": 8})
                    for seed, length in enumerate((3, 64, 70, 100, 129))]  # fmt: skip
            alone = [await world.aggregated(prompt, **how) for prompt, how in jobs]
            assert len({tuple(tokens) for tokens in alone}) == len(jobs)
            together = await asyncio.gather(*(world.disaggregated(prompt, **how) for prompt, how in jobs))
            assert together == alone

    asyncio.run(scenario())


async def refusal_of(call) -> tuple[grpc.StatusCode, str, str]:
    """Status, code and reason of a call that must fail before its first token."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await tokens_of(call)
    words = dict(failed.value.trailing_metadata())
    return failed.value.code(), words["moonrelay-code"], words.get("moonrelay-reason", "")


@pytest.mark.parametrize(
    ("transport", "region"),
    [
        ("memory", "first row"), ("memory", "last row"), ("memory", "recurrent"), ("memory", "conv"),
        ("tcp", "last row"), ("nixl", "recurrent"),
    ],
)  # fmt: skip
def test_one_altered_bit_is_refused_counted_and_freed(make_engine, backend, transport, region):
    async def scenario():
        async with running(make_engine, backend, transport) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(65))
            manifest = ready.manifest
            regions = {
                "first row": manifest.rows[0], "last row": manifest.rows[1],
                "recurrent": manifest.state[0].recurrent, "conv": manifest.state[0].conv,
            }  # fmt: skip
            span = regions[region]
            world.prefill.transports.view(span.pool, span.offset, span.length)[span.length // 2] ^= 1
            refused = await refusal_of(world.adopt(request, reservation_id, ready.opened))
            assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "handoff_refused", "checksum")
            assert world.decode.value("moonrelay_decode_handoff_refused_total", reason="checksum") == 1
            await world.until_clean()  # both sides, long before the lease ends
            assert await world.disaggregated(prompt_of(5)) == await world.aggregated(prompt_of(5))

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_prefill_worker_that_dies_before_the_pull(make_engine, backend, transport):
    async def scenario():
        async with running(make_engine, backend, transport, timing=SHORT) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(65))
            await world.prefill.transports.close()
            status, code, reason = await refusal_of(world.adopt(request, reservation_id, ready.opened))
            assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "handoff_refused")
            assert reason == "transfer"
            assert world.decode.memory.num_held == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_landing_memory_stays_out_of_use_until_the_transport_says_it_is_over(make_engine, backend, how):
    async def scenario():
        async with running(make_engine, backend, timing=SHORT, num_blocks=4) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(130))  # 3 of 4 blocks on each side
            world.fabric.stop("prefill-0")
            call = world.adopt(request, reservation_id, ready.opened)
            if how == "deadline":
                assert (await refusal_of(call))[2] == "deadline"
            else:
                await until(lambda: world.reader.table.stats().num_pulling == 1)
                call.cancel()
                await until(lambda: world.reader.table.stats().num_quarantined == 1)
            stats = world.reader.table.stats()
            assert stats.num_quarantined == 1 and stats.quarantined_bytes > 0
            assert world.decode.value("moonrelay_decode_quarantined_bytes") == stats.quarantined_bytes
            with pytest.raises(grpc.aio.AioRpcError) as no_room:
                await world.reserve(prompt_of(65), 1)
            assert no_room.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            world.fabric.resume("prefill-0")  # now the bytes land, late
            await world.until_clean()
            assert world.decode.value("moonrelay_decode_quarantined_bytes") == 0
            assert await world.disaggregated(prompt_of(130)) == await world.aggregated(prompt_of(130))

    asyncio.run(scenario())


def test_a_handoff_nobody_pulls_is_freed_when_its_lease_and_the_longest_transfer_are_over(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend, timing=UNPULLED) as world:
            _, reservation_id, ready = await world.handed_over(prompt_of(65))
            assert world.held() == (1, 1) and ready.manifest.lease_ms >= 1_500
            await until(lambda: not world.owner.table.stats().num_published)
            assert world.prefill.memory.num_held == 1  # a read that began in time may still run
            await until(lambda: not world.prefill.memory.num_held)
            assert world.prefill.value("moonrelay_prefill_handoff_lease_expired_total") == 1
            await world.decode_stub.ReleaseReservation(
                worker_pb2.ReleaseReservationRequest(reservation_id=reservation_id)
            )

    asyncio.run(scenario())


def test_acknowledgements_are_idempotent_and_fenced(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend) as world:
            _, reservation_id, ready = await world.handed_over(prompt_of(5))
            ack = worker_pb2.ReleaseHandoffRequest(handoff_id=ready.opened.handoff_id, fence=ready.opened.fence + 1)
            await world.prefill_stub.ReleaseHandoff(ack)
            assert world.prefill.memory.num_held == 1
            ack.fence = ready.opened.fence
            for _ in range(3):
                await world.prefill_stub.ReleaseHandoff(ack)
            assert world.prefill.memory.num_held == 0
            for _ in range(2):
                await world.decode_stub.ReleaseReservation(
                    worker_pb2.ReleaseReservationRequest(reservation_id=reservation_id)
                )

    asyncio.run(scenario())


def test_reservations_end_by_themselves_and_cannot_be_used_then(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend, reservation_ttl_ms=50) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(3))
            await until(lambda: not world.decode.memory.num_held)
            assert (await refusal_of(world.adopt(request, reservation_id, ready.opened)))[2] == "reservation"
            assert world.decode.value("moonrelay_decode_reservations_expired_total") == 1
            await world.until_clean()  # the owner was told

    asyncio.run(scenario())


def test_a_handoff_is_adopted_once(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(65))
            first = asyncio.create_task(tokens_of(world.adopt(request, reservation_id, ready.opened)))
            await until(lambda: not world.reader.table.stats().num_reserved)
            assert (await refusal_of(world.adopt(request, reservation_id, ready.opened)))[2] == "reservation"
            assert len(await first) == 5

    asyncio.run(scenario())


def test_a_manifest_of_a_restarted_worker_is_refused(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(3))
            world.epochs["prefill-0"] = 2
            assert (await refusal_of(world.adopt(request, reservation_id, ready.opened)))[2] == "stale_epoch"
            assert world.decode.memory.num_held == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_turn_that_its_first_token_ends_hands_nothing_over(make_engine, backend, end):
    async def scenario():
        async with running(make_engine, backend) as world:
            prompt = prompt_of(70)
            [first, *_] = await world.aggregated(prompt)
            how = {"max_tokens": 1} if end == "length" else {"stop_token_ids": [first]}
            ready = await world.prefilled(prefill_request(prompt, **how))
            assert ready.first_token.id == first and ready.manifest is None
            assert ready.finish_reason == common_pb2.FinishReason.Value(f"FINISH_REASON_{end.upper()}")
            assert world.held() == (0, 0)
            assert await world.aggregated(prompt, **how) == [first]

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["adopt", "generate", "prefill"])
def test_a_client_that_goes_away_gives_everything_back(make_engine, backend, call):
    async def scenario():
        async with running(make_engine, backend) as world:
            if call == "prefill":
                stream = world.prefill_stub.Prefill(prefill_request(prompt_of(1500)))
            elif call == "generate":
                stream = world.decode_stub.Generate(prefill_request(prompt_of(65), max_tokens=500))
            else:
                request, reservation_id, ready = await world.handed_over(prompt_of(65), max_tokens=500)
                stream = world.adopt(request, reservation_id, ready.opened)
            async for event in stream:
                if event.WhichOneof("event") in ("tokens", "progress"):
                    break
            stream.cancel()
            await world.until_clean()

    asyncio.run(scenario())


def test_no_room_is_said_at_once_and_a_malformed_request_names_its_field(make_engine, backend):
    async def scenario():
        async with running(make_engine, backend, num_blocks=4) as world:
            kept = await world.reserve(prompt_of(130), 50)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await world.reserve(prompt_of(130), 50)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await world.decode_stub.ReleaseReservation(worker_pb2.ReleaseReservationRequest(reservation_id=kept))
            bad = prefill_request(prompt_of(130))
            del bad.prefix_hashes[1:]
            unfit = prefill_request(prompt_of(130), max_tokens=5000)
            for request, param in ((bad, "prefix_hashes"), (unfit, "max_tokens")):
                with pytest.raises(grpc.aio.AioRpcError) as wrong:
                    await tokens_of(world.decode_stub.Generate(request))
                assert wrong.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert dict(wrong.value.trailing_metadata())["moonrelay-param"] == param

    asyncio.run(scenario())
