"""The supervisor's decisions that need no cluster: busy ports, and whose run directory may be cleaned."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from moonrelay.children import LOGS, RUNS_KEPT, Nursery, clean_leftovers
from moonrelay.errors import SettingsError
from moonrelay.up import Supervisor, UpSettings, refuse_busy_ports


def _settings(tmp_path: Path, port: int) -> UpSettings:
    (tmp_path / "config.json").write_text("{}")
    return UpSettings(model=str(tmp_path), router=2, port=port)


@pytest.mark.parametrize("offset", [0, 3])  # the first router's HTTP port, the second one's gRPC port
def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path, offset: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=r"--port: 127\.0\.0\.1:\d+ is in use"):
            refuse_busy_ports(_settings(tmp_path, port - offset))


def test_port_zero_is_never_busy(tmp_path: Path) -> None:
    refuse_busy_ports(_settings(tmp_path, 0))


def test_a_cluster_that_is_just_starting_keeps_its_directory(tmp_path: Path) -> None:
    """Between mkdir and its first record a run directory belongs to a live pid and to nobody's leftovers."""
    base = tmp_path / "up"
    base.mkdir()
    starting = base / str(os.getppid())
    dead = base / str(2**22 + 1)  # above the kernel's largest pid
    own = base / str(os.getpid())  # a crashed run that had the pid which is ours now
    for directory in (starting, dead, own):
        directory.mkdir()
    assert len(clean_leftovers(base)) == 2
    assert starting.exists() and not dead.exists() and not own.exists()


def test_the_newest_runs_keep_their_logs(tmp_path: Path) -> None:
    for number in range(RUNS_KEPT + 2):
        nursery = Nursery(tmp_path / "up")
        (nursery.dir / "router-0.log").write_text(f"{number}")
        nursery.close()
        assert (nursery.dir / "router-0.log").read_text() == f"{number}"
    kept = sorted(path.read_text() for path in (tmp_path / LOGS).rglob("router-0.log"))
    assert kept == ["2", "3", "4"] and not list((tmp_path / "up").iterdir())


def test_each_cache_node_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    settings = UpSettings(model=str(tmp_path), cachestore=2, disk_dir=str(tmp_path / "disk"), disk_bytes=1 << 30)
    supervisor = Supervisor(settings)
    folders = {}
    for service in supervisor._role_services():
        if "--disk-dir" in service.args:
            folders[service.name] = service.args[service.args.index("--disk-dir") + 1]
            assert service.args[service.args.index("--disk-bytes") + 1] == f"{1 << 30}"
    assert folders == {name: str(tmp_path / "disk" / name) for name in ("cachestore-0", "cachestore-1")}
    supervisor.nursery.close()
    with pytest.raises(SettingsError, match="disk_dir, disk_bytes"):
        UpSettings(model=str(tmp_path), disk_dir=str(tmp_path))


def test_workers_draft_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    for draft in (True, False):
        supervisor = Supervisor(UpSettings(model=str(tmp_path), draft=draft))
        try:
            told = {s.name: "--drafter off" in " ".join(s.args) for s in supervisor._role_services()}
        finally:
            supervisor.nursery.close()
        workers = {"prefill-0": not draft, "decode-0": not draft}
        assert told == workers | {"router-0": False, "cachestore-0": False}
