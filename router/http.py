"""The HTTP frontend: OpenAI's endpoints on aiohttp. Every answer is JSON or an event stream, every fault one form."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from moonrelay import __version__
from moonrelay.errors import InvalidRequest, Overloaded, ServeError, Unavailable, UnknownModel
from moonrelay.status import http_status
from router import fields
from router.formats import ChatFormat, Collected, CompletionFormat, Format, error_body
from router.output import Piece
from router.prompt import prepare
from router.schema import CHAT, GenerationRequest, parse_chat, parse_completion, read_prompt
from router.service import Service
from router.turn import Call, ClientGone, Result

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode
OFF_LOOP_BYTES: Final = 1 << 17  # reading this much JSON takes some milliseconds
REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
TENANT: Final = re.compile(r"[\x21-\x7e]{0,128}")
KEEPALIVE_S: Final = 75.0
FAREWELL_S: Final = 5.0  # for the last words to a client that may not read them
STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
Handler = Callable[[web.BaseRequest, Call], Awaitable[web.StreamResponse]]


class EventStream:
    """A sink that writes server-sent events. Until the first one a fault can still be an HTTP status."""

    def __init__(self, request: web.BaseRequest, form: Format, request_id: str) -> None:
        self._request = request
        self._form = form
        self._request_id = request_id
        self._first = b""
        self.response: web.StreamResponse | None = None

    def accepted(self, prompt_ids: Sequence[int]) -> None:
        self._first = self._form.first(prompt_ids)

    async def emit(self, piece: Piece) -> None:
        await self._write(self._form.chunks(piece))

    async def finish(self, result: Result) -> None:
        await self._write(self._form.last(result))
        await self._end()

    async def fail(self, error: ServeError) -> None:
        """The terminal event of a stream that cannot go on; no end mark follows, for nothing was completed."""
        await self._write(b"data: " + _encode(error_body(error)) + b"\n\n")
        await self._end()

    async def _write(self, data: bytes) -> None:
        try:
            if self.response is None:
                headers = {**STREAM_HEADERS, "x-request-id": self._request_id}
                self.response = web.StreamResponse(headers=headers)
                await self.response.prepare(self._request)
                data = self._first + data
            await self.response.write(data)
        except ClientConnectionError:
            raise ClientGone("the client closed the connection") from None

    async def _end(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ClientConnectionError:
            raise ClientGone("the client closed the connection") from None


class HttpFrontend:
    """Routes and answers; holds no state of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.model
        self._settings = service.settings
        self._routes: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/health/ready": ("GET", self._health),
            "/health/live": ("GET", self._live),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", self._version),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. A client that goes away cancels this, and with it everything begun for it."""
        given = request.headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        try:
            answer = await self._service.guarded(self._dispatch(request, request_id), request_id)
        except ServeError as error:
            answer = json_answer(error_body(error), http_status(error))
            if isinstance(error, Overloaded):
                answer.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
            elif isinstance(error, Unavailable):
                answer.headers["Retry-After"] = "1"
        if not answer.prepared:
            answer.headers["x-request-id"] = request_id
        return answer

    async def _dispatch(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None and request.path.startswith("/v1/models/"):
            method, handler = "GET", self._one_model
        if handler is None:
            return refusal(404, "not_found", f"no such path: {fields.shown(request.path)}")
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            answer = refusal(405, "method_not_allowed", f"{request.path} takes {method}, not {request.method}")
            answer.headers["Allow"] = method
            return answer
        try:
            return await handler(request, self._call(request, request_id))
        except web.HTTPRequestEntityTooLarge:
            limit = self._settings.body_bytes_max
            return refusal(413, "request_too_large", f"the body: expected at most {limit} bytes")
        except web.HTTPUnsupportedMediaType as error:
            return refusal(415, "unsupported_media_type", error.text or "")
        except web.HTTPRequestTimeout:
            return refusal(408, "request_timeout", "the body did not arrive in time")
        except web.RequestPayloadError:
            return refusal(400, "invalid_request", "the body: its transfer encoding is broken")

    def _call(self, request: web.BaseRequest, request_id: str) -> Call:
        deadline_ms = self._settings.request_deadline_ms
        asked = request.headers.get("x-moonrelay-deadline-ms")
        if asked is not None:
            if not (asked.isascii() and asked.isdigit() and int(asked[:12]) > 0):
                raise InvalidRequest(
                    "x-moonrelay-deadline-ms: expected a positive whole number", param="x-moonrelay-deadline-ms"
                )
            deadline_ms = min(deadline_ms, int(asked[:12]))
        tenant = request.headers.get("x-moonrelay-tenant", "")
        if not TENANT.fullmatch(tenant):
            raise InvalidRequest(
                "x-moonrelay-tenant: expected up to 128 visible ASCII characters", param="x-moonrelay-tenant"
            )
        return Call(
            request_id=request_id,
            deadline_s=asyncio.get_running_loop().time() + deadline_ms / 1e3,
            tenant=tenant,
            explain=request.headers.get("x-moonrelay-explain", "0") not in ("0", "", "false"),
        )

    async def _chat(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        return await self._generate(request, call, self._parsed_chat, ChatFormat)

    async def _completion(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        return await self._generate(request, call, self._parsed_completion, CompletionFormat)

    def _parsed_chat(self, body: Mapping[str, Any]) -> GenerationRequest:
        return parse_chat(body, self._model.name, self._model.tokenizer.vocab_size)

    def _parsed_completion(self, body: Mapping[str, Any]) -> GenerationRequest:
        return parse_completion(body, self._model.name, self._model.tokenizer.vocab_size)

    async def _generate(
        self,
        request: web.BaseRequest,
        call: Call,
        parse: Callable[[Any], GenerationRequest],
        kind: type[Format],
    ) -> web.StreamResponse:
        try:
            asked = await self._read(request, parse)
        except InvalidRequest as error:
            self._service.metrics.requests.labels(str(http_status(error))).inc()
            raise
        call = replace(call, size=len(await request.read()))
        form = kind(asked, call, self._model.name, self._model.tokenizer)
        if not asked.stream:
            collected = Collected()
            result = await self._service.serve(asked, call, collected)
            return json_answer(form.whole(collected, result))
        stream = EventStream(request, form, call.request_id)
        try:
            await stream.finish(await self._service.serve(asked, call, stream))
        except ServeError as error:
            if stream.response is None:
                raise
            if not isinstance(error, ClientGone):
                await self._farewell(request, stream, error)
        assert stream.response is not None
        return stream.response

    async def _farewell(self, request: web.BaseRequest, stream: EventStream, error: ServeError) -> None:
        """Tell the client why its stream ends, unless it has stopped reading."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await stream.fail(error)
        except (TimeoutError, ClientGone):
            if request.transport is not None:
                request.transport.abort()

    async def _read(self, request: web.BaseRequest, parse: Callable[[Any], Any]) -> Any:
        """The body, parsed by `parse`; a long one in a thread. Raises: InvalidRequest, web.HTTPException."""
        if request.content_type != "application/json":
            found = request.headers.get("Content-Type", "none")
            raise web.HTTPUnsupportedMediaType(text=f"Content-Type: expected application/json, found {found[:80]}")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise web.HTTPUnsupportedMediaType(text="Content-Encoding: expected an uncompressed body")
        if (request.content_length or 0) > self._settings.body_bytes_max:
            raise web.HTTPRequestEntityTooLarge(self._settings.body_bytes_max)
        try:
            async with asyncio.timeout(self._settings.body_timeout_ms / 1e3):
                raw = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        if len(raw) > OFF_LOOP_BYTES:
            return await self._service.in_thread(lambda: parse(json_body(raw)))
        return parse(json_body(raw))

    async def _models(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        return json_answer({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        name = request.path.removeprefix("/v1/models/")
        if name != self._model.name:
            raise UnknownModel(f"model: {fields.shown(name)} is not served here", param="model")
        return json_answer(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        model = self._model
        card = {"id": model.name, "object": "model", "created": model.created, "owned_by": "moonrelay"}
        return {**card, "max_model_len": self._service.context_len}

    async def _tokenize(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        ids = await self._read(request, self._tokens_of)
        return json_answer({"count": len(ids), "max_model_len": self._service.context_len, "tokens": ids})

    def _tokens_of(self, body: Any) -> list[int]:
        """Ids of `prompt`, or of a chat as it would be rendered."""
        read = {"model": self._model.name, **body}
        if "messages" in read:
            return prepare(self._parsed_chat(read), self._model.tokenizer).ids
        self._check_names(read, "prompt")
        prompt = read_prompt(read["prompt"], "prompt", self._model.tokenizer.vocab_size)
        return self._model.tokenizer.encode(fields.text(prompt, "prompt"))

    async def _detokenize(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        def text_of(body: Any) -> str:
            read = {"model": self._model.name, **body}
            self._check_names(read, "tokens")
            if not isinstance(read["tokens"], list):
                fields.refuse("tokens", "an array of token ids", read["tokens"])
            tokenizer = self._model.tokenizer
            return tokenizer.decode(fields.token_ids(read["tokens"], "tokens", tokenizer.vocab_size))

        return json_answer({"prompt": await self._read(request, text_of)})

    def _check_names(self, body: Mapping[str, Any], wanted: str) -> None:
        for key in body.keys() - {"model", wanted}:
            raise InvalidRequest(f"{key[:80]!r}: unknown field", param=key)
        if wanted not in body:
            raise InvalidRequest(f"{wanted}: expected this field, found none", param=wanted)
        if CHAT["model"](body["model"], "model") != self._model.name:
            raise UnknownModel(f"model: {fields.shown(body['model'])} is not served here", param="model")

    async def _health(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """Ready: a request sent now would find a whole serving path."""
        if self._service.ready:
            return json_answer({"status": "ok"})
        why = "draining" if self._service.draining else "no prefill and decode worker that fit each other"
        return json_answer({"status": "unavailable", "reason": why}, 503)

    async def _live(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        return json_answer({"status": "ok"})

    async def _metrics(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        self._service.observe()
        text = generate_latest(self._service.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _version(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        return json_answer({"version": __version__})


def json_body(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises: InvalidRequest."""
    try:
        body = _decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body: nested too deeply") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body: expected a JSON object")
    return body


def json_answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")


def refusal(status: int, code: str, message: str) -> web.Response:
    """A fault of the request line, headers or transfer, which only HTTP knows."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json_answer({"error": error}, status)


class Connection(web.RequestHandler):
    """A connection on which even what is no HTTP gets the one error form. Such noise is not worth a log line."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        answer = refusal(status, "invalid_request", f"not an HTTP request: {(message or '').strip()[:200]}")
        answer.force_close()
        return answer


class Server(web.Server):
    """Takes connections; does not unpack compressed bodies, whose size nobody knows before."""

    def __init__(self, frontend: HttpFrontend, body_bytes_max: int) -> None:
        loop = asyncio.get_running_loop()

        def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=body_bytes_max)

        super().__init__(frontend.handle, request_factory=make_request, handler_cancellation=True)
        self._loop_for_connections = loop

    def __call__(self) -> web.RequestHandler:
        return Connection(
            self,
            loop=self._loop_for_connections,
            access_log=None,  # type: ignore[arg-type]  # none: a line per request is what metrics are for
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
        )


async def listen(frontend: HttpFrontend, host: str, port: int, body_bytes_max: int) -> tuple[web.ServerRunner, int]:
    """Serve until the runner is cleaned up; returns it and the port. aiohttp sets TCP_NODELAY on what it accepts."""
    runner = web.ServerRunner(Server(frontend, body_bytes_max))
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1_024)
    await site.start()
    return runner, int(runner.addresses[0][1])
