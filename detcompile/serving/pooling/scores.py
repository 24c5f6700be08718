"""POST /classify, /v1/score and /v1/rerank: classes of texts, and how well two texts fit.

Sigmoids, softmaxes and cosines are taken in float64 of the model's values; ``use_activation`` false gives these as
they are.
"""

import math
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from detcompile.serving.engines.protocol import PoolingFacts
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.parameters import prompts_of
from detcompile.serving.pooling.reply import Row, facts_of, pooled, require_count, require_prompts
from detcompile.serving.pooling.schema import ClassifyRequest, RerankRequest, ScoreRequest
from detcompile.serving.service import Service

__all__ = ["classify", "rerank", "score"]

TYPED_PAIRS = "this model reads pairs by token_type_ids, which are not served"


async def classify(service: Service, asked: ClassifyRequest, call: Call) -> Response:
    """Answer a request for classes.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its text.
    """
    facts = facts_of(service, asked, "classify")
    special = asked.add_special_tokens is not False
    prompts = await service.texts.ids_of(prompts_of(asked.input, "input"), special, param="input", owner=call.owner)
    require_prompts(service, prompts, "input")

    def result(rows: list[Row]) -> dict[str, Any]:
        data = [_classes(index, row, facts, asked.use_activation is not False) for index, row in enumerate(rows)]
        return {"object": "list", "data": data}

    return pooled(service, call, prompts, result, prefix="classify-")


async def score(service: Service, asked: ScoreRequest, call: Call) -> Response:
    """Answer a request for the scores of pairs.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its text.
    """
    facts = facts_of(service, asked, "classify", "embed")
    first, second = ([own] if isinstance(own, str) else own for own in (asked.text_1, asked.text_2))
    if len(first) != len(second) and len(first) != 1:
        raise HTTPError(400, f"text_1 has {len(first)} texts and text_2 {len(second)}", param="text_1")

    def result(scores: list[float]) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": own} for index, own in enumerate(scores)]
        return {"object": "list", "data": data}

    return await _scored(service, call, facts, first, second, asked.use_activation is not False, result, "text_2")


async def rerank(service: Service, asked: RerankRequest, call: Call) -> Response:
    """Answer a request for the order of documents; of equal scores the earlier one comes first.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its text.
    """
    facts = facts_of(service, asked, "classify", "embed")

    def result(scores: list[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        found = [
            {"index": index, "document": {"text": asked.documents[index]}, "relevance_score": scores[index]}
            for index in order[: asked.top_n or None]
        ]
        return {"results": found}

    activates = asked.use_activation is not False
    return await _scored(service, call, facts, [asked.query], asked.documents, activates, result, "documents")


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
    require_count(len(second), param)  # before they are tokenized
    if facts.task == "embed":
        prompts = await service.texts.ids_of((*first, *second), param=param, owner=call.owner)
        require_prompts(service, prompts, param)
        return pooled(service, call, prompts, lambda rows: result(_cosines(rows, len(first))), prefix="score-")
    if len(facts.labels) != 1:
        said = f"scores need a model with one label, and this one has {len(facts.labels)}: POST /classify"
        raise HTTPError(400, said, code="unsupported_task")
    prompts = []
    for index, own in enumerate(second):
        left = first[index if len(first) > 1 else 0]
        ids, types = await service.texts.encode_pair(left, own, param=param, owner=call.owner)
        if facts.reads_token_types and any(types):
            raise HTTPError(400, TYPED_PAIRS, code="unsupported_task")
        prompts.append(ids)
    require_prompts(service, prompts, param)
    found = _sigmoid if activates else float
    return pooled(service, call, prompts, lambda rows: result([found(row[0]) for row in rows]), prefix="score-")


def _cosines(rows: list[Row], num_first: int) -> list[float]:
    """Of each of the rows behind the first ones, with its own of these, or with the only one: rows of length 1."""
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
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def _softmax(row: Row) -> list[float]:
    top = max(row)
    parts = [math.exp(value - top) for value in row]
    return [part / math.fsum(parts) for part in parts]
