"""Narrower snapshots through both workers: smaller where they are stored, the same state wherever they come from."""

from __future__ import annotations

import asyncio

import pytest
import torch

from model.ops.snapshot import naive
from tests.workers.cached import cached_world, continued, prompt_of, roots
from tests.workers.world import prefill_request, until


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_hit_goes_on_from_the_decoded_state_whichever_tier_it_came_from(valkey, make_engine, backend, dtype):
    async def scenario():
        how = {"kept_share": 0.5, "snapshot_dtype": dtype, "num_blocks": 64, "num_slots": 16}
        async with cached_world(valkey, make_engine, backend, **how) as (world, node):
            prompt, root = prompt_of(128), next(roots)
            exact = []
            copy = world.prefill.engine.pools.copy_state

            def watched(source: int, target: int) -> None:
                copy(source, target)
                exact.append(world.prefill.engine.state[target].clone())

            world.prefill.engine.pools.copy_state = watched
            request = prefill_request(prompt, root=root, snapshot_at=(64,), store=True)
            await continued(world, request)
            await until(lambda: world.prefill.prompts.num_background == 0)
            layout = backend.layout(64)
            stored = naive.encode(exact[0], layout, dtype)
            assert world.prefill.prompts.form.nbytes == len(stored) < layout.slot_floats * 4
            states = {}
            for tier in ("device", "host"):
                if tier == "host":
                    world.prefill.memory.clear()
                hit = (await node.match(prompt, root)).hit()
                ready, _ = await continued(world, prefill_request(prompt[:65], root=root, hit=hit))
                assert getattr(ready.cache, f"cached_{tier}") == ready.cache.cached_tokens == 64
                states[tier] = [(s.recurrent.xxh3, s.conv.xxh3) for s in ready.manifest.state]
            assert states["device"] == states["host"]
            holding = world.prefill.memory.try_reserve(64)
            slot = holding.reservation.slot
            world.prefill.engine.state[slot] = exact[0]
            world.prefill.prompts.form.encode(slot)
            world.prefill.prompts.form.decode(slot)
            assert torch.equal(world.prefill.engine.state[slot], naive.decode(stored, layout, dtype))
            holding.drop()

    asyncio.run(scenario())
