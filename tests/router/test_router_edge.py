"""Channels to workers: who closes them, and what those who wait for one are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from fake_workers import FakeModel, FakeWorker
from router_fakes import in_loop

from moonrelay.stubs.v1 import worker_pb2
from router.edge import WorkerLost, Workers


@asynccontextmanager
async def nobody_accepts() -> AsyncIterator[tuple[str, int]]:
    """An address at which connecting neither succeeds nor fails: its line of waiting connections is full."""
    with socket.socket() as listener, contextlib.ExitStack() as clients:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()


@in_loop
async def test_a_channel_is_not_closed_under_one_who_waits_for_it():
    async with nobody_accepts() as (host, port), asyncio.TaskGroup() as group:
        workers = Workers(connect_timeout_s=30, rpc_timeout_s=1, background=group.create_task)
        gone = replace(FakeWorker(FakeModel(), "decode", "gone").worker(), address=f"{host}:{port}")
        request = worker_pb2.ReserveRequest()
        waiting = [asyncio.ensure_future(workers.reserve(gone, request)) for _ in range(2)]
        await asyncio.sleep(0)
        workers.prune(frozenset())
        await asyncio.sleep(0)
        (line,) = workers._lines.values()
        assert line.calls == 2 and not any(task.done() for task in waiting)
        await workers.close()
        for task in waiting:
            with pytest.raises(WorkerLost) as lost:
                await task
            assert lost.value.unreachable
        assert line.calls == 0
