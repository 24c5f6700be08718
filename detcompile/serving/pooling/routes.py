"""POST /v1/embeddings, /classify, /v1/score and /v1/rerank: vectors and classes of texts, and scores of pairs.

Sigmoid, softmax and cosine are computed in float64 from the model's values; with ``use_activation: false`` the values
are returned as they are. Request fields that OpenAI does not have are vLLM's.
"""

import asyncio
import base64
import math
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.responses import Response

from detcompile.serving.engines.protocol import PoolingFacts
from detcompile.serving.http_errors import HTTPError, too_long
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import PoolingFields, require_served
from detcompile.serving.openai.parameters import prompts_of
from detcompile.serving.openai.schema import TokenId
from detcompile.serving.responses import Whole
from detcompile.serving.service import Service

TYPED_PAIRS = "this model needs token_type_ids for pairs, which are not supported"
Input = str | list[str | TokenId | list[TokenId]]
MAX_PROMPTS = 2048
Row = Sequence[float]  # float32


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/embeddings. ``pooling`` is as in CompiledEmbedder.embed."""

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    pooling: Literal["last", "first", "mean"] | None = None
    add_special_tokens: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """Body of POST /classify."""

    input: Input
    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/score: texts paired one to one, or one text paired with many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    use_activation: bool | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/rerank: documents ordered by relevance to a query; ``top_n`` 0 returns all."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] = 0
    use_activation: bool | None = None


async def embed(service: Service, request: EmbeddingRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    facts = _facts_of(service, request, "embed")
    if request.dimensions not in (None, facts.num_columns):
        message = f"dimensions {request.dimensions} is not supported: the embeddings have {facts.num_columns}"
        raise HTTPError(400, message, param="dimensions")
    prompts = await _prompts(service, request, call.owner)
    write = _base64 if request.encoding_format == "base64" else list

    def result(rows: list[Row]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": write(row)} for index, row in enumerate(rows)]
        return {"object": "list", "data": data}

    normalize = request.normalize is not False
    return _pooled(service, call, prompts, result, prefix="embd-", pooling=request.pooling, normalize=normalize)


async def classify(service: Service, request: ClassifyRequest, call: Call) -> Response:
    """Answer a classification request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    facts = _facts_of(service, request, "classify")
    prompts = await _prompts(service, request, call.owner)

    def result(rows: list[Row]) -> dict[str, Any]:
        data = [_classes(index, row, facts, request.use_activation is not False) for index, row in enumerate(rows)]
        return {"object": "list", "data": data}

    return _pooled(service, call, prompts, result, prefix="classify-")


async def score(service: Service, request: ScoreRequest, call: Call) -> Response:
    """Answer a request for scores of pairs.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    facts = _facts_of(service, request, "classify", "embed")
    first, second = ([text] if isinstance(text, str) else text for text in (request.text_1, request.text_2))
    if len(first) != len(second) and len(first) != 1:
        raise HTTPError(400, f"text_1 has {len(first)} texts and text_2 {len(second)}", param="text_1")

    def result(scores: list[float]) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return {"object": "list", "data": data}

    return await _scored(service, call, facts, first, second, request.use_activation is not False, result, "text_2")


async def rerank(service: Service, request: RerankRequest, call: Call) -> Response:
    """Answer a request for the order of documents; equal scores keep the documents' order.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    facts = _facts_of(service, request, "classify", "embed")

    def result(scores: list[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "document": {"text": request.documents[index]}, "relevance_score": scores[index]}
            for index in order[: request.top_n or None]
        ]
        return {"results": results}

    activates = request.use_activation is not False
    return await _scored(service, call, facts, [request.query], request.documents, activates, result, "documents")


async def _scored(
    service: Service,
    call: Call,
    facts: PoolingFacts,
    first: Sequence[str],
    second: Sequence[str],
    activates: bool,
    result: Any,
    param: str,
) -> Response:
    _require_count(len(second), param)  # before they are tokenized
    if facts.task == "embed":
        prompts = await service.texts.ids_of((*first, *second), param=param, owner=call.owner)
        _require_prompts(service, prompts, param)
        return _pooled(service, call, prompts, lambda rows: result(_cosines(rows, len(first))), prefix="score-")
    if len(facts.labels) != 1:
        message = f"scores need a model with one label, but this one has {len(facts.labels)}: use POST /classify"
        raise HTTPError(400, message, code="unsupported_task")
    prompts = []
    for index, right in enumerate(second):
        left = first[index if len(first) > 1 else 0]
        ids, types = await service.texts.encode_pair(left, right, param=param, owner=call.owner)
        if facts.reads_token_types and any(types):
            raise HTTPError(400, TYPED_PAIRS, code="unsupported_task")
        prompts.append(ids)
    _require_prompts(service, prompts, param)
    activation = _sigmoid if activates else float
    return _pooled(service, call, prompts, lambda rows: result([activation(row[0]) for row in rows]), prefix="score-")


def _base64(row: Row) -> str:
    return base64.b64encode(array("f", row).tobytes()).decode()


def _cosines(rows: list[Row], num_first: int) -> list[float]:
    """Return the cosine similarity of each document with its query, or with the single query. Rows are unit vectors."""
    first, second = rows[:num_first], rows[num_first:]
    pairs = zip(first * len(second) if num_first == 1 else first, second)
    return [math.fsum(x * y for x, y in zip(one, other)) for one, other in pairs]  # products of float32 are exact


def _classes(index: int, row: Row, facts: PoolingFacts, activates: bool) -> dict[str, Any]:
    values = list(row)
    if activates:
        values = [_sigmoid(value) for value in row] if facts.each_alone else _softmax(row)
    label = facts.labels[values.index(max(values))]
    return {"index": index, "label": label, "probs": values, "num_classes": len(values)}


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + _exp(-value))
    return _exp(value) / (1 + _exp(value))


def _exp(x: float) -> float:
    """Return the rounded exp: that of the C library differs between machines."""
    return float(_DECIMALS.exp(Decimal(x)))


# A thread's context, or the default that others copy, may have been changed.
_DECIMALS = Context(prec=28, rounding=ROUND_HALF_EVEN, Emin=-999999, Emax=999999, capitals=1, clamp=0, traps=[])


def _softmax(row: Row) -> list[float]:
    top = max(row)
    parts = [_exp(value - top) for value in row]
    return [part / math.fsum(parts) for part in parts]


def _facts_of(service: Service, request: Any, *tasks: str) -> PoolingFacts:
    """Return the pooling facts of a model that does one of these tasks.

    Raises:
        HTTPError: another model or task, or a field that is not supported.
    """
    service.require_ready()
    service.require_model(request.model)
    facts = service.require_pooling(*tasks)
    require_served(request)
    return facts


def _require_count(count: int, param: str) -> None:
    """Raise HTTPError for no texts or too many."""
    if not 1 <= count <= MAX_PROMPTS:
        raise HTTPError(400, f"{param} has {count} texts: give 1 to {MAX_PROMPTS}", param=param)


async def _prompts(service: Service, request: EmbeddingRequest | ClassifyRequest, owner: str) -> list[list[int]]:
    """Return the token ids of a request's input."""
    special = request.add_special_tokens is not False
    prompts = await service.texts.ids_of(prompts_of(request.input, "input"), special, param="input", owner=owner)
    _require_prompts(service, prompts, "input")
    return prompts


def _require_prompts(service: Service, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Raise HTTPError for prompts that the model cannot take."""
    hello = service.hello
    _require_count(len(prompts), param)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise HTTPError(400, f"{param} {index} has no tokens: give at least one", param=param)
        if len(prompt) > hello.max_context:
            raise too_long(f"{len(prompt)} tokens", hello.max_context, param)
        if max(prompt) >= hello.vocab_size:
            message = f"{param} {index} has token {max(prompt)}, but the vocabulary ends at {hello.vocab_size - 1}"
            raise HTTPError(400, message, param=param)


def _pooled(
    service: Service,
    call: Call,
    prompts: Sequence[list[int]],
    result: Callable[[list[Row]], dict[str, Any]],
    *,
    prefix: str,
    pooling: Literal["last", "first", "mean"] | None = None,
    normalize: bool = True,
) -> Response:
    """Run prompts through the model and reply with the result of their rows.

    Args:
        result: builds the reply's fields from one row per prompt.
        prefix: prefix of the reply's id.

    Raises:
        HTTPError: over a limit, or no engine serves.
    """
    task = service.pool(prompts, pooling, call.owner, call.reservation, normalize=normalize)
    task.name = prefix + secrets.token_hex(12)
    num_tokens = sum(map(len, prompts))
    head = {
        "id": task.name,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.hello.fingerprint,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }

    async def whole() -> dict[str, Any]:
        values = memoryview(task.values).cast("f")
        rows: list[Row] = [
            values[start : start + task.num_columns] for start in range(0, len(values), task.num_columns)
        ]
        return head | await asyncio.to_thread(result, rows)

    return Whole([task], call.reservation, {"X-Request-Id": task.name}, whole)
