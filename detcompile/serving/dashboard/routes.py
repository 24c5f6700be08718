"""The page at / and what it calls: the server's state, and with --demo a switch that kills engines."""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from detcompile.serving.dashboard.history import Row
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.fleet import EngineFailure
from detcompile.serving.engines.protocol import Holding, Statistics, Step
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.metrics import SECONDS
from detcompile.serving.responses import JSON
from detcompile.serving.service import Service

PAGE = Path(__file__).with_name("index.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
MOST_ROWS = 256
RETRY_SECONDS = 20


class Model(msgspec.Struct, kw_only=True):
    """What the page needs to send requests to the model."""

    name: str
    fingerprint: str
    max_context: int
    vocab_size: int
    block_size: int
    token_budget: int  # maximum tokens of a step
    has_tokenizer: bool
    has_template: bool
    default_params: dict[str, Any]


class EngineState(msgspec.Struct, kw_only=True):
    """One engine: statistics, recent steps, and the users of its KV cache.

    Attributes:
        holdings: KV blocks by request; those of other API keys are summed under "".
    """

    ready: bool
    failure: str | None
    statistics: Statistics
    steps: list[Step]
    holdings: list[Holding]


class State(msgspec.Struct, kw_only=True):
    """The server's state.

    Attributes:
        demo: the page may kill engines.
        status: "starting", "ready", "recovering" (no engine serves), "draining" or "failed".
        model: None before the first engine was ready.
        num_open: number of open requests; ``requests`` may have fewer.
        latencies: counts per bucket; ``buckets`` has the upper bounds in seconds, and the last count is above them.
    """

    version: str
    demo: bool
    status: str
    model: Model | None
    receipts: str
    engines: list[EngineState]
    num_open: int
    requests: list[Row]
    buckets: tuple[float, ...]
    latencies: dict[str, list[int]]
    num_restarts: int
    num_resumed: int
    losses: list[EngineFailure]


class KillRequest(msgspec.Struct):
    """Kill the engine that serves the client's answer of this id.

    Without an id, or if no engine does, the busiest one.
    """

    id: str | None = None


@functools.cache
def page() -> Response:
    """Return the page.

    Its policy allows its inline script and style by digest, connections to this server, and nothing else: no injected
    scripts, forms or frames.
    """
    text = PAGE.read_text()
    digests = {kind: _digest(body) for kind, body in INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for"
        " 'script'; trusted-types 'none'"
    )
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, media_type="text/html", headers=headers)


def state_of(service: Service, version: str, owner: str, *, demo: bool) -> State:
    """Return the current state, as shown to the owner of an API key."""
    fleet = service.fleet
    return State(
        version=version,
        demo=demo,
        status=_status(service),
        model=_model(service),
        receipts=service.receipts.level,
        engines=[_engine(link, owner) for link in fleet.links],
        num_open=len(service.open),
        requests=_rows(service, owner),
        buckets=SECONDS,
        latencies=service.metrics.latencies(),
        num_restarts=fleet.num_restarts,
        num_resumed=fleet.num_resumed,
        losses=list(fleet.losses),
    )


async def kill_engine(service: Service, request: KillRequest, call: Call) -> Response:
    """Send SIGKILL to a local engine process; return its index in the fleet and its process id.

    Raises:
        HTTPError: 503 if no local engine serves; 429 if another lost engine would end the server.
    """
    service.require_engine()
    fleet = service.fleet
    if fleet.restarts_left <= 0:
        message = "no restarts are left for this minute (--max-restarts): wait"
        raise HTTPError(429, message, retry_after=RETRY_SECONDS)
    candidates = [link for link in fleet.links if link.ready and link.pid is not None]
    if not candidates:
        raise HTTPError(503, "the engines run on other machines: kill one there", code="unavailable")
    wanted = (call.owner, request.id)
    serving = {answer.engine for answer in service.open.values() if (answer.owner, answer.name) == wanted}
    link = max(candidates, key=lambda link: (fleet.links.index(link) in serving, len(link.answers)))
    content = {"engine": fleet.links.index(link), "pid": link.pid}
    link.kill()
    return Response(msgspec.json.encode(content), media_type=JSON)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _rows(service: Service, owner: str) -> list[Row]:
    rows = service.history.rows(service.open.values(), MOST_ROWS, owner)
    for row in rows:
        row.has_receipt = service.receipts.find(owner, row.name) is not None
    return rows


def _status(service: Service) -> str:
    if service.fleet.failure is not None:
        return "failed"
    if service.draining:
        return "draining"
    if not service.serves:
        return "starting"
    return "ready" if service.fleet.ready else "recovering"


def _model(service: Service) -> Model | None:
    if not service.serves:
        return None
    hello = service.hello
    return Model(
        name=service.name,
        fingerprint=hello.fingerprint,
        max_context=hello.max_context,
        vocab_size=hello.vocab_size,
        block_size=hello.block_size,
        token_budget=hello.token_budget,
        has_tokenizer=service.texts.present,
        has_template=service.template is not None,
        default_params=hello.default_params,
    )


def _engine(link: EngineLink, owner: str) -> EngineState:
    shown, hidden = [], 0
    for holding in link.holdings:
        answer = link.answers.get(holding.request_id)
        if (answer.owner if answer is not None else "") == owner:
            shown.append(Holding(holding.request_id.partition("-")[0], holding.num_blocks))
        else:
            hidden += holding.num_blocks
    holdings = [*shown, Holding("", hidden)] if hidden else shown
    return EngineState(
        ready=link.ready,
        failure=None if link.failure is None else str(link.failure),
        statistics=link.statistics,
        steps=list(link.steps),
        holdings=holdings,
    )
