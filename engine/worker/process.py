"""The process around a worker: start, ready, heartbeat, drain, stop. The role plugs in what it serves."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import uvloop
from redis.asyncio import Redis

from engine.engine import Engine, exit_process
from engine.worker.cache import PromptCache
from engine.worker.memory import Memory
from engine.worker.metrics import Source, WorkerMetrics
from engine.worker.model import LoadedModel, load_model
from engine.worker.prompt import PromptRunner, Spawn
from engine.worker.service import Gate, Server
from engine.worker.settings import WorkerSettings
from model.errors import BackendUnavailable, ModelError
from moonrelay import rpc, scrape
from moonrelay.errors import SettingsError, Unavailable
from moonrelay.ids import Role
from moonrelay.log import configure
from moonrelay.membership import Load, Member, Membership
from moonrelay.settings import redacted
from moonrelay.stubs.v1 import common_pb2
from moonrelay.valkey import check_policy, connect

log = logging.getLogger(__name__)
WATCH_S: Final = 0.25  # how fresh the load in the heartbeats is
READS_BY: Final = {"auto": ("nixl", "tcp"), "nixl": ("nixl",), "tcp": ("tcp",)}
STOP_GRACE_S: Final = 0.5  # for calls to notice that they were cancelled
# After a pass the engine's thread takes the GIL back from the event loop; at Python's 5 ms that costs whole steps.
SWITCH_INTERVAL_S: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a role is built from."""

    settings: WorkerSettings
    instance_id: str
    epoch: int
    address: str  # gRPC, as peers dial it
    host: str
    model: LoadedModel
    engine: Engine
    memory: Memory
    metrics: WorkerMetrics
    membership: Membership
    redis: Redis
    gate: Gate
    spawn: Spawn


class Service(Protocol):
    """A role's own half."""

    peer: common_pb2.Peer

    def register(self, server: grpc.aio.Server) -> None: ...

    async def run(self) -> None:
        """What it does beside its calls; until cancelled."""
        ...

    async def drained(self) -> None:
        """Until nothing of it is left that others may still need."""
        ...

    def check(self) -> int:
        """Assert its invariants; returns how many things it keeps alive (0: idle)."""
        ...

    async def close(self) -> None: ...


Assemble = Callable[[Worker], Awaitable[Service]]


def say(line: str) -> None:
    """Progress for whoever started the process."""
    print(line, flush=True)


def serve(settings: WorkerSettings, *, role: Role, source: Source, service_name: str, assemble: Assemble) -> int:
    """A worker command after its settings are read: load, serve until told to stop. Returns the exit status."""
    configure(role, settings.log_level)
    rpc.prepare()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    say(f"{role} settings: {json.dumps(redacted(settings))}")
    try:
        model = load_model(settings, say)  # before the event loop: a signal meanwhile ends the process at once
    except (ModelError, BackendUnavailable) as error:
        say(f"cannot serve {settings.model_dir}: {error}")
        return 1
    failed: list[str] = []
    refused: list[SettingsError] = []
    try:
        uvloop.run(_until_signalled(Process(settings, role, source, service_name, model), assemble))
    except* Unavailable as unavailable:
        failed = [str(error) for error in unavailable.exceptions]
    except* SettingsError as found:
        refused = [error for error in found.exceptions if isinstance(error, SettingsError)]
    if refused:
        raise refused[0]
    for line in failed:
        say(f"{role} cannot go on: {line}")
    return 1 if failed else 0


async def _until_signalled(process: Process, assemble: Assemble) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, process.stop)
    await process.run(assemble)


def build_prompts(worker: Worker, cache: PromptCache) -> PromptRunner:
    settings = worker.settings
    if settings.cache:
        worker.memory.announcer = cache
    return PromptRunner(
        worker.engine,
        worker.memory,
        cache if settings.cache else None,
        cache.checked_span,
        worker.metrics,
        worker.spawn,
        admission_wait_ms=settings.admission_wait_ms,
        publish_inflight_max=settings.publish_inflight_max,
        snapshot_dtype=settings.snapshot_dtype,
        drafter=worker.model.drafter_id,
    )


def cache_arguments(worker: Worker) -> dict[str, Any]:
    """What a worker opens its transports and cache client with."""
    return {
        "instance_id": worker.instance_id,
        "epoch": worker.epoch,
        "host": worker.settings.listen.rpartition(":")[0],
        "advertise": worker.host,
        "transport": worker.settings.transport,
        "pools": worker.memory.pools(),
        "membership": worker.membership,
        "transfer_ms": worker.settings.timing().transfer_ms,
        "observer": worker.metrics,
        "redis": worker.redis if worker.settings.cache and worker.settings.device_share else None,
    }


class Process:
    """One worker. `run` is its life after the model is loaded."""

    def __init__(
        self, settings: WorkerSettings, role: Role, source: Source, service_name: str, model: LoadedModel
    ) -> None:
        self.settings, self.role, self.source, self.model = settings, role, source, model
        self.instance_id = settings.instance_id or f"{role}-{socket.gethostname()}-{os.getpid()}"
        self._service_name = service_name
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_idle = False

    def stop(self) -> None:
        """Begin to drain, then end. On the loop's thread."""
        self._stop.set()

    async def run(self, assemble: Assemble) -> None:
        """Everything in the order of its life. Raises: SettingsError, Unavailable while starting."""
        settings = self.settings
        async with AsyncExitStack() as closing:
            redis = connect(settings.redis_url)
            closing.push_async_callback(redis.aclose)
            await check_policy(redis)
            membership = Membership(redis, settings.cluster)
            epoch = await membership.next_epoch()
            server = Server(self._service_name)
            closing.push_async_callback(server.stop, 0)
            address = server.bind(settings.listen, settings.advertise_host)
            engine, memory, metrics = await self._start_engine()
            closing.push_async_callback(asyncio.to_thread, engine.stop)
            async with asyncio.TaskGroup() as group:
                worker = Worker(
                    settings=settings,
                    instance_id=self.instance_id,
                    epoch=epoch,
                    address=address,
                    host=address.rpartition(":")[0],
                    model=self.model,
                    engine=engine,
                    memory=memory,
                    metrics=metrics,
                    membership=membership,
                    redis=redis,
                    gate=Gate(exit_process),
                    spawn=lambda work: self._spawn(group, work),
                )
                service = await assemble(worker)
                closing.push_async_callback(service.close)
                await self._warm(worker)
                await self._serve(worker, server, service)
                for task in self._tasks:
                    task.cancel()
        say(f"{self.instance_id} stopped")

    async def _warm(self, worker: Worker) -> None:
        """After the pools were registered: only pages that are first touched then can be huge."""
        say("warming up")
        worker.metrics.warming = True
        await asyncio.to_thread(worker.engine.warm)
        worker.metrics.warming = False
        gc.collect()
        gc.freeze()  # what is here lives as long as we do: collections, which stop all sequences, need not look at it

    async def _serve(self, worker: Worker, server: Server, service: Service) -> None:
        """From assembled to drained."""
        service.register(server.grpc)
        await server.start()
        await worker.membership.join(self._member(worker, service))
        worker.spawn(worker.membership.run())
        worker.spawn(service.run())
        watching = worker.spawn(self._watch(worker, service))
        await server.ready()
        self._announce(worker, scrape.serve(worker.metrics.registry, self.settings.metrics_listen))
        await self._stop.wait()
        await self._drain(worker, server, service)
        watching.cancel()  # it writes to a membership that ends now
        await worker.membership.leave()
        await server.stop(STOP_GRACE_S)

    async def _start_engine(self) -> tuple[Engine, Memory, WorkerMetrics]:
        loop, settings = asyncio.get_running_loop(), self.settings
        metrics = WorkerMetrics(self.source, self.model.name)
        engine = Engine(self.model.backend, settings.engine(), drafter=self.model.drafter, observer=metrics)
        memory = Memory(engine, waiting_max=settings.queue_len_max, kept_share=settings.device_share)
        metrics.watch(memory.stats, lambda: memory.num_waiting, settings.block_tokens)
        metrics.on_memory_freed = lambda: loop.call_soon_threadsafe(memory.serve_waiting)
        engine.start()
        return engine, memory, metrics

    def _member(self, worker: Worker, service: Service) -> Member:
        return Member(
            instance_id=self.instance_id,
            role=self.role,
            epoch=worker.epoch,
            grpc_address=worker.address,
            fingerprint=self.model.fingerprint,
            layout=asdict(self.model.layout),
            drafter=self.model.drafter_id,
            peer=service.peer.SerializeToString(),
            model=self.model.name,
            max_context=self.model.max_context,
            readable_by=_readable_by(service.peer),
            reads_by=READS_BY[self.settings.transport],
            state="ready",
            load=_load(worker),
        )

    async def _watch(self, worker: Worker, service: Service) -> None:
        """Fresh load for the heartbeats; once whenever work has ended, the books must balance."""
        while True:
            await asyncio.sleep(WATCH_S)
            worker.memory.recount()
            worker.membership.update(load=_load(worker))
            idle = service.check() == 0
            leaked_blocks, leaked_slots = worker.memory.leaked()
            worker.metrics.kept_blocks.set(worker.memory.bundles.num_blocks)
            worker.metrics.kept_slots.set(worker.memory.bundles.num_slots)
            worker.metrics.leaked_blocks.set(leaked_blocks)
            worker.metrics.leaked_slots.set(leaked_slots)
            if idle and not self._was_idle:
                worker.engine.check()
                worker.memory.check()
            elif idle and (leaked_blocks or leaked_slots):
                log.error("memory leaked", extra={"blocks": leaked_blocks, "state_slots": leaked_slots})
            self._was_idle = idle

    async def _drain(self, worker: Worker, server: Server, service: Service) -> None:
        """Take nothing new, let what runs end, but not for ever."""
        log.info("draining", extra={"instance_id": self.instance_id})
        worker.gate.draining = True
        worker.membership.update(state="draining")
        await server.not_ready()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                await worker.gate.idle()
                await service.drained()
        except TimeoutError:
            log.warning("drain timed out", extra={"kept": service.check()})

    def _announce(self, worker: Worker, metrics_address: str) -> None:
        if self.settings.ready_file is not None:
            ready = {
                "instance_id": self.instance_id,
                "pid": os.getpid(),
                "role": self.role,
                "grpc": worker.address,
                "metrics": metrics_address,
                "epoch": worker.epoch,
            }
            path = Path(self.settings.ready_file)
            scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            scratch.write_text(json.dumps(ready))
            scratch.rename(path)
        log.info("ready", extra={"instance_id": self.instance_id, "grpc": worker.address, "metrics": metrics_address})
        say(f"{self.instance_id} ready: gRPC {worker.address}, metrics {metrics_address}")

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the process, and which ends with it."""
        task = group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _readable_by(peer: common_pb2.Peer) -> tuple[str, ...]:
    return ("nixl",) * bool(peer.nixl_name) + ("tcp",) * bool(peer.tcp_address)


def _load(worker: Worker) -> Load:
    stats = worker.memory.stats()
    return Load(
        free_blocks=stats.free_blocks,
        num_blocks=stats.num_blocks,
        free_slots=stats.free_slots,
        num_slots=stats.num_slots,
        waiting=stats.num_waiting + worker.memory.num_waiting,
        running=stats.num_running,
    )
