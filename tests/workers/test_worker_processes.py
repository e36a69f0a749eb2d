"""The two workers as the processes that a supervisor starts: ready, killed, told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonrelay.cli import main
from moonrelay.membership import Membership
from moonrelay.stubs.v1 import worker_pb2, worker_pb2_grpc
from moonrelay.valkey import LocalValkey, connect, start_local_valkey
from tests.golden import golden_dir
from tests.workers.world import prefill_request, tokens_of

pytestmark = pytest.mark.cluster
START_S = 90
PROMPT = [(7 * i) % 251 for i in range(130)]


@dataclass
class Role:
    process: subprocess.Popen[bytes]
    ready: dict[str, str]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.ready['metrics']}/metrics", timeout=5) as answer:
            return answer.read().decode()


class Workers:
    """Starts roles against one Valkey and ends what is left."""

    def __init__(self, folder: Path, valkey: LocalValkey) -> None:
        self._folder, self.valkey = folder, valkey
        self._all: list[Role] = []

    def launch(self, role: str, *args: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "moonrelay.cli", role, "--redis-url", self.valkey.url, "--instance-id", f"{role}-0",
            "--model-dir", str(golden_dir("k3_tiny_smooth")), "--backend", "torch", "--threads", "1",
            "--ready-file", str(self._folder / f"{role}.json"), *args,
        ]  # fmt: skip
        (self._folder / f"{role}.json").unlink(missing_ok=True)
        with (self._folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def until_ready(self, role: str, process: subprocess.Popen[bytes]) -> Role:
        file, pause, end = self._folder / f"{role}.json", Event(), time.monotonic() + START_S
        while not file.exists():
            assert process.poll() is None and time.monotonic() < end, (self._folder / f"{role}.log").read_text()
            pause.wait(0.05)
        self._all.append(Role(process, json.loads(file.read_text())))
        return self._all[-1]

    def close(self) -> None:
        for role in self._all:
            if role.process.poll() is None:
                role.process.kill()
            role.process.wait()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("workers")
    valkey = start_local_valkey(folder / "valkey")
    started = Workers(folder, valkey)
    yield started
    started.close()
    valkey.stop()


class Stubs:
    def __init__(self, prefill: Role, decode: Role) -> None:
        self._channels = [grpc.aio.insecure_channel(role.ready["grpc"]) for role in (prefill, decode)]
        self.prefill = worker_pb2_grpc.PrefillWorkerStub(self._channels[0])
        self.decode = worker_pb2_grpc.DecodeWorkerStub(self._channels[1])

    async def healthy(self) -> list[bool]:
        answers = []
        for channel in self._channels:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            answers.append(reply.status == health_pb2.HealthCheckResponse.SERVING)
        return answers

    async def handed_over(self, prompt: list[int]) -> worker_pb2.AdoptRequest:
        """Reserved and prefilled; what is returned is ready to be adopted."""
        request = prefill_request(prompt)
        reserve = worker_pb2.ReserveRequest(
            request_id="r", prompt_tokens=len(prompt), max_tokens=request.sampling.max_tokens
        )
        reservation = await self.decode.Reserve(reserve)
        async for event in self.prefill.Prefill(request):
            match event.WhichOneof("event"):
                case "opened":
                    opened = event.opened
                case "first_token":
                    self.first = event.first_token.token.id
        return worker_pb2.AdoptRequest(
            request_id="r",
            reservation_id=reservation.reservation_id,
            opened=opened,
            sampling=request.sampling,
        )

    async def until_prefill_drains(self) -> None:
        async for reply in health_pb2_grpc.HealthStub(self._channels[0]).Watch(health_pb2.HealthCheckRequest()):
            if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def said_of(url: str, prefill: Role) -> None:
    """Membership shows the worker as it is, its load within a heartbeat or two."""
    async with connect(url) as redis:
        membership = Membership(redis, "local")
        watching = asyncio.create_task(membership.run())

        def idle(now: Membership) -> bool:
            found = now.members("prefill")
            return bool(found) and found[0].load.free_blocks == found[0].load.num_blocks == 4096

        assert await membership.wait_for(idle, time.monotonic() + 30)
        [member] = membership.members("prefill")
        assert member.grpc_address == prefill.ready["grpc"] and member.state == "ready"
        assert member.fingerprint is not None and member.fingerprint.numerics_version == "torch/invariant"
        watching.cancel()
        await asyncio.wait([watching])


def test_the_life_of_two_workers(workers):
    """Ready, serving, one killed and back, both told to stop: in one test, for starting a process costs seconds."""
    launched = {role: workers.launch(role) for role in ("prefill", "decode")}
    prefill, decode = (workers.until_ready(role, process) for role, process in launched.items())

    async def serve() -> list[int]:
        stubs = Stubs(prefill, decode)
        assert await stubs.healthy() == [True, True]
        adopt = await stubs.handed_over(PROMPT)
        tokens = [stubs.first, *await tokens_of(stubs.decode.Adopt(adopt))]
        assert tokens == await tokens_of(stubs.decode.Generate(prefill_request(PROMPT)))

        await said_of(workers.valkey.url, prefill)
        adopt = await stubs.handed_over(PROMPT)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.process.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokens_of(stubs.decode.Adopt(adopt))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert dict(refused.value.trailing_metadata())["moonrelay-reason"] == "transfer"
        await stubs.close()
        return tokens

    tokens = asyncio.run(serve())
    text = decode.metrics()
    assert 'moonrelay_decode_handoff_refused_total{reason="transfer"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="k3-tiny-smooth"} 0.0' in text
    assert "moonrelay_decode_leaked_blocks 0.0" in text

    back = workers.until_ready("prefill", workers.launch("prefill"))
    assert int(back.ready["epoch"]) > int(prefill.ready["epoch"])

    async def drain() -> None:
        stubs = Stubs(back, decode)
        adopt = await stubs.handed_over(PROMPT)
        back.process.send_signal(signal.SIGTERM)
        await stubs.until_prefill_drains()
        with pytest.raises(grpc.aio.AioRpcError) as closing:
            await tokens_of(stubs.prefill.Prefill(prefill_request(PROMPT)))
        assert closing.value.code() is grpc.StatusCode.UNAVAILABLE
        assert back.process.poll() is None  # its handoff has not been pulled yet
        assert [stubs.first, *await tokens_of(stubs.decode.Adopt(adopt))] == tokens
        await stubs.close()

    asyncio.run(drain())
    assert back.process.wait(15) == 0
    decode.process.send_signal(signal.SIGTERM)
    assert decode.process.wait(15) == 0


@pytest.mark.parametrize("setting", ["handoff_lease_ms", "block_tokens", "model_dir", "listen"])
def test_a_setting_that_cannot_work_ends_the_process_with_a_line_that_names_it(setting, workers, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bad = {
            "handoff_lease_ms": "3000",
            "block_tokens": "100",
            "model_dir": "nowhere",
            "listen": f"127.0.0.1:{port}",
        }
        settings = {
            "redis_url": workers.valkey.url,
            "model_dir": str(golden_dir("k3_tiny_smooth")),
            "backend": "torch",
            "threads": "1",
            setting: bad[setting],
        }
        argv = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
        assert main(["prefill", *argv]) in (1, 2)
    said = "".join(capfd.readouterr())
    assert bad["model_dir"] in said if setting == "model_dir" else setting in said.splitlines()[-1]
