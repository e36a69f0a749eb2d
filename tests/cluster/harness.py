"""A whole cluster of real processes on this machine, started as a user would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

START_S = 120.0
REQUEST_S = 60.0


@dataclass
class Cluster:
    """A running `moonrelay up`; `post` and `get` are what a client would do."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    log: Path
    model: str = "k3-nano"
    urls: list[str] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any], router: int = 0, **headers: str) -> tuple[int, dict[str, Any]]:
        head = {"content-type": "application/json", "x-moonrelay-explain": "1", **headers}
        request = urllib.request.Request(self.urls[router] + path, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt: str | list[int], max_tokens: int = 32, **more: Any) -> dict[str, Any]:
        """One completion that must succeed; greedy unless told otherwise."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def pid(self, name: str) -> int:
        """The present process of a role instance, restarts included."""
        records = json.loads(Path(self.ready["logs"], "children.json").read_text())
        return int(records[name][0])

    def healthy(self, router: int = 0) -> bool:
        try:
            with urllib.request.urlopen(self.urls[router] + "/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition with a deadline; an outside process gives no event to wait on."""
    end = time.monotonic() + seconds
    pause = Event()
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        pause.wait(0.05)


@contextmanager
def running_cluster(folder: Path, *args: str, **settings: str) -> Iterator[Cluster]:
    """Start `moonrelay up` with `args`, yield when ready, stop it as Ctrl-C would and insist on a clean exit.

    `settings` are environment variables, which every role reads.
    """
    ready_file, log = folder / "ready.json", folder / "up.log"
    environment = {**os.environ, **settings, "MOONRELAY_CACHE_DIR": str(folder / "cache")}
    native = Path.home() / ".cache" / "moonrelay"
    if native.exists():  # the compiled library is found again; the run directories are this test's own
        (folder / "cache").mkdir()
        for item in native.iterdir():
            if item.name != "up":
                (folder / "cache" / item.name).symlink_to(item)
    with log.open("wb") as out:
        command = [sys.executable, "-m", "moonrelay", "up", "--port", "0", "--ready-file", str(ready_file), *args]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        end = time.monotonic() + START_S
        wait_until(
            lambda: ready_file.exists() or process.poll() is not None or time.monotonic() > end, START_S, "start"
        )
        assert ready_file.exists(), log.read_text()[-4000:]
        ready = json.loads(ready_file.read_text())
        yield Cluster(process, ready, log, urls=[r["http"].rstrip("/") for r in ready["routers"]])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
