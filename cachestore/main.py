"""`moonrelay cachestore`: settings, then one cache node until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from redis.asyncio import Redis

from cachestore.arena import Arena
from cachestore.client import MESSAGE_BYTES_MAX, CacheClient
from cachestore.index import CacheIndex
from cachestore.lines import LineServer
from cachestore.node.core import NodeCore
from cachestore.node.edge import CacheNodeEdge
from cachestore.node.index_writer import Identity
from cachestore.node.intake import Intake
from cachestore.node.metrics import NodeMetrics
from cachestore.node.replication import Replication
from cachestore.node.tiers import DiskTier
from cachestore.settings import CacheSettings
from cachestore.spans import ARENA_POOL
from cachestore.transports import TransportSet
from cachestore.transports.warm import keep_warm
from moonrelay import rpc, scrape
from moonrelay.errors import ServeError, SettingsError
from moonrelay.log import configure
from moonrelay.membership import Load, Member, Membership
from moonrelay.settings import load, redacted
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc
from moonrelay.valkey import check_policy, connect

logger = logging.getLogger(__name__)

SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheNode"].full_name
INDEX_SERVICE = f"{SERVICE}.index"  # health: whether this node reaches Redis
STOP_GRACE_S = 1.0
FLUSH_S = 5.0  # for files, once told to stop
BROKEN_STATUS = 70
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not a replica
)


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status. Raises: SettingsError."""
    settings = load(CacheSettings, argv, prog="moonrelay cachestore")
    configure("cachestore", settings.log_level)
    print(f"cachestore settings: {json.dumps(redacted(settings))}", flush=True)
    rpc.prepare()
    try:
        uvloop.run(_serve(settings))
    except ServeError as error:
        print(f"cachestore: {error}", flush=True)
        return 1
    except ExceptionGroup as group:
        if group.split(ServeError)[1] is not None:
            raise  # a bug among them
        print(f"cachestore: {_first(group)}", flush=True)
        return 1
    return 0


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


async def _serve(settings: CacheSettings) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    redis = connect(settings.redis_url)
    try:
        await check_policy(redis)
        await Node(settings, redis).run(stopping)
    finally:
        await redis.aclose()


def _die(bug: BaseException) -> None:
    """What this node says about its memory can no longer be trusted."""
    logger.critical("invariant broken", exc_info=bug)
    os._exit(BROKEN_STATUS)


def _arena(nbytes: int) -> Arena:
    try:
        return Arena(nbytes)
    except (OSError, OverflowError, ValueError) as error:
        expected = "what this machine can map"
        raise SettingsError(f"dram_bytes: expected {expected}, found {nbytes}: {error}") from None


class Node:
    """One cache node's parts, in the order of their lives."""

    def __init__(self, settings: CacheSettings, redis: Redis) -> None:
        self.settings, self._redis = settings, redis
        self.instance_id = settings.instance_id or f"cachestore-{socket.gethostname()}-{os.getpid()}"
        self.membership = Membership(redis, settings.cluster)
        self.metrics = NodeMetrics()
        self.arena = _arena(settings.dram_bytes)
        self.core = NodeCore(
            settings.dram_bytes, longest_transfer_ms=settings.longest_transfer_ms, disk_bytes=settings.disk_bytes
        )
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=OPTIONS)

    async def run(self, stopping: asyncio.Event) -> None:
        """Join, serve, and on `stopping` leave cleanly. Raises: Unavailable, SettingsError."""
        settings = self.settings
        epoch = await self.membership.next_epoch()
        host = settings.listen.rpartition(":")[0]
        transports = TransportSet.open(
            self.instance_id, epoch, host, settings.transport, advertise=settings.advertise_host
        )
        transports.register(ARENA_POOL, self.arena.base, self.arena.length)
        await transports.start()
        identity = Identity(instance_id=self.instance_id, epoch=epoch)
        intake = Intake(
            self.core, transports, CacheIndex(self._redis), identity, self.metrics,
            pull_timeout_ms=settings.pull_timeout_ms,
        )  # fmt: skip
        disk = DiskTier(
            self.core, intake.room, intake.index, lambda offset, length: self.arena.view[offset : offset + length],
            self.metrics, Path(settings.disk_dir) if settings.disk_dir is not None else None,
        )  # fmt: skip
        await disk.open()
        client = CacheClient(transports, self.membership)
        replication = Replication(
            self.core, disk, client, self.membership, identity, self.metrics, after=settings.replicate_after
        )
        edge = CacheNodeEdge(self.core, intake, identity, self.metrics, _die, disk, replication)
        address = self._bind(edge)
        lines = LineServer(edge, edge.at_once)
        line_address = f"{settings.advertise_host or host}:{await lines.start(host)}{lines.local}"
        metrics_address = scrape.serve(self.metrics.registry, settings.metrics_listen)
        await self._server.start()
        try:
            await self.membership.join(self._member(epoch, address, line_address, transports))
            async with asyncio.TaskGroup() as group:
                work = (
                    self.membership.run(),
                    edge.run(self.membership),
                    lines.run(),
                    intake.index.run(self._index_reachable),
                    disk.run(),
                    replication.run(),
                    keep_warm(transports, self.membership, ("prefill", "decode", "aggregated")),
                )
                tasks = [group.create_task(each) for each in work]
                await self._set_health(health_pb2.HealthCheckResponse.SERVING)
                self._announce(epoch, address, metrics_address)
                await stopping.wait()
                self.membership.update(state="draining")
                await disk.flush(FLUSH_S)
                for task in tasks:
                    task.cancel()
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self.membership.leave()
            await intake.index.forget()
        finally:
            await self._server.stop(STOP_GRACE_S)
            await lines.close()
            await client.close()
            await disk.close()
            await transports.close()
        print(f"{self.instance_id} stopped", flush=True)

    def _bind(self, edge: CacheNodeEdge) -> str:
        """Register the services and take the port; returns the address that peers dial."""
        cache_pb2_grpc.add_CacheNodeServicer_to_server(edge, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = self.settings.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(self.settings.listen)
        except RuntimeError:  # gRPC's own words say no more
            found = f"{self.settings.listen}: in use, or not of this machine"
            raise SettingsError(f"listen: expected a free HOST:PORT of this machine, found {found}") from None
        return f"{self.settings.advertise_host or host}:{port}"

    def _member(self, epoch: int, address: str, line_address: str, transports: TransportSet) -> Member:
        stats = self.core.stats()
        return Member(
            instance_id=self.instance_id,
            role="cachestore",
            epoch=epoch,
            grpc_address=address,
            line_address=line_address,
            peer=transports.peer().SerializeToString(),
            load=Load(free_bytes=stats.free_bytes, capacity_bytes=stats.capacity_bytes),
        )

    async def _index_reachable(self, reachable: bool) -> None:
        """A node without Redis serves what leases name; a health check by this name tells."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(INDEX_SERVICE, states.SERVING if reachable else states.NOT_SERVING)

    async def _set_health(self, status: int) -> None:
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def _announce(self, epoch: int, address: str, metrics_address: str) -> None:
        ready = {
            "instance_id": self.instance_id, "role": "cachestore", "pid": os.getpid(), "epoch": epoch,
            "grpc": address, "metrics": metrics_address,
        }  # fmt: skip
        if self.settings.ready_file is not None:
            path = Path(self.settings.ready_file)
            scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            scratch.write_text(json.dumps(ready))
            scratch.rename(path)
        logger.info("ready", extra=ready)
        print(f"{self.instance_id} ready: gRPC {address}, metrics {metrics_address}", flush=True)
