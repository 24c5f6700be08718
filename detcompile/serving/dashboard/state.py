"""The server's state at one moment, as the page asks for it several times a second."""

from typing import Any

import msgspec

from detcompile.serving.dashboard.history import Row
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.placement.loss import Loss
from detcompile.serving.engines.protocol import Holding, Statistics, Step
from detcompile.serving.metrics import SECONDS
from detcompile.serving.service import Service

__all__ = ["state_of"]

MOST_ROWS = 256


class Model(msgspec.Struct, kw_only=True):
    """What the page has to know of the model to ask for answers of it."""

    name: str
    fingerprint: str
    max_context: int
    vocab_size: int
    block_size: int
    token_budget: int  # tokens that a step computes at most
    has_tokenizer: bool
    has_template: bool
    default_params: dict[str, Any]


class EngineState(msgspec.Struct, kw_only=True):
    """One engine: its counts, its newest steps, and who has its KV cache.

    Attributes:
        holdings: blocks by the numbers of requests; of all other API keys' together, under "".
    """

    ready: bool
    failure: str | None
    statistics: Statistics
    steps: list[Step]
    holdings: list[Holding]


class State(msgspec.Struct, kw_only=True):
    """All of it.

    Attributes:
        demo: whether the page may kill engines.
        status: "starting", "ready", "recovering" while no engine serves, "draining" or "failed".
        model: None before the first engine was ready.
        num_open: requests that are open, also those beyond the rows.
        latencies: counts for each of the ``buckets``, whose bounds are in seconds, and above the last.
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
    losses: list[Loss]


def state_of(service: Service, version: str, owner: str, *, demo: bool) -> State:
    """The state now, as it is told to the owner of an API key."""
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
    for held in link.holdings:
        answer = link.answers.get(held.request_id)
        if (answer.owner if answer is not None else "") == owner:
            shown.append(Holding(held.request_id.partition("-")[0], held.num_blocks))
        else:
            hidden += held.num_blocks
    holdings = [*shown, Holding("", hidden)] if hidden else shown
    return EngineState(
        ready=link.ready,
        failure=None if link.failure is None else str(link.failure),
        statistics=link.statistics,
        steps=list(link.steps),
        holdings=holdings,
    )
