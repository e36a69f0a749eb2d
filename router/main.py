"""`moonrelay router`: settings to a running router, and back to nothing in order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from model.config import load_config
from model.tokenizer import Tokenizer, tokenizer_revision
from moonrelay import rpc
from moonrelay import settings as settings_module
from moonrelay.errors import ServeError, SettingsError
from moonrelay.log import configure
from moonrelay.membership import Load, Member, Membership
from moonrelay.naming import served_name
from moonrelay.valkey import check_policy, connect
from router.cluster import ClusterIndex, MemberFleet
from router.frontend import Frontends, start
from router.idstore import RedisIdStore
from router.service import ServedModel
from router.settings import RouterSettings

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    settings = settings_module.load(RouterSettings, argv, prog="moonrelay router")
    configure("router", settings.log_level)
    rpc.prepare()
    print(json.dumps(settings_module.redacted(settings)), flush=True)
    model = load_model(settings)
    gc.freeze()  # the vocabulary lives as long as we do: collections, which stop every stream, need not look at it
    status = 1
    try:
        status = uvloop.run(run(settings, model))
    except* (ServeError, OSError, RuntimeError) as failed:
        for error in failed.exceptions:
            print(f"moonrelay router: {error}", file=sys.stderr)
    return status


def load_model(settings: RouterSettings) -> ServedModel:
    """Tokenizer and context length of the model's folder. Raises: SettingsError."""
    folder = Path(settings.model_dir)
    try:
        tokenizer, config = Tokenizer.load(folder), load_config(folder)
    except ValueError as error:  # TokenizerError, ModelError: they name the file
        raise SettingsError(f"model_dir: {error}") from None
    if tokenizer.vocab_size != config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, config.json says {config.vocab_size}"
        raise SettingsError(f"model_dir: {folder}: the tokenizer has {sizes}")
    return ServedModel(
        name=served_name(folder, settings.served_model_name),
        tokenizer=tokenizer,
        context_len=config.context_len,
        created=int(time.time()),
        tokenizer_revision=tokenizer_revision(folder),
    )


async def run(settings: RouterSettings, model: ServedModel) -> int:
    """Serve until told to stop; returns the exit status: 0 told to stop, 1 we must not go on."""
    redis = connect(settings.redis_url)
    await check_policy(redis)
    membership = Membership(redis, settings.cluster)
    stop = asyncio.Event()
    broken: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        broken.append(error)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    epoch = await membership.next_epoch()
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat(membership, on_fatal))
        fleet = MemberFleet(membership, model.tokenizer_revision)
        index = ClusterIndex(redis, membership, settings.rpc_timeout_ms / 1e3)
        ids = RedisIdStore(
            redis,
            ttl_s=settings.ids_ttl_s,
            bytes_max=settings.ids_bytes_max,
            timeout_s=settings.ids_timeout_ms / 1e3,
            usable=lambda: membership.stale_since is None,
        )
        frontends = await start(settings, model, fleet, index, ids, group, on_fatal)
        await membership.join(member(settings, frontends, epoch))
        watch = group.create_task(frontends.watch())
        write_ready_file(settings, frontends, epoch)
        log.info("ready", extra={"http": frontends.http, "grpc": frontends.grpc, "epoch": epoch})
        await stop.wait()
        log.info("stopping", extra={"in_flight": frontends.service.admission.in_flight})
        membership.update(state="draining")
        watch.cancel()
        await frontends.drain(0 if broken else settings.drain_ms / 1e3)
        await membership.leave()
        beating.cancel()
    index.close()
    await redis.aclose()
    return 1 if broken else 0


async def beat(membership: Membership, on_fatal: Callable[[BaseException], None]) -> None:
    """Keep our place in the cluster; where a newer process has taken it, stop in order."""
    try:
        await membership.run()
    except* ServeError as lost:
        log.error("left the cluster", extra={"reason": str(lost.exceptions[0])})
        on_fatal(lost)


def member(settings: RouterSettings, frontends: Frontends, epoch: int) -> Member:
    return Member(
        instance_id=settings.instance_id,
        role="router",
        epoch=epoch,
        grpc_address=frontends.grpc,
        http_address=frontends.http,
        fingerprint=None,
        layout=None,
        peer=b"",
        model=frontends.service.model.name,
        max_context=frontends.service.model.context_len,
        state="ready",
        load=Load(),
    )


def write_ready_file(settings: RouterSettings, frontends: Frontends, epoch: int) -> None:
    """Written whole, once, for whoever started us."""
    if not settings.ready_file:
        return
    ready = {
        "instance_id": settings.instance_id,
        "pid": os.getpid(),
        "epoch": epoch,
        "http": frontends.http,
        "grpc": frontends.grpc,
        "metrics": f"{frontends.http}/metrics",
    }
    target = Path(settings.ready_file)
    scratch = target.with_suffix(target.suffix + ".tmp")
    scratch.write_text(json.dumps(ready))
    scratch.rename(target)
