"""The HTTP application: routes of OpenAI's and Anthropic's APIs, and routes of this server."""

import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import IO, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from detcompile.errors import DetcompileError, InvalidInput, StorageError
from detcompile.serving.access import Access, owner_of
from detcompile.serving.anthropic.messages import count_tokens, create_message
from detcompile.serving.anthropic.schema import CountTokensRequest, MessagesRequest
from detcompile.serving.control import ADAPTER_PATHS, CONTROL_PATHS, add_adapters, add_control
from detcompile.serving.dashboard.routes import KillRequest, kill_engine, page, state_of
from detcompile.serving.http_errors import FAULT, HTTPError, error_of
from detcompile.serving.journal.jobs import Call
from detcompile.serving.limiter import Reservation
from detcompile.serving.openai.chat import chat
from detcompile.serving.openai.completions import complete
from detcompile.serving.openai.response_schema import ResponsesRequest
from detcompile.serving.openai.responses import (
    RESPONSES,
    cancelled_response,
    count_input,
    dropped_response,
    kept_response,
    respond,
)
from detcompile.serving.openai.schema import (
    ChatRequest,
    ChatTokensRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decoded_body,
)
from detcompile.serving.openai.tokenization import detokenize, tokenize, tokenizer_info
from detcompile.serving.pooling.routes import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    classify,
    embed,
    rerank,
    score,
)
from detcompile.serving.receipts.envelope import Envelope
from detcompile.serving.receipts.routes import stored_receipt, verify
from detcompile.serving.request_log import LogFile, RequestLog
from detcompile.serving.responses import JSON, Reserving, json_response, unless_left
from detcompile.serving.service import Service
from detcompile.serving.tokens.generate import GenerateRequest, generate
from detcompile.serving.tokens.sglang import SGLangRequest, sglang_generate
from detcompile.serving.weight_store import WeightStore

METHODS = ["GET", "POST", "DELETE"]
EXPOSED = [  # response headers that pages of other origins may read
    "Retry-After", "X-Request-Id", "X-Detcompile-Seed", "X-Detcompile-Receipt", "X-Detcompile-Receipt-Salt",
    "Traceparent",
]  # fmt: skip
JOURNALED: dict[str, tuple[type, Callable[[Service, Any, Call], Awaitable[Response]]]] = {  # by path
    "/v1/completions": (CompletionRequest, complete),
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/chat/completions/tokens": (ChatTokensRequest, chat),
    "/v1/messages": (MessagesRequest, create_message),
    "/inference/v1/generate": (GenerateRequest, generate),
    "/generate": (SGLangRequest, sglang_generate),
}
POSTS: list[tuple[list[str], Any, Any]] = [  # not journaled
    (["/tokenize", "/v1/tokenize"], TokenizeRequest, tokenize),
    (["/detokenize", "/v1/detokenize"], DetokenizeRequest, detokenize),
    (["/v1/messages/count_tokens"], CountTokensRequest, count_tokens),
    (["/v1/embeddings"], EmbeddingRequest, embed),
    (["/classify"], ClassifyRequest, classify),
    (["/score", "/v1/score"], ScoreRequest, score),
    (["/rerank", "/v1/rerank"], RerankRequest, rerank),
]
READY_RETRY_SECONDS = 5
Body = TypeVar("Body")


def new_app(
    service: Service,
    version: str,
    digests: Sequence[bytes] = (),
    *,
    origins: Sequence[str] = (),
    request_log: IO[str] | None = None,
    demo: bool = False,
    root_path: str = "",
    admin: Sequence[bytes] | None = None,
    store: WeightStore | None = None,
) -> ASGIApp:
    """Build the ASGI application.

    Args:
        version: detcompile's version.
        digests: sha256 of the API keys; empty: no key is required.
        origins: origins whose pages may use this server from a browser.
        request_log: file for one line per request; None for no log.
        demo: let the page kill engines.
        root_path: path prefix that a proxy adds, such as /ai; requests may come with or without it.
        admin: sha256 of the keys for control routes; empty: no further key; None: no control routes.
        store: keeps weights that control routes bring.

    Raises:
        InvalidInput: root_path is malformed, or a route begins with it.
    """
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(
        title="detcompile",
        version=version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=servers,
        telemetry={"tracing": False},  # its spans end before a stream does, so tracing.py records ours
    )
    _add_posts(app, service, demo)
    log = None if request_log is None else LogFile(request_log)
    _add_gets(app, service, version, log, demo)
    _add_streams(app, service)
    _add_kept(app, service)
    if admin is not None:
        add_control(app, service, store)
        add_adapters(app, service)
    app.add_exception_handler(HTTPError, _refused)
    app.add_exception_handler(DetcompileError, _refused)
    app.add_exception_handler(RequestValidationError, _no_parameter)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)
    _require_free(root_path, app)
    outside: ASGIApp = Access(
        app, digests, admin or (), frozenset() if admin is None else CONTROL_PATHS | ADAPTER_PATHS
    )
    if origins:  # outside of Access, because browsers send preflight requests without a key
        outside = CORSMiddleware(
            outside, allow_origins=origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED
        )
    outside = _traced(outside if log is None else RequestLog(outside, log))
    return _without_root(root_path, outside) if root_path else outside


def _traced(inside: ASGIApp) -> ASGIApp:
    """Wrap an application in traces if OpenTelemetry's API is installed; other packages share its namespace."""
    if any(importlib.util.find_spec(name) is None for name in ("opentelemetry", "opentelemetry.trace")):
        return inside
    layer: ASGIApp = importlib.import_module("detcompile.serving.tracing").Tracing(inside)
    return layer


def _require_free(root_path: str, app: FastAPI) -> None:
    """Reject a root path that cannot be told apart from a route."""
    if not root_path:
        return
    if not root_path.startswith("/") or root_path.endswith("/") or "//" in root_path:
        raise InvalidInput(f"--root-path {root_path!r}: write a path such as /ai: a leading slash, no trailing one")
    paths = [str(route.path) for route in app.routes]  # type: ignore[attr-defined]
    route = next((path for path in paths if f"{path}/".startswith(f"{root_path}/")), None)
    if route is not None:
        raise InvalidInput(f"--root-path {root_path!r}: the route {route} begins with it; choose another path")


def _without_root(root_path: str, inside: ASGIApp) -> ASGIApp:
    """Wrap an application so that ``root_path`` is removed from the paths of requests."""

    async def outside(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root_path) or "/"}
        await inside(scope, receive, send)

    return outside


def _add_posts(app: FastAPI, service: Service, demo: bool) -> None:
    kinds: list[type] = []

    def post(
        paths: Sequence[str], kind: type[Body], answer: Callable[[Service, Body, Call], Awaitable[Response]]
    ) -> None:
        kinds.append(kind)

        async def route(request: Request) -> Response:
            async def respond_with(reservation: Reservation) -> Response:
                held = Reservation()  # for the body, which is released before the response is sent
                try:
                    body = await service.bodies.read(request, owner_of(request), held)
                    return await unless_left(request, answered(_call(request, body, reservation, held)))
                finally:
                    held.release()

            return Reserving(respond_with)

        async def answered(call: Call) -> Response:
            parsed = await decoded_body(call.body, kind)
            client_id = call.client_id or getattr(parsed, "request_id", None) or getattr(parsed, "rid", None) or ""
            return await answer(service, parsed, replace(call, client_id=client_id))

        (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
        body = {"required": True, "content": {JSON: {"schema": schema}}}
        for path in paths:
            name = path.strip("/").replace("/", "_")
            app.add_api_route(path, route, methods=["POST"], name=name, openapi_extra={"requestBody": body})

    for path, (kind, answer) in JOURNALED.items():
        post([path], kind, answer)
    post([RESPONSES], ResponsesRequest, respond)
    post([f"{RESPONSES}/input_tokens"], ResponsesRequest, count_input)
    post(["/v1/verify"], Envelope, verify)
    for paths, kind, answer in POSTS:
        post(paths, kind, answer)
    if demo:
        post(["/dashboard/kill"], KillRequest, kill_engine)
    base_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = base_openapi()
        _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _call(request: Request, body: bytes, reservation: Reservation, held: Reservation) -> Call:
    """Return a request in the form that the handlers take."""
    headers = request.headers
    key, last_event = headers.get("idempotency-key"), headers.get("last-event-id")
    client_id = headers.get("x-request-id", "")
    return Call(request.url.path, body, owner_of(request), key, last_event, reservation, held, client_id)


def _add_kept(app: FastAPI, service: Service) -> None:
    async def response(
        name: str, request: Request, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        return await kept_response(service, (owner_of(request), name), stream=stream, starting_after=starting_after)

    async def cancel(name: str, request: Request) -> Response:
        return await cancelled_response(service, (owner_of(request), name))

    async def drop(name: str, request: Request) -> Response:
        return await dropped_response(service, (owner_of(request), name))

    path = f"{RESPONSES}/{{name}}"
    app.add_api_route(path, response, methods=["GET"], name="v1_response", response_model=None)
    app.add_api_route(path, response, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_api_route(f"{path}/cancel", cancel, methods=["POST"], name="v1_response_cancel", response_model=None)
    app.add_api_route(path, drop, methods=["DELETE"], name="v1_response_drop", response_model=None)


def _fingerprint(service: Service) -> Response:
    parts = service.hello.fingerprint_parts
    content: dict[str, Any] = {"fingerprint": service.hello.fingerprint, "fingerprint_parts": parts}
    key = service.receipts.key
    content["receipts"] = {"level": service.receipts.level, "public_key": None if key is None else key.public.pem}
    return json_response(content | {"default_sampling_params": service.hello.default_params})


async def _ready(service: Service, log: LogFile | None) -> Response:
    service.require_ready()
    service.require_engine()
    await service.jobs.require_writable()
    try:
        service.receipts.require_writable()
        if log is not None:
            log.require_writable()
    except StorageError as error:
        raise HTTPError(503, str(error), code="unavailable", retry_after=READY_RETRY_SECONDS) from error
    return json_response({"status": "ready"})


def _add_gets(app: FastAPI, service: Service, version: str, log: LogFile | None, demo: bool) -> None:
    def get(path: str, answer: Callable[[], Response], *, ready: bool = False) -> None:
        async def route() -> Response:
            if ready:
                service.require_ready()
            return answer()

        add(path, route)

    def add(path: str, route: Callable[..., Awaitable[Response]], name: str = "") -> None:
        name = name or path.strip("/").replace("/", "_") or "page"
        app.add_api_route(path, route, methods=["GET"], name=name)
        app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)  # uvicorn leaves out the body

    def health() -> Response:
        failure = service.fleet.failure
        if failure is not None:
            return _answered(error_of(failure), "/health", status=503)
        return json_response({"status": "ok"})

    get("/", page)
    get("/health", health)
    get("/version", lambda: json_response({"version": version}))
    get("/metrics", lambda: Response(service.metrics.text(), media_type="text/plain; version=0.0.4"))
    get("/v1/models", lambda: json_response({"object": "list", "data": _models(service)}), ready=True)
    get("/tokenizer_info", lambda: tokenizer_info(service), ready=True)
    get("/v1/fingerprint", lambda: _fingerprint(service), ready=True)
    get("/v1/certificate", lambda: Response(service.hello.certificate, media_type=JSON), ready=True)

    async def ready() -> Response:
        return await _ready(service, log)

    add("/ready", ready)

    async def state(request: Request) -> Response:
        content = state_of(service, version, owner_of(request), demo=demo)
        return json_response(content)

    add("/dashboard/state", state)

    async def receipt(name: str, request: Request) -> Response:
        return await stored_receipt(service, owner_of(request), name)

    add("/v1/receipts/{name}", receipt, "v1_receipt")

    async def model(name: str) -> Response:
        service.require_ready()
        service.require_model(name)
        return json_response(next(one for one in _models(service) if one["id"] == name))

    add("/v1/models/{name:path}", model, "v1_model")


def _add_streams(app: FastAPI, service: Service) -> None:
    async def stream(name: str, request: Request) -> Response:
        async def respond_with(reservation: Reservation) -> Response:
            service.require_ready()
            call = await service.jobs.call(owner_of(request), name, request.headers.get("last-event-id"))
            if call is None or call.endpoint not in JOURNALED:
                raise HTTPError(404, f"no journaled request has the answer id {name[:100]!r}", code="stream_not_found")
            kind, answer = JOURNALED[call.endpoint]
            body: Any = await decoded_body(call.body, kind)
            return await answer(service, body, replace(call, reservation=reservation))

        return Reserving(respond_with)

    app.add_api_route("/v1/streams/{name}", stream, methods=["GET"], name="v1_stream")


def _models(service: Service) -> list[dict[str, Any]]:
    """Return the model and its adapters."""
    base = _model(service)
    adapted = {name: service.model_of(name).fingerprint for name in service.adapters}
    others = [base | {"id": name, "parent": service.name, "fingerprint": one} for name, one in adapted.items()]
    return [base, *others]


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "detcompile",
        "max_model_len": service.hello.max_context,
        "fingerprint": service.hello.fingerprint,
    }


def _answered(error: HTTPError, path: str, status: int | None = None) -> Response:
    return Response(error.body(path), status or error.status, headers=error.headers, media_type=JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, (HTTPError, DetcompileError))
    return _answered(error_of(error), request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = HTTPError(error.status_code, message[:400], code="unsupported" if error.status_code == 404 else None)
    response.headers |= error.headers or {}
    return _answered(response, request.url.path)


async def _no_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _answered(HTTPError(400, f"{name}: {first['msg']}", param=name), request.url.path)


async def _failed(request: Request, _error: Exception) -> Response:
    return _answered(HTTPError(500, FAULT), request.url.path)
