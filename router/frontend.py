"""Both frontends over one service: start, keep their health true, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiohttp import web

from router.edge import Workers
from router.fleet import Fleet, Index
from router.grpc import GrpcServer
from router.http import HttpFrontend, listen
from router.idstore import IdStore
from router.metrics import RouterMetrics
from router.service import ServedModel, Service
from router.settings import RouterSettings, host_and_port

FAREWELL_S: Final = 2.0  # after the drain deadline, for terminal replies to reach their clients
WATCH_S: Final = 60.0  # the fleet's changes wake the watch; this only bounds the wait


class Frontends:
    """A listening router. `http` and `grpc` are the addresses clients use."""

    def __init__(self, service: Service, runner: web.ServerRunner, http: str, server: GrpcServer, grpc: str) -> None:
        self.service = service
        self.http = http
        self.grpc = grpc
        self._runner = runner
        self._server = server

    async def watch(self) -> None:
        """Follow the fleet for ever: health, and channels and books of workers that are gone."""
        service = self.service
        loop = asyncio.get_running_loop()
        while True:
            await self._server.set_ready(service.ready)
            service.follow_fleet()
            await service.fleet.changed(loop.time() + WATCH_S)

    async def drain(self, drain_s: float) -> None:
        """Take no new requests, let those in flight end, end the rest at the deadline, stop listening."""
        self.service.draining = True
        await self._server.set_ready(False)
        for site in list(self._runner.sites):
            await site.stop()
        await self.service.wait_idle(drain_s)
        self.service.hurry()
        await self.service.wait_idle(FAREWELL_S)
        await asyncio.gather(self._server.stop(FAREWELL_S), self._runner.cleanup())
        await self.service.close()


async def start(
    settings: RouterSettings,
    model: ServedModel,
    fleet: Fleet,
    index: Index,
    ids: IdStore,
    group: asyncio.TaskGroup,
    on_fatal: Callable[[BaseException], None],
) -> Frontends:
    """Listen on both ports; what outlives a request (releases, ends of streams) runs in `group`.

    Raises: OSError and RuntimeError where an address is taken.
    """

    def background(work: Coroutine[Any, Any, None]) -> None:
        group.create_task(work)

    workers = Workers(
        connect_timeout_s=settings.connect_timeout_ms / 1e3,
        rpc_timeout_s=settings.rpc_timeout_ms / 1e3,
        background=background,
    )
    service = Service(
        settings=settings,
        model=model,
        fleet=fleet,
        index=index,
        ids=ids,
        workers=workers,
        metrics=RouterMetrics(model.name),
        background=background,
        on_fatal=on_fatal,
    )
    host, port = host_and_port(settings.listen, "listen")
    grpc_host, grpc_port = host_and_port(settings.grpc_listen, "grpc_listen")
    server = GrpcServer(service)
    grpc_port = await server.start(grpc_host, grpc_port)
    runner, port = await listen(HttpFrontend(service), host, port, settings.body_bytes_max)
    http, grpc = f"http://{_bracketed(host)}:{port}", f"{_bracketed(grpc_host)}:{grpc_port}"
    return Frontends(service, runner, http, server, grpc)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
