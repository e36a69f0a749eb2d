"""Compile the C++ sources once per machine and version into the user's cache: `python -m model.native.build`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from model.errors import BackendUnavailable

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
# No fast-math, and no contraction: the fused operations are those written in the source, so that every machine and
# every way of splitting the work yields the same bits.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")
COMPILE_TIMEOUT_S = 600


def cache_dir() -> Path:
    """MOONRELAY_CACHE_DIR, else ~/.cache/moonrelay. Raises BackendUnavailable where there is no home."""
    named = os.environ.get("MOONRELAY_CACHE_DIR")
    try:
        return Path(named) if named else Path.home() / ".cache" / "moonrelay"
    except RuntimeError as error:
        raise BackendUnavailable(f"no place for the compiled library: {error}; set MOONRELAY_CACHE_DIR") from error


def build(extra_flags: Sequence[str] = ()) -> Path:
    """Return the shared library for these sources, this compiler and this CPU, compiling it if it is not there yet.

    Concurrent callers wait for one compilation. Raises BackendUnavailable without a compiler or when it fails.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BackendUnavailable(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    flags = [*FLAGS, *extra_flags]
    directory = cache_dir() / "native"
    target = directory / f"libmoonrelay-{_digest(compiler, flags)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, flags, target)
    except OSError as error:
        raise BackendUnavailable(f"cannot build in {directory}: {error}") from error
    return target


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [[compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
        library.rename(target)  # atomic: a reader sees the whole file or none


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"compiling took more than {COMPILE_TIMEOUT_S} s: {' '.join(command)}") from error
    if done.returncode:
        raise BackendUnavailable(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _digest(compiler: str, flags: Iterable[str]) -> str:
    """Whatever changes the library's bytes or where they may run."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    for part in (*flags, version, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _cpu_features() -> str:
    """The instruction sets that -march=native looks at: a cache shared between unlike machines must not mix them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


if __name__ == "__main__":
    print(build())
