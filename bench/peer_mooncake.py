"""Mooncake's store beside us: installed into a venv of its own, its master and one storage node over TCP.

The wheel wants libibverbs, which a machine without RDMA has not: Debian's packages are unpacked beside the venv and
nothing of the system changes. Where any of this fails, `Absent` says why and the bench goes on without the peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cache_loads import Load

from moonrelay.children import dying_with_parent
from moonrelay.up import free_port

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
NODE_BYTES = 640 << 20
START_S = 20.0


class Absent(Exception):
    """The peer cannot be had here; the message says why."""


def prepare(work: Path) -> tuple[Path, Path]:
    """The venv and the folder of shared libraries, made at first use. Raises: Absent."""
    venv, libraries = work / "mooncake" / "venv", work / "mooncake" / "libraries"
    if not (venv / ".installed").exists():
        run(sys.executable, "-m", "venv", str(venv))
        run(str(venv / "bin" / "pip"), "install", "--quiet", WHEEL)
        (venv / ".installed").touch()
    if not (libraries / ".unpacked").exists():
        libraries.mkdir(parents=True, exist_ok=True)
        run("apt-get", "download", *LIBRARIES, cwd=libraries)
        for package in libraries.glob("*.deb"):
            run("dpkg", "-x", str(package), str(libraries))
        (libraries / ".unpacked").touch()
    return venv, libraries


def run(*command: str, cwd: Path | None = None) -> None:
    """Raises: Absent with the command's last line."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"{command[0]}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Absent(f"{' '.join(command[:3])} failed: {last}")


class Mooncake:
    """Master, storage node and a client process that times each get itself. Close it."""

    name = "mooncake"

    def __init__(self, work: Path, log: Path) -> None:
        """Raises: Absent."""
        venv, libraries = prepare(work)
        paths = sorted({str(p.parent) for p in libraries.rglob("*.so.*")})
        self._env = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths), "GLOG_minloglevel": "3"}
        self._processes: list[subprocess.Popen[str]] = []
        self._log = log.open("w")
        port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
        package = next(venv.glob("lib/python3*/site-packages/mooncake"))
        master = [str(package / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        self._spawn(*master, "--metrics_host=127.0.0.1", f"--metrics_port={metrics}")
        child = str(Path(__file__).with_name("peer_mooncake_child.py"))
        try:
            address = f"127.0.0.1:{port}"
            self._node = self._spawn(str(venv / "bin" / "python"), child, address, str(NODE_BYTES))
            self._answer(self._node)
            self._client = self._spawn(str(venv / "bin" / "python"), child, address, "0")
            self._answer(self._client)
        except Absent:
            self.close()
            raise

    def put(self, load: Load) -> None:
        self._call({"do": "put", "sets": load.sets, "values": load.values, "bytes": load.value_bytes})

    def get(self, load: Load, index: int) -> float:
        """Seconds of one get of all values of set `index` into registered memory."""
        return float(self._call({"do": "get", "set": index, "values": load.values, "bytes": load.value_bytes}))

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._log.close()

    def _call(self, request: dict[str, object]) -> str:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(request) + "\n")
        self._client.stdin.flush()
        return self._answer(self._client)

    def _spawn(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            dying_with_parent(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=self._env, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _answer(self, process: subprocess.Popen[str]) -> str:
        """The child's next line that is an answer; the library prints others. Raises: Absent."""
        assert process.stdout is not None
        end = time.monotonic() + START_S
        for line in process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
            if time.monotonic() > end:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        raise Absent(f"its process ended with status {process.returncode}; see {self._log.name}")
