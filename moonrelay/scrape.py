"""Answers Prometheus from a thread of its own, with figures read on the event loop.

What is measured belongs to the loop: read from another thread, a book may change while it is being counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector, RestrictedRegistry

from moonrelay.errors import SettingsError

COLLECT_TIMEOUT_S = 5.0  # Prometheus itself gives up after 10 s


class LoopRegistry(Collector):
    """A registry whose collectors run on `loop`, whichever other thread asks."""

    def __init__(
        self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, names: frozenset[str] | None = None
    ) -> None:
        """`names`: the only samples that are wanted."""
        self._registry, self._loop, self._names = registry, loop, names

    def restricted_registry(self, names: Iterable[str]) -> LoopRegistry:
        """What a scrape with `name[]` sees; the exposition calls it so."""
        return LoopRegistry(self._registry, self._loop, frozenset(names))

    def collect(self) -> Iterable[Metric]:
        """Raises: TimeoutError when the loop does not come to it in time."""
        return asyncio.run_coroutine_threadsafe(self._collected(), self._loop).result(COLLECT_TIMEOUT_S)

    async def _collected(self) -> list[Metric]:
        if self._names is not None:
            return list(RestrictedRegistry(self._names, self._registry).collect())
        return list(self._registry.collect())


def serve(registry: CollectorRegistry, listen: str) -> str:
    """Serve /metrics of what the running loop measures; returns the address bound. Raises: SettingsError."""
    host, _, port = listen.rpartition(":")
    view = LoopRegistry(registry, asyncio.get_running_loop())
    try:
        server, _ = start_http_server(int(port), addr=host, registry=view)
    except (OSError, ValueError) as error:
        raise SettingsError(f"metrics_listen: expected a free HOST:PORT, found {listen}: {error}") from None
    return f"{host}:{server.server_port}"
