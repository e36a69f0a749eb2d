"""The supervisor's decisions that need no cluster: busy ports, and whose run directory may be cleaned."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from moonrelay.children import clean_leftovers
from moonrelay.errors import SettingsError
from moonrelay.up import UpSettings, refuse_busy_ports


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
    starting = tmp_path / str(os.getppid())
    dead = tmp_path / str(2**22 + 1)  # above the kernel's largest pid
    own = tmp_path / str(os.getpid())  # a crashed run that had the pid which is ours now
    for directory in (starting, dead, own):
        directory.mkdir()
    assert len(clean_leftovers(tmp_path)) == 2
    assert starting.exists() and not dead.exists() and not own.exists()
