"""POST /v1/embeddings: float32 vectors, as numbers or base64."""

import base64
from array import array
from typing import Any

from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.parameters import prompts_of
from detcompile.serving.pooling.reply import Row, facts_of, pooled, require_prompts
from detcompile.serving.pooling.schema import EmbeddingRequest
from detcompile.serving.service import Service

__all__ = ["embed"]


async def embed(service: Service, request: EmbeddingRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the tokenizer cannot read the text.
    """
    facts = facts_of(service, request, "embed")
    if request.dimensions not in (None, facts.num_columns):
        message = f"dimensions {request.dimensions} is not supported: the embeddings have {facts.num_columns}"
        raise HTTPError(400, message, param="dimensions")
    special = request.add_special_tokens is not False
    prompts = await service.texts.ids_of(prompts_of(request.input, "input"), special, param="input", owner=call.owner)
    require_prompts(service, prompts, "input")
    write = _base64 if request.encoding_format == "base64" else list

    def result(rows: list[Row]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": write(row)} for index, row in enumerate(rows)]
        return {"object": "list", "data": data}

    normalize = request.normalize is not False
    return pooled(service, call, prompts, result, prefix="embd-", pooling=request.pooling, normalize=normalize)


def _base64(row: Row) -> str:
    return base64.b64encode(array("f", row).tobytes()).decode()
