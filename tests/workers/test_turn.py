"""The turn's write-back through real workers and a cache node: the next turn starts at its last boundary."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from decode import edge
from moonrelay.stubs.v1 import worker_pb2
from tests.workers.cached import CacheNode, cached_world, continued, prompt_of, roots
from tests.workers.world import World, prefill_request, tokens_of, until


async def first_turn(world: World, how: str, prompt: list[int], root: bytes, max_tokens: int) -> list[int]:
    """Serve it with write-back and wait until everything is stored."""
    cut = (len(prompt) - 1) // 64 * 64
    request = prefill_request(
        prompt, root=root, max_tokens=max_tokens, store=True, write_back=True, snapshot_at=(cut,) if cut else ()
    )
    if how == "aggregated":
        tokens = await tokens_of(world.decode_stub.Generate(request))
    else:
        _, tokens = await continued(world, request)
    await settled(world)
    return tokens


async def settled(world: World) -> None:
    await until(lambda: not (world.prefill.prompts.num_background or world.decode.prompts.num_background))
    await until(lambda: world.held() == (0, 0) or len(world.owner.table) > 0)


async def next_turn(world: World, node: CacheNode, ids: list[int], root: bytes, depth: int) -> None:
    """The same ids and more: hits exactly `depth` and goes on with the tokens of a cold run."""
    match = await node.match(ids, root)
    assert match.tokens == depth
    ready, tokens = await continued(world, prefill_request(ids, root=root, hit=match.hit()))
    assert ready.cache.cached_tokens == depth
    assert tokens == await world.aggregated(ids)


@pytest.mark.parametrize("how", ["aggregated", "disaggregated"])
@pytest.mark.parametrize(
    ("length", "max_tokens"),
    [
        (30, 36),
        (100, 29),
        (63, 2),
        (129, 4),
    ],  # past the prompt's last boundary, one short of it, on it, within a block
)
def test_the_next_turn_hits_at_the_turns_last_boundary(valkey, make_engine, backend, how, length, max_tokens):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, num_blocks=64, num_slots=16) as (world, node):
            prompt, root = prompt_of(length), next(roots)
            tokens = await first_turn(world, how, prompt, root, max_tokens)
            assert len(tokens) == max_tokens
            consumed = length + max_tokens - 1  # no state has seen the last token
            await next_turn(world, node, prompt + tokens + prompt_of(20, 2), root, consumed // 64 * 64)

    asyncio.run(scenario())


def test_a_chain_of_turns_never_computes_an_earlier_turn_again(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, num_blocks=64, num_slots=16) as (world, node):
            ids, root, consumed = prompt_of(70), next(roots), 0
            for turn in range(2):
                match = await node.match(ids, root)
                request = prefill_request(
                    ids, root=root, hit=match.hit() if match.tokens else None, max_tokens=70, store=True,
                    write_back=True, temperature=1.0, seed=turn,
                )  # fmt: skip
                _, tokens = await continued(world, request)
                await settled(world)
                assert match.tokens == consumed // 64 * 64
                consumed = len(ids) + len(tokens) - 1
                ids = ids + tokens + prompt_of(25, turn)
            await next_turn(world, node, ids, root, consumed // 64 * 64)

    asyncio.run(scenario())


def test_a_turn_cut_off_by_its_caller_keeps_what_the_caller_was_sent(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, num_blocks=64, num_slots=16) as (world, node):
            prompt, root = prompt_of(40), next(roots)
            request = prefill_request(prompt, root=root, max_tokens=300, write_back=True)
            call, sent = world.decode_stub.Generate(request), []
            async for event in call:
                sent += [token.id for token in event.tokens.tokens]
                if len(sent) >= 60:
                    call.cancel()
                    break
            await until(lambda: world.held() == (0, 0))
            await settled(world)
            depth = (await node.match([*prompt, *sent, *prompt_of(100)], root)).tokens
            assert depth == 64  # the engine may be ahead of the caller, by less than a block here
            await next_turn(world, node, [*prompt, *sent, 1], root, 64)

    asyncio.run(scenario())


def test_a_turn_that_fails_leaves_nothing_of_itself(valkey, make_engine, backend, monkeypatch):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(40), next(roots)
            call = world.decode_stub.Generate(prefill_request(prompt, root=root, max_tokens=80, write_back=True))
            seen = 0
            with pytest.raises(grpc.aio.AioRpcError):
                async for event in call:
                    seen += len(event.tokens.tokens)
                    if seen >= 40:
                        monkeypatch.setattr(backend, "forward", broken)
            monkeypatch.undo()
            await settled(world)
            assert world.decode.value("moonrelay_decode_published_entries_total", outcome="stored") == 0
            assert (await node.match([*prompt, *prompt_of(100)], root)).matchable_tokens == 0
            assert world.decode.engine.stats().free_slots == world.decode.engine.stats().num_slots

    def broken(*_):
        raise RuntimeError("injected")

    asyncio.run(scenario())


def test_nobody_asked_nothing_kept(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(100), next(roots)
            await tokens_of(world.decode_stub.Generate(prefill_request(prompt, root=root, max_tokens=30)))
            await settled(world)
            assert (await node.match([*prompt, 1], root)).matchable_tokens == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["tail", "hashes", "root"])
def test_a_write_back_that_names_another_prompt_is_refused(make_engine, backend, valkey, change):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, _):
            prompt = prompt_of(100)
            request = prefill_request(prompt, write_back=True)
            reservation_id = await world.reserve(prompt, 6)
            ready = await world.prefilled(request)
            adopt = worker_pb2.AdoptRequest(
                request_id="r", reservation_id=reservation_id, opened=ready.opened, sampling=request.sampling
            )
            adopt.writeback.root = request.root
            adopt.writeback.prefix_hashes.extend(request.prefix_hashes)
            adopt.writeback.tail_ids.extend(prompt[64:])
            match change:
                case "tail":
                    adopt.writeback.tail_ids.pop()
                case "hashes":
                    adopt.writeback.prefix_hashes.append(request.root)
                case "root":
                    adopt.writeback.root = b"short"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await tokens_of(world.decode_stub.Adopt(adopt))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await world.decode_stub.ReleaseReservation(
                worker_pb2.ReleaseReservationRequest(reservation_id=reservation_id)
            )
            await world.prefill_stub.ReleaseHandoff(
                worker_pb2.ReleaseHandoffRequest(handoff_id=ready.opened.handoff_id, fence=ready.opened.fence)
            )

    asyncio.run(scenario())


def test_the_end_of_a_turn_waits_for_its_write_back_but_not_for_a_node_that_stalls(
    valkey, make_engine, backend, monkeypatch
):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, num_blocks=64, num_slots=16) as (world, node):
            for stalled in (False, True):
                monkeypatch.setattr(edge, "WRITE_BACK_PATIENCE_S", 0.01 if stalled else 30.0)
                prompt, root = prompt_of(40), next(roots)
                if stalled:
                    world.fabric.stop("decode-0")
                request = prefill_request(prompt, root=root, max_tokens=30, write_back=True)
                tokens = await tokens_of(world.decode_stub.Generate(request))
                depth = (await node.match([*prompt, *tokens, 1], root)).tokens
                assert depth == (0 if stalled else 64)
            world.fabric.resume("decode-0")
            await settled(world)
            assert (await node.match([*prompt, *tokens, 1], root)).tokens == 64

    asyncio.run(scenario())
