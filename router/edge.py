"""gRPC to the workers: one channel per instance and epoch, protobuf in and out, statuses to faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moonrelay.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    ServeError,
    Unavailable,
)
from moonrelay.stubs.v1 import worker_pb2, worker_pb2_grpc
from router.core import Worker, WorkerKey

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
    """A worker failed under a request. The message is for the client, `detail` for the log.

    `unreachable`: it was never reached, so it has done nothing for it; `died`: it ended under the request without a
    word of its own; `withdrawn`: decode was told by prefill that there is nothing to adopt, and prefill knows why.
    """

    def __init__(
        self,
        message: str,
        *workers: Worker,
        unreachable: bool = False,
        died: bool = False,
        withdrawn: bool = False,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.workers = workers
        self.unreachable = unreachable
        self.died = died
        self.withdrawn = withdrawn
        self.detail = detail


class NoRoom(ServeError):
    """The worker has no room for the request now."""

    code = "overloaded"

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"{worker.instance_id} has no room")
        self.worker = worker


Background = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Line:
    """A channel, how many use it or wait for it, and the calls on it. `gone`: the worker has stopped living."""

    worker: Worker
    channel: grpc.aio.Channel
    prefill: worker_pb2_grpc.PrefillWorkerStub
    decode: worker_pb2_grpc.DecodeWorkerStub
    health: health_pb2_grpc.HealthStub
    calls: int = 0
    running: set[Any] = field(default_factory=set)
    gone: bool = False

    def lost_under_call(self) -> bool:
        """Whether a cancelled call was cancelled because the worker is gone, and not because its request is."""
        task = asyncio.current_task()
        return self.gone and not (task is not None and task.cancelling())


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
        except asyncio.CancelledError:
            if not self.line.lost_under_call():
                raise
            self.ended = True
            raise _lifeless(self.worker) from None

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
        self.line.running.discard(self.call)
        self.call.cancel()


class Workers:
    """Calls to workers. Every call takes its deadline in seconds from now."""

    def __init__(self, *, connect_timeout_s: float, rpc_timeout_s: float, background: Background) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._rpc_timeout_s = rpc_timeout_s
        self._background = background
        self._lines: dict[WorkerKey, _Line] = {}

    async def reserve(self, worker: Worker, request: worker_pb2.ReserveRequest) -> str:
        """Set rows and a slot aside; returns the reservation's id. One that nobody waits for any more is given back.

        Raises: NoRoom, WorkerLost.
        """
        line = await self._connected(worker)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._background(self._reserve(worker, line, request, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.release_reservation(worker, answer.result())  # it came in the moment that ended the wait
            raise

    async def _reserve(
        self, worker: Worker, line: _Line, request: worker_pb2.ReserveRequest, answer: asyncio.Future[str]
    ) -> None:
        call = line.decode.Reserve(request, timeout=self._rpc_timeout_s)
        line.calls += 1
        line.running.add(call)
        try:
            reservation_id = str((await call).reservation_id)
        except grpc.aio.AioRpcError as error:
            lost = WorkerLost(f"{worker.instance_id} did not answer Reserve", worker)
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            _fail(answer, lost if late else fault(worker, error))
        except asyncio.CancelledError:
            if not line.lost_under_call():
                answer.cancel()
                raise
            _fail(answer, _lifeless(worker))
        else:
            if answer.cancelled():
                self.release_reservation(worker, reservation_id)
            else:
                answer.set_result(reservation_id)
        finally:
            line.calls -= 1
            line.running.discard(call)

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

    def release_handoff(self, worker: Worker, handoff_id: str, fence: int) -> None:
        request = worker_pb2.ReleaseHandoffRequest(handoff_id=handoff_id, fence=fence)
        self._background(self._release(worker, "ReleaseHandoff", request))

    def in_use(self) -> dict[WorkerKey, Worker]:
        """The workers that calls run on, or wait for."""
        return {key: line.worker for key, line in self._lines.items() if line.calls}

    async def alive(self, worker: Worker, timeout_s: float) -> bool:
        """Whether the process answers at all, serving or not."""
        line = self._line(worker)
        line.calls += 1
        try:
            await line.health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            # A status of its own is a sign of life, too.
            return error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
        finally:
            line.calls -= 1
        return True

    def abandon(self, worker: Worker) -> None:
        """End every call to a worker that no longer lives, as WorkerLost for whoever reads it.

        Should it come back it finds its calls cancelled, and a new channel serves it.
        """
        line = self._lines.pop(worker.key, None)
        if line is not None:
            line.gone = True
            for call in list(line.running):
                call.cancel()
            self._background(line.channel.close())

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
        line.running.add(call)
        return WorkerStream(worker, call, line)

    def _line(self, worker: Worker) -> _Line:
        line = self._lines.get(worker.key)
        if line is None:
            channel = grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS)
            prefill = worker_pb2_grpc.PrefillWorkerStub(channel)
            decode = worker_pb2_grpc.DecodeWorkerStub(channel)
            line = _Line(worker, channel, prefill, decode, health_pb2_grpc.HealthStub(channel))
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

_CUT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # what a call sees of a connection that breaks


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
            said = trailing.get("moonrelay-code")  # no worker refuses without it: else the words are the connection's
            died = said is None and code in _CUT
            what = "died, or its connection broke" if died else f"failed with {said or 'an unknown error'}"
            return WorkerLost(
                f"{worker.instance_id} {what}, while it served the request",
                worker,
                died=died,
                withdrawn=trailing.get("moonrelay-reason") == "withdrawn",
                detail=f"{code.name}: {details}",
            )


def _lifeless(worker: Worker) -> WorkerLost:
    return WorkerLost(f"{worker.instance_id} shows no sign of life", worker, died=True)


def _fail(answer: asyncio.Future[str], error: ServeError) -> None:
    if not answer.done():
        answer.set_exception(error)
