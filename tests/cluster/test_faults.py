"""Processes die and stall; every request still ends in one terminal reply, and the cluster serves again by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster, wait_until

pytestmark = pytest.mark.cluster
NUM_LOAD = 6
RECOVER_S = 60.0


@pytest.fixture(scope="module")
def mortal(start_cluster):
    """A cluster of its own for the tests that kill."""
    with start_cluster() as running:
        yield running


def load(cluster: Cluster, pool: ThreadPoolExecutor) -> list[Future[tuple[int, dict[str, Any]]]]:
    """Requests in every phase at once: long prompts and long answers."""
    bodies = [
        {"model": cluster.model, "prompt": [300 + (i * 37 + j) % 4000 for j in range(100 + 300 * i)],
         "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        for i in range(NUM_LOAD)
    ]  # fmt: skip
    return [pool.submit(cluster.post, "/v1/completions", body) for body in bodies]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "cachestore-0", "valkey"])
def test_a_killed_role_ends_no_request_without_a_reply(mortal: Cluster, victim: str) -> None:
    wait_until(mortal.healthy, RECOVER_S, "health")
    before = mortal.pid(victim)
    with ThreadPoolExecutor(NUM_LOAD) as pool:
        pending = load(mortal, pool)
        wait_until(lambda: any(f.done() for f in pending) or _busy(mortal), 10, "load")
        os.kill(before, signal.SIGKILL)
        answers = [f.result() for f in pending]
    for status, answer in answers:
        assert status in (200, 429, 503), answer
        assert ("choices" in answer) if status == 200 else answer["error"]["code"], answer
    wait_until(lambda: mortal.pid(victim) != before, RECOVER_S, "a restart")

    def serves() -> bool:
        status, _ = mortal.post("/v1/completions", {"model": mortal.model, "prompt": "def f(", "max_tokens": 4})
        return status == 200

    wait_until(serves, RECOVER_S, "service after a restart")


def _busy(cluster: Cluster) -> bool:
    """Whether the decode worker runs sequences: its metrics say so."""
    try:
        with urllib.request.urlopen(cluster.ready["metrics"]["decode-0"], timeout=2) as answer:
            text = answer.read().decode()
    except ConnectionError:
        return True  # it is being restarted: as busy as it gets
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ConnectionError), error
        return True
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    assert lines, text
    return not all(line.endswith(" 0.0") for line in lines)


def test_a_killed_router_comes_back_at_its_address(mortal: Cluster) -> None:
    before = mortal.pid("router-0")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: mortal.pid("router-0") != before and mortal.healthy(), RECOVER_S, "the router's return")
    assert mortal.complete("import os", max_tokens=2)["usage"]["completion_tokens"] >= 1


def test_a_client_that_hangs_up_frees_what_it_held(mortal: Cluster) -> None:
    """Close the connection in the middle of a stream; the slot comes back."""
    wait_until(mortal.healthy, RECOVER_S, "health")
    address = mortal.urls[0].removeprefix("http://").split(":")
    body = b'{"model":"%s","prompt":"x","max_tokens":2000,"stream":true,"ignore_eos":true}' % mortal.model.encode()
    for _ in range(3):
        with socket.create_connection((address[0], int(address[1])), timeout=10) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in client.recv(1024)
    wait_until(lambda: not _busy(mortal), 15, "freed sequences")


def test_children_die_with_a_killed_parent_and_leftovers_are_cleaned(tmp_path: Path) -> None:
    pids: list[int] = []
    try:
        with running_cluster(tmp_path, "--cachestore", "0") as cluster:
            pids = [pid for name, pid in cluster.ready["pids"].items()]
            logs = Path(cluster.ready["logs"])
            cluster.process.kill()
            cluster.process.wait()
            wait_until(lambda: not any(_alive(pid) for pid in pids), 10, "the children's end")
            assert logs.exists()
            env = {**os.environ, "MOONRELAY_CACHE_DIR": str(tmp_path / "cache")}
            done = subprocess.run(
                [sys.executable, "-c", "from pathlib import Path; from moonrelay.children import clean_leftovers;"
                 f"print(clean_leftovers(Path({str(logs.parent)!r})))"],
                capture_output=True, text=True, check=True, env=env,
            )  # fmt: skip
            assert str(logs) in done.stdout and not logs.exists()
            raise _Done
    except _Done:
        pass


class _Done(Exception):
    """Leaves the context before it insists on a clean exit: the supervisor was killed on purpose."""


def _alive(pid: int) -> bool:
    from moonrelay.children import start_ticks

    return start_ticks(pid) is not None
