"""Compiling the C++ sources: once, whole or not at all, and with a clear word when it cannot be done."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.errors import BackendUnavailable
from model.native import build as building
from model.native.build import SOURCE_DIR, build
from model.native.ffi import load

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake $FAKE_VERSION"; exit 0; fi
echo run >> "{log}"
if [ -n "$FAKE_FAILS" ]; then echo "no such instruction" >&2; exit 1; fi
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then echo library > "$2"; fi; shift; done
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down each call, alone on the path, and an empty cache."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(FAKE.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("MOONRELAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "log"


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


NUM_SOURCES = len(list(SOURCE_DIR.glob("*.cpp")))


def test_builds_once(log: Path) -> None:
    first = build()
    assert first.read_text() == "library\n"
    assert calls(log) == NUM_SOURCES + 1  # every source, then the link
    assert build() == first
    assert calls(log) == NUM_SOURCES + 1


def test_concurrent_callers_share_one_compilation(log: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(), range(4)))
    assert len(paths) == 1
    assert calls(log) == NUM_SOURCES + 1


def test_flags_compiler_and_cpu_name_the_library(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build().name, build(["-DOTHER"]).name}
    monkeypatch.setenv("FAKE_VERSION", "2")
    names.add(build().name)
    monkeypatch.setattr(building, "_cpu_features", lambda: "another machine")
    names.add(build().name)
    assert len(names) == 4


def test_a_failed_compilation_says_why_and_leaves_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(BackendUnavailable, match="no such instruction"):
        build()
    assert not list((log.parent / "cache").rglob("*.so"))
    monkeypatch.delenv("FAKE_FAILS")
    assert build().exists()


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="no C\\+\\+ compiler"):
        build()


def test_a_cache_that_cannot_be_written_is_said(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = log.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("MOONRELAY_CACHE_DIR", str(blocked))
    with pytest.raises(BackendUnavailable, match="cannot build in"):
        build()


def test_what_is_no_library_is_refused(log: Path) -> None:
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        load(build())
