"""gRPC to the workers: one channel per instance and epoch, protobuf in and out, statuses to faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc
import grpc.aio

from moonrelay.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    ServeError,
    Unavailable,
)
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from router.core import Worker, WorkerKey
from router.output import SampledToken

MESSAGE_BYTES_MAX: Final = 64 << 20  # a million ids are 3 MB, their hashes at most 1 MB
DRAIN_S: Final = 10.0  # for the status that follows a call's last message
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Without a pool of its own a channel to a restarted worker would share the dead one's connection and backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A host that vanishes without closing its connections is noticed in 25 s; servers must allow such pings.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # repeating a request is the router's decision
)


class WorkerLost(Unavailable):
    """A worker failed under a request. `unreachable`: it was never reached, so it has done nothing for it."""

    def __init__(self, message: str, *workers: Worker, unreachable: bool = False) -> None:
        super().__init__(message)
        self.workers = workers
        self.unreachable = unreachable


class NoRoom(ServeError):
    """The worker has no room for the request now."""

    code = "overloaded"

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"{worker.instance_id} has no room")
        self.worker = worker


Background = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Line:
    """A channel and how many calls use it."""

    channel: grpc.aio.Channel
    prefill: worker_pb2_grpc.PrefillWorkerStub
    decode: worker_pb2_grpc.DecodeWorkerStub
    calls: int = 0


@dataclass(slots=True)
class WorkerStream:
    """A worker's answer, event by event. Leaving it before its end cancels the work behind it."""

    worker: Worker
    call: grpc.aio.UnaryStreamCall[Any, Any]
    line: _Line
    events: AsyncIterator[Any] = field(init=False)
    ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.events = self.call.__aiter__()

    async def read(self) -> Any:
        """The next event. Raises: WorkerLost (also where the stream ends), NoRoom, InvalidRequest, ..."""
        try:
            return await anext(self.events)
        except grpc.aio.AioRpcError as error:
            self.ended = True
            raise fault(self.worker, error) from None
        except StopAsyncIteration:
            self.ended = True
            raise WorkerLost(f"{self.worker.instance_id} ended its answer too early", self.worker) from None

    async def drain(self) -> None:
        """Let the call end by itself after its last message, so that the worker does not see a cancelled one."""
        try:
            async with asyncio.timeout(DRAIN_S):
                async for _ in self.events:
                    pass
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        self.line.calls -= 1
        self.call.cancel()


class Workers:
    """Calls to workers. Every call takes its deadline in seconds from now."""

    def __init__(self, *, connect_timeout_s: float, rpc_timeout_s: float, background: Background) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._rpc_timeout_s = rpc_timeout_s
        self._background = background
        self._lines: dict[WorkerKey, _Line] = {}

    async def reserve(self, worker: Worker, request_id: str, prompt_tokens: int, max_tokens: int) -> str:
        """Set rows and a slot aside; returns the reservation's id. Raises: NoRoom, WorkerLost."""
        line = await self._connected(worker)
        request = worker_pb2.ReserveRequest(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            fingerprint=fingerprint_proto(worker.fingerprint),
        )
        line.calls += 1
        try:
            reply = await line.decode.Reserve(request, timeout=self._rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise WorkerLost(f"{worker.instance_id} did not answer Reserve", worker) from None
            raise fault(worker, error) from None
        finally:
            line.calls -= 1
        return str(reply.reservation_id)

    async def prefill(self, worker: Worker, request: worker_pb2.PrefillRequest, timeout_s: float) -> WorkerStream:
        line = await self._connected(worker)
        return self._stream(worker, line, line.prefill.Prefill(request, timeout=timeout_s))

    async def adopt(self, worker: Worker, request: worker_pb2.AdoptRequest, timeout_s: float) -> WorkerStream:
        line = await self._connected(worker)
        return self._stream(worker, line, line.decode.Adopt(request, timeout=timeout_s))

    async def generate(self, worker: Worker, request: worker_pb2.PrefillRequest, timeout_s: float) -> WorkerStream:
        line = await self._connected(worker)
        return self._stream(worker, line, line.decode.Generate(request, timeout=timeout_s))

    def end(self, stream: WorkerStream, *, whole: bool) -> None:
        """Done with a stream: cancel it, or, where its last event was read, let it end by itself."""
        if whole and not stream.ended:
            self._background(stream.drain())
        else:
            stream.close()

    def release_reservation(self, worker: Worker, reservation_id: str) -> None:
        """Give a reservation back in the background; it also ends by itself, so a failure changes nothing."""
        request = worker_pb2.ReleaseReservationRequest(reservation_id=reservation_id)
        self._background(self._release(worker, "ReleaseReservation", request))

    def release_handoff(self, worker: Worker, manifest: worker_pb2.Manifest) -> None:
        request = worker_pb2.ReleaseHandoffRequest(handoff_id=manifest.handoff_id, fence=manifest.fence)
        self._background(self._release(worker, "ReleaseHandoff", request))

    def prune(self, live: Set[WorkerKey]) -> None:
        """Close channels to workers that are gone, once no call uses them."""
        for key in [k for k, line in self._lines.items() if k not in live and not line.calls]:
            self._background(self._lines.pop(key).channel.close())

    async def close(self) -> None:
        for line in self._lines.values():
            await line.channel.close()
        self._lines.clear()

    async def _release(self, worker: Worker, method: str, request: Any) -> None:
        line = self._line(worker)
        stub = line.decode if method == "ReleaseReservation" else line.prefill
        line.calls += 1
        try:
            await getattr(stub, method)(request, timeout=self._rpc_timeout_s)
        except grpc.aio.AioRpcError:
            pass  # the worker is gone, and what it held with it
        finally:
            line.calls -= 1

    def _stream(self, worker: Worker, line: _Line, call: Any) -> WorkerStream:
        line.calls += 1
        return WorkerStream(worker, call, line)

    def _line(self, worker: Worker) -> _Line:
        line = self._lines.get(worker.key)
        if line is None:
            channel = grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS)
            prefill = worker_pb2_grpc.PrefillWorkerStub(channel)
            decode = worker_pb2_grpc.DecodeWorkerStub(channel)
            line = _Line(channel, prefill, decode)
            self._lines[worker.key] = line
        return line

    async def _connected(self, worker: Worker) -> _Line:
        """The worker's channel, connected: a call that fails after this may have begun work.

        Raises: WorkerLost with `unreachable`.
        """
        line = self._line(worker)
        state = line.channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return line
        line.calls += 1  # one that waits uses the channel: `prune` leaves it open
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise WorkerLost(f"{worker.instance_id} refuses connections", worker, unreachable=True)
                    await line.channel.wait_for_state_change(state)
                    state = line.channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise WorkerLost(f"{worker.instance_id} cannot be reached", worker, unreachable=True) from None
        except grpc.aio.UsageError:  # closed meanwhile, with this process or by whoever shares it
            raise WorkerLost(f"{worker.instance_id}: its channel was closed", worker, unreachable=True) from None
        finally:
            line.calls -= 1
        return line


_INVALID: Final[Mapping[str, type[InvalidRequest]]] = {
    kind.code: kind for kind in (InvalidRequest, ContextLengthExceeded, RequestTooLarge)
}


def fault(worker: Worker, error: grpc.aio.AioRpcError) -> ServeError:
    """What a worker's status means for the request. Whatever another worker may do better is WorkerLost."""
    trailing = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return NoRoom(worker)
        case grpc.StatusCode.INVALID_ARGUMENT:
            kind = _INVALID.get(trailing.get("moonrelay-code", ""), InvalidRequest)
            return kind(details, param=trailing.get("moonrelay-param"))
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the request's deadline passed")
        case code:
            return WorkerLost(f"{worker.instance_id} failed: {code.name}: {details}", worker)


def fingerprint_proto(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    return common_pb2.Fingerprint(**{name: getattr(fingerprint, name) for name in fingerprint.__struct_fields__})


def sampled(tokens: Iterable[common_pb2.Token]) -> list[SampledToken]:
    return [
        SampledToken(
            id=token.id,
            logprob=token.logprob if token.HasField("logprob") else None,
            top=tuple((entry.id, entry.logprob) for entry in token.top),
        )
        for token in tokens
    ]


def token_proto(token: SampledToken) -> common_pb2.Token:
    top = [common_pb2.TopLogprob(id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return common_pb2.Token(id=token.id, logprob=token.logprob, top=top)


def restored_by_tier(cache: common_pb2.CacheUsage) -> dict[str, int]:
    return {
        "device": cache.cached_device,
        "host": cache.cached_host,
        "disk": cache.cached_disk,
        "remote": cache.cached_remote,
    }


def miss_reason_name(reason: int) -> str | None:
    """The closed word for a wire value; None where nothing was lost."""
    if reason == common_pb2.MISS_REASON_UNSPECIFIED:
        return None
    return common_pb2.MissReason.Name(reason).removeprefix("MISS_REASON_").lower()  # type: ignore[no-any-return]


def miss_reason_proto(reason: str | None) -> common_pb2.MissReason:
    name = "UNSPECIFIED" if reason is None else reason.upper()
    return cast(common_pb2.MissReason, common_pb2.MissReason.Value(f"MISS_REASON_{name}"))
