"""The cache with real processes: a node that is started, killed, restarted and stopped as an operator would."""

from __future__ import annotations

import asyncio
import secrets
import time
import urllib.request

import grpc
import pytest
from cache_world import BLOCK_BYTES, STATE_BYTES, NodeProcess, prompt, worker_in
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore.main import main
from cachestore.transports import Landing
from moonrelay.errors import SettingsError
from moonrelay.valkey import LocalValkey

pytestmark = pytest.mark.cluster
BYTES = 5 * BLOCK_BYTES + STATE_BYTES


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_node_serves_dies_restarts_and_leaves(valkey: LocalValkey, tmp_path, transport: str) -> None:
    cluster = secrets.token_hex(4)

    async def run() -> None:
        node = NodeProcess(valkey.url, cluster, tmp_path, "--transport", transport, "--dram-bytes", "16_000_000")
        async with worker_in(valkey.url, cluster, transport) as (worker, membership):
            try:
                member = await node.ready(membership)
                assert member.load.capacity_bytes > 15_000_000
                mine = prompt(secrets.token_bytes(16), (5, 5))
                assert (await worker.publish(member, mine, range(5), (5,))).stored == 6
                match = await worker.match(mine)
                report = await worker.fetch(mine, match)
                used = {"auto": "nixl", "tcp": "tcp"}[transport]
                assert (report.tokens, report.bytes, report.transport, report.note) == (320, BYTES, used, None)
                await scraped(node.info()["metrics"], f"moonrelay_cache_{used}_pulled_bytes_total {float(BYTES)}")
                await healthy(member.grpc_address)

                await asyncio.to_thread(node.kill)
                landing, started = Landing(), time.monotonic()
                missed = await worker.fetch(mine, match, landing)
                assert (missed.tokens, missed.miss_reason) == (0, "stale_index") and not landing.pending
                assert time.monotonic() - started < 5
                with pytest.raises(Exception, match="UNAVAILABLE"):
                    await worker.publish(member, mine, range(5), (5,), deadline_s=time.monotonic() + 1)

                node.log.close()
                node = NodeProcess(valkey.url, cluster, tmp_path, "--transport", transport)
                reborn = await node.ready(membership, after_epoch=member.epoch)
                assert reborn.epoch > member.epoch and reborn.instance_id == member.instance_id
                stale = await worker.match(mine)
                assert stale.lost == (("stale_index", 320), ("remainder", 1))
                assert (await worker.fetch(mine, match)).miss_reason == "stale_index"
                assert (await worker.publish(reborn, mine, range(5), (5,))).stored == 6
                assert (await worker.fetch(mine, await worker.match(mine))).tokens == 320

                assert await asyncio.to_thread(node.terminate) == 0, node.output()
                assert await membership.wait_for(lambda m: not m.members("cachestore"), time.monotonic() + 5)
                assert (await worker.index.match(mine.root, mine.hashes, 321, [reborn])).tokens == 0
                assert "stopped" in node.output() and "Traceback" not in node.output()
            finally:
                node.close()

    asyncio.run(run())


async def scraped(address: str, line: str) -> None:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return answer.read().decode()

    assert line in await asyncio.to_thread(get)


async def healthy(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="moonrelay.v1.CacheNode"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "flags",
    [["--dram-bytes", "5"], ["--listen", "nowhere"], ["--pull-timeout-ms", "0"], ["--dram-bytes", "many"]],
)
def test_settings_that_cannot_work_are_named(flags: list[str]) -> None:
    with pytest.raises(SettingsError, match=flags[0].strip("-").replace("-", "[-_]")):
        main(["--redis-url", "redis://127.0.0.1:1", *flags])


def test_a_node_without_redis_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--redis-url", "redis://user:hidden@127.0.0.1:1/0"]) == 1
    shown = capsys.readouterr().out
    assert "Redis does not answer" in shown and "hidden" not in shown
