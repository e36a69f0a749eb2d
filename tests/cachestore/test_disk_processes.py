"""A node's disk with real processes: killed, restarted on its directory, stopped cleanly, started beside another."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from cache_world import NodeProcess, Prompt, Worker, prompt, worker_in
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests_cachestore import soon

from cachestore.main import INDEX_SERVICE, main
from cachestore.node.files import EntryFiles
from moonrelay.errors import SettingsError
from moonrelay.membership import Member
from moonrelay.valkey import LocalValkey, start_local_valkey

pytestmark = pytest.mark.cluster


async def shown(node: NodeProcess, *lines: str) -> None:
    """Wait until the node's metrics show all of these lines."""
    deadline_s = soon(20)

    def get() -> str:
        if not node.ready_file.exists():  # written once it has joined
            return ""
        with urllib.request.urlopen(f"http://{node.info()['metrics']}/metrics", timeout=5) as answer:
            return answer.read().decode()

    text = ""
    while any(line not in text for line in lines):
        assert time.monotonic() < deadline_s, f"{lines} in\n{text}\n{node.output()}"
        text = await asyncio.to_thread(get)


async def stored(worker: Worker, member: Member, mine: Prompt) -> None:
    assert (await worker.publish(member, mine, range(5), (5,))).stored == 6


async def fetched(worker: Worker, mine: Prompt) -> tuple[int, str | None]:
    report = await worker.fetch(mine, await worker.match(mine))
    return report.tokens, report.miss_reason


def test_a_killed_node_has_its_files_again_and_serves_no_altered_one(valkey: LocalValkey, tmp_path: Path) -> None:
    cluster, root, disk = secrets.token_hex(4), secrets.token_bytes(16), tmp_path / "disk"
    flags = ("--transport", "tcp", "--disk-dir", str(disk), "--disk-bytes", "64_000_000", "--dram-bytes", "2_000_000")
    first, second, third = (prompt(root, (token, 5)) for token in (10, 11, 12))

    async def run() -> None:
        node = NodeProcess(valkey.url, cluster, tmp_path, *flags)
        async with worker_in(valkey.url, cluster, "tcp") as (worker, membership):
            try:
                member = await node.ready(membership)
                for mine in (first, second):
                    await stored(worker, member, mine)
                await shown(
                    node, 'tier_snapshots{tier="disk"} 2.0', "disk_waiting_entries 0.0", "disk_writing_entries 0.0"
                )
                await asyncio.to_thread(node.kill)
                node.log.close()

                altered = disk / root.hex() / f"{second.hashes[2].hex()}.block"
                data = bytearray(altered.read_bytes())
                data[-9] ^= 4
                altered.write_bytes(data)
                torn = disk / root.hex() / f"{'ab' * 16}.snapshot"
                torn.write_bytes(data[:5_000])
                (disk / root.hex() / f"{'cd' * 16}.block.part").write_bytes(data)

                node = NodeProcess(valkey.url, cluster, tmp_path, *flags)
                reborn = await node.ready(membership, after_epoch=member.epoch)
                await shown(
                    node, 'disk_state{state="ready"} 1.0', "disk_recovery_kept 12.0", "disk_recovery_refused 1.0",
                    "disk_recovery_unfinished 1.0",
                )  # fmt: skip
                match = await worker.match(first)
                assert (match.tokens, dict(match.by_tier)) == (320, {"disk": 320})
                assert await fetched(worker, first) == (320, None)
                tokens, reason = await fetched(worker, second)
                assert tokens == 0 and reason is not None
                await shown(node, 'disk_refused_entries_total{reason="altered"} 2.0')
                assert not altered.exists() and not torn.exists()
                assert await fetched(worker, first) == (320, None)
                await shown(node, "moonrelay_cache_leases 0.0", "moonrelay_cache_quarantined_bytes 0.0")

                # Told to stop, it writes out what it has not yet written.
                await stored(worker, reborn, third)
                assert await asyncio.to_thread(node.terminate) == 0, node.output()
                assert len(list((disk / third.root.hex()).glob("*.snapshot"))) == 3
                assert "Traceback" not in node.output()
            finally:
                node.close()

    asyncio.run(run())


def refusal(url: str, home: Path, *flags: str) -> str:
    """What a node that refuses its settings says, in one line, last."""
    home.mkdir()
    node = NodeProcess(url, secrets.token_hex(4), home, "--transport", "tcp", *flags)
    try:
        assert node.process.wait(timeout=30) == 2, node.output()
        assert "Traceback" not in node.output() and not node.ready_file.exists()
        return node.output().splitlines()[-1]
    finally:
        node.close()


def test_settings_this_machine_cannot_have_end_the_start_with_one_line(valkey: LocalValkey, tmp_path: Path) -> None:
    busy, foreign = tmp_path / "busy", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("not a cache's")
    mine = EntryFiles(busy)
    try:
        cases = (
            ("dram_bytes", "--dram-bytes", "900000000000000"),
            ("listen", "--listen", "8.8.8.8:1"),
            ("disk_dir", "--disk-bytes", "64_000_000", "--disk-dir", str(busy)),
            ("disk_dir", "--disk-bytes", "64_000_000", "--disk-dir", str(foreign)),
            ("disk_dir", "--disk-bytes", "64_000_000", "--disk-dir", str(foreign / "letter.txt")),
        )
        for number, (name, *flags) in enumerate(cases):
            said = refusal(valkey.url, tmp_path / f"{number}", *flags)
            assert said.startswith(f"moonrelay cachestore: {name}: expected") and flags[-1].split(":")[0] in said
    finally:
        mine.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for name in ("listen", "metrics-listen"):
            said = refusal(valkey.url, tmp_path / name, f"--{name}", address)
            assert said.startswith(f"moonrelay cachestore: {name.replace('-', '_')}: expected") and address in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--disk-bytes", "5_000_000"], "disk_dir"),
        (["--disk-dir", "/somewhere"], "disk_bytes"),
        (["--disk-dir", "/somewhere", "--disk-bytes", "-1"], "disk_bytes"),
    ],
)
def test_disk_settings_that_cannot_work_are_named(flags: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named}: expected"):
        main(["--redis-url", "redis://127.0.0.1:1", *flags])


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status


def test_a_node_without_redis_serves_what_it_has_says_so_and_is_found_again(tmp_path: Path) -> None:
    """Memory holds one bundle, disk both: without the index, leases still bring either back."""
    home = tmp_path / "valkey"
    server = start_local_valkey(home)
    cluster, root = secrets.token_hex(4), secrets.token_bytes(16)
    flags = ("--transport", "tcp", "--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "64_000_000")
    states = health_pb2.HealthCheckResponse

    async def run() -> None:
        nonlocal server
        node = NodeProcess(server.url, cluster, tmp_path, *flags, "--dram-bytes", "1_048_576")
        async with worker_in(server.url, cluster, "tcp") as (worker, membership):
            try:
                member = await node.ready(membership)
                prompts = [prompt(root, (token, 5)) for token in range(20)]
                for mine in prompts:
                    await stored(worker, member, mine)
                    await shown(node, "disk_waiting_entries 0.0", "disk_writing_entries 0.0")
                matches = [await worker.match(mine) for mine in prompts]
                assert await health(member.grpc_address, INDEX_SERVICE) == states.SERVING

                server.stop()
                for mine, match in zip(prompts[::4], matches[::4], strict=True):
                    assert (await worker.fetch(mine, match)).tokens == 320
                await shown(node, "moonrelay_cache_index_up 0.0")
                assert await health(member.grpc_address, INDEX_SERVICE) == states.NOT_SERVING
                assert await health(member.grpc_address, "moonrelay.v1.CacheNode") == states.SERVING

                server = start_local_valkey(home)  # empty
                await shown(node, "moonrelay_cache_index_up 1.0", "moonrelay_cache_index_untold_entries 0.0")
                assert await membership.wait_for(lambda m: bool(m.members("cachestore")), soon(10))
                deadline_s = soon(10)
                while (await worker.match(prompts[7])).tokens != 320:  # until it has written itself again
                    assert time.monotonic() < deadline_s
                assert await fetched(worker, prompts[7]) == (320, None)
                assert "Traceback" not in node.output()
            finally:
                node.close()

    try:
        asyncio.run(run())
    finally:
        server.stop()
