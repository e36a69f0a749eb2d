"""Memory is handed out in order, shared by count, and nothing is lost on any way out."""

from __future__ import annotations

import asyncio

import pytest

from engine.worker.memory import ROWS_POOL, STATE_POOL, Memory, Want
from moonrelay.errors import InvariantError, Overloaded, RequestTooLarge


def soon() -> float:
    return asyncio.get_running_loop().time() + 30


def memory_over(make_engine, num_blocks: int = 4, num_slots: int = 4, waiting_max: int = 8):
    """An engine without a thread: only its budgets matter here."""
    engine = make_engine(start=False, num_blocks=num_blocks, num_slots=num_slots)
    return engine, Memory(engine, waiting_max=waiting_max)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served_even_where_a_later_one_would_fit(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        most = memory.try_reserve(3 * 64)
        big = asyncio.create_task(memory.reserve(Want(tokens=4 * 64), soon()))
        await settle()
        small = asyncio.create_task(memory.reserve(Want(tokens=64), soon()))
        await settle()
        assert memory.num_waiting == 2 and engine.stats().free_blocks == 1
        with pytest.raises(Overloaded):
            memory.try_reserve(64)  # would overtake
        most.drop()
        memory.serve_waiting()
        await settle()
        assert big.done() and not small.done()
        big.result().drop()
        memory.serve_waiting()
        (await small).drop()
        assert engine.stats().free_blocks == 4 and memory.num_held == 0
        engine.check()

    asyncio.run(scenario())


def test_who_waits_too_long_is_refused_and_those_behind_move_up(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        held = memory.try_reserve(3 * 64)
        late = asyncio.create_task(memory.reserve(Want(tokens=4 * 64), asyncio.get_running_loop().time() + 0.01))
        await settle()
        behind = asyncio.create_task(memory.reserve(Want(tokens=64), soon()))
        with pytest.raises(Overloaded, match="in time"):
            await late
        (await behind).drop()
        held.drop()
        assert engine.stats().free_blocks == 4 and memory.num_waiting == 0

    asyncio.run(scenario())


def test_memory_handed_to_a_waiter_that_is_cancelled_at_that_moment_comes_back(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        held = memory.try_reserve(4 * 64)
        waiter = asyncio.create_task(memory.reserve(Want(tokens=64), soon()))
        await settle()
        held.drop()
        memory.serve_waiting()  # its future is set, its task has not run yet
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert engine.stats().free_blocks == 4 and memory.num_held == 0

    asyncio.run(scenario())


def test_the_queue_has_a_maximum_and_the_impossible_is_refused_at_once(make_engine):
    async def scenario():
        _, memory = memory_over(make_engine, waiting_max=1)
        with pytest.raises(RequestTooLarge):
            await memory.reserve(Want(tokens=5 * 64), soon())
        held = memory.try_reserve(4 * 64)
        waiting = asyncio.create_task(memory.reserve(Want(tokens=64), soon()))
        await settle()
        with pytest.raises(Overloaded):
            await memory.reserve(Want(tokens=64), soon())
        held.drop()
        memory.serve_waiting()
        (await waiting).drop()

    asyncio.run(scenario())


def test_the_last_user_gives_the_memory_back(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        holding = memory.try_reserve(64)
        holding.share()
        holding.drop()
        assert engine.stats().free_blocks == 3
        holding.drop()
        assert engine.stats().free_blocks == 4
        with pytest.raises(InvariantError):
            holding.drop()
        with pytest.raises(InvariantError):
            holding.share()

    asyncio.run(scenario())


def test_what_is_taken_but_held_by_nobody_is_reported_on_the_second_look(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        holding = memory.try_reserve(64)
        assert memory.leaked() == (0, 0) == memory.leaked()
        lost = engine.reserve(2 * 64)  # behind the worker's back
        assert memory.leaked() == (0, 0)
        assert memory.leaked() == (2, 1)
        engine.release(lost)
        assert memory.leaked() == (0, 0)
        holding.drop()

    asyncio.run(scenario())


def test_extents_name_the_bytes_of_the_pools(make_engine):
    async def scenario():
        engine, memory = memory_over(make_engine)
        holding = memory.try_reserve(2 * 64)
        pools = memory.pools()
        engine.rows[holding.reservation.blocks[1]].fill_(7.0)
        engine.state[holding.reservation.slot].fill_(9.0)
        _, second = holding.rows(0, 2)
        recurrent, conv = holding.state_parts()
        assert second.pool == ROWS_POOL and recurrent.pool == conv.pool == STATE_POOL
        assert recurrent.offset + recurrent.length == conv.offset
        assert recurrent.length + conv.length == holding.state().length
        rows = bytes(engine.rows.numpy().reshape(-1).view("u1")[second.offset : second.offset + second.length])
        assert rows == engine.rows[holding.reservation.blocks[1]].numpy().tobytes()
        state = engine.state.numpy().reshape(-1).view("u1")
        assert bytes(state[conv.offset : conv.offset + 4]) == engine.state[0:1, :1].fill_(9.0).numpy().tobytes()
        assert all(extent.offset + extent.length <= pools[extent.pool][1] for extent in (second, recurrent, conv))
        holding.drop()

    asyncio.run(scenario())
