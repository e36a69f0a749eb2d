"""Drafter rows go wherever the target's go: handed over, stored, fetched, written back; and never cost a hit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from decode.held import DeviceTier
from engine.engine import Engine
from moonrelay.stubs.v1 import worker_pb2
from tests.workers.cached import cached_world, continued, prompt_of, roots, stored
from tests.workers.drafts import write_drafter
from tests.workers.world import Prefilled, World, prefill_request, running, tokens_of, until

DRAFTED = {"draft_len_max": 4, "num_blocks": 64, "num_slots": 16}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "one")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "other", seed=9)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list]:
    """What the engines were asked for."""
    seen: list = []
    submit = Engine.submit

    def noting(engine, spec, *rest):
        seen.append(spec)
        return submit(engine, spec, *rest)

    monkeypatch.setattr(Engine, "submit", noting)
    yield seen


def draft_rows(engine: Engine, blocks, tokens: int) -> torch.Tensor:
    """[layers, tokens, width of a layer]: what the drafter sees of a sequence."""
    layout, layers = engine.pools.layout, 2
    own = engine.rows[list(blocks), layout.mla_floats :].view(
        len(blocks), layers, layout.block_tokens, layout.draft_width // layers
    )
    return own.transpose(0, 1).flatten(1, 2)[:, :tokens].clone()


async def settled(world: World) -> None:
    await until(lambda: not (world.prefill.prompts.num_background or world.decode.prompts.num_background))


async def plain(make_engine, backend, prompt: list[int], **sampling) -> list[int]:
    """The tokens of an engine without a drafter."""
    async with running(make_engine, backend, drafters={"decode": None}) as world:
        return await world.aggregated(prompt, **sampling)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("length", [63, 130])
def test_rows_are_handed_over_bit_for_bit_and_decode_drafts_from_them(
    make_engine, backend, drafter, specs, transport, length
):
    async def scenario():
        both = {"prefill": drafter, "decode": drafter}
        prompt = prompt_of(length)
        expected = await plain(make_engine, backend, prompt, max_tokens=20)
        async with running(make_engine, backend, transport, drafters=both, **DRAFTED) as world:
            request, reservation_id, ready = await world.handed_over(prompt, max_tokens=20)
            assert (ready.manifest.drafter, ready.manifest.draft_first) == (world.prefill.drafter, 0)
            lent = world.owner._lent[ready.opened.handoff_id].holding.reservation
            landing = world.reader._reserved[reservation_id].holding.reservation
            blocks = -(-length // 64)
            rows = draft_rows(world.prefill.engine, lent.blocks[:blocks], length)
            assert rows.isfinite().all() and rows.abs().amin(-1).amax() > 0
            tokens = [ready.first_token.id, *await tokens_of(world.adopt(request, reservation_id, ready.opened))]
            assert torch.equal(draft_rows(world.decode.engine, landing.blocks[:blocks], length), rows)
            assert tokens == expected
            assert specs[-1].restored == length and specs[-1].draft_first == 0
            assert list(specs[-1].history) == prompt[-40:]
            assert world.decode.value("moonrelay_decode_draft_tokens_total", tenant="unnamed", context="1k") > 0

    asyncio.run(scenario())


def test_a_pair_with_other_drafters_is_refused_before_a_byte_moves(make_engine, backend, drafter, other):
    async def scenario():
        async with running(make_engine, backend, drafters={"prefill": drafter, "decode": other}) as world:
            request, reservation_id, ready = await world.handed_over(prompt_of(70))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await tokens_of(world.adopt(request, reservation_id, ready.opened))
            assert dict(refused.value.trailing_metadata())["moonrelay-reason"] == "drafter"
            message = refused.value.details()
            assert world.prefill.drafter in message and world.decode.drafter in message
            assert world.decode.value("moonrelay_decode_handoff_bytes_total", transport="memory") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("owner", ["same", "other", "none"])
def test_a_hit_has_the_rows_of_its_own_drafter_and_is_a_hit_without_them(
    valkey, make_engine, backend, drafter, other, specs, owner
):
    async def scenario():
        publisher = {"same": drafter, "other": other, "none": None}[owner]
        drafters = {"prefill": drafter, "decode": publisher}
        async with cached_world(valkey, make_engine, backend, drafters=drafters, **DRAFTED) as (world, node):
            prompt, root = prompt_of(150), next(roots)
            await tokens_of(
                world.decode_stub.Generate(prefill_request(prompt, root=root, snapshot_at=(128,), store=True))
            )
            await settled(world)
            hit = (await node.match(prompt, root)).hit()
            ready = await world.prefilled(prefill_request(prompt, root=root, hit=hit))
            first = 0 if owner == "same" else 128
            assert (ready.cache.cached_tokens, ready.cache.drafter_cold) == (128, first)
            assert ready.manifest.draft_first == specs[-1].draft_first == first
            blocks = world.owner._lent[ready.opened.handoff_id].holding.reservation.blocks[:3]
            found = draft_rows(world.prefill.engine, blocks, 150)
            await release(world, ready)
            cold = await world.prefilled(prefill_request(prompt, root=next(roots)))
            blocks = world.owner._lent[cold.opened.handoff_id].holding.reservation.blocks[:3]
            wanted = draft_rows(world.prefill.engine, blocks, 150)
            await release(world, cold)
            assert torch.equal(found[:, first:], wanted[:, first:])
            assert torch.equal(found, wanted) == (owner == "same")

    asyncio.run(scenario())


async def release(world: World, ready: Prefilled) -> None:
    request = worker_pb2.ReleaseHandoffRequest(handoff_id=ready.opened.handoff_id, fence=ready.opened.fence)
    await world.prefill_stub.ReleaseHandoff(request)


def test_a_worker_without_a_drafter_reads_what_one_with_it_has_stored(valkey, make_engine, backend, drafter):
    async def scenario():
        drafters = {"prefill": drafter, "decode": None}
        async with cached_world(valkey, make_engine, backend, drafters=drafters) as (world, node):
            prompt, root = prompt_of(150), next(roots)
            await stored(world, prompt, root, 128)
            hit = (await node.match(prompt, root)).hit()
            assert hit.tokens == 128
            warm = await tokens_of(world.decode_stub.Generate(prefill_request(prompt, root=root, hit=hit)))
            assert world.decode.value("moonrelay_decode_cache_tokens_total", tier="host") == 128
            assert world.decode.value("moonrelay_decode_drafter_cold_tokens_total") == 0
            assert warm == await world.aggregated(prompt)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("kept_share", [0.0, 0.5])
def test_the_next_turn_finds_the_turns_drafter_rows(valkey, make_engine, backend, drafter, specs, how, kept_share):
    async def scenario():
        both = {"prefill": drafter, "decode": drafter}
        how_ = {"kept_share": kept_share, "drafters": both, **DRAFTED}
        async with cached_world(valkey, make_engine, backend, **how_) as (world, node):
            ids, root = prompt_of(100), next(roots)
            expected = await plain(make_engine, backend, ids, max_tokens=60)
            request = prefill_request(ids, root=root, max_tokens=60, snapshot_at=(64,), store=True, write_back=True)
            if how == "aggregated":
                tokens = await tokens_of(world.decode_stub.Generate(request))
            else:
                _, tokens = await continued(world, request)
            assert tokens == expected
            await settled(world)
            ids += tokens + prompt_of(30, 2)
            match = await node.match(ids, root)
            assert match.tokens == 128
            ready, more = await continued(world, prefill_request(ids, root=root, hit=match.hit(), max_tokens=20))
            assert (ready.cache.cached_tokens, ready.cache.drafter_cold) == (128, 0)
            assert [spec.draft_first for spec in specs] == [0] * len(specs)
            assert more == await plain(make_engine, backend, ids, max_tokens=20)

    asyncio.run(scenario())


def test_what_decode_holds_without_drafter_rows_is_known(valkey, make_engine, backend, drafter, specs):
    """A turn that began with a cold hit leaves cold blocks in decode's memory: a handoff onto them says so."""

    async def scenario():
        async with running(make_engine, backend, prepare=device_tier, **DRAFTED) as world:
            memory = world.decode.memory
            world.reader._held = DeviceTier(memory)
            prompt, root = prompt_of(150), next(roots)
            request = prefill_request(prompt, root=root, max_tokens=10, write_back=True)
            await handed(world, request)
            await settled(world)
            for kept in memory.bundles._kept.values():  # as a cold hit would have left them
                kept.drafted = kept.hash != request.prefix_hashes[0]
            assert await handed(world, request) == await plain(make_engine, backend, prompt, max_tokens=10)
            assert (specs[-2].restored, specs[-2].draft_first) == (150, 64)

    async def device_tier(world: World) -> None:
        world.kept_share, world.drafters = 0.5, {"prefill": drafter, "decode": drafter}

    async def handed(world: World, request) -> list[int]:
        hashes = {"root": request.root, "prefix_hashes": request.prefix_hashes}
        reservation_id = await world.reserve(list(request.prompt_ids), 10, write_back=True, **hashes)
        ready = await world.prefilled(request)
        return [ready.first_token.id, *await tokens_of(world.adopt(request, reservation_id, ready.opened))]

    asyncio.run(scenario())


def test_a_drafter_of_nan_leaves_every_answer_as_it_was(make_engine, backend, tmp_path):
    async def scenario():
        broken = write_drafter(tmp_path / "nan", poison="final_norm.weight")
        prompt = prompt_of(130)
        expected = await plain(make_engine, backend, prompt, max_tokens=20)
        async with running(make_engine, backend, drafters={"prefill": broken, "decode": broken}, **DRAFTED) as world:
            assert await world.disaggregated(prompt, max_tokens=20) == expected
            assert await world.aggregated(prompt, max_tokens=20) == expected
            ignored = world.decode.value("moonrelay_decode_drafts_ignored_total", reason="empty")
            assert ignored > 0
            assert world.decode.value("moonrelay_decode_draft_tokens_total", tenant="unnamed", context="1k") == 0

    asyncio.run(scenario())


def test_drafter_rows_that_a_node_spoils_cost_the_rows_and_not_the_hit(valkey, make_engine, backend, drafter, specs):
    async def scenario():
        both = {"prefill": drafter, "decode": drafter}
        async with cached_world(valkey, make_engine, backend, drafters=both, **DRAFTED) as (world, node):
            prompt, root = prompt_of(150), next(roots)
            expected = await plain(make_engine, backend, prompt, max_tokens=10)
            request = prefill_request(prompt, root=root, snapshot_at=(128,), store=True)
            await tokens_of(world.decode_stub.Generate(request))
            await settled(world)
            offset, length = world.prefill.memory.block_bytes, world.prefill.memory.draft_bytes
            kept = bytes(node.arena.view)
            ready = await world.prefilled(prefill_request(prompt, root=next(roots)))
            blocks = world.owner._lent[ready.opened.handoff_id].holding.reservation.blocks
            rows = bytes(world.prefill.transports.view(0, (blocks[1] + 1) * offset - length, length))
            await release(world, ready)
            at = kept.find(rows)  # the second block's, as the node has them
            assert at >= 0
            node.arena.view[at + 5] ^= 1
            hit = (await node.match(prompt, root)).hit()
            warm, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit, max_tokens=10))
            assert (warm.cache.cached_tokens, warm.cache.drafter_cold) == (128, 128)
            assert warm.manifest.draft_first == specs[-1].draft_first == 128
            assert world.prefill.value("moonrelay_prefill_drafter_rows_refused_blocks_total") >= 1
            assert tokens == expected

    asyncio.run(scenario())
