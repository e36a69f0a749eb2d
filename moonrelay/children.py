"""Child processes that cannot outlive their parent, and the traces by which a crash's leftovers are found."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 12
LOGS = "up-logs"
RUNS_KEPT = 3
_libc = ctypes.CDLL(None)  # loaded before any fork: the child may only call it


def _die_with_parent() -> None:
    """In the child, before exec: the kernel kills it when the thread that started it is gone."""
    os.setsid()  # the terminal's Ctrl-C goes to the supervisor alone, which stops its children in order
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_LAUNCHER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def dying_with_parent(*command: str) -> list[str]:
    """The argv that runs `command` so that the kernel kills it with the thread that starts it.

    For processes with threads of their own (gRPC's above all), where Python code between fork and exec may not run.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def start_ticks(pid: int) -> int | None:
    """The process's start time in clock ticks since boot, or None where it is gone; tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def is_running(name: str) -> bool:
    """Whether a run directory's name is the pid of a live process."""
    return name.isdecimal() and start_ticks(int(name)) is not None


@dataclass
class Child:
    """One running program and its log."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])


class Nursery:
    """A run directory that records every child, so that the next start can clean up after a crash."""

    def __init__(self, base: Path) -> None:
        self.dir = base / f"{os.getpid()}"
        self.dir.mkdir(parents=True, mode=0o700)
        self._records: dict[str, tuple[int, int]] = {}
        self._record("supervisor", os.getpid())

    async def start(self, name: str, argv: Sequence[str], env: dict[str, str] | None = None) -> Child:
        """Start `argv`, stdout and stderr appended to `<dir>/<name>.log`. Must run in the main thread: the
        kernel ties the child's life to the thread that forked it."""
        log = self.dir / f"{name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=env, preexec_fn=_die_with_parent
            )
        self._record(name, process.pid)
        return Child(name, process, log)

    def close(self) -> None:
        """Nothing of it runs any more: keep the logs for whoever wants to know, beside those of the runs before."""
        self.dir = keep_logs(self.dir, self.dir.parent.parent / LOGS)

    def _record(self, name: str, pid: int) -> None:
        self._records[name] = (pid, start_ticks(pid) or 0)
        scratch = self.dir / "children.tmp"
        scratch.write_text(json.dumps(self._records))
        scratch.rename(self.dir / "children.json")


def keep_logs(directory: Path, kept: Path) -> Path:
    """Move an ended run's directory to `kept`, where the newest runs stay; returns where it is now."""
    target = kept / f"{time.time_ns()}-{directory.name}"
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.rename(target)
    except OSError:  # another start may be cleaning up too
        shutil.rmtree(directory, ignore_errors=True)
    for old in sorted(kept.glob("*-*"), key=lambda path: int(path.name.partition("-")[0]))[:-RUNS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def clean_leftovers(base: Path) -> list[str]:
    """End what a supervisor that died left behind under `base`; returns one line per thing done."""
    done: list[str] = []
    for directory in sorted(base.glob("*")) if base.exists() else []:
        try:
            records: dict[str, tuple[int, int]] = json.loads((directory / "children.json").read_text())
        except (OSError, ValueError):
            records = {}
        pid, ticks = records.get("supervisor", (0, 0))
        if pid and start_ticks(pid) == ticks:
            continue  # that cluster is alive
        if not records and directory.name != str(os.getpid()) and is_running(directory.name):
            continue  # that cluster is just starting and has not written its record yet
        for name, (child, child_ticks) in records.items():
            if name != "supervisor" and start_ticks(child) == child_ticks:
                with contextlib.suppress(ProcessLookupError):  # another start may be cleaning up too
                    os.kill(child, signal.SIGKILL)
                done.append(f"killed {name} (pid {child}) left by a crashed run")
        kept = keep_logs(directory, base.parent / LOGS)
        done.append(f"{directory} was left by a crashed run; its logs are now in {kept}")
    return done


def python_command(*args: str) -> list[str]:
    """The argv that runs a Moonrelay command in the same interpreter and environment."""
    return [sys.executable, "-m", "moonrelay", *args]
