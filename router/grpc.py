"""The gRPC frontend: the HTTP endpoints' semantics as one streaming call, with health and reflection."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from model.output import ToolCallStart
from moonrelay.errors import InvalidRequest, Overloaded, ServeError
from moonrelay.status import grpc_status, http_status
from moonrelay.stubs.v1 import api_pb2, api_pb2_grpc
from router import fields
from router.admission import Refused
from router.edge import MESSAGE_BYTES_MAX
from router.output import Piece
from router.schema import TOP_LOGPROBS_MAX, GenerationRequest, parse_chat, parse_completion
from router.service import Service
from router.turn import Call
from router.wire import cache_proto, token_proto

SERVICE: Final = api_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
OFF_LOOP_BYTES: Final = 1 << 17
TENANT: Final = re.compile(r"[\x21-\x7e]{0,128}")
REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
SERVER_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second process on the port is an error, not half of the traffic
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
Context = Any  # grpc.aio.ServicerContext, which has no types


class DeltaStream:
    """A sink that writes deltas."""

    def __init__(self, context: Context, *, with_tokens: bool) -> None:
        self._context = context
        self._with_tokens = with_tokens

    def accepted(self, prompt_ids: Sequence[int]) -> None:
        """The call's API has no place for prompt ids."""

    async def emit(self, piece: Piece) -> None:
        delta = api_pb2.Delta(reasoning_content=piece.reasoning, content=piece.content)
        for call in piece.calls:
            if isinstance(call, ToolCallStart):
                delta.tool_calls.add(index=call.index, id=call.id, name=call.name)
            else:
                delta.tool_calls.add(index=call.index, arguments=call.fragment)
        if self._with_tokens:
            delta.tokens.extend(token_proto(token) for token in piece.tokens)
        await self._context.write(api_pb2.GenerateReply(delta=delta))


class GrpcFrontend(api_pb2_grpc.GenerationServicer):
    """Translates; the request is checked and served by the same code as over HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(self, request: api_pb2.GenerateRequest, context: Context) -> None:
        """A client that cancels, or whose deadline passes, cancels this, and with it everything begun for it."""
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        given = metadata.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        try:
            done = await self._service.guarded(self._generate(request, context, request_id), request_id)
        except ServeError as error:
            await context.abort(grpc_status(error), str(error), trailing(error, request_id))
        context.set_trailing_metadata((("x-request-id", request_id),))
        await context.write(api_pb2.GenerateReply(done=done))

    async def ListModels(self, request: api_pb2.ListModelsRequest, context: Context) -> api_pb2.ListModelsReply:
        return api_pb2.ListModelsReply(models=[self._service.model.name])

    async def _generate(self, request: api_pb2.GenerateRequest, context: Context, request_id: str) -> api_pb2.Done:
        size = request.ByteSize()
        try:
            if size > OFF_LOOP_BYTES:
                asked = await self._service.in_thread(lambda: self._parsed(request))
            else:
                asked = self._parsed(request)
        except InvalidRequest as error:
            self._service.metrics.requests.labels(str(http_status(error))).inc()
            raise
        left_s = context.time_remaining()
        limit_s = self._service.settings.request_deadline_ms / 1e3
        call = Call(
            request_id=request_id,
            deadline_s=asyncio.get_running_loop().time() + (limit_s if left_s is None else min(limit_s, left_s)),
            tenant=request.tenant,
            size=size,
        )
        stream = DeltaStream(context, with_tokens=asked.top_logprobs is not None)
        result = await self._service.serve(asked, call, stream)
        return api_pb2.Done(
            finish_reason=result.finish_reason,
            prompt_tokens=result.account.prompt_tokens,
            completion_tokens=result.completion_tokens,
            cache=cache_proto(result.account),
        )

    def _parsed(self, request: api_pb2.GenerateRequest) -> GenerationRequest:
        """The call as the HTTP body it means, read by the same rules. Raises: InvalidRequest."""
        model = self._service.model
        if not TENANT.fullmatch(request.tenant):
            raise InvalidRequest("tenant: expected up to 128 visible ASCII characters", param="tenant")
        body: dict[str, Any] = {"model": request.model, "stop": list(request.stop)}
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"):
            if request.HasField(name):
                body[name] = getattr(request, name)
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
        if request.HasField("top_logprobs"):
            fields.integer(0, TOP_LOGPROBS_MAX)(request.top_logprobs, "top_logprobs")
        match request.WhichOneof("input"):
            case "chat":
                if request.HasField("top_logprobs"):
                    body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
                return parse_chat(body | chat_body(request.chat), model.name, model.tokenizer.vocab_size)
            case "prompt":
                body["prompt"] = request.prompt
            case "prompt_ids":
                ids, vocab_size = request.prompt_ids.ids, model.tokenizer.vocab_size
                body["prompt"] = fields.token_ids(ids, "prompt_ids.ids", vocab_size)
            case _:
                raise InvalidRequest("input: expected chat, prompt or prompt_ids, found none", param="input")
        if request.HasField("top_logprobs"):
            body["logprobs"] = request.top_logprobs
        return parse_completion(body, model.name, model.tokenizer.vocab_size)


def chat_body(chat: api_pb2.ChatInput) -> dict[str, Any]:
    """The fields of a chat request. Raises: InvalidRequest where `tools_json` is not JSON."""
    body: dict[str, Any] = {"messages": [message_body(message) for message in chat.messages]}
    if chat.tools_json:
        try:
            body["tools"] = msgspec.json.decode(chat.tools_json)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"tools_json: expected a JSON array: {error}", param="tools_json") from None
        if not isinstance(body["tools"], list):
            fields.refuse("tools_json", "a JSON array", body["tools"])
    if chat.HasField("thinking"):
        body["chat_template_kwargs"] = {"thinking": chat.thinking}
    if chat.reasoning_effort:
        body["reasoning_effort"] = chat.reasoning_effort
    return body


def message_body(message: api_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if getattr(message, name):
            body[name] = getattr(message, name)
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def trailing(error: ServeError, request_id: str) -> tuple[tuple[str, str], ...]:
    """What a client's program needs to know of a fault."""
    entries = [("x-request-id", request_id), ("moonrelay-code", error.code)]
    param = getattr(error, "param", None)
    if param is not None and param.isascii() and param.isprintable():
        entries.append(("moonrelay-param", param))
    if isinstance(error, Refused):
        entries.append(("moonrelay-reason", error.reason))
    if isinstance(error, Overloaded):
        entries.append(("retry-after", str(max(1, round(error.retry_after_s)))))
    return tuple(entries)


class GrpcServer:
    """The listening server; `set_ready` answers grpc.health.v1 for the whole server and for Generation."""

    def __init__(self, service: Service) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        api_pb2_grpc.add_GenerationServicer_to_server(GrpcFrontend(service), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises: RuntimeError where the address is taken."""
        bracketed = f"[{host}]" if ":" in host else host
        bound: int = self._server.add_insecure_port(f"{bracketed}:{port}")
        await self._server.start()
        return bound

    async def set_ready(self, ready: bool) -> None:
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if ready else states.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
