"""Each trap that NIXL set for others, kept shut by a test. Sources: measurements and public bug reports."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests_cachestore import ROOT, ProcessPeer, Reader, soon

from cachestore.transports import Read, Slice
from moonrelay.stubs.v1.common_pb2 import Peer

HERE = Path(__file__).parent
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # 127.0.0.1 and ::1, as /proc/net writes them


def scenario(name: str, **env: str) -> dict:
    """The scenario's answer; the process must exit with 0 and print nothing else."""
    path = os.pathsep.join([str(ROOT), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "nixl_script.py"), name],
        env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["closed", "left_open"])
def test_a_process_that_had_an_agent_exits_cleanly(name: str) -> None:
    """Exit status 139 on hosts with RDMA libraries, without UCX_MODULES; names carry the epoch; no torch."""
    found = scenario(name)
    assert "^efa" in found["modules"]
    assert found["name"] == "solo.41" and found["metadata_bytes"] > 0
    assert not found["torch"]


def test_only_the_small_wheel_is_installed() -> None:
    """The meta package would pull both CUDA generations and their libraries: gigabytes."""
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert "nixl-cu12" in names
    assert not {n for n in names if n in ("nixl", "nixl-cu13") or n.startswith("nvidia-")}


def test_an_idle_agent_costs_nothing_and_listens_on_loopback_only() -> None:
    """A progress thread would burn a core; a listen thread would answer everybody on 0.0.0.0."""
    found = scenario("idle")
    assert found["cpu_seconds"] < 0.1
    assert found["listening"] and set(found["listening"]) <= LOOPBACK
    assert found["peer_exit"] == 0


def test_where_memory_of_the_host_may_not_be_read_our_tcp_is_taken_and_said() -> None:
    """UCX would emulate over TCP, slower than a socket, and need the peer's processor."""
    found = scenario("forbidden")
    assert found["auto"][0] == "tcp" and "forbidden" in found["auto"][1] and found["auto"][2]
    assert found["nixl"][0] == "error" and "forbidden" in found["nixl"][1]
    assert found["peer_exit"] == 0


def test_a_read_that_outlives_its_deadline_keeps_its_memory() -> None:
    """Releasing the handle would not stop it: the bytes land when the peer goes on, in memory long reused."""
    found = scenario("quarantine", UCX_TLS="tcp")
    assert found["pending_at_deadline"] and found["still_pending"]
    assert "does not answer" in found["next_read"][0] and found["next_read"][1]
    assert found["landed_late"]
    assert found["works_again"] == ["nixl", True] and found["peer_exit"] == 0


def other_host(peer: Peer) -> None:
    peer.host_id = "elsewhere"


def other_probe(peer: Peer) -> None:
    peer.probe.xxh3 += 1


def no_metadata(peer: Peer) -> None:
    peer.nixl_metadata = b""


def foreign_metadata(peer: Peer) -> None:
    peer.nixl_metadata = b"\x80\x04" + bytes(300)


def other_name(peer: Peer) -> None:
    peer.nixl_name = "somebody.1"


DOUBTS: dict[Callable[[Peer], None], str] = {
    other_host: "another host",
    other_probe: "other bytes",
    no_metadata: "no NIXL",
    foreign_metadata: "refused",
    other_name: "disagree",
}


def test_any_doubt_about_nixl_means_tcp_with_a_note() -> None:
    async def run() -> None:
        peer, reader = await asyncio.to_thread(ProcessPeer, "auto", "peer", 3), Reader("auto", None)  # type: ignore[arg-type]
        await reader.transports.start()
        span = peer.bytes.span(5, 5_000)
        for doubt, note in DOUBTS.items():
            changed = Peer.FromString(peer.peer.SerializeToString())
            doubt(changed)
            report = await reader.transports.read(changed, [Read(span, (Slice(1, 0, 5_000),))], soon())
            assert report.transport == "tcp" and report.note is not None and note in report.note, (note, report)
        report = await reader.transports.read(peer.peer, [Read(span, (Slice(1, 0, 5_000),))], soon())
        assert (report.transport, report.note) == ("nixl", None)
        await reader.transports.close()
        assert peer.close() == 0

    asyncio.run(run())


def test_two_processes_that_read_each_other_stay_one_sided() -> None:
    """With one agent for both directions, UCX moved these bytes by messages that the owner had to answer."""

    async def run() -> None:
        peer, reader = await asyncio.to_thread(ProcessPeer, "nixl", "peer", 3), Reader("nixl", None)  # type: ignore[arg-type]
        await reader.transports.start()
        span, into = peer.bytes.span(5, 100_000), (Slice(1, 0, 100_000),)
        await reader.transports.read(peer.peer, [Read(span, into)], soon())
        back = reader.transports.span(1, 0, 4096)
        assert (await asyncio.to_thread(peer.read, reader.transports.peer(), back))["transport"] == "nixl"
        peer.stop()  # it can answer nothing now
        report = await reader.transports.read(peer.peer, [Read(span, into)], soon(5))
        assert report.transport == "nixl" and reader.landed(0, 100_000) == peer.bytes.data[5:100_005].tobytes()
        await reader.transports.close()
        assert peer.close() == 0

    asyncio.run(run())
