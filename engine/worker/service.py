"""The workers' gRPC edge: one place where a fault becomes a status, and the server's common parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moonrelay.errors import HandoffRefused, InvalidRequest, InvariantError, ServeError, SettingsError, Unavailable
from moonrelay.status import grpc_status

log = logging.getLogger(__name__)
T = TypeVar("T")
MESSAGE_BYTES_MAX: Final = 64 << 20  # a million ids with their hashes, several times over
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not a replica
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # routers ping idle channels to notice a dead worker
    ("grpc.keepalive_permit_without_calls", 1),
)


class Gate:
    """Counts the calls in progress, refuses new ones while draining, and turns faults into statuses."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        self._on_bug = on_bug
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def serve(
        self, context: grpc.aio.ServicerContext, call: Coroutine[Any, Any, T], *, drains: bool = False
    ) -> T:
        """Await one RPC's coroutine. `drains`: the call gives memory back, so it is served while draining too."""
        self._calls += 1
        self._idle.clear()
        try:
            if self.draining and not drains:
                call.close()  # it never starts
                raise Unavailable("this worker is shutting down")
            return await call
        except ServeError as fault:
            await _abort(context, fault)
        except InvariantError as bug:
            self._on_bug(bug)
            raise
        except Exception as bug:  # the process's edge: the caller gets a status, the log the trace
            log.exception("request failed")
            await _abort(context, ServeError(f"internal error: {type(bug).__name__}"))
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def idle(self) -> None:
        """Until no call is in progress."""
        await self._idle.wait()


async def _abort(context: grpc.aio.ServicerContext, fault: ServeError) -> NoReturn:
    """The machine-readable words travel as trailing metadata."""
    words = [("moonrelay-code", fault.code)]
    if isinstance(fault, HandoffRefused):
        words.append(("moonrelay-reason", fault.reason))
    if isinstance(fault, InvalidRequest) and fault.param is not None:
        words.append(("moonrelay-param", fault.param))
    await context.abort(grpc_status(fault), str(fault), tuple(words))
    raise InvariantError("an aborted call went on")


class Server:
    """A gRPC server with health and reflection. Health says SERVING only between `ready` and `not_ready`."""

    def __init__(self, service_name: str) -> None:
        self.grpc = grpc.aio.server(options=OPTIONS)
        self._names = (service_name, "")
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((service_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    def bind(self, listen: str, advertise_host: str | None) -> str:
        """Take the port; returns the address that peers dial. Raises: SettingsError when it is taken."""
        host, _, _ = listen.rpartition(":")
        try:
            port = self.grpc.add_insecure_port(listen)
        except RuntimeError:  # gRPC's own words say no more
            found = f"{listen}: in use, or not of this machine"
            raise SettingsError(f"listen: expected a free HOST:PORT of this machine, found {found}") from None
        return f"{advertise_host or host}:{port}"

    async def start(self) -> None:
        """After every servicer was added; health says NOT_SERVING until `ready`."""
        await self.grpc.start()
        await self.not_ready()

    async def ready(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def not_ready(self) -> None:
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.grpc.stop(grace_s)

    async def _set(self, status: int) -> None:
        for name in self._names:
            await self._health.set(name, status)
