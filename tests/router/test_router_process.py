"""`moonrelay router` as a process beside a real Valkey: joins, serves what membership shows, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fake_workers import TOKENIZER, TOY, FakeModel, FakeWorker, fingerprint
from router_fakes import completion_request, in_loop

from cachestore.index import CacheIndex, Entry
from model.tokenizer import tokenizer_revision
from moonrelay.errors import SettingsError
from moonrelay.membership import Load, Member, Membership
from moonrelay.naming import served_name
from moonrelay.prefix import Fingerprint, prefix_hashes, prefix_root
from moonrelay.stubs.v1 import common_pb2
from moonrelay.up import ZOO, UpSettings
from moonrelay.valkey import connect, start_local_valkey
from router.cluster import ClusterIndex, MemberFleet, worker_of
from router.main import beat, load_model
from router.settings import RouterSettings

ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUT = {
    "block_tokens": 64,
    "num_mla_layers": 2,
    "row_width": 10,
    "num_kda_layers": 3,
    "num_heads": 2,
    "key_dim": 4,
    "value_dim": 5,
    "conv_history": 3,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The toy tokenizer with a config that fits it."""
    folder = tmp_path / "toy_model"
    folder.mkdir()
    shutil.copy(TOY / "tiktoken.model", folder)
    config = json.loads((ROOT / "tests/data/k3_tiny_mxfp4/config.json").read_text())
    config["text_config"]["vocab_size"] = TOKENIZER.vocab_size
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def redis_url(tmp_path: Path):
    valkey = start_local_valkey(tmp_path / "valkey")
    yield valkey.url
    valkey.stop()


def member(worker: FakeWorker, revision: str, **changes: object) -> Member:
    fields = {name: getattr(fingerprint(), name) for name in Fingerprint.__struct_fields__}
    base = {
        "instance_id": worker.name,
        "role": worker.role,
        "epoch": worker.epoch,
        "grpc_address": worker.address,
        "fingerprint": Fingerprint(**{**fields, "tokenizer_revision": revision}),
        "layout": LAYOUT,
        "peer": common_pb2.Peer(host_id="here").SerializeToString(),
        "max_context": 4_096,
    }
    return Member(**{**base, **changes})


@asynccontextmanager
async def joined(redis_url: str, *members: Member):
    """Each member as a process of its own would be."""
    redis = connect(redis_url)
    async with asyncio.TaskGroup() as group:
        tasks, memberships = [], []
        for one in members:
            membership = Membership(redis, "test")
            await membership.join(one)
            tasks.append(group.create_task(membership.run()))
            memberships.append(membership)
        try:
            yield memberships
        finally:
            for task, membership in zip(tasks, memberships, strict=True):
                task.cancel()
                await membership.leave()
    await redis.aclose()


async def until(url: str, path: str, status: int) -> None:
    async with aiohttp.ClientSession() as session:
        found = None
        while found != status:
            async with session.get(url + path) as answer:
                found = answer.status


@in_loop
async def test_a_router_process_serves_and_drains(model_dir, redis_url, tmp_path):
    model = FakeModel(reply=[*TOKENIZER.encode("one two three"), TOKENIZER.eos])
    prefill = await FakeWorker(model, "prefill", "prefill-0").start()
    decode = await FakeWorker(model, "decode", "decode-0").start()
    ready_file, revision = tmp_path / "ready.json", tokenizer_revision(model_dir)
    flags = {
        "listen": "127.0.0.1:0",
        "grpc-listen": "127.0.0.1:0",
        "redis-url": redis_url,
        "cluster": "test",
        "model-dir": str(model_dir),
        "ready-file": str(ready_file),
        "instance-id": "router-7",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonrelay", "router", *(w for k, v in flags.items() for w in (f"--{k}", v)),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    try:
        while not ready_file.exists() and process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        ready = json.loads(ready_file.read_text())
        assert ready["instance_id"] == "router-7" and ready["pid"] == process.pid
        url = ready["http"]
        await until(url, "/health/live", 200)
        await until(url, "/health", 503)
        stranger = member(decode, "other-tokenizer", instance_id="stranger")
        async with joined(redis_url, member(prefill, revision), stranger) as members:
            router = await _router_in(members[0])
            assert (router.http_address, router.model) == (url, "toy-model")
            await until(url, "/health", 503)
            async with joined(redis_url, member(decode, revision)):
                await until(url, "/health", 200)
                body = {**completion_request(), "model": "toy-model", "stream": True}
                decode.hold_after = 2
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(url + "/v1/completions", json=body) as answer,
                ):
                    assert answer.status == 200
                    await decode.holding.wait()
                    process.send_signal(signal.SIGTERM)
                    decode.go_on.set()
                    text = (await answer.read()).decode()
                assert text.endswith("data: [DONE]\n\n") and "error" not in text
                out, err = await process.communicate()
                assert process.returncode == 0, err.decode()
                assert b'"redis_url"' in out
                assert not members[0].members("router")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await prefill.die()
        await decode.die()


async def _router_in(membership: Membership) -> Member:
    assert await membership.wait_for(lambda m: bool(m.members("router")), float("inf"))
    return membership.members("router")[0]


@in_loop
async def test_the_view_becomes_workers(redis_url):
    model = FakeModel()
    prefill = FakeWorker(model, "prefill", "prefill-0")
    decode = FakeWorker(model, "decode", "decode-0")
    busy = member(decode, "t1", load=Load(waiting=2, running=3))
    async with joined(redis_url, member(prefill, "t1"), busy) as (watching, other):
        fleet = MemberFleet(watching, "t1")
        while len(fleet.workers()) < 2:
            await fleet.changed(asyncio.get_running_loop().time() + 5)
        first, second = fleet.workers()
        assert (first.role, second.role, second.busy, second.host_id) == ("prefill", "decode", 5, "here")
        assert first.state_bytes == 4 * 3 * (2 * 4 * 5 + 3 * 2 * (2 * 4 + 5)) and first.row_bytes == 4 * 2 * 10
        assert second.misfits == frozenset()
        other.update(layout={**LAYOUT, "num_heads": 4})
        assert await watching.wait_for(lambda m: m.members("decode")[0].layout["num_heads"] == 4, float("inf"))
        assert MemberFleet(watching, "t1").workers()[1].misfits == {first.key}
        other.update(state="draining")
        await fleet.changed(asyncio.get_running_loop().time() + 5)
        assert [worker.role for worker in fleet.workers()] == ["prefill"]
        assert worker_of(member(prefill, "t2"), "t1") is None


@in_loop
async def test_the_index_answers_and_its_loss_is_a_miss(redis_url):
    node = Member(instance_id="cache-0", role="cachestore", epoch=3, grpc_address="x")
    print_ = fingerprint()
    root = prefix_root(print_, "")
    ids = list(range(300))
    hashes = prefix_hashes(root, ids, 64)
    redis = connect(redis_url)
    entry = Entry(nbytes=1, first=0)
    blocks = {("block", h): entry for h in hashes[:4]}
    written = CacheIndex(redis, 64)
    await written.write(root, node, {**blocks, ("snapshot", hashes[2]): entry})
    worker = member(FakeWorker(FakeModel(), "prefill", "p"), "t1")
    kept = {name: Entry(nbytes=1, first=0, tier="device") for name in blocks}
    await written.write(root, worker, {**kept, ("snapshot", hashes[3]): Entry(nbytes=1, tier="device")})
    async with joined(redis_url, node, worker) as (watching, _):
        both = lambda m: m.members("cachestore") and m.members("prefill")  # noqa: E731
        assert await watching.wait_for(both, float("inf"))
        index = ClusterIndex(redis, watching, 1.0)
        match = await index.match(root, hashes, print_, "", 300)
        assert (match.tokens, match.matchable_tokens) == (192, 256)
        assert match.hit is not None and match.hit.snapshot.first_block == 3
        assert match.lost == (("no_snapshot", 64), ("remainder", 44)) and match.kept == {("p", 1): 256}
        dead = connect("redis://127.0.0.1:1/0")
        other = await index.match(prefix_root(print_, "tenant"), hashes, print_, "tenant", 300)
        assert other.lost == (("salt", 256), ("remainder", 44)) and other.kept == {}
        lost = await ClusterIndex(dead, watching, 1.0).match(root, hashes, print_, "", 300)
        assert (lost.tokens, lost.hit, lost.lost) == (0, None, (("tier_error", 300),))
        index.close()
        await dead.aclose()
    await redis.aclose()


@in_loop
async def test_a_router_whose_place_is_taken_stops_in_order(redis_url):
    redis = connect(redis_url)
    mine = Membership(redis, "test")
    me = Member(instance_id="router-0", role="router", epoch=1, grpc_address="x")
    await mine.join(me)
    fatal: list[BaseException] = []
    beating = asyncio.ensure_future(beat(mine, fatal.append))
    await Membership(redis, "test").join(Member(instance_id="router-0", role="router", epoch=2, grpc_address="y"))
    await beating
    assert len(fatal) == 1
    await redis.aclose()


def test_settings_that_cannot_work_are_named(model_dir, tmp_path):
    base = {"redis_url": "redis://x", "model_dir": str(model_dir)}
    for change, name in [
        ({"listen": "nowhere"}, "listen"),
        ({"grpc_listen": "h:99999"}, "grpc_listen"),
        ({"in_flight_max": 0}, "in_flight_max"),
        ({"queue_timeout_ms": 700_000}, "queue_timeout_ms"),
    ]:
        with pytest.raises(SettingsError, match=name):
            RouterSettings(**{**base, **change})
    assert load_model(RouterSettings(**base)).name == "toy-model"
    own = UpSettings(model=str(model_dir)).model_name()
    assert own == served_name(model_dir) == "toy-model" and served_name("a/k3_nano") == "k3-nano" == served_name(ZOO)
    with pytest.raises(SettingsError, match="model_dir"):
        load_model(RouterSettings(**{**base, "model_dir": str(tmp_path)}))
    config = json.loads((model_dir / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="the tokenizer has"):
        load_model(RouterSettings(**base))
